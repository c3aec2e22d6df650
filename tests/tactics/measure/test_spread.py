"""What is checked of a cluster before anything is raced on it. Ray itself: tests/servers/test_ray_build.py."""

import socket
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

import gpu_runtime as gr
from cuda_kernels.compile import source_hash
from cuda_kernels.device import named
from gpu_runtime.building.options import BuildOptions
from gpu_runtime.building.target import make_timer, runs_whole
from tactics.measure import spread
from tactics.measure.racing import RaceRequest
from tactics.measure.spread import Found, Spread, agreed
from tests.tactics.measure.scripted import PROBLEM

H200, L4 = (replace(named(name), measured=True) for name in ("h200", "l4"))
FOUND = Found(H200, "580", source_hash())


def test_gpus_of_one_kind_leave_out_what_failed_on_any():
    failed = [(("move", "wrong"),), (), (("pool", "hangs"), ("move", "wrong"))]
    found = agreed([replace(FOUND, device=replace(H200, left_out=rows)) for rows in failed])
    assert found == replace(FOUND, device=replace(H200, left_out=(("move", "wrong"), ("pool", "hangs"))))


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ([replace(FOUND, device=L4)], "2 NVIDIA H200 (driver 580), 1 NVIDIA L4 (driver 580): one build for each"),
        ([replace(FOUND, driver="570")], "1 NVIDIA H200 (driver 570), 2 NVIDIA H200 (driver 580): one build for each"),
        ([replace(FOUND, source="other")], "a node has other kernels than this machine: install the same gpu_runtime"),
    ],
)
def test_gpus_of_two_kinds_share_no_build(others, text):
    with pytest.raises(ValueError) as refused:
        agreed([FOUND, *others, FOUND])
    assert text in str(refused.value).replace(H200.title, "NVIDIA H200").replace(L4.title, "NVIDIA L4")


@pytest.mark.parametrize("address", ["head", "head:", "head:x", "head:0", "head:65536", "ray://head", ":"])
def test_an_address_names_a_port(address):
    with pytest.raises(ValueError, match="expected the address of a Ray cluster, as head:6379 or ray://head:10001, got"):
        spread._knock(address)


def test_an_address_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(spread, "ANSWER_S", 0.3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ValueError, match=rf"no Ray cluster answers at 127.0.0.1:{port}: \d+ connections failed within 0 s"):
            spread._knock(f"127.0.0.1:{port}")
        free.listen()
        spread._knock(f"127.0.0.1:{port}")
        spread._knock(f"ray://127.0.0.1:{port}")
    assert [spread._knock(address) for address in ("", "auto", "local")] == [None] * 3


class Ended(Exception):
    """The process of an actor."""


@dataclass(eq=False)
class Answer:
    what: object


RESTARTED = object()  # the answer of an actor that was restarted and has not said hello since


def here():
    return H200, "580"


class Cluster:
    """The module `ray` of a cluster whose actors answer at once: each time the next of `hellos` and `races` of that actor, or
    raise it; None: never. Without one that is left a race takes no time."""

    def __init__(self, *actors: tuple[list, list]):
        self.left, self.killed, self.raced = list(actors), [], []
        self.exceptions = SimpleNamespace(RayError=Ended, RayActorError=Ended)

    def cluster_resources(self):
        return {"GPU": float(len(self.left))} if self.left else {}

    def remote(self, **_):
        numbers = iter(range(len(self.left)))
        return lambda racer: SimpleNamespace(remote=lambda find: self._actor(next(numbers)))

    def _actor(self, number):
        def hello():
            return Answer(self.left[number][0].pop(0))

        def race(asked, ahead):
            races = self.left[number][1]
            self.raced.append((number, asked.problem.n, ahead and ahead.problem.n))
            return Answer(races.pop(0) if races else ({"t": {"us": asked.problem.n}}, {}))

        found = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=hello))
        return SimpleNamespace(number=number, hello=found, race=SimpleNamespace(remote=race))

    def wait(self, answers, num_returns, timeout=None):
        ready = [a for a in answers if a.what is not None][:num_returns]
        assert ready or timeout, "it would wait for ever"
        return ready, [a for a in answers if a not in ready]

    def get(self, answer):
        if isinstance(answer.what, Exception):
            raise answer.what
        return None if answer.what is RESTARTED else answer.what

    def is_initialized(self):
        return True

    def kill(self, actor):
        self.killed.append(actor.number)


