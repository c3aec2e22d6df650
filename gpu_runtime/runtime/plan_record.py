"""The contents of an engine's file as frozen records: one definition for writing, reading, checking and documenting it.

An EngineRecord is the file's header: its model and device, the origin of its times, the sections of its arena of weights, and
the plans that share them, one for each size of its inputs. A PlanRecord is one network at one size: layers in execution order,
the place of each tensor, and the reason for each layer's choice. Launches are derived from it, see verify.py. tactics.codec
converts records to JSON and back; docs/engine.md lists them. bounds.py checks conditions across fields.

shape4 is NCHW as kernels see it; times are in microseconds, sizes and offsets in bytes, offsets of tensors in the arena of
activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from cuda_kernels.device import Device
from gpu_runtime.runtime.fields import (
    Count,
    Exponent,
    LayerFormat,
    Number,
    Shape4,
    Shown,
    Size,
    Span,
    TacticName,
    TensorSpec,
    Text,
    padded,
)
from gpu_runtime.runtime.findings import Choices, IfPruned, RangeRecord, Solution, SparsityRecord
from gpu_runtime.text import piece_text
from tactics.codec import DERIVED
from tactics.format import DTYPES, num_bytes, strides
from tactics.problems.problem import AnyProblem
from tactics.step import CallArray

FORMAT_VERSION = 5


# ---- where tensors lie


@dataclass(frozen=True, slots=True)
class Container:
    """The tensor with memory of its own inside which another tensor lies, from channel number `channel` on."""

    shape4: Shape4
    format: LayerFormat
    offset: Size
    channel: Size

    @property
    def nbytes(self) -> int:
        return num_bytes(self.format, self.shape4)

    @property
    def first_byte(self) -> int:
        """The byte offset of `channel` in the arena."""
        return self.offset + strides(self.format, self.shape4).channel(self.channel) * DTYPES[self.format.dtype].itemsize


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A layer's input or output and its place in memory: at `offset`, in memory of its own, or `inside` another tensor."""

    name: Text
    shape4: Shape4
    format: LayerFormat
    offset: Size
    inside: Container | None = None

    @property
    def whole(self) -> TensorPlace | Container:
        """The tensor whose memory holds this one: another tensor, or this one."""
        return self.inside or self

    @property
    def nbytes(self) -> int:
        """The bytes that it takes in memory of its own, padding included."""
        return num_bytes(self.format, self.shape4)

    @property
    def is_placed(self) -> bool:
        """Whether it lies inside another tensor or begins off a vector boundary, so that its kernel needs strides."""
        return self.inside is not None or self.offset % 16 != 0


@dataclass(frozen=True, slots=True)
class Bound:
    """An input or output of the network and its place in memory; `shape` is ONNX's, `shape4` the kernels' NCHW."""

    name: Text
    shape: tuple[Count, ...]
    shape4: Shape4
    format: LayerFormat
    offset: Size
    inside: ClassVar[None] = None  # it has memory of its own

    @property
    def whole(self) -> Bound:
        return self

    @property
    def dtype(self) -> str:
        """The type of its elements, such as "fp16", "fp32" or "uint8"."""
        return self.format.dtype

    @property
    def nbytes(self) -> int:
        return num_bytes(self.format, self.shape4)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.shape, DTYPES[self.format.dtype])


# ---- layers and launches


