// Groups of a convolution, each an implicit GEMM of its own: blockIdx.y is the group, and the kernel sees only its part. Where a
// gate is in front, every image is one too, blockIdx.z: gates are one image's.
//
// A group's tile never reaches into the next one's channels: input channels, weights, bias and output channels all start at
// the group's own, and the counts of channels are those of one group. Where groups are small, the host packs several
// block-diagonally into one, so that 8 channels are loaded and stored at once.
#pragma once
#include "split_k.cuh"

// A_TILE, E_PAIR: bytes per stage of weights of one 16-row tile, of metadata of two.
#if GROUPED || GATE
template <int A_TILE, int E_PAIR>
__device__ __forceinline__ ConvParams of_group(const ConvParams& all) {
  ConvParams p = all;
  const int group = blockIdx.y;
#if GROUPED
  const long long stages = static_cast<long long>(group) * p.k_tiles;
  p.x += group * p.x_group;
  p.w += stages * p.m16 * (A_TILE / 16);
  p.meta += stages * ((p.m16 + 1) / 2) * (E_PAIR / 4);
  p.bias += group * p.m16 * 16;
#if !TABLE
  p.slope += group * p.m16 * 16;
#endif
#if AFFINE
  p.scales += group * p.m16 * 16;
  p.shifts += group * p.m16 * 16;
#endif
#if MULTIPLIED
  p.multipliers += group * p.m16 * 16;
#endif
#if RES_MULTIPLIED
  p.residual_multipliers += group * p.m16 * 16;
#endif
  p.residual += group * p.y_group;
  p.y += group * p.y_group * (OUT_F32 ? 2 : 1);  // in halfs
#endif
#if GATE
  const long long image = blockIdx.z;
  p.x += image * p.x_n;
  p.gate += image * p.g_n + group * p.g_group;
  p.y += image * p.y_n * (OUT_F32 ? 2 : 1);
#if RES
  p.residual += image * p.r_n;
#endif
#endif
#if SPLIT
  const long long part = static_cast<long long>(blockIdx.z) * gridDim.y + group;
  p.partial = static_cast<char*>(p.partial) + part * gridDim.x * SPLIT * (BM * BN * 4);
  p.counters += part * p.tiles;
#endif
  return p;
}
#else
template <int A_TILE, int E_PAIR>
__device__ __forceinline__ const ConvParams& of_group(const ConvParams& all) {
  return all;
}
#endif
