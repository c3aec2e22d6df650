// The main loop of conv_dense.cu and conv_sparse24.cu: a block's tile of Y, accumulated stage by stage over K.
#pragma once
#include "grouped.cuh"
#include "pixels.cuh"
#include "prologue.cuh"

// Operand A: `BYTES` of every 16-row tile of the block, contiguous in global memory, copied as they lie.
// `stride`: bytes between 16-row tiles in global memory; past the last tile that one is read again (rows never stored, but
// metadata must be legal and no product may be NaN).
template <int BYTES>
__device__ __forceinline__ void load_weights(const char* from, long long stride, int tiles, u32 smem) {
  constexpr int PIECES = BM / 16 * (BYTES / 16);
#pragma unroll
  for (int i = 0; i < (PIECES + THREADS - 1) / THREADS; ++i) {
    const int id = threadIdx.x + i * THREADS;
    const int tile = id / (BYTES / 16), piece = id % (BYTES / 16);
    if (PIECES % THREADS == 0 || id < PIECES)
      cp_async_16(smem + id * 16, from + min(tile, tiles - 1) * stride + piece * 16, 16);
  }
}

// A kernel's file gives the bytes of one 16-row tile per stage, A_TILE of weights and E_TILE of metadata (0: dense), and
// Multiply(p, stage, acc), which adds one stage's products, and Finish(p, acc, smem, m0, pixel0), which stores the tile: epilogue,
// unless ONE_M_TILE says that a block has all channels, of which another product may be made first. A stage in shared memory: weights | metadata | pixels | prologue.
template <int A_TILE, int E_TILE, bool ONE_M_TILE, class Multiply, class Finish>
__device__ __forceinline__ void convolve(const ConvParams& all, Multiply multiply, Finish finish) {
  constexpr int E_AT = BM / 16 * A_TILE, B_AT = E_AT + BM / 16 * E_TILE, STAGE_BYTES = B_AT + B_BYTES + PRO_BYTES;
  static_assert(B_AT % 128 == 0, "rows of B keep their phase against the banks");
  extern __shared__ __align__(128) char shared[];
  const u32 smem = smem_u32(shared);
  const ConvParams& p = of_group<A_TILE, E_TILE>(all);
  // Blocks that share pixels are neighbours: the channel tile runs fastest.
  const int m_tiles = ONE_M_TILE ? 1 : (output_rows(p) + BM - 1) / BM;
  const long long a_stride = static_cast<long long>(p.k_tiles) * A_TILE, e_stride = static_cast<long long>(p.k_tiles) * E_TILE;
  release_next_launch();

  for (Share share = first_share(p); share.count; share = next_share(p, share)) {
    const int m0 = share.tile % m_tiles * BM, pixel0 = share.tile / m_tiles * BN;
    const char* weights = reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride + share.first * A_TILE;
    const char* metadata = reinterpret_cast<const char*>(p.meta) + m0 / 16 * e_stride + share.first * E_TILE;
    const int a_tiles = p.m16 - m0 / 16;
    auto load_a = [&](int tile, u32 to) {
      load_weights<A_TILE>(weights + tile * A_TILE, a_stride, a_tiles, to);
      if (E_TILE) load_weights<E_TILE>(metadata + tile * E_TILE, e_stride, a_tiles, to + E_AT);
      load_constants(p, share.first + tile, to + B_AT + B_BYTES);
    };
    Pixels pixels;
    pixels.init(p, pixel0, share.first);
    float acc[MT][NT][4] = {};
    PixelSums sums;

    // Fill all stages but one: weights first, for they depend on no other launch.
    for (int stage = 0; stage < STAGES - 1; ++stage)
      if (stage < share.count) load_a(stage, smem + stage * STAGE_BYTES);
    wait_for_previous_launch();
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      const u32 to = smem + stage * STAGE_BYTES + B_AT;
      if (stage < share.count) {
        pixels.load(p, to);
        pixels.finish(to);
        load_gate(p, share.first + stage, to + B_BYTES);
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
        load_a(tile + STAGES - 1, to);
        load_gate(p, share.first + tile + STAGES - 1, to + B_AT + B_BYTES);
      }
      cp_async_commit();
      sums.add(p, tile, smem + read * STAGE_BYTES + B_AT);
      multiply(p, smem + read * STAGE_BYTES, acc);
      if (more) pixels.finish(to + B_AT);
      read = read + 1 == STAGES ? 0 : read + 1;
      write = write + 1 == STAGES ? 0 : write + 1;
    }

    sums.normalize(p, acc, smem, m0);
    if (sum_splits(p, share, acc, smem)) finish(p, acc, smem, m0, pixel0);
  }
}

template <int A_TILE, int E_TILE, class Multiply>
__device__ __forceinline__ void convolve(const ConvParams& all, Multiply multiply) {
  convolve<A_TILE, E_TILE, false>(all, multiply, [](const ConvParams& p, float (&acc)[MT][NT][4], u32 smem, int m0, int pixel0) {
    epilogue(p, acc, smem, m0, pixel0);
  });
}
