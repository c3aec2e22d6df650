"""Plans as the planner records them, made by hand: what reports and engine files are tested with."""

import copy

from tactics.format import Format, num_bytes

REASONS = (
    "picked", "dense_faster", "reformat_outweighs", "within_noise", "no_sparse_tactic", "pattern_violation",
    "channels_not_multiple_of_4", "grouped_conv",
)  # fmt: skip


def tensor(name, shape4, fmt, offset=0):
    return {"name": name, "shape4": list(shape4), "format": fmt, "offset": offset}


def bound(name, shape, dtype, fmt, shape4, offset):
    nbytes = num_bytes(Format.parse(fmt), tuple(shape4))
    return tensor(name, shape4, fmt, offset) | {"shape": list(shape), "dtype": dtype, "nbytes": nbytes}


def layer(name, kind, inputs, outputs, us, tactic, params=None, nodes=None, sparse=False, pattern=False, **counts):
    return {
        "name": name, "type": kind, "nodes": [name] if nodes is None else nodes, "layer": None, "problem": None,
        "params": params or {}, "inputs": inputs, "outputs": outputs, "tactic": tactic, "time_us": us,
        "sparse": sparse, "has_sparse_weights": pattern, "weights_count": counts.get("weights", 0),
        "bias_count": counts.get("bias", 0),
    }  # fmt: skip


