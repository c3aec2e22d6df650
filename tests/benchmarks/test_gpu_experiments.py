"""The rows of `make gpu` that need no GPU to be tried: stored plans, the pack, ledgers, and what the tables say of results."""

import io
import json
import lzma
import tarfile
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from benchmarks import our_times
from benchmarks.experiments import changed, counters, kernels, layers, pack, peers, right, stored
from benchmarks.networks import Net
from cuda_kernels import compile as compiling
from cuda_kernels.compile import compile_kernel, is_kept, nvrtc_version
from cuda_kernels.device import named
from gpu_runtime.runtime.plan_record import LaunchStep
from tactics.candidates import candidates
from tactics.kernels import KERNELS
from tactics.launches import binaries
from tactics.tactic import Tactic
from tests.engines import emulated

H200 = named("h200")


def engine(sparsity: str = "force"):
    """Convolutions of several kinds, a pool, a normalization and a fully connected layer."""
    n = Net("kinds", (2, 16, 12, 12))
    x = n.relu(n.norm(n.conv("x", "a", 32, 3), "b"), "c")
    x = n.add("Add", [n.conv(x, "d", 32, 1), x], "e", 32)
    x = n.conv(n.relu(x, "f"), "g", 32, 3, groups=32)
    x = n.add("MaxPool", [x], "h", 32, kernel_shape=[2, 2], strides=[2, 2])
    return gr.build(n.finish(n.conv(x, "i", 24, 3, prune=True)), sparsity=sparsity, device="h200")


# ---- plans without weights


@pytest.mark.parametrize("sparsity", ["disable", "force"])
def test_a_stored_plan_is_the_engines_with_other_weights(sparsity):
    """The same steps, sections and sizes; no section is empty; two draws are equal, another seed's are not."""
    made = engine(sparsity)
    data = stored.stored(made)
    again = stored.engine_of(data)
    assert len(data) < 30_000 and again.plan.steps == made.plan.steps and again.weights.nbytes == made.weights.nbytes
    for s in again.record.sections:
        assert again.weights[s.offset : s.end].any() == made.weights[s.offset : s.end].any(), s.name
    assert (stored.engine_of(data).weights == again.weights).all() and (
        stored.engine_of(data, 1).weights != again.weights
    ).any()
    x = np.random.default_rng(0).standard_normal((2, 16, 12, 12)).astype(np.float32)
    [y] = emulated(again, {"x": x}).values()
    assert np.isfinite(y).all() and 0.1 < y.std() < 50


def test_what_is_no_stored_plan_is_refused(monkeypatch):
    for data in (b"", b"an engine", lzma.compress(b"no JSON")):
        with pytest.raises(ValueError, match=f"expected a stored plan, got {len(data)} other bytes"):
            stored.engine_of(data)
    data = stored.stored(engine("disable"))
    monkeypatch.setattr(stored, "is_checkable", lambda record: False)
    with pytest.raises(ValueError, match="of other kernel sources: make gpu-pack"):
        stored.engine_of(data)


def test_the_kernels_of_a_plan_are_those_of_its_steps():
    record = engine().record
    found = set(kernels.of_record(stored.record_of(stored.stored(engine()))))
    assert {step.key for step in record.plan.steps if isinstance(step, LaunchStep)} <= found
    assert {kernel for kernel, _ in found} >= {"move"}  # the image's format


# ---- the pack


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """A pack and a cache of their own."""
    monkeypatch.setattr(stored, "PACK", tmp_path / "pack")
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(tmp_path / "here"))
    (tmp_path / "pack").mkdir()
    return tmp_path


def packed(folders, whole: bool, wanted=(("flush_l2", ()), ("pool_global", (("IN_LINEAR", 0),)))) -> None:
    entries, failed = pack.compiled(wanted[:1], "sm_90a")
    assert not failed
    (folders / "pack" / "00_row.tar.xz").write_bytes(pack.archive(entries, whole))
    (folders / "pack" / "manifest.json").write_text(json.dumps({"nvrtc": nvrtc_version(), "rows": {"row": 1}}))


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_packed_is_not_compiled_again(folders, monkeypatch, whole):
    packed(folders, whole)
    first = compile_kernel("flush_l2", {}, "sm_90a")
    monkeypatch.setenv("GPU_RUNTIME_CACHE", str(folders / "there"))
    assert not is_kept("flush_l2", {}, "sm_90a")
    assert pack.unpack() == (1, json.loads((folders / "pack" / "manifest.json").read_text()))
    monkeypatch.setattr(compiling, "_nvrtc", lambda *_: pytest.fail("it is compiled"))
    again = compile_kernel("flush_l2", {}, "sm_90a")
    assert again.cubin == first.cubin and again.regs == first.regs and again.ptx == (first.ptx if whole else "")
    assert pack.unpack()[0] == 0  # nothing that stands there is written


