// The main loop of conv_dense_sm90.cu and conv_sparse24_sm90.cu: tiles of Y by Hopper's warpgroups, whose tensor cores read pixels,
// and dense weights, from shared memory, where one thread of a warpgroup of its own has them copied (TMA).
//
// Who waits for whom; stages and slots go round, a mbarrier each way:
//
//   copying thread                    multiplying warpgroups                  storing thread, one for each of them (OUT_TMA)
//   ..  wait: stage is empty  <------ leave stage
//   weights, pixels to stage  ------> wait: stage is full
//                                     products; wait for those before: leave
//                                     wait: slot is ready  <----------------- residual to slot, or word that it is free
//                                     results to slot, over the residual
//                                     slot is staged  ----------------------> wait; store slot to y; wait: it is read
//
// Nobody who multiplies waits for memory: copies are STAGES ahead, in the next tile too, a residual and stores SLOTS parts of tiles.
// Where TMA cannot store (tactics/families/hopper/ends.py), a warpgroup stores its parts by itself. RES_AHEAD   1: all of a tile's
// residual is copied before its products, each part to a slot of its own; 0: to the only slot, when a part is stored.
//
// Compile-time: TILE_M x TILE_N, the tile: output channels, pixels; TEAMS warpgroups that multiply; PINGPONG   0: each a part of the
// tile's channels; 1: each a tile of its own, so that one stores while the other multiplies. What one stores at a time, BM x BN, is
// the tile that include/conv.cuh knows. Of a cluster:
//   CLUSTER 2, CLUSTER_N 1   blocks have tiles side by side in M: each copies half of the pixels to both
//   CLUSTER 2, CLUSTER_N 2   in N: each copies half of the weights to both
//   CLUSTER_K                so many blocks share K of one tile, and sum through each other's shared memory (SPLIT is 1): each some
//                            parts, every CLUSTER_K-th, and none where there are fewer parts than blocks
//
// K is (tap; input channel), and a stage has 64 channels of one tap: what lies past the last channel, or outside of the image, is
// zero, as TMA has it. Blocks go on from tile to tile (include/split_k.cuh).
//
// TAPS > 1: a window of TAPS rows, stride and dilation 1; the tile is a box of BOX_IMAGES x BOX_ROWS x BOX_COLS pixels, and a
// stage has 64 channels of all taps of one column s: of the box's pixels, shifted by s, TAPS - 1 rows more. Tap r's begin r rows
// further, where a pattern of the swizzle does, since 8 divides BOX_COLS. K is (64 channels; s; r; channel).
//
//   box 1x2x8, TAPS 3, s = 1:  tap 0   row p - 1:  q .. q + 7       an image's BOX_ROWS x BOX_COLS pixels are
//                              tap 1   row p:      q .. q + 7       the N of one product: two rows here
//                              tap 2   row p + 1:  ..
//                                      row p + 2:  ..
#pragma once
#include "tma_stores.cuh"

// The copies of a block, by one thread. Weights of the first stages come ahead of the wait, for they depend on no other launch.
template <class Product>
__device__ __forceinline__ void copy_stages(const ConvParams& p, const TensorMap* map, const Ring<Product>& ring) {
  constexpr int ALL_A = TAPS * Product::ARRIVING, HALF_A = ALL_A / CLUSTER_N, HALF_N = STAGE_PIXELS / CLUSTER_M;
  const int last = p.m16 / 4 - 1;  // rows past it are never stored: these are read again
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, group_c = first_channel(p);
  auto copy_weights = [&](int m64, int k_tile, u32 turn) {
    mbarrier_arrive_expecting(ring.full(turn), Ring<Product>::BYTES);
    if (Product::ARRIVING == 0) return;
    const u32 to = ring.stage(turn) + rank % CLUSTER_N * HALF_A;
    const char* from = reinterpret_cast<const char*>(p.w) + rank % CLUSTER_N * HALF_A;
#pragma unroll
    for (int i = 0; i < M64; ++i) {
      const long long at = static_cast<long long>(min(m64 + i, last)) * p.k_tiles + k_tile;
      copy_bulk<CLUSTER_N>(to + i * ALL_A, from + at * ALL_A, HALF_A, ring.full(turn));
    }
  };
  Share share = first_share(p);
  const int ahead = min(share.count, STAGES), first_m64 = origin(p, share).m64;
  for (int turn = 0; turn < ahead; ++turn) copy_weights(first_m64, share.first + turn, turn);
  wait_for_previous_launch();

  u32 turn = 0;
  for (; share.count; share = after(p, share)) {
    const Origin tile = origin(p, share);
    const int own = rank / CLUSTER_N * HALF_N, pixel = tile.column * TILE_N + own, n = pixel / (p.p * p.q);
    const int rest = pixel - n * (p.p * p.q), oh = rest / p.q, tap = share.first / p.tap_stages;
    const FirstPixel at = {(rest - oh * p.q) * p.stride_w - p.pad_l, oh * p.stride_h - p.pad_t, n};
    const FirstPixel box = corner(p, tile.column);
    int c = share.first - tap * p.tap_stages, r = tap / p.s, s = tap - r * p.s;
    if (TAPS > 1) c = share.first / p.s, s = share.first - c * p.s;
    for (int k = 0; k < share.count; ++k, ++turn) {
      const u32 to = ring.stage(turn) + ring.B_AT + own * 128;
      if (turn >= ahead) {
        ring.wait_until_empty(turn);
        copy_weights(tile.m64, share.first + k, turn);
      }
      if (TAPS > 1) {
        const FirstPixel first = {box.w - p.pad_l + s, box.h - p.pad_t + own / BOX_COLS, box.n};
        copy_box<CLUSTER_M>(to, map, c * 64, first, ring.full(turn));
        if (++s == p.s) s = 0, ++c;
        continue;
      }
      if (p.im2col)
        copy_column<CLUSTER_M>(to, map, group_c + c * 64, at, r * p.dil_h, s * p.dil_w, ring.full(turn));
      else
        copy_rows<CLUSTER_M>(to, map, group_c + c * 64, pixel, ring.full(turn));
      if (++c == p.tap_stages) c = 0, ++s;
      if (s == p.s) s = 0, ++r;
    }
  }
}

