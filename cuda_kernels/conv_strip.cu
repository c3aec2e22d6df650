// conv_strip: 3 x 3 and larger convolutions with an output of the input's size, on mma.sync.m16n8k16; FP16 in and out, FP32
// accumulate.
//
//            N: pixels                    A (weights)  as in conv_dense; K runs over (64 channels, tap, channel)
//          +-----------+                  B (pixels)   rows of a strip [pixel][64 channels] that serves all taps; ldmatrix.x4
//          |   strip   |                               reads 16 pixels x 16 channels of it, or zeros where a tap leaves its image
//   +------+-----------+
//   |W BMxK|  Y BMxBN  |                  M: channels
//   +------+-----------+
//
// The trick: output and input have the same pixels in the same order, so a tap's operand is the strip, shifted: it is written to
// shared memory once for all taps, where an implicit GEMM writes it once for each.
#include "strip.cuh"

struct StripProduct {
  static constexpr int A_TILE = BK / 16 * 512, E_PAIR = 0;
  static constexpr int PAIRS = NT / 2, STEPS = BK / 16;  // of 8 pixels; of 16 channels
  static constexpr bool FENCES = MT * NT < 32;
  LanePixels<PAIRS, 16> pixels;
  u32 a_at;  // of this lane in a stage
  uint4 a[2][MT], b[2][PAIRS];

  __device__ __forceinline__ void init(const ConvParams& p, int pixel0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // ldmatrix.x4: matrices 0, 1 are K halves of pixels 0-7, matrices 2, 3 of pixels 8-15.
    pixels.init(p, pixel0, warp % WARPS_N * WN + (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
    a_at = warp / WARPS_N * MT * A_TILE + lane * 16;
  }

  __device__ __forceinline__ void fetch(u32 stage, const Tap& tap, int k) {
#pragma unroll
    for (int i = 0; i < MT; ++i) a[k % 2][i] = lds_128(stage + a_at + i * A_TILE + k * 512);
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) b[k % 2][j] = fetch_pixels<32, 16>(tap, j, k);
  }

  __device__ __forceinline__ void multiply(int k, float (&acc)[MT][NT][4]) const {
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      const uint4 v = b[k % 2][j];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        mma_16816(acc[i][2 * j], a[k % 2][i], v.x, v.y);
        mma_16816(acc[i][2 * j + 1], a[k % 2][i], v.z, v.w);
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_strip(const __grid_constant__ ConvParams p) {
  convolve_strip<StripProduct>(p);
}
