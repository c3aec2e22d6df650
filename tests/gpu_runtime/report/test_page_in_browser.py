"""The report's page in a real browser: it loads, sorts, filters, is clicked and typed at, and lets nothing else run."""

from dataclasses import replace

import onnx
import pytest

import gpu_runtime as gr
from gpu_runtime.explain import wording
from gpu_runtime.report import page
from tactics.reason import Reason
from tests.browser import CHROMIUM, Browser
from tests.conftest import model_path
from tests.engines import SPARSE_DEVICE
from tests.gpu_runtime.report.test_page import hostile
from tests.networks.test_counts import SMALL

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
ROWS = "[...document.querySelectorAll('#layer-table tbody tr')].filter(r => !r.hidden)"
NAMES = f"{ROWS}.map(r => r.querySelector('.name').textContent)"
TITLE = "document.querySelector('#detail .title').textContent"
SELECTED = "[...document.querySelectorAll('tr.selected')].map(r => Number(r.dataset.layer))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def records():
    path = model_path("mnist8")
    return [gr.build(path, device=SPARSE_DEVICE, sparsity=mode).record for mode in ("force", "disable")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("pages")
    evil = page.report(hostile(records[0]))
    injected = f"<img src=x onerror=\"document.title='{'run'}'\"><script>document.title='run'</script></main>".encode()
    written = {
        "one": page.report(records[0]),
        "two": page.report(*records),
        "evil": evil,
        "injected": evil.replace(b"</main>", injected, 1),
    }
    for name, data in written.items():
        (folder / f"{name}.html").write_bytes(data)
    return folder


@pytest.fixture
def shown(browser, pages):
    """The page of one engine, loaded anew."""
    browser.open(pages / "one.html")
    yield browser
    assert browser.problems == [], "the page's console"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 400])
@pytest.mark.parametrize("name", ["one", "two"])
def test_it_loads_without_errors_fetches_nothing_and_fits(browser, pages, name, width, theme):
    browser.open(pages / f"{name}.html", theme, width)
    assert browser.problems == []
    assert {url.partition(":")[0] for url in browser.asked} <= {"file", "data"} and len(browser.asked) <= 2
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(f"{ROWS}.length") == 6
    assert browser.evaluate("document.querySelectorAll('#graph .node').length") == 8
    assert browser.evaluate("['roofline', 'pruning', 'memory'].every(id => document.querySelector(`#${id} svg`))")
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (theme == "dark")


def test_layers_are_counted_as_nodes_and_doubt_has_the_log_s_words(browser, tmp_path):
    """Three merged siblings and a pick among them, in the tile, the sentence and the filters."""
    onnx.save(SMALL["siblings"], tmp_path / "m.onnx")
    record = gr.build(tmp_path / "m.onnx", device=SPARSE_DEVICE, sparsity="enable").record
    merged = next(row for row in record.sparsity.rows if len(row.layers) == 3)
    picked = replace(merged, verdict="sparse", why=Reason("picked"), p_sparse_faster=0.8)
    rows = tuple(picked if row is merged else row for row in record.sparsity.rows)
    plan = replace(record.plan, sparsity=replace(record.sparsity, rows=rows, picked=picked.layers))
    record = replace(record, plans=(plan,))
    (tmp_path / "m.html").write_bytes(page.report(record))
    browser.open(tmp_path / "m.html")
    told = browser.evaluate("document.getElementById('verdict').textContent")
    assert "3 of 3eligible layers run sparse: certain 0, likely 3, toss-up 0" in told
    assert "3 of 6 layers with weights are eligible, 3 run sparse (certain 0, likely 3, toss-up 0)" in told
    chips = browser.evaluate("[...document.querySelectorAll('.chip')].map(c => c.textContent)")
    assert chips[:2] == ["sparse, likely 3", "not eligible 3"] and browser.problems == []


