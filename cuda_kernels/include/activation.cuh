// Activations, chosen at compile time by ACT. The order is that of tactics/problems/pointwise_ops.py's ACTIVATIONS.
//
// Exponentials and quotients are single instructions, 2 ulp and 1 ulp off at most, which flush subnormals (include/ptx.cuh):
// keeping those costs a comparison and two products per exponential, and no sum below can tell them from 0. How far off
// activations are: tests/cuda_kernels/test_activations.py.
#pragma once
#include "ptx.cuh"

enum Act {
  ACT_NONE, ACT_RELU, ACT_LEAKY_RELU, ACT_PRELU, ACT_CLIP, ACT_SIGMOID, ACT_SILU, ACT_HARD_SIGMOID, ACT_HARD_SWISH, ACT_TANH,
  ACT_ELU, ACT_GELU, ACT_GELU_TANH, ACT_MISH, ACT_SOFTPLUS, ACT_QUANTIZE, ACT_TABLE
};

// 1 / (1 + exp(-v)); below v = -87.3 that is less than 2^-126, and 0 here. NaN stays NaN.
__device__ __forceinline__ float logistic(float v) { return rcp_approx(1.f + fast_exp(-v)); }

// (1 - erf(v / sqrt 2)) / 2 for v >= 0, without a branch: Abramowitz and Stegun 7.1.26, at most 1.5e-7 off; with z = v / sqrt 2
// it is a polynomial of 1 / (1 + 0.3275911 z) times exp(-z^2).
__device__ __forceinline__ float half_erfc_scaled(float v) {
  const float t = rcp_approx(fmaf(v, 0.3275911f * 0.70710678f, 1.f));
  const float high = fmaf(fmaf(0.5307027145f, t, -0.7265760135f), t, 0.7107068705f);
  const float poly = fmaf(fmaf(high, t, -0.142248368f), t, 0.127414796f);
  return poly * t * ex2_approx(v * (v * (-0.5f * LOG2_E)));
}

// `a`, `b`: the activation's parameters; `slope`: the channel's, for prelu.
template <int KIND>
__device__ __forceinline__ float activate(float v, float a, float b, float slope) {
  if (KIND == ACT_RELU) return v > 0.f ? v : (v != v ? v : 0.f);  // NaN stays NaN, as in ONNX
  if (KIND == ACT_LEAKY_RELU) return v >= 0.f ? v : v * a;
  if (KIND == ACT_PRELU) return v >= 0.f ? v : v * slope;
  if (KIND == ACT_CLIP) return fminf(fmaxf(v, a), b);
  if (KIND == ACT_SIGMOID) return logistic(v);
  if (KIND == ACT_SILU) return v * logistic(v);  // NaN at -infinity, as x * sigmoid(x) is in IEEE arithmetic
  if (KIND == ACT_HARD_SIGMOID) return fminf(fmaxf(a * v + b, 0.f), 1.f);
  if (KIND == ACT_HARD_SWISH) return v * fminf(fmaxf(v * (1.f / 6.f) + 0.5f, 0.f), 1.f);
  if (KIND == ACT_TANH) return tanhf(v);
  if (KIND == ACT_ELU) {  // near 0 the difference would keep nothing but the error of the exponential
    const float near = v * fmaf(v, fmaf(v, fmaf(v, 1.f / 24.f, 1.f / 6.f), 0.5f), 1.f);
    return v > 0.f ? v : a * (v > -0.03125f ? near : fast_exp(v) - 1.f);
  }
  if (KIND == ACT_GELU) {  // max(v, 0) - |v| / 2 (1 - erf(|v| / sqrt 2)): nothing cancels far out on either side
    const float size = fminf(fabsf(v), 16.f);  // where the difference is 0; infinity times that would be NaN
    return (v < 0.f ? 0.f : v) - size * half_erfc_scaled(size);
  }
  if (KIND == ACT_GELU_TANH) {  // (1 + tanh u) / 2 is 1 / (1 + exp(-2u))
    constexpr float SCALE = -2.f * 0.79788456f * LOG2_E;
    const float w = v < -16.f ? -16.f : v;  // where the result is 0
    return w * rcp_approx(1.f + ex2_approx(w * fmaf(w * w, 0.044715f * SCALE, SCALE)));
  }
  if (KIND == ACT_MISH) {  // tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2); from v = 20 on that is 1
    const float e = fast_exp(fminf(v, 20.f)), n = e * (e + 2.f);
    return v * (n * rcp_approx(n + 2.f));
  }
  if (KIND == ACT_QUANTIZE) return fminf(fmaxf(rintf(v), a), b);  // NaN is the least
  if (KIND == ACT_SOFTPLUS) return fmaxf(v, 0.f) + log1pf(fast_exp(-fabsf(v)));
  return v;
}

