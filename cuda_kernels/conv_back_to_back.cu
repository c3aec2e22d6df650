// conv_back_to_back: a convolution and the 1x1 convolution that alone reads it, in one launch; dense, on mma.sync.m16n8k16.
//
//   +------+-----------+   bias, activation,   +------+-----------+   rows m2 .. m2 + BM of the second,
//   |W BMxK|  Z BMxBN  |  rounded to FP16 ->   |W2 .. |  Y BMxBN  |   one turn after the other
//   +------+-----------+   Z' in shared memory +------+-----------+
//      all K1 <= BM channels of the tile's BN pixels             W2 packed as W, straight from L2 into registers
//
// The trick: the staging tile that an epilogue writes, [pixel][channel] with swizzled chunks, is laid out like a stage of pixels,
// so the second product reads it with ldmatrix where it lies. Z never touches memory and is rounded just as if it had.
//
// Compile-time, beside conv.cuh's, whose ACT and RES are the second convolution's: ACT1, the first one's activation.
#define SPLIT 0
#define GROUPED 0
#define IN_LINEAR 0
#define OUT_LINEAR 0
#include "dense_stage.cuh"

static_assert(BM >= 64, "rows of the staging tile are 8 chunks or more: ldmatrix meets no bank twice");

struct BackToBackParams {
  ConvParams c;        // loads and weights are the first convolution's; bias, slope, k, residual and y the second's
  const uint4* w2;     // fragments: [m16][steps][32 lanes]
  const float* bias1;
  const float* slope1;
  int k1, steps, m16;  // steps: of 16 channels of Z; m16: 16-row tiles of w2
  float alpha1, beta1;
};

__device__ __forceinline__ void multiply_again(const BackToBackParams& p, u32 z, int m2, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_m = m2 / 16 + warp / WARPS_N * MT, warp_n = warp % WARPS_N * WN;
  const int row = (lane & 7) + (lane >> 4) * 8, half = (lane >> 3) & 1;
  const u32 z_row = z + (warp_n + row) * BM * 2, chunk = (half ^ (row & 7)) * 16;  // swizzled: a step's chunks come by an XOR
  const uint4* from[MT];  // rows past the last read it again and are never stored
#pragma unroll
  for (int i = 0; i < MT; ++i) from[i] = p.w2 + static_cast<long long>(min(tile_m + i, p.m16 - 1)) * p.steps * 32 + lane;
  uint4 a[2][MT], b[2][NT / 2];
  const auto fetch = [&](int k, int set) {
#pragma unroll
    for (int i = 0; i < MT; ++i) a[set][i] = ldg_128(from[i] + k * 32);
#pragma unroll
    for (int j = 0; j < NT / 2; ++j) b[set][j] = ldmatrix_x4(z_row + (k * 32 ^ chunk) + j * 16 * BM * 2);
  };
  const auto add = [&](int set) {
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        mma_16816(acc[i][j], a[set][i], b[set][j / 2].x, b[set][j / 2].y);
        mma_16816(acc[i][j + 1], a[set][i], b[set][j / 2].z, b[set][j / 2].w);
      }
    }
  };
  // Fetched a step ahead; the last one again, for nobody.
  fetch(0, 0);
  for (int k = 0; k < p.steps; k += 2) {
    fetch(min(k + 1, p.steps - 1), 1);
    add(0);
    if (k + 1 == p.steps) break;
    fetch(min(k + 2, p.steps - 1), 0);
    add(1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_back_to_back(const __grid_constant__ BackToBackParams p) {
  convolve<DenseProduct, true>(p.c, [&](const ConvParams& c, float (&acc)[MT][NT][4], u32 smem, int, int pixel0) {
    ConvParams first = c;
    first.k = p.k1, first.bias = p.bias1, first.slope = p.slope1, first.alpha = p.alpha1, first.beta = p.beta1;
    stage_results<ACT1, 0>(first, acc, smem, smem + STAGING_BYTES, 0, [](int) { return 0; });
    const u32 staging = smem + STAGING_BYTES + ROW_TABLE_BYTES;
    for (int m2 = 0; m2 < output_rows(c); m2 += BM) {
      float again[MT][NT][4] = {};
      multiply_again(p, smem, m2, again);
      epilogue(c, again, staging, staging + STAGING_BYTES, m2, [&](int n) { return output_offset(c, pixel0 + n); });
    }
  });
}
