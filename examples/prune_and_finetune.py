"""From a dense network to a sparse engine: prune to 2:4, train again with the zeros held, build both, compare.

It needs a clone of gpu_runtime, whose small trained network of digits it takes, and its extras `build`, `train`, `test` and one
that runs engines (`cuda13`, or `emulator` without a GPU):

    python -m examples.prune_and_finetune
    python -m examples.prune_and_finetune --tuned benchmarks/digits/digits_sparse.onnx      (without training and PyTorch)

For your own network, replace `finetune` by five lines in your training loop: docs/pruning.md.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

import gpu_runtime as gr

DIGITS = Path("benchmarks/digits")
DENSE = DIGITS / "digits_dense.onnx"
DEVICE, BATCH = "rtx4090", 120


def trainer() -> Callable[[Path, Path], None]:
    """Returns the function that trains a pruned model for five epochs; `Masks` sets the pruned weights to zero again after each
    step."""
    try:
        from benchmarks.digits import finetune
    except ModuleNotFoundError as e:
        raise SystemExit(f"{e}; or give --tuned, a network that was trained before") from None
    return finetune.main


def accuracy(engine: gr.Engine, x: np.ndarray, y: np.ndarray) -> float:
    """Of the engine, which runs on a GPU if there is one, else in the emulator."""
    with engine.context() as context:
        logits = [context.run({"x": rows})["logits"] for rows in np.split(x, len(x) // BATCH)]
    return float((np.concatenate(logits).argmax(1) == y).mean())


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument("--tuned", type=Path, help="the network after training, instead of training it here")
    tuned, heldout = given.parse_args().tuned, np.load(DIGITS / "heldout.npz")
    finetune = trainer() if tuned is None else None  # before anything takes time
    with tempfile.TemporaryDirectory() as folder:
        pruned = Path(folder) / "pruned.onnx"
        result = gr.prune(DENSE, permute=True, device=DEVICE, shapes={"x": (BATCH, 1, 8, 8)})
        result.save(pruned)
        print(result)
        if finetune:
            tuned = Path(folder) / "tuned.onnx"
            finetune(pruned, tuned)
        for name, path in (("dense", DENSE), ("pruned", pruned), ("tuned", tuned)):
            engine = gr.build(path, sparsity="enable", shapes={"x": (BATCH, 1, 8, 8)}, device=DEVICE)
            of = f"{len(engine.sparsity.picked)} of {len(engine.sparsity.layers)} layers sparse"
            print(f"{name}: {accuracy(engine, heldout['x'], heldout['y']):.2%} right, {of}, {engine}")


if __name__ == "__main__":
    main()