@dataclass(frozen=True, slots=True, repr=False)
class Layer(Shown):
    """One layer of the plan, a reformat or a NoOp included: its problem, its tactic, and the places of its inputs and outputs.

    `nodes`: ONNX nodes; `layer`: the name that sparsity rows use, if it differs from `name`; `problem`: null where it only
    gives a tensor another name; `tactic`: null where nothing is launched; `weights_count`: weights of a convolution; `images`:
    of a batch that runs in pieces, the first image of the layer's piece, and their number.
    """

    name: Text
    problem: AnyProblem | None
    tactic: TacticName | None
    inputs: tuple[TensorPlace, ...]
    outputs: tuple[TensorPlace, ...]
    time_us: Number
    nodes: tuple[Text, ...] = ()
    layer: Text | None = None
    weights_count: Size = 0
    images: Span | None = None

    @property
    def op_name(self) -> str:
        """The name of the layer's op: its own name without the images of its piece."""
        return self.name.removesuffix(piece_text(*self.images)) if self.images else self.name

    @property
    def op_output(self) -> str:
        """The name of the op's output: the layer's output without the images of its piece."""
        name = self.outputs[0].name
        return name.removesuffix(piece_text(*self.images)) if self.images else name

    @property
    def type(self) -> str:
        """The kind of layer: conv, pool, pointwise, move, concat, ..., library or reformat; "noop" if nothing is launched."""
        return (self.problem.TYPE or self.problem.parts[0].TYPE) if self.problem and self.tactic else "noop"

    @property
    def is_sparse(self) -> bool:
        return self.tactic is not None and self.tactic.sparse

    @property
    def tensors(self) -> tuple[TensorPlace, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def tactic_name(self) -> str:
        """The tactic's name; "" without a launch."""
        return self.tactic.name if self.tactic else ""


@dataclass(frozen=True, slots=True)
class LaunchStep:
    """A kernel's launch. An argument is (kind, value): arena or weights with an offset, i32, i64, f32, nonfinite, the address
    of the step's flag, or a map of one of these (cuda_kernels.tensor_maps.Map); `smem`: bytes of dynamic shared memory;
    `covers`: numbers of the layers that it computes.
    """

    kernel: str
    values: Mapping[str, int]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem: int
    args: tuple[tuple[str, Any], ...]
    covers: tuple[int, ...]

    @property
    def key(self) -> tuple[str, tuple[tuple[str, int], ...]]:
        """The compile key: the kernel and its compile-time values."""
        return self.kernel, tuple(sorted(self.values.items()))


@dataclass(frozen=True, slots=True)
class CallStep:
    """A library function's call. `args`: its inputs, None for an absent one, then its output; `part`: the number of this output
    among the function's outputs.
    """

    function: str
    attributes: Mapping[str, object]
    part: int
    args: tuple[CallArray | None, ...]
    covers: tuple[int, ...]


Step = LaunchStep | CallStep


@dataclass(frozen=True, slots=True)
class Memory:
    """The arena of activations. `largest_live_bytes`: the most bytes that are live at once; `workspace`: scratch memory of
    launches; `zeros`: spans to clear before the first run.
    """

    activation_bytes: Size
    largest_live_bytes: Size
    workspace: Span | None = None
    zeros: tuple[Span, ...] = ()


# ---- the file's header


@dataclass(frozen=True, slots=True)
class Model:
    """The ONNX file that the engine was built from; `sha256` is of its bytes."""

    name: Text
    sha256: Text = ""


@dataclass(frozen=True, slots=True)
class Timing:
    """The origin of times; every printed one carries `label`. `sigma`: the error of predictions; `driver`, `policy`: of
    measurements.
    """

    kind: Literal["predicted", "measured"]
    label: Text
    sigma: Number | None = None
    driver: Text | None = None
    policy: Text | None = None

    @property
    def is_predicted(self) -> bool:
        return self.kind == "predicted"


@dataclass(frozen=True, slots=True)
class Producer:
    """Versions of gpu_runtime and of the compiler."""

    version: Text
    nvrtc: Text


@dataclass(frozen=True, slots=True)
class Flags:
    """The options of the build. `shapes`: of dynamic inputs; `workspace`: bytes of scratch memory that a tactic may use;
    `risk`: the least probability that a sparse kernel is faster, where times are predicted; `batch_invariant`: whether all
    plans of a profile have the same tactics; `activations`: bytes that the arena of each plan may take.
    """

    sparsity: Text
    shapes: Mapping[Text, tuple[Exponent, ...]] = field(default_factory=dict)
    workspace: Size | None = None
    risk: Number | None = None
    batch_invariant: bool = False
    activations: Size | None = None

    @property
    def pools(self) -> str:
        """The sizes in the syntax of --memPoolSize."""
        sizes = {"workspace": self.workspace, "activations": self.activations}
        given = {name: nbytes for name, nbytes in sizes.items() if nbytes is not None}
        return ",".join(f"{name}:{f'{n}B' if n % (1 << 20) else n >> 20}" for name, n in given.items())


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of the arena: a layer's packed weights, named LAYER.PART, or a kernel's machine code."""

    name: Text
    kind: Literal["weights", "cubin"]
    offset: Size
    nbytes: Size
    sha256: Text = ""

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True, repr=False)
class PlanRecord(Shown):
    """The plan of a network at one size. `layers` are in execution order; `range`: null where ranges were not examined;
    `renamed`: the section that holds a layer's weights, where it has another name: plans share equal weights. `if_pruned`: null
    where no weights could become 2:4, or sparse kernels were not allowed. `int8`: layer with weights -> why it is in FP16, or
    "" if it is in INT8; empty for a network without quantised tensors.
    """

    # No file has `steps`, in the order of the layers, and `frees`, (step, spans that nothing reads after it): verify.derived
    # makes them from the layers. Both are empty of a plan that was not derived.
    inputs: tuple[Bound, ...]
    outputs: tuple[Bound, ...]
    layers: tuple[Layer, ...]
    memory: Memory
    solution: Solution
    sparsity: SparsityRecord
    range: RangeRecord | None = None
    choices: Choices | None = None
    renamed: Mapping[Text, Text] = field(default_factory=dict)
    if_pruned: IfPruned | None = None
    int8: Mapping[Text, Text] = field(default_factory=dict)
    steps: tuple[Step, ...] = field(default=(), metadata=DERIVED)
    frees: tuple[tuple[int, tuple[Span, ...]], ...] = field(default=(), metadata=DERIVED)


@dataclass(frozen=True, slots=True)
class Profile:
    """The batches that an engine takes at one size of image: from `min` to `max`, shown at `opt`.

    `plans`: the numbers of its plans, by rising batch; `batched`: the inputs and outputs whose first size is the batch, or a
    multiple of it; `exact`: why it takes only the plans' own batches, null where others are padded to the next plan's.
    """

    min: Count
    opt: Count
    max: Count
    plans: tuple[Size, ...]
    batched: tuple[Text, ...]
    exact: Text | None = None


@dataclass(frozen=True, slots=True, repr=False)
class EngineRecord(Shown):
    """The file's header. `source_hash`: of all kernel sources; `plans`: all share the sections of weights; `profiles`: which
    plan takes which sizes, empty for an engine of one size; `shown`: the number of the plan that is shown.
    """

    model: Model
    device: Device
    timing: Timing
    producer: Producer
    source_hash: Text
    flags: Flags
    sections: tuple[Section, ...]
    plans: tuple[PlanRecord, ...]
    profiles: tuple[Profile, ...] = ()
    shown: Size = 0

    @property
    def plan(self) -> PlanRecord:
        """The plan that tools show; it also runs if a caller names no size."""
        return self.plans[self.shown]

    @property
    def profile(self) -> Profile | None:
        """The profile (size of image) of the plan that tools show; None for an engine of one size."""
        return next((p for p in self.profiles if self.shown in p.plans), None)

    @property
    def sparsity(self) -> SparsityRecord:
        return self.plan.sparsity

    @property
    def solution(self) -> Solution:
        return self.plan.solution

    @property
    def if_pruned(self) -> IfPruned | None:
        return self.plan.if_pruned

    @property
    def batch(self) -> int:
        """The first size of the first input of the plan that tools show; 1 if it has none."""
        return next((t.shape[0] for t in self.plan.inputs[:1] if t.shape), 1)

    @property
    def weight_sections(self) -> dict[str, Section]:
        return {s.name: s for s in self.sections if s.kind == "weights"}

    @property
    def num_cubins(self) -> int:
        return sum(s.kind == "cubin" for s in self.sections)

    @property
    def weight_bytes(self) -> int:
        """The bytes up to the end of the last section of weights, padding included."""
        return max((padded(s.end) for s in self.sections if s.kind == "weights"), default=0)


@dataclass(frozen=True, slots=True, repr=False)
class Outlook(Shown):
    """A model planned for a device, without packing or compiling, for comparing plans for several devices and batches.

    `risk`: as in Flags; `shapes`: of the inputs; `if_pruned`: as in PlanRecord.
    """

    model: Model
    device: Device
    timing: Timing
    sparsity: SparsityRecord
    solution: Solution
    risk: Number
    shapes: Mapping[Text, tuple[Count, ...]] = field(default_factory=dict)
    if_pruned: IfPruned | None = None

    @property
    def batch(self) -> int:
        """The first size of the first input; 1 if it has none."""
        return next(iter(self.shapes.values()), (1,))[0]


Explained = EngineRecord | Outlook  # the sources of texts on sparsity


def inner_name(output: str) -> str:
    """Returns the name, inside the plan, of a network's output in the formats that only the plan uses."""
    return f"{output} inside"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EngineData:
    """An engine in memory, for a Context: a record, the packed weights (uint8) and, where embedded, kernel key -> cubin.

    `checked`: gpu_runtime.runtime.verify found, at build or read time, that every step follows from its layer.
    """

    record: EngineRecord
    weights: np.ndarray
    cubins: Mapping[str, bytes] = field(default_factory=dict)
    checked: bool = False

    @property
    def plan(self) -> PlanRecord:
        """The plan that tools show: the layers in execution order, with their tensors' places, launches and reasons."""
        return self.record.plan
