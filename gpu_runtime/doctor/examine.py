"""The doctor's examination: it runs every kernel family on small problems, in a child process that may hang or die, within a
time limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, replace
from typing import Any

from cuda_kernels.compile import CompileError, compile_kernel, virtual
from cuda_kernels.device import Device
from gpu_runtime.doctor import known_failures
from gpu_runtime.doctor.cases import Case, cases
from gpu_runtime.doctor.host import Status, Verdict, caches, compiler, emulator, versions, without_folders
from gpu_runtime.doctor.known_failures import Failure
from gpu_runtime.doctor.measured_rates import RATES, Rate, rate
from gpu_runtime.progress import Listener, Progress, ignore
from tactics import codec as records
from tactics.kernels import KERNELS
from tactics.launches import Binary, binaries
from tactics.measure import timing
from tactics.measure.child import Child, command_of
from tactics.planner.grouping import grouped
from tactics.problems import codec

WORKER = command_of("gpu_runtime.doctor.worker")
START_S, HANG_S = 60.0, 15.0  # time limits of a child's start and answer; four times as long in the emulator
MOST_LOST = 2  # processes that the cases of one kernel may crash; no third process is started for it
COMMON = 3  # failed families; if no case passed either, their shared code is at fault, and no kernel is left out
SHARE = 0.8  # share of the time limit that the cases of families may take, if rates are measured too
OVER = "not reached within the time limit"
NO_CLOCK = "the driver is emulated: its times are no GPU's"
CHECKS = ("CUDA graphs", "dependent launches")
EMULATED_CHECKS = ("dependent launches",)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case. `why`: the reason if it failed or is untested; `error_of`: the relative error if it passed.

    `lost`: the case's process hung, died or lost its CUDA context.
    """

    case: Case
    status: Status
    why: str = ""
    error_of: float = 0.0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """The outcomes of all cases of one kernel."""

    kernel: str
    outcomes: tuple[Outcome, ...]

    def of(self, status: Status) -> tuple[Outcome, ...]:
        return tuple(o for o in self.outcomes if o.status == status)

    @property
    def status(self) -> Status:
        """ "failed" if a case failed, else "untested" if a case is untested, else "passed"."""
        found = {o.status for o in self.outcomes}
        return "failed" if "failed" in found else "untested" if "untested" in found else "passed"

    @property
    def denied(self) -> tuple[Failure, ...]:
        """The parts of the kernel that builds must leave out: each tile with a failed case, or the whole kernel.

        The whole kernel is denied if no tile passed all of its cases, or if its cases lost MOST_LOST processes or more.
        """
        failed = self.of("failed")
        right = {o.case.unit for o in self.of("passed")} - {o.case.unit for o in failed}
        if failed and (not right or sum(o.lost for o in failed) >= MOST_LOST):
            return (Failure(self.kernel, _short(failed[0].why)),)
        return tuple({o.case.unit: Failure(o.case.unit, _short(o.why)) for o in reversed(failed)}.values())


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings of one run of the doctor on a device.

    `no_gpu`: the reason why there is no GPU, "" with a GPU; `emulated`: cases ran in the emulator. `limit_s`: the time
    limit, `took_s`: the time that was used. `denied`: the parts of kernels that builds leave out; `kept`: whether these parts
    were recorded on disk.
    """

    device: Device
    no_gpu: str
    emulated: bool
    versions: Mapping[str, str]
    checks: tuple[Verdict, ...]
    families: tuple[Family, ...]
    rates: tuple[Rate, ...]
    limit_s: float
    took_s: float
    denied: tuple[Failure, ...] = ()
    kept: bool = False

    @property
    def common_cause(self) -> bool:
        """Whether COMMON or more families failed and none has a case that passed: then their shared code must be at fault."""
        return sum(f.status == "failed" for f in self.families) >= COMMON and not any(f.of("passed") for f in self.families)

    @property
    def well(self) -> bool:
        """Whether all tests ran and passed. Rates do not count, because other work and power limits change them."""
        return all(v.status == "passed" for v in self.checks) and all(f.status == "passed" for f in self.families)


def examine(
    planned: Device,
    *,
    emulated: bool = False,
    kernels: Sequence[str] = (),
    limit_s: float = 60.0,
    progress: Listener = ignore,
    child: tuple[Sequence[str], float] = (WORKER, HANG_S),
) -> Examination:
    """Examine this machine's GPU and return the result; failures on a GPU are recorded, so that builds leave these kernels out.

    `planned`: the device that is examined in the emulator if `emulated`, or for which the checks that need no GPU run if the
    machine has no GPU. `kernels`: the names of the kernels to examine; () for all. `limit_s`: seconds for the whole
    examination; cases beyond it are untested. `child`: the command of the process that runs the cases, and the seconds
    without an answer after which it counts as hung. Raises ValueError if a kernel needs another architecture.
    """
    begun, (command, hang_s) = time.monotonic(), child
    patient = _Patient((*command, *([planned.name] if emulated else ())), begun + limit_s, hang_s * (4 if emulated else 1))
    hello = patient.start()
    device = records.from_json(Device, hello["device"]) if "device" in hello else planned
    no_gpu = without_folders(str(hello.get("none") or hello.get("error") or ""))
    if other := [name for name in kernels if KERNELS[name].sm not in ("", device.sm)]:
        patient.close()
        needs, has = KERNELS[other[0]].sm, f"{device.title} is {device.sm}"
        raise ValueError(f"--kernels: {other[0]} needs {needs}, but {has}: leave out {', '.join(other)}")
    todo = [c for c in cases(device, few=emulated) if not kernels or c.kernel in kernels]
    checks = [*_checks_of_the_machine(device, hello, emulated, no_gpu)]
    if not no_gpu:
        checks += [patient.check(name) for name in (EMULATED_CHECKS if emulated else CHECKS)]
    if no_gpu:
        outcomes = [Outcome(c, "untested", "no GPU") for c in todo]
    else:
        outcomes = _run(patient, device, todo, emulated, begun + (1.0 if emulated else SHARE) * limit_s, progress)
    rates = () if emulated else _rates(patient, device, no_gpu, progress)
    patient.close()
    found = Examination(
        device,
        "" if emulated else no_gpu,
        emulated,
        versions() | {k: str(v) for k, v in hello.get("facts", {}).items()},
        tuple(checks),
        tuple(Family(k, tuple(of)) for k, of in grouped((o.case.kernel, o) for o in outcomes).items()),
        rates,
        limit_s,
        time.monotonic() - begun,
    )
    return found if emulated or no_gpu else _noted(found)


def _checks_of_the_machine(device: Device, hello: Mapping[str, Any], emulated: bool, no_gpu: str) -> list[Verdict]:
    """Returns the verdicts of the checks that need no GPU, then the verdict on the GPU.

    `hello`: the child's first line; `no_gpu`: the reason why there is no GPU, "" with a GPU.
    """
    status: Status = "passed" if not no_gpu else "failed" if "error" in hello else "untested"
    built = [emulator(device)] if emulated or no_gpu else []
    gpu = Verdict("emulated device" if emulated else "GPU", status, no_gpu or str(device))
    return [compiler(device), caches(), *built, gpu]


def _rates(patient: _Patient, device: Device, no_gpu: str, progress: Listener) -> tuple[Rate, ...]:
    """Returns each of RATES, measured by the child, or with the reason why it could not be measured."""
    why = "no GPU" if no_gpu else NO_CLOCK if timing.is_emulated() else ""
    found = []
    for name in RATES:
        progress(Progress("rate", name))
        found.append(rate(device, name, None, why) if why else patient.rate(device, name))
    return tuple(found)


def _noted(found: Examination) -> Examination:
    """Records the failures for builds, and returns the examination with `denied` and `kept`.

    With a common cause nothing is recorded, and the examination is returned unchanged.
    """
    if found.common_cause:
        return found
    denied = _denied(found.families, known_failures.of(found.device))
    return replace(found, denied=denied, kept=known_failures.keep(found.device, denied))


def _denied(families: Iterable[Family], before: Iterable[Failure]) -> tuple[Failure, ...]:
    """Returns the present failures, and the failures recorded `before` whose part did not pass this time."""
    families = tuple(families)
    now = {f.what: f for family in families for f in family.denied}
    right = {o.case.unit for family in families for o in family.of("passed")}
    right |= {family.kernel for family in families if family.status == "passed"}
    return tuple({**{f.what: f for f in before if f.what not in right}, **now}.values())


class _Patient:
    """The child process that uses the GPU on behalf of the doctor; it is started again when it hangs or dies.

    No request is sent after `deadline`, a time of time.monotonic() in seconds.
    """

    def __init__(self, command: Sequence[str], deadline: float, hang_s: float):
        self._child, self.deadline, self._hang_s = Child(command), deadline, hang_s
        self.close = self._child.close

    def start(self) -> dict[str, Any]:
        """Starts the child and returns its first line: "device", or "none" with the reason why it has no GPU, or "error"."""
        return self._child.start(max(1.0, min(START_S, self.deadline - time.monotonic())))

    def ask(self, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Sends a request and returns the child's answer; it must end before `deadline`, a time of time.monotonic().

        The answer is {"error": text, "fatal": True} if the child hung or died; {"unasked": reason} if no request was possible,
        if the deadline came before the child counted as hung, or if the machine was at fault.
        """
        if deadline <= time.monotonic():
            return {"unasked": OVER}
        if not self._child.running and "device" not in (hello := self.start()):
            why = hello.get("none") or hello.get("error")
            return {"unasked": OVER if deadline <= time.monotonic() else f"no further process starts: {why}"}
        reply = self._child.ask(request, max(0.0, min(deadline - time.monotonic(), self._hang_s)))
        if reply.get("fatal") and deadline <= time.monotonic():
            return {"unasked": OVER}
        return {"unasked": reply["error"]} if reply.get("passing") else reply

    def check(self, name: str) -> Verdict:
        """Runs one of CHECKS in the child and returns its verdict."""
        begun = time.monotonic()
        status, why = _judged(self.ask({"op": "check", "name": name}, self.deadline))
        return Verdict(name, status, why or f"correct ({time.monotonic() - begun:.1f} s)")

    def rate(self, device: Device, name: str) -> Rate:
        """Measures one of RATES in the child and returns it, without a value if that failed."""
        reply = self.ask({"op": "rate", "name": name}, self.deadline)
        value = reply.get("value")
        return rate(device, name, value if isinstance(value, int | float) else None, _judged(reply)[1])


