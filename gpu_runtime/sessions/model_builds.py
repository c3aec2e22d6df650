"""Builds of one model for several sizes, as InferenceSession makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_runtime.engine import Engine
from gpu_runtime.errors import bounded
from gpu_runtime.frontend import importer
from gpu_runtime.frontend.files.load import inputs_of, load_whole, named, type_name
from gpu_runtime.frontend.files.source import Examples, source_of
from gpu_runtime.pipeline import build
from gpu_runtime.sessions.open_sizes import NO_VERSION, ModelMetadata, NodeArg, Signature


@bounded
def builds(model: Any, options: Mapping[str, Any]) -> tuple[Signature, Callable[[Any], Engine]]:
    """Returns (the model's signature, a function that takes input shapes and builds an engine for them).

    `options`: the arguments of gpu_runtime.build. A torch module is exported once, here. Raises the errors of `build` for a
    model that no choice of sizes could cure; other errors are raised by the function.
    """
    source = source_of(model, Examples(options.get("example_inputs"), options.get("shapes")))
    with named(source):
        proto = load_whole(source)
    inputs = inputs_of(proto.graph)
    types = [v.type.tensor_type for v in inputs]
    is_open = not all(t.HasField("shape") and all(d.HasField("dim_value") for d in t.shape.dim) for t in types)
    if is_open:
        importer.load(source)
    signature = Signature([_arg(v) for v in inputs], [_arg(v) for v in proto.graph.output], _metadata(proto), is_open)
    return signature, lambda shapes: build(source, **{**options, "shapes": shapes})


def _arg(v: Any) -> NodeArg:
    t = v.type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in t.shape.dim]
    return NodeArg(v.name, f"tensor({type_name(t.elem_type).lower()})", sizes)


def _metadata(proto: Any) -> ModelMetadata:
    props, graph = {p.key: p.value for p in proto.metadata_props}, proto.graph
    version = proto.model_version if proto.HasField("model_version") else NO_VERSION
    return ModelMetadata(graph.name, props, proto.producer_name, proto.doc_string, graph.doc_string, proto.domain, version)
