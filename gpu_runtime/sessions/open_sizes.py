"""The engines of one model whose input sizes are open: each is built when its size is first met, and the last few are kept.

And onnxruntime's records of a model's inputs, outputs and metadata.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from gpu_runtime.engine import Engine
from gpu_runtime.runtime.context import Context

NO_VERSION = 2**63 - 1  # onnxruntime's answer for a model that declares none
Shapes = Mapping[str, Sequence[int]]
Key = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class NodeArg:
    """An input or output of a model, as onnxruntime describes it. `shape`: None or a name for an open size."""

    name: str
    type: str
    shape: list[int | str | None]  # a size that may vary has a name, or None


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model's texts, as onnxruntime names them; `custom_metadata_map`: its metadata_props."""

    graph_name: str
    custom_metadata_map: Mapping[str, str] = field(default_factory=dict)
    producer_name: str = ""
    description: str = ""
    graph_description: str = ""
    domain: str = ""
    version: int = NO_VERSION


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs, outputs and metadata of a model or an engine. `is_open`: the model leaves sizes of its inputs to the
    callers.
    """

    inputs: Sequence[NodeArg]
    outputs: Sequence[NodeArg]
    metadata: ModelMetadata
    is_open: bool = False


class Opened:
    """An engine and its context. The context closes when the last user drops this object: evicted during a run, it still ends
    the run.
    """

    def __init__(self, engine: Engine, place: str | None) -> None:
        self.engine = engine
        self.context: Context = engine.context(device=place)

    def __del__(self) -> None:
        if "context" in self.__dict__:  # else its construction failed
            self.context.close()


class OpenSizes:
    """The engines of one model by the shapes of their inputs, at most `most` at a time; the one used longest ago is dropped
    first.

    `build`: builds the engine of a size; `place`: Context's `device`. Threads may share it. Two threads that meet one new
    size build one engine; engines of several sizes are built one after the other, since builds on a GPU measure times.
    """

    def __init__(self, build: Callable[[Shapes], Engine], place: str | None, most: int) -> None:
        self._build, self._place, self._most = build, place, most
        self._opened: OrderedDict[Key, Future[Opened]] = OrderedDict()  # the last used is the last
        self._lock, self._building, self._closed = threading.Lock(), threading.Lock(), False

    def at(self, shapes: Shapes) -> Opened:
        """Returns the engine for inputs of these shapes; builds it if there is none yet.

        Raises the errors of gpu_runtime.build, and ValueError after `close`.
        """
        key = tuple(sorted((name, tuple(shape)) for name, shape in shapes.items()))
        with self._lock:
            if self._closed:
                raise ValueError("the InferenceSession is closed: make a new one")
            is_new = key not in self._opened
            opened = self._opened.setdefault(key, Future())
            self._opened.move_to_end(key)
        if is_new:
            self._fill(key, opened)
        return opened.result()

    def ahead(self, sizes: Sequence[Shapes]) -> Future[None]:
        """Starts a thread that builds engines for these sizes; the future ends with the last one, or with the first size's
        error.

        Raises ValueError for more than `most` sizes.
        """
        if len(sizes) > self._most:
            raise ValueError(f"expected at most most_engines={self._most} sizes to build ahead, got {len(sizes)}")
        built: Future[None] = Future()

        def work() -> None:
            try:
                for shapes in sizes:
                    self.at(shapes)
                built.set_result(None)
            except BaseException as e:
                built.set_exception(e)

        threading.Thread(target=work, name="gpu_runtime builds ahead", daemon=True).start()
        return built

    def kept(self) -> list[Opened]:
        """Returns the engines that are built, the one used longest ago first."""
        with self._lock:
            return [opened.result() for opened in self._opened.values() if opened.done()]

    def close(self) -> None:
        """Closes all contexts after their runs; an engine that is still being built is closed when it is ready."""
        with self._lock:
            self._closed = True
        for opened in self.kept():
            opened.context.close()

    def _fill(self, key: Key, opened: Future[Opened]) -> None:
        """Builds the engine of a new size for all who wait for it. A failure is not kept, so that another try builds again."""
        try:
            with self._building:
                made = Opened(self._sharing(self._build(dict(key))), self._place)
        except BaseException as e:
            with self._lock:
                del self._opened[key]
            return opened.set_exception(e)
        with self._lock:
            opened.set_result(made)
            built = [k for k, other in self._opened.items() if other.done() and other is not opened]
            evicted = [self._opened.pop(k) for k in built[: max(0, len(built) + 1 - self._most)]]
            closed = self._closed
        if closed:
            made.context.close()
        del evicted  # outside of the lock: closing a context frees its memory

    def _sharing(self, engine: Engine) -> Engine:
        """Returns the engine with the weights of a kept engine if all are equal, so that their contexts share them on the
        device.
        """
        same = (o.engine.weights for o in self.kept() if o.engine.record.sections == engine.record.sections)
        return replace(engine, weights=next(same, engine.weights))
