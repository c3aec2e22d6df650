"""A module's tests are found by name and by import."""

from pathlib import Path

import pytest

from tests import where


def test_the_test_of_the_same_name_comes_first():
    found = where.tests_of(Path("tactics/roofline.py"))
    assert found[0] == where.ROOT / "tests" / "tactics" / "test_roofline.py" and len(found) > 3
    assert all("tactics.roofline" in where.imported(path) for path in found[1:])


def test_a_module_without_a_test_says_so(capsys):
    assert where.main(["gpu_runtime/__main__.py"]) == 0
    assert capsys.readouterr().out == "gpu_runtime/__main__.py: no test file imports it\n"


def test_what_is_no_module_is_refused():
    with pytest.raises(SystemExit, match=r"no\.py: expected a module below cuda_kernels"):
        where.main(["no.py"])


def test_every_test_file_is_named_after_a_module_or_lies_in_a_folder_that_judges_a_whole():
    assert where.unnamed() == []
