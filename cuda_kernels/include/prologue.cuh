// What happens to pixels between shared memory and the tensor cores, in FP16: max(x * scale + shift, 0) per channel, or
// x * gate per image and channel, which may then be clipped.
//
// A stage holds the constants of its BK channels behind its pixels. Lane t multiplies channels 2t and 2t + 1 of a chunk of 8:
// one word of each constant, which all lanes of the same t share.
#pragma once
#include "conv.cuh"

constexpr int PRO_BYTES = PRO ? 2 * BK * 2 : GATE ? 128 : 0;  // of a stage; rows of pixels keep their phase against the banks

// What no launch writes.
__device__ __forceinline__ void load_constants(const ConvParams& p, int tile, u32 smem) {
#if PRO
  if (threadIdx.x < PRO_BYTES / 16) cp_async_16(smem + threadIdx.x * 16, p.affine + tile * PRO_BYTES + threadIdx.x * 16, 16);
#endif
}

// What a launch before this one has written.
__device__ __forceinline__ void load_gate(const ConvParams& p, int tile, u32 smem) {
#if GATE
  const int chunk = tile * CHUNKS + threadIdx.x, c = chunk * 8;
  if (threadIdx.x < CHUNKS)
    cp_async_16(smem + threadIdx.x * 16, p.gate + (chunk < p.c8 ? (c >> p.g_log2v) * p.g_block + (c & ((1 << p.g_log2v) - 1)) : 0),
                chunk < p.c8 ? 16 : 0);
#endif
}

struct Prologue {
  u32 scale, shift;
#if GATE > 1
  __half2 low, high;
#endif

  // Of chunk `chunk` of the stage whose constants are at `stage_constants`.
  __device__ __forceinline__ Prologue(const ConvParams& p, u32 stage_constants, int chunk) {
#if PRO
    const u32 at = stage_constants + chunk / 4 * 128 + chunk % 4 * 16 + threadIdx.x % 4 * 4;
    scale = lds_32(at), shift = lds_32(at + 64);
#elif GATE
    scale = lds_32(stage_constants + chunk * 16 + threadIdx.x % 4 * 4);
#endif
#if GATE > 1
    low = __float2half2_rn(GATE == 2 ? 0.f : p.low), high = __float2half2_rn(p.high);
#endif
  }

  __device__ __forceinline__ u32 operator()(u32 v) const {
    if (!PRO && !GATE) return v;
    const __half2 x = *reinterpret_cast<const __half2*>(&v), s = *reinterpret_cast<const __half2*>(&scale);
#if PRO
    const __half2 y = __hmax2(__hfma2(x, s, *reinterpret_cast<const __half2*>(&shift)), __float2half2_rn(0.f));
#else
    __half2 y = __hmul2(x, s);
#endif
#if GATE > 1
    y = __hmax2(y, low);
#endif
#if GATE > 2
    y = __hmin2(y, high);
#endif
    return *reinterpret_cast<const u32*>(&y);
  }
};
