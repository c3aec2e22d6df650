"""The page of `gpu-runtime report`: its data, its drawing, and what holds hostile names."""

import base64
import gzip
import json
import re
import shlex
from dataclasses import replace

import numpy as np
import pytest

import gpu_runtime as gr
from gpu_runtime.commands.options import profiles, shapes_of
from gpu_runtime.explain import layer_info, wording
from gpu_runtime.explain.facts import KINDS
from gpu_runtime.explain.figures import SURE
from gpu_runtime.explain.log import log_text
from gpu_runtime.explain.report import inspect_text
from gpu_runtime.report import data, drawing, notes, page
from gpu_runtime.runtime.plan_record import EngineRecord
from tests.conftest import DIGITS, model_path
from tests.engines import SPARSE_DEVICE, build
from tests.example_plan import example_plan
from tests.example_plan import measured as as_if_timed
from tests.example_plan import record as made
from tests.reference_run import model, node

EVIL = "</script><img src=x onerror=alert(1)>\u202e{{data}}\x00\u2028\"'`"


def chained(count: int, name: str = "n"):
    """A network of 1x1 convolutions in a row, with a skip around each third."""
    rng = np.random.default_rng(0)
    nodes, weights, x = [], {}, "x"
    for i in range(count):
        weights[f"w{i}"] = rng.normal(0, 0.2, (8, 8, 1, 1)).astype(np.float32)
        nodes.append(node("Conv", f"{x} w{i}", f"c{i}", name=f"{name}{i}"))
        x = f"c{i}"
        if i % 3 == 2:
            nodes.append(node("Add", f"c{i} c{i - 2}", f"s{i}", name=f"{name}add{i}"))
            x = f"s{i}"
    return model(nodes, {"x": (1, 8, 4, 4)}, x, weights)


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> EngineRecord:
    """mnist8, whose plan has a reformat, rows of several verdicts, and candidates in several formats."""
    return gr.build(model_path("mnist8"), device=SPARSE_DEVICE, sparsity="force").record


def carried(html: bytes) -> dict:
    """The data in a page, as its scripts read it."""
    encoding, text = re.search(r'<script [^>]*id="data" data-encoding="(\w+)">(.*?)</script>', html.decode(), re.S).groups()
    assert encoding in ("plain", "gzip")
    return json.loads(text) if encoding == "plain" else json.loads(gzip.decompress(base64.b64decode(text)))


# ---- data


def test_layers_are_the_plan_s(record):
    shown = data.page(record)
    assert [layer["us"] for layer in shown["layers"]] == [layer.time_us for layer in record.plan.layers]
    assert sum(layer["us"] for layer in shown["layers"]) == pytest.approx(shown["verdict"]["total_us"])
    kinds = [layer["kind"] for layer in shown["layers"]]
    assert kinds == ["not_eligible", "other", "dense", "other", "dense", "reformat"]
    assert all(layer["low_us"] < layer["us"] < layer["high_us"] for layer in shown["layers"])
    for layer, own in zip(shown["layers"], record.plan.layers, strict=True):
        assert shown["tactics"][layer["tactic"]]["name"] == own.tactic.runner
        assert [shown["tensors"][i]["name"] for i in layer["inputs"]] == [t.name for t in own.inputs]


def test_candidates_hold_the_chosen_one_and_its_time(record):
    shown = data.page(record)
    with_choice = [layer for layer in shown["layers"] if layer["kind"] != "reformat"]
    for layer in with_choice:
        own = layer["forms"][0]
        assert own["op"] == layer["name"]
        times = {number: us for number, us, _ in own["candidates"]}
        assert times[layer["tactic"]] == pytest.approx(layer["us"]), layer["name"]
        assert [*times.values()] == sorted(times.values()) and len(times) > 1
    assert any("sparse" in shown["tactics"][n] for layer in with_choice for n, *_ in layer["forms"][0]["candidates"])


def test_the_premium_for_doubt_stands_beside_a_candidate_s_time_not_in_it():
    """As it is shown: a time, plus a premium."""
    engine = gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", device=SPARSE_DEVICE, shapes={"x": (256, 1, 8, 8)})
    shown, doubted = data.page(engine.record), 0
    for layer in shown["layers"]:
        for number, us, premium in layer["forms"][0]["candidates"] if "forms" in layer else ():
            assert premium == 0 or "sparse" in shown["tactics"][number]
            if number == layer["tactic"]:
                assert us == pytest.approx(layer["us"])
                doubted += layer.get("layers", 0) * (premium > 0)
    assert doubted == len(engine.sparsity.picked) > 0


