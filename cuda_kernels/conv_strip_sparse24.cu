// conv_strip_sparse24: conv_strip with 2:4 sparse weights on mma.sp.m16n8k32.
//
//   A (weights)   kept values in fragment order, as in conv_sparse24
//   E (metadata)  the words of conv_sparse24, those of two 16-row tiles side by side: one load of two words per lane
//   B (pixels)    rows of a strip, as in conv_strip; ldmatrix.x4 reads 8 pixels x 32 channels
//
// The trick: what bounds sparse products is the port of shared memory; a strip takes it for a ninth of the copies of pixels.
#include "strip.cuh"

struct StripSparseProduct {
  static constexpr int A_TILE = 2 * 512;  // bytes of one 16-row tile per turn: two k32 steps of kept values
  static constexpr int E_PAIR = 2 * 32 * 4;  // metadata of two such tiles
  static constexpr int E_AT = BM / 16 * A_TILE;
  static constexpr int PARTS = NT >= 4 ? 2 : 1, PART = NT / PARTS;  // of a k32 step, along pixels: fewer registers hold pixels
  static constexpr int STEPS = 2 * PARTS;
  static constexpr bool FENCES = THREADS == 256;
  static_assert(MT % 2 == 0, "metadata words lie in twos");

  LanePixels<NT, 8> pixels;
  u32 a_at;  // of this lane in a stage
  uint4 a[2][MT], b[2][PART];
  u32 e[MT], next_e[MT];

  __device__ __forceinline__ void init(const ConvParams& p, int pixel0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Matrix i of ldmatrix.x4: chunk i of the step's 32 channels, pixels 0-7.
    pixels.init(p, pixel0, warp % WARPS_N * WN + (lane & 7), lane >> 3);
    a_at = warp / WARPS_N * MT * A_TILE + lane * 16;
  }

  __device__ __forceinline__ void fetch(u32 stage, const Tap& tap, int step) {
    const int k = step / PARTS, part = step % PARTS, tile_m = threadIdx.x / 32 / WARPS_N * MT, lane = threadIdx.x % 32;
    if (step == 0) {
#pragma unroll
      for (int i = 0; i < MT; i += 2) {
        const uint2 words = lds_64(stage + E_AT + (tile_m + i) / 2 * E_PAIR + lane * 8);
        next_e[i] = words.x, next_e[i + 1] = words.y;
      }
    }
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < MT; ++i) a[k][i] = lds_128(stage + a_at + i * A_TILE + k * 512);
    }
#pragma unroll
    for (int j = 0; j < PART; ++j) b[step % 2][j] = fetch_pixels<64, 8>(tap, part * PART + j, k);
  }

  __device__ __forceinline__ void multiply(int step, float (&acc)[MT][NT][4]) {
    const int k = step / PARTS, part = step % PARTS;
    if (step == 0) {
#pragma unroll
      for (int i = 0; i < MT; ++i) e[i] = next_e[i];
    }
#pragma unroll
    for (int j = 0; j < PART; ++j) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        if (k == 0)
          mma_sp_16832<0>(acc[i][part * PART + j], a[k][i], b[step % 2][j], e[i]);
        else
          mma_sp_16832<1>(acc[i][part * PART + j], a[k][i], b[step % 2][j], e[i]);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_strip_sparse24(const __grid_constant__ ConvParams p) {
  convolve_strip<StripSparseProduct>(p);
}
