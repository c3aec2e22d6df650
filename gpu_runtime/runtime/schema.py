"""What an engine's plan must look like, as a table: what reads a plan needs no further checks.

The hashes in a file tell that it is as it was written, not that it was written well: that is told here, before anything is
allocated, compiled or launched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from tactics.format import DTYPES, Format, num_bytes
from tactics.problems import codec
from tactics.problems.library_functions import FUNCTIONS
from tactics.tactic import IN_PLACE, Tactic

LARGEST = 1 << 62  # no size, offset or time is larger
MOST_ELEMENTS = 1 << 31  # of a tensor, padding included
MOST_SHARED = 256 << 10  # bytes of shared memory: no GPU has more


class Check:
    """A test of one value, and what it expects, in words."""

    def __init__(self, words: str, holds: Callable[[object], bool]):
        self.words, self.holds = words, holds


def _whole(low: int, high: int) -> Check:
    return Check(f"a whole number from {low} to {high}", lambda v: type(v) is int and low <= v <= high)


def _format(v) -> bool:
    try:
        return isinstance(v, str) and str(Format.parse(v)) == v
    except ValueError:
        return False


def one_of(*names: str | None) -> Check:
    return Check(f"one of {', '.join(map(str, names))}", lambda v: v in names if isinstance(v, (str, type(None))) else False)


LONGEST = 16_384  # characters of a text: tables and paragraphs are made of them
TEXT = Check(f"a text of at most {LONGEST} characters", lambda v: isinstance(v, str) and len(v) <= LONGEST)
FLAG = Check("true or false", lambda v: isinstance(v, bool))
NUMBER = Check("a number", lambda v: type(v) in (int, float) and abs(v) < LARGEST)
SIZE, COUNT, INDEX = _whole(0, LARGEST), _whole(1, 2**31 - 1), _whole(-(2**31), 2**31 - 1)
LAYER_FORMAT = Check("a format such as fp16:hwc8", _format)
RECORD = Check("a record", lambda v: isinstance(v, dict))
OR_NULL = Check("a record or null", lambda v: isinstance(v, (dict, type(None))))


class Maybe:
    """null, or what `spec` says; in a record the key may be absent too."""

    def __init__(self, spec):
        self.spec = spec


# A spec is a Check; [spec]: a list of any length; (spec, ...): one of that length; {key: spec}: a record with at least these.
SHAPE4 = (COUNT, COUNT, COUNT, COUNT)
PLACE = {"shape4": SHAPE4, "format": LAYER_FORMAT, "offset": SIZE}
TENSOR = PLACE | {"name": TEXT, "inside": Maybe(PLACE | {"channel": SIZE})}
BOUND = PLACE | {"name": TEXT, "shape": [COUNT], "dtype": one_of(*DTYPES), "nbytes": SIZE}
KERNEL_NAME = Check("the name of a kernel", lambda v: isinstance(v, str) and re.fullmatch(r"[a-z][a-z0-9_]*", v) is not None)
VALUES = Check(
    "compile-time values, names in capitals with whole numbers",
    lambda v: isinstance(v, dict) and all(re.fullmatch(r"[A-Z][A-Z0-9_]*", k) and type(i) is int for k, i in v.items()),
)
ARGUMENT = Check(
    "a kernel's argument, [kind, value]",
    lambda v: isinstance(v, list) and len(v) == 2 and (
        (v[0] in ("arena", "weights") and type(v[1]) is int and 0 <= v[1] <= LARGEST)
        or (v[0] == "nonfinite" and v[1] == 0 and type(v[1]) is int)
        or (v[0] == "i32" and type(v[1]) is int and -(2**31) <= v[1] < 2**31)
        or (v[0] == "i64" and type(v[1]) is int and abs(v[1]) < 2**63)
        or (v[0] == "f32" and type(v[1]) in (int, float) and abs(v[1]) < 3.5e38)
    ),
)  # fmt: skip
LAUNCH = {
    "kernel": KERNEL_NAME, "values": VALUES, "grid": (COUNT, COUNT, COUNT), "block": (_whole(1, 1024),) * 3,
    "smem": _whole(0, MOST_SHARED), "args": [ARGUMENT], "covers": [SIZE],
}  # fmt: skip
CALL = {
    "function": one_of(*FUNCTIONS), "attributes": RECORD, "part": SIZE, "covers": [SIZE],
    "args": [Maybe((one_of("arena", "weights"), SIZE, one_of(*DTYPES), [SIZE]))],
}  # fmt: skip
LAYER = {
    "name": TEXT, "type": TEXT, "layer": Maybe(TEXT), "nodes": [TEXT], "inputs": [TENSOR], "outputs": [TENSOR],
    "problem": OR_NULL, "params": RECORD, "tactic": TEXT, "time_us": NUMBER, "sparse": FLAG, "has_sparse_weights": FLAG,
    "weights_count": SIZE, "bias_count": SIZE,
}  # fmt: skip
TWO, FOUR = (SIZE, SIZE), (INDEX,) * 4
CONV = {
    "kernel": TWO, "stride": TWO, "dilation": TWO, "pad": FOUR, "k": COUNT, "groups": COUNT, "act": TEXT, "bias": FLAG,
    "residual": FLAG,
}  # fmt: skip
AXES = Check("axes of nchw", lambda v: isinstance(v, str) and set(v) <= set("nchw"))
PARAMS = {  # a layer's type -> what its params must hold
    "conv": CONV, "conv_transpose": CONV,
    "pool": {"kind": one_of("max", "avg"), "kernel": TWO, "stride": TWO, "pad": FOUR},
    "pointwise": {"stages": Maybe([TEXT])},
    "reduce": {"kind": TEXT, "axes": AXES}, "normalize": {"kind": TEXT, "axes": Maybe(AXES)},
    "library": {"function": TEXT, "attributes": RECORD},
}  # fmt: skip
CHOICE = {"tactic": TEXT, "in": LAYER_FORMAT, "out": LAYER_FORMAT, "us": NUMBER}
BEST = CHOICE | {"low_us": Maybe(NUMBER), "high_us": Maybe(NUMBER), "bound": Maybe(TEXT)}
OTHER = CHOICE | dict.fromkeys(("total_us", "cost_us", "kernel_us", "reformat_us", "around_us"), NUMBER)
TIME = Check("a positive number", lambda v: type(v) in (int, float) and 0 < v < LARGEST)
FLOOR = {"bound": one_of("mma", "dram", "l2", "launch"), "dense_us": TIME, "sparse_us": TIME}
FLOOR |= dict.fromkeys(("mma_us", "dram_us", "l2_us", "launch_us"), NUMBER)
ROW = {
    "layer": TEXT, "op": TEXT, "verdict": one_of("sparse", "dense", "not_eligible"), "reason": TEXT, "detail": Maybe(TEXT),
    "sentence": Maybe(TEXT), "c": COUNT, "k": COUNT, "groups": COUNT, "kernel": (COUNT, COUNT), "pattern_groups": Maybe(SIZE),
    "pattern_share": Maybe(NUMBER), "first_violation": Maybe((SIZE,) * 4), "lost_energy": Maybe(NUMBER),
    "stored_share": Maybe(NUMBER), "if_sparse": Maybe(BEST | {"dense_us": NUMBER}),
    "us": Maybe(NUMBER), "best_dense": Maybe(BEST), "best_sparse": Maybe(BEST), "other": Maybe(OTHER),
    "other_cost_us": Maybe(NUMBER), "flip_speedup": Maybe(NUMBER), "p_sparse_faster": Maybe(NUMBER),
    "floor": Maybe(FLOOR),
}  # fmt: skip
ARCHITECTURE = Check("an architecture such as sm_90a", lambda v: re.fullmatch(r"sm_\d+[af]?", str(v)) is not None)
SUMMARY = dict.fromkeys(("layers", "eligible", "picked", "total_us", "all_dense_us", "saved_us", "ceiling_us"), Maybe(NUMBER))
RANGES = [(SIZE, SIZE)]
NAMED = [(TEXT, TEXT)]
ERROR = (TEXT, Maybe(NUMBER), NUMBER)
COMPARED = {
    "skipped": Maybe(TEXT), "layers": Maybe(SIZE), "worst": Maybe(ERROR), "outputs": Maybe([ERROR]), "far": Maybe([TEXT]),
    "rounds": Maybe(SIZE), "moved": Maybe([TEXT]),
}  # fmt: skip
RANGE = {
    "source": TEXT, "high": [(TEXT, Maybe(Check("an FP32 number", lambda v: type(v) in (int, float) and abs(v) < 3.5e38)))],
    "exponents": Check("powers of two by tensor", lambda v: isinstance(v, dict) and all(type(e) is int for e in v.values())),
    "single": Maybe(NAMED), "compared": Maybe(COMPARED),
}  # fmt: skip
FLAGS = Check(
    "flags, texts and numbers by name, or lists of whole numbers by name",
    lambda v: isinstance(v, dict) and all(
        isinstance(f, (str, int, float, type(None))) or (isinstance(f, dict) and all(
            isinstance(dims, list) and all(type(d) is int for d in dims) for dims in f.values()))
        for f in v.values()
    ),
)  # fmt: skip
CHOICES = {
    "tensors": [{"name": TEXT, "shape4": SHAPE4, "keys": [TEXT], "reformat_ps": [[Maybe(SIZE)]]}], "tactics": [TEXT],
    "choices": [{"op": TEXT, "layer": TEXT, "layers": [TEXT], "in": [SIZE], "out": SIZE, "when": [(TEXT, TEXT)],
                 "entries": [[SIZE]]}],
    "groups": [(TEXT, [TEXT])], "pinned": RECORD, "inputs": [TEXT], "outputs": [TEXT],
}  # fmt: skip
PLAN = {
    "range": Maybe(RANGE),
    "device": {"title": TEXT, "sm": ARCHITECTURE},
    "timing": {"kind": one_of("predicted", "measured"), "label": TEXT},
    "model": {"name": TEXT, "sha256": TEXT}, "producer": Maybe({"version": Maybe(TEXT), "nvrtc": Maybe(TEXT)}),
    "source_hash": TEXT, "flags": Maybe(FLAGS),
    "inputs": [BOUND], "outputs": [BOUND], "layers": [LAYER], "steps": [RECORD],
    "sparsity": {
        "mode": one_of("disable", "enable", "force"), "eligible": [TEXT], "picked": [TEXT], "rows": [ROW],
        "pruned": Maybe([TEXT]), "pruned_energy": Maybe(NUMBER), "not_pruned": Maybe([(TEXT, TEXT)]), "summary": Maybe(SUMMARY),
    },
    "plan": {
        "total_us": NUMBER, "status": Maybe(TEXT), "method": Maybe(TEXT), "width": Maybe(SIZE), "gap": Maybe(NUMBER),
        "measured_us": Maybe(NUMBER),
        "rivals": Maybe({
            "all_dense_us": Maybe(NUMBER), "best_single_format": Maybe({"format": TEXT, "us": NUMBER}),
            "greedy_us": Maybe(NUMBER),
        }),
    },
    "memory": {
        "activation_bytes": SIZE, "largest_live_bytes": Maybe(SIZE), "weight_bytes": SIZE, "workspace": Maybe((SIZE, SIZE)),
        "zeros": Maybe(RANGES), "frees": Maybe([(SIZE, RANGES)]),
    },
    "sections": [RECORD], "choices": Maybe(CHOICES),
}  # fmt: skip


def fault(plan: Mapping, weight_bytes: int) -> str | None:
    """What is wrong with a plan whose weights take that many bytes, or None: "layers[3].type: expected a text, got 7"."""
    return (
        _fault(plan, PLAN, "")
        or next(filter(None, (_layer_fault(v, plan, f"layers[{i}]") for i, v in enumerate(plan["layers"]))), None)
        or next(filter(None, (_step_fault(s, plan, weight_bytes, f"steps[{i}]") for i, s in enumerate(plan["steps"]))), None)
        or _memory_fault(plan)
        or (_choices_fault(plan["choices"]) if plan.get("choices") else None)
    )


def _fault(value, spec, at: str) -> str | None:
    if isinstance(spec, Maybe):
        return None if value is None else _fault(value, spec.spec, at)
    if isinstance(spec, Check):
        return None if spec.holds(value) else f"{at}: expected {spec.words}, got {str(value)[:60]}"
    if isinstance(spec, dict):
        if not isinstance(value, dict):
            return f"{at}: expected a record, got {str(value)[:60]}"
        for key, inner in spec.items():
            if key not in value and not isinstance(inner, Maybe):
                return f"{at}: has no '{key}'" if at else f"has no '{key}'"
        parts = ((value.get(key), inner, f"{at}.{key}" if at else key) for key, inner in spec.items())
    else:
        if not isinstance(value, list) or (isinstance(spec, tuple) and len(value) != len(spec)):
            return f"{at}: expected a list{f' of {len(spec)}' if isinstance(spec, tuple) else ''}, got {str(value)[:60]}"
        specs = spec if isinstance(spec, tuple) else spec * len(value)
        parts = ((v, s, f"{at}[{i}]") for i, (v, s) in enumerate(zip(value, specs, strict=True)))
    return next(filter(None, (_fault(*part) for part in parts)), None)


def _step_fault(step: Mapping, plan: Mapping, weight_bytes: int, at: str) -> str | None:
    found = _fault(step, CALL if "function" in step else LAUNCH, at)
    if found:
        return found
    if bad := [i for i in step["covers"] if i >= len(plan["layers"])]:
        return f"{at}.covers: there is no layer {bad[0]}"
    ends = {"arena": plan["memory"]["activation_bytes"], "weights": weight_bytes}
    for a in step["args"]:
        if a is not None and a[1] > ends.get(a[0], a[1]):
            return f"{at}.args: offset {a[1]} is behind the end of the {a[0]}, {ends[a[0]]}"
    if "kernel" in step and step["block"][0] * step["block"][1] * step["block"][2] > 1024:
        return f"{at}.block: expected at most 1024 threads, got {step['block']}"
    if "function" in step and (not step["args"] or step["args"][-1] is None):
        return f"{at}.args: the last one, the output, is missing"
    return None


def _layer_fault(layer: Mapping, plan: Mapping, at: str) -> str | None:
    try:
        if layer["problem"] is not None:
            codec.from_json(layer["problem"])
    except ValueError as e:
        return f"{at} ({layer['name'][:40]!r}): {e}"
    found = _fault(layer.get("params") or {}, PARAMS.get(layer["type"], {}), f"{at}.params")
    for t in (*layer["inputs"], *layer["outputs"]):
        found = found or _too_large(t, f"{at}: tensor {t['name'][:40]!r}")
        whole = t.get("inside") or t
        found = found or _too_large(whole, at)
        if found:
            return found
        if whole is not t and whole["channel"] + t["shape4"][1] > whole["shape4"][1]:
            return f"{at}: tensor {t['name'][:40]!r} ends behind the one that it lies in"
        end = whole["offset"] + num_bytes(Format.parse(whole["format"]), tuple(whole["shape4"]))
        if end > plan["memory"]["activation_bytes"]:
            return f"{at}: tensor {t['name'][:40]!r} ends at byte {end}, the memory at {plan['memory']['activation_bytes']}"
    return found


def _too_large(place: Mapping, at: str) -> str | None:
    if math.prod(place["shape4"]) <= MOST_ELEMENTS:
        return None
    return f"{at}: expected at most {MOST_ELEMENTS} elements, got {place['shape4']}"


def _choices_fault(stored: Mapping) -> str | None:
    """What in the planner's tables names something that they have not."""
    tensors, tactics = stored["tensors"], stored["tactics"]
    keys = {t["name"]: t["keys"] for t in tensors}
    if len(keys) < len(tensors):
        return "choices.tensors: a name occurs twice"
    for t in tensors:
        if {len(row) for row in t["reformat_ps"]} - {len(t["keys"])} or len(t["reformat_ps"]) != len(t["keys"]):
            return f"choices: the reformats of {t['name'][:40]!r} are no table of {len(t['keys'])} by {len(t['keys'])}"
    for t, key in stored["pinned"].items():
        if key not in keys.get(t, ()):
            return f"choices.pinned: {t[:40]!r} has no format {str(key)[:40]!r}"
    if unknown := {*stored["inputs"], *stored["outputs"]} - set(keys):
        return f"choices: there is no tensor {min(unknown)[:40]!r}"
    if bad := [name for name in tactics if not _is_tactic(name)]:
        return f"choices.tactics: {bad[0][:60]!r} is none"
    for c in stored["choices"]:
        around = [*c["in"], c["out"]]
        if not c["in"] or max(around) >= len(tensors):
            return f"choices: {c['op'][:40]!r} reads or writes a tensor that there is none of"
        limits = (len(tactics), *(len(tensors[i]["keys"]) for i in around), LARGEST)
        for e in c["entries"]:
            if len(e) != len(limits) or any(v >= limit for v, limit in zip(e, limits, strict=True)):
                return f"choices: {c['op'][:40]!r} has an entry that names what there is none of"
    return None


