"""Ray Serve answers with an engine: builds one of the digits network, starts a server here, sends it images, stops it.

It needs a clone of gpu_runtime, whose small trained network it takes, and its extras `build`, `ray` and `cuda13`; without a GPU
`--emulate`, for which the extra `emulator` suffices:

    python examples/serve_ray.py --emulate

From the command line: serve run gpu_runtime.serving.ray:app engine=digits.engine (docs/serving.md).
"""

import argparse
import io
import tempfile
import urllib.request
from pathlib import Path

import numpy as np

import gpu_runtime as gr
from gpu_runtime.serving.ray import Arguments, app, ray, serve  # names the extra where Ray is missing

DIGITS = Path("benchmarks/digits")
ROWS = 8


def asked(url: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """Sends an .npz file, as numpy.savez writes it; the answer is one."""
    body = io.BytesIO()
    np.savez(body, x=x)
    with urllib.request.urlopen(urllib.request.Request(url, body.getvalue()), timeout=60) as reply:
        return dict(np.load(io.BytesIO(reply.read())))


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument(
        "--emulate", action="store_true", help="run in the emulator, for which the engine is planned for an H200"
    )
    given.add_argument("--port", type=int, default=8000)
    options, heldout = given.parse_args(), np.load(DIGITS / "heldout.npz")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.engine"
        device = "h200" if options.emulate else None
        gr.build(DIGITS / "digits_sparse.onnx", sparsity="enable", shapes={"x": (ROWS, 1, 8, 8)}, device=device).save(path)
        ray.init(num_cpus=4, include_dashboard=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": options.port})
            serve.run(app(Arguments(engine=str(path), emulate=options.emulate)))
            found = asked(f"http://127.0.0.1:{options.port}/", heldout["x"][:ROWS])["logits"].argmax(1)
        finally:
            ray.shutdown()
    print(f"answered {found.tolist()}, {(found == heldout['y'][:ROWS]).sum()} of {ROWS} right")


if __name__ == "__main__":
    main()
