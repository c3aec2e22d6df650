// Two outputs at a time that are rounded to FP16 next: with less precision than include/activation.cuh has, and fewer instructions.
// How far off they are: tests/cuda_kernels/include/test_activation.py.
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

// `activate` of both. ONE_QUOTIENT: of two SiLUs, v e^v / (1 + e^v), for 1 / a is b / (a b): 3 MUFU for 4, and 15 instructions for
// 10, which is less where MUFU's clocks, 8 each, are more than what else an end issues. From 40 on, where e^v / (1 + e^v) is 1, e^v
// stays what it is there, so that infinity does not make a NaN of its neighbour.
template <int KIND, bool ONE_QUOTIENT>
__device__ __forceinline__ void activate_pair(float& v, float& w, float a, float b, float slope_v, float slope_w) {
  if constexpr (KIND == ACT_GELU) {
    v = gelu_to_half(v), w = gelu_to_half(w);
  } else if constexpr (KIND == ACT_SILU && ONE_QUOTIENT) {
    const float e = fast_exp(fminf(v, 40.f)), f = fast_exp(fminf(w, 40.f)), next = 1.f + f, r = rcp_approx(fmaf(e, next, next));
    v = v * e * (next * r), w = w * f * fmaf(e, r, r);
  } else {
    v = activate<KIND>(v, a, b, slope_v), w = activate<KIND>(w, a, b, slope_w);
  }
}

// What the ends of a channel's outputs need.
struct Channel {
  float slope;
  Tail tail;
};
template <int KIND, class Params>
__device__ __forceinline__ Channel channel_at(const Params& p, int row) {
  return {KIND == ACT_PRELU ? p.slope[row] : 0.f, tail_of(p, row)};
}

// `finish` of both, rounded; `of_v`, `of_w`: their channels' ends. A ReLU that comes last is the rounding's: round(max(v, 0)) is
// max(round(v), 0).
template <int KIND, int ORDER, bool ONE_QUOTIENT = true, class Params, class Ends>
__device__ __forceinline__ u32 finish_pair(const Params& p, float v, float w, float2 residual, const Ends& of_v, const Ends& of_w) {
  constexpr bool AT_LAST = LAST ? LAST == ACT_RELU : KIND == ACT_RELU && ORDER != 2 && !AFFINE;
  if (ORDER == 1) v += residual.x, w += residual.y;
  if (LAST || !AT_LAST) activate_pair<KIND, ONE_QUOTIENT>(v, w, p.alpha, p.beta, of_v.slope, of_w.slope);
#if TABLE == 1
  v = entry(p.slope, v, p.alpha, p.beta), w = entry(p.slope, w, p.alpha, p.beta);
#endif
  if (AFFINE) v = fmaf(v, of_v.tail.scale, of_v.tail.shift), w = fmaf(w, of_w.tail.scale, of_w.tail.shift);
  if (ORDER == 2) v += residual.x, w += residual.y;
#if LAST
  if (!AT_LAST) activate_pair<LAST, ONE_QUOTIENT>(v, w, p.alpha_last, p.beta_last, 0.f, 0.f);
#if TABLE == 2
  v = entry(p.slope, v, p.alpha_last, p.beta_last), w = entry(p.slope, w, p.alpha_last, p.beta_last);
#endif
#endif
  return rounded_pair<AT_LAST>(v, w);
}
