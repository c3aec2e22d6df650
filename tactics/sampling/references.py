"""The expected output of a problem, as an array on the GPU, against which tactics are judged before they are timed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuda_kernels.compile import compile_kernel
from cuda_kernels.launch import Cuda
from cuda_kernels.params import arrange, pack_params
from tactics.problems.convolution import space_to_depth
from tactics.problems.epilogue import VECTORS
from tactics.problems.pointwise_ops import NONE
from tactics.problems.problem import ConvProblem, Problem
from tactics.sampling.data import images, of_images, reference
from tactics.step import Args, alpha_beta, epilogue_values, ints, window_args

SMALL_MACS = 30_000_000  # a convolution with at most this many products is computed by NumPy, a larger one on the GPU
SMALL_ELEMENTS = 4_000_000  # other problems are judged on as many images as have this many elements, first and last among them


def expected(
    gpu: Cuda, p: Problem, nchw: Sequence[Any], inputs: Sequence[np.ndarray], weights: Mapping[str, np.ndarray]
) -> tuple[Any, np.ndarray]:
    """Returns (the expected output, FP32 NCHW, a CuPy array; the indices of its images in the batch).

    `nchw`: the inputs as CuPy arrays; `inputs`, `weights`: the same inputs as NumPy arrays, and the weights (random_data's).
    """
    every = np.arange(p.out_shape[0])
    if isinstance(p, ConvProblem):
        if p.macs > SMALL_MACS:
            return reference_conv(gpu, p, nchw, weights), every
        return gpu.cupy.asarray(reference(p, inputs, weights)), every
    total = images(p)
    if not total:
        return gpu.cupy.asarray(np.float32(reference(p, inputs, weights))), every
    per_image = max(int(np.prod(s[1:])) for s in p.all_shapes)
    count = int(np.clip(SMALL_ELEMENTS // per_image, 1, total))
    some = np.unique(np.linspace(0, total - 1, count).astype(int)) if count > 1 else every[-1:]
    part = of_images(p, len(some))
    inputs = [x[some] if len(x) == total else x for x in inputs]
    return gpu.cupy.asarray(reference(part, inputs, weights)), some


def reference_conv(gpu: Cuda, p: ConvProblem, inputs: Sequence[Any], weights: Mapping[str, np.ndarray]) -> Any:
    """Returns the convolution's output, computed by its definition on the GPU: FP32 NCHW, a CuPy array.

    `inputs`: FP16 NCHW CuPy arrays; `weights`: NumPy arrays by name. The inputs are read after all work queued on CuPy's
    current stream; on return the result is complete, so any stream may read it.
    """
    cupy = gpu.cupy
    gpu.follow()
    with gpu.current():
        if p.prologue.border:
            around = (0, 0), (0, 0), (p.pad[0], p.pad[2]), (p.pad[1], p.pad[3])
            inputs = cupy.pad(inputs[0], around, constant_values=p.prologue.border), *inputs[1:]
            p = replace(p, h=inputs[0].shape[2], w=inputs[0].shape[3], pad=(0, 0, 0, 0))
        w = cupy.asarray(weights["w"].astype(np.float16))
        rows = {name: cupy.asarray(weights[name]) for name in VECTORS if name in weights}
        if p.epilogue.table:
            rows["slope"] = cupy.asarray(np.array(p.epilogue.table, np.float16))
        y = cupy.empty((p.n, p.k, p.p, p.q), np.float32)
        x = inputs[0]
        if p.prologue.scaled:
            scale, shift = (cupy.asarray(weights[name].reshape(1, -1, 1, 1)) for name in ("scale", "shift"))
            x = cupy.maximum(x.astype(np.float32) * scale + shift, 0).astype(np.float16)
        if p.prologue.normalized:
            wide = x.astype(np.float32)
            spread = cupy.sqrt(wide.var(1, keepdims=True) + np.float32(p.prologue.epsilon))
            x = ((wide - wide.mean(1, keepdims=True)) / spread).astype(np.float16)
        if p.prologue.gated:
            x = (x.astype(np.float32) * inputs[-1].astype(np.float32)).astype(np.float16)
            act = p.prologue.act
            x = cupy.clip(x, *map(np.float16, act.params)) if act.params else cupy.maximum(x, 0) if act != NONE else x
        end = p.epilogue
        residual: Any = None
        if end.residual:
            residual = inputs[1].repeat(end.up, axis=2).repeat(end.up, axis=3)
            residual = cupy.ascontiguousarray(space_to_depth(residual, end.d2s, end.d2s_mode))
        named = {"x": x, "weights": w, "residual": residual if end.residual else None, "y": y, **rows}
        values = epilogue_values(p)
        params = reference_params(p, values, {name: 0 if a is None else a.data.ptr for name, a in named.items()})
        kernel = gpu.load(compile_kernel("reference_conv", values, gpu.device.sm))
        gpu.launch(kernel, (min(-(-y.size // 256), 1 << 20), 1, 1), (256, 1, 1), 0, params)
        result = cupy.ascontiguousarray(cupy.asarray(p.stored(y.get() if end.pool else y)))
    gpu.synchronize()
    return result


def reference_params(p: ConvProblem, values: Mapping[str, int], addresses: Mapping[str, int]) -> bytes:
    """Returns the bytes of the parameter struct of reference_conv.cu.

    `values`: the kernel's compile-time values; `addresses`: the device addresses of "x", "weights", "residual", "y", and of the
    weights named in VECTORS; a name that is absent gets a null pointer.
    """
    vectors = {"bias": "b", **{name: name for name in VECTORS[1:]}}
    named = {name: addresses.get(vectors.get(name, name), 0) for name in ("x", "weights", "residual", "y", *vectors)}
    args: Args = {name: ("ptr", named[name]) for name in named if name not in VECTORS[2:] or name in p.epilogue.vectors}
    args["total"] = ("i64", p.n * p.k * p.p * p.q)
    args |= ints(c=p.c, h=p.h, w=p.w, k=p.k, p=p.p, q=p.q, r=p.r, s=p.s, groups=p.groups) | window_args(p) | alpha_beta(p)
    return pack_params(arrange("reference_conv", tuple(values.items()), args))
