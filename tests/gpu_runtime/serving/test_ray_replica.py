"""A replica of Ray Serve, without Ray: stand-ins for the modules, since Ray is installed only by `make test-servers`."""

import asyncio
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from gpu_runtime.serving.rows import Failure, Joined


def batch(**_):
    """serve.batch: the function itself, with the setters of its limits."""

    def marked(function):
        function.set_max_batch_size = function.set_batch_wait_timeout_s = lambda value: None
        return function

    return marked


@pytest.fixture
def replica(monkeypatch):
    """A replica whose runs give what `answers` says, one after the other."""
    made = {
        name: ModuleType(name)
        for name in (
            "ray", "ray.serve", "ray.exceptions", "ray.serve.exceptions", "starlette", "starlette.requests",
            "starlette.responses", "pydantic",
        )
    }  # fmt: skip
    made["ray"].serve = made["ray.serve"]
    made["ray.serve"].batch, made["ray.serve"].Application = batch, object
    made["ray.serve"].metrics = SimpleNamespace(Counter=lambda *_: SimpleNamespace(inc=lambda *_: None))
    made["ray.exceptions"].RayActorError = made["ray.serve.exceptions"].BackPressureError = RuntimeError
    made["starlette.requests"].Request = made["starlette.responses"].Response = object
    made["pydantic"].BaseModel, made["pydantic"].Field = object, lambda *_, **__: None
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "gpu_runtime.serving.ray", raising=False)
    server = importlib.import_module("gpu_runtime.serving.ray")
    monkeypatch.delitem(sys.modules, "gpu_runtime.serving.ray")
    monkeypatch.setattr(server, "opened", lambda path, device: (None, None))
    found = server.EngineServer("net.engine", False, 4, 0.0)

    def ask(*answers):
        monkeypatch.setattr(server, "answer", lambda *_: Joined(answers))
        return asyncio.run(found.infer([{}] * len(answers)))

    return found, ask


def test_a_replica_that_lost_its_gpu_stays_unhealthy(replica):
    server, ask = replica
    good, fatal = {}, Failure("fatal", "cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")
    assert ask(good, Failure("run", "its inputs")) and server.check_health() is None
    assert ask(good, fatal) == [good, fatal]
    ask(good)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        server.check_health()
