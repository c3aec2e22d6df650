"""PyTorch's modules as engines: `gr.compile`, and the backend "gpu_runtime" of torch.compile. Importing it takes torch.

Both give a callable of tensors that builds an engine at the first call of each shape. On a GPU it follows PyTorch's current
stream: its kernels start after the work already queued there, and outputs are PyTorch's own memory.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu_runtime.building.options import BuildOptions
from gpu_runtime.engine import Engine
from gpu_runtime.errors import CompileError, EngineError, ModelError, check_options
from gpu_runtime.frontend.files.source import NAME
from gpu_runtime.ops.torch import versions
from gpu_runtime.pipeline import build
from gpu_runtime.progress import warn
from gpu_runtime.runtime.context import Context

CANNOT = (ModelError, EngineError, CompileError)  # then PyTorch runs the module
LIFTED = re.compile(r"_(parameters|buffers)_")  # in Dynamo's names of inputs that are a module's own tensors


@dataclass(frozen=True, slots=True)
class _Runner:
    """An engine for inputs of one shape. `structure`: of the module's outputs, whose tensors are the engine's."""

    engine: Engine
    context: Context
    structure: Any

    def __call__(self, inputs: Sequence[Any]) -> Any:
        given = [x.detach() for x in inputs if isinstance(x, torch.Tensor)]
        feeds = dict(zip((i.name for i in self.engine.inputs), given, strict=True))
        device, outputs = given[0].device, self.engine.outputs
        out = {o.name: torch.empty(o.shape, dtype=getattr(torch, o.dtype.name), device=device) for o in outputs}
        self.context.run(feeds, out=out)
        return pytree.tree_unflatten(list(out.values()), self.structure)


class Compiled:
    """A module for inference. A call with the positional arguments of its forward returns the module's outputs, without
    gradients. `engines`: those built so far, one for each shape.

    An engine keeps the weights that the module has when it is built. PyTorch runs what no engine can, with a warning for each
    shape: arguments that are no tensors but for numbers, tensors on the CPU (but see `compile`), inputs that need gradients,
    operators that are not supported.
    """

    def __init__(self, module: torch.nn.Module, emulate: bool, options: Mapping[str, Any]):
        check_options("gr.compile", options, BuildOptions.__dataclass_fields__)
        BuildOptions(**options).checked()  # wrong ones raise here, not at a call
        self.module, self._emulate, self._options = module, emulate, dict(options)
        self._runners: dict[Any, _Runner | None] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._runners).atexit = False

    def __repr__(self) -> str:
        return f"Compiled({type(self.module).__name__}, {len(self.engines)} engines)"

    @property
    def engines(self) -> list[Engine]:
        return [runner.engine for runner in self._runners.values() if runner]

    def close(self) -> None:
        """Frees the engines' memory. A later call builds anew."""
        with self._lock:
            _close(self._runners)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named:
            return self._eager(("keywords",), "arguments given by name", inputs, named)
        key = tuple((x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else repr(x) for x in inputs)
        if against := self._against(inputs):
            return self._eager((*key, against), against, inputs, named)
        with self._lock:
            if key not in self._runners:
                self._runners[key] = self._built(inputs)
            runner = self._runners[key]
        return self.module(*inputs) if runner is None else runner(inputs)

    def _against(self, inputs: Sequence[Any]) -> str:
        """Why these inputs are PyTorch's, known before a build; or ""."""
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if not tensors or not all(isinstance(x, torch.Tensor | int | float) for x in inputs):
            return "arguments that are neither tensors nor numbers"
        if not self._emulate and not all(x.is_cuda for x in tensors):
            return "tensors that are not on a GPU"
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return "inputs that need gradients: call it under torch.no_grad()"
        return ""

    def _eager(self, key: tuple[Any, ...], why: str, inputs: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if key not in self._runners:
            self._runners[key] = None
            warn(f"{type(self.module).__name__} runs in PyTorch, without an engine: {why}")
        return self.module(*inputs, **named)

    def _built(self, inputs: Sequence[Any]) -> _Runner | None:
        """The engine for inputs of these shapes; None, with a warning, where there can be none."""
        first = next(x for x in inputs if isinstance(x, torch.Tensor))
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            cure = f"call it once with inputs of these shapes, {tuple(first.shape)} and so on, before the capture"
            raise RuntimeError(
                f"{type(self.module).__name__}: an engine cannot be built while a CUDA graph is captured: {cure}"
            )
        was = self.module.training
        try:
            program = _exported(self.module.eval(), tuple(inputs))
            program.graph_module.meta[NAME] = type(self.module).__name__
            engine = build(program, **self._options)
            structure = program.call_spec.out_spec
            ends = sum(isinstance(x, torch.Tensor) for x in inputs), structure.num_leaves
            if (len(engine.inputs), len(engine.outputs)) != ends:
                raise ModelError(f"expected {ends[0]} inputs and {ends[1]} outputs that are tensors, got {engine}")
            context = engine.context(device=f"cuda:{first.device.index}" if first.is_cuda else "emulator")
            return _Runner(engine, context, structure)
        except CANNOT as e:
            shapes = ", ".join("x".join(map(str, x.shape)) for x in inputs if isinstance(x, torch.Tensor))
            warn(f"{type(self.module).__name__} runs in PyTorch for inputs of {shapes}, without an engine: {e}")
            return None
        finally:
            self.module.train(was)


def _close(runners: dict[Any, _Runner | None]) -> None:
    for runner in runners.values():
        if runner:
            runner.context.close()
    runners.clear()


def _exported(module: torch.nn.Module, inputs: tuple[Any, ...]) -> Any:
    try:
        with torch.no_grad():
            return torch.export.export(module, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in inputs))
    except Exception as e:  # whatever the exporter or the module's own code raises
        raise ModelError(f"torch.export cannot export it: {type(e).__name__}: {e}") from e


def compile(module: torch.nn.Module, *, sparsity: str = "enable", emulate: bool = False, **options: Any) -> Compiled:
    """A callable that runs a module by engines. `options`: of `build`; `emulate`: the emulator runs tensors on the CPU, slowly.

    >>> fast = gr.compile(model.cuda(), sparsity="enable")
    >>> y = fast(x)  # builds at the first call of each shape
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module: expected a torch.nn.Module, got {type(module).__name__}; gr.build takes other models")
    return Compiled(module, emulate, {"sparsity": sparsity, **options})


class _Bound(torch.nn.Module):
    """A graph of Dynamo with some of its inputs as buffers, so that they are constants in the export."""

    def __init__(self, graph: torch.nn.Module, lifted: Mapping[int, Any]):
        super().__init__()
        self.graph, self.count = graph, 0
        self.places = {i: f"lifted_{i}" for i in lifted}
        for i, name in self.places.items():
            self.register_buffer(name, lifted[i].detach())

    def forward(self, *given: Any) -> Any:
        rest = iter(given)
        total = len(given) + len(self.places)
        return self.graph(*(getattr(self, self.places[i]) if i in self.places else next(rest) for i in range(total)))


def backend(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The backend "gpu_runtime" of torch.compile, `options` as of `compile`. It is for inference: a call with gradients enabled
    runs in PyTorch, if one of the tensors needs them.

    Dynamo makes a module's own tensors inputs of the graph; they become constants of the engine again, of another engine if
    they were changed in place.
    """
    chosen = {"sparsity": "enable", **(options or {})}
    emulate = bool(chosen.pop("emulate", False))
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    own = [i for i, name in enumerate(names) if LIFTED.search(name)]
    made: dict[tuple[int, ...], Compiled] = {}
    eager = Compiled(graph, emulate, chosen)

    def run(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
            return eager(*inputs)
        version = versions(inputs[i] for i in own)
        if version not in made:
            for old in made.values():
                old.close()
            made.clear()
            made[version] = Compiled(_Bound(graph, {i: inputs[i] for i in own}), emulate, chosen)
        return made[version](*(x for i, x in enumerate(inputs) if i not in own))

    return run
