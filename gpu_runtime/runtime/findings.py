"""Records of an engine's file that are not needed to run it: why each layer runs sparse or dense, the plan's quality, the
tensors beyond FP16's range, and the planner's tables."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gpu_runtime.runtime.fields import (
    Count,
    Exponent,
    LayerFormat,
    LayoutKey,
    Named,
    Number,
    PlannedTactic,
    Shape4,
    Shown,
    Single,
    Size,
    TacticName,
    Text,
    Time,
    Value,
)
from tactics.reason import Reason

Sparsity = Literal["disable", "enable", "force"]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A layer's best kernel of a kind (sparse or dense), in any formats, with its time in microseconds.

    `low_us`, `high_us`: the 20 % and 80 % quantiles of the time, or of the prediction's error; `bound`: its limit, by its
    family's prediction. Not `timed`: its time is an estimate among measured ones, because timing had to end.
    """

    tactic: TacticName
    in_: LayerFormat
    out: LayerFormat
    us: Number
    low_us: Number
    high_us: Number
    bound: Text
    timed: bool = field(default=True, kw_only=True)


@dataclass(frozen=True, slots=True)
class IfSparse(KernelTime):
    """The predicted time of a layer's best sparse kernel if its weights were 2:4; `dense_us`: the time of its best dense
    kernel.
    """

    dense_us: Number


@dataclass(frozen=True, slots=True)
class LibraryKernel:
    """The estimated time of a library's dense kernel for a layer (tactics.peers).

    `error`: the standard deviation of the time's logarithm; `sparse_us`: the library's 2:4 kernel, null if weights are not
    2:4.
    """

    us: Number
    bound: Text
    error: Number
    sparse_us: Number | None = None


@dataclass(frozen=True, slots=True)
class LibraryPlan:
    """Our plan without sparse kernels, with the convolutions at the estimated times of a library (tactics.peers): `us`, which
    lies between `low_us` and `high_us` with a probability of 80 %. `sparse_us`: with its 2:4 kernels where weights have the
    pattern and they are faster; null where no layer has it. `layers`: launches with an estimate; `own`: launches at our own
    time, `own_us` together. `source`: of the library's rates; `timed`: 1 if its products were timed on this device, 0 if the
    rates are by analogy."""

    us: Number
    low_us: Number
    high_us: Number
    sparse_us: Number | None
    layers: Size
    own: Size
    own_us: Number
    source: Text
    timed: Size


@dataclass(frozen=True, slots=True)
class OtherChoice:
    """The changes when a layer is forced the other way.

    `cost_us`, the whole plan's, is the sum of `kernel_us`, the change of the `kernels` that hold its weights (`us` together;
    `tactic`, `in` and `out` are the first one's), `reformat_us`, of all reformats (`reformats` more or fewer), and `around_us`,
    of all other kernels. `premium_us`: the time that --risk adds to its kernels for doubt about sparse ones; no other field
    includes it.
    """

    total_us: Number
    cost_us: Number
    kernel_us: Number
    reformat_us: Number
    around_us: Number
    reformats: Value
    tactic: TacticName
    in_: LayerFormat
    out: LayerFormat
    us: Number
    kernels: Size = 1
    premium_us: Number = 0.0


@dataclass(frozen=True, slots=True)
class Flip:
    """The condition under which the other choice would cost no more: if its kernels for the layer, `us` together, took
    `needed_us`.

    `premium_us`: the time that --risk then adds for doubt about the sparse side, the plan's own kernels or the others.
    """

    us: Time
    needed_us: Time
    premium_us: Number

    @property
    def speedup(self) -> float:
        return self.us / self.needed_us


@dataclass(frozen=True, slots=True)
class Floor:
    """The lower bounds of a layer's time at the device's peak rates (tactics.roofline.floors).

    In microseconds: `mma_us`: tensor cores, `dram_us`, `l2_us`: bytes, `launch_us`: the launch; `bound`: the name of the
    largest of these four; `dense_us` and `sparse_us`: of a dense and of a sparse kernel as a whole.
    """

    mma_us: Number
    dram_us: Number
    l2_us: Number
    launch_us: Number
    bound: Literal["mma", "dram", "l2", "launch"]
    dense_us: Time
    sparse_us: Time


