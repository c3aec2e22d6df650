"""Tactics for problems some of whose tensors may be stored as bytes of whole numbers, in addition to those on FP16 tensors."""

from collections.abc import Iterator, Sequence

from cuda_kernels.device import Device
from tactics.families import table
from tactics.format import WHOLE
from tactics.problems.problem import Problem
from tactics.tactic import Only, Tactic


def candidates(problem: Problem, dtypes: Sequence[str], device: Device, only: Only = None) -> Iterator[Tactic]:
    """Yields the tactics of which at least one tensor is bytes.

    `dtypes`: of each input, then of the output; "int8" or "uint8" where the tensor may be that or FP16.
    """
    for family, first in table.OF_WHOLE.get(type(problem), {}).items() if {*dtypes} & {*WHOLE} else ():
        if table.missing(problem, first):
            continue
        more = (device, *filter(None, [only])) if first.tile else ()
        yield from family.byte_candidates(problem, dtypes, *more)
