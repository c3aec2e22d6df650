// Tensors that are FP16, or FP32 where FP16 could not hold their values: X_F32 and Y_F32 of 1, compile-time, say so of what a
// kernel reads and writes. FP32 moves element by element, in linear memory or channel by channel. X_BYTES and Y_BYTES of 1 or 2:
// bytes instead, signed or not, in vectors.
#pragma once
#include "tensor.cuh"
#if X_BYTES || Y_BYTES
#include "bytes.cuh"
#endif

#ifndef X_F32
#define X_F32 0
#endif
#ifndef Y_F32
#define Y_F32 0
#endif
#ifndef X_BYTES
#define X_BYTES 0
#endif
#ifndef Y_BYTES
#define Y_BYTES 0
#endif

template <int F32>
struct TypeOf {
  typedef __half type;
};
template <>
struct TypeOf<1> {
  typedef float type;
};
#if X_BYTES
typedef ByteOf<X_BYTES>::type X;
#else
typedef TypeOf<X_F32>::type X;
#endif
#if Y_BYTES
typedef ByteOf<Y_BYTES>::type Y;
#else
typedef TypeOf<Y_F32>::type Y;
#endif

__device__ __forceinline__ float load_one(const __half* at) { return __half2float(*at); }
__device__ __forceinline__ float load_one(const float* at) { return *at; }
__device__ __forceinline__ void store_one(__half* at, float v, u32* nonfinite) { store_half(at, v, nonfinite); }
__device__ __forceinline__ void store_one(float* at, float v, u32* nonfinite) {
  *at = v;
  if ((__float_as_uint(v) & 0x7f800000u) == 0x7f800000u) atomicOr(nonfinite, 1u);  // the exponent of infinity and NaN
}

template <int N>
__device__ __forceinline__ void load_vec(const float* at, float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = at[i];
}
template <int N>
__device__ __forceinline__ void store_vec(float* at, const float (&v)[N], u32* nonfinite) {
#pragma unroll
  for (int i = 0; i < N; ++i) store_one(at + i, v[i], nonfinite);
}
