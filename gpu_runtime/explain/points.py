"""The plans of an engine for several sizes of inputs, in one table: time, time per image, memory and weights of each."""

from dataclasses import dataclass

from gpu_runtime.explain.figures import us_text
from gpu_runtime.planning.order_of_sums import agreeing
from gpu_runtime.runtime.plan_record import EngineRecord, PlanRecord, Profile, Section
from gpu_runtime.runtime.sizes import batch_of, batches, specs
from gpu_runtime.text import printable, several, shapes_text, size_text, sizes_option, table, wrap
from tactics.launches import section_bytes


@dataclass(frozen=True, slots=True)
class Point:
    """One plan of an engine, with the sizes of inputs that it runs.

    `inputs`: the inputs' shapes as text; `first` to `batch`: the numbers of images that this plan runs; `us` and
    `us_per_image`: its time for `batch` images; `own_us`: the time of the plan for this batch without --batchInvariant, None
    in an engine built without it. `arena_bytes`: bytes of activations. `weight_bytes`: bytes of the weights that the plan
    reads, `own_bytes`: bytes of the weights that no other plan reads; None if the engine was built with other kernel sources,
    which these numbers depend on. `shown`: it is the plan that tools show.
    """

    inputs: str
    first: int
    batch: int
    us: float
    us_per_image: float
    arena_bytes: int
    weight_bytes: int | None
    own_bytes: int | None
    shown: bool
    own_us: float | None = None


def points(record: EngineRecord) -> tuple[Point, ...]:
    """Returns a Point for each plan, ordered by profile (size of image), then by rising batch; one Point for an engine of one
    size.
    """
    used = [_sections(record, plan) for plan in record.plans]
    profiles = record.profiles or (Profile(1, 1, 1, (0,), (), None),)
    found = []
    for profile in profiles:
        before = profile.min
        for number in profile.plans:
            plan = record.plans[number]
            batch = batch_of(plan, profile) if profile.batched else (plan.inputs[0].shape[:1] or (1,))[0] if plan.inputs else 1
            others = set().union(*(used[i] for i in range(len(used)) if i != number))
            known = bool(plan.steps)
            read = sum(s.nbytes for s in used[number].values()) if known else None
            own = sum(s.nbytes for name, s in used[number].items() if name not in others) if known else None
            us, memory = plan.solution.total_us, plan.memory.activation_bytes
            shapes = shapes_text({b.name: b.shape for b in plan.inputs})
            first = batch if profile.exact or not profile.batched else before
            shown = number == record.shown
            alone = plan.solution.rivals.own_us
            found.append(Point(printable(shapes), first, batch, us, us / batch, memory, read, own, shown, alone))
            before = batch + 1
    return tuple(found)


def _sections(record: EngineRecord, plan: PlanRecord) -> dict[str, Section]:
    """Returns name -> section for each section of weights that a plan reads; {} for a plan without steps, which was built with
    other kernel sources.
    """
    found, stored = {}, record.weight_sections
    for layer in plan.layers if plan.steps else ():
        if layer.problem is not None and layer.tactic is not None:
            for part in section_bytes(layer.problem, layer.tactic):
                name = plan.renamed.get(f"{layer.name}.{part}", f"{layer.name}.{part}")
                found[name] = stored[name]
    return found


