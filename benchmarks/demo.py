"""`make demo`: the GPU examined where there is one; the digits network, dense and 2:4, built, run, explained layer by layer."""

import time
from pathlib import Path

import numpy as np

import gpu_runtime as gr
from cuda_kernels import device as devices
from cuda_kernels.device import why_no_gpu
from gpu_runtime.commands.console import columns
from gpu_runtime.doctor import examine
from gpu_runtime.doctor import wording as wording_of_doctor
from gpu_runtime.explain import log, report, wording
from gpu_runtime.explain.figures import gain_text, library_text, proof_text, times_are, us_text
from gpu_runtime.report import page
from gpu_runtime.runtime.findings import KernelTime
from gpu_runtime.runtime.plan_record import EngineRecord
from gpu_runtime.text import table, wrap

DIGITS = Path(__file__).parent / "digits"
OUT = Path("out")
BATCH = 120  # held-out images per run
EXPLAINED_BATCH = 2048  # where some layers gain from sparsity and some do not
PLANNED_FOR = "rtx4090"  # without a GPU: the device, of those with published times of a library, on which 2:4 gains most


def accuracy(engine) -> tuple[float, str]:
    """Returns (the share of held-out digits that the engine's kernels classify right, the place where they ran)."""
    data = np.load(DIGITS / "heldout.npz")
    right = 0
    with engine.context() as ctx:
        for i in range(0, len(data["y"]), BATCH):
            x, y = data["x"][i : i + BATCH], data["y"][i : i + BATCH]
            padded = np.zeros((BATCH, *x.shape[1:]), x.dtype)
            padded[: len(x)] = x
            right += int((ctx.run({"x": padded})["logits"][: len(y)].argmax(1) == y).sum())
        return right / len(data["y"]), "the CPU emulator" if ctx.emulated else ctx.device.title


def closing(record: EngineRecord) -> str:
    """Returns the demo's last table: the sparse layer that gains most, the dense layer that loses least, the first layer that
    cannot be sparse; then the plan's total, and the gain of 2:4 over dense kernels, ours and a library's.
    """
    rows, timing, found = record.plan.sparsity.rows, record.timing, record.plan.solution
    kinds = (
        max((r for r in rows if r.verdict == "sparse"), key=lambda r: r.other_cost_us or 0, default=None),
        min((r for r in rows if r.verdict == "dense"), key=lambda r: r.other_cost_us or 0, default=None),
        next((r for r in rows if r.verdict == "not_eligible"), None),
    )

    def best(kernel: KernelTime | None) -> str:
        return f"{us_text(kernel.us, timing)} {kernel.in_}->{kernel.out}" if kernel else "-"

    cells = [
        [r.layer, f"{r.verdict}: {r.reason}", best(r.best_dense), best(r.best_sparse), wording.cost_text(r, record)]
        for r in kinds
        if r
    ]
    verdict = f"total {us_text(found.total_us, timing)}, {proof_text(record.plan, timing)}"
    return "\n".join(
        [
            f"In short, for the {record.device.title} at batch {record.plan.inputs[0].shape[0]}; {times_are(timing)}:",
            *table(["layer", "verdict", "best dense", "best sparse", "other choice"], cells, right=(4,)),
            verdict,
            *wrap(f"2:4 {gain_text(record)}"),
            *wrap(library_text(record)),
        ]
    )


def main() -> None:
    OUT.mkdir(exist_ok=True)
    reason = why_no_gpu()
    device = PLANNED_FOR if reason else None
    if reason:
        title = devices.named(PLANNED_FOR).title
        print(f"No GPU ({reason}): plans are for an {title}, times predicted; the kernels' PTX runs in the CPU emulator.\n")
    else:  # kernels that fail are left out of the plans that follow
        print("gpu-runtime doctor:\n\n" + wording_of_doctor.text(examine.examine(devices.current())))
    for name in ("dense", "sparse"):
        start = time.perf_counter()
        engine = gr.build(DIGITS / f"digits_{name}.onnx", sparsity="enable", shapes={"x": (BATCH, 1, 8, 8)}, device=device)
        built = time.perf_counter()
        path = OUT / f"digits_{name}.engine"
        engine.save(path)
        share, where = accuracy(gr.load(path))
        print(
            f"digits_{name}: built in {built - start:.1f} s -> {path}; {len(engine.sparsity.picked)} of "
            f"{len(engine.sparsity.layers)} layers with weights run sparse; accuracy on held-out digits {100 * share:.2f} % "
            f"(run on {where} in {time.perf_counter() - built:.1f} s)"
        )
    print(f"\nThe sparse network planned for batch {EXPLAINED_BATCH}:\n")
    engine = gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", shapes={"x": (EXPLAINED_BATCH, 1, 8, 8)}, device=device)
    print(report.plan_text(engine.record))
    print(log.log_text(engine.record, columns(), log.most_lines(engine.record)))
    print(f"Next: gpu-runtime inspect {OUT}/digits_sparse.engine   (in .venv/bin)\n")
    print(closing(engine.record))
    (OUT / "report.html").write_bytes(page.report(engine.record))
    print(f"\nTo look at it, open {OUT}/report.html in a browser: it needs no network")


if __name__ == "__main__":
    main()
