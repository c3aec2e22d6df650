// One stage's products of the implicit GEMM with dense weights, as conv_dense.cu draws it.
#pragma once
#include "implicit_gemm.cuh"

constexpr int A_TILE = BK / 16 * 512;  // bytes of one 16-row tile per stage
constexpr int B_AT = BM / 16 * A_TILE;

__device__ __forceinline__ void multiply(const ConvParams& p, u32 stage, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_m = warp / WARPS_N * MT, warp_n = warp % WARPS_N * WN;
  // ldmatrix.x4: matrices 0, 1 are K halves of pixels 0-7, matrices 2, 3 of pixels 8-15.
  const int row = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
    uint4 a[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) a[i] = lds_128(stage + (tile_m + i) * A_TILE + k * 512 + lane * 16);
    const u32 constants = stage + B_AT + B_BYTES;
    const Prologue low(p, constants, k * 2), high(p, constants, k * 2 + 1);
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
      uint4 b = ldmatrix_x4(stage + B_AT + swizzled<CHUNKS>(warp_n + j * 8 + row, k * 2 + half));
      b.x = low(b.x), b.y = high(b.y), b.z = low(b.z), b.w = high(b.w);
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        mma_16816(acc[i][j], a[i], b.x, b.y);
        mma_16816(acc[i][j + 1], a[i], b.z, b.w);
      }
    }
  }
}