@dataclass(frozen=True, slots=True, repr=False)
class SparsityRow(Shown):
    """One layer with weights: whether it could run 2:4 sparse, whether it does, and the numbers behind it.

    `layers`: the model's nodes with these weights: one, or each of merged siblings, of `branches` that were added, of a
    squeeze-excite; `able`: those of them that are eligible; `apart_cost_us`: the time that separate branches would add to the
    plan; `op`: the operation that runs it; `detail`, `sentence`: more of the reason, in words; c, k, groups, kernel: of the
    convolution. Of its weights as kernels hold them: `pattern_groups`, groups of 4 input channels, `pattern_share` of them that
    fit 2:4, `first_violation`, [k, c, r, s]; as the file has them: `stored_share`, and `lost_energy`, the share of their
    squares that pruning removes, or with mode force removed; `elsewhere`, along what other axis or order they are 2:4. `us`: in
    the plan; `other`: the plan with this layer forced the other way, which costs `other_cost_us`; `flip`: null where no speed
    of that choice's kernels suffices; `p_sparse_faster`: given the error of predictions; `floor`: null where it runs in FP32;
    `library`: null without an estimate of a library's kernel. Where one tactic runs all batches, `other` and `flip` are of the
    plan of this batch alone, and `alone` is its kernel, null where it is the same.
    """

    layer: Text
    layers: tuple[Text, ...]
    op: Text
    verdict: Literal["sparse", "dense", "not_eligible"]
    why: Reason = field(metadata={"inlined": {"code": "reason", "sentence": "detail"}})
    c: Count
    k: Count
    groups: Count
    kernel: tuple[Count, Count]
    sentence: Text | None = None
    pattern_groups: Size | None = None
    pattern_share: Number | None = None
    first_violation: tuple[Size, Size, Size, Size] | None = None
    stored_share: Number | None = None
    lost_energy: Number | None = None
    best_dense: KernelTime | None = None
    best_sparse: KernelTime | None = None
    us: Number | None = None
    if_sparse: IfSparse | None = None
    other: OtherChoice | None = None
    other_cost_us: Number | None = None
    flip: Flip | None = None
    p_sparse_faster: Number | None = None
    floor: Floor | None = None
    branches: bool = False
    apart_cost_us: Number | None = None
    able: tuple[Text, ...] = ()
    library: LibraryKernel | None = None
    alone: KernelTime | None = None
    elsewhere: Text | None = None

    @property
    def reason(self) -> str:
        return self.why.code

    @property
    def detail(self) -> str | None:
        return self.why.sentence


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Shown):
    """Counts of layers, each a node of the model, and totals: the plan's, and the best plan's without sparse tactics.

    `ceiling_us`: the total with every eligible layer's dense kernel at twice its speed, launch and memory not counted. Of
    predictions: `saved_range_us`, the range in which the time saved by all sparse kernels lies with a probability of 80 %
    (tactics/predict.py).
    """

    layers: Size
    eligible: Size
    picked: Size
    total_us: Number
    all_dense_us: Number | None = None
    saved_us: Number | None = None
    ceiling_us: Number | None = None
    saved_range_us: tuple[Number, Number] | None = None


