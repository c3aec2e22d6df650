"""Checks across the fields of an engine's record: offsets end within memory, names and numbers refer to existing entries.

The hashes in a file detect changes, not a writer's errors. The fields' types and these checks detect those before anything is
allocated, compiled or launched.
"""

import math
import re
from collections.abc import Collection, Iterator

from gpu_runtime.runtime.fields import LARGEST
from gpu_runtime.runtime.findings import ChoiceRow, Choices
from gpu_runtime.runtime.plan_record import Bound, Container, EngineRecord, Layer, PlanRecord, Profile, TensorPlace
from gpu_runtime.runtime.sizes import batch_of

MOST_ELEMENTS = 1 << 31  # of a tensor, padding included
MOST_PLANS = 16  # of an engine


def fault(record: EngineRecord) -> str | None:
    """Returns the first fault of an engine's record in words, such as "layers[3]: tensor 'x' ends at byte ...", or None."""
    if not re.fullmatch(r"sm_\d+[af]?", record.device.sm):
        return f"device.sm: expected an architecture such as sm_90a, got {record.device.sm[:60]}"
    if problem := next(_profiles(record), None):
        return problem
    several = bool(record.plans[1:])
    found = (
        f"plans[{number}]: {text}" if several else text
        for number, plan in enumerate(record.plans)
        for text in _faults(plan, {s.name for s in record.sections if s.kind == "weights"})
    )
    return next(found, None)


def _profiles(record: EngineRecord) -> Iterator[str]:
    """Yields the faults of profiles: each plan must belong to one profile, and a profile must have the batches of its plans."""
    if not 1 <= len(record.plans) <= MOST_PLANS:
        yield f"expected 1 to {MOST_PLANS} plans, got {len(record.plans)}"
    elif record.shown >= len(record.plans):
        yield f"shown: there is no plan {record.shown}, but only {len(record.plans)}"
    listed = [number for p in record.profiles for number in p.plans]
    if sorted(listed) != list(range(len(record.plans) if record.profiles or record.plans[1:] else 0)):
        yield f"profiles: expected each of {len(record.plans)} plans in one profile, got {listed}"
        return
    for i, p in enumerate(record.profiles):
        at, plans = f"profiles[{i}]", [record.plans[number] for number in p.plans]
        if not p.plans:
            yield f"{at}: expected at least one plan"
            continue
        ends = {b.name: b.shape for b in (*plans[0].inputs, *plans[0].outputs)}
        alone = not p.batched and len(plans) == p.max == 1
        if not alone and (not any(b.name in p.batched for b in plans[0].inputs) or any(not ends.get(n) for n in p.batched)):
            yield f"{at}.batched: expected inputs and outputs that have a first size, got {', '.join(p.batched)[:60]!r}"
            continue
        batches = [batch_of(plan, p) for plan in plans]
        if not p.min <= p.opt <= p.max or batches != sorted(set(batches)) or batches[-1] != p.max:
            got = f"{p.min}, {p.opt}, {p.max}, {batches}"
            yield f"{at}: expected min <= opt <= max, and plans of rising batches up to max, got {got}"
        for plan, batch in zip(plans, batches, strict=True):
            yield from _of_one_size(at, p, plan, plans[-1], batch)


def _of_one_size(at: str, profile: Profile, plan: PlanRecord, largest: PlanRecord, batch: int) -> Iterator[str]:
    """Yields the faults of a plan's inputs and outputs, which must equal the largest plan's except for the batch.

    `at`: the profile's place in the record, for messages; `batch`: the plan's batch.
    """
    for kind, some, others in (("inputs", plan.inputs, largest.inputs), ("outputs", plan.outputs, largest.outputs)):
        if [(b.name, b.dtype) for b in some] != [(b.name, b.dtype) for b in others]:
            yield f"{at}: the {kind} of its plans have different names or types"
            return
        for b, whole in zip(some, others, strict=True):
            scaled = b.name in profile.batched and b.shape and whole.shape  # the same number of rows for each image
            fits = not scaled or (b.shape[0] * profile.max == whole.shape[0] * batch and not b.shape[0] % batch)
            if not fits or b.shape[bool(scaled) :] != whole.shape[bool(scaled) :]:
                shapes = f"{list(b.shape)} at batch {batch}, {list(whole.shape)} at {profile.max}"
                yield f"{at}: {kind} {b.name[:40]!r} has shape {shapes}"


