"""A small network with two sets of weights, requests of 1 to 5 rows, and the bytes of their answers."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.engines import build
from tests.reference_run import model, node

MOST, COUNT, DISTINCT = 8, 2000, 200


@dataclass(frozen=True, slots=True)
class Case:
    """The files and answers of a test. `folder` has first.engine and second.engine; `expected[i]` and `later[i]`: their
    answers, as bytes, to `requests[i]`; `last`: the layer of first.engine that stores the logits, as its plan names it.
    """

    folder: Path
    requests: list[np.ndarray]
    expected: list[bytes]
    later: list[bytes]
    last: str


def case(folder: Path) -> Case:
    rng = np.random.default_rng(0)
    drawn = [rng.uniform(-1, 1, (rng.integers(1, 6), 1, 8, 8)).astype(np.float32) for _ in range(DISTINCT)]
    answers, last = [], []
    for name in ("first", "second"):
        weights = {"w": rng.normal(0, 0.3, (16, 1, 3, 3)), "v": rng.normal(0, 0.05, (1024, 10))}
        nodes = [node("Conv", "x w", "a", pads=[1] * 4), node("Relu", "a", "b"), node("Flatten", "b", "f")]
        nodes.append(node("Gemm", "f v", "logits"))
        proto = model(nodes, {"x": ("N", 1, 8, 8)}, "logits", {k: w.astype(np.float32) for k, w in weights.items()})
        build(folder, proto, shapes={"x": (MOST, 1, 8, 8)}).save(folder / "exact.engine")
        engine = build(folder, proto, shapes={"x": [(n, 1, 8, 8) for n in (1, MOST, MOST)]})
        assert engine.points == (MOST,)  # so that a request's bits are the same in each run
        engine.save(folder / f"{name}.engine")
        last.append(engine.plan.layers[-1].name)
        with engine.context(device="emulator", checks=False) as context:
            answers.append([context.run({"x": x})["logits"].tobytes() for x in drawn])
    again = [i % DISTINCT for i in range(COUNT)]
    return Case(folder, *([found[i] for i in again] for found in (drawn, *answers)), last[0])