// 9.7.3.10 max.NaN: max(v, low) where NaN stays NaN.
__device__ __forceinline__ float no_less(float v, float low) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(v), "f"(low));
  return r;
}

// max(v, 0) - s 2^q(s) with s = |v|, for log2 of (1 - erf(s / sqrt 2)) / 2 is nearly a parabola. The polynomial is off by at most
// 0.14 ulp of FP16 of the result on either side, up to s = 5.75, from where the difference is nothing.
__device__ __forceinline__ float gelu_to_half(float v) {
  const float s = fminf(fabsf(v), 5.75f);
  float q = fmaf(s, -0.0003305553815618474f, 0.005924028168616319f);
  q = fmaf(s, q, -0.04856324915675681f);
  q = fmaf(s, q, -0.46366204553524953f);
  q = fmaf(s, q, -1.1494231146314666f);
  q = fmaf(s, q, -1.0000995612402992f);
  return fmaf(-s, ex2_approx(q), no_less(v, 0.f));
}

// `activate` of a result that `finish` gives. ROUNDED   1: it is rounded to FP16 next, and needs no more precision than that.
#ifndef ROUNDED
#define ROUNDED 1
#endif
template <int KIND>
__device__ __forceinline__ float activate_result(float v, float a, float b, float slope) {
  return KIND == ACT_GELU && ROUNDED ? gelu_to_half(v) : activate<KIND>(v, a, b, slope);
}

// Of a result rounded to a whole number from `low` to `high`, its entry of a table of halfs. TABLE   1: the first activation is
// ACT_TABLE, which `activate` leaves to this, and p.slope the table; 2: the one of LAST.
#if TABLE
__device__ __forceinline__ float entry(const void* table, float v, float low, float high) {
  return __half2float(static_cast<const __half*>(table)[static_cast<int>(activate<ACT_QUANTIZE>(v, low, high, 0.f) - low)]);
}
#endif

// What may follow the activation. Compile-time: AFFINE   1: v * scale + shift, per channel; LAST   a second Act, behind that and
// behind a residual of order 2.
#ifndef AFFINE
#define AFFINE 0
#endif
#ifndef LAST
#define LAST 0
#endif
struct Tail {
  float scale, shift;
};

// Of channel `row` of a kernel's parameters, which have the members only where they are compiled in.
template <class Params>
__device__ __forceinline__ Tail tail_of(const Params& p, int row) {
  Tail tail = {1.f, 0.f};
#if AFFINE
  tail.scale = p.scales[row], tail.shift = p.shifts[row];
#endif
  return tail;
}

// An output before rounding. ORDER 0: no residual; 1: act(v + residual); 2: act(v) + residual.
template <int KIND, int ORDER, class Params>
__device__ __forceinline__ float finish(const Params& p, float v, float residual, float slope, Tail tail) {
  if (ORDER == 1) v += residual;
  v = activate_result<KIND>(v, p.alpha, p.beta, slope);
#if TABLE == 1
  v = entry(p.slope, v, p.alpha, p.beta);
#endif
  if (AFFINE) v = fmaf(v, tail.scale, tail.shift);
  if (ORDER == 2) v += residual;
#if LAST
  v = activate_result<LAST>(v, p.alpha_last, p.beta_last, 0.f);
#if TABLE == 2
  v = entry(p.slope, v, p.alpha_last, p.beta_last);
#endif
#endif
  return v;
}