def test_rows_are_sorted_by_a_click_on_a_heading(shown, records):
    times = {layer.name: layer.time_us for layer in records[0].plan.layers}  # two may be equal
    assert [times[name] for name in shown.evaluate(NAMES)] == sorted(times.values(), reverse=True)
    shown.click("th[data-key=us] button")
    assert [times[name] for name in shown.evaluate(NAMES)] == sorted(times.values())
    assert shown.evaluate("document.querySelector('th[data-key=us]').getAttribute('aria-sort')") == "ascending"
    shown.click("th[data-key=name] button")
    assert shown.evaluate(NAMES) == sorted(times)
    shown.click("th[data-key=index] button")
    assert shown.evaluate(NAMES) == [layer.name for layer in records[0].plan.layers]


def test_rows_are_filtered_by_verdict_type_and_search(shown):
    shown.click(".chip[data-kind=dense]")
    assert shown.evaluate(f"{ROWS}.length") == 4 and "Convolution110" not in " ".join(shown.evaluate(NAMES))
    assert shown.evaluate("document.getElementById('shown').textContent").startswith("4 of 6 rows, ~")
    shown.click(".chip[data-kind=dense]")
    shown.press("/")
    assert shown.evaluate("document.activeElement.id") == "search"
    shown.type("POOL ing66")
    assert shown.evaluate(NAMES) == ["Pooling66"]
    shown.press("Escape")
    assert shown.evaluate(f"{ROWS}.length") == 6
    shown.evaluate("document.getElementById('type').value = 'pool'")
    shown.evaluate("document.getElementById('type').dispatchEvent(new Event('change'))")
    assert sorted(shown.evaluate(NAMES)) == ["Pooling160", "Pooling66"]
    shown.click("#search")
    shown.type("nothing of that name")
    assert shown.evaluate(f"{ROWS}.length") == 0


def test_a_click_shows_the_layer_everywhere(shown, records):
    shown.click("tr[data-layer='2']")
    assert shown.evaluate(TITLE) == "Convolution110 + ReLU114" and shown.evaluate(SELECTED) == [2]
    told = shown.evaluate("document.getElementById('detail').textContent")
    row = next(row for row in records[0].plan.sparsity.rows if row.layer == "Convolution110")
    assert all(text in told for _, text in wording.layer_facts(row, records[0])) and "kernel faster) = " in told
    marks = shown.evaluate("document.querySelectorAll('#detail .candidates .mark').length")
    own = [c for c in records[0].plan.choices.choices if c.op == "Convolution110 + ReLU114"]
    assert 4 < marks <= len(own[0].entries)
    assert shown.evaluate("document.querySelectorAll('#detail .candidates .mark.chosen').length") == 1
    for place in ("#strip", "#graph .node", "#roofline", "#memory"):
        assert shown.evaluate(f"document.querySelector('{place}.selected, {place} .selected') !== null"), place
    shown.click("[data-near='1']")
    assert shown.evaluate(TITLE) == "Pooling66"
    shown.click("#graph .node.reformat")
    assert shown.evaluate(TITLE).startswith("Reformatting CopyNode")
    shown.click("#strip i")
    assert shown.evaluate(SELECTED) == [0]
    shown.click("#memory .block.fill-dense")
    assert shown.evaluate(SELECTED) == [2]


def test_the_keyboard_moves_among_rows(shown):
    shown.click("th[data-key=index] button")
    shown.evaluate("document.querySelector('tr.selected').focus()")
    assert shown.evaluate(SELECTED) == [2]
    for key, row in (("ArrowDown", 3), ("ArrowUp", 2), ("End", 5), ("ArrowDown", 5), ("Home", 0)):
        shown.press(key)
        assert shown.evaluate(SELECTED) == [row], key
    shown.evaluate("document.querySelector('th[data-key=name] button').focus()")
    shown.press("Enter")
    assert shown.evaluate("document.querySelector('th[data-key=name]').getAttribute('aria-sort')") == "ascending"