def conv(kernel, k, act="none", residual=False, groups=1, stride=1):
    return {
        "kernel": [kernel, kernel], "stride": [stride, stride], "pad": [kernel // 2] * 4, "dilation": [1, 1], "k": k,
        "groups": groups, "act": act, "bias": True, "residual": residual,
    }  # fmt: skip


def best(tactic, us, fmt="fp16:hwc8"):
    return {"tactic": tactic, "in": fmt, "out": fmt, "us": us, "low_us": us * 0.75, "high_us": us * 1.25, "bound": "smem"}


def other(tactic, us, kernel, reformat, around, fmt="fp16:hwc8"):
    """What forcing a layer the other way changes."""
    cost = kernel + reformat + around
    return {
        "total_us": 123 + cost, "cost_us": cost, "kernel_us": kernel, "reformat_us": reformat, "around_us": around,
        "reformats": 0, "tactic": tactic, "in": fmt, "out": fmt, "us": us,
    }  # fmt: skip


def floor(bound, mma=10.0, dram=2.0):
    times = {"mma_us": mma, "dram_us": dram, "l2_us": 1.5, "launch_us": 2.0, "bound": bound}
    return times | {"dense_us": 2 + max(mma, dram), "sparse_us": 2 + max(mma / 2, dram)}


def verdict(name, what, reason, dense=None, sparse=None, cost=None, **more):
    return {
        "layer": name, "layers": [name], "op": "Conv", "verdict": what, "reason": reason, "detail": None, "sentence": None,
        "pattern_share": 1.0, "first_violation": None, "best_dense": dense, "best_sparse": sparse,
        "other_cost_us": cost, "p_sparse_faster": None, "other": None, "flip_speedup": None, "lost_energy": 0.0,
        "if_sparse": None, "stored_share": 1.0,
        "c": 64, "k": 64, "groups": 1, "kernel": [3, 3], "pattern_groups": 9216, "floor": None,
    } | more  # fmt: skip


def example_plan():
    """A made-up plan with one layer of every type and one sparsity row of every reason."""
    big, mid, small = (8, 64, 56, 56), (8, 128, 28, 28), (8, 128, 1, 1)
    dense, sparse = "conv_dense_hmma_16816_128x128x32_w2x4_s4", "conv_sparse24_hmma_sp_16832_128x128x64_w2x4_s3"
    h8 = "fp16:hwc8"
    dense, sparse = (f"{name}__fp16.hwc8_fp16.hwc8" for name in (dense, sparse))
    stem = layer(
        "/stem/Conv", "conv", [tensor("x16", (8, 3, 112, 112), h8)], [tensor("a", big, h8)], 20.5, dense,
        conv(3, 64, "relu", stride=2), ["/stem/Conv", "/stem/Relu"], weights=1728, bias=64,
    )  # fmt: skip
    wide = "/layer1/layer1.0/conv_with_a_rather_long_name/Conv"
    layers = [
        layer("Reformatting CopyNode for Input Tensor 0 to /stem/Conv", "reformat",
              [tensor("image", (8, 3, 112, 112), "fp32:chw")], [tensor("x16", (8, 3, 112, 112), h8)], 5.25,
              "reformat_tile32", nodes=[]),
        stem,
        layer(wide, "conv", [tensor("a", big, h8)], [tensor("b", big, h8)], 31.25, sparse, conv(3, 64, "relu"),
              sparse=True, pattern=True, weights=36864, bias=64),
        layer("/layer1/conv2", "conv", [tensor("b", big, h8), tensor("a", big, h8)], [tensor("c", big, h8)], 30, dense,
              conv(3, 64, "clip(0,6)", residual=True), pattern=True, weights=36864, bias=64),
        layer("/pool/MaxPool", "pool", [tensor("c", big, h8)], [tensor("d", (8, 64, 28, 28), h8)], 4.5, "pool_v8",
              {"kind": "max", "kernel": [3, 3], "stride": [2, 2], "pad": [1, 1, 0, 0], "count_pad": False}),
        layer("Reformatting NoOp for Input Tensor 0 to /layer2/conv", "noop", [tensor("d", (8, 64, 28, 28), h8)],
              [tensor("d16", (8, 64, 28, 28), "fp16:hwc16")], 0, "", nodes=[]),
        layer("/layer2/conv", "conv", [tensor("d16", (8, 64, 28, 28), "fp16:hwc16")],
              [tensor("e", mid, "fp16:chw32")], 18.75, dense, conv(1, 128), pattern=True, weights=8192, bias=128),
        layer("/layer2/Mul", "pointwise", [tensor("e", mid, "fp16:chw32"), tensor("e", mid, "fp16:chw32")],
              [tensor("f", mid, "fp16:chw32")], 3.5, "pointwise_v8", {"stages": ["mul(t1)", "sigmoid"]}),
        layer("/gap/GlobalAveragePool", "pool", [tensor("f", mid, "fp16:chw32")], [tensor("g", small, h8)], 2.25,
              "pool_global", {"kind": "avg", "kernel": [28, 28], "stride": [1, 1], "pad": [0, 0, 0, 0]}),
        layer("/cat/Concat", "concat", [tensor("g", small, h8), tensor("g", small, h8)],
              [tensor("h", (8, 256, 1, 1), h8)], 1, "move_concat"),
        layer("/up/Resize", "move", [tensor("h", (8, 256, 1, 1), h8)], [tensor("u", (8, 256, 2, 2), h8)], 1,
              "move_gather", {"kind": "upsample"}),
        layer("/cut/Slice", "move", [tensor("u", (8, 256, 2, 2), h8)], [tensor("v", (8, 256, 1, 1), h8)], 1,
              "move_gather", {"kind": "window"}),
        layer("/fc/Gemm", "conv", [tensor("v", (8, 256, 1, 1), h8)], [tensor("z", (8, 10, 1, 1), h8)], 2.5, dense,
              conv(1, 10), weights=2560, bias=10),
        layer("/Softmax", "normalize", [tensor("z", (8, 10, 1, 1), h8)], [tensor("prob", (8, 10, 1, 1), "fp32:chw")],
              1.5, "softmax_warp", {"kind": "softmax", "axes": "c"}),
    ]  # fmt: skip
    rows = [
        verdict("/stem/Conv", "not_eligible", "channels_not_multiple_of_4", best(dense, 20.5), c=3, pattern_share=None,
                pattern_groups=None, lost_energy=None, stored_share=None),
        verdict(wide, "sparse", "picked", best(dense, 40.5), best(sparse, 31.25), 9.25,
                p_sparse_faster=0.93, other=other(dense, 40.5, 9.25, 0, 0), flip_speedup=1.296,
                floor=floor("mma")),
        verdict("/layer1/conv2", "dense", "dense_faster", best(dense, 30), best(sparse, 33.75), 3.75,
                other=other(sparse, 33.75, 3.75, 0, 0), flip_speedup=1.125, floor=floor("mma"), p_sparse_faster=0.45),
        verdict("/layer2/conv", "dense", "reformat_outweighs", best(dense, 18.75, "fp16:hwc16"),
                best(sparse, 17.5, "fp16:chw32"), 6.5, floor=floor("dram", 4.0, 9.0), p_sparse_faster=0.6,
                other=other(sparse, 17.5, -1.25, 6, 1.75, "fp16:chw32"), flip_speedup=1.591),
        verdict("/branch/tie", "dense", "within_noise", best(dense, 10), best(sparse, 9.9), -0.1),
        verdict("/branch/odd", "dense", "no_sparse_tactic", best(dense, 12), None, detail="C/g = 12, not 8 n"),
        verdict("/branch/grouped", "not_eligible", "grouped_conv", best(dense, 11), c=128, groups=64, pattern_share=None,
                detail="a group has 2 input channels, not a multiple of 4"),
        verdict("/fc/Gemm", "not_eligible", "pattern_violation", best(dense, 2.5), pattern_share=0.99996,
                first_violation=[3, 16, 0, 0], pattern_groups=25600, lost_energy=0.000123, stored_share=0.9992,
                if_sparse=best(sparse, 2.2) | {"dense_us": 2.5}, floor=floor("launch", 0.1, 0.1)),
    ]  # fmt: skip
    total = sum(entry["time_us"] for entry in layers)
    return {
        "producer": {"version": "0.1.0", "nvrtc": "13.0"},
        "model": {"name": "example.onnx", "sha256": "5" * 64},
        "device": {"name": "h200", "title": "H200 SXM 141GB", "sm": "sm_90a", "num_sms": 132, "clock_mhz": 1830},
        "timing": {"kind": "predicted", "label": "predicted(h200)"},
        "source_hash": "a" * 64,
        "flags": {"sparsity": "enable", "shapes": {"image": [8, 3, 112, 112]}},
        "inputs": [bound("image", (8, 3, 112, 112), "fp32", "fp32:chw", (8, 3, 112, 112), 0)],
        "outputs": [bound("prob", (8, 10), "fp32", "fp32:chw", (8, 10, 1, 1), 1 << 21)],
        "layers": layers,
        "steps": [
            {"kernel": "reformat", "values": {"V": 8}, "grid": [64, 1, 1], "block": [256, 1, 1], "smem": 0,
             "args": [["arena", 0], ["weights", 256], ["i32", 5], ["i64", 1 << 40], ["f32", 0.1]], "covers": [0]},
        ],
        "sparsity": {
            "mode": "enable", "rows": rows, "picked": [wide],
            "eligible": [row["layer"] for row in rows if row["verdict"] != "not_eligible"],
        },
        "plan": {
            "total_us": total, "status": "proven", "method": "variable elimination", "width": 2, "gap": 0,
            "rivals": {"all_dense_us": total + 9.25, "best_single_format": {"format": h8, "us": total + 20},
                       "greedy_us": total + 3.5},
        },
        "memory": {"activation_bytes": 9_633_792, "largest_live_bytes": 9_633_792, "weight_bytes": 196_608},
        "sections": [],
    }  # fmt: skip


def measured(plan):
    plan = copy.deepcopy(plan)
    plan["timing"] = {"kind": "measured", "label": "measured(NVIDIA H200)"}
    return plan
