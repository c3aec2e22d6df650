// A chain of elementwise stages over VEC values of a thread: what pointwise.cu does to its first source, and other kernels to
// what they have computed before they store it.
//
// Compile-time: OPS, two decimal digits per stage from the right: its op, 0 ends; OPERANDS, one digit per stage: its
// source + 1, or 0 for its scalar; SOURCES, one digit per source: its kind below, 0 ends; BYTES: some sources are bytes; PLANES:
// a bit per source whose channels lie in planes although VEC is 8. TABLE: a stage is a table; its entries are a source that no
// thread loads as a whole. The numbers are those of tactics/problems/pointwise_ops.py and
// tactics/stages.py. A kernel's parameters have `Source source[NUM_SOURCES]` and `float param[NUM_STAGES ? NUM_STAGES : 1][2]`.
#pragma once
#include "activation.cuh"
#include "broadcast.cuh"
#include "types.cuh"
#if BYTES
#include "bytes.cuh"
#endif

#ifndef OPS
#define OPS 0
#endif
#ifndef OPERANDS
#define OPERANDS 0
#endif
#ifndef SOURCES
#define SOURCES 0
#endif

enum {
  OP_ADD = 20, OP_SUB, OP_RSUB, OP_MUL, OP_DIV, OP_RDIV, OP_MAX, OP_MIN, OP_POW, OP_RPOW, OP_PRELU,
  OP_ABS = 40, OP_CEIL, OP_ERF, OP_EXP, OP_FLOOR, OP_LOG, OP_ROUND, OP_SIGN, OP_SOFTSIGN, OP_SQRT, OP_SQUARE, OP_THRESHOLDED_RELU
};
// Kinds of sources. Constants are FP32 in the order n, h, w, c, with c padded to whole vectors.
// RESULT is what a kernel has computed itself, in source 0's place.
enum { TENSOR = 1, TENSOR_ONE_CHANNEL, CONSTANT, CONSTANT_ONE_CHANNEL, TENSOR_F32, TENSOR_F32_ONE_CHANNEL, RESULT,
       TENSOR_INT8, TENSOR_UINT8 };

constexpr int digits(long long packed, int base, int i) { return i ? digits(packed / base, base, i - 1) : packed % base; }
constexpr int count(long long packed, int base) { return packed ? 1 + count(packed / base, base) : 0; }
constexpr int NUM_STAGES = count(OPS, 100), NUM_SOURCES = count(SOURCES, 10);
static_assert(VEC == 8 || VEC == 1, "8 halfs in one access, or 1");

template <int OP>
__device__ __forceinline__ float apply(float v, float b, float p, float q) {
  if (OP == OP_ADD) return v + b;
  if (OP == OP_SUB) return v - b;
  if (OP == OP_RSUB) return b - v;
  if (OP == OP_MUL) return v * b;
  if (OP == OP_DIV) return v / b;
  if (OP == OP_RDIV) return b / v;
  if (OP == OP_MAX) return b > v || b != b ? b : v;  // NaN stays NaN, as in ONNX
  if (OP == OP_MIN) return b < v || b != b ? b : v;
  if (OP == OP_POW) return powf(v, b);
  if (OP == OP_RPOW) return powf(b, v);
  if (OP == OP_PRELU) return v >= 0.f ? v : v * b;
  if (OP == OP_ABS) return fabsf(v);
  if (OP == OP_CEIL) return ceilf(v);
  if (OP == OP_ERF) return erff(v);
  if (OP == OP_EXP) return __expf(v);
  if (OP == OP_FLOOR) return floorf(v);
  if (OP == OP_LOG) return logf(v);
  if (OP == OP_ROUND) return rintf(v);
  if (OP == OP_SIGN) return v > 0.f ? 1.f : v < 0.f ? -1.f : v;
  if (OP == OP_SOFTSIGN) {  // from 2^64 on it is 1, also where the instruction's 1 / (1 + |v|) is 0
    const float size = fabsf(v) > 0x1p64f ? 0x1p64f : fabsf(v);
    return copysignf(size * rcp_approx(1.f + size), v);
  }
  if (OP == OP_SQRT) return sqrtf(v);
  if (OP == OP_SQUARE) return v * v;
  if (OP == OP_THRESHOLDED_RELU) return v > p ? v : 0.f;
  return activate<OP>(v, p, q, 0.f);
}

