"""The contents of an ONNX model, and the command that builds an engine from it, or the reason why none can be built."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpu_runtime.errors import ModelError, bounded
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.summaries.describe import ModelInfo, describe
from gpu_runtime.fusion import fuse
from gpu_runtime.lowering import lower
from gpu_runtime.text import first_of, listed, printable, several, size_text

MOST_SHOWN = 100  # kinds of operators, and nodes without a kernel, that the text lists; JSON lists all


@bounded
def model_info(path: str | os.PathLike) -> ModelInfo:
    """Read an ONNX model, try all stages of a build before planning, and return its contents, with the problem that prevents an
    engine, if any.

    Raises ModelError only if the file is not an ONNX model.
    """
    info = describe(Path(path))
    layers, problem = _tried(Path(path), info.shapes)
    return replace(info, layers=layers, problem=problem)


def _tried(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Returns (the number of layers of the lowered and fused network, ""), or (0, the reason why the model cannot be lowered).

    `shapes`: input -> shape, for inputs with dynamic sizes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on an open batch, which the text shows
            return len(fuse.fuse(lower.lower(importer.read(path, shapes=shapes))).ops), ""
    except ModelError as e:
        return 0, str(e).removeprefix(f"{path}: ").removeprefix(f"{path.stem}: ")


def text(info: ModelInfo) -> str:
    """Returns the text that `gpu-runtime inspect MODEL` prints."""
    made = f", made by {info.producer}" if info.producer else ""
    opsets = ", ".join(f"{'opset' if d == 'ai.onnx' else d} {v}" for d, v in info.opsets.items())
    count = f"{info.weights / 1e6:.2f} M" if info.weights >= 100_000 else str(info.weights)
    weights = f"{count} values ({', '.join(info.weight_types)}) in {several(info.initializers, 'initializer')} and constants"
    rows = [
        ("inputs", "; ".join(f"{name}: {dtype} {shape}" for name, dtype, shape in info.inputs)),
        ("outputs", "; ".join(f"{name}: {dtype} {shape}" for name, dtype, shape in info.outputs)),
        ("nodes", f"{sum(info.operators.values())}: {first_of([f'{n} {op}' for op, n in info.operators.items()], MOST_SHOWN)}"),
        ("weights", weights if info.weights else "none"),
        ("sparsity", info.sparsity),
    ]
    if info.unsupported:
        kinds = {node.partition(" ")[0]: node for node in info.unsupported[::-1]}  # operator -> its first node
        nodes = dict.fromkeys([*reversed(kinds.values()), *info.unsupported])
        rows.append(("missing", f"{len(info.unsupported)} nodes have no kernel here: {first_of(list(nodes), MOST_SHOWN)}"))
    if info.problem:
        first, *more = info.problem.splitlines()
        rows += [("build", f"cannot be built: {first}"), *(("", line) for line in more)]
    else:
        chosen = "; choose its dynamic sizes with --shapes" if info.shapes else ""
        fused = f"{info.layers} layers once fused; a plan may join or split them"
        rows.append(("build", f"{info.command}  ({fused}{chosen})"))
    head = f"{info.file}: an ONNX model, {opsets}, IR version {info.ir_version}{made}, {size_text(info.nbytes)}"
    return printable("\n".join([head, *listed(rows, 10)]), keep="\n") + "\n"
