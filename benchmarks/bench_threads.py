"""Threads that run one engine in the emulator: all on one context, and each on its own.

    python -m benchmarks.bench_threads [--threads 1,2] [--runs 2] [--repeats 7]

The emulator executes kernels without Python's lock, here with one thread of its own for each context. Two contexts run on two
cores at once; calls on a shared context wait for each other. On a GPU contexts have streams of their own, and what they gain is
what the GPU has left: `gpu-runtime bench --streams=N` measures that.
"""

import threading
import time

import click
import numpy as np

import gpu_runtime as gr
from gpu_runtime.runtime.context import Context

NETWORK, SHAPE = "benchmarks/digits/digits_sparse.onnx", (4, 1, 8, 8)


def seconds(contexts: list[Context], x: np.ndarray, runs: int) -> float:
    """Until a thread for each entry of `contexts` has run its one `runs` times."""
    start = threading.Barrier(len(contexts) + 1)

    def work(context: Context) -> None:
        start.wait()
        for _ in range(runs):
            context.run({"x": x})

    threads = [threading.Thread(target=work, args=(c,)) for c in contexts]
    for t in threads:
        t.start()
    start.wait()
    begun = time.perf_counter()
    for t in threads:
        t.join()
    return time.perf_counter() - begun


@click.command()
@click.option("--threads", default="1,2", help="Numbers of threads.")
@click.option("--runs", default=2, help="Runs of each thread.")
@click.option("--repeats", default=7, help="The shortest of so many is shown.")
def main(threads: str, runs: int, repeats: int) -> None:
    engine = gr.build(NETWORK, sparsity="enable", shapes={"x": SHAPE}, device="a100")
    x = np.load("benchmarks/digits/heldout.npz")["x"][: SHAPE[0]]
    print(f"{runs} runs of each thread, wall time until all have ended, in the emulator:")
    for count in map(int, threads.split(",")):
        own = [engine.context(device="emulator", checks=False, threads=1) for _ in range(count)]
        for name, contexts in (("one context for all", own[:1] * count), ("a context each", own)):
            seconds(contexts, x, 1)
            least = min(seconds(contexts, x, runs) for _ in range(repeats))
            print(f"{count} thread{'s' * (count > 1):1}  {name:20}  {1e3 * least:8.1f} ms")
        for context in own:
            context.close()


if __name__ == "__main__":
    main()
