"""Whose fault a failed measurement is: the tactic's for good, or the machine's just then."""

import signal

import pytest

from cuda_kernels.driver import FATAL, DriverError
from tactics.sampling import faults
from tactics.sampling.faults import Fault, Overloaded


def driver_error(code: int) -> DriverError:
    return DriverError("cuLaunchKernelEx", code, "CUDA_ERROR_OF_SOME_NAME")


@pytest.mark.parametrize(
    ("error", "fatal", "passing"),
    [
        (RuntimeError("wrong: relative error 0.5"), False, False),
        (ValueError("CUDA"), False, False),  # a name or a text decides nothing
        (Overloaded("too slow"), False, True),
        (MemoryError(), False, True),
        (driver_error(2), False, True),  # out of memory
        (driver_error(1), False, False),  # an invalid value, as too much shared memory
        (driver_error(701), False, False),  # too many resources requested: the launch's own
        (driver_error(700), True, False),  # an illegal access, first reported by a launch
        (driver_error(719), True, False),
        (driver_error(214), True, True),  # ECC: whoever meets it
        (driver_error(999), True, True),
    ],
)
def test_who_is_to_blame_for_an_error(error, fatal, passing):
    fault = faults.of_error(error)
    assert (fault.fatal, fault.passing) == (fatal, passing)
    assert fault.text == f"{type(error).__name__}: {error}" and faults.of_answer(fault.answer()) == fault


def test_a_lost_context_is_told_from_what_is_raised_while_it_is_handled():
    """A capture ends with an error of its own where a launch within it failed."""
    try:
        try:
            raise driver_error(716)
        finally:
            raise driver_error(901)
    except DriverError as e:
        fault = faults.of_error(e)
    assert fault.fatal and not fault.passing


def test_what_a_kernel_brings_about_is_fatal():
    assert set(FATAL) > faults.OF_A_KERNEL


def test_a_text_is_cut():
    assert len(faults.of_error(RuntimeError("x" * 100_000)).text) == faults.MOST_TEXT


@pytest.mark.parametrize(
    ("code", "passing"),
    [(-signal.SIGKILL, True), (-signal.SIGTERM, True), (-signal.SIGSEGV, False), (-signal.SIGABRT, False), (1, False)],
)
def test_a_process_that_was_ended_from_outside_is_no_tactics_fault(code, passing):
    assert faults.of_end(code, "")[1:] == (True, passing)
    assert faults.of_end(code, "out of luck").text.endswith(": out of luck")


def test_an_answer_without_the_facts_is_the_tactics_fault():
    assert faults.of_answer({"error": "it fell over"}) == Fault("it fell over")
