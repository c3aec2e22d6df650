"""Walks along an ONNX graph and labels the channels of each tensor, an operator's rule at a time (channel_rules.py)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from gpu_runtime.frontend.files.load import read_by, stored_tensors, title, to_array
from gpu_runtime.frontend.files.weights import View, seen_dims, views_of_constants
from gpu_runtime.pruning.channel_spaces import Labels, Recorder
from tactics.planner.grouping import grouped

Shape = tuple[int, ...]
Outputs = list[Labels | None]
Rule = Callable[["Walk", onnx.NodeProto, Sequence[Labels | None]], Outputs]
MOST_INTEGERS = 1 << 10  # elements of axes or sizes
NOT_ALIKE = "has no channels that can be permuted"


class Refused(Exception):
    """Raised when a rule cannot prove that a node treats all channels alike."""


@dataclass(slots=True)
class Walk:
    """The labels of the tensors so far; None is a tensor that no permutation changes.

    `sources`: constant as nodes read it -> (the stored constant, its view); `used`: constants whose use the current node's rule
    has recorded; `uniform`: computed tensors whose elements are all one stored number; `integers`: see the function.
    """

    graph: onnx.GraphProto
    shapes: Mapping[str, Shape]
    rules: Mapping[str, Rule]
    recorder: Recorder = field(default_factory=Recorder)
    labels: dict[str, Labels | None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    uniform: set[str] = field(default_factory=set)
    stored: dict[str, TensorProto] = field(init=False)
    integers: dict[str, np.ndarray] = field(init=False)
    sources: dict[str, tuple[str, tuple[View, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        self.stored = dict(stored_tensors(self.graph))
        self.sources = views_of_constants(self.graph, self.stored)
        self.integers = integers(self.graph)

    def visit(self, node: onnx.NodeProto) -> None:
        """Labels a node's outputs. If its rule refuses, all inputs are pinned; constants that the rule did not record are
        pinned too.
        """
        ins = [self.labels.get(name) for name in read_by(node)]
        rule = self.rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        outs: Outputs = []
        self.used.clear()
        why = f"{title(node)} needs this tensor in its stored order"
        try:
            if rule is None:
                raise Refused(f"there is no rule for permuting the channels of {title(node)}")
            outs = rule(self, node, ins)
        except (Refused, ArithmeticError, IndexError, TypeError, ValueError) as e:  # attributes may hold anything
            why = str(e) if isinstance(e, Refused) else f"the attributes of {title(node)} do not fit its inputs"
            self.used.clear()
            for labels in ins:
                self.recorder.pin(labels, why)
        for name in node.input:
            if name in self.sources and name not in self.used:
                self.recorder.use(name, self.dims(name), {}, why)
        for name, found in zip(node.output, outs, strict=False):
            self.labels[name] = found if found is not None and found.ids.size > 1 else None

    def close(self) -> None:
        """Pins the network's outputs, and stored constants that are read in two ways."""
        for v in self.graph.output:
            self.recorder.pin(self.labels.get(v.name), f"its channels reach the network output {v.name}")
        ways = grouped((self.sources[key.name][0], key.name) for key in self.recorder.constants)
        leaving = {self.sources[v.name][0] for v in self.graph.output if v.name in self.sources}
        for key, labels in [*self.recorder.constants.items()]:
            base = self.sources[key.name][0]
            if len({*ways[base]}) > 1 or base in leaving:
                self.recorder.pin(labels, f"{base} is read through several views (such as Transpose), or is an output")

    # ---- the rules' queries and records

    def dims(self, name: str) -> Shape:
        """Returns the shape of a tensor. Raises Refused if it is unknown."""
        if name in self.sources:
            base, views = self.sources[name]
            return seen_dims(self.stored[base], views)
        if name not in self.shapes:
            raise Refused(f"the shape of {name} is not known")
        return self.shapes[name]

    def numbers(self, node: onnx.NodeProto, slot: int, *attributes: str) -> list[int] | None:
        """Returns the integers of a constant input, else of the first attribute that is set; None without either.

        `slot`: the input's number; `attributes`: their names. Raises Refused if the input is computed.
        """
        if len(node.input) > slot and node.input[slot]:
            return [int(v) for v in self.values(node, slot)]
        given = attributes_of(node)
        return next((np.asarray(given[a], np.int64).reshape(-1).tolist() for a in attributes if a in given), None)

    def values(self, node: onnx.NodeProto, slot: int) -> np.ndarray:
        """Returns the elements of the constant input number `slot`, flat. Raises Refused if it is computed."""
        if node.input[slot] in self.integers:
            return self.integers[node.input[slot]].reshape(-1)
        base, _ = self.sources.get(node.input[slot], ("", ()))
        if base not in self.stored:
            raise Refused(f"{title(node)}: {node.input[slot]} is computed, expected a constant")
        return to_array(base, self.stored[base]).reshape(-1)

    def is_uniform(self, name: str) -> bool:
        """Returns whether all elements of a tensor are one stored number, so that no order of channels changes it."""
        return name in self.uniform or (name in self.sources and math.prod(self.dims(name)) == 1)

    def use(self, node: onnx.NodeProto, name: str, moving: Mapping[int, Sequence[Labels]]) -> None:
        """Records that a node reads a constant, some axes of which move with channels; all others must stay.

        `moving`: axis -> the labels of each part of that axis. Raises Refused if they do not fit the constant's shape.
        """
        dims = self.dims(name)
        for axis, parts in moving.items():
            of = dims[0] if len(parts) > 1 else len(parts)  # rows are split, and each part has all columns
            if any(p.ids.size != dims[axis] for p in parts) or of % len(parts):
                raise Refused(f"the channels of {title(node)} do not fit {name}")
        self.recorder.use(name, dims, moving, f"{title(node)} needs {name} in its stored order")
        self.used.add(name)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def on_axis_1(node: onnx.NodeProto, labels: Labels | None) -> Labels | None:
    """Returns labels whose only axis with channels is axis 1, flat; None for None. Raises Refused for other axes."""
    if labels is None:
        return None
    if labels.axes != (1,):
        raise Refused(f"{title(node)} reads channels that are not on axis 1")
    return labels.flat


def integers(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Returns name -> values of small integer tensors that are stored, or that Reshape and Concat make of stored ones.

    torch.onnx.export(optimize=False) spells axes and sizes in this way, which onnx's shape inference does not follow
    everywhere.
    """
    small = [(name, t) for name, t in stored_tensors(graph) if t.data_type == TensorProto.INT64]
    found = {name: to_array(name, t) for name, t in small if math.prod(t.dims) <= MOST_INTEGERS}
    for node in graph.node:
        given, made = attributes_of(node), None
        try:
            if node.op_type == "Constant":
                made = np.asarray(given.get("value_ints", given.get("value_int")), np.int64)
            elif node.op_type in ("Reshape", "Concat") and all(name in found for name in node.input):
                parts = [found[name] for name in node.input]
                made = np.concatenate(parts, given["axis"]) if node.op_type == "Concat" else parts[0].reshape(parts[1])
        except (ArithmeticError, LookupError, TypeError, ValueError):  # onnx's own check reports it
            continue
        if made is not None and made.size <= MOST_INTEGERS:
            found.setdefault(node.output[0], made)
    return found