def requests(count):
    return [RaceRequest(replace(PROBLEM, n=n), (), {}, {}) for n in range(1, count + 1)]


def raced(cluster, count):
    """{problem's batch: what came back} of so many races, begun together."""
    gpus, found = Spread(cluster, here), {}
    for asked in requests(count):
        gpus.begin(asked, lambda lines, failed, n=asked.problem.n: found.update({n: lines}))
    for asked in requests(count):
        gpus.finish(asked.problem)
    gpus.close()
    return found


ALL = {n: {"t": {"us": n}} for n in range(1, 7)}


def test_races_are_shared_and_the_next_one_is_told_ahead():
    cluster = Cluster(([FOUND], []), ([FOUND], []))
    assert raced(cluster, 6) == ALL and cluster.killed == [0, 1]
    assert sorted(n for _, n, _ in cluster.raced) == list(range(1, 7))
    assert all(ahead is None or ahead > n for _, n, ahead in cluster.raced)


def test_the_race_of_a_lost_actor_is_raced_by_who_is_free():
    cluster = Cluster(([FOUND, FOUND], [Ended("killed"), Ended("again")]), ([FOUND], []))
    cluster.left[0][0].append(None)  # the second time it never comes back
    with pytest.warns(RuntimeWarning, match="its race begins again: (killed|again)"):
        assert raced(cluster, 6) == ALL


def test_an_actor_that_ended_while_it_was_idle_says_hello_first():
    """Ray has started it again, perhaps on another GPU, and it knows nothing of races."""
    cluster = Cluster(([FOUND, FOUND], [RESTARTED]), ([FOUND], []))
    with pytest.warns(RuntimeWarning, match="its race begins again: it ended while it was idle"):
        assert raced(cluster, 6) == ALL and not cluster.left[0][0]
    with pytest.warns(RuntimeWarning, match="idle"):
        other = Cluster(([FOUND, replace(FOUND, device=L4)], [RESTARTED]), ([FOUND], []))
        assert raced(other, 6) == ALL and {number for number, *_ in other.raced[2:]} == {1}


def test_a_gpu_that_others_held_joins_later_unless_it_is_of_another_kind():
    late = Cluster(([FOUND], []), ([None], []))
    gpus = Spread(late, here)
    assert gpus.count == 1 and gpus.device == H200
    (answer,) = gpus._running
    for found, idle in ((FOUND, 2), (replace(FOUND, device=L4), 1)):
        gpus._running = {answer: (late._actor(1), None)}
        gpus._idle, answer.what = gpus._idle[:1], found
        gpus._collect(answer)
        assert len(gpus._idle) == idle


def test_a_cluster_that_lost_all_gpus_ends_the_build():
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="no GPU of the cluster is left: gone for good"):
        raced(Cluster(([FOUND, Ended("gone for good")], [Ended("killed")])), 2)


@pytest.mark.parametrize(
    ("actors", "text"),
    [
        ([], "no node of this Ray cluster has a GPU"),
        ([([None], [])], "none of the cluster's 1 GPUs was free within 30 s"),
        ([([FOUND], []), ([Ended("no CuPy\nat all")], [])], "a node of the cluster cannot measure: no CuPy$"),
        ([([FOUND], []), ([replace(FOUND, device=L4)], [])], "one build for each"),
    ],
)
def test_a_cluster_that_cannot_measure_is_refused(actors, text):
    with pytest.raises(ValueError, match=text):
        Spread(Cluster(*actors), here)


def test_the_argument_ray_is_checked_before_ray_is_needed():
    for bad in (3, b"head:6379", ["head:6379"]):
        with pytest.raises(TypeError, match="ray: expected the address of a Ray cluster, True or False, got"):
            gr.build("no.onnx", ray=bad)
    for ray in (True, "head:6379"):
        with pytest.raises(ValueError, match="device: expected None with ray, which measures on the cluster's GPUs, got a100"):
            gr.build("no.onnx", ray=ray, device="a100")


def test_a_build_elsewhere_has_the_clusters_driver_and_runs_no_plan_as_a_whole():
    gpus = Spread(Cluster(([FOUND], [])), here)
    on = BuildOptions(timing_cache=False, ray=gpus)
    assert make_timer(H200, on).driver == "580"
    assert runs_whole(H200, BuildOptions()) and not runs_whole(H200, on)