def _run(
    patient: _Patient, device: Device, todo: Sequence[Case], emulated: bool, deadline: float, progress: Listener
) -> list[Outcome]:
    """Runs the cases in their order and returns an outcome for each; cases not reached by `deadline`, a time of
    time.monotonic(), are untested.
    """
    pool, sm = ThreadPoolExecutor(), virtual(device.sm) if emulated else device.sm
    wanted = dict.fromkeys(item for case in todo for item in binaries(case.problem, case.tactic))
    compiling = {item: pool.submit(compile_kernel, item[0], dict(item[1]), sm) for item in wanted}  # while cases run
    found: list[Outcome] = []
    for done, case in enumerate(todo):
        progress(Progress("examine", case.kernel, done, len(todo)))
        lost = sum(o.lost for o in found if o.case.kernel == case.kernel)
        if lost >= MOST_LOST:
            found.append(Outcome(case, "untested", f"this kernel already crashed {lost} processes"))
            continue
        found.append(_outcome(patient, compiling, case, deadline))
    pool.shutdown(wait=False, cancel_futures=True)
    return found


def _outcome(patient: _Patient, compiling: Mapping[Binary, Future], case: Case, deadline: float) -> Outcome:
    """Waits for the case's kernels in `compiling`, runs the case in the child and returns its outcome."""
    try:
        for item in binaries(case.problem, case.tactic):
            compiling[item].result(max(0.0, deadline - time.monotonic()))
    except Late:
        return Outcome(case, "untested", OVER)
    except CompileError as e:
        return Outcome(case, "failed", _short(f"does not compile: {e}"))
    request = {"op": "case", "problem": codec.to_json(case.problem), "tactic": case.tactic.name}
    reply = patient.ask(request, deadline)
    status, why = _judged(reply)
    return Outcome(case, status, why, reply["error_of"] if status == "passed" else 0.0, lost=bool(reply.get("fatal")))


def _judged(reply: Mapping[str, Any]) -> tuple[Status, str]:
    """Returns (the status that a child's answer stands for, its reason, which is "" for "passed")."""
    if "unasked" in reply:
        return "untested", _short(reply["unasked"])
    if "wrong" in reply:
        return "failed", _short(f"computes wrong results: {reply['wrong']}")
    return ("failed", _short(reply["error"])) if "error" in reply else ("passed", "")


def _short(text: object) -> str:
    """Returns a text as one printable line of at most MOST_TEXT characters without folders, as findings store it."""
    words = " ".join(without_folders(str(text)).split())
    return "".join(c if c.isprintable() else "?" for c in words)[: known_failures.MOST_TEXT]