def test_plans_of_other_kernels_are_left_alone(folders, monkeypatch):
    path = stored.path_of("h200", "kinds", 2, "dense")
    assert stored.packed("h200", "kinds", 2, "dense") is None
    path.parent.mkdir(parents=True)
    path.write_bytes(stored.stored(engine("disable")))
    assert stored.packed("h200", "kinds", 2, "dense") is None  # no manifest
    (stored.PACK / "manifest.json").write_text(json.dumps({"kernels": stored.source_hash()}))
    assert stored.packed("h200", "kinds", 2, "dense") == path.read_bytes() and list(kernels.of_plans(H200))
    monkeypatch.setattr(stored, "source_hash", lambda: "of other kernels")
    assert stored.packed("h200", "kinds", 2, "dense") is None and not list(kernels.of_plans(H200))


def test_a_damaged_archive_is_named(folders):
    packed(folders, True)
    path = folders / "pack" / "00_row.tar.xz"
    path.write_bytes(path.read_bytes()[:-20] + b"x" * 20)
    with pytest.raises(ValueError, match="00_row.tar.xz: expected an archive of make gpu-pack"):
        pack.unpack()


def test_a_pack_of_another_compiler_is_left_alone(folders, monkeypatch):
    packed(folders, True)
    monkeypatch.setattr(pack, "nvrtc_version", lambda: "14.1")
    assert pack.unpack() == (0, {})


def test_only_cache_entries_are_unpacked(folders):
    packed(folders, True)
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("../../outside")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    (folders / "pack" / "00_row.tar.xz").write_bytes(lzma.compress(data.getvalue()))
    with pytest.raises(ValueError, match="expected cache entries, got '../../outside'"):
        pack.unpack()
    assert not (folders / "outside").exists() and not (folders.parent / "outside").exists()


def test_rows_beyond_the_limit_are_left_out_and_told(folders, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "of_row", lambda name, *_: [("flush_l2", ())])
    monkeypatch.setattr(pack, "SMALL_PLANS", ())
    monkeypatch.setattr(pack, "MOST_BYTES", 10)
    assert pack.main(["--small", "--devices", "h200", "--rows", "facts"]) == 1
    assert "left out: facts" in capsys.readouterr().out and not list(stored.PACK.glob("*.xz"))
    monkeypatch.setattr(pack, "MOST_BYTES", 45 << 20)
    assert pack.main(["--small", "--devices", "h200", "--rows", "facts"]) == 0
    assert json.loads((stored.PACK / "manifest.json").read_text())["rows"] == {"facts": 1}


@pytest.mark.slow
def test_builds_are_rehearsed_by_predictions_with_errors():
    """Less than all tactics, and at least those of the predicted plan."""
    found = list(kernels.of_builds(kernels.SMALL_BUILD, H200))
    every = {b for p, ts in _work() for t in ts for b in binaries(p, t)}
    assert set(found) <= every and 4 < len(set(found)) < 0.6 * len(every)


def _work():
    from benchmarks import gpu_networks
    from benchmarks.bench_networks import KINDS, model_of

    timer = gpu_networks.Collecting(H200)
    with gpu_networks.fewer_tactics(False, lambda *_, **__: timer):
        gr.build(model_of("two_layers", 1)[0], **KINDS["dense"], device="h200")
    return timer.work


# ---- ledgers


def test_a_kernel_is_changed_until_a_gpu_ran_it_right(monkeypatch, tmp_path):
    monkeypatch.setattr(right.hardware, "DEFAULT", tmp_path)
    assert right.changed(tmp_path / "h100") == list(KERNELS)
    for gpu in ("h100", "h200"):
        (tmp_path / gpu).mkdir()
    right.learn(tmp_path / "h200" / right.LEDGER, {"conv_dense": 3, "pool": 2})
    right.learn(tmp_path / "h200" / right.LEDGER, {"pool": 4})
    rows = json.loads((tmp_path / "h200" / right.LEDGER).read_text())
    assert rows["pool"][1] == 4 and rows["conv_dense"][1] == 3
    assert set(KERNELS) - set(right.changed(tmp_path / "h100")) == {"conv_dense", "pool"}
    monkeypatch.setattr(right, "digest", lambda kernel: "other")
    assert right.changed(tmp_path / "h100") == list(KERNELS)


