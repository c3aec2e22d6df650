// The main loop of conv_dense.cu and conv_sparse24.cu: a block's tile of Y, accumulated stage by stage over K.
#pragma once
#include "addresses.cuh"
#include "grouped.cuh"
#include "pixels.cuh"
#include "prologue.cuh"

// Copies operand A: `BYTES` of every 16-row tile of the block, contiguous in global memory, as they lie. A thread's pieces of
// 16 bytes lie constants apart, in as few tiles as can be: one address serves all that it has of a tile.
template <int BYTES>
struct WeightLoader {
  static constexpr int LANES = BYTES / 16 < 32 ? BYTES / 16 : 32;  // which copy neighbouring pieces, a run
  static constexpr int RUNS = BYTES / 16 / LANES, ALL = BM / 16 * RUNS, TEAMS = THREADS / LANES;
  static constexpr int OWN = ALL < TEAMS ? 1 : ALL / TEAMS, TILES = OWN < RUNS ? 1 : OWN / RUNS;  // runs, and their tiles
  static_assert(ALL < TEAMS || (ALL % TEAMS == 0 && OWN % TILES == 0 && (OWN % RUNS == 0 || RUNS % OWN == 0)), "whole runs");
  const char* from[TILES];

  // `stride`: bytes between 16-row tiles in global memory; past the last of `tiles` that one is read again (rows never stored,
  // but metadata must be legal and no product may be NaN).
  __device__ __forceinline__ void init(const char* first_tile, long long stride, int tiles) {
    const int first = threadIdx.x / LANES * OWN;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      from[i] = first_tile + min(first / RUNS + i, tiles - 1) * stride + (first % RUNS * LANES + threadIdx.x % LANES) * 16;
  }

  // The next stage's, if `wanted`.
  __device__ __forceinline__ void load(u32 smem, bool wanted) {
    const int first = threadIdx.x / LANES * OWN;
    const u32 to = smem + (first * LANES + threadIdx.x % LANES) * 16;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
      cp_async_16_if(wanted && (ALL >= TEAMS || first < ALL), to + i * LANES * 16, from[i / RUNS] + i % RUNS * LANES * 16, 16);
#pragma unroll
    for (int i = 0; i < TILES; ++i) from[i] += BYTES;
  }
};

