// conv_dense: implicit-GEMM convolution on mma.sync.m16n8k16, FP16 in and out, FP32 accumulate.
//
//            N: pixels                    A (weights)  packed in fragment order: a warp's operand is one 16-byte load
//          +-----------+                               per lane, no ldmatrix, no bank conflict
//          |  X  BKxBN |                  B (pixels)   [pixel][BK channels] rows in shared memory, 16-byte chunks
//   +------+-----------+                               swizzled; ldmatrix.x4 reads 16 pixels x 16 channels
//   |W BMxBK|  Y BMxBN |  M: channels     warps        WARPS_M x WARPS_N, each WM x WN of Y in registers
//   +------+-----------+
//
// The trick: K runs over (tap, 8-channel chunk), so a stage may span taps and a 3-channel input wastes 5 of 8, not 61 of 64.
#include "implicit_gemm.cuh"

constexpr int A_TILE = BK / 16 * 512;  // bytes of one 16-row tile per stage
constexpr int B_AT = BM / 16 * A_TILE;

__device__ __forceinline__ void multiply(u32 stage, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_m = warp / WARPS_N * MT, warp_n = warp % WARPS_N * WN;
  // ldmatrix.x4: matrices 0, 1 are K halves of pixels 0-7, matrices 2, 3 of pixels 8-15.
  const int row = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
#pragma unroll
  for (int k = 0; k < BK / 16; ++k) {
    uint4 a[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) a[i] = lds_128(stage + (tile_m + i) * A_TILE + k * 512 + lane * 16);
    const Affine low(stage + B_AT + B_BYTES, k * 2), high(stage + B_AT + B_BYTES, k * 2 + 1);
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_dense(const __grid_constant__ ConvParams p) {
  convolve<A_TILE, 0>(p, [](u32 stage, float (&acc)[MT][NT][4]) { multiply(stage, acc); });
}
