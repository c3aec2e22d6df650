"""Every output that README.md and docs/*.md quote: found by its mark, run again, and compared or written anew.

    python -m benchmarks.pages.quotes [--write] [--cost quick,slow,long] [FILE ...]

A mark is an HTML comment on the line above a fenced block, or above text that ends at `<!-- end of quote -->`:

    <!-- quote quick: python -m benchmarks.pages.forum -->
    <!-- quote slow from "layer  " to "Next": python -m benchmarks.demo -->

`quick`, `slow` and `long` mark the test that compares the block with its command (tests/benchmarks/pages/test_quotes.py).
`from`: the last line that begins so is the first quoted; `to`: the first line after it that begins so ends the quote. The
command runs in a folder that has nothing but `benchmarks/digits`, by bash, with this tree's code; its stdout is quoted.
Seconds, milliseconds and dates are from the machine that wrote the page: they may differ, and so may the results of HiGHS
within a time limit. Everything else may not.

A block that a reader pastes has a mark too: `<!-- run quick -->`, or `<!-- run never: why -->`.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COSTS = ("quick", "slow", "long")
MARK = re.compile(
    r'<!-- quote (?P<cost>\w+)(?: from "(?P<start>[^"]+)")?(?: to "(?P<stop>[^"]+)")?: (?P<command>[^\n]+) -->\n'
    r"(?:```\n(?P<block>.*?)```\n|(?P<text>.*?)<!-- end of quote -->\n)",
    re.S,
)
# Texts that depend on the machine or the day; the blanks before a number belong to it, since its width varies.
OWN = re.compile(r" *\d[\d.,]* (?:ms|s)\b| *\d+\.\d+x in # \(not proven\)|\d{4}-\d\d-\d\d")


@dataclass(frozen=True, slots=True)
class Quote:
    """A quoted output: `text` lies at `span` of its page; `command` prints it, cut from `start` to `stop`."""

    page: Path
    span: tuple[int, int]
    text: str
    cost: str
    command: str
    start: str | None
    stop: str | None


def quotes(page: Path) -> list[Quote]:
    """Returns all quotes of a page, in order. ValueError for a mark without a block, or with an unknown cost."""
    content = page.read_text()
    found = []
    for m in MARK.finditer(content):
        kind = "block" if m["block"] is not None else "text"
        found.append(Quote(page, m.span(kind), m[kind], m["cost"], m["command"], m["start"], m["stop"]))
    if len(found) != content.count("<!-- quote ") or any(q.cost not in COSTS for q in found):
        raise ValueError(f"{page.name}: expected each mark to be `<!-- quote {'|'.join(COSTS)}: command -->` above a block")
    return found


def run(commands: Sequence[str]) -> str:
    """Returns the output of the commands, run by bash one after the other in one folder, with this tree's code. ValueError if
    one fails.
    """
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    out = ""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "benchmarks").mkdir()
        (Path(folder) / "benchmarks" / "digits").symlink_to(ROOT / "benchmarks" / "digits")
        for command in commands:
            done = subprocess.run(["bash", "-ec", command], cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode:
                raise ValueError(f"{command}: exit code {done.returncode}: {done.stderr[-2000:]}")
            out += done.stdout
    return out


@dataclass(frozen=True, slots=True)
class Paste:
    """A block that a reader pastes: its language, `cost`, or why it is `never` run, and its text."""

    page: Path
    language: str
    cost: str
    why_never: str
    text: str


PASTE = re.compile(
    r"<!-- run (?P<cost>\w+)(?:: (?P<why>[^\n]+))? -->\n```(?P<language>sh|python)\n(?P<text>.*?)^```$", re.M | re.S
)


def pastes(page: Path) -> list[Paste]:
    """Returns all blocks of a page that a reader pastes, in the order in which they run, in one folder. ValueError for a block
    without a mark.
    """
    content = page.read_text()
    found = [Paste(page, m["language"], m["cost"], m["why"] or "", m["text"]) for m in PASTE.finditer(content)]
    blocks = len(re.findall(r"^```(?:sh|python)$", content, re.M))
    if len(found) != blocks or any(p.cost not in COSTS and not (p.cost == "never" and p.why_never) for p in found):
        raise ValueError(f"{page.name}: expected `<!-- run {'|'.join(COSTS)} -->` or `<!-- run never: why -->` above a block")
    return found


def as_command(paste: Paste) -> str:
    return paste.text if paste.language == "sh" else f"python - <<'END_OF_BLOCK'\n{paste.text}END_OF_BLOCK\n"


def printed(quote: Quote) -> str:
    """Returns the command's present output, cut as the mark says. ValueError if it fails, or if it has no such line."""
    lines = run([quote.command]).splitlines()
    if quote.start:
        starts = [i for i, line in enumerate(lines) if line.startswith(quote.start)]
        if not starts:
            raise ValueError(f"{quote.command}: no line begins with {quote.start!r}")
        lines = lines[starts[-1] :]
    if quote.stop:
        lines = lines[: next((i for i, line in enumerate(lines) if i and line.startswith(quote.stop)), len(lines))]
    return "\n".join(lines).rstrip() + "\n"


def comparable(text: str) -> str:
    """Returns the text with all parts removed that depend on the machine or the day."""
    return OWN.sub(" #", OWN.sub(" #", text))  # twice: HiGHS's results are recognised by the seconds behind them


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True))
@click.option("--write", is_flag=True, help="Put what differs into the pages.")
@click.option("--cost", default="quick,slow", show_default=True, help="Which quotes.")
def main(files, write, cost) -> None:
    stale = 0
    for page in [Path(f) for f in files] or PAGES:
        for quote in reversed(quotes(page)):  # from the end: spans before stay valid
            if quote.cost not in cost.split(","):
                continue
            now = printed(quote)
            same = comparable(now) == comparable(quote.text)
            click.echo(f"{page.name}: {quote.command}: {'as it is' if same else 'differs'}")
            stale += not same
            if write and not same:
                content = page.read_text()
                if content[slice(*quote.span)] != quote.text:
                    raise click.ClickException(f"{page.name} was changed while {quote.command} ran: once more")
                page.write_text(content[: quote.span[0]] + now + content[quote.span[1] :])
    sys.exit(int(bool(stale) and not write))


if __name__ == "__main__":
    main()