// A kernel's Product holds the fragments that the tensor cores multiply. It gives
//   A_TILE, E_TILE           bytes of one 16-row tile per stage, of weights and of metadata (0: dense)
//   STEPS                    of a stage, an even number
//   fetch(stage, step)       loads a step's fragments from shared memory into one of two sets of registers, in turn
//   multiply(p, step, acc)   adds the products of that step
// Finish(p, acc, smem, m0, pixel0) stores the tile: the epilogue, unless ONE_M_TILE says that a block has all channels, of which
// another product may be made first. A stage in shared memory: weights | metadata | pixels | prologue.
//
//   turn t      step 0           step 1           ..   last step                 Fragments are fetched a step ahead, also
//   tensor      t, 0             t, 1                  t, last                   across the barrier: after it every warp has
//   fetch       t, 1             t, 2                  barrier; t + 1, 0         a step's products to make.
//   copies      t + STAGES - 1   into the stage of turn t - 1, which every warp has fetched before the barrier
template <class Product, bool ONE_M_TILE, class Finish>
__device__ __forceinline__ void convolve(const ConvParams& all, Finish finish) {
  constexpr int A_TILE = Product::A_TILE, E_TILE = Product::E_TILE, STEPS = Product::STEPS;
  constexpr int E_AT = BM / 16 * A_TILE, B_AT = E_AT + BM / 16 * E_TILE, STAGE_BYTES = B_AT + B_BYTES + PRO_BYTES;
  static_assert(B_AT % 128 == 0 && STAGE_BYTES % 128 == 0, "rows of B keep their phase against the banks");
  static_assert(STEPS % 2 == 0, "a stage's first step has the same registers in every turn");
  extern __shared__ __align__(128) char shared[];
  const u32 smem = smem_u32(shared);
  const ConvParams& p = of_group<A_TILE, E_TILE>(all);
  // Blocks that share pixels are neighbours: the channel tile runs fastest.
  const int m_tiles = ONE_M_TILE ? 1 : (output_rows(p) + BM - 1) / BM;
  const long long a_stride = static_cast<long long>(p.k_tiles) * A_TILE, e_stride = static_cast<long long>(p.k_tiles) * E_TILE;
  release_next_launch();

  for (Share share = first_share(p); share.count; share = next_share(p, share)) {
    const int m0 = share.tile % m_tiles * BM, pixel0 = share.tile / m_tiles * BN, a_tiles = p.m16 - m0 / 16;
    WeightLoader<A_TILE> weights;
    weights.init(reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride + share.first * A_TILE, a_stride, a_tiles);
    WeightLoader<E_TILE ? E_TILE : 16> metadata;
    if (E_TILE) metadata.init(reinterpret_cast<const char*>(p.meta) + m0 / 16 * e_stride + share.first * E_TILE, e_stride, a_tiles);
    Pixels pixels;
    pixels.init(p, pixel0, share.first);
    Product product;
    float acc[MT][NT][4] = {};
    PixelSums sums;

    auto load_weights = [&](int tile, u32 to, bool wanted) {
      weights.load(to, wanted);
      if (E_TILE) metadata.load(to + E_AT, wanted);
      load_constants(p, share.first + tile, to + B_AT + B_BYTES, wanted);
    };
    auto load_pixels = [&](int tile, u32 to, bool wanted) {
      pixels.load(p, to + B_AT, wanted);
      load_gate(p, share.first + tile, to + B_AT + B_BYTES, wanted);
    };
    auto wait_for_stage = [&] {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
    };

    // Fill all stages but one: weights first, for they depend on no other launch.
    for (int stage = 0; stage < STAGES - 1; ++stage) load_weights(stage, smem + stage * STAGE_BYTES, stage < share.count);
    wait_for_previous_launch();
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      load_pixels(stage, smem + stage * STAGE_BYTES, stage < share.count);
      pixels.finish(smem + stage * STAGE_BYTES + B_AT, stage < share.count);
      cp_async_commit();
    }

    u32 read = 0, write = (STAGES - 1) * STAGE_BYTES;  // bytes from the first stage
    wait_for_stage();
    product.fetch(smem, 0);
    for (int tile = 0; tile < share.count; ++tile) {
      const bool more = tile + STAGES - 1 < share.count;
      const u32 here = smem + read, to = smem + write;
      write = read;
      read = read == (STAGES - 1) * STAGE_BYTES ? 0 : read + STAGE_BYTES;
      const u32 next = tile + 1 < share.count ? smem + read : here;  // after the last turn nobody multiplies what is fetched
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (step < STEPS - 1) {
          product.fetch(here, step + 1);
        } else {
          pixels.finish(to + B_AT, more);
          wait_for_stage();
          product.fetch(next, 0);
        }
        if (step == 0) {
          load_pixels(tile + STAGES - 1, to, more);
          load_weights(tile + STAGES - 1, to, more);
          cp_async_commit();
          sums.add(p, tile, here + B_AT);
        }
        product.multiply(p, step, acc);
      }
    }

    sums.normalize(p, acc, smem, m0);
    if (sum_splits(p, share, acc, smem)) finish(p, acc, smem, m0, pixel0);
  }
}

template <class Product>
__device__ __forceinline__ void convolve(const ConvParams& all) {
  convolve<Product, false>(all, [](const ConvParams& p, float (&acc)[MT][NT][4], u32 smem, int m0, int pixel0) {
    epilogue(p, acc, smem, m0, pixel0);
  });
}