def test_the_theme_is_switched_and_the_data_saved(shown, records):
    colour = "getComputedStyle(document.body).backgroundColor"
    assert [shown.click("#theme") or shown.evaluate(colour) for _ in range(3)] == [
        "rgb(246, 247, 249)",
        "rgb(20, 23, 28)",
        "rgb(246, 247, 249)",
    ]
    shown.evaluate("URL.createObjectURL = blob => { window.saved = blob.text(); return 'data:,'; }")
    shown.click("#download")
    saved = shown.evaluate("window.saved.then(text => JSON.parse(text).pages[0].layers.map(l => l.us))")
    assert saved == [layer.time_us for layer in records[0].plan.layers]


def test_two_engines_stand_side_by_side(browser, pages, records):
    browser.open(pages / "two.html")
    rows = "[...document.querySelectorAll('#pairs tbody tr')].filter(r => !r.hidden)"
    differ = browser.evaluate(f"{rows}.map(r => r.textContent)")
    assert 0 < len(differ) < 6 and any("Convolution110 + ReLU114" in text and "verdict differs" in text for text in differ)
    browser.click("#show-same")
    assert browser.evaluate(f"{rows}.length") == 6
    browser.click("#pairs tbody tr:nth-child(2)")
    assert browser.evaluate(TITLE) == browser.evaluate(f"{rows}[1].querySelector('.name').textContent")
    assert browser.problems == []


@pytest.mark.parametrize("name", ["evil", "injected"])
def test_names_out_of_files_are_only_shown(browser, pages, name):
    browser.open(pages / f"{name}.html")
    assert browser.evaluate("document.querySelectorAll('img').length") == (name == "injected")
    assert browser.evaluate("document.title") != "run" and not browser.dialogs
    assert "</script><img src=x onerror=alert(1)>" in browser.evaluate("document.title")
    for layer in range(6):
        browser.evaluate(f"select({layer})")
        assert browser.evaluate(TITLE).startswith("</script><img src=x onerror=alert(1)>")
    assert "<img" not in browser.evaluate("document.getElementById('detail').innerHTML")
    refused = [text for text in browser.problems if "Content Security Policy" in text]
    assert len(browser.problems) == len(refused), browser.problems
    assert bool(refused) == (name == "injected"), "what would run if markup got in is refused"


def test_numbers_that_make_no_sense_are_drawn_all_the_same(browser, pages, records):
    plan = records[0].plan
    odd = (0.0, -5.0, 1e15, 1e-12, 3.0, 0.0)
    layers = tuple(replace(layer, time_us=us) for layer, us in zip(plan.layers, odd, strict=True))
    rows = tuple(replace(r, lost_energy=-1.0, other_cost_us=1e15, p_sparse_faster=9.0) for r in plan.sparsity.rows)
    solution = replace(plan.solution, total_us=0.0)
    found = replace(plan, layers=layers, sparsity=replace(plan.sparsity, rows=rows), solution=solution)
    (pages / "odd.html").write_bytes(page.report(replace(records[0], plans=(found,))))
    browser.open(pages / "odd.html")
    assert browser.problems == [] and browser.evaluate(f"{ROWS}.length") == 6


def test_compressed_data_is_read(browser, pages, records, monkeypatch):
    monkeypatch.setattr(page, "MOST_PLAIN", 0)
    (pages / "packed.html").write_bytes(page.report(records[0]))
    browser.open(pages / "packed.html")
    assert browser.evaluate(f"{ROWS}.length") == 6 and browser.problems == []


def test_a_plan_of_nothing_and_a_measured_one(browser, pages, records):
    plan = records[0].plan
    measured = replace(records[0].timing, kind="measured", label="measured(GPU)", sigma=None)
    empty = replace(
        plan,
        layers=(),
        steps=(),
        outputs=(),
        frees=(),
        choices=None,
        sparsity=replace(plan.sparsity, rows=(), summary=None, eligible=(), picked=()),
    )
    for name, found in (("measured", replace(records[0], timing=measured)), ("empty", replace(records[0], plans=(empty,)))):
        (pages / f"{name}.html").write_bytes(page.report(found))
        browser.open(pages / f"{name}.html")
        assert browser.problems == []
        assert ("~" in browser.evaluate("document.getElementById('layers').innerText")) == (name == "empty")
