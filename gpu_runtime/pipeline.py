"""`gr.build` and `gr.plan`. The packages and modules that they take are imported when one is called."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from gpu_runtime.building.options import LEVEL, BuildOptions, Shapes
from gpu_runtime.errors import bounded
from gpu_runtime.progress import Listener, ignore, logged, report
from tactics import predict

if TYPE_CHECKING:
    from cuda_kernels.device import Device
    from gpu_runtime.building.plans import Plans
    from gpu_runtime.engine import Engine
    from gpu_runtime.frontend.files.source import ModelLike
    from gpu_runtime.planning import io_formats
    from tactics.measure.spread import Spread


@bounded
def build(
    model: ModelLike,
    *,
    example_inputs: Sequence[Any] | None = None,
    sparsity: str = "disable",
    device: str | Device | None = None,
    shapes: Shapes | Sequence[Shapes] | None = None,
    batch_invariant: bool = False,
    timing_cache: str | os.PathLike | Literal[False] | None = None,
    only_cached_times: bool = False,
    save_pruned: str | os.PathLike | BinaryIO | None = None,
    embed_cubins: bool = False,
    input_formats: io_formats.Spec | None = None,
    output_formats: io_formats.Spec | None = None,
    exhaustive: bool = False,
    optimization_level: int = LEVEL,
    tuning_time: float | Callable[[], bool] | None = None,
    workspace: int | None = None,
    activations: int | None = None,
    risk: float = predict.RISK,
    calibration: Mapping[str, Any] | None = None,
    precisions: Mapping[str, str] | None = None,
    log: Callable[[str], None] | None = None,
    ray: str | bool | Spread | None = None,
    progress: Listener = ignore,
) -> Engine:
    """Build an engine from an ONNX model: a path, a ModelProto, its bytes, an open file, or a torch.nn.Module.

    `example_inputs`: the arguments of a torch.nn.Module's forward; axes in which `shapes` differ from them stay open.
    `sparsity`: "disable"; "enable" considers 2:4 kernels for weights that have the pattern; "force" first prunes the
    initializers to it (`save_pruned`, a path or a file, gets that model at the end). `device`: None: the GPU at hand, measured,
    else an H200, predicted; a name ("a100"): predicted. `shapes`: of dynamic inputs, or three each (smallest, optimal, largest)
    for a range of batches; a list of such for several sizes of image. `batch_invariant`: one tactic per layer for all batches:
    an image gets the same bits in each. `timing_cache`: file of times to use and extend, False: none; `only_cached_times`:
    measure nothing, ValueError where a time is not in it. `input_formats`, `output_formats`: memory formats, as "fp16:hwc8" for
    all, ["chw", "uint8:hwc"] or by name, see io_formats; without, linear in the model's types. `exhaustive`: time also what
    must take the same time. `optimization_level`: on a GPU, 0 predicts times, 5 measures all, 1 to 4 those that plan and
    explanation need; `tuning_time`: its seconds, or a function that says when they are over; `ray`: the address of a Ray
    cluster whose GPUs time them, True: of this machine's. `workspace`: scratch bytes of a tactic, None: any number;
    `activations`: bytes of tensors and scratch together, for which a batch runs in pieces if need be. `risk`: the least
    P(sparse kernel faster), 0.5 to below 1, with which predicted plans take it. `calibration`: inputs as for `Context.run`:
    tensors near FP16's limit in an FP32 run of them are stored smaller or in FP32, and what rounding harms in a run of the plan
    reads FP32; without, by random values and known risks. `precisions`: name or pattern -> "fp32", "fp32_output", "fp16". `log`
    gets all timings. Raises ModelError, ValueError for an argument, OSError for `save_pruned`, InternalError for bugs.

    >>> build("model.onnx", sparsity="enable", device="a100", shapes={"x": (2, 1, 8, 8)}).sparsity.rows[0].reason
    'channels_not_multiple_of_4'
    """
    options = {name: value for name, value in locals().items() if name != "model"}
    from gpu_runtime.building import build as building

    return building.build(model, BuildOptions(**options))


@bounded
def plan(
    model: ModelLike,
    devices: str | Sequence[str],
    batches: int | Sequence[int] = (),
    *,
    example_inputs: Sequence[Any] | None = None,
    sparsity: str = "enable",
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    risk: float = predict.RISK,
    progress: Listener = ignore,
) -> Plans:
    """The model planned for each of `batches`, a dynamic first size of its inputs, on each named device, in that order. Times
    are predicted, `example_inputs` and `risk` as for `build`; the model is read once, nothing is packed or compiled. Raises as
    `build` does."""
    from gpu_runtime.building import build as building

    options = BuildOptions(
        example_inputs=example_inputs,
        sparsity=sparsity,  # type: ignore[arg-type]  # `checked` refuses others
        shapes=shapes,
        risk=risk,
        progress=logged(progress),
    )
    plans = building.plan(model, devices, batches, options)
    report(plans.__str__)
    return plans