// Sums of the blocks of a cluster that share K, in ascending order of K: of each part of the tile in one block, which stores it.
// All threads of the cluster meet in the barrier.
template <class Product>
__device__ __forceinline__ void publish_sums(const Ring<Product>& ring, const float (&acc)[OWN][TILE_NT][4]) {
  if (TEAMS > 1) wait_for_other_warpgroup(OTHERS_TURN);  // which may still multiply what lies here
  const u32 own = ring.smem + threadIdx.x / THREADS * (OWN * TILE_NT * THREADS * 16) + THREAD * 16;
#pragma unroll
  for (int i = 0; i < OWN; ++i)
#pragma unroll
    for (int j = 0; j < TILE_NT; ++j)
      sts_128(own + (i * TILE_NT + j) * THREADS * 16, *reinterpret_cast<const uint4*>(acc[i][j]));
  sync_cluster();
}
// The sums of a part of 64 rows, the i-th of the warpgroup's own.
template <class Product>
__device__ __forceinline__ void sums_of_part(const Ring<Product>& ring, const float (&acc)[OWN][TILE_NT][4], int i, int part,
                                             float (&sums)[MT][NT][4]) {
  const u32 first = ring.smem + threadIdx.x / THREADS * (OWN * TILE_NT * THREADS * 16) + THREAD * 16;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    float sum[4] = {};
    for (int rank = 0; rank < CLUSTER_K && CLUSTER_K > 1; ++rank) {
      const uint4 bits = lds_128_of(first + (i * TILE_NT + part * NT + j) * THREADS * 16, rank);
      sum[0] += __uint_as_float(bits.x), sum[1] += __uint_as_float(bits.y);
      sum[2] += __uint_as_float(bits.z), sum[3] += __uint_as_float(bits.w);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[0][j][e] = CLUSTER_K > 1 ? sum[e] : acc[i][part * NT + j][e];
  }
}

// What a warpgroup stores of 64 rows, the i-th of its own, from this staging tile on.
__device__ __forceinline__ u32 staging_of(u32 staging, int i, int part) {
  return staging + (RES_AHEAD ? i * STORED + part / CLUSTER_K : 0) * STAGING_BYTES;
}

// Begins to copy the residual of all that the warpgroup stores of a tile, whose rows begin at m0.
__device__ __forceinline__ void copy_residual_ahead(const ConvParams& p, u32 staging, const Origin& tile, const FirstPixel& box, int m0,
                                                    int rank) {
  sync_threads();  // the last tile's stores have read all of this
#pragma unroll 1
  for (int id = THREAD; id < OWN * TILE_N * 8; id += THREADS) {
    const int i = id / (TILE_N * 8), n = id / 8 % TILE_N, part = n / BN, m = id % 8 * 8, row = m0 + i * 64 + m;
    if (!is_stored(p, tile, m0 + i * 64, part, rank)) continue;
    const int offset = residual_offset(p, tile_offset(p, tile.column, box, n));
    const bool ok = row < output_rows(p) && offset >= 0;
    cp_async_16(staged(staging_of(staging, i, part), m, n % BN), p.residual + (ok ? offset + row_offset<true>(p, row) : 0), ok ? 16 : 0);
  }
  cp_async_commit();
}

// The next tile's first weights go to registers beside this one's end, where no other warpgroup multiplies meanwhile, and where
// threads that store by TMA need few registers.
template <class Product>
constexpr bool AHEAD = Product::LOADS && OUT_TMA && !PINGPONG && !SPLIT;

