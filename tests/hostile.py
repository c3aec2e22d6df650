"""Model files made to hang, to exhaust memory or to end in a traceback, and a process that reads them.

As a program it reads lines {"do": action, "path": file} and writes a line {"seconds", "error": class, "text"} for each. Its
memory is limited, so that a file cannot fill the machine's memory.
"""

import json
import os
import resource
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.reference_run import model, node

MEMORY = 6 << 30  # bytes that the process may map
ERRORS = subprocess.DEVNULL


def _one(op: str, shape=(1, 4, 8, 8), inputs="x", weights=None, opset=17, outputs="y", **attributes) -> onnx.ModelProto:
    """Returns a model of one node."""
    return model([node(op, inputs, outputs, **attributes)], {"x": shape}, outputs.split()[0], weights, opset)


def _constant(nodes, weights=None, opset=17) -> onnx.ModelProto:
    """Returns a model that adds the constant "c", which `nodes` compute, to its input."""
    return model([*nodes, node("ReduceMax", "c", "m", keepdims=0), node("Add", "x m", "y")], {"x": (1, 4)}, "y", weights, opset)


def _functions(depth: int, width: int = 2, op: str = "Relu") -> onnx.ModelProto:
    """Returns a model of `depth` functions, each of which calls the next one `width` times; the last is one node."""
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    made = []
    for i in range(depth):
        names = [f"t{k}" for k in range(width + 1)]
        call = {"domain": "f"} if i < depth - 1 else {}
        called = f"f{i + 1}" if call else op
        nodes = [helper.make_node(called, [a], [b], **call) for a, b in zip(names, names[1:], strict=False)]
        made.append(helper.make_function("f", f"f{i}", ["t0"], [names[-1]], nodes, opset))
    proto = model([helper.make_node("f0", ["x"], ["y"], domain="f")], {"x": (1, 4, 8, 8)}, "y")
    proto.functions.extend(made)
    proto.opset_import.append(helper.make_opsetid("f", 1))
    return proto


def _nested(op: str, depth: int) -> onnx.ModelProto:
    """Returns a model of `depth` nested Ifs or Loops."""
    info = helper.make_tensor_value_info
    out = info("o", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["o"])], "g", [], [out])
    for _ in range(depth):
        names = ("then_branch", "else_branch") if op == "If" else ("body",)
        graph = helper.make_graph([helper.make_node(op, ["b"], ["o"], **dict.fromkeys(names[:1], graph))], "g", [], [out])
    nodes = [*graph.node, helper.make_node("Relu", ["o"], ["y"])]
    proto = model(nodes, {"x": (1, 4)}, "y")
    proto.graph.input.append(info("b", TensorProto.BOOL, ()))
    return proto


def _external(folder: Path, sizes, location="w.bin", disk: int | None = None, **more) -> onnx.ModelProto:
    """Returns a model that adds initializers of `sizes` FP32 numbers, stored as external data in one sparse file."""
    with open(folder / "w.bin", "wb") as f:
        f.truncate(4 * max(sizes) if disk is None else disk)
    names = ["x"]
    proto = model([], {"x": (1,)}, "y")
    for i, n in enumerate(sizes):
        t = proto.graph.initializer.add(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[n])
        t.data_location = TensorProto.EXTERNAL
        for key, value in ({"location": location, "length": str(4 * n)} | more).items():
            t.external_data.add(key=key, value=value)
        proto.graph.node.add(op_type="ReduceMax", input=[f"w{i}"], output=[f"m{i}"])
        proto.graph.node.add(op_type="Add", input=[names[-1], f"m{i}"], output=[f"y{i}"])
        names.append(f"y{i}")
    proto.graph.node[-1].output[0] = "y"
    return proto


def _outputs(count: int) -> onnx.ModelProto:
    names = [f"y{i}" for i in range(count)]
    return model([node("Relu", "x", n) for n in names], {"x": (1, 4)}, " ".join(names))


