// One stage's products of the implicit GEMM with dense weights, as conv_dense.cu draws it.
#pragma once
#include "implicit_gemm.cuh"

struct DenseProduct {
  static constexpr int A_TILE = BK / 16 * 512, E_PAIR = 0, E_BYTES = 0;  // bytes of one 16-row tile per stage
  static constexpr int B_AT = BM / 16 * A_TILE;
  // Of a k16 step, along pixels. With 2, fewer registers hold pixels (30 of 238), and the next stage's are fetched later: where
  // a warp has 64 x 64 results, and stream-K's way from tile to tile, a linear input's loads, a prologue or a norm would spill.
  static constexpr int PARTS = MT * NT >= 32 && (SPLIT == 2 || IN_LINEAR || PRO || GATE || NORM) ? 2 : 1;
  static constexpr bool LAST_TURN_APART = MT * NT < 32 || THREADS > 128;
  static constexpr int PAIRS = NT / 2 / PARTS;  // of 8 pixels
  static constexpr int STEPS = BK / 16 * PARTS;
  static constexpr u32 FENCES = MT * NT >= 32 || THREADS == 256 ? (1u << STEPS) - 1 : 0;
  static constexpr Turn TURN = BM == 128 && BN == 128 && BK == 32 ? Turn{2, 2, 0, 0, 0, FENCES} : Turn{1, 1, 1, 1, 0, FENCES};
  u32 a_at, b_at;  // of this lane in a stage, first step
  uint4 a[2][MT], b[2][PAIRS];
  Prologue low[2], high[2];

  __device__ __forceinline__ DenseProduct(const ConvParams&, int, int) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // ldmatrix.x4: matrices 0, 1 are K halves of pixels 0-7, matrices 2, 3 of pixels 8-15.
    const int row = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
    a_at = warp / WARPS_N * MT * A_TILE + lane * 16;
    b_at = B_AT + swizzled<CHUNKS>(warp % WARPS_N * WN + row, half);
  }

  __device__ __forceinline__ void next_metadata(bool) {}

  __device__ __forceinline__ void fetch(u32 stage, int step) {
    const int k = step / PARTS, part = step % PARTS;
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < MT; ++i) a[k % 2][i] = lds_128(stage + a_at + i * A_TILE + k * 512);
      low[k % 2].load(stage + B_AT + B_BYTES, k * 2);
      high[k % 2].load(stage + B_AT + B_BYTES, k * 2 + 1);
    }
    // A k16 step is two chunks: what it adds to the chunk, the swizzle's XOR leaves to an XOR, for stages begin at whole rows.
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
      b[step % 2][j] = ldmatrix_x4(((stage + b_at) ^ k * 32) + (part * PAIRS + j) * 16 * CHUNKS * 16);
  }

  __device__ __forceinline__ void multiply(const ConvParams& p, int step, float (&acc)[MT][NT][4]) const {
    const int set = step / PARTS % 2, first = step % PARTS * PAIRS * 2;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      uint4 v = b[step % 2][j];
      v.x = low[set](p, v.x), v.y = high[set](p, v.y), v.z = low[set](p, v.z), v.w = high[set](p, v.w);
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#if X_BYTES
        mma_16832_bytes<X_BYTES == 2>(acc[i][first + 2 * j], a[set][i], v.x, v.y);
        mma_16832_bytes<X_BYTES == 2>(acc[i][first + 2 * j + 1], a[set][i], v.z, v.w);
#else
        mma_16816(acc[i][first + 2 * j], a[set][i], v.x, v.y);
        mma_16816(acc[i][first + 2 * j + 1], a[set][i], v.z, v.w);
#endif
      }
    }
  }
};
