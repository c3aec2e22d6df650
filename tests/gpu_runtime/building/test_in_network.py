"""Which plans are run as a whole, and which of them is taken: the search, over plans whose times a test makes up."""

from dataclasses import replace

import pytest

from cuda_kernels.device import named
from gpu_runtime.building import in_network
from gpu_runtime.building.load import lowered
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.planner import PlannedNetwork, Planner
from gpu_runtime.building.record import trial
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.source import source_of
from gpu_runtime.planning import io_formats
from gpu_runtime.planning.alternatives import alternatives
from gpu_runtime.runtime.findings import RangeRecord
from tactics.measure.race import quantiles
from tactics.measure.timing import Predicted, Time
from tests.conftest import MODELS

H200 = named("h200")


class Remembering(Predicted):
    """A timer that measures what it is asked to; `asked`: the names of what it was."""

    def __init__(self):
        super().__init__(H200)
        self.asked = []

    def remembered(self, what, name, measure):
        self.asked.append((what, name))
        low, us, high = quantiles(measure())
        return Time(us, low, high)


class Fake:
    """A plan that takes `sum + extra[tactic of op]` as a whole; `open`: how many are."""

    extra, slow, open, fails = {}, {}, 0, None

    def __init__(self, planned, planner):
        self.planned, self.engine = planned, trial(planned.table, planned.chosen, planner.target)
        self.name = " ".join(e.name for e in planned.chosen.entries.values())
        self.loaded = False

    def turn(self):
        if Fake.fails:
            raise Fake.fails
        if not self.loaded:
            self.loaded, Fake.open = True, Fake.open + 1
        entries = self.planned.chosen.entries.values()
        return [sum(e.us + Fake.extra.get(e.name, 0.0) for e in entries)] * 4

    def layer(self, i):
        self.turn()
        layer = self.engine.plan.layers[i]
        return [layer.time_us + Fake.extra.get(layer.tactic_name, 0.0)]

    def close(self):
        Fake.open -= self.loaded
        self.loaded = False


@pytest.fixture(scope="module")
def planned():
    loaded = importer.load(source_of(MODELS / "resnet20_cifar10.onnx"))
    network = alternatives(lowered(loaded, {"input": (4, 3, 32, 32)}))
    ends = io_formats.resolve(None, network.inputs, "input") | io_formats.resolve(None, network.outputs, "output")
    planner = Planner(H200, Remembering(), BuildOptions(), ends)
    return PlannedNetwork(*planner(network), RangeRecord("nothing")), planner


def until(planner: Planner, ended) -> Planner:
    return replace(planner, options=BuildOptions(tuning_time=ended))


@pytest.fixture
def settled(planned, monkeypatch):
    monkeypatch.setattr(in_network, "Running", Fake)
    for name, value in (("extra", {}), ("fails", None), ("open", 0)):
        monkeypatch.setattr(Fake, name, value)

    def settle(of=planned, **changes):
        for name, value in changes.items():
            monkeypatch.setattr(Fake, name, value)
        found = in_network.settle(*of)
        assert Fake.open == 0, "all were closed"
        return found

    return settle


def test_a_plan_that_takes_what_it_should_stays(planned, settled):
    found = settled()
    assert found.chosen == planned[0].chosen and not found.apart and not found.replaced
    assert found.measured_us == pytest.approx(sum(e.us for e in found.chosen.entries.values()), rel=1e-6)


def test_a_layer_that_takes_longer_in_its_place_gets_another_tactic(planned, settled):
    first = next(e for e in planned[0].chosen.entries.values() if e.tactic and "conv" in e.tactic.kernel)
    found = settled(extra={first.name: 5.0})
    assert found.apart and all(a.us == pytest.approx(a.alone_us + 5.0) for a in found.apart)
    assert first.name in {r.before for r in found.replaced} and not any(r.swap for r in found.replaced)
    assert first.name not in {e.name for e in found.chosen.entries.values()}
    assert found.measured_us < planned[0].chosen.us + 5.0


def test_a_rival_that_is_faster_in_the_whole_is_taken(planned, settled):
    """It is slower alone, and the log may not call the sum minimal."""
    op, entry = in_network._rivals(planned[0])[0]
    found = settled(extra={entry.name: -3.0})
    (taken,) = [r for r in found.replaced if r.op == op]
    assert taken.after == entry.name and taken.swap and taken.after_us < taken.before_us
    assert found.chosen.total_ps >= planned[0].chosen.total_ps


def test_a_rival_that_takes_more_memory_than_it_may_is_not_run(planned, settled):
    op, entry = in_network._rivals(planned[0])[0]
    rival = in_network._changed(op, entry, planned[0])
    takes = trial(rival.table, rival.chosen, H200).plan.memory.activation_bytes
    for less in (0, 1):
        limited = replace(planned[1], options=BuildOptions(activations=takes - less))
        found = settled(of=(planned[0], limited), extra={entry.name: -3.0})
        assert (op in {r.op for r in found.replaced}) == (not less)


def test_the_end_of_tuning_ends_the_turns(planned, settled):
    """Behind the first plan that was tried: the better of the two is taken, and its time is known."""
    op, entry = in_network._rivals(planned[0])[0]
    ended = iter([False, *[True] * 100])
    found = settled(of=(planned[0], until(planned[1], lambda: next(ended))), extra={entry.name: -3.0})
    assert [r.op for r in found.replaced] == [op] and next(ended) and found.measured_us
    at_once = settled(of=(planned[0], until(planned[1], lambda: True)), extra={entry.name: -3.0})
    assert not at_once.replaced and at_once.chosen == planned[0].chosen and at_once.measured_us


@pytest.mark.parametrize("fault", [MemoryError("no memory for two"), in_network.faults.Overloaded("too slow")])
def test_without_memory_for_it_the_plan_stays_and_a_warning_says_so(planned, settled, fault):
    with pytest.warns(RuntimeWarning, match="was not run as a whole to the end"):
        found = settled(fails=fault)
    assert found.chosen == planned[0].chosen and found.measured_us is None


def test_a_fault_of_a_kernel_is_raised(settled):
    with pytest.raises(RuntimeError, match="illegal"):
        settled(fails=RuntimeError("illegal address"))