def _text(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Returns `proto` with `name` as the name of the graph and of all its tensors and nodes."""
    for n in proto.graph.node:
        n.name = name + "n"
        n.input[:] = [name + i if i else i for i in n.input]
        n.output[:] = [name + o for o in n.output]
    for v in (*proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        v.name = name + v.name
    proto.graph.name = proto.producer_name = name
    return proto


def _conv(shape=(1, 4, 8, 8), k=(8, 4, 3, 3), **attributes) -> onnx.ModelProto:
    return _one("Conv", shape, "x w", {"w": np.full(k, 0.1, np.float32)}, **attributes)


def _ints(*values) -> np.ndarray:
    return np.array(values, np.int64)


def _doc(proto: onnx.ModelProto, size: int) -> onnx.ModelProto:
    proto.doc_string = proto.graph.doc_string = proto.graph.node[0].doc_string = "d" * size
    return proto


def _dims(proto: onnx.ModelProto, *dims: int) -> onnx.ModelProto:
    """Returns `proto` with the declared dims of its first initializer changed, but not its data."""
    proto.graph.initializer[0].dims[:] = dims
    return proto


BIG = 1 << 40
# fmt: off
MODELS = {
    "lp_pool_2000": lambda d: _one("LpPool", (1, 1, 2000, 2000), kernel_shape=(2000, 2000), opset=18),
    "lp_pool_2000_p0": lambda d: _one("LpPool", (1, 1, 2000, 2000), kernel_shape=(2000, 2000), p=0, opset=18),
    "lp_pool_p0": lambda d: _one("LpPool", kernel_shape=(2, 2), p=0, opset=18),
    "lp_pool_negative": lambda d: _one("LpPool", kernel_shape=(2, 2), p=-(2**62), opset=18),
    "global_lp_pool_p0": lambda d: _one("GlobalLpPool", p=0),
    "lp_pool_pads": lambda d: _one("LpPool", kernel_shape=(2, 2), pads=(1 << 30, 0, 0, 0), opset=18),
    "lp_normalization_p7": lambda d: _one("LpNormalization", p=7),
    "max_pool_2000_indices": lambda d: _one("MaxPool", (1, 1, 2000, 2000), kernel_shape=(1999, 1999), outputs="v y"),
    "max_pool_2000": lambda d: _one("MaxPool", (1, 1, 2000, 2000), kernel_shape=(1999, 1999)),
    "average_pool_2000": lambda d: _one("AveragePool", (1, 1, 2000, 2000), kernel_shape=(1999, 1999)),
    "pool_kernel_huge": lambda d: _one("MaxPool", kernel_shape=(2**62, 2**62)),
    "pool_pads_huge": lambda d: _one("AveragePool", kernel_shape=(2, 2), pads=(2**62, 2**62, 2**62, 2**62)),
    "pool_dilation_huge": lambda d: _one("MaxPool", kernel_shape=(1, 1), dilations=(2**62, 2**62)),
    "conv_stride_huge": lambda d: _conv(strides=(2**62, 2**62)),
    "conv_stride_32": lambda d: _conv(strides=(2**31, 2**31)),
    "conv_1x1_dilation_huge": lambda d: _conv(k=(8, 4, 1, 1), dilations=(2**62, 2**62)),
    "conv_dilation_huge": lambda d: _conv(dilations=(2**62, 2**62)),
    "conv_pads_huge": lambda d: _conv(pads=(2**62, 2**62, 2**62, 2**62)),
    "conv_pads_large": lambda d: _conv(pads=(2**15, 2**15, 2**15, 2**15), strides=(2**15, 2**15)),
    "conv_group_huge": lambda d: _conv(group=2**62),
    "conv_group_0": lambda d: _conv(group=0),
    "conv_stride_0": lambda d: _conv(strides=(0, 0)),
    "conv_transpose_stride": lambda d: _one("ConvTranspose", inputs="x w", weights={"w": np.ones((4, 4, 2, 2), np.float32)},
                                            strides=(2**62, 2**62)),
    "conv_transpose_stride_large": lambda d: _one("ConvTranspose", (1, 4, 2, 2), inputs="x w",
                                                  weights={"w": np.ones((4, 4, 2, 2), np.float32)}, strides=(20000, 20000)),
    "lrn_1e9": lambda d: _one("LRN", size=10**9 + 1),
    "lrn_2_62": lambda d: _one("LRN", size=2**62 + 1),
    "lrn_0": lambda d: _one("LRN", size=0),
    "lrn_negative": lambda d: _one("LRN", size=-3),
    "functions_32768": lambda d: _functions(15),
    "functions_2_40": lambda d: _functions(40),
    "functions_deep": lambda d: _functions(3000, 1),
    "functions_wide": lambda d: _functions(3, 30, "Identity"),
    "nested_if": lambda d: _nested("If", 30),
    "nested_if_deep": lambda d: _nested("If", 24),
    "nested_loop": lambda d: _nested("Loop", 24),
    "external_one_file_1gb": lambda d: _external(d, [1 << 28] * 8),
    "external_many_small": lambda d: _external(d, [1 << 20] * 2000),
    "external_40gb": lambda d: _external(d, [10 << 30]),
    "external_40gb_dims_small": lambda d: _dims(_external(d, [10 << 30]), 4),
    "external_device": lambda d: _external(d, [4], location="../../../../../../dev/zero"),
    "external_fifo": lambda d: (os.mkfifo(d / "pipe"), _external(d, [4], location="pipe"))[1],
    "external_link": lambda d: ((d / "zero").symlink_to("/dev/zero"), _external(d, [4], location="zero"))[1],
    "external_offset": lambda d: _external(d, [4], offset="9" * 5000),
    "external_length": lambda d: _external(d, [4], length="-1"),
    "external_folder": lambda d: ((d / "f").mkdir(), _external(d, [4], location="f"))[1],
    "external_nul": lambda d: _external(d, [4], location="a\0b"),
    "external_long": lambda d: _external(d, [4], location="a" * 100_000),
    "input_overflow": lambda d: _one("Relu", (2**32, 2**32, 2**32)),
    "input_negative": lambda d: _one("Relu", (1, -4)),
    "input_large": lambda d: _one("Relu", (1, 1 << 30)),
    "input_many_dims": lambda d: _one("Relu", (1,) * 60000),
    "initializer_overflow": lambda d: _dims(_conv(), 2**32, 2**32),
    "initializer_2_63": lambda d: _dims(_conv(), 2**62, 2, 3, 3),
    "pad_folded": lambda d: _constant([node("Pad", "a p", "c")], {"a": np.ones(4, np.float32), "p": _ints(BIG, BIG)}),
    "tile_folded": lambda d: _constant([node("Tile", "a r", "c")], {"a": np.ones(4, np.float32), "r": _ints(BIG)}),
    "expand_folded": lambda d: _constant([node("Expand", "a s", "c")], {"a": np.ones(1, np.float32), "s": _ints(BIG)}),
    "constant_of_shape": lambda d: _constant([node("ConstantOfShape", "s", "c")], {"s": _ints(BIG)}),
    "range_folded": lambda d: _constant([node("Range", "a b e", "r"), node("Cast", "r", "c", to=1)],
                                        {"a": np.int64(0), "b": np.int64(BIG), "e": np.int64(1)}),
    "range_float": lambda d: _constant([node("Range", "a b e", "c")],
                                       {"a": np.float32(0), "b": np.float32(1e30), "e": np.float32(1e-30)}),
    "range_0": lambda d: _constant([node("Range", "a b e", "r"), node("Cast", "r", "c", to=1)],
                                   {"a": np.int64(0), "b": np.int64(BIG), "e": np.int64(0)}),
    "one_hot": lambda d: _constant([node("OneHot", "i n v", "c")],
                                   {"i": _ints(1, 2), "n": np.int64(BIG), "v": np.float32([0, 1])}),
    "eye_like": lambda d: _constant([node("ConstantOfShape", "s", "e"), node("EyeLike", "e", "c", dtype=1)],
                                    {"s": _ints(1 << 20, 1 << 20)}),
    "outer_product": lambda d: _constant([node("Mul", "a b", "c")], {"a": np.ones((1 << 20, 1), np.float32),
                                                                      "b": np.ones((1, 1 << 20), np.float32)}),
    "matmul_folded": lambda d: _constant([node("MatMul", "a b", "c")], {"a": np.ones((1 << 20, 1), np.float32),
                                                                         "b": np.ones((1, 1 << 20), np.float32)}),
    "einsum": lambda d: _constant([node("Einsum", "a b", "c", equation="i,j->ij")],
                                  {"a": np.ones(1 << 20, np.float32), "b": np.ones(1 << 20, np.float32)}),
    "einsum_sum": lambda d: _constant([node("Einsum", "a a a a a", "c", equation="i,j,k,l,m->")],
                                      {"a": np.ones(4000, np.float32)}),
    "pow_tower": lambda d: _constant([node("Pow", "a a", "p"), node("Cast", "p", "c", to=1)], {"a": _ints(2**62)}),
    "doubling": lambda d: _constant([node("Concat", "a a", "t0", axis=0), *(node("Concat", f"t{i} t{i}", f"t{i + 1}", axis=0)
                                     for i in range(38)), node("Identity", "t38", "c")], {"a": np.ones(4, np.float32)}),
    "conv_folded": lambda d: _constant([node("Conv", "a w", "c", pads=(500, 500, 500, 500))],
                                       {"a": np.ones((1, 64, 9, 9), np.float32), "w": np.ones((64, 64, 9, 9), np.float32)}),
    "pad_run": lambda d: _one("Pad", inputs="x p", weights={"p": _ints(0, 0, BIG, 0, 0, 0, 0, 0)}),
    "pad_2_63": lambda d: _one("Pad", inputs="x p", weights={"p": _ints(0, 0, 2**62, 2**62, 0, 0, 2**62, 2**62)}),
    "tile_run": lambda d: _one("Tile", inputs="x r", weights={"r": _ints(1, 1, BIG, BIG)}),
    "expand_run": lambda d: _one("Expand", inputs="x s", weights={"s": _ints(BIG, 4, 8, 8)}),
    "resize_scale": lambda d: _one("Resize", inputs="x _ s", weights={"s": np.float32([1, 1, 1e9, 1e9])}),
    "resize_scale_inf": lambda d: _one("Resize", inputs="x _ s", weights={"s": np.float32([1, 1, np.inf, 1])}),
    "resize_scale_max": lambda d: _one("Resize", inputs="x _ s", weights={"s": np.float32([1, 1, 3e38, 3e38])}),
    "resize_scale_tiny": lambda d: _one("Resize", inputs="x _ s", weights={"s": np.float32([1, 1, 1e-30, 1])}),
    "resize_sizes": lambda d: _one("Resize", inputs="x _ _ s", weights={"s": _ints(1, 4, BIG, BIG)}),
    "upsample": lambda d: _one("Upsample", inputs="x s", weights={"s": np.float32([1, 1, 1e9, 1e9])}, opset=9),
    "slice_steps": lambda d: _one("Slice", inputs="x a b i s", weights={
        "a": _ints(2**63 - 1), "b": _ints(-(2**63)), "i": _ints(3), "s": _ints(-(2**63))}),
    "slice_step_0": lambda d: _one("Slice", inputs="x a b i s", weights={
        "a": _ints(0), "b": _ints(5), "i": _ints(3), "s": _ints(0)}),
    "reshape_huge": lambda d: _one("Reshape", inputs="x s", weights={"s": _ints(2**62, 4, 2**62)}),
    "unsqueeze_many": lambda d: _one("Unsqueeze", inputs="x i", weights={"i": np.arange(4, 5000)}),
    "transpose_wrong": lambda d: _one("Transpose", perm=(2**62, 1, 0, 3)),
    "top_k": lambda d: _one("TopK", inputs="x k", weights={"k": _ints(2**62)}, outputs="y i"),
    "gather_far": lambda d: _one("Gather", inputs="x i", weights={"i": _ints(2**62)}),
    "cum_sum_axis": lambda d: _one("CumSum", inputs="x i", weights={"i": np.int64(2**62)}),
    "split_many": lambda d: model([node("Split", "x", " ".join(f"y{i}" for i in range(5000)), axis=1, num_outputs=5000)],
                                  {"x": (1, 5000)}, "y0", opset=18),
    "depth_to_space": lambda d: _one("DepthToSpace", blocksize=2**62),
    "depth_to_space_0": lambda d: _one("DepthToSpace", blocksize=0),
    "space_to_depth": lambda d: _one("SpaceToDepth", blocksize=2**62),
    "concat_axis": lambda d: _one("Concat", inputs="x x", axis=2**62),
    "reduce_axis": lambda d: _one("ReduceSum", inputs="x a", weights={"a": _ints(2**62)}),
    "reduce_axis_7": lambda d: _one("ReduceSum", inputs="x a", weights={"a": _ints(7)}),
    "reduce_axis_attribute": lambda d: _one("ReduceMax", axes=(2**62,)),
    "squeeze_axis": lambda d: _one("Squeeze", inputs="x a", weights={"a": _ints(2**62)}),
    "unsqueeze_axis": lambda d: _one("Unsqueeze", inputs="x a", weights={"a": _ints(-(2**62))}),
    "slice_axis": lambda d: _one("Slice", inputs="x o t a", weights={"o": _ints(0), "t": _ints(2), "a": _ints(2**62)}),
    "pad_axis": lambda d: _one("Pad", inputs="x p _ a", weights={"p": _ints(1, 1), "a": _ints(2**62)}, opset=18),
    "resize_axis": lambda d: _one("Resize", inputs="x _ s", weights={"s": np.float32([2])}, opset=18, axes=(9,)),
    "flatten_axis": lambda d: _one("Flatten", axis=9),
    "gather_axis": lambda d: _one("Gather", inputs="x i", weights={"i": _ints(0)}, axis=9),
    "top_k_axis": lambda d: _one("TopK", inputs="x k", weights={"k": _ints(1)}, outputs="y i", axis=9),
    "arg_max_axis": lambda d: model([node("ArgMax", "x", "i", axis=9), node("Cast", "i", "y", to=1)], {"x": (1, 4)}, "y"),
    "layer_norm_axis": lambda d: _one("LayerNormalization", inputs="x s", weights={"s": np.ones(8, np.float32)}, axis=9),
    "split_sizes": lambda d: _one("Split", inputs="x s", weights={"s": _ints(2**62, 4 - 2**62)}, outputs="y z", axis=1),
    "group_norm_0": lambda d: _one("GroupNormalization", inputs="x s s", weights={"s": np.ones(4, np.float32)}, opset=21,
                                   num_groups=0),
    "concat_axis_1": lambda d: _one("Concat", inputs="x x", axis=1),
    "softmax_axis": lambda d: _one("Softmax", axis=-(2**62)),
    "cast_type": lambda d: _one("Cast", to=2**31 - 1),
    "outputs_100": lambda d: _outputs(100),
    "doc_string": lambda d: _doc(_conv(), 20_000_000),
    "names_long": lambda d: _text(_conv(), "n" * 300_000),
    "names_nul": lambda d: _text(_conv(), "a\0b"),
    "names_escapes": lambda d: _text(_conv(), "\x1b[2J\x1b]0;owned\x07\r\n\u202e"),
    "names_surrogates": lambda d: _text(_conv(), "\U0010ffff\ufeff\u2028"),
    "names_slashes": lambda d: _text(_conv(), "../../../../etc/"),
    "names_braces": lambda d: _text(_conv(), "{0.__class__}%s%n"),
}
# fmt: on


def write(name: str, folder: Path) -> Path:
    """Writes the model of that name into `folder`; returns its path."""
    path = folder / "model.onnx"
    path.write_bytes(MODELS[name](folder).SerializeToString())
    return path


class Victim:
    """A process that reads hostile files; a new one is started after a file that hung or ended it."""

    def __init__(self):
        self._process: subprocess.Popen | None = None

    def meet(self, what: str, path: Path | str, limit_s: float) -> dict:
        """Lets the process do `what` with a file; returns {"seconds", "error": class or None, "text"}. The error is "hung"
        after `limit_s` seconds, "died" if the process ended.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.hostile"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=ERRORS,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            self._process.stdout.readline()
        self._process.stdin.write(json.dumps({"do": what, "path": str(path)}).encode() + b"\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else b""
        if line:
            return json.loads(line)
        self.close()
        return {"seconds": limit_s, "error": "died" if ready else "hung", "text": ""}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def serve() -> None:
    import gpu_runtime as gr
    from gpu_runtime.explain import layer_info, report, wording
    from gpu_runtime.frontend.summaries import pattern

    def build(path: str) -> str:
        plan = gr.build(path, device="h200", sparsity="enable").record
        report.inspect_text(plan), wording.explain_text(plan, wording.rows_of(plan, ())), layer_info.layer_info(plan)
        return f"{len(plan.plan.layers)} layers"

    def load(path: str) -> str:
        return repr(gr.load(path, allow_cubins=True))[:200]

    tasks = {"build": build, "load": load, "sparsity": lambda path: str(len(pattern.inspect(path)))}
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        task, start = json.loads(line), time.perf_counter()
        try:
            error, text = None, tasks[task["do"]](task["path"])
        except BaseException as e:
            error, text = type(e).__name__, str(e)
        print(json.dumps({"seconds": time.perf_counter() - start, "error": error, "text": text[:2000]}), file=out, flush=True)


if __name__ == "__main__":
    serve()
