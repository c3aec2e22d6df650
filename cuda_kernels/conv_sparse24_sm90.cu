// conv_sparse24_sm90: conv_sparse24 on wgmma.sp.m64nNk32, Hopper's asynchronous tensor cores, for sm_90a alone.
//
//             N: pixels                   A (weights)  conv_sparse24's fragments of kept values: each warp of a warpgroup loads
//           +-----------+                              those of its own 16 rows to registers
//           |  X  64xBN |                 E (metadata) conv_sparse24's words: lanes t and t + 2 load the same one, that of
//   +-------+-----------+                              t or, for the second k32 step, of t + 2
//   |W BMx32|  Y BMxBN  |  M: channels    B (pixels)   as in conv_dense_sm90
//   |E BMx4 |           |
//   +-------+-----------+
//
// The trick: both k32 steps are selector 0, which has witnesses; a word is loaded anew, never into a register in flight.
#include "wgmma_gemm.cuh"

static_assert(MT == 1 || MT % 2 == 0, "a warp has whole pairs of 16-row tiles, or one tile");

struct SparseWgmma {
  static constexpr int A_TILE = 2 * 512;  // bytes of one 16-row tile per stage: two k32 steps of kept values
  static constexpr int E_PAIR = 32 * 8;   // metadata of two: a lane's words lie beside each other
  static constexpr int E_BYTES = (BM / 32 * E_PAIR + 1023) / 1024 * 1024, E_AT = BM / 16 * A_TILE;  // pixels begin at a pattern
  static constexpr int STEPS = 2;
  static constexpr bool LAST_TURN_APART = false;
  uint4 a[2][MT];
  u32 e[2][MT];

  __device__ __forceinline__ void fetch(u32 stage, int step) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * MT;  // of the warp's 16-row tiles
    const u32 words_at = stage + E_AT + first / 2 * E_PAIR + ((lane & ~2) | step * 2) * 8;
#pragma unroll
    for (int i = 0; i < MT; i += 2) {
      const uint2 words = lds_64(words_at + i / 2 * E_PAIR);
      e[step][i] = MT == 1 && first % 2 ? words.y : words.x;
      if (MT > 1) e[step][i + 1] = words.y;
    }
#pragma unroll
    for (int i = 0; i < MT; ++i) a[step][i] = lds_128(stage + (first + i) * A_TILE + lane * 16 + step * 512);
  }

  __device__ __forceinline__ void multiply(u32 pixels, int step, float (&acc)[MT][NT][4]) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < MT; ++i) wgmma_sparse(acc[i], a[step][i], rows_of_128_bytes(pixels + step * 64), e[step][i]);
    wgmma_commit();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_sparse24_sm90(const __grid_constant__ ConvParams p) {
  convolve_with_wgmma<SparseWgmma>(p);
}
