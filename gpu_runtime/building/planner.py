"""Makes a network's tables for one device, and the best plan from them."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from cuda_kernels.device import Device
from gpu_runtime.assembly import assemble
from gpu_runtime.building.options import DEFAULTS, BuildOptions
from gpu_runtime.errors import ModelError
from gpu_runtime.network import Network
from gpu_runtime.planning import batch_pieces, tables
from gpu_runtime.planning.counterfactuals import launched, quoted
from gpu_runtime.planning.surroundings import half_zeros
from gpu_runtime.progress import Progress
from gpu_runtime.runtime.findings import Apart, IfPruned, RangeRecord, Replaced
from gpu_runtime.text import size_text
from tactics.format import Format
from tactics.measure.timing import Timer
from tactics.planner.plan import Plan, solve


@dataclass(frozen=True, slots=True)
class PlannedNetwork:
    """A network's table of timed tactics, the plan chosen from it, and the ranges of the network's tensors.

    With one plan for all batches, `own` is the fastest plan of this batch alone, and `dense_us` the time of the best plan for
    all batches without sparse kernels. After a run on a GPU: `measured_us`, of the whole plan; `apart`: layers whose time in
    place differs from their time alone; `replaced`: tactics replaced because of that. `whole`: (microseconds of the plan
    without pieces, bytes of its activations), where a limit on these bytes is the reason for pieces. `fitted`: the network
    before rewrites; `if_pruned`: the plan with pruned weights, and `pruned_table` its table, None beside a measured one.
    """

    table: tables.Table
    chosen: Plan
    reached: RangeRecord
    own: Plan | None = None
    dense_us: float | None = None
    measured_us: float | None = None
    apart: tuple[Apart, ...] = ()
    replaced: tuple[Replaced, ...] = ()
    whole: tuple[float, int] | None = None
    fitted: Network | None = None
    if_pruned: IfPruned | None = None
    pruned_table: tables.Table | None = None


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes a network's tables for one target, and the best plan from them.

    Where tactics are timed step by step, it goes on until the plan's tactics, and those that its explanation quotes, are timed.
    `options`: checked; `ends`: the formats that inputs and outputs may have.
    """

    target: Device
    timer: Timer
    options: BuildOptions = DEFAULTS
    ends: Mapping[str, tuple[Format, ...]] = field(default_factory=dict)

    @property
    def risk(self) -> float | None:
        """The least P(sparse kernel faster) of predicted times; None for measured times, which need none."""
        return None if self.target.measured else self.options.risk

    @property
    def may_cut(self) -> bool:
        """Whether batches may run in pieces."""
        return not self.options.batch_invariant

    def __call__(self, network: Network) -> tuple[tables.Table, Plan]:
        self.timer.zeros.update(half_zeros(network))
        while True:
            table = tables.tabulate(
                network,
                self.target,
                self.timer,
                self.ends,
                tables.Considered(
                    self.options.sparsity != "disable", self.options.exhaustive, self.options.workspace, self.risk
                ),
                lambda *op: self.options.progress(Progress("time", *op)),
            )
            self.options.progress(Progress("plan", network.name))
            able = [c.name for c in table.graph.choices if self.options.forced and any(e.sparse for e in c.entries)]
            chosen = solve(table.graph, force=dict.fromkeys(able, attrgetter("sparse")))
            plans = launched(table, chosen.options, chosen.entries, chosen.reformats), quoted(table, chosen)
            if not any(map(self.timer.refine, plans)):
                return table, chosen

    def in_pieces(self, table: tables.Table, chosen: Plan) -> tuple[tables.Table, Plan]:
        """Returns the best plan in which layers may run pieces of the batch, if it takes less time than the given plan by the
        share LEAST_GAIN; else the given one.
        """
        pieces = batch_pieces.worthwhile(table, chosen) if self.may_cut else None
        if pieces is None:
            return table, chosen
        found = self(batch_pieces.offer(table.network, pieces, self.target, chosen))
        return found if found[1].total_ps < (1 - batch_pieces.LEAST_GAIN) * chosen.total_ps else (table, chosen)

    def settled(self, table: tables.Table, chosen: Plan, reached: RangeRecord) -> PlannedNetwork:
        """Returns the final plan, in pieces or not.

        If its activations take more bytes than allowed, it is the fastest plan found in pieces that fits, see docs/plans.md;
        raises ModelError if none does.
        """
        free = self.in_pieces(table, chosen)
        if self.options.activations is None or not self.may_cut or assemble.arena_bytes(*free) <= self.options.activations:
            return PlannedNetwork(*free, reached)
        allowed, takes = self.options.activations, [whole := assemble.arena_bytes(table, chosen)]
        best = (table, chosen) if whole <= allowed else None

        def enough(pieces: batch_pieces.BatchPieces) -> bool:
            """Whether more blocks in pieces cannot help: the plan with these pieces fits, or is no faster than a plan that fits
            (more pieces make it slower still), or no tactic can run one of them.
            """
            nonlocal best
            try:
                found = self(batch_pieces.offer(table.network, pieces, self.target, chosen))
            except ModelError:
                return True
            if best is not None and found[1].total_ps >= best[1].total_ps:
                return True
            takes.append(assemble.arena_bytes(*found))
            if takes[-1] <= allowed:
                best = found
            return takes[-1] <= allowed

        for rising in batch_pieces.smaller(table.network):
            bisect_left(rising, True, key=enough)
        if best is None:
            raise self.too_large(table.network, min(takes), tried=len(takes) > 1)
        return PlannedNetwork(*best, reached, whole=None if best[1] is chosen else (chosen.us, whole))

    def too_large(self, network: Network, least: int, tried: bool) -> ModelError:
        """Makes the error that activations take `least` bytes, which is too much; `tried`: with the batch in pieces."""
        how = "and no layer can run in pieces of the batch" if self.may_cut else "and --batchInvariant allows no pieces"
        how, allowed = "at least, in pieces of the batch" if tried else how, self.options.activations or 0
        return ModelError(
            f"{network.name} at batch {network.images}: activations need {size_text(least)} {how}, but {size_text(allowed)} "
            f"({allowed} bytes) are allowed: allow as much (--memPoolSize=activations:{least}B), or give a smaller batch"
        )
