// The main loop of conv_dense.cu and conv_sparse24.cu: a block's tile of Y, accumulated stage by stage over K.
#pragma once
#include "addresses.cuh"
#include "grouped.cuh"
#if X_BYTES
#include "mma_bytes.cuh"
#endif
#include "pixels.cuh"
#include "prologue.cuh"

// Copies operand A: `BYTES` of every tile of `ROWS` rows of the block, contiguous in global memory, as they lie. A thread's
// pieces of 16 bytes lie constants apart, in as few tiles as can be: one address serves all that it has of a tile.
template <int BYTES, int ROWS = 16>
struct WeightLoader {
  static constexpr int LANES = BYTES / 16 < 32 ? BYTES / 16 : 32;  // which copy neighbouring pieces, a run
  static constexpr int RUNS = BYTES / 16 / LANES, ALL = (BM + ROWS - 1) / ROWS * RUNS, TEAMS = THREADS / LANES;
  static constexpr int OWN = ALL < TEAMS ? 1 : ALL / TEAMS, TILES = OWN < RUNS ? 1 : OWN / RUNS;  // runs, and their tiles
  static_assert(ALL < TEAMS || (ALL % TEAMS == 0 && OWN % TILES == 0 && (OWN % RUNS == 0 || RUNS % OWN == 0)), "whole runs");
  const char* from[TILES];

  // `stride`: bytes between tiles in global memory; past the last of `tiles` that one is read again (rows never stored,
  // but metadata must be legal and no product may be NaN).
  __device__ __forceinline__ void init(const char* first_tile, long long stride, int tiles) {
    const int first = threadIdx.x / LANES * OWN;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
      from[i] = first_tile + min(first / RUNS + i, tiles - 1) * stride + (first % RUNS * LANES + threadIdx.x % LANES) * 16;
  }

  // The next stage's, if `wanted`.
  __device__ __forceinline__ void load(u32 smem, bool wanted) {
#pragma unroll
    for (int i = 0; i < OWN; ++i) piece(smem, wanted, i);
  }

  // One copy of it, in order.
  __device__ __forceinline__ void piece(u32 smem, bool wanted, int i) {
    const int first = threadIdx.x / LANES * OWN;
    const u32 to = smem + (first * LANES + threadIdx.x % LANES) * 16;
    cp_async_16_if(wanted && (ALL >= TEAMS || first < ALL), to + i * LANES * 16, from[i / RUNS] + i % RUNS * LANES * 16, 16);
    if (i < OWN - 1) return;
#pragma unroll
    for (int j = 0; j < TILES; ++j) from[j] += BYTES;
  }
};

// Where in a turn a thread's copies stand, evenly from a first to a last place, and its load of metadata. Place 3 s is ahead of
// the loads of step s, 3 s + 1 between these and the step's products, 3 s + 2 behind the products. Of copies that stand together
// the port of shared memory is taken at once, and loads wait for it (benchmarks/NOTES.md).
struct Turn {
  int pixels, last_pixels, weights, last_weights, metadata;
  u32 fences;  // where a NOP changes ptxas's order for the better: bit s ahead of step s's loads, bit 8 + s behind them

  constexpr int last() const { return last_pixels > last_weights ? last_pixels : last_weights; }
};

// The place of piece `i` of `count`: pieces 0 to 3 from place 1 to 9 stand at 1, 3, 6 and 9.
constexpr int place_of(int first, int last, int i, int count) { return first + i * (last - first) / (count > 1 ? count - 1 : 1); }

// A stage in shared memory: weights | metadata | pixels | prologue. Behind all stages, or behind the staging tile if that is
// larger: the table of rows, where the residual comes early.
template <class Product>
struct Stage {
  static constexpr int E_AT = BM / 16 * Product::A_TILE, B_AT = E_AT + Product::E_BYTES;
  static constexpr int BYTES = B_AT + B_BYTES + PRO_BYTES;
  static constexpr int ROWS_AT = STAGES * BYTES > STAGING_BYTES ? STAGES * BYTES : STAGING_BYTES;
  static constexpr int FIT = (STAGES - 1) * BYTES / (BM * RESULT_BYTES);  // pixels of the staging tile below the last turn's stage
  static constexpr bool EARLY = RESIDUAL_EARLY && Product::LAST_TURN_APART;
  static constexpr int COPIED = !EARLY ? 0 : FIT < BN ? FIT : BN;
  static constexpr int TABLE_AT = EARLY ? ROWS_AT : STAGING_BYTES;
  static_assert(B_AT % 128 == 0 && BYTES % 128 == 0, "rows of B keep their phase against the banks");
};

