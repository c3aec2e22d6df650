"""gpu-runtime doctor: what it runs, how faults become verdicts, what of it builds read; emulated, and with made-up children."""

import json
import os
import re
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from cuda_kernels import device as devices
from cuda_kernels.device import ARCHITECTURES, NAMED, named
from cuda_kernels.launch import Emulated
from gpu_runtime.building import target
from gpu_runtime.doctor import examine, known_failures, wording
from gpu_runtime.doctor.cases import PROBLEMS, able, cases
from gpu_runtime.doctor.known_failures import Failure
from gpu_runtime.doctor.measured_rates import PRODUCT, RATES, SMALL, products, rate
from gpu_runtime.doctor.worker import CHECKS
from tactics.candidates import base_runner, candidates, rejected
from tactics.format import is_bytes
from tactics.kernels import KERNELS
from tactics.problems.problem import ReformatProblem
from tactics.sampling.data import random_data, reference
from tactics.sampling.trial import Wrong, execute, in_a_graph, judge, trial
from tactics.tiles import DENSE_TILES, SPARSE_TILES
from tests.conftest import DIGITS

H200 = named("h200")
HERE = replace(H200, measured=True)  # as if it were at hand
TILE = "conv_dense_hmma_16816_64x64x64_w2x2_s4"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Findings in a folder of the test's own; compiled kernels and the emulator stay where they are."""
    (tmp_path / "cache").mkdir()
    for entry in known_failures.files.cache_dir().iterdir() if known_failures.files.cache_dir().is_dir() else ():
        if entry.name != "doctor":
            (tmp_path / "cache" / entry.name).symlink_to(entry)
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "cache"))


def sm(arch):
    return next((d for d in NAMED.values() if d.sm == arch), replace(named("a100"), sm=arch))  # with as much memory


# ---- cases


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_kernel_has_cases_and_each_tile_that_is_offered_is_one(arch):
    device = sm(arch)
    found = cases(device)
    there = {name for name, kernel in KERNELS.items() if kernel.sm in ("", arch)}
    assert {c.kernel for c in found} == there
    assert {c.kernel for c in found[: len(there)]} == there  # each has a turn before any has two
    offered = {base_runner(t) for kernel, problems in PROBLEMS.items() for p in problems for t in able(kernel, p, device)}
    missing = {name for name in offered if name.startswith(("conv_dense", "conv_sparse24"))} - {c.unit for c in found}
    assert not missing
    for kernel, tiles in (("conv_dense", DENSE_TILES), ("conv_sparse24", SPARSE_TILES)):
        ran = {replace(c.tactic.gemm, split=1, stream=0) for c in found if c.kernel == kernel}
        refused = {x.tile for x, _ in rejected(PROBLEMS[kernel][0], device) if not isinstance(x, str)}
        assert ran | refused >= set(tiles)
        assert any(c.tactic.gemm.split > 1 for c in found if c.kernel == kernel)


def test_cases_do_not_rest_on_what_a_device_is_denied():
    assert cases(replace(H200, left_out=(("move", "x"),))) == cases(H200)


def test_few_cases_are_of_every_kernel():
    found = cases(H200, few=True)
    assert {c.kernel for c in found} == set(KERNELS) and len(found) <= 2 * len(KERNELS)


@pytest.mark.parametrize("device", [H200, named("l4")], ids=lambda d: d.name)
def test_bytes_are_read_and_written_in_cases_of_each_problem_that_may_have_them(device):
    found = {
        (c.kernel, type(c.problem), place)
        for c in cases(device)
        for place, formats in (("in", c.tactic.ins), ("out", (c.tactic.out,)))
        if any(map(is_bytes, formats))
    }
    kinds = [(k.name, kind) for k in KERNELS.values() for kind in k.whole] + [("move", ReformatProblem)]
    assert found == {(*kind, place) for kind in kinds for place in ("in", "out")}


# ---- one case


