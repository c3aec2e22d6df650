"""No engine, whoever wrote it, reaches memory that is not its own: it is refused with a sentence, or it is one of ours."""

import pytest

from tests.gpu_runtime.frontend.test_importer_mutants import outcomes

FEW, MANY, LARGE = 96, 6000, 500


def check(first: int, count: int, folder) -> dict[int, tuple[str, str]]:
    found = outcomes("crafted", first, count, folder)
    assert len(found) == count
    bad = {n: row for n, row in found.items() if row[1].partition("\t")[0] not in ("fine", "refused")}
    assert not bad, "\n".join(f"{n} ({told}): {came}" for n, (told, came) in bad.items())
    run = {n: told for n, (told, came) in found.items() if came.startswith("fine")}
    print(f"crafted {first} to {first + count - 1}: {count - len(run)} refused, {len(run)} ran: {run}")
    return found


@pytest.mark.slow
def test_crafted_engines(tmp_path):
    found = check(0, FEW, tmp_path)
    assert sum(came.startswith("refused") for _, came in found.values()) > 0.8 * FEW


@pytest.mark.long
@pytest.mark.parametrize("first", range(FEW, MANY, LARGE))
def test_many_crafted_engines(tmp_path, first):
    check(first, LARGE, tmp_path)
