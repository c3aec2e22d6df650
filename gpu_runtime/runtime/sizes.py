"""Finds the plan of an engine for given sizes of inputs.

An engine of one size has one plan. An engine of a range has a profile for each size of image, and in it a plan for each of some
batches: a batch in between runs by the next larger plan, padded, unless images depend on each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpu_runtime.runtime.fields import Batch, TensorSpec
from gpu_runtime.runtime.plan_record import Bound, EngineRecord, PlanRecord, Profile
from gpu_runtime.text import dims, printable, shapes_text

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fit:
    """The plan that runs some inputs: its number in the engine's record, and `rows`, the images that it computes of its
    `batch`.
    """

    plan: int
    rows: int
    batch: int


def batch_of(plan: PlanRecord, profile: Profile) -> int:
    """Returns the batch of a plan: the first size of its first input with a batch; 1 if no input of the profile has one."""
    return next((b.shape[0] for b in plan.inputs if b.name in profile.batched and b.shape), 1)


def batches(record: EngineRecord, profile: Profile) -> tuple[int, ...]:
    """Returns the batches of the profile's plans, in rising order."""
    return tuple(batch_of(record.plans[number], profile) for number in profile.plans)


def batched(record: EngineRecord, number: int) -> tuple[int, tuple[str, ...]]:
    """Returns the batch of the plan of that number, and the inputs and outputs that have it; (1, ()) for an engine of one
    size.
    """
    profile = next((p for p in record.profiles if number in p.plans), None)
    return (batch_of(record.plans[number], profile), profile.batched) if profile else (1, ())


def specs(record: EngineRecord, ends: Sequence[Bound]) -> tuple[TensorSpec, ...]:
    """Returns a TensorSpec (name, dtype, shape) for each of the inputs or outputs, as callers see them.

    `ends`: the inputs or the outputs of the record's default plan (`record.plan`, the one that tools show). In an engine for
    a range of batches, the first size of a tensor with a batch is a Batch: the plan's optimal batch, together with the range
    that is allowed.
    """
    profile = record.profile
    return tuple(_spec(record, profile, b) if profile and b.name in profile.batched else b.spec for b in ends)


def _spec(record: EngineRecord, profile: Profile, end: Bound) -> TensorSpec:
    first, batch = end.shape[0], batch_of(record.plan, profile)
    opt, low, high, *all_ = (first * n // batch for n in (profile.opt, profile.min, profile.max, *batches(record, profile)))
    size = Batch(opt, (low, high), tuple(all_) if profile.exact else ())
    return replace(end.spec, shape=(size, *end.shape[1:]))


def whole(record: EngineRecord, batch: int) -> dict[str, Shape]:
    """Returns name -> shape at another `batch`, for the inputs that have a batch; the images have the size of the default plan.

    For an engine of one size: the shape of its first input alone.
    """
    profile, inputs = record.profile, record.plan.inputs
    if profile is None or not profile.batched:
        return {b.name: (batch, *b.shape[1:]) for b in inputs[:1]}
    own = batch_of(record.plan, profile)
    return {b.name: (b.shape[0] // own * batch, *b.shape[1:]) for b in inputs if b.name in profile.batched}


def filled(record: EngineRecord, asked: int | Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shapes of all inputs, given a batch or the shapes of some inputs. Raises ValueError if no plan takes them."""
    found = fit(record, whole(record, asked) if isinstance(asked, int) else asked)
    batch, names = batched(record, found.plan)
    ends = record.plans[found.plan].inputs
    return {b.name: (b.shape[0] // batch * found.rows, *b.shape[1:]) if b.name in names else b.shape for b in ends}


def fit(record: EngineRecord, shapes: Mapping[str, Shape]) -> Fit:
    """Finds the plan for inputs of these shapes; inputs that are left out may have any shape. Raises ValueError if no plan
    takes them.
    """
    tried = []
    for profile in record.profiles:
        found = _fit(record, profile, shapes)
        if isinstance(found, Fit):
            return found
        tried.append(found)
    if not tried:
        for end in record.plan.inputs:
            if (got := shapes.get(end.name, end.shape)) != end.shape:
                raise ValueError(printable(f"{end.name}: expected {dims(end.shape)}, the engine's only size, got {dims(got)}"))
        return Fit(0, 1, 1)
    # The sentence of the size of image that is meant, or all sizes.
    meant = [text for text, close in tried if close] if len(tried) > 1 else [text for text, _ in tried]
    raise ValueError(printable(meant[0] if len(meant) == 1 else _sizes_text(record, shapes)))


def _fit(record: EngineRecord, profile: Profile, shapes: Mapping[str, Shape]) -> Fit | tuple[str, bool]:
    """Returns the plan of one profile for inputs of these shapes, or (the reason why it has none, whether only the batch is
    wrong).
    """
    largest = record.plans[profile.plans[-1]]
    rows: dict[str, int] = {}
    for end in largest.inputs:
        got = shapes.get(end.name)
        if got is None:
            continue
        if end.name not in profile.batched:
            if got != end.shape:
                return f"{end.name}: expected {dims(end.shape)}, got {dims(got)}", False
            continue
        each = end.shape[0] // profile.max  # a batched input has the batch, or a multiple of it
        if len(got) != len(end.shape) or got[1:] != end.shape[1:] or got[0] % each:
            return f"{end.name}: expected {_range(record, profile)} rows of {dims(end.shape[1:])}, got {dims(got)}", False
        rows[end.name] = got[0] // each
    if len(set(rows.values())) > 1:
        listed = ", ".join(f"{n} in {name}" for name, n in rows.items())
        return f"expected the same number of rows in all inputs, got {listed}", True
    count = next(iter(rows.values()), profile.opt)
    for number, batch in zip(profile.plans, batches(record, profile), strict=True):
        if batch == count or (profile.min <= count < batch and not profile.exact):
            return Fit(number, count, batch)
    name = next(iter(rows), "")
    image = next((dims(b.shape[1:]) for b in largest.inputs if b.name == name), "")
    why = f": {profile.exact}" if profile.exact and profile.min <= count <= profile.max else ""
    why = "; more take an engine built with a larger --maxShapes" if count > profile.max else why
    return f"{name}: expected {_range(record, profile)} rows of {image}, got {count}{why}", True


def _range(record: EngineRecord, profile: Profile) -> str:
    if profile.exact:
        *some, last = map(str, batches(record, profile))
        return f"{', '.join(some)} or {last}" if some else last
    return f"{profile.min} to {profile.max}" if profile.min < profile.max else str(profile.max)


def _sizes_text(record: EngineRecord, shapes: Mapping[str, Shape]) -> str:
    def texts() -> Iterator[str]:
        for profile in record.profiles:
            ends = [b for b in record.plans[profile.plans[-1]].inputs if b.name in shapes]
            ranges = {b.name: f"{_range(record, profile)} x {dims(b.shape[1:])}" for b in ends if b.name in profile.batched}
            yield ", ".join(f"{b.name} {ranges.get(b.name) or dims(b.shape)}" for b in ends)

    return f"expected one of the engine's sizes, {'; '.join(texts())}, got {shapes_text(shapes)}"