def _faults(plan: PlanRecord, sections: Collection[str]) -> Iterator[str]:
    end = plan.memory.activation_bytes
    for i, layer in enumerate(plan.layers):
        yield from _layer(layer, end, f"layers[{i}]")
    for kind, bound in (("inputs", plan.inputs), ("outputs", plan.outputs)):
        for i, t in enumerate(bound):
            yield from _bound(t, end, f"{kind}[{i}]")
    if bad := [span for span in plan.memory.zeros if sum(span) > end]:
        yield f"memory: expected bytes within {end}, got {list(bad[0])}"
    if missing := set(plan.renamed.values()).difference(sections):
        yield f"renamed: there is no section {min(missing)[:60]!r}"
    if plan.choices:
        yield from _choices(plan.choices)


def _layer(layer: Layer, end: int, at: str) -> Iterator[str]:
    for t in layer.tensors:
        named = f"{at}: tensor {t.name[:40]!r}"
        yield from _too_large(t, named)
        if t.inside:
            yield from _too_large(t.inside, at)
            if t.inside.channel + t.shape4[1] > t.inside.shape4[1]:
                yield f"{named} ends beyond the tensor that contains it"
        if t.whole.offset + t.whole.nbytes > end:
            yield f"{named} ends at byte {t.whole.offset + t.whole.nbytes}, but the memory has {end} bytes"


def _too_large(place: TensorPlace | Container | Bound, at: str) -> Iterator[str]:
    if math.prod(place.shape4) > MOST_ELEMENTS:
        yield f"{at}: expected at most {MOST_ELEMENTS} elements, got {list(place.shape4)}"


def _bound(t: Bound, end: int, at: str) -> Iterator[str]:
    yield from _too_large(t, at)
    if t.offset + t.nbytes > end:
        yield f"{at}: expected {t.nbytes} bytes within {end}, got them at offset {t.offset}"
    if math.prod(t.shape) != math.prod(t.shape4):
        yield f"{at}: shapes {list(t.shape)} and {list(t.shape4)} have different sizes"


# ---- the planner's tables


def _choices(stored: Choices) -> Iterator[str]:
    """Yields the faults of the planner's tables: names that occur twice, and numbers and names that refer to nothing."""
    keys = {t.name: t.keys for t in stored.tensors}
    if len(keys) < len(stored.tensors):
        yield "choices.tensors: a name occurs twice"
    for t in stored.tensors:
        if {len(row) for row in t.reformat_ps} - {len(t.keys)} or len(t.reformat_ps) != len(t.keys):
            yield f"choices: the reformats of {t.name[:40]!r} are not a table of {len(t.keys)} by {len(t.keys)}"
    for name, key in stored.pinned.items():
        if key not in keys.get(name, ()):
            yield f"choices.pinned: {name[:40]!r} has no format {str(key)[:40]!r}"
    if unknown := {*stored.inputs, *stored.outputs} - set(keys):
        yield f"choices: there is no tensor {min(unknown)[:40]!r}"
    for c in stored.choices:
        yield from _choice(c, stored)


def _choice(c: ChoiceRow, stored: Choices) -> Iterator[str]:
    around = [*c.in_, c.out]
    if not c.in_ or max(around) >= len(stored.tensors):
        yield f"choices: op {c.op[:40]!r} refers to tensor {max(around)}, but only {len(stored.tensors)} exist"
        return
    kinds = ("tactic", *("format" for _ in around))
    limits = (len(stored.tactics), *(len(stored.tensors[i].keys) for i in around))
    op = f"choices: an entry of op {c.op[:40]!r}"
    for e in c.entries:
        if len(e) != len(limits) + 2:
            yield f"{op} has {len(e)} numbers, expected {len(limits) + 2}"
        elif missing := [(k, v, n) for k, v, n in zip(kinds, e, limits, strict=False) if v >= n]:
            yield "{} refers to {} {}, but only {} exist".format(op, *missing[0])
        elif not e[-1] <= e[-2] < LARGEST:
            yield f"{op} has a premium of {e[-1]} ps in a time of {e[-2]} ps"
