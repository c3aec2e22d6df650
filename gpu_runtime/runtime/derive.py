"""What follows from a layer's record: its description and its steps. Building makes them so, loading compares (verify.py).

A layer (runtime.engine describes the record) says what it computes, by which tactic, and where its tensors lie; kernel,
compile-time values, grid, block, shared memory and every argument of its launches follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tactics.format import DTYPES, Format, Strides, num_bytes, strides
from tactics.launches import launches
from tactics.problems import codec
from tactics.problems.convolution import Epilogue
from tactics.problems.library import LibraryProblem
from tactics.problems.problem import (
    BackToBackProblem,
    ConvProblem,
    ConvTransposeProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    Problem,
    SqueezeExciteProblem,
)
from tactics.problems.rows import NormalizeProblem, ReduceProblem
from tactics.step import Call, Launch
from tactics.tactic import Tactic

WORKSPACE, COUNTERS = "workspace", "counters"  # scratch memory, and the arguments that point to it
TYPES = {
    "ConvProblem": "conv", "BackToBackProblem": "conv", "SqueezeExciteProblem": "squeeze_excite",
    "ConvTransposeProblem": "conv_transpose", "PoolProblem": "pool",
    "PointwiseProblem": "pointwise", "MoveProblem": "move",
    "ConcatProblem": "concat", "ReformatProblem": "reformat",
    "ViewProblem": "view", "GatherProblem": "gather", "ResizeProblem": "resize", "MatmulProblem": "matmul",
    "ReduceProblem": "reduce", "NormalizeProblem": "normalize", "LibraryProblem": "library",
}  # fmt: skip
WEIGHTED = (ConvProblem, ConvTransposeProblem, BackToBackProblem, SqueezeExciteProblem)


def description(problem: Problem | None, tactic: Tactic | None) -> dict:
    """What a layer's record says of its problem (None: the same bytes under another name) and tactic (None: no launch)."""
    conv = isinstance(problem, WEIGHTED)
    return {
        "type": TYPES[type(problem).__name__] if tactic else "noop",
        "problem": None if problem is None else codec.to_json(problem),
        "params": params(problem),
        "tactic": tactic.name if tactic else "",
        "sparse": bool(tactic and tactic.sparse),
        "has_sparse_weights": bool(conv and problem.sparse24),
        "bias_count": problem.k if conv and problem.epilogue.bias else 0,
    }


def params(problem: Problem | None) -> dict:
    """A layer's `params`, in the words of layer information."""
    if isinstance(problem, SqueezeExciteProblem):
        return {"pool": params(problem.average), "first": params(problem.first), "then": params(problem.second)}
    if isinstance(problem, BackToBackProblem):  # as the first reads, and its second writes
        return params(problem.first) | {"k": problem.k, **_ends(problem.epilogue), "then": params(problem.second)}
    if isinstance(problem, (ConvProblem, ConvTransposeProblem)):
        end = problem.epilogue
        return {
            "kernel": [problem.r, problem.s], "stride": list(problem.stride), "pad": list(_pad(problem)),
            "dilation": list(problem.dilation), "k": problem.k, "groups": problem.groups, **_ends(end),
            **({"d2s": end.d2s, "d2s_mode": end.d2s_mode} if end.d2s > 1 else {}),
        }  # fmt: skip
    if isinstance(problem, PoolProblem):
        return {
            "kind": problem.kind, "kernel": [problem.r, problem.s], "stride": list(problem.stride),
            "pad": list(problem.pad), "count_pad": problem.count_pad,
        }  # fmt: skip
    if isinstance(problem, (ReduceProblem, NormalizeProblem)):
        return {"kind": problem.kind, "axes": problem.axes}
    if isinstance(problem, PointwiseProblem):
        return {"stages": [str(s) for s in problem.stages], "tensors": list(problem.tensors)}
    if isinstance(problem, LibraryProblem):
        return {"function": problem.function, "attributes": {name: codec.plain(value) for name, value in problem.attributes}}
    return {"kind": problem.kind} if isinstance(problem, MoveProblem) else {}


def _ends(end: Epilogue) -> dict:
    return {"act": str(end.act), "bias": end.bias, "residual": end.residual}