def test_a_right_kernel_passes_alone_and_in_a_graph():
    tactic = candidates(SMALL, H200)[0]
    assert trial(Emulated(H200), SMALL, tactic) < 1e-3
    assert trial(Emulated(H200), SMALL, tactic, in_a_graph) < 1e-3


class Idle(Emulated):
    """Launches nothing."""

    def launch(self, *args):
        pass


class Wide(Emulated):
    """Adds one to the first two bytes that a launch leaves in its newest allocation, which is the output."""

    def allocate(self, nbytes, constant=False):
        self.newest = super().allocate(nbytes, constant)
        return self.newest

    def launch(self, *args):
        super().launch(*args)
        self.write(self.newest, np.array([7.0], np.float16))


@pytest.mark.parametrize("gpu, words", [(Idle, "never written"), (Wide, "relative error")])
def test_a_wrong_kernel_is_wrong(gpu, words):
    with pytest.raises(Wrong, match=words):
        trial(gpu(H200), SMALL, candidates(SMALL, H200)[0])


def test_padding_that_is_not_zero_is_wrong():
    inputs, weights = random_data(SMALL)
    got = execute(Emulated(H200), SMALL, candidates(SMALL, H200)[0], inputs, weights)
    with pytest.raises(Wrong, match="padded"):
        judge(np.concatenate([got, got + 1], axis=1), reference(SMALL, inputs, weights), SMALL.out_shape[1])


class Early(Emulated):
    """Every third launch is lost, as if it had read before the one ahead had written."""

    count = 0

    def launch(self, *args):
        self.count += 1
        if self.count % 3:
            super().launch(*args)


def test_checks_pass_and_see_a_chain_that_breaks():
    for check in CHECKS.values():
        check(Emulated(H200))
    with pytest.raises(Wrong, match="passed through all"):
        CHECKS["dependent launches"](Early(H200))


@pytest.mark.parametrize("name", ["h200", "rtx4090", "a100"])
def test_tables_have_all_rates(name):
    for kind in RATES:
        assert rate(named(name), kind, None).table > 0
    assert rate(named(name), "SM clock", 0.5 * named(name).clock_mhz).share == pytest.approx(0.5, rel=1e-3)
    assert {t.sparse for t in products(named(name))} == {False, True} and PRODUCT.sparse24


# ---- a child that fails

CHILD = """
import json, os, sys, time
device = json.loads({device!r})
print(json.dumps({{"device": device, "facts": {{"CUDA of the driver": "13.0"}}}}), flush=True)
for line in sys.stdin:
    r = json.loads(line)
    reply = {{"value": 100.0}} if r["op"] == "rate" else {{"error_of": 1e-4}}
    if r["op"] == "case":
        reply = ({faults})(r["tactic"]) or reply
    print(json.dumps({{"id": r["id"], **reply}}), flush=True)
"""


def child(tmp_path, faults="lambda name: None", device=HERE):
    """The command of a child that answers as if all were right, but for `faults`: tactic's name -> answer, or no answer."""
    text = json.dumps(known_failures.codec.to_json(type(device), device))
    path = tmp_path / "child.py"
    path.write_text(CHILD.format(device=text, faults=faults))
    return sys.executable, str(path)


