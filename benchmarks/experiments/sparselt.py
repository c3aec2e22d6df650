"""One product by cuSPARSELt at a time, for row `peers`: requests and answers as in tactics/measure/child.py.

    {"op": "product", "rows": K, "depth": RSC, "columns": pixels, "dtype": "float16"}     {"dtype", "torch", "rel_error"}
    {"op": "sample"}                                                                      {"us": microseconds of one product}
    {"op": "replay", "s": 1.0}                                                            {} once that many seconds are over

The left operand is pruned to 2:4 and compressed; both are random normal. {"error": text} where PyTorch or cuSPARSELt refuses.
"""

import time
from collections.abc import Callable
from typing import Any

from benchmarks.torch_twin import event_us
from tactics.measure.child import Answer, serve

SLEEP_CLOCKS = 400_000  # of the GPU while the host queues: 0.2 ms


def until(seconds: float, run: Callable[[], object], wait: Callable[[], object]) -> None:
    """Queues runs, and waits for them, again and again for about that many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            run()
        wait()


class Product:
    """A product's operands on the GPU, and the function that multiplies them."""

    def __init__(self, torch: Any, rows: int, depth: int, columns: int, dtype: str) -> None:
        kind = getattr(torch, dtype)
        torch.manual_seed(0)
        w = torch.randn(rows, depth, device="cuda", dtype=kind).view(rows, depth // 4, 4)
        kept = w.abs().topk(2, dim=2).indices
        w = torch.zeros_like(w).scatter_(2, kept, w.gather(2, kept)).view(rows, depth)
        self.torch, self.sparse = torch, torch.sparse.to_sparse_semi_structured(w)
        self.x = torch.randn(columns, depth, device="cuda", dtype=kind).t()  # channels last: a pixel's channels are neighbours
        got, want = self.run()[:, :64].float(), w.float() @ self.x[:, :64].float()
        self.error = float((got - want).abs().max() / (want.max() - want.min()))

    def run(self) -> Any:
        return self.torch.mm(self.sparse, self.x)

    def sample(self) -> float:
        self.torch.cuda._sleep(SLEEP_CLOCKS)
        return event_us(self.torch, self.run)

    def replay(self, seconds: float) -> None:
        until(seconds, self.run, self.torch.cuda.synchronize)


def answers(torch: Any) -> Answer:
    products: list[Product] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "product":
            products[:] = [Product(torch, *(request[name] for name in ("rows", "depth", "columns", "dtype")))]
            return {"dtype": request["dtype"], "torch": torch.__version__, "rel_error": products[0].error}
        if request["op"] == "sample":
            return {"us": products[0].sample()}
        products[0].replay(request["s"])
        return {}

    return answer


def begin() -> tuple[dict[str, Any], Answer]:
    """Returns (the first line, the function that answers each request)."""
    import torch

    return {"device": "cuda"}, answers(torch)


if __name__ == "__main__":
    serve(begin)
