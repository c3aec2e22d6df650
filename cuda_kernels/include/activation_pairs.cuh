// Two outputs at a time that are rounded to FP16 next: with less precision than include/activation.cuh, and fewer instructions.
// How far off they are: tests/cuda_kernels/test_activations.py.
#pragma once
#include "activation.cuh"

// 9.7.9.21 cvt: two floats rounded; RELU: by the same instruction a negative one becomes zero, and NaN stays NaN.
template <bool RELU>
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
  u32 r;
  if (RELU)
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// `activate` of both. SiLU has one quotient for the two: 1 / a is b / (a b). Below -40, where the result is 0, e^-v stays what it
// is there, so that infinity does not make a NaN of its neighbour; -infinity becomes 0.
template <int KIND>
__device__ __forceinline__ void activate_pair(float& v, float& w, float a, float b, float slope) {
  if constexpr (KIND == ACT_GELU) {
    v = gelu_to_half(v), w = gelu_to_half(w);
  } else if constexpr (KIND == ACT_SILU) {
    const float e = 1.f + fast_exp(fminf(-v, 40.f)), f = 1.f + fast_exp(fminf(-w, 40.f)), r = rcp_approx(e * f);
    v = no_less(v, -40.f) * (r * f), w = no_less(w, -40.f) * (r * e);
  } else {
    v = activate<KIND>(v, a, b, slope), w = activate<KIND>(w, a, b, slope);
  }
}

// `finish` of both, rounded. A ReLU that comes last is the rounding's: round(max(v, 0)) is max(round(v), 0).
template <int KIND, int ORDER, class Params>
__device__ __forceinline__ u32 finish_pair(const Params& p, float v, float w, float2 residual, float slope, Tail tail) {
  constexpr bool AT_LAST = LAST ? LAST == ACT_RELU : KIND == ACT_RELU && ORDER != 2 && !AFFINE;
  if (ORDER == 1) v += residual.x, w += residual.y;
  if (LAST || !AT_LAST) activate_pair<KIND>(v, w, p.alpha, p.beta, slope);
  if (AFFINE) v = fmaf(v, tail.scale, tail.shift), w = fmaf(w, tail.scale, tail.shift);
  if (ORDER == 2) v += residual.x, w += residual.y;
#if LAST
  if (!AT_LAST) activate_pair<LAST>(v, w, p.alpha_last, p.beta_last, 0.f);
#endif
  return rounded_pair<AT_LAST>(v, w);
}
