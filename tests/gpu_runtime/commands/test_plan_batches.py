"""`gpu-runtime plan --batches`: the plans of separate builds, from one reading of the model, in a table and on a page."""

import hashlib
import itertools
import json
import math
import re
import time

import numpy as np
import onnx
import pytest

import gpu_runtime as gr
from benchmarks.networks import Net
from gpu_runtime import pipeline
from gpu_runtime.precision import ranges
from gpu_runtime.report.curves import _numbers, _ticks, _without_overlap
from tests.conftest import DIGITS
from tests.reference_run import model, node

BATCHES = (1, 24, 2048)


def shapes(batch):
    return {"x": (batch, 1, 8, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", ["enable", pytest.param("force", marks=pytest.mark.full)])
def test_the_plans_are_those_of_separate_builds(sparsity):
    path = DIGITS / "digits_sparse.onnx"
    found = pipeline.plan(path, ["l4", "rtx4090"], batches=BATCHES, sparsity=sparsity)
    assert [(p.batch, p.device.name) for p in found] == [*itertools.product(BATCHES, ("l4", "rtx4090"))]
    for p in found:
        engine = gr.build(path, sparsity=sparsity, device=p.device.name, shapes=shapes(p.batch))
        assert (p.solution, p.sparsity) == (engine.plan.solution, engine.sparsity)
        assert p.shapes == {i.name: i.shape for i in engine.inputs} == shapes(p.batch)


def test_a_network_of_one_image_is_run_once_for_all_batches(monkeypatch, tmp_path):
    net = Net("n", (1, 64, 28, 28))
    proto = net.finish(net.conv(net.conv("x", "a", 128), "b", 64))
    for v in (*proto.graph.input, *proto.graph.output):
        v.type.tensor_type.shape.dim[0].dim_param = "N"
    runs, largest = [], ranges.largest
    monkeypatch.setattr(ranges, "largest", lambda *given: [runs.append(given[0]), largest(*given)][1])
    monkeypatch.setattr(ranges.execution, "QUICK", ranges.execution.Budget(1, 1))
    found = gr.plan(proto, ["l4"], [1, 2, 9])
    assert len(runs) == 1 and runs[0].inputs[0].shape == (1, 64, 28, 28)
    for p in found:
        assert p.solution == gr.build(proto, sparsity="enable", device="l4", shapes=p.shapes).plan.solution
    assert len(runs) == 4


@pytest.mark.full
def test_a_model_is_read_once(tmp_path):
    """CPU time of four batches together beside separate builds, for a network with 40 MB of weights."""
    net, x = Net("n", (1, 64, 28, 28)), "x"
    for i in range(16):
        x = net.relu(net.conv(x, f"c{i}", 256), f"r{i}")
    proto = net.finish(x)
    for v in (*proto.graph.input, *proto.graph.output):
        v.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(proto, tmp_path / "n.onnx")
    gr.build(tmp_path / "n.onnx", device="l4", shapes={"x": (1, 64, 28, 28)})  # modules
    began = time.process_time()
    pipeline.plan(tmp_path / "n.onnx", ["l4"], batches=(1, 2, 5, 9), sparsity="force")
    together, began = time.process_time() - began, time.process_time()
    for batch in (1, 2, 5, 9):
        gr.build(tmp_path / "n.onnx", sparsity="force", device="l4", shapes={"x": (batch, 64, 28, 28)})
    assert together <= 0.6 * (time.process_time() - began)  # 0.33 on a busy machine


def test_numbers_stand_where_there_is_room():
    curves = [[(0.0, 50.0, 2.5), (200.0, 90.0, 1234.4)], [(0.0, 52.0, 2.4), (200.0, 30.0, 0.8112)]]
    lines = _numbers(curves)
    assert [line.partition(">")[2].removesuffix("</text>") for line in lines] == ["~2.5", "~1,234", "~0.811"]


@pytest.mark.slow
def test_the_table_and_the_page(files, cli):
    command = "plan sparse.onnx --batches 2048,1,24 --devices l4,rtx4090"
    code, out, err = cli(f"{command} --report plan.html")
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 120 and out.isascii()
    rows = [line.split() for line in out.splitlines() if re.match(r"(l4|rtx4090) ", line)]
    assert [row[:2] for row in rows] == [[d, str(b)] for d in ("l4", "rtx4090") for b in BATCHES]
    for device, batch, total, own, dense, library, _, *_, over_dense, over_fastest in rows:
        us, per = float(total[1:]), [float(t[1:]) for t in (own, dense, library)]
        assert per[0] == pytest.approx(us / int(batch), abs=0.006), (device, batch)
        assert float(over_dense[:-1]) == pytest.approx(per[1] / per[0], rel=0.03, abs=0.01)
        assert float(over_fastest[:-1]) == pytest.approx(min(per[1:]) / per[0], rel=0.03, abs=0.01)
    page = (files / "plan.html").read_text()
    assert page.count("<svg") == 2 and page.count("<polyline") == 8 and page.count("<circle") == 24
    numbers = re.findall(r'<text class="value" x="([\d.]+)" y="([\d.]+)" text-anchor="middle">(~[\d.,]+)</text>', page)
    shown = [float(text[1:].replace(",", "")) for *_, text in numbers]
    assert all(any(us == pytest.approx(float(row[3][1:]), rel=0.005, abs=0.006) for us in shown) for row in rows)
    assert re.search(r"svg \{ display: block; width: 100%", page) and not re.search(r"<svg[^>]* width=", page)
    assert "<script" not in page and "default-src 'none'" in page and "All times are predicted" in page
    found = json.loads(cli(f"{command} --json")[1])
    at = [(p["shapes"]["x"][0], p["device"]["name"]) for p in found]
    assert at == [*itertools.product((2048, 1, 24), ("l4", "rtx4090"))]
    assert all(p["solution"]["rivals"]["library"]["us"] > 0 for p in found)


@pytest.mark.parametrize(
    "args,text",
    [
        ("--batches 0,8", "--batches: expected whole numbers of at least 1 with commas between them, got '0'"),
        ("--batches 8,", "with commas between them, got ''"),
        ("--batches 1e3", "got '1e3'"),
        ("--batches ٣", "got '٣'"),
        ("--report p.html", "--report needs --batches=NUMBERS"),
        ("--batches 8 --report sparse.onnx", "is a file that this command reads"),
    ],
)
def test_wrong_options(files, cli, args, text):
    code, out, err = cli(f"plan sparse.onnx --devices l4 {args}")
    assert code and out == "" and text in err


def test_the_json_has_the_hash_of_the_model(files, cli):
    (found,) = json.loads(cli("plan tiny.onnx --devices l4 --json")[1])
    assert found["model"]["sha256"] == hashlib.sha256((files / "tiny.onnx").read_bytes()).hexdigest()


def test_a_fixed_batch_is_refused(files, cli):
    code, out, err = cli("plan tiny.onnx --devices l4 --batches 1,8")
    text = "tiny.onnx: expected a dynamic batch, but the model fixes the first size of input 'x' (1x8x6x6): export it with a"
    assert code == 1 and out == "" and text in err


@pytest.mark.parametrize(
    "model_file,batches", [("tiny.onnx", ""), ("tiny.onnx", "--batches 1"), (DIGITS / "digits_dense.onnx", "")]
)
def test_the_table_is_first_and_prose_is_short(files, cli, model_file, batches):
    """Also of a model that fixes the batch that is asked for. Ten lines of prose a device, below the tables and captions."""
    shapes = "" if model_file == "tiny.onnx" else "--shapes x:64x1x8x8"
    code, out, _ = cli(f"plan {model_file} --devices l4,h200 {batches} {shapes}")
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("device "))
    assert code == 0 and head < 5 and sum(line.startswith(("l4 ", "h200 ")) for line in lines[: head + 5]) == 2
    assert lines[head + 3].split()[1] == ("64" if shapes else "1")
    below = len(lines) - max(i for i, line in enumerate(lines) if not line) - 1
    assert 0 < below <= 20 and max(map(len, lines)) <= 120


def test_inputs_that_share_the_batch(tmp_path):
    """An input with another first size, or a fixed one, keeps it; sizes that stay open are asked for."""
    nodes = [node("Add", "a b", "s"), node("Mul", "s scale", "y")]
    proto = model(nodes, {"a": (1, 8, 4, 4), "b": (1, 8, 4, 4), "scale": (1, 8, 1, 1)}, "y", {})
    for v in proto.graph.input[:2]:
        v.type.tensor_type.shape.dim[0].dim_param = "N"
    onnx.save(proto, tmp_path / "m.onnx")
    (found,) = pipeline.plan(tmp_path / "m.onnx", ["l4"], batches=[6])
    assert found.shapes == {"a": (6, 8, 4, 4), "b": (6, 8, 4, 4), "scale": (1, 8, 1, 1)}
    for v in proto.graph.input[:2]:
        v.type.tensor_type.shape.dim[2].dim_param = "H"
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(gr.ModelError, match=r"the size of input 'a' \(Nx8xHx4\), .*is dynamic: give it"):
        pipeline.plan(tmp_path / "m.onnx", ["l4"], batches=[6])
    (found,) = pipeline.plan(tmp_path / "m.onnx", ["l4"], batches=[6], shapes={"a": (1, 8, 5, 4), "b": (1, 8, 5, 4)})
    assert found.shapes["b"] == (6, 8, 5, 4)


@pytest.mark.parametrize("batches", [[0], [1.5], ["1"], [math.nan], [True], [8, -1]])
def test_batches_in_python(batches):
    with pytest.raises(ValueError, match=f"batches: expected whole numbers of at least 1, got {batches[-1]!r}"):
        gr.plan(DIGITS / "digits_sparse.onnx", "l4", batches)


def test_devices_in_python():
    with pytest.raises(ValueError, match="devices: expected at least one name"):
        gr.plan(DIGITS / "digits_sparse.onnx", [])
    one, same = (gr.plan(DIGITS / "digits_sparse.onnx", "l4", batches) for batches in (8, np.array([8])))
    assert one.to_dict() == same.to_dict() and one.batches == (8,) and type(same.batches[0]) is int


@pytest.mark.parametrize("batches", [(24, 256), pytest.param((24,), marks=pytest.mark.slow)])
def test_the_errors_of_a_librarys_times_and_rates_by_analogy_are_shown(cli, batches):
    options = f" --batches {','.join(map(str, batches))}" if len(batches) > 1 else ""
    words = " ".join(cli(f"plan {DIGITS / 'digits_sparse.onnx'} --devices a100,l4{options} --shapes x:24x1x8x8")[1].split())
    plans = gr.plan(DIGITS / "digits_sparse.onnx", "l4", batches)
    errors = sorted(round(100 * (x.high_us / x.us - 1)) for x in (p.solution.rivals.library for p in plans))
    within = f"are 80 % likely right within {' to '.join(dict.fromkeys(map(str, errors)))} %; "
    within += "launches that use our times: 1; "
    assert f"l4: estimates of a library's dense times {within}rates: taken from similar GPUs, fitted to" in words
    assert re.search(
        r"a100: estimates of a library's dense times are 80 % likely right within [^;]*; [^;]*; rates: fitted", words
    )


def test_ticks_and_names():
    rng = np.random.default_rng(0)
    for low in 10 ** rng.uniform(-2, 5, 200):
        high = low * 10 ** rng.uniform(0, 3)
        ticks = _ticks(low, high)
        assert ticks == sorted(ticks) and ticks[0] <= low * (1 + 1e-9) and ticks[-1] >= high * (1 - 1e-9) and len(ticks) <= 13
        assert all(round(t / 10 ** math.floor(math.log10(t) + 1e-9)) in (1, 2, 5) for t in ticks)
    heights = _without_overlap({0: 10.0, 1: 11.0, 2: 60.0, 3: 12.0})
    assert heights[2] == 60.0 and all(abs(a - b) >= 14 for a, b in itertools.combinations(heights.values(), 2))
