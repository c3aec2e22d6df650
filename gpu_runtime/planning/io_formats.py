"""Parses requested formats of network inputs and outputs, `fp16:hwc8`, `chw16`, `fp16:chw16+hwc8`, to Formats by tensor.

Both of trtexec's dialects: with a type (TensorRT 10) or without, when the model's own type stays (TensorRT 11). `+` joins
alternatives of which the planner takes the fastest; a comma separates tensors; a single spec holds for all. A tensor with a
format has its dtype outside too: the arrays that a caller passes have this dtype in ONNX's shape, whatever the layout.
"""

from collections.abc import Mapping, Sequence

from gpu_runtime.network import TensorInfo
from gpu_runtime.text import printable
from tactics.format import LAYOUTS, Format
from tactics.problems.library_problem import EXACT, PIXELS

Spec = str | Sequence[str] | Mapping[str, str]
DTYPES = {"input": ("fp32", "fp16", "uint8"), "output": ("fp32", "fp16")}


def resolve(spec: Spec | None, tensors: Sequence[TensorInfo], kind: str) -> dict[str, tuple[Format, ...]]:
    """Returns the alternatives for each tensor.

    `spec`: None (linear, the model's types), one text with commas, a text per tensor, or texts by name; `kind`: "input" or
    "output". Raises ValueError.
    """
    names = [t.name for t in tensors]
    if not isinstance(spec, str | Sequence | Mapping | None):
        raise TypeError(f"{kind} formats: expected text such as fp16:hwc8, texts by name, or one for each, got {spec!r}")
    if spec is None or isinstance(spec, Mapping):
        unknown = [str(n) for n in spec or () if n not in names]
        if unknown:
            text = f"{kind} formats: the model has no {kind} {', '.join(unknown)}; it has {', '.join(names)}"
            raise ValueError(printable(text))
        texts = [(spec or {}).get(n, "chw") for n in names]
    else:
        texts = spec.split(",") if isinstance(spec, str) else list(spec)
        texts = texts * len(names) if len(texts) == 1 else texts
        if len(texts) != len(names):
            given = f"{kind} formats: {len(texts)} for {len(names)} {kind}{'s' if len(names) > 1 else ''} ({', '.join(names)})"
            raise ValueError(printable(f"{given}: give one for all, or one for each in this order"))
    return {t.name: parse(text, t.dtype, kind) for t, text in zip(tensors, texts, strict=True)}


def parse(text: str, dtype: str, kind: str) -> tuple[Format, ...]:
    """Parses `fp16:hwc8+chw16`; without a type it is the model's, `dtype`. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{kind} formats: expected text such as fp16:hwc8, got {text!r}")
    head, typed, layouts = text.strip().rpartition(":")
    if dtype in EXACT and (kind, dtype) != ("input", PIXELS):
        if (head if typed else dtype, layouts) != (dtype, "chw"):
            raise ValueError(f"{kind} format {text!r}: a tensor of type {dtype} is {dtype}:chw")
        return (Format(dtype, "chw"),)
    dtype = head if typed else dtype
    if dtype not in DTYPES[kind]:
        raise ValueError(f"{kind} format {text!r}: an {kind} may have the type {', '.join(DTYPES[kind])}, not {dtype!r}")
    for layout in layouts.split("+"):
        if layout not in LAYOUTS:
            raise ValueError(f"{kind} format {text!r}: unknown layout {layout!r}, expected one of {', '.join(LAYOUTS)}")
        if dtype == "uint8" and layout not in ("chw", "hwc"):
            raise ValueError(f"{kind} format {text!r}: uint8 comes as chw or hwc, not as {layout}")
    return tuple(dict.fromkeys(Format(dtype, layout) for layout in layouts.split("+")))