def test_the_h200_has_timed_what_has_not_changed_since():
    """Rows of kernels that are as they were are left alone; of the others those that are still offered are timed."""
    folder = our_times.RESULTS / "h200"
    ledger = json.loads((folder / changed.LEDGER).read_text())
    stale = {tactic.kernel for _, tactic in changed.stale(folder)}
    timed = {row.tactic.kernel for row in our_times.read("h200")}
    assert len(timed) > 10 and {kernel for kernel in timed if right.digest(kernel) != ledger[kernel][0]} == stale & timed
    for problem, tactic in changed.pairs(folder, H200, True):
        fp32 = tuple(f.dtype for f in (*tactic.ins, tactic.out))
        assert tactic in candidates(problem, H200, fp32 if "fp32" in fp32 else ())


def test_new_times_replace_old_ones_and_are_learnt(monkeypatch, tmp_path):
    old, new = (
        {"problem": {"type": "x", "n": n}, "tactic": "pool__fp16.hwc8_fp16.hwc8", "us": us, "run": 1}
        for n, us in ((1, 5.0), (2, 6.0))
    )
    (tmp_path / "tactics.jsonl").write_text(json.dumps(old) + "\n" + json.dumps(new) + "\n")
    taken = [new | {"us": 4.0, "run": 2}]
    (tmp_path / "changed.json").write_text(json.dumps({"driver": "580", "emulated": False, "rows": taken}))
    changed.merge(tmp_path / "changed.json")
    rows = [json.loads(line) for line in (tmp_path / "tactics.jsonl").read_text().splitlines()]
    assert rows == [old, *taken]


