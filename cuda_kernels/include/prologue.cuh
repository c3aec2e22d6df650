// What happens to pixels between shared memory and the tensor cores: max(x * scale + shift, 0), per channel, in FP16.
//
// A stage holds the constants of its BK channels behind its pixels. Lane t multiplies channels 2t and 2t + 1 of a chunk of 8:
// a word of scales and one of shifts, which all lanes of the same t share.
#pragma once
#include "conv.cuh"

constexpr int PRO_BYTES = PRO ? 2 * BK * 2 : 0;  // of a stage

__device__ __forceinline__ void load_prologue(const ConvParams& p, int tile, u32 smem) {
#if PRO
  if (threadIdx.x < PRO_BYTES / 16) cp_async_16(smem + threadIdx.x * 16, p.affine + tile * PRO_BYTES + threadIdx.x * 16, 16);
#endif
}

struct Affine {
  u32 scale, shift;

  // Of chunk `chunk` of the stage whose constants are at `stage_constants`.
  __device__ __forceinline__ Affine(u32 stage_constants, int chunk) {
    if (!PRO) return;
    const u32 at = stage_constants + chunk / 4 * 128 + chunk % 4 * 16 + threadIdx.x % 4 * 4;
    scale = lds_32(at), shift = lds_32(at + 64);
  }

  __device__ __forceinline__ u32 operator()(u32 v) const {
    if (!PRO) return v;
    const __half2 x = *reinterpret_cast<const __half2*>(&v), s = *reinterpret_cast<const __half2*>(&scale);
    const __half2 y = __hmax2(__hfma2(x, s, *reinterpret_cast<const __half2*>(&shift)), __float2half2_rn(0.f));
    return *reinterpret_cast<const u32*>(&y);
  }
};
