// Activations, chosen at compile time by ACT. The order is that of tactics/problems/pointwise_ops.py's ACTIVATIONS.
#pragma once

enum Act {
  ACT_NONE, ACT_RELU, ACT_LEAKY_RELU, ACT_PRELU, ACT_CLIP, ACT_SIGMOID, ACT_SILU, ACT_HARD_SIGMOID, ACT_HARD_SWISH, ACT_TANH,
  ACT_ELU, ACT_GELU, ACT_GELU_TANH, ACT_MISH, ACT_SOFTPLUS
};

// 1 - erf(v / sqrt 2) for v >= 0, without a branch: Abramowitz and Stegun 7.1.26, at most 1.5e-7 off; with z = v / sqrt 2 it is
// a polynomial of 1 / (1 + 0.3275911 z) times exp(-z^2).
__device__ __forceinline__ float erfc_scaled(float v) {
  const float t = __fdividef(1.f, fmaf(v, 0.3275911f * 0.70710678f, 1.f));
  const float poly = fmaf(fmaf(fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f), t, -0.284496736f), t, 0.254829592f);
  return poly * t * __expf(-0.5f * v * v);
}

// `a`, `b`: the activation's parameters; `slope`: the channel's, for prelu.
template <int KIND>
__device__ __forceinline__ float activate(float v, float a, float b, float slope) {
  if (KIND == ACT_RELU) return v > 0.f ? v : (v != v ? v : 0.f);  // NaN stays NaN, as in ONNX
  if (KIND == ACT_LEAKY_RELU) return v >= 0.f ? v : v * a;
  if (KIND == ACT_PRELU) return v >= 0.f ? v : v * slope;
  if (KIND == ACT_CLIP) return fminf(fmaxf(v, a), b);
  if (KIND == ACT_SIGMOID) return __fdividef(1.f, 1.f + __expf(-v));
  if (KIND == ACT_SILU) return __fdividef(v, 1.f + __expf(-v));
  if (KIND == ACT_HARD_SIGMOID) return fminf(fmaxf(a * v + b, 0.f), 1.f);
  if (KIND == ACT_HARD_SWISH) return v * fminf(fmaxf(v * (1.f / 6.f) + 0.5f, 0.f), 1.f);
  if (KIND == ACT_TANH) return tanhf(v);
  if (KIND == ACT_ELU) return v > 0.f ? v : a * (__expf(v) - 1.f);
  if (KIND == ACT_GELU) {  // max(v, 0) - |v| / 2 (1 - erf(|v| / sqrt 2)): nothing cancels far out on either side
    const float size = fabsf(v), tail = size < 16.f ? 0.5f * size * erfc_scaled(size) : 0.f;
    return (v < 0.f ? 0.f : v) - tail;
  }
  if (KIND == ACT_GELU_TANH) {  // (1 + tanh u) / 2 is 1 / (1 + exp(-2u))
    const float u = v * fmaf(v * v, 0.044715f * 0.79788456f, 0.79788456f);
    return v < -16.f ? 0.f : __fdividef(v, 1.f + __expf(-2.f * u));
  }
  if (KIND == ACT_MISH) {  // tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2); from v = 20 on that is 1
    const float e = __expf(fminf(v, 20.f)), n = e * (e + 2.f);
    return v * __fdividef(n, n + 2.f);
  }
  if (KIND == ACT_SOFTPLUS) return fmaxf(v, 0.f) + log1pf(__expf(-fabsf(v)));
  return v;
}

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
  v = activate<KIND>(v, p.alpha, p.beta, slope);
  if (AFFINE) v = fmaf(v, tail.scale, tail.shift);
  if (ORDER == 2) v += residual;
#if LAST
  v = activate<LAST>(v, p.alpha_last, p.beta_last, 0.f);
#endif
  return v;
}