def test_rows_that_a_run_did_not_reach_stay_stale(monkeypatch, tmp_path):
    """A row's own source counts; the ledger's is of rows without one."""
    rows = [json.loads(line) for line in (our_times.RESULTS / "h200" / "tactics.jsonl").read_text().splitlines()[:2]]
    kernel = Tactic.parse(rows[0]["tactic"]).kernel
    reached = rows[0] | {"source": right.digest(kernel)}
    (tmp_path / "tactics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (reached, rows[1])))
    assert [t.name for _, t in changed.stale(tmp_path)] == [rows[1]["tactic"]]
    monkeypatch.setattr(right, "digest", lambda kernel: "other")
    assert len(changed.stale(tmp_path)) == 2


def test_each_kernel_is_judged_by_tactics_of_its_own():
    """INT8's by the doctor's; a kernel without any would be right unseen."""
    asked = right.asked(H200, list(KERNELS), small=False)
    assert {name: 0 < len(set(of)) == len(of) <= right.MOST for name, of in asked.items()} == dict.fromkeys(KERNELS, True)
    assert all(t.kernel == name for name, of in asked.items() for _, t in of)
    assert {t.ins[0].dtype for _, t in asked["conv_sparse24_int8"]} == {"int8"}


# ---- the arguments of rows, and their output


@pytest.mark.slow
def test_the_layers_are_those_of_the_table_with_tactics_of_each_kind():
    for name in layers.SHAPES:
        found = {kind: layers.entries(name, H200, kind) for kind in layers.kinds(name)}
        assert all(3 <= len(of) <= 5 for of in found.values()), name
        for kind, of in found.items():
            assert {(e.problem.sparse24, e.tactic.sparse) for e in of} == {(layers.KINDS[kind].sparse,) * 2}
            assert {e.tactic.ins[0].dtype for e in of} == {"int8" if kind.startswith("INT8") else "fp16"}
        assert ("INT8 2:4" in found) == (name in layers.BYTES)
        strips = {(e.tactic.gemm.m, e.tactic.gemm.n) for e in found["dense"] + found["2:4"] if e.tactic.gemm.box}
        deep = layers.problem(name).r == 3 and layers.SHAPES[name][1] >= 256
        assert not deep or strips & set(layers.STRIPS), name


def test_ends_at_batch_1_are_of_one_tile_in_a_cluster_and_in_memory():
    """And of a whole K, stored by TMA and by threads; two of the first layer where the size is small."""
    found = changed.ends_1(H200, False)
    of_layer = [[t for p, t in found if p == problem] for problem in dict.fromkeys(p for p, _ in found)]
    assert len(of_layer) == len(changed.LONG_K) and changed.ends_1(H200, True) == found[:2]
    for meeting, same, *others in of_layer:
        (deep,) = {meeting.gemm.cluster[2], same.gemm.split}
        assert deep > 1 and meeting.gemm.whole == replace(same.gemm, split=1, cluster=(1, 1, deep))
        assert {(t.gemm.split > 1, t.out.layout) for t in others} >= {(False, "hwc8"), (False, "chw32")}
    assert changed.ends_1(named("a100"), False) == []


def timed(**us: float) -> list[dict]:
    kinds = {"dense": "dense", "sparse": "2:4", "int8": "INT8"}
    return [{"tactic": f"t{t}", "kind": kinds[k], "us": t, "tflops": 700.0, "predicted_us": 0.9 * t} for k, t in us.items()]


def test_the_table_of_layers_has_the_best_of_each_kind():
    rows = [timed(dense=200.0, sparse=150.0) + timed(dense=400.0), timed(dense=200.0, int8=100.0)]
    head, both, dense, whole = layers.table({"layers": [{"layer": f"l{i}", "tactics": of} for i, of in enumerate(rows)]})
    assert both.split()[1:] == ["200.0", "700", "180.0", "150.0", "700", "135.0", "1.33"] and head.startswith("layer")
    assert dense.split()[1:] == ["200.0", "700", "180.0", "nan", "nan", "nan", "nan"]
    assert whole.split() == ["l1", "INT8", "100.0", "700", "90.0", "nan", "nan", "nan", "nan"]


def test_the_table_of_peers_has_their_times_over_ours():
    times = {"dense": 100.0, "2:4": 80.0, "INT8": 60.0, "cudnn": 120.0, "cublas": 90.0, "cublas INT8": 75.0, "cusparselt": 70.0}
    _, line = peers.table({"layers": [{"layer": "vgg"} | {label: {"us": us} for label, us in times.items()}]})
    expected = "100.0 80.0 60.0 - 120.0 - 90.0 75.0 70.0 1.25 1.20 0.88 1.29 1.25"
    assert line.split()[1:] == expected.split()


def test_peers_meet_the_best_tactics_that_were_timed(tmp_path):
    name = "small 1x1"
    x = peers.Experiment(tmp_path / "peers.json", 0.0, True, [], H200)
    predicted = peers.chosen(name, x)
    assert {k: (e.tactic.sparse, e.problem.sparse24, e.tactic.out) for k, e in predicted.items()} == {
        kind: (sparse, sparse, fmt) for kind, (fmt, sparse) in layers.KINDS.items()
    }
    best = predicted["dense"].tactic
    other = next(t for t in candidates(layers.problem(name), H200) if not t.sparse and t != best)
    row = {"layer": name, "tactics": [{"tactic": other.name, "kind": "dense", "us": 1.0}]}
    (tmp_path / "compute_bound.json").write_text(json.dumps({"layers": [row]}))
    assert peers.chosen(name, x) == predicted | {"dense": layers.Entry(layers.problem(name), other)}


NCU = """==PROF== Connected to process 7
==PROF== Profiling "conv_dense_sm90" - 0: 0%....100% - 9 passes
"ID","Process ID","Kernel Name","gpu__time_duration.sum","lts__throughput.avg.pct",LONG,WAIT
"","","","us","%","inst","inst"
"0","7","conv_dense_sm90","25.10","40.1","3.5","1.25"
"1","7","flush_l2","1,000.0","1.0","0.1","0.1"
"2","7","conv_dense_sm90","1,024.5","61.5","2.5","0.75"
"""
for short, reason in (("LONG", "long_scoreboard"), ("WAIT", "wait")):
    NCU = NCU.replace(short, f'"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"')


def test_counters_are_of_the_kernels_last_launch():
    found = counters.metrics(NCU, "conv_dense_sm90")
    assert found["gpu__time_duration.sum"] == 1024.5 and found["lts__throughput.avg.pct"] == 61.5
    first, waits = counters.shown("end", found)
    assert "lts__throughput.avg.pct 61.5" in first and waits == "  waits: long_scoreboard 2.50, wait 0.75"
    for text, kernel in ((NCU, "conv_sparse24_sm90"), ("==ERROR== no permission", "conv_dense_sm90")):
        with pytest.raises(ValueError, match=f"ncu reported no launch of {kernel}"):
            counters.metrics(text, kernel)


def test_both_targets_of_ncu_are_tactics():
    found = counters.targets(H200, False)
    assert not found["64>256 residual"].tactic.sparse and found["long 2:4"].tactic.sparse
    assert all(Tactic.parse(e.tactic.name) == e.tactic for e in found.values())