def test_what_pruning_took_is_known_per_layer(record):
    found = {layer["name"]: layer for layer in data.page(record)["layers"]}
    pruned = found["Convolution110 + ReLU114"]
    assert 0 < pruned["lost_energy"] < 0.5 and pruned["saved_us"] == pytest.approx(-pruned["cost_us"])


def test_the_command_builds_the_engine_again(record, tmp_path):
    words = shlex.split(data.command(record))
    assert words[:2] == ["build-engine", "mnist8.onnx"] and "--sparsity=force" in words and f"--device={SPARSE_DEVICE}" in words
    flags = replace(record.flags, shapes={"a b": (1, 3, 8, 8)}, workspace=65536, activations=1 << 20)
    words = shlex.split(data.command(replace(record, flags=flags)))
    assert "--shapes=a b:1x3x8x8" in words and "--memPoolSize=workspace:65536B,activations:1" in words


def test_the_command_builds_the_range_of_batches_again(tmp_path):
    sizes = [{"x": tuple((n, 1, side, 8) for n in batches)} for side, batches in ((8, (1, 2, 4)), (16, (3, 3, 3)))]
    graph = [node("Conv", "x w", "y", pads=[1, 1, 1, 1])]
    net = model(graph, {"x": ("n", 1, "h", 8)}, "y", {"w": np.ones((8, 1, 3, 3), np.float32)})
    engine = build(tmp_path, net, shapes=sizes, batch_invariant=True)
    words = shlex.split(data.command(engine.record))
    assert "--batchInvariant" in words
    _, found = profiles(words)
    assert [shapes_of(texts) for texts in found] == [sizes[0], {"x": (3, 1, 16, 8)}]
    flags = "\nflags    --profile=0 --minShapes=x:1x1x8x8 --optShapes=x:2x1x8x8 --maxShapes=x:4x1x8x8"
    assert flags in inspect_text(engine.record)


def test_layers_of_two_plans_are_joined_by_name_then_by_node(tmp_path):
    a, b = (data.page(build(tmp_path, chained(n)).record)["layers"] for n in (6, 7))
    pairs = data.joined(a, b)
    assert [i for i, _ in pairs if i is not None] == [*range(len(a))]
    assert sorted(j for _, j in pairs if j is not None) == [*range(len(b))]
    for i, j in pairs:
        if i is not None and j is not None:
            same = a[i]["name"] == b[j]["name"]
            assert same or set(a[i]["nodes"]) & set(b[j]["nodes"])
    assert (None, len(b) - 1) in [(i, j) for i, j in pairs if i is None] or any(j is None for _, j in pairs)


# ---- words of doubt


@pytest.mark.parametrize(
    "p, word",
    [
        (1.0, "certain"),
        (0.95, "certain"),
        (0.9499, "likely"),
        (0.75, "likely"),
        (0.7499, "toss-up"),
        (0.3, "toss-up"),
    ],
)
def test_log_account_page_and_json_have_the_same_word(p, word):
    plan = example_plan()
    plan["sparsity"]["rows"][1]["p_sparse_faster"] = p
    plan["sparsity"]["summary"] = {"layers": 8, "eligible": 5, "picked": 1, "total_us": 123.0}
    found = made(plan)
    text, shown = log_text(found, 120, 60), data.page(found)
    assert f"1 picked, {word}: " in text
    assert re.findall(r"\((certain \d, likely \d, toss-up \d)\)", text) == [shown["verdict"]["sure"]]
    assert f"{word} 1" in shown["verdict"]["sure"] and shown["verdict"]["sure"].count("1") == 1
    assert KINDS[shown["layers"][2]["kind"]] == f"sparse, {word}" == notes.notes(found)[2]["verdict"]
    info = layer_info.layer_info(found)
    assert info["Layers"][2]["SparsitySureness"] == word
    assert {key.removeprefix("SparsityPicked"): info[key] for key in info if re.match("SparsityPicked(?!Layers)", key)} == {
        w: int(w.lower() == word.replace("-", "")) for w in ("Certain", "Likely", "TossUp")
    }
    told = dict(wording.layer_facts(found.sparsity.rows[1], found))["to flip"]
    assert told.endswith(f"given the error of predictions: {word if p >= 0.5 else 'toss-up'}")


