// Notices what was stored without being finite: NaN, and infinity, which is what FP16 makes of values from 65520 on.
#pragma once
#include "ptx.cuh"

// Every kernel's parameters begin with `u32* nonfinite`, one word per launch, which is set to 1 then and else left alone.
struct Watch {
  __half2 sum = __half2half2(__ushort_as_half(0));  // of 0 * x: zero as long as every x is finite, NaN from then on

  __device__ __forceinline__ void see(__half2 x) { sum = __hfma2(x, __half2half2(__ushort_as_half(0)), sum); }
  __device__ __forceinline__ void see(__half x) { see(__half2half2(x)); }
  __device__ __forceinline__ void see(float x) { see(__float2half_rn(0.f * x)); }
  __device__ __forceinline__ void see(const uint4& x) {
    const __half2* h = reinterpret_cast<const __half2*>(&x);
#pragma unroll
    for (int i = 0; i < 4; ++i) see(h[i]);
  }
  __device__ __forceinline__ void report(u32* nonfinite) const {
    if (*reinterpret_cast<const u32*>(&sum) & 0x7fff7fffu) atomicOr(nonfinite, 1u);
  }
};