def examined(
    tmp_path,
    faults="lambda name: None",
    kernels=("pointwise", "pool"),
    compiler=lambda *kernel: None,
    hang_s=examine.HANG_S,
    **options,
):
    """With a made-up child nothing is run, so that nothing needs to be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examine, "compile_kernel", compiler)
        return examine.examine(H200, child=(child(tmp_path, faults), hang_s), kernels=kernels, **options)


def family(found, kernel):
    return next(f for f in found.families if f.kernel == kernel)


def test_an_answer_without_an_error_is_no_pass(tmp_path):
    """It is a fault of the program, not of a kernel, and does not count as correct."""
    with pytest.raises(KeyError, match="error_of"):
        examined(tmp_path, 'lambda name: {"seen": 1}')


def test_all_is_well(tmp_path):
    found = examined(tmp_path)
    assert found.well and not found.no_gpu and not found.denied and found.kept
    assert [r.measured for r in found.rates] == [100.0] * len(RATES)
    assert found.versions["CUDA of the driver"] == "13.0"
    assert "Passed: 2 kernel families give correct results" in wording.text(found)
    assert known_failures.of(HERE) == () and known_failures.read(known_failures.path_of(HERE))


FAULTS = {  # name -> (the child's answer for the pool, words of the verdict)
    "wrong": ('{"wrong": "relative error 3.1e-01"}', "computes wrong results"),
    "refused": ('{"error": "DriverError: cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"}', "CUDA_ERROR_INVALID_VALUE"),
    "context lost": ('{"error": "CUDA_ERROR_ILLEGAL_ADDRESS", "fatal": True}', "ILLEGAL_ADDRESS"),
    "crash": ("os.abort()", "ended with code -6"),
    "hang": ("time.sleep(60)", "no answer in 1 s: the process hung"),
    "nonsense": ('print("nonsense")', "not a JSON answer: b'nonsense'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_verdict_and_no_end(tmp_path, name):
    does, words = FAULTS[name]
    found = examined(tmp_path, f'lambda name: {does} if name.startswith("pool__") else None', hang_s=1.0)
    bad, good = family(found, "pool"), family(found, "pointwise")
    assert (bad.status, good.status, found.well) == ("failed", "passed", False)
    assert all(words in o.why for o in bad.of("failed"))
    (denied,) = found.denied
    assert denied.what == "pool" and words in denied.why
    text = wording.text(found)
    assert "Not passed" in text and "Plans for this GPU exclude: pool" in text and words in text
    assert known_failures.of(HERE) == found.denied


def test_after_two_lost_processes_no_third_is_risked(tmp_path):
    log = tmp_path / "log"
    faults = f'lambda name: (open({str(log)!r}, "a").write(name), os.abort()) if name.startswith("pointwise__") else None'
    found = examined(tmp_path, faults, kernels=("move", "pointwise", "conv_fp32"))
    assert family(found, "move").status == "passed" and sum(o.lost for o in family(found, "pointwise").outcomes) == 2
    crashing = 'lambda name: os.abort() if name.startswith("move__") else None'
    move = family(examined(tmp_path, crashing, kernels=("move",)), "move")
    assert [o.status for o in move.outcomes[:3]] == ["failed", "failed", "untested"] and len(move.outcomes) > 3


def test_a_tile_that_fails_is_denied_alone(tmp_path):
    faults = f'lambda name: {{"wrong": "zeros"}} if name.startswith({TILE!r}) else None'
    found = examined(tmp_path, faults, kernels=("conv_dense",))
    assert [f.what for f in found.denied] == [TILE]
    assert family(found, "conv_dense").status == "failed" and family(found, "conv_dense").of("passed")


@pytest.mark.parametrize("does", ['{"error": "OutOfMemoryError: x", "passing": True}', "os.kill(os.getpid(), 9)"])
def test_what_the_machine_does_is_no_kernels_fault(tmp_path, does):
    found = examined(tmp_path, f'lambda name: {does} if name.startswith("pool__") else None')
    assert (family(found, "pool").status, family(found, "pointwise").status) == ("untested", "passed")
    assert not found.well and not found.denied


def test_where_nothing_is_right_no_kernel_is_to_blame(tmp_path):
    found = examined(tmp_path, 'lambda name: {"wrong": "zeros"}', kernels=("pool", "reduce", "gather"))
    assert found.common_cause and not found.well and not found.denied and not found.kept
    assert "Every case failed" in wording.text(found)
    assert not known_failures.path_of(HERE).exists()


@pytest.mark.slow
def test_time_ends_and_the_rest_is_untested(tmp_path):
    found = examined(tmp_path, "lambda name: time.sleep(30)", kernels=("pool", "move"), limit_s=4.0)
    assert found.took_s < 20 and not found.well and not found.denied
    assert {f.status for f in found.families} == {"untested"}
    assert all(o.why == examine.OVER for f in found.families for o in f.outcomes)
    assert "untested" in wording.text(found) and "--time-limit" in wording.text(found)


def test_a_child_that_never_starts_leaves_all_untested(tmp_path):
    (tmp_path / "dead.py").write_text("raise SystemExit('no CUDA on /home/someone/secret/place today')")
    found = examine.examine(H200, child=((sys.executable, str(tmp_path / "dead.py")), examine.HANG_S), kernels=("move",))
    assert not found.well and {f.status for f in found.families} == {"untested"} and not found.kept
    assert "someone" not in json.dumps(wording.data(found))


def test_a_kernel_that_does_not_compile_is_a_verdict(tmp_path):
    def broken(*_):
        raise examine.CompileError("pool.cu: ptxas\nfatal")

    found = examined(tmp_path, kernels=("pool", "library"), compiler=broken)
    assert (family(found, "pool").status, family(found, "library").status) == ("failed", "passed")
    assert "does not compile: pool.cu: ptxas fatal" in found.denied[0].why


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_family_is_right_in_the_emulator(kernel):
    for case in cases(H200, few=True):
        if case.kernel == kernel:
            assert trial(Emulated(H200), case.problem, case.tactic) < 2e-3


def test_the_real_child_runs_in_the_emulator():
    found = examine.examine(H200, emulated=True, kernels=("pointwise", "library", "move"))
    assert found.well and found.emulated and not found.kept and not found.rates
    assert all(o.error_of < 1e-3 for f in found.families for o in f.outcomes)
    assert not (known_failures.files.cache_dir() / "doctor").exists()


# ---- the failures that builds read


def test_findings_are_of_a_driver_and_a_version_of_the_sources(monkeypatch):
    failed = (Failure("conv_sparse24", "hung"), Failure(TILE, "wrong"))
    assert known_failures.keep(HERE, failed) and known_failures.of(HERE) == failed
    assert known_failures.of(replace(named("a100"), measured=True)) == ()
    with pytest.warns(RuntimeWarning, match="plans exclude these kernels.*conv_sparse24"):
        device = known_failures.applied(HERE)
    assert dict(device.left_out) == {"conv_sparse24": "hung", TILE: "wrong"}
    monkeypatch.setattr(known_failures, "driver_version", lambda: "999.1")
    with pytest.warns(RuntimeWarning, match="2 kernels or tiles fail.*now 999.1: ignored"):
        assert known_failures.applied(HERE) == HERE
    known_failures.keep(HERE, ())
    assert known_failures.of(HERE) == () and len(known_failures.read(known_failures.path_of(HERE))) == 2
    monkeypatch.undo()


def test_what_was_not_seen_right_again_stays_denied(tmp_path):
    known_failures.keep(HERE, (Failure("pool", "old"), Failure("conv_stem", "old"), Failure(TILE, "old")))
    assert [f.what for f in examined(tmp_path, kernels=("pool",)).denied] == ["conv_stem", TILE]


def test_only_the_newest_records_stay(monkeypatch):
    for i in range(2 * known_failures.MOST_RECORDS):
        monkeypatch.setattr(known_failures, "driver_version", lambda i=i: f"{i}.0")
        known_failures.keep(HERE, (Failure("move", str(i)),))
    found = known_failures.read(known_failures.path_of(HERE))
    assert len(found) == known_failures.MOST_RECORDS and found[0].failed[0].why == str(2 * known_failures.MOST_RECORDS - 1)


RECORD = {"device": "d", "driver": "1", "source": "s", "failed": [{"what": "move", "why": "x"}]}
HOSTILE = {
    "no JSON": b"{",
    "a list": b"[]",
    "nested": b"[" * 100_000,
    "another version": json.dumps({"version": 2, "records": []}).encode(),
    "an unknown field": json.dumps({"version": 1, "records": [], "more": 1}).encode(),
    "an unknown kernel": json.dumps({"version": 1, "records": [RECORD | {"failed": [{"what": "rm", "why": ""}]}]}).encode(),
    "control characters": json.dumps({"version": 1, "records": [RECORD | {"driver": "\x1b[2J"}]}).encode(),
    "a long text": json.dumps({"version": 1, "records": [RECORD | {"driver": "9" * 501}]}).encode(),
    "numbers": json.dumps({"version": 1, "records": [RECORD | {"driver": 580}]}).encode(),
    "not a number": b'{"version": NaN, "records": []}',
    "no text": b"\xff\xfe\x00",
    "too long": b" " * ((1 << 20) + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_something_else_is_ignored_with_a_warning(name):
    path = known_failures.path_of(HERE)
    path.parent.mkdir(parents=True)
    path.write_bytes(HOSTILE[name])
    with pytest.warns(RuntimeWarning, match="it is ignored") as told:
        assert known_failures.applied(HERE) == HERE
    assert all(str(w.message).isprintable() and len(str(w.message)) < 600 for w in told)
    with pytest.warns(RuntimeWarning):
        assert known_failures.keep(HERE, (Failure("move", "x"),))
    assert known_failures.of(HERE) == (Failure("move", "x"),)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_folder_or_a_pipe_is_ignored(kind):
    path = known_failures.path_of(HERE)
    path.parent.mkdir(parents=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.warns(RuntimeWarning, match="it is ignored"):
        assert known_failures.of(HERE) == ()


def test_two_at_once_leave_a_whole_file():
    sets = [tuple(Failure(k, "x" * n) for k in list(KERNELS)[:n]) for n in (1, 20)]
    threads = [threading.Thread(target=known_failures.keep, args=(HERE, sets[i % 2])) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert known_failures.of(HERE) in sets


@pytest.mark.slow
def test_a_build_leaves_out_what_failed_and_says_so(monkeypatch):
    hung = (
        Failure(kernel, "no answer in 15 s: the process hung and was killed")
        for kernel in ("conv_sparse24", "conv_strip_sparse24", "conv_sparse24_sm90")
    )
    known_failures.keep(HERE, (*hung, Failure(TILE, "zeros")))
    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(devices, "current", lambda: HERE)
    with pytest.warns(RuntimeWarning, match="plans exclude these kernels"):
        device = target.pick_device(None)
    assert target.pick_device("h200").left_out == ()
    lines = []
    engine = gr.build(
        DIGITS / "digits_sparse.onnx",
        sparsity="enable",
        device=replace(device, measured=False),
        shapes={"x": (2048, 1, 8, 8)},
        log=lines.append,
    )
    tactics = {la.tactic.kernel for la in engine.plan.layers if la.tactic}
    assert {"conv_dense", "conv_dense_sm90"} & tactics and "conv_sparse24" not in tactics
    assert not any(base_runner(la.tactic) == TILE for la in engine.plan.layers if la.tactic)
    log = "\n".join(lines)
    assert re.search(rf"Skipping \d+ tactics of .*: cannot run: failed_here: gpu-runtime doctor saw {TILE} fail", log)
    info = engine.layer_info()
    assert "conv_sparse24: no answer in 15 s" in info["LeftOut"]
    details = [la["SparsityDetail"] for la in info["Layers"] if la.get("SparsityEligible")]
    assert details and all(re.search(r"saw conv_(strip_)?sparse24(_sm90)? fail on this GPU: no answer", d) for d in details)
    assert "LeftOut" not in gr.build(DIGITS / "digits_sparse.onnx", device="h200", shapes={"x": (1, 1, 8, 8)}).layer_info()


def test_a_network_that_needs_what_failed_is_refused_with_the_reason():
    device = replace(H200, left_out=tuple((k, "zeros") for k in ("conv_dense", "conv_dense_sm90", "conv_stem", "conv_fp32")))
    with pytest.raises(gr.ModelError, match="doctor saw conv_dense fail on this GPU: zeros"):
        gr.build(DIGITS / "digits_dense.onnx", device=device, shapes={"x": (1, 1, 8, 8)})