def test_the_page_s_scripts_have_no_words_of_doubt_of_their_own():
    scripts = "".join((page.HERE / f"{name}.js").read_text() for name in page.SCRIPTS)
    assert not [word for word, _ in SURE if word in scripts] and "p_sparse_faster" not in scripts


def test_measured_picks_have_no_word():
    found = made(
        as_if_timed(
            example_plan()
            | {
                "sparsity": example_plan()["sparsity"]
                | {"rows": [row | {"p_sparse_faster": None} for row in example_plan()["sparsity"]["rows"]]}
            }
        )
    )
    assert "1 runs sparse\n" in (text := log_text(found, 120, 60)) and "1 picked: sparse kernels are" in text
    assert data.page(found)["layers"][2]["kind"] == "sparse" and not data.page(found)["verdict"]["sure"]


# ---- memory


@pytest.mark.parametrize("name", ["mnist8", pytest.param("squeezenet11_fp16", marks=pytest.mark.slow)])
def test_blocks_of_the_arena_never_overlap_and_reach_what_is_alive_at_once(name):
    plan = gr.build(model_path(name), device=SPARSE_DEVICE).record.plan
    blocks = data.blocks(plan)
    for i, a in enumerate(blocks):
        assert 0 <= a.first <= a.last < len(plan.steps) and a.offset + a.nbytes <= plan.memory.activation_bytes
        for b in blocks[i + 1 :]:
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart or a.last < b.first or b.last < a.first, (a, b)
    alive = max(sum(b.nbytes for b in blocks if b.first <= s <= b.last) for s in range(len(plan.steps)))
    assert plan.memory.largest_live_bytes - 256 * len(blocks) < alive <= plan.memory.largest_live_bytes
    named = {t for b in blocks for t in b.tensors}
    assert {t.name for layer in plan.layers if layer.tactic for t in layer.outputs} <= named


# ---- the drawing


def overlaps(points, width=drawing.NODE):
    rows = {}
    for x, y in points:
        rows.setdefault(y, []).append(x)
    pairs = [pair for row in map(sorted, rows.values()) for pair in zip(row, row[1:], strict=False)]
    return [(a, b) for a, b in pairs if b - a < width]


def test_rows_follow_edges_and_nothing_overlaps():
    rng = np.random.default_rng(1)
    edges = sorted({(int(a), int(b)) for a, b in rng.integers(0, 60, (150, 2)) if a < b})
    found = drawing.draw(60, edges)
    assert all(found.nodes[a][1] < found.nodes[b][1] for a, b in edges) and not overlaps(found.nodes)
    for (a, b), points in zip(edges, found.edges, strict=True):
        assert points[0] == found.nodes[a] and points[-1] == found.nodes[b]
        assert [y for _, y in points] == sorted(y for _, y in points)
        for x, y in points[1:-1]:  # an edge passes no node's box
            assert all(abs(x - nx) > drawing.NODE / 2 for nx, ny in found.nodes if ny == y)
    assert all(drawing.NODE / 2 <= x <= found.width - drawing.NODE / 2 + 0.1 for x, _ in found.nodes)


def test_a_chain_is_a_straight_line_and_nothing_is_drawn_of_nothing():
    found = drawing.draw(5, [(i, i + 1) for i in range(4)])
    assert len({x for x, _ in found.nodes}) == 1 and all(len(points) == 2 for points in found.edges)
    assert drawing.draw(0, []) == drawing.Drawing((), (), 0.0, 0.0)
    with pytest.raises(ValueError, match="circle"):
        drawing.draw(2, [(0, 1), (1, 0)])


def test_what_forks_and_meets_again_is_symmetric():
    (top, left, right, bottom) = drawing.draw(4, [(0, 1), (0, 2), (1, 3), (2, 3)]).nodes
    assert top[0] == bottom[0] == pytest.approx((left[0] + right[0]) / 2)
    assert right[0] - left[0] == pytest.approx(drawing.NODE + drawing.GAP)


def test_long_edges_are_cut_only_up_to_a_bound(monkeypatch):
    edges = [(i, i + 1) for i in range(9)] + [(0, 9)]
    assert len(drawing.draw(10, edges).edges[-1]) > 2
    monkeypatch.setattr(drawing, "MOST_CUTS", 3)
    assert len(drawing.draw(10, edges).edges[-1]) == 2


