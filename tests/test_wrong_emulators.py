"""Faults in the interpreter itself: programs and tables of others notice each of them."""

import pytest

from tests.independent import packages
from tests.independent.wrong_emulators import NEED_CUDA, WITNESSES, as_it_must_be, emulator, faults, noticed

FAULTS = faults()
QUICK = ["metadata's bytes exchanged", "a group's copies come a wait early", "early loads are not seen"]
MISSING = packages.missing(packages.CUTLASS, *packages.TOOLKIT)


def need(witness: str) -> None:
    if MISSING and witness.startswith(NEED_CUDA):
        pytest.skip(MISSING)


def test_every_fault_can_be_made_and_has_a_witness():
    """The text of the interpreter that a fault changes stands there once, also after the interpreter has changed."""
    for fault in FAULTS.values():
        with emulator(fault) as folder:
            text = (folder / fault.file).read_text()
        assert fault.after in text and fault.before != fault.after
    assert {fault.witness for fault in FAULTS.values()} == set(WITNESSES) and set(QUICK) <= set(FAULTS)


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
def test_a_wrong_emulator_is_noticed(name):
    need(FAULTS[name].witness)
    assert noticed(FAULTS[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in QUICK])
def test_all_wrong_emulators_are_noticed(name):
    need(FAULTS[name].witness)
    assert noticed(FAULTS[name])


@pytest.mark.long
@pytest.mark.parametrize("witness", WITNESSES)
def test_with_the_emulator_as_it_is_all_is_as_it_must_be(witness):
    need(witness)
    with emulator(None) as folder:
        assert as_it_must_be(witness, folder)