def _pad(p: ConvProblem | ConvTransposeProblem) -> tuple[int, ...]:
    """Top, left, bottom, right. Of a transposed one: what is cut at the end; an output padding counts against it."""
    if isinstance(p, ConvProblem):
        return p.pad
    ends = zip((p.h, p.w), p.stride, (p.r, p.s), p.dilation, p.pad, p.out, strict=True)
    return (*p.pad, *((i - 1) * s + (r - 1) * d + 1 - before - o for i, s, r, d, before, o in ends))


def layer_strides(layer: Mapping) -> tuple[Strides, ...] | None:
    """Of a layer's inputs, then of its output; None where all of them begin at multiples of 16 bytes, with strides of their
    own."""
    tensors = (*layer["inputs"], *layer["outputs"])
    if not any(is_placed(t) for t in tensors):
        return None
    return tuple(strides(Format.parse(w["format"]), tuple(w["shape4"])) for w in (t.get("inside") or t for t in tensors))


def is_placed(tensor: Mapping) -> bool:
    """Whether a tensor lies inside another or begins where no vector may, so that its kernel takes it by its strides."""
    return bool(tensor.get("inside")) or tensor["offset"] % 16 != 0


def block(tensor: Mapping) -> tuple[int, int]:
    """(offset, bytes) of the memory that a tensor's record lies in: its own, or that of the tensor which it is inside."""
    whole = tensor.get("inside") or tensor
    return whole["offset"], num_bytes(Format.parse(whole["format"]), tuple(whole["shape4"]))


def first_byte(whole: Mapping, channel: int) -> int:
    """Offset in the arena of a channel of a tensor with memory of its own."""
    fmt = Format.parse(whole["format"])
    s = strides(fmt, tuple(whole["shape4"]))
    elements = (channel >> s.log2v) * s.block + (channel & ((1 << s.log2v) - 1))
    return whole["offset"] + elements * DTYPES[fmt.dtype].itemsize


def work(problem: Problem, tactic: Tactic, layer: Mapping) -> tuple[Launch | Call, ...]:
    """The launches of a layer."""
    return launches(problem, tactic, layer_strides(layer))


def steps(
    todo: Sequence[Launch | Call], layer: Mapping, index: int, section_at: Mapping[str, int], scratch: Mapping[str, int]
) -> list[dict]:
    """The launches of layer number `index` as steps. `section_at`, `scratch`: offsets of the weight sections, and of
    workspace and counters in the arena."""

    def argument(arg) -> list:
        kind, value = arg
        if kind == "in":
            return ["arena", layer["inputs"][value]["offset"]]
        if kind == "out":
            return ["arena", layer["outputs"][0]["offset"]]
        if kind == "weights":
            return ["weights", section_at[f"{layer['name']}.{value}"]]
        return ["arena", scratch[kind]] if kind in (WORKSPACE, COUNTERS) else [kind, codec.plain(value)]

    return [{**_step(launch, argument), "covers": [index]} for launch in todo]


def _step(launch: Launch | Call, argument) -> dict:
    if isinstance(launch, Call):
        args = [a and [*argument(a[0]), a[1], list(a[2])] for a in (*launch.ins, launch.out)]
        attributes = {name: codec.plain(value) for name, value in launch.attributes}
        return {"function": launch.function, "attributes": attributes, "part": launch.part, "args": args}
    return {
        "kernel": launch.kernel, "values": dict(launch.values), "grid": list(launch.grid),
        "block": list(launch.block), "smem": launch.smem, "args": [argument(a) for a in launch.args],
    }  # fmt: skip


def frees(blocks: Sequence[tuple[int, int, int]], last_step: Sequence[int]) -> list:
    """[[step, [[offset, nbytes], ...]], ...]: what no later step reads, once that step is over.

    `blocks`: (offset, nbytes, the last layer that touches it, from 1; 0 or behind the layers: never free); `last_step`: of
    each layer, the last step up to its end, or -1.
    """
    rows: dict[int, list] = {}
    for offset, nbytes, last in blocks:
        if 1 <= last <= len(last_step) and last_step[last - 1] >= 0:
            rows.setdefault(last_step[last - 1], []).append([offset, nbytes])
    return [[step, sorted(freed)] for step, freed in sorted(rows.items())]