# ---- the page


def test_the_page_is_the_same_each_time_and_fetches_nothing(record):
    html = page.report(record)
    assert html == page.report(record) and len(html) < 200_000
    text = html.decode()
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!data:)\w""", re.sub(r"<script.*?</script>", "", text, flags=re.S))
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert carried(html)["pages"][0] == json.loads(json.dumps(data.page(record)))


def hostile(record: EngineRecord) -> EngineRecord:
    """The record with names that try to be markup, everywhere that a file may put one."""
    plan = record.plan
    layers = tuple(
        replace(layer, name=f"{EVIL}{i}", layer=layer.layer or layer.name, nodes=(EVIL, f"node {i}"))
        for i, layer in enumerate(plan.layers)
    )
    rows = tuple(replace(row, sentence=EVIL, why=replace(row.why, sentence=EVIL)) for row in plan.sparsity.rows)
    sparsity, solution = replace(plan.sparsity, rows=rows), replace(plan.solution, method=EVIL, status=EVIL)
    plan = replace(plan, layers=layers, solution=solution, sparsity=sparsity)
    return replace(
        record,
        model=replace(record.model, name=EVIL, sha256=EVIL),
        plans=(plan,),
        source_hash=EVIL,
        flags=replace(record.flags, shapes={EVIL: (1, 2)}),
        producer=replace(record.producer, version=EVIL),
        device=replace(record.device, name=EVIL, title=EVIL, sources=EVIL),
        timing=replace(record.timing, label=EVIL),
    )


def texts(value) -> list[str]:
    """Every text in JSON data."""
    if isinstance(value, (dict, list)):
        return [text for one in (value.values() if isinstance(value, dict) else value) for text in texts(one)]
    return [value] if isinstance(value, str) else []


def test_names_out_of_files_cannot_leave_their_place(record):
    text = page.report(hostile(record)).decode()
    assert text.count("</script>") == 2 and text.count("<script") == 2
    assert "<img" not in text and not {"\u202e", "\x00", "\u2028"} & {*text}
    assert all(one.isprintable() for one in texts(carried(text.encode()))), "nor when the data is read"
    name = carried(text.encode())["pages"][0]["layers"][0]["name"]
    assert name.startswith("</script><img src=x onerror=alert(1)>\\u202e{{data}}\\x00\\u2028")


@pytest.mark.slow
def test_700_layers_stay_below_a_megabyte(tmp_path, record, monkeypatch):
    big = build(tmp_path, chained(120)).record
    assert len(page.report(big)) < 1_000_000
    shown = data.page(big)
    monkeypatch.setattr(page, "MOST_PLAIN", 1000)
    packed = page.report(big)
    assert carried(packed)["pages"][0] == json.loads(json.dumps(shown))
    own = len(page.report(record)) - 12_000  # bytes of a page without its data
    assert own + 700 / len(shown["layers"]) * (len(packed) - own) < 1_000_000


# ---- the command


def test_the_command_writes_one_file(files, cli):
    code, out, err = cli("report tiny.engine -o r.html")
    assert (code, err) == (0, "") and re.fullmatch(r"Wrote r.html: \d+ bytes; open it in a browser, it needs no network\n", out)
    assert len(carried((files / "r.html").read_bytes())["pages"]) == 1
    code, out, _ = cli("report tiny.engine --compare tiny.engine -o report.html")
    found = carried((files / "report.html").read_bytes())
    assert code == 0 and len(found["pages"]) == 2 and all(i == j for i, j in found["joined"])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("report none.engine -o r.html", "none.engine: no such file"),
        ("report tiny.onnx -o r.html", "tiny.onnx"),
        ("report tiny.engine -o tiny.engine", "is a file that this command reads"),
        ("report tiny.engine --compare none.engine -o r.html", "none.engine: no such file"),
        ("report tiny.engine -o no/such/folder/r.html", "no/such/folder"),
    ],
)
def test_what_cannot_be_written_or_read_is_told(files, cli, line, told):
    before = (files / "tiny.engine").read_bytes()
    code, _, err = cli(line)
    assert code == 1 and told in err and not (files / "r.html").exists()
    assert (files / "tiny.engine").read_bytes() == before
