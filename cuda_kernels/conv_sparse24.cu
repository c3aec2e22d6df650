// conv_sparse24: implicit-GEMM convolution with 2:4 sparse weights on mma.sp.m16n8k32, FP16 in and out, FP32 accumulate.
//
//             N: pixels                   A (weights)  kept values in fragment order, half the bytes of dense: one
//           +-----------+                              16-byte load per lane feeds 32 of K
//           |  X  64xBN |                 E (metadata) one 32-bit word per lane and 64 of K: lanes t = 0, 1 hold the
//   +-------+-----------+                              codes of the first k32 step, lanes t = 2, 3 of the second
//   |W BMx32|  Y BMxBN  |  M: channels    B (pixels)   as in conv_dense; ldmatrix.x4 reads 8 pixels x 32 channels
//   |E BMx4 |           |
//   +-------+-----------+
//
// The trick: weights are operand A, the only one that may be sparse, and selectors 0 and 1 read one metadata load twice.
#include "implicit_gemm.cuh"

static_assert(BK == 64, "a metadata word covers two k32 steps");
constexpr int A_TILE = 2 * 512;  // bytes of one 16-row tile per stage: two k32 steps of kept values
constexpr int E_TILE = 32 * 4;   // its metadata
constexpr int E_AT = BM / 16 * A_TILE, B_AT = E_AT + BM / 16 * E_TILE;

__device__ __forceinline__ void multiply(const ConvParams& p, u32 stage, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_m = warp / WARPS_N * MT, warp_n = warp % WARPS_N * WN;
  u32 e[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) e[i] = lds_32(stage + E_AT + (tile_m + i) * E_TILE + lane * 4);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint4 a[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) a[i] = lds_128(stage + (tile_m + i) * A_TILE + k * 512 + lane * 16);
    const u32 constants = stage + B_AT + B_BYTES;
    const Prologue f0(p, constants, k * 4), f1(p, constants, k * 4 + 1), f2(p, constants, k * 4 + 2), f3(p, constants, k * 4 + 3);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      // Matrix i of ldmatrix.x4: chunk i of the step's 32 channels, pixels 0-7.
      uint4 b = ldmatrix_x4(stage + B_AT + swizzled<CHUNKS>(warp_n + j * 8 + (lane & 7), k * 4 + (lane >> 3)));
      b.x = f0(b.x), b.y = f1(b.y), b.z = f2(b.z), b.w = f3(b.w);
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        if (k == 0)
          mma_sp_16832<0>(acc[i][j], a[i], b, e[i]);
        else
          mma_sp_16832<1>(acc[i][j], a[i], b, e[i]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_sparse24(const __grid_constant__ ConvParams p) {
  convolve<A_TILE, E_TILE>(p, [](const ConvParams& p, u32 stage, float (&acc)[MT][NT][4]) { multiply(p, stage, acc); });
}