def _is_tactic(name: str) -> bool:
    try:
        return name == IN_PLACE or bool(Tactic.parse(name).ins)
    except ValueError:
        return False


def _memory_fault(plan: Mapping) -> str | None:
    end = plan["memory"]["activation_bytes"]
    for kind in ("inputs", "outputs"):
        for i, t in enumerate(plan[kind]):
            at = f"{kind}[{i}]"
            found = _too_large(t, at)
            if found:
                return found
            need = num_bytes(Format.parse(t["format"]), tuple(t["shape4"]))
            if t["nbytes"] != need or t["offset"] + need > end:
                return f"{at}: expected {need} bytes within {end}, got {t['nbytes']} at offset {t['offset']}"
            if Format.parse(t["format"]).dtype != t["dtype"]:
                return f"{at}: its format {t['format']} is not of its type {t['dtype']}"
            if math.prod(t["shape"]) != math.prod(t["shape4"]):
                return f"{at}: shapes {t['shape']} and {t['shape4']} have different sizes"
    rows = [*(plan["memory"].get("zeros") or []), *(r for _, rs in plan["memory"].get("frees") or [] for r in rs)]
    bad = [r for r in rows if r[0] + r[1] > end]
    return f"memory: expected bytes within {end}, got {bad[0]}" if bad else None