def points_text(record: EngineRecord) -> str:
    """Returns a table with a row for each plan, and sentences on memory and equal bits; "" for an engine of one size."""
    if not record.profiles:
        return ""
    found, timing = points(record), record.timing
    rows = [
        [
            f"{p.inputs}{' (shown)' if p.shown else ''}",
            _images(p),
            us_text(p.us, timing, unit=""),
            us_text(p.us_per_image, timing, unit=""),
            size_text(p.arena_bytes),
            "-" if p.weight_bytes is None else size_text(p.weight_bytes),
            "-" if p.own_bytes is None else size_text(p.own_bytes),
        ]
        for p in found
    ]
    lines = table(["plan", "images", "us", "us/image", "arena", "weights", "its own"], rows, right=(1, 2, 3, 4, 5, 6))
    arena, weights = max(p.arena_bytes for p in found), size_text(record.weight_bytes)
    lines += wrap(f"A context takes the largest arena, {size_text(arena)}, and all weights, {weights}, once for all plans.")
    for profile in record.profiles:
        if profile.exact:
            lines += wrap(printable(f"No batch is padded: {profile.exact}."))
        if profile.plans[1:] and all(record.plans[number].steps for number in profile.plans):
            lines += wrap(_bits_text(record, profile))
    if own := [(p.us, p.own_us) for p in found if p.own_us is not None]:
        total, alone = (sum(times) for times in zip(*own, strict=True))
        lines += wrap(
            f"One tactic per layer for all batches costs {100 * (total / alone - 1):.2f} % of the sum of their times."
        )
    return "\n".join(lines) + "\n"


def size_options(record: EngineRecord) -> list[str]:
    """Returns the options of `build-engine` for the engine's sizes: --shapes for one size, or --minShapes, --optShapes and
    --maxShapes for a range of batches.

    --profile=N precedes the options of profile N if there are several profiles.
    """
    given = record.flags.shapes
    if not record.profiles:
        return [f"--shapes={sizes_option(given)}"] if given else []
    words = []
    for number, profile in enumerate(record.profiles):
        ends = [b for b in record.plans[profile.plans[-1]].inputs if b.name in given]
        sizes = [
            {b.name: (b.shape[0] // profile.max * n, *b.shape[1:]) if b.name in profile.batched else b.shape for b in ends}
            for n in (profile.min, profile.opt, profile.max)
        ]
        options = ["--minShapes", "--optShapes", "--maxShapes"] if profile.min < profile.max else ["--shapes"]
        words += [f"--profile={number}"] if record.profiles[1:] else []
        words += [f"{option}={sizes_option(of)}" for option, of in zip(options, sizes, strict=False)]
    return words


def _images(p: Point) -> str:
    """Returns the numbers of images that a plan runs, as `1..8`, or `8`."""
    return f"{p.first}..{p.batch}" if p.first < p.batch else str(p.batch)


def _bits_text(record: EngineRecord, profile: Profile) -> str:
    """Returns the sentence that names the plans of a profile that compute the same bits for an image."""
    sizes = batches(record, profile)
    groups = agreeing([record.plans[number].layers for number in profile.plans])
    if not groups[1:]:
        return "An image gets the same bits in all batches."
    alike = [" and ".join(str(sizes[i]) for i in group) for group in groups if group[1:]]
    also = f" but in the plans for {'; '.join(alike)}" if alike else ""
    return f"An image may get other bits in other plans{also}: build with --batchInvariant for the same bits in all."


def at_text(record: EngineRecord) -> str:
    """Returns ", batch 8 of 1..64: 9.6 us, ..." for the plan that tools show; "" for an engine of one size."""
    if not record.profiles:
        return ""
    (p,) = (p for p in points(record) if p.shown)
    ends = ", ".join(str(spec).rsplit(" ", 1)[0] for spec in specs(record, record.plan.inputs))
    time = f"{us_text(p.us, record.timing)}, {us_text(p.us_per_image, record.timing)} an image"
    weights = "" if p.weight_bytes is None else f", weights {size_text(p.weight_bytes)}"
    return printable(f", batch {p.batch} of {ends}: {time}, arena {size_text(p.arena_bytes)}{weights}")


def batches_text(record: EngineRecord) -> str:
    """Returns the plans in one sentence: "4 plans, shown is the one for ...; images 1..8: 9.6 us, 9..64: 20.1 us"."""
    found, timing = points(record), record.timing
    shown = next(p for p in found if p.shown)
    texts = [f"{_images(p)}: {us_text(p.us, timing)}" for p in found]
    exact = "".join(f"; none is padded: {p.exact}" for p in record.profiles if p.exact)
    return printable(f"{several(len(found), 'plan')}, shown is the one for {shown.inputs}; images {', '.join(texts)}{exact}")
