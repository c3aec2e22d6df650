"""A made-up plan, as an engine's file has it, and the functions that make its parts, for tests of reports and engine files."""

import copy
import json
import re
from dataclasses import asdict

from cuda_kernels.device import named
from gpu_runtime.runtime.plan_record import EngineRecord
from tactics import codec
from tactics.problems.codec import to_json
from tactics.problems.epilogue import Epilogue
from tactics.problems.pointwise_ops import NONE, Activation, Stage
from tactics.problems.problem import (
    ConcatProblem,
    ConvProblem,
    MoveProblem,
    PointwiseProblem,
    PoolProblem,
    ReformatProblem,
)
from tactics.problems.reductions import NormalizeProblem

REASONS = (
    "picked",
    "dense_faster",
    "reformat_outweighs",
    "within_noise",
    "no_sparse_tactic",
    "pattern_violation",
    "channels_not_multiple_of_4",
    "grouped_conv",
)


HEADER = ("model", "device", "timing", "producer", "source_hash", "flags", "sections")


def data(parts):
    """Returns the JSON data of an engine file from `parts`, one dict with the fields of the header and of one plan."""
    plan = {k: v for k, v in parts.items() if k not in HEADER}
    return {k: parts[k] for k in HEADER} | {"plans": [plan]}


def record(parts) -> EngineRecord:
    """Returns data(parts) as an EngineRecord."""
    return codec.from_json(EngineRecord, json.loads(json.dumps(data(parts))))


def tensor(name, shape4, fmt, offset=0):
    return {"name": name, "shape4": list(shape4), "format": fmt, "offset": offset}


def bound(name, shape, fmt, shape4, offset):
    return tensor(name, shape4, fmt, offset) | {"shape": list(shape)}


def layer(name, problem, inputs, outputs, us, kernel=None, nodes=None, weights=0):
    formats = [t["format"].replace(":", ".") for t in (*inputs, *outputs)]
    return {
        "name": name,
        "problem": problem and to_json(problem),
        "inputs": inputs,
        "outputs": outputs,
        "time_us": us,
        "tactic": kernel and f"{kernel}__{'_'.join(formats)}",
        "nodes": [name] if nodes is None else nodes,
        "weights_count": weights,
    }


