"""What README.md and docs/*.md quote is what the commands that they name print."""

import re

import pytest

from benchmarks.pages.quotes import PAGES, ROOT, Quote, as_command, comparable, pastes, printed, quotes, run

MARKS = {"quick": (), "slow": (pytest.mark.full,), "long": (pytest.mark.long,)}
ALL = [q for page in PAGES for q in quotes(page)]


@pytest.mark.parametrize("quote", [pytest.param(q, id=f"{q.page.name}-{q.command}", marks=MARKS[q.cost]) for q in ALL])
def test_a_quoted_output_is_what_its_command_prints(quote):
    now, again = comparable(printed(quote)), f"python -m benchmarks.pages.quotes --write --cost {quote.cost} {quote.page.name}"
    assert now == comparable(quote.text), f"{quote.page.name} quotes something else: `{again}` writes it anew"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_no_output_is_quoted_without_its_command(page):
    """A fenced block is marked, or names its language, or shows commands alone; a table of numbers is marked."""
    content = page.read_text()
    inside = [q.span for q in quotes(page)]
    for m in re.finditer(r"^```(\w*)\n(.*?)^```$", content, re.M | re.S):
        marked = any(a <= m.start(2) <= b for a, b in inside)
        assert marked or m[1] or all(line.startswith("$ ") for line in m[2].splitlines()), m[0]
    for m in re.finditer(r"^\|.*\| *~?\d+\.\d.*$", content, re.M):
        assert any(a <= m.start() <= b for a, b in inside), m[0]


def test_marks_and_cuts(tmp_path):
    page = tmp_path / "page.md"
    cut = '<!-- quote quick from "b" to "d": printf "b 1\\nb 2\\nc\\nd\\n" -->\n```\nold\n```\n'
    page.write_text(f"a\n{cut}<!-- quote slow: echo x -->\nx\n<!-- end of quote -->\n")
    first, second = quotes(page)
    assert (first.cost, first.text, second.text) == ("quick", "old\n", "x\n")
    assert printed(first) == "b 2\nc\n" and printed(second) == "x\n"
    page.write_text("<!-- quote quick: echo -->\nno block\n")
    with pytest.raises(ValueError, match="expected each mark"):
        quotes(page)
    with pytest.raises(ValueError, match="exit code 3"):
        printed(Quote(page, (0, 0), "", "quick", "exit 3", None, None))
    with pytest.raises(ValueError, match="no line begins with 'z'"):
        printed(Quote(page, (0, 0), "", "quick", "echo a", "z", None))


def test_only_what_a_machine_took_may_differ():
    a = "n  96 ops     28.4 ms  ~   172.59 us proven  HiGHS 2.143x in 10.81 s (not proven), on 2026-11-21"
    b = "n  96 ops    101.0 ms  ~   172.59 us proven  HiGHS 1.99x in 9.1 s (not proven), on 2027-01-02"
    assert comparable(a) == comparable(b)
    for x, y in (("172.59", "172.60"), ("96 ops", "97 ops"), ("proven  ", "found  ")):
        assert comparable(a) != comparable(b.replace(x, y))
    assert comparable("1.000x in 0.07 s") != comparable("1.001x in 0.07 s")


PASTED = [page for page in PAGES if any(p.cost != "never" for p in pastes(page))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [p if p.name in ("README.md", "quickstart.md") else pytest.param(p, marks=pytest.mark.full) for p in PASTED],
    ids=lambda p: p.name,
)
def test_what_a_reader_pastes_runs(page):
    """Blocks of shell and Python, in the page's order, in one folder."""
    run([as_command(p) for p in pastes(page) if p.cost != "never"])


def test_a_block_without_a_mark_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```sh\nls\n```\n")
    with pytest.raises(ValueError, match="run never: why"):
        pastes(page)
    page.write_text("<!-- run never -->\n```sh\nls\n```\n")
    with pytest.raises(ValueError, match="run never: why"):
        pastes(page)
    page.write_text("<!-- run quick -->\n```sh\nexit 3\n```\n")
    with pytest.raises(ValueError, match="exit code 3"):
        run([as_command(p) for p in pastes(page)])


def test_messages_that_the_pages_explain_exist():
    """The first column of troubleshooting's table: each part between `...` stands in a source."""
    sources = "".join(
        p.read_text() for folder in ("gpu_runtime", "tactics", "cuda_kernels") for p in sorted((ROOT / folder).rglob("*.py"))
    )
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    told = [quoted for row in rows for quoted in re.findall("`([^`]+)`", row)]
    parts = [part.strip() for quoted in told for part in re.split(r"\.\.\.|\(", quoted)]
    assert len(rows) > 8
    for part in filter(None, parts):
        assert part.strip(") ,;") in sources, part