@dataclass(frozen=True, slots=True, repr=False)
class SparsityRecord(Shown):
    """The sparsity of all layers. `eligible`, `picked`: layers, each a node of the model.

    With mode force: `pruned`, initializers, `pruned_energy`, the share of their squares that was removed, and `not_pruned`,
    [initializer, why].
    """

    mode: Sparsity
    eligible: tuple[Text, ...]
    picked: tuple[Text, ...]
    rows: tuple[SparsityRow, ...]
    summary: Summary | None = None
    pruned: tuple[Text, ...] = ()
    pruned_energy: Number | None = None
    not_pruned: tuple[Named, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers with weights, each a node of the model."""
        return tuple(layer for row in self.rows for layer in row.layers)


@dataclass(frozen=True, slots=True)
class SingleFormat:
    """The best plan with one format for all tensors."""

    format: LayerFormat
    us: Number


@dataclass(frozen=True, slots=True, repr=False)
class Rivals(Shown):
    """Totals of other plans: without sparse tactics, with one format everywhere, with each layer's fastest kernel, with a
    library's kernels (null where the network has no convolution with an estimate).

    `own_us`: of this batch alone, where one tactic per layer computes all batches; `whole_us`: of the whole batch in each
    layer, where the plan has pieces of it; `whole_bytes`: the bytes of its activations, where the plan has pieces because they
    may take less.
    """

    all_dense_us: Number | None = None
    best_single_format: SingleFormat | None = None
    greedy_us: Number | None = None
    library: LibraryPlan | None = None
    own_us: Number | None = None
    whole_us: Number | None = None
    whole_bytes: Size | None = None


@dataclass(frozen=True, slots=True)
class Tuned:
    """How many pairs of a problem and a tactic were `timed`, and how many `untimed`, in a plan in which not all were.

    The untimed ones count with bounds, `sigmas` standard deviations below their estimates. `early`: timing had to end before
    all was proven, and estimates stand in for missing times; `missing`: operations of the plan without measured times.
    """

    timed: Size
    untimed: Size
    sigmas: Number
    early: bool = False
    missing: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True)
class Apart:
    """A layer that takes `us` in its place, behind the layer `behind`, and `alone_us` when it is timed alone."""

    layer: Text
    alone_us: Number
    us: Number
    behind: Text


@dataclass(frozen=True, slots=True)
class Replaced:
    """An operation whose tactic `before` was replaced by `after`, after which the whole plan took `after_us` instead of
    `before_us`.

    `swap`: `after` is slower alone, and the reason was not the time of `before` in its place.
    """

    op: Text
    before: Text
    after: Text
    before_us: Number
    after_us: Number
    swap: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Solution(Shown):
    """The planner's result. `status`: proven, or that it is not; `width`: of its elimination order; `gap`: the largest share
    that a better plan could save; `measured_us`: end to end, where measured, with the layers that take another time in their
    places than alone, and the tactics that were replaced for that; `tuned`: null where all is timed, or none.
    """

    total_us: Number
    status: Text
    method: Text
    width: Size | None = None
    gap: Number | None = None
    rivals: Rivals = field(default_factory=Rivals)
    measured_us: Number | None = None
    tuned: Tuned | None = None
    apart: tuple[Apart, ...] = ()
    replaced: tuple[Replaced, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class IfPruned(Shown):
    """The predicted plan of the network with every weight 2:4 that can be: its `sparsity` and `solution`.

    `now_us`: the predicted time of the plan with the weights as they are; `layers`: the layers whose weights would change.
    """

    now_us: Number
    layers: tuple[Text, ...]
    sparsity: SparsityRecord
    solution: Solution


TensorError = tuple[Text, Number | None, Number]


@dataclass(frozen=True, slots=True)
class Compared:
    """The plan's error on a calibration input against FP32, or why the comparison was `skipped`.

    An error is [tensor, relative L2 error or null for infinity, the error of rounding it once]: the `worst` of all `layers`,
    and of the `outputs`. `far`: tensors with large errors; `rounds`: how often layers were put into FP32; `moved`: the tensors
    that then were.
    """

    skipped: Text | None = None
    layers: Size = 0
    worst: TensorError | None = None
    outputs: tuple[TensorError, ...] = ()
    far: tuple[Text, ...] = ()
    rounds: Size = 0
    moved: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class RangeRecord(Shown):
    """The tensors that FP16 cannot hold, as found by `source`: the inputs of a run, or why none took place.

    `high`: [tensor, largest magnitude, or null where FP32 cannot hold it either]; `exponents`: of tensors stored times 2^e;
    `single`: [tensor, why it is FP32]; `stuck`: [tensor, why it cannot be]; `compared`: the plan with FP32 on a calibration
    input; `masked`: tensors in which -infinity is a mask, which a run does not show.
    """

    source: Text
    high: tuple[tuple[Text, Single | None], ...] = ()
    exponents: Mapping[Text, Exponent] = field(default_factory=dict)
    single: tuple[Named, ...] = ()
    stuck: tuple[Named, ...] = ()
    compared: Compared | None = None
    masked: tuple[Text, ...] = ()


# ---- the alternatives that the plan was chosen from


@dataclass(frozen=True, slots=True)
class TensorKeys:
    """A tensor's memory layouts and, behind an "@", places in another tensor; `reformat_ps`: [from][to], null where none."""

    name: Text
    shape4: Shape4
    keys: tuple[LayoutKey, ...]
    reformat_ps: tuple[tuple[Size | None, ...], ...]


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """An operation that the plan may use if, for each group in `when`, its option is taken.

    `in`, `out`: numbers of tensors; an entry is [tactic, key of each input, key of the output, picoseconds, of them premium for
    doubt], all but the last two by number. `bounds`: the numbers of the entries that are not timed, whose times are lower
    bounds. `pruned`: of those that need weights to be pruned to 2:4 first, for which only what-if asks.
    """

    op: Text
    layer: Text
    layers: tuple[Text, ...]
    in_: tuple[Size, ...]
    out: Size
    when: tuple[Named, ...]
    entries: tuple[tuple[Size, ...], ...]
    bounds: tuple[Size, ...] = ()
    pruned: tuple[Size, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Choices(Shown):
    """The planner's tables, from which gpu_runtime.explain.what_if plans again. `groups`: [name, its options]; `pinned`: the
    keys of tensors that must have one; `inputs`, `outputs`: of the network."""

    tensors: tuple[TensorKeys, ...]
    tactics: tuple[PlannedTactic, ...]
    choices: tuple[ChoiceRow, ...]
    groups: tuple[tuple[Text, tuple[Text, ...]], ...]
    pinned: Mapping[Text, LayoutKey]
    inputs: tuple[Text, ...]
    outputs: tuple[Text, ...]