def conv(shape4, kernel, k, act=NONE, residual=False, stride=1, sparse24=False):
    pad = (kernel // 2,) * 4
    return ConvProblem(
        *shape4,
        k,
        kernel,
        kernel,
        (stride, stride),
        pad,
        sparse24=sparse24,
        epilogue=Epilogue(bias=True, residual=residual, act=act),
    )


def best(tactic, us, fmt="fp16:hwc8"):
    """Returns the best dense or sparse tactic of a verdict, `best_dense` or `best_sparse`."""
    return {"tactic": tactic, "in": fmt, "out": fmt, "us": us, "low_us": us * 0.75, "high_us": us * 1.25, "bound": "smem"}


def other(tactic, us, kernel, reformat, around, fmt="fp16:hwc8"):
    """Returns the field `other` of a verdict: how the plan changes, in microseconds, if the layer is forced from sparse to
    dense or from dense to sparse."""
    cost = kernel + reformat + around
    return {
        "total_us": 123 + cost,
        "cost_us": cost,
        "kernel_us": kernel,
        "reformat_us": reformat,
        "around_us": around,
        "reformats": 0,
        "tactic": tactic,
        "in": fmt,
        "out": fmt,
        "us": us,
    }


def flip(us, needed, premium):
    return {"us": us, "needed_us": needed, "premium_us": premium}


def floor(bound, mma=10.0, dram=2.0):
    times = {"mma_us": mma, "dram_us": dram, "l2_us": 1.5, "launch_us": 2.0, "bound": bound}
    return times | {"dense_us": 2 + max(mma, dram), "sparse_us": 2 + max(mma / 2, dram)}


def verdict(name, what, reason, dense=None, sparse=None, cost=None, **more):
    """Returns a row on the sparsity of layer `name`; `what`: its verdict; `more`: fields that differ from the defaults here."""
    return {
        "layer": name,
        "layers": [name],
        "op": "Conv",
        "verdict": what,
        "reason": reason,
        "detail": None,
        "sentence": None,
        "pattern_share": 1.0,
        "first_violation": None,
        "best_dense": dense,
        "best_sparse": sparse,
        "other_cost_us": cost,
        "p_sparse_faster": None,
        "other": None,
        "flip": None,
        "lost_energy": 0.0,
        "if_sparse": None,
        "stored_share": 1.0,
        "able": [] if what == "not_eligible" else [name],
        "c": 64,
        "k": 64,
        "groups": 1,
        "kernel": [3, 3],
        "pattern_groups": 9216,
        "floor": None,
    } | more


def example_plan():
    """Returns a made-up plan with one layer of every type and one sparsity row of every reason."""
    big, mid, small = (8, 64, 56, 56), (8, 128, 28, 28), (8, 128, 1, 1)
    dense, sparse = "conv_dense_hmma_16816_128x128x32_w2x4_s4", "conv_sparse24_hmma_sp_16832_128x128x64_w2x4_s3"
    h8, h16, c32 = "fp16:hwc8", "fp16:hwc16", "fp16:chw32"
    wide = "/layer1/layer1.0/conv_with_a_rather_long_name/Conv"
    image, pooled, few = (8, 3, 112, 112), (8, 64, 28, 28), (8, 256, 1, 1)
    clip = Activation("clip", (0.0, 6.0))
    layers = [
        layer(
            "Reformatting CopyNode for Input Tensor 0 to /stem/Conv",
            ReformatProblem(*image, "fp32:chw", h8),
            [tensor("image", image, "fp32:chw")],
            [tensor("x16", image, h8)],
            5.25,
            "move",
            nodes=[],
        ),
        layer(
            "/stem/Conv",
            conv(image, 3, 64, Activation("relu"), stride=2),
            [tensor("x16", image, h8)],
            [tensor("a", big, h8)],
            20.5,
            dense,
            ["/stem/Conv", "/stem/Relu"],
            weights=1728,
        ),
        layer(
            wide,
            conv(big, 3, 64, Activation("relu"), sparse24=True),
            [tensor("a", big, h8)],
            [tensor("b", big, h8)],
            31.25,
            sparse,
            weights=36864,
        ),
        layer(
            "/layer1/conv2",
            conv(big, 3, 64, clip, residual=True, sparse24=True),
            [tensor("b", big, h8), tensor("a", big, h8)],
            [tensor("c", big, h8)],
            30,
            dense,
            weights=36864,
        ),
        layer(
            "/pool/MaxPool",
            PoolProblem(*big, "max", 3, 3, (28, 28), (2, 2), (1, 1, 0, 0)),
            [tensor("c", big, h8)],
            [tensor("d", pooled, h8)],
            4.5,
            "pool",
        ),
        layer(
            "Reformatting NoOp for Input Tensor 0 to /layer2/conv",
            None,
            [tensor("d", pooled, h8)],
            [tensor("d16", pooled, h16)],
            0,
            nodes=[],
        ),
        layer(
            "/layer2/conv",
            conv(pooled, 1, 128, sparse24=True),
            [tensor("d16", pooled, h16)],
            [tensor("e", mid, c32)],
            18.75,
            dense,
            weights=8192,
        ),
        layer(
            "/layer2/Mul",
            PointwiseProblem(*mid, (Stage("mul", "t1"), Stage("sigmoid")), ("nchw", "nchw")),
            [tensor("e", mid, c32), tensor("e", mid, c32)],
            [tensor("f", mid, c32)],
            3.5,
            "pointwise",
        ),
        layer(
            "/gap/GlobalAveragePool",
            PoolProblem(*mid, "avg", 28, 28, (1, 1)),
            [tensor("f", mid, c32)],
            [tensor("g", small, h8)],
            2.25,
            "pool_global",
        ),
        layer(
            "/cat/Concat",
            ConcatProblem((128, 128), (8, 1, 1)),
            [tensor("g", small, h8), tensor("g", small, h8)],
            [tensor("h", few, h8)],
            1,
            "move",
        ),
        layer(
            "/up/Resize",
            MoveProblem(*few, "upsample", (256, 2, 2), step=(1, 2, 2)),
            [tensor("h", few, h8)],
            [tensor("u", (8, 256, 2, 2), h8)],
            1,
            "move",
        ),
        layer(
            "/cut/Slice",
            MoveProblem(8, 256, 2, 2, "window", (256, 1, 1)),
            [tensor("u", (8, 256, 2, 2), h8)],
            [tensor("v", few, h8)],
            1,
            "move",
        ),
        layer("/fc/Gemm", conv(few, 1, 10), [tensor("v", few, h8)], [tensor("z", (8, 10, 1, 1), h8)], 2.5, dense, weights=2560),
        layer(
            "/Softmax",
            NormalizeProblem(8, 10, 1, 1, "softmax", "c"),
            [tensor("z", (8, 10, 1, 1), h8)],
            [tensor("prob", (8, 10, 1, 1), "fp32:chw")],
            1.5,
            "reduce",
        ),
    ]
    dense, sparse = (f"{name}__fp16.hwc8_fp16.hwc8" for name in (dense, sparse))
    rows = [
        verdict(
            "/stem/Conv",
            "not_eligible",
            "channels_not_multiple_of_4",
            best(dense, 20.5),
            c=3,
            pattern_share=None,
            pattern_groups=None,
            lost_energy=None,
            stored_share=None,
        ),
        verdict(
            wide,
            "sparse",
            "picked",
            best(dense, 40.5),
            best(sparse, 31.25),
            9.25,
            p_sparse_faster=0.93,
            other=other(dense, 40.5, 9.25, 0, 0),
            flip=flip(40.5, 32.5, 1.25),
            floor=floor("mma"),
            library={"us": 21.5, "bound": "math", "error": 0.1, "sparse_us": 15.25},
        ),
        verdict(
            "/layer1/conv2",
            "dense",
            "dense_faster",
            best(dense, 30),
            best(sparse, 33.75),
            3.75,
            other=other(sparse, 33.75, 3.75, 0, 0),
            flip=flip(33.75, 28.85, 1.15),
            floor=floor("mma"),
            p_sparse_faster=0.45,
        ),
        verdict(
            "/layer2/conv",
            "dense",
            "reformat_outweighs",
            best(dense, 18.75, "fp16:hwc16"),
            best(sparse, 17.5, "fp16:chw32"),
            6.5,
            floor=floor("dram", 4.0, 9.0),
            p_sparse_faster=0.6,
            other=other(sparse, 17.5, -1.25, 6, 1.75, "fp16:chw32"),
            flip=flip(17.5, 11.0, 0.0),
        ),
        verdict("/branch/tie", "dense", "within_noise", best(dense, 10), best(sparse, 9.9), -0.1),
        verdict("/branch/odd", "dense", "no_sparse_tactic", best(dense, 12), None, detail="C/g = 12, not 8 n"),
        verdict(
            "/branch/grouped",
            "not_eligible",
            "grouped_conv",
            best(dense, 11),
            c=128,
            groups=64,
            pattern_share=None,
            detail="a group has 2 input channels, not a multiple of 4",
        ),
        verdict(
            "/fc/Gemm",
            "not_eligible",
            "pattern_violation",
            best(dense, 2.5),
            pattern_share=0.99996,
            first_violation=[3, 16, 0, 0],
            pattern_groups=25600,
            lost_energy=0.000123,
            stored_share=0.9992,
            if_sparse=best(sparse, 2.2) | {"dense_us": 2.5},
            floor=floor("launch", 0.1, 0.1),
        ),
    ]
    total = sum(entry["time_us"] for entry in layers)
    return {
        "producer": {"version": "0.1.0", "nvrtc": "13.0"},
        "model": {"name": "example.onnx", "sha256": "5" * 64},
        "device": asdict(named("h200")),
        "timing": {"kind": "predicted", "label": "predicted(h200)"},
        "source_hash": "a" * 64,
        "flags": {"sparsity": "enable", "shapes": {"image": [8, 3, 112, 112]}},
        "inputs": [bound("image", (8, 3, 112, 112), "fp32:chw", (8, 3, 112, 112), 0)],
        "outputs": [bound("prob", (8, 10), "fp32:chw", (8, 10, 1, 1), 1 << 21)],
        "layers": layers,
        "sparsity": {
            "mode": "enable",
            "rows": rows,
            "picked": [wide],
            "eligible": [row["layer"] for row in rows if row["verdict"] != "not_eligible"],
        },
        "solution": {
            "total_us": total,
            "status": "proven",
            "method": "variable elimination",
            "width": 2,
            "gap": 0,
            "rivals": {
                "all_dense_us": total + 9.25,
                "best_single_format": {"format": h8, "us": total + 20},
                "greedy_us": total + 3.5,
                "library": {
                    "us": total - 30,
                    "low_us": total - 44.5,
                    "high_us": total - 15.5,
                    "sparse_us": total - 35.25,
                    "layers": len(rows) - 1,
                    "own": len(layers) + 1 - len(rows),
                    "own_us": 21.0,
                    "source": "fitted to published products",
                    "timed": 1,
                },
            },
        },
        "memory": {"activation_bytes": 9_633_792, "largest_live_bytes": 9_633_792},
        "sections": [{"name": "weights", "kind": "weights", "offset": 0, "nbytes": 196_608}],
    }


def measured(plan):
    plan = copy.deepcopy(plan)
    plan["timing"] = {"kind": "measured", "label": "measured(NVIDIA H200)"}
    return plan


def without_estimates(text):
    """Returns a report without its sentences on library kernels, whose times are estimates even in a measured plan."""
    return re.sub(
        r"dense kernels? (of a library|is estimated).*?2:4 kernels? (at )?~[\d.]+ us", "", " ".join(text.split()), flags=re.I
    )
