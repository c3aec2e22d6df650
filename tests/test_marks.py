"""Each test belongs to exactly one make target, by its marks, and continuous integration runs all but the `long` ones."""

import itertools
import re
import tomllib
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT, leave_to_ci, sample

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = ("test", "test-full", "test-long", "test-driver", "test-wheel", "test-servers")
MARKS = ("slow", "full", "long", "driver", "wheel", "servers")


def runs(target: str, *marks: str) -> bool:
    """Whether the target's pytest takes a test with these marks, by the -m of its recipe."""
    recipe = MAKEFILE.split(f"\n{target}: ")[1].partition("\n\n")[0]
    wanted = re.search(r'-m (?!pytest|tests)(\$\(QUICK\)|"[^"]*"|\w+)', recipe)[1]
    if wanted == "$(QUICK)":
        wanted = re.search(r"^QUICK := (.*)$", MAKEFILE, re.M)[1]
    return eval(wanted.strip('"'), {name: name in marks for name in (*MARKS, "gpu")})


@pytest.mark.parametrize("marks", [m for n in range(len(MARKS) + 1) for m in itertools.combinations(MARKS, n)], ids="-".join)
def test_every_test_belongs_to_one_target(marks):
    assert [runs(target, *marks) for target in TARGETS].count(True) == 1
    assert runs("test-driver", *marks) == ("driver" in marks)
    assert runs("test-wheel", *marks) == ("wheel" in marks and not {"long", "driver"} & set(marks))
    assert runs("test-servers", *marks) == ("servers" in marks and not {"long", "driver", "wheel"} & set(marks))
    assert runs("test-long", *marks) == ("long" in marks and "driver" not in marks)
    if not {"full", "long"} & set(marks):  # tests that need a GPU run on the emulated driver too
        assert runs("test-driver", "gpu", *marks)
    for quick in ("check", "test-blas"):
        assert runs(quick, *marks) == (runs("test", *marks) and "slow" not in marks)


def test_continuous_integration_runs_all_but_the_long():
    targets = re.findall(r"^part make (\S+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert targets[:3] == ["test", "truth", "test-full"], "what a newcomer runs comes first"
    assert {"test-compiled", "test-driver", "test-wheel", "test-servers", "test-blas", "lint"} <= set(targets)
    assert "test-long" not in targets


def test_every_mark_is_declared_and_used():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    names = {text.partition(":")[0].partition("(")[0] for text in declared}
    own = {"parametrize", "skip", "skipif", "xfail", "filterwarnings", "xdist_group"}
    used = {name for path in (ROOT / "tests").rglob("*.py") for name in re.findall(r"\bpytest\.mark\.(\w+)", path.read_text())}
    assert used - own == names == {"gpu", "sample", *MARKS}


@pytest.mark.parametrize("number, kept", [(1, [0]), (3, [0, 3, 6]), (10, [*range(10)]), (20, [*range(10)])])
def test_a_sample_is_spread_evenly(number, kept):
    assert sorted(sample([{"x": str(i)} for i in range(10)], number)) == kept


def test_a_sample_takes_the_values_of_each_parameter_in_turn():
    table = [{"x": x, "y": y} for x in "abcdef" for y in "abcd"]
    for number in (4, 6, 12):
        found = [table[i] for i in sample(table, number)]
        assert [len({case[axis] for case in found}) for axis in "xy"] == [min(number, 6), 4] and len(found) == number


def test_what_is_not_in_the_sample_is_left_to_ci():
    class Case:
        def __init__(self, i: int, *marks: str):
            self.nodeid, self.callspec = "tests/test_x.py::test_x[a case]", SimpleNamespace(params={"i": i})
            self.marks: dict[str, SimpleNamespace | None] = {name: SimpleNamespace(args=(2,)) for name in ("sample", *marks)}

        def get_closest_marker(self, name):
            return self.marks.get(name)

        def add_marker(self, name):
            self.marks[name] = None

    cases = [Case(0, "long"), *map(Case, range(4))]
    leave_to_ci(cases)
    assert ["full" in case.marks for case in cases] == [False, False, True, False, True]
