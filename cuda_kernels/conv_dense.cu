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
#include "grouped.cuh"

constexpr int A_TILE = BK / 16 * 512;  // bytes of one 16-row tile per stage
constexpr int A_BYTES = BM / 16 * A_TILE;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;

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
#pragma unroll
    for (int j = 0; j < NT; j += 2) {
      const uint4 b = ldmatrix_x4(stage + A_BYTES + swizzled<CHUNKS>(warp_n + j * 8 + row, k * 2 + half));
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        mma_16816(acc[i][j], a[i], b.x, b.y);
        mma_16816(acc[i][j + 1], a[i], b.z, b.w);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_dense(const __grid_constant__ ConvParams all) {
  extern __shared__ __align__(128) char shared[];
  const u32 smem = smem_u32(shared);
  const ConvParams& p = of_group<A_TILE, 0>(all);
  // Blocks that share pixels are neighbours: the channel tile runs fastest.
  const int m_tiles = (output_rows(p) + BM - 1) / BM;
  const Share share = share_of_block(p);
  const int m0 = share.tile % m_tiles * BM, pixel0 = share.tile / m_tiles * BN;
  const long long a_stride = static_cast<long long>(p.k_tiles) * A_TILE;
  const char* weights = reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride + share.first * A_TILE;
  const int a_tiles = p.m16 - m0 / 16;

#if IN_LINEAR
  LinearLoader pixels;
#else
  PixelLoader pixels;
#endif
  pixels.init(p, pixel0, share.first);
  float acc[MT][NT][4] = {};

  // Fill all stages but one.
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < share.count) {
      pixels.load(p, smem + stage * STAGE_BYTES + A_BYTES);
      load_weights<A_TILE>(weights + stage * A_TILE, a_stride, a_tiles, smem + stage * STAGE_BYTES);
      pixels.finish(smem + stage * STAGE_BYTES + A_BYTES);
    }
    cp_async_commit();
  }

  // Each turn: wait for the oldest stage, refill the one read last turn, multiply.
  int read = 0, write = STAGES - 1;
  for (int tile = 0; tile < share.count; ++tile) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    const bool more = tile + STAGES - 1 < share.count;
    const u32 to = smem + write * STAGE_BYTES;
    if (more) {
      pixels.load(p, to + A_BYTES);
      load_weights<A_TILE>(weights + (tile + STAGES - 1) * A_TILE, a_stride, a_tiles, to);
    }
    cp_async_commit();
    multiply(smem + read * STAGE_BYTES, acc);
    if (more) pixels.finish(to + A_BYTES);
    read = read + 1 == STAGES ? 0 : read + 1;
    write = write + 1 == STAGES ? 0 : write + 1;
  }

  if (sum_splits(p, share, acc, smem)) epilogue(p, acc, smem, m0, pixel0);
}