// The products of a warpgroup, and its stores.
template <class Product>
__device__ __forceinline__ void multiply_stages(const ConvParams& p, const Ring<Product>& ring) {
  const int team = threadIdx.x / THREADS, rank = CLUSTER * CLUSTER_K > 1 ? cluster_rank() : 0;
  const int first = PINGPONG ? 0 : team * OWN;  // of the tile's 64 rows
  const u32 staging = ring.smem + ring.STAGING_AT + team * SLOTS * STAGING_BYTES;
  const u32 table = ring.smem + ring.TABLE_AT + team * ROW_TABLE_BYTES;
  u32 turn = 0, parts = 0;
  int number = 0;
  bool begun = false;
  Watch watch;
  Share next;
  Product product;
  for (Share share = first_share(p); share.count; share = next, ++number) {
    next = after(p, share);
    if (PINGPONG && number % TEAMS != team) {
      turn += share.count;
      continue;
    }
    const Origin tile = origin(p, share);
    const FirstPixel box = corner(p, tile.column);
    if (!begun || !(AHEAD<Product> || Product::RESIDENT)) product.begin(p, tile.m64 + first, share);
    if (!begun) wait_for_previous_launch();
    begun = true;
    if (RES_AHEAD) copy_residual_ahead(p, staging, tile, box, (tile.m64 + first) * 64, rank);
    Row rows[OWN][2];  // on their way beside the products
#pragma unroll
    for (int i = 0; i < 2 * OWN; ++i)
      rows[i / 2][i % 2] = row_of(p, row_of_thread(min((tile.m64 + first + i / 2) * 64, p.m16 * 16 - 64)) + i % 2 * 8);
    // A stage's barrier tells two phases apart, not three: nobody waits for a tile while the one before it is not all there.
    if (PINGPONG && number) wait_for_other_warpgroup(OTHERS_TURN + team);
    float acc[OWN][TILE_NT][4] = {};
    keep_apart(acc);
    product.multiply(ring, turn, first, share.count, acc);
    turn += share.count;
    if (PINGPONG && next.count) tell_other_warpgroup(OTHERS_TURN + (team ^ 1));
    wgmma_wait<0>();
    keep_apart(acc);
    ring.leave(turn - 1);

    if (AHEAD<Product> && !Product::RESIDENT && next.count) product.begin(p, origin(p, next).m64 + first, next);

    if (CLUSTER_K > 1)
      publish_sums(ring, acc);
    else if (!sum_splits(p, share, acc, staging, rank * TILE_TEAMS + (PINGPONG ? 0 : team), CLUSTER * TILE_TEAMS))
      continue;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int m0 = (tile.m64 + first + i) * 64;
#pragma unroll
      for (int own = 0; own < STORED; ++own) {
        const int part = CLUSTER_K > 1 ? own * CLUSTER_K + rank : own;
        if (part >= PARTS || !is_stored(p, tile, m0, part, rank)) continue;
        float sums[MT][NT][4];
        sums_of_part(ring, acc, i, part, sums);
#if OUT_TMA
        stage_part(p, ring, team, parts++, m0, sums[0], rows[i], watch);
#else
        const auto offset_of = [&](int n) { return tile_offset(p, tile.column, box, part * BN + n); };
        if constexpr (OUT_LINEAR)
          epilogue(p, sums, staging, table, m0, offset_of);
        else
          store_by_threads(p, sums, staging_of(staging, i, part), table, m0, offset_of);
#endif
      }
    }
  }
  watch.report(p.nonfinite);
}

template <class Product>
__device__ __forceinline__ void convolve_with_tma(const TmaParams& all) {
  extern __shared__ __align__(1024) char patterns[];
  const Ring<Product> ring = {smem_u32(patterns)};
  const ConvParams& p = of_group<TAPS * Product::A_BYTES / 4, TAPS * Product::E_BYTES / 2>(all);
  release_next_launch();
  if (threadIdx.x == 0) ring.init();
  if (CLUSTER * CLUSTER_K > 1)
    meet_cluster();  // barriers are visible by their fence
  else
    __syncthreads();
  // 384 threads begin with 168 registers each: multiplying ones need more.
  if (threadIdx.x >= TEAMS * THREADS) {
    if (TEAMS > 1) keep_registers<40>();
    if (threadIdx.x == TEAMS * THREADS) copy_stages(p, &all.map, ring);
#if OUT_TMA
    const int team = threadIdx.x / 32 - TEAMS * (THREADS / 32) - 1;  // its warp of this warpgroup, behind the copying one
    Stores<Product> stores(p, all, ring, max(team, 0), CLUSTER * CLUSTER_K > 1 ? cluster_rank() : 0);
    const bool stores_some = team >= 0 && team < TEAMS && threadIdx.x % 32 == 0;
    if (stores_some) stores.start();
#endif
    __syncwarp();
    if (CLUSTER_K > 1) sync_cluster();  // of the sums: nothing is staged before
#if OUT_TMA
    if (stores_some) stores.store_all();
    __syncwarp();
#endif
  } else {
    if (TEAMS > 1) take_registers<232>();
    multiply_stages(p, ring);
  }
  if (CLUSTER * CLUSTER_K > 1) sync_cluster();  // no copy, arrival or load meets a block that has left
}
