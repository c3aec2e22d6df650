// Activations, chosen at compile time by ACT. The order is that of tactics/problems/problem.py's ACTIVATIONS.
#pragma once

enum Act {
  ACT_NONE, ACT_RELU, ACT_LEAKY_RELU, ACT_PRELU, ACT_CLIP, ACT_SIGMOID, ACT_SILU, ACT_HARD_SIGMOID, ACT_HARD_SWISH, ACT_TANH
};

// `a`, `b`: the activation's parameters; `slope`: the channel's, for prelu.
template <int KIND>
__device__ __forceinline__ float activate(float v, float a, float b, float slope) {
  if (KIND == ACT_RELU) return v > 0.f ? v : (v != v ? v : 0.f);  // NaN stays NaN, as in ONNX
  if (KIND == ACT_LEAKY_RELU) return v >= 0.f ? v : v * a;
  if (KIND == ACT_PRELU) return v >= 0.f ? v : v * slope;
  if (KIND == ACT_CLIP) return fminf(fmaxf(v, a), b);
  if (KIND == ACT_SIGMOID) return 1.f / (1.f + __expf(-v));
  if (KIND == ACT_SILU) return v / (1.f + __expf(-v));
  if (KIND == ACT_HARD_SIGMOID) return fminf(fmaxf(a * v + b, 0.f), 1.f);
  if (KIND == ACT_HARD_SWISH) return v * fminf(fmaxf(v * (1.f / 6.f) + 0.5f, 0.f), 1.f);
  if (KIND == ACT_TANH) return tanhf(v);
  return v;
}

// An output before rounding. ORDER 0: no residual; 1: act(v + residual); 2: act(v) + residual.
template <int KIND, int ORDER>
__device__ __forceinline__ float finish(float v, float residual, float a, float b, float slope) {
  if (ORDER == 1) v += residual;
  v = activate<KIND>(v, a, b, slope);
  return ORDER == 2 ? v + residual : v;
}
