"""An examination as text, and as plain data for a bug report: without names of folders, of users and of the machine."""

from collections.abc import Mapping
from typing import Any

from cuda_kernels.device import Device
from gpu_runtime.doctor.examine import Examination, Family, Outcome
from gpu_runtime.doctor.host import PACKAGES, Verdict
from gpu_runtime.doctor.measured_rates import Rate
from gpu_runtime.text import first_of, printable, table, wrap
from tactics import codec

MOST_SHOWN = 8  # failures that the text lists; JSON lists all
REPORT = "gpu-runtime doctor --json"
VERSION = 1  # of the JSON document


def text(found: Examination) -> str:
    """Returns the examination as text: tables of checks, families, failures, rates and versions, then the conclusion."""
    checks = table(["check", "verdict", "observed"], [[v.name, v.status, printable(v.words)] for v in found.checks])
    blocks = [wrap(_head(found)), checks, _families(found), _failures(found), _rates(found), _versions(found.versions)]
    blocks.append(wrap(closing(found)))
    return "\n\n".join("\n".join(lines) for lines in blocks if lines) + "\n"


def closing(found: Examination) -> str:
    """Returns the conclusion from the verdicts in a few sentences: passed or not, the names of failed and untested parts, and
    the advice for the next step.
    """
    families, where = found.families, "in the CPU emulator" if found.emulated else f"on this {found.device.title}"
    if found.well and not found.no_gpu:
        kernels = "the kernel family gives" if len(families) == 1 else f"{len(families)} kernel families give"
        return f"Passed: {kernels} correct results {where}."
    if found.no_gpu:
        broken = _names(found, "failed")
        first = f"Not passed without a GPU: {broken} failed. " if broken else ""
        return (
            f"{first}There is no GPU to examine: {found.no_gpu}. All other checks were made; `gpu-runtime doctor --emulate "
            f"{found.device.name}` runs each family of kernels in the CPU emulator."
        )
    parts = [f"{names} {status}" for status in ("failed", "untested") if (names := _names(found, status))]
    words = f"Not passed {where}: {'; '.join(parts)}."
    if found.common_cause:
        words += " Every case failed: probably the GPU, driver or installation is broken, so plans exclude no kernel."
    if found.denied and found.kept:
        words += f" Plans for this GPU exclude: {', '.join(f.what for f in found.denied)}."
    if any(f.of("untested") for f in families):
        words += " Compiled kernels are kept, so another run gets further; --time-limit gives it longer."
    return words + (f" Put the output of `{REPORT}` into a bug report." if _names(found, "failed") else "")


def data(found: Examination) -> dict[str, Any]:
    """Returns the examination as a JSON object, whose "schema" is VERSION."""
    return {
        "schema": VERSION,
        "well": found.well,
        "no_gpu": found.no_gpu,
        "emulated": found.emulated,
        "limit_s": found.limit_s,
        "took_s": round(found.took_s, 1),
        "versions": dict(found.versions),
        "device": codec.to_json(Device, found.device, defaults=True),
        "checks": codec.to_json(tuple[Verdict, ...], found.checks, defaults=True),
        "families": [_family_data(f) for f in found.families],
        "rates": [codec.to_json(Rate, r, defaults=True) | {"share": r.share and round(r.share, 4)} for r in found.rates],
        "left_out_of_plans": [{"what": f.what, "why": f.why} for f in found.denied],
        "written_down": found.kept,
    }


def _family_data(family: Family) -> dict[str, Any]:
    """Returns one entry of the JSON object's "families"."""

    def plain(o: Outcome) -> dict[str, Any]:
        return {"tactic": o.case.tactic.name, "problem": str(o.case.problem), "why": o.why, "process_lost": o.lost}

    return {
        "kernel": family.kernel,
        "verdict": family.status,
        "cases": len(family.outcomes),
        "right": len(family.of("passed")),
        "largest_error": max((o.error_of for o in family.of("passed")), default=None),
        "failed": [plain(o) for o in family.of("failed")],
        "untested": [{"tactic": o.case.tactic.name, "why": o.why} for o in family.of("untested")],
    }


def _head(found: Examination) -> str:
    if found.no_gpu:
        return f"No GPU: {found.no_gpu}"
    return f"{found.device}{', in the CPU emulator: a few cases of each family' if found.emulated else ''}"


def _families(found: Examination) -> list[str]:
    rows = [[f.kernel, f.status, f"{len(f.of('passed'))} of {len(f.outcomes)}", _words(f)] for f in found.families]
    return table(["kernel family", "verdict", "cases right", "observed"], rows, right=(2,))


def _words(family: Family) -> str:
    """Returns a family's observations: its failed cases, the reason of an untested case, the largest error of correct cases."""
    failed, untested = family.of("failed"), family.of("untested")
    parts = []
    if failed:
        lost = sum(o.lost for o in failed)
        parts.append(f"{len(failed)} failed" + (f", {lost} of them crashed their process" if lost else ""))
    if untested:
        parts.append(untested[0].why)
    if right := family.of("passed"):
        parts.append(f"largest error {max(o.error_of for o in right):.1e}")
    return "; ".join(parts)


def _failures(found: Examination) -> list[str]:
    failed = [o for f in found.families for o in f.of("failed")]
    lines = [line for o in failed[:MOST_SHOWN] for line in wrap(printable(f"{o.case.tactic.name}: {o.why}"))]
    return lines + ([f"and {len(failed) - MOST_SHOWN} more; --json lists all"] if len(failed) > MOST_SHOWN else [])


def _rates(found: Examination) -> list[str]:
    def row(r: Rate) -> list[str]:
        measured = printable(r.why) if r.measured is None or r.share is None else f"{r.measured:g}, {r.share:.2f} of it"
        return [r.name, f"{r.table:g} {r.unit}", measured]

    return table(["rate", "table", "measured"], [row(r) for r in found.rates]) if found.rates and not found.no_gpu else []


def _versions(found: Mapping[str, str]) -> list[str]:
    packages = {name for names in PACKAGES for name in names}
    first = [f"{name} {value}" for name, value in found.items() if name not in packages]
    return wrap("; ".join([*first, ", ".join(f"{name} {value}" for name, value in found.items() if name in packages)]))


def _names(found: Examination, status: str) -> str:
    """Returns the names of the first six checks and families with this verdict, and the number of the others, as text."""
    names = [v.name for v in found.checks if v.status == status]
    names += [f.kernel for f in found.families if f.status == status]
    return first_of(names, 6)