#if PLANES
// Channels that lie in planes: one access each, of those that the tensor has.
template <typename T>
__device__ __forceinline__ void load_planes(const T* at, int plane, int channels, float (&v)[VEC]) {
#pragma unroll
  for (int j = 0; j < VEC; ++j) v[j] = j < channels ? load_one(at + static_cast<long long>(j) * plane) : 0.f;
}
#endif

#if SOURCES
// Loads all sources but RESULT.
template <int I, typename Params>
__device__ __forceinline__ void load_sources(const Params& p, const Place& at, float (&s)[NUM_SOURCES][VEC]) {
  if constexpr (I < NUM_SOURCES && digits(SOURCES, 10, I) == RESULT) {
    load_sources<I + 1>(p, at, s);
  } else if constexpr (I < NUM_SOURCES) {
    constexpr int kind = digits(SOURCES, 10, I);
    const Source& source = p.source[I];
    const long long i = source.spread.at(at);
    const __half* half = static_cast<const __half*>(source.at) + i;
    const float* single = static_cast<const float*>(source.at) + i;
#if PLANES
    if constexpr (PLANES >> I & 1) {
      if constexpr (kind == TENSOR) load_planes(half, source.spread.block, p.c - at.channel, s[I]);
      if constexpr (kind == TENSOR_F32) load_planes(single, source.spread.block, p.c - at.channel, s[I]);
    } else
#endif
#if BYTES
    if constexpr (kind == TENSOR_INT8) {
      load_vec(static_cast<const signed char*>(source.at) + i, s[I]);
    } else if constexpr (kind == TENSOR_UINT8) {
      load_vec(static_cast<const unsigned char*>(source.at) + i, s[I]);
    } else
#endif
    if constexpr (kind == TENSOR) {
      load_vec(half, s[I]);
    } else if constexpr (kind == CONSTANT && VEC == 8) {
      const float4 low = *reinterpret_cast<const float4*>(single), high = *reinterpret_cast<const float4*>(single + 4);
      s[I][0] = low.x, s[I][1] = low.y, s[I][2] = low.z, s[I][3] = low.w;
      s[I][4] = high.x, s[I][5] = high.y, s[I][6] = high.z, s[I][7] = high.w;
    } else if constexpr (kind == TENSOR_F32) {
      load_vec(single, s[I]);
    } else {
      const float value = kind == TENSOR_ONE_CHANNEL ? __half2float(*half) : *single;
#pragma unroll
      for (int j = 0; j < VEC; ++j) s[I][j] = value;
    }
    load_sources<I + 1>(p, at, s);
  }
}

template <int I, typename Params>
__device__ __forceinline__ void run_stages(const Params& p, const float (&s)[NUM_SOURCES][VEC], float (&v)[VEC]) {
  if constexpr (I < NUM_STAGES) {
    constexpr int from = digits(OPERANDS, 10, I);
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      v[j] = apply<digits(OPS, 100, I)>(v[j], from ? s[from ? from - 1 : 0][j] : p.param[I][0], p.param[I][0], p.param[I][1]);
#if TABLE
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      if constexpr (digits(OPS, 100, I) == ACT_TABLE) v[j] = entry(p.source[from - 1].at, v[j], p.param[I][0], p.param[I][1]);
#endif
    run_stages<I + 1>(p, s, v);
  }
}

// The stages behind what a kernel has computed for VEC channels from at.channel on, of which the tensor has `channels`.
template <typename Params>
__device__ __forceinline__ void run_chain(const Params& p, const Place& at, int channels, float (&v)[VEC]) {
  if (at.channel >= channels) return;  // only padding, which a source need not have
  float s[NUM_SOURCES][VEC];
  load_sources<0>(p, at, s);
#pragma unroll
  for (int j = 0; j < VEC; ++j) s[0][j] = v[j];
  run_stages<0>(p, s, v);
#pragma unroll
  for (int j = 0; j < VEC; ++j)
    if (at.channel + j >= channels) v[j] = 0.f;  // padded channels stay zero, whatever op(0) is
}
#endif
