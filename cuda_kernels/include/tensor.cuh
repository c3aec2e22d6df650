// A tensor in any format: element (n, c, pixel) is at n*ns + (c >> log2v)*block + pixel*ps + (c & (V-1)); see tactics/format.py.
#pragma once
#include "nonfinite.cuh"

#define MINUS_INFINITY __int_as_float(0xff800000)  // NVRTC has no <math.h>

struct View {
  int n, block, pixel, log2v;  // strides in elements
  __device__ __forceinline__ long long at(int image, int c, int pix) const {
    return static_cast<long long>(image) * n + static_cast<long long>(c >> log2v) * block +
           static_cast<long long>(pix) * pixel + (c & ((1 << log2v) - 1));
  }
};

// 8 halfs as FP32 and back.
__device__ __forceinline__ void unpack(const uint4& bits, float (&v)[8]) {
  const __half2* h = reinterpret_cast<const __half2*>(&bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = __half22float2(h[i]);
    v[2 * i] = f.x, v[2 * i + 1] = f.y;
  }
}
__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  uint4 bits;
  __half2* h = reinterpret_cast<__half2*>(&bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
  return bits;
}

// VEC channels in one access: 8 in 16 bytes, or 1. Stores tell of values that are not finite.
__device__ __forceinline__ void load_vec(const __half* at, float (&v)[8]) { unpack(ldg_128(at), v); }
__device__ __forceinline__ void load_vec(const __half* at, float (&v)[1]) { v[0] = __half2float(*at); }
__device__ __forceinline__ void store_half(__half* at, float v, u32* nonfinite) {
  const __half h = __float2half_rn(v);
  *at = h;
  Watch watch;
  watch.see(h);
  watch.report(nonfinite);
}
__device__ __forceinline__ void store_vec(__half* at, const float (&v)[8], u32* nonfinite) {
  const uint4 bits = pack(v);
  stg_128(at, bits);
  Watch watch;
  watch.see(bits);
  watch.report(nonfinite);
}
__device__ __forceinline__ void store_vec(__half* at, const float (&v)[1], u32* nonfinite) { store_half(at, v[0], nonfinite); }
