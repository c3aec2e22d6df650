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
#include "grouped.cuh"

static_assert(BK == 64, "a metadata word covers two k32 steps");
constexpr int A_TILE = 2 * 512;  // bytes of one 16-row tile per stage: two k32 steps of kept values
constexpr int E_TILE = 32 * 4;   // its metadata
constexpr int A_BYTES = BM / 16 * A_TILE, E_BYTES = BM / 16 * E_TILE;
constexpr int STAGE_BYTES = A_BYTES + E_BYTES + B_BYTES;
constexpr int B_AT = A_BYTES + E_BYTES;
static_assert(B_AT % 128 == 0, "rows of B keep their phase against the banks");

__device__ __forceinline__ void multiply(u32 stage, float (&acc)[MT][NT][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tile_m = warp / WARPS_N * MT, warp_n = warp % WARPS_N * WN;
  u32 e[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) e[i] = lds_32(stage + A_BYTES + (tile_m + i) * E_TILE + lane * 4);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint4 a[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) a[i] = lds_128(stage + (tile_m + i) * A_TILE + k * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      // Matrix i of ldmatrix.x4: chunk i of the step's 32 channels, pixels 0-7.
      const uint4 b = ldmatrix_x4(stage + B_AT + swizzled<CHUNKS>(warp_n + j * 8 + (lane & 7), k * 4 + (lane >> 3)));
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

extern "C" __global__ void __launch_bounds__(THREADS) conv_sparse24(const __grid_constant__ ConvParams all) {
  extern __shared__ __align__(128) char shared[];
  const u32 smem = smem_u32(shared);
  const ConvParams& p = of_group<A_TILE, E_TILE>(all);
  // Blocks that share pixels are neighbours: the channel tile runs fastest.
  const int m_tiles = (output_rows(p) + BM - 1) / BM;
  const Share share = share_of_block(p);
  const int m0 = share.tile % m_tiles * BM, pixel0 = share.tile / m_tiles * BN;
  const long long a_stride = static_cast<long long>(p.k_tiles) * A_TILE, e_stride = static_cast<long long>(p.k_tiles) * E_TILE;
  const char* weights = reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride + share.first * A_TILE;
  const char* metadata = reinterpret_cast<const char*>(p.meta) + m0 / 16 * e_stride + share.first * E_TILE;
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
      const u32 to = smem + stage * STAGE_BYTES;
      pixels.load(p, to + B_AT);
      load_weights<A_TILE>(weights + stage * A_TILE, a_stride, a_tiles, to);
      load_weights<E_TILE>(metadata + stage * E_TILE, e_stride, a_tiles, to + A_BYTES);
      pixels.finish(to + B_AT);
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
      pixels.load(p, to + B_AT);
      load_weights<A_TILE>(weights + (tile + STAGES - 1) * A_TILE, a_stride, a_tiles, to);
      load_weights<E_TILE>(metadata + (tile + STAGES - 1) * E_TILE, e_stride, a_tiles, to + A_BYTES);
    }
    cp_async_commit();
    multiply(smem + read * STAGE_BYTES, acc);
    if (more) pixels.finish(to + B_AT);
    read = read + 1 == STAGES ? 0 : read + 1;
    write = write + 1 == STAGES ? 0 : write + 1;
  }

  if (sum_splits(p, share, acc, smem)) epilogue(p, acc, smem, m0, pixel0);
}
