"""Ray Serve: `serve run gpu_runtime.serving.ray:app engine=net.engine replicas=2`. POST an .npz file with the inputs, get one
with the outputs. Run the same again for a new engine: replicas change one after the other.
"""

import asyncio
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from cuda_kernels import extras
from gpu_runtime.commands.reading import TooLargeError, arrays_in, npz
from gpu_runtime.engine import load
from gpu_runtime.errors import EngineError
from gpu_runtime.runtime.fields import TensorSpec
from gpu_runtime.serving.metrics import COUNTERS, counts
from gpu_runtime.serving.rows import Arrays, Failure, Joined, answer, checked, opened, sizes

with extras.named():
    import ray
    from pydantic import BaseModel, Field
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError
    from starlette.requests import Request
    from starlette.responses import Response

TRIES = 3  # an inference changes nothing: where a replica dies, its requests are asked again
STATUS = {"request": 400, "size": 413, "run": 500, "fatal": 500, "overload": 503, "replica": 503, "timeout": 504}


class Arguments(BaseModel):
    """The arguments of `serve run`, as NAME=VALUE."""

    model_config = {"extra": "forbid"}

    engine: str = Field(description="the path of its file, on every node")
    replicas: int = Field(1, ge=1)
    emulate: bool = Field(False, description="for tests: in the emulator, without a GPU")
    wait_s: float = Field(0.002, ge=0, description="how long a request waits for others")
    queue: int = Field(1024, ge=1, description="requests that wait at most; later ones are refused")
    timeout_s: float = Field(30, gt=0, description="until a request is given up")


class Counters:
    """This process's counters in Ray's metrics."""

    def __init__(self) -> None:
        make = serve.metrics.Counter
        self.made = {name: make(name, text, (label,) if label else None) for name, (label, text) in COUNTERS.items()}

    def add(self, joined: Joined) -> None:
        for name, amount, value in counts(joined):
            self.made[name].inc(amount, {COUNTERS[name][0]: value} if value else None)


def _rows(requests: Sequence[Arrays]) -> int:
    return sum(len(next(iter(request.values()))) for request in requests)


class EngineServer:
    """A replica: an engine with a context, on a GPU of its own."""

    def __init__(self, path: str, emulate: bool, most: int, wait_s: float) -> None:
        self.engine, self.context = opened(path, "emulator" if emulate else "cuda")
        self.counters, self.lost = Counters(), ""
        self.infer.set_max_batch_size(most)
        self.infer.set_batch_wait_timeout_s(wait_s)

    def check_health(self) -> None:
        if self.lost:
            raise RuntimeError(self.lost)

    @serve.batch(batch_size_fn=_rows)
    async def infer(self, requests: list[Arrays]) -> list[Arrays | Failure]:
        """Raises nothing: Ray would fail every request of the batch."""
        joined = await asyncio.to_thread(answer, self.engine, self.context, requests)
        self.counters.add(joined)
        fatal = (a.message for a in joined.answers if isinstance(a, Failure) and a.kind == "fatal")
        self.lost = self.lost or next(fatal, "")  # a GPU that is lost stays so, whatever answers came after
        return list(joined.answers)


class Ingress:
    """Answers HTTP: checks each request before it joins others, and asks another replica if one died."""

    def __init__(self, server: Any, inputs: Sequence[TensorSpec], most: int, timeout_s: float, emulate: bool) -> None:
        if not emulate and not ray.cluster_resources().get("GPU"):  # else the replicas would wait for one silently
            raise EngineError("no node of this Ray cluster has a GPU: add one, or run with emulate=true, which is for tests")
        self.server, self.inputs, self.most, self.timeout_s = server, inputs, most, timeout_s
        row = sum(int(np.prod(spec.shape[1:])) * spec.dtype.itemsize for spec in inputs)
        self.bytes = most * row + 4096 * len(inputs)  # an .npy file's header has 128 bytes
        self.counters = Counters()

    async def __call__(self, request: Request) -> Response:
        found = await self._answer(request)
        if isinstance(found, Failure):
            return Response(found.message, STATUS[found.kind], media_type="text/plain")
        return Response(npz(found), media_type="application/octet-stream")

    async def _answer(self, request: Request) -> Arrays | Failure:
        try:
            arrays = arrays_in(await self._body(request), self.bytes)
            checked(self.inputs, arrays)
        except TooLargeError as e:
            return self._failed("size", str(e))
        except Exception as e:  # whatever a damaged file makes zipfile, zlib and NumPy raise
            return self._failed("request", f"expected an .npz file, as numpy.savez writes it, of the inputs: {e}")
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._asked(arrays)
        except TimeoutError:
            return self._failed("timeout", f"no answer within {self.timeout_s} s")
        except BackPressureError:
            return self._failed("overload", "too many requests wait: try again later")

    async def _body(self, request: Request) -> BytesIO:
        body = BytesIO()
        async for chunk in request.stream():
            body.write(chunk)
            if body.tell() > self.bytes:
                raise TooLargeError(f"expected a body of {self.bytes} bytes at most, for {self.most} rows")
        return body

    async def _asked(self, arrays: Arrays) -> Arrays | Failure:
        for _ in range(TRIES):
            try:
                found: Arrays | Failure = await self.server.infer.remote(arrays)
            except RayActorError:
                continue
            if not isinstance(found, Failure) or found.kind != "fatal":
                return found
        return self._failed("replica", f"{TRIES} replicas died or lost their GPU under this request: try again later")

    def _failed(self, kind: str, message: str) -> Failure:
        """Makes and counts a failure that no replica has counted."""
        self.counters.add(Joined((failure := Failure(kind, message),)))
        return failure


def app(args: Arguments) -> serve.Application:
    """Returns the Ray Serve application. Raises EngineError for a file that cannot be served, here rather than in a replica."""
    path, engine = str(Path(args.engine).resolve()), load(args.engine)
    most = sizes(engine).max
    server = serve.deployment(EngineServer).options(
        num_replicas=args.replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": 0 if args.emulate else 1},
        max_ongoing_requests=2 * most,  # one batch runs, the next one waits
        max_queued_requests=args.queue,
    )
    ingress = serve.deployment(Ingress).options(
        ray_actor_options={"num_cpus": 0}, max_ongoing_requests=args.queue + 4 * most * args.replicas
    )
    return ingress.bind(server.bind(path, args.emulate, most, args.wait_s), engine.inputs, most, args.timeout_s, args.emulate)
