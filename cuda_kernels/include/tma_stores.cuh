// The end of a tile where TMA stores it (OUT_TMA): parts of 64 channels and BN pixels go round SLOTS staging tiles of each
// warpgroup. include/tma_gemm.cuh draws who waits for whom.
//
// A part goes to y, and comes from the residual, in pieces of PIECE pixels that lie in one box of the map each: all of its pixels,
// or, where the tile is a box, as many of its columns, rows and images as divide the part. TMA leaves out what lies outside of y.
#pragma once
#include "bulk_stores.cuh"
#include "staged_part.cuh"
#include "tma_tile.cuh"
static_assert(BN % PIECE == 0, "a part is whole pieces");

struct TmaParams : ConvParams {
#if OUT_TMA
  TensorMap y_map;  // in pieces of the parts that a warpgroup stores
#if RES
  TensorMap r_map;  // of the residual, in the same ones
#endif
#endif
};

#if OUT_TMA
// The parts that a warpgroup stores, in its order: a place in them.
struct Parts {
  const ConvParams& p;
  const int team, rank;
  Share share;        // no stages: they are at their end
  int number, index;  // of the block's tiles; of the tile's parts, those of 64 channels together
  Origin tile;
  FirstPixel box;

  __device__ __forceinline__ Parts(const ConvParams& p, int team, int rank)
      : p(p), team(team), rank(rank), share(first_share(p)), number(0), index(-1) {
    begin_tile();
    if (share.count) next();
  }
  __device__ __forceinline__ void begin_tile() {
    while (PINGPONG && share.count && number % TEAMS != team) share = after(p, share), ++number;
    if (share.count) tile = origin(p, share), box = corner(p, tile.column);
  }
  __device__ __forceinline__ int row() const { return (tile.m64 + (PINGPONG ? 0 : team * OWN) + index / PARTS) * 64; }
  __device__ __forceinline__ bool is_own() const { return is_stored(p, tile, row(), index % PARTS, rank); }
  __device__ __forceinline__ void next() {
    do {
      if (++index < OWN * PARTS) continue;
      share = after(p, share), ++number, index = 0;
      begin_tile();
    } while (share.count && !is_own());
  }
  // use(first channel, first pixel, bytes of the part ahead of it) of each piece. The map of a tile that is no box has one row.
  template <class Use>
  __device__ __forceinline__ void for_each_piece(Use use) const {
    const int first = index % PARTS * BN;
    int c = row();
#if GROUPED
    c += blockIdx.y * p.y_group;
#endif
#pragma unroll 1
    for (int n = 0; n < BN; n += PIECE)
      use(c, TAPS > 1 ? pixel_of(box, first + n) : FirstPixel{tile.column * TILE_N + first + n, 0, 0}, n * BM * 2);
  }
};

// All stores of a warpgroup, and copies of its residual, as many parts ahead as there are slots: by one thread.
template <class Product>
struct Stores {
  const TmaParams& all;  // of all groups, for maps are parameters of the launch
  const Ring<Product>& ring;
  const int team;
  Parts part, ahead;
  u32 begun = 0;  // slots that were free so far

  __device__ __forceinline__ Stores(const ConvParams& p, const TmaParams& all, const Ring<Product>& ring, int team, int rank)
      : all(all), ring(ring), team(team), part(p, team, rank), ahead(part) {}
  __device__ __forceinline__ void start() {
    wait_for_previous_launch();
    while (begun < SLOTS) fill_slot();
  }
  // A slot is free: a residual comes there, or word that none does.
  __device__ __forceinline__ void fill_slot() {
    const u32 ready = ring.ready(team, begun), slot = ring.slot(team, begun++);
#if RES
    if (!ahead.share.count) return;
    mbarrier_arrive_expecting(ready, STAGING_BYTES);
    ahead.for_each_piece([&](int c, const FirstPixel& at, int bytes) { copy_box<1>(slot + bytes, &all.r_map, c, at, ready); });
    ahead.next();
#else
    mbarrier_arrive(ready);
#endif
  }
  __device__ __forceinline__ void store_all() {
    for (u32 number = 0; part.share.count; ++number) {
      mbarrier_wait(ring.staged(team, number), number / SLOTS % 2);
      const u32 slot = ring.slot(team, number);
      part.for_each_piece([&](int c, const FirstPixel& at, int bytes) { store_box(&all.y_map, c, at, slot + bytes); });
      stores_commit();
      const int tile = part.number;
      part.next();
      // Where another part of the tile follows at once, this one's bytes need not be read before that is stored.
      const bool is_last = SLOTS == 1 || !part.share.count || part.number != tile;
      is_last ? wait_for_reading_stores<0>() : wait_for_reading_stores<1>();
      while (begun < number + is_last + SLOTS) fill_slot();
    }
  }
};

// One part of 64 rows from m0 on into the slot of a warpgroup's `number`-th.
template <class Product>
__device__ __forceinline__ void stage_part(const ConvParams& p, const Ring<Product>& ring, int team, u32 number, int m0,
                                           const float (&sums)[NT][4], const Row (&rows)[2], Watch& watch) {
  mbarrier_wait(ring.ready(team, number), number / SLOTS % 2);
  const u32 at = matrix_rows(ring.slot(team, number));
  if (WHOLE_ROWS || m0 + THREAD / 32 * 16 < output_rows(p)) {
    stage_rows(p, sums, at, rows, watch);
  } else {  // none of the warp's rows is stored, but TMA reads them
    const u32 zeros[NT < 2 ? 2 : 4] = {};
#pragma unroll
    for (int j = 0; j < NT; j += 2) stmatrix_trans(at + j * 8 * BM * 2, zeros);
  }
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.staged(team, number));
}
#endif