// A kernel's Product holds the fragments that the tensor cores multiply. It gives
//   A_TILE, E_PAIR           bytes per stage of weights of one 16-row tile, of metadata of two (0: dense)
//   E_BYTES                  of metadata in a stage of shared memory: none, where it comes to registers without
//   STEPS                    of a stage, an even number
//   LAST_TURN_APART          whether its loop keeps its speed where the last turn is written behind it
//   TURN                     where copies and loads of metadata stand
//   fetch(stage, step)       loads a step's fragments from shared memory into one of two sets of registers, in turn
//   multiply(p, step, acc)   adds the products of that step
//   next_metadata(more)      loads that of the next stage, if there is one, where it comes without shared memory
// Finish(p, acc, smem, m0, pixel0) stores the tile: the epilogue, unless ONE_M_TILE says that a block has all channels, of which
// another product may be made first.
//
//   turn t      step 0           step 1           ..   last step                 Fragments are fetched a step ahead, also
//   tensor      t, 0             t, 1                  t, last                   across the barrier: after it every warp has
//   fetch       t, 1             t, 2                  barrier; t + 1, 0         a step's products to make.
//   copies      t + STAGES - 1   into the stage of turn t - 1, which every warp has fetched before the barrier
//
// A residual is copied during the last turn (EARLY), into the stages that every warp has done with: turns are dealt so that the
// last one's stage is the highest, and the staging tile begins with the lowest. What does not fit below it is copied behind it.
template <class Product, bool ONE_M_TILE, class Finish>
__device__ __forceinline__ void convolve(const ConvParams& all, Finish finish) {
  using In = Stage<Product>;
  constexpr int A_TILE = Product::A_TILE, E_PAIR = Product::E_PAIR, E_BYTES = Product::E_BYTES, STEPS = Product::STEPS;
  constexpr int E_AT = In::E_AT, B_AT = In::B_AT, STAGE_BYTES = In::BYTES, LAST_STAGE = (STAGES - 1) * STAGE_BYTES;
  constexpr bool EARLY = In::EARLY && !ONE_M_TILE;
  constexpr Turn TURN = Product::TURN;
  static_assert(TURN.last() <= 3 * (STEPS - 1), "copies are ahead of the barrier");
  static_assert(STEPS % 2 == 0, "a stage's first step has the same registers in every turn");
  extern __shared__ __align__(128) char shared[];
  const u32 smem = smem_u32(shared);
  const ConvParams& p = of_group<A_TILE, E_PAIR>(all);
  // Blocks that share pixels are neighbours: the channel tile runs fastest.
  const int m_tiles = ONE_M_TILE ? 1 : (output_rows(p) + BM - 1) / BM;
  const long long a_stride = static_cast<long long>(p.k_tiles) * A_TILE, e_stride = static_cast<long long>(p.k_tiles) * E_PAIR;
  release_next_launch();

  for (Share share = first_share(p); share.count; share = next_share(p, share)) {
    const int m0 = share.tile % m_tiles * BM, pixel0 = share.tile / m_tiles * BN, a_tiles = p.m16 - m0 / 16;
    const int e_pairs = (p.m16 + 1) / 2 - m0 / 32;
    WeightLoader<A_TILE> weights;
    weights.init(reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride + share.first * A_TILE, a_stride, a_tiles);
    WeightLoader<E_PAIR ? E_PAIR : 16, 32> metadata;
    if (E_BYTES) metadata.init(reinterpret_cast<const char*>(p.meta) + m0 / 32 * e_stride + share.first * E_PAIR, e_stride, e_pairs);
    Pixels pixels;
    pixels.init(p, pixel0, share.first);
    Product product(p, m0, share.first);
    float acc[MT][NT][4] = {};
    PixelSums sums;

    auto load_weights = [&](int tile, u32 to, bool wanted) {
      weights.load(to, wanted);
      if (E_BYTES) metadata.load(to + E_AT, wanted);
      load_constants(p, share.first + tile, to + B_AT + B_BYTES, wanted);
    };
    auto load_pixels = [&](int tile, u32 to, bool wanted) {
#pragma unroll
      for (int i = 0; i < Pixels::OWN; ++i) pixels.piece(p, to + B_AT, wanted, i);
      load_gate(p, share.first + tile, to + B_AT + B_BYTES, wanted);
    };
    // What stands at a place of turn `tile`.
    auto load_at = [&](int place, int tile, u32 here, u32 to, bool more) {
#pragma unroll
      for (int i = 0; i < Pixels::OWN; ++i)
        if (place_of(TURN.pixels, TURN.last_pixels, i, Pixels::OWN) == place) pixels.piece(p, to + B_AT, more, i);
#pragma unroll
      for (int i = 0; i < weights.OWN; ++i)
        if (place_of(TURN.weights, TURN.last_weights, i, weights.OWN) == place) weights.piece(to, more, i);
      if (E_BYTES && place == TURN.last_weights) metadata.load(to + E_AT, more);
      if (place == TURN.last()) {
        load_gate(p, share.first + tile + STAGES - 1, to + B_AT + B_BYTES, more);
        load_constants(p, share.first + tile + STAGES - 1, to + B_AT + B_BYTES, more);
        cp_async_commit();
        sums.add(p, tile, here + B_AT);
      }
      if (place == TURN.metadata) product.next_metadata(tile + 1 < share.count);
    };
    auto behind = [](u32 stage) { return stage == LAST_STAGE ? 0 : stage + STAGE_BYTES; };
    auto wait_for_stage = [&] {
      cp_async_wait<STAGES - 2>();
      __syncthreads();
    };

    // Fill all stages but one: weights first, for they depend on no other launch. `read`, `write`: bytes from the lowest stage.
    u32 read = EARLY ? (STAGES - share.count % STAGES) % STAGES * STAGE_BYTES : 0, write = read;
    for (int stage = 0; stage < STAGES - 1; ++stage, write = behind(write))
      load_weights(stage, smem + write, stage < share.count);
    wait_for_previous_launch();
    write = read;
    for (int stage = 0; stage < STAGES - 1; ++stage, write = behind(write)) {
      load_pixels(stage, smem + write, stage < share.count);
      pixels.finish(smem + write + B_AT, stage < share.count);
      cp_async_commit();
    }
    if (EARLY) tabulate(smem + In::ROWS_AT, [&](int n) { return output_offset(p, pixel0 + n); });

    wait_for_stage();
    product.fetch(smem + read, 0);
    for (int tile = 0; tile < share.count - EARLY; ++tile) {
      const bool more = tile + STAGES - 1 < share.count;
      const u32 here = smem + read, to = smem + write;
      write = read;
      read = behind(read);
      const u32 next = EARLY || tile + 1 < share.count ? smem + read : here;  // after the last turn nobody multiplies what is fetched
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        load_at(step * 3, tile, here, to, more);
        if (TURN.fences >> step & 1) __syncwarp();
        if (step < STEPS - 1) {
          product.fetch(here, step + 1);
        } else {
          pixels.finish(to + B_AT, more);
          wait_for_stage();
          product.fetch(next, 0);
        }
        load_at(step * 3 + 1, tile, here, to, more);
        if (TURN.fences >> (8 + step) & 1) __syncwarp();
        product.multiply(p, step, acc);
        load_at(step * 3 + 2, tile, here, to, more);
      }
    }
    if (EARLY) {
      copy_residual<0, In::COPIED, true>(p, smem, smem + In::ROWS_AT, m0);
      cp_async_commit();
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        if (step < STEPS - 1) product.fetch(smem + LAST_STAGE, step + 1);
        product.multiply(p, step, acc);
      }
    }

#if X_BYTES  // the sums' bits are integers'
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] = static_cast<float>(__float_as_int(acc[i][j][e]));
#endif
    sums.normalize(p, acc, smem, m0);
    if (sum_splits(p, share, acc, smem)) finish(p, acc, smem, m0, pixel0);
  }
}

template <class Product>
__device__ __forceinline__ void convolve(const ConvParams& all) {
  using In = Stage<Product>;
  convolve<Product, false>(all, [](const ConvParams& p, float (&acc)[MT][NT][4], u32 smem, int m0, int pixel0) {
    const auto offset_of = [&](int n) { return output_offset(p, pixel0 + n); };
    epilogue<In::COPIED>(p, acc, smem, smem + In::TABLE_AT, m0, offset_of);
  });
}
