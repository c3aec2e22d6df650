// The main loop of conv_dense_sm90.cu and conv_sparse24_sm90.cu: tiles of Y by Hopper's warpgroups, whose tensor cores read pixels,
// and dense weights, from shared memory, where one thread of a warpgroup of its own has them copied (TMA).
//
//   copies      wait until stage is empty    expect its bytes; weights; pixels         ..  next stage, also of the next tile
//   products    wait until stage is full     products of it; wait for those before  ..  previous stage is empty
//
// Compile-time: TILE_M x TILE_N, the tile: output channels, pixels; TEAMS warpgroups that multiply; PINGPONG   0: each a part of the
// tile's channels; 1: each a tile of its own, so that one stores while the other multiplies. What one stores at a time, BM x BN, is
// the tile that include/conv.cuh knows. Of a cluster:
//   CLUSTER 2, CLUSTER_N 1   blocks have tiles side by side in M: each copies half of the pixels to both
//   CLUSTER 2, CLUSTER_N 2   in N: each copies half of the weights to both
//   CLUSTER_K                so many blocks share K of one tile, and sum through each other's shared memory (SPLIT is 1)
// RES_AHEAD   1: all of a tile's residual is copied before its products, each part to a staging tile of its own; 0: there is one,
//             to which a part's residual comes when it is stored
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
#include "bulk.cuh"
#include "grouped.cuh"
#include "wgmma.cuh"
#ifndef RES_AHEAD
#define RES_AHEAD 0
#endif

constexpr int M64 = TILE_M / 64, OWN = M64 / (PINGPONG ? 1 : TEAMS);  // 64 rows each: of a tile, of a warpgroup
constexpr int TILE_NT = TILE_N / 8, PARTS = TILE_N / BN;
constexpr u32 BOX_N = BOX_ROWS * BOX_COLS;  // of an image
constexpr int STAGE_PIXELS = TAPS > 1 ? BOX_IMAGES * (BOX_ROWS + TAPS - 1) * BOX_COLS : TILE_N;
constexpr int IMAGES = TAPS > 1 ? BOX_IMAGES : 1, IMAGE_NT = TILE_NT / IMAGES;  // products side by side, and their eights of pixels
constexpr int IMAGE_BYTES = STAGE_PIXELS / IMAGES * 128, TAP_BYTES = BOX_COLS * 128;  // from one to the next in a stage
constexpr int TILE_TEAMS = PINGPONG ? 1 : TEAMS;  // that store a tile
constexpr int OTHERS_TURN = 1 + TEAMS;            // the first barrier behind those of sync_threads
constexpr int CLUSTER_M = CLUSTER / CLUSTER_N;    // blocks that have the same pixels; CLUSTER_N: the same weights
constexpr int STORED = (PARTS + CLUSTER_K - 1) / CLUSTER_K;  // parts of 64 rows that a block stores
constexpr int STAGINGS = RES_AHEAD ? OWN * STORED : 1;       // staging tiles of a warpgroup
constexpr int TABLES = RES_AHEAD ? 2 * PARTS : 1;            // of pixels, in y and then in the residual

static_assert(BK == 64, "a pixel's row is 128 bytes, a pattern of the swizzle 8 of them");
static_assert(WGMMA && BM == 64 && THREADS == 128 && TILE_N % BN == 0, "a warpgroup stores 64 rows at a time");
static_assert(TILE_M % 64 == 0 && M64 % TILE_TEAMS == 0 && TEAMS <= 2 && (TEAMS > 1 || !PINGPONG), "whole products of 64 rows");
static_assert(TAPS == 1 || (TILE_N == BOX_IMAGES * BOX_N && BOX_COLS % 8 == 0), "taps begin where a pattern does");
static_assert(STAGE_PIXELS / CLUSTER_M % 8 == 0, "each block copies whole patterns");
static_assert(TAPS == 1 || CLUSTER_M == 1 || (IMAGES == 1 && (BOX_ROWS + TAPS - 1) % CLUSTER_M == 0), "and whole rows of a box");
static_assert(CLUSTER_K == 1 || (CLUSTER == 1 && SPLIT == 1 && !PINGPONG), "each block of the cluster has one share");
static_assert(!RES_AHEAD || (RES && !OUT_LINEAR && (!SPLIT || CLUSTER_K > 1)), "vectors of a tile that is sure to be stored");
static_assert(!IN_LINEAR && !PRO && !GATE && !NORM, "pixels go from memory to tensor cores as they are");

// The first of 64 channels, and the number of the columns' tile, of a share in this block.
struct Origin {
  int m64, column;
};
__device__ __forceinline__ Origin origin(const ConvParams& p, const Share& share) {
  constexpr int WIDE = TILE_M * CLUSTER_M;
  const int columns = (output_rows(p) + WIDE - 1) / WIDE, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int m = share.tile % columns * CLUSTER_M + rank / CLUSTER_N, n = share.tile / columns * CLUSTER_N + rank % CLUSTER_N;
  return {m * M64, n};
}

// The first pixel of a tile that is a box.
struct Corner {
  int n, p, q;
};
__device__ __forceinline__ Corner corner(const ConvParams& p, int column) {
  const int wide = (p.q + BOX_COLS - 1) / BOX_COLS, many = (p.p + BOX_ROWS - 1) / BOX_ROWS * wide, rest = column % many;
  return {column / many * BOX_IMAGES, rest / wide * BOX_ROWS, rest % wide * BOX_COLS};
}
// Where the tile's pixel n lies in y.
// NVRTC 13.0 takes (2t + 1) % 32 / 8 for 2t + 1 where it knows that t < 4: an empty instruction hides that.
__device__ __forceinline__ int tile_offset(const ConvParams& p, int column, const Corner& at, u32 n) {
  if (TAPS == 1) return output_offset(p, column * TILE_N + n);
  asm("" : "+r"(n));
  const int oh = at.p + static_cast<int>(n % BOX_N / BOX_COLS), ow = at.q + static_cast<int>(n % BOX_COLS);
  return oh < p.p && ow < p.q ? output_offset(p, ((at.n + static_cast<int>(n / BOX_N)) * p.p + oh) * p.q + ow) : -1;
}

// Of the block's group.
__device__ __forceinline__ int first_channel(const ConvParams& p) {
#if GROUPED
  return blockIdx.y * p.x_group;
#else
  return 0;
#endif
}

// The share behind one in this block.
__device__ __forceinline__ Share after(const ConvParams& p, const Share& share) {
  if (CLUSTER_K > 1) return {share.tile, share.first, 0};
  return next_share(p, share);
}

// The stages in shared memory; a turn is a stage that the block has come to, counted over all its tiles. A kernel's Product has
//   A_BYTES, E_BYTES   of 64 rows of weights and 64 channels of a tap, and of their metadata
//   ARRIVING           of A_BYTES, those that are copied to shared memory
//   Product(p, m64, share)                    begins to load what goes to registers instead
//   multiply(ring, turn, first, count, acc)   adds the products of `count` stages from `turn` on, and leaves all but the last;
//                                             `first`: of the tile's 64 rows, where the warpgroup's begin
// Behind all stages: of each warpgroup the parts of the tile that it stores, and the tables of where pixels lie; barriers.
template <class Product>
struct Ring {
  static constexpr int B_AT = M64 * TAPS * Product::ARRIVING, BYTES = B_AT + STAGE_PIXELS * 128;
  static constexpr int STAGING_AT = STAGES * BYTES, TABLE_AT = STAGING_AT + TEAMS * STAGINGS * STAGING_BYTES;
  static constexpr int FULL_AT = TABLE_AT + TEAMS * TABLES * ROW_TABLE_BYTES, EMPTY_AT = FULL_AT + STAGES * 8;
  static constexpr int WARPS_READING = 4 * TILE_TEAMS * CLUSTER;  // which leave a stage
  static_assert(B_AT % 1024 == 0, "pixels begin at a pattern of the swizzle");
  static_assert(CLUSTER_K == 1 || TILE_M * TILE_N * 4 <= STAGING_AT, "all of a tile's sums fit over the stages");
  u32 smem;

  __device__ __forceinline__ u32 stage(u32 turn) const { return smem + turn % STAGES * BYTES; }
  __device__ __forceinline__ u32 full(u32 turn) const { return smem + FULL_AT + turn % STAGES * 8; }
  __device__ __forceinline__ u32 empty(u32 turn) const { return smem + EMPTY_AT + turn % STAGES * 8; }
  __device__ __forceinline__ void wait_until_full(u32 turn) const { mbarrier_wait(full(turn), turn / STAGES % 2); }
  __device__ __forceinline__ void wait_until_empty(u32 turn) const { mbarrier_wait(empty(turn), turn / STAGES % 2 ^ 1); }
  __device__ __forceinline__ void init() const {
    for (u32 turn = 0; turn < STAGES; ++turn) {
      mbarrier_init(full(turn), 1);
      mbarrier_init(empty(turn), WARPS_READING);
    }
    fence_mbarrier_init();
  }
  // A warp has read the stage: a lane tells each block whose copies come there.
  __device__ __forceinline__ void leave(u32 turn) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (CLUSTER == 1 && lane == 0) mbarrier_arrive(empty(turn));
    if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_at(empty(turn), lane);
  }
};

// A product's sums: those of an image's pixels.
__device__ __forceinline__ float (&sums_of(float (&acc)[TILE_NT][4], int image))[IMAGE_NT][4] {
  return *reinterpret_cast<float(*)[IMAGE_NT][4]>(&acc[image * IMAGE_NT]);
}

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
    const Corner box = corner(p, tile.column);
    int c = share.first - tap * p.tap_stages, r = tap / p.s, s = tap - r * p.s;
    if (TAPS > 1) c = share.first / p.s, s = share.first - c * p.s;
    for (int k = 0; k < share.count; ++k, ++turn) {
      const u32 to = ring.stage(turn) + ring.B_AT + own * 128;
      if (turn >= ahead) {
        ring.wait_until_empty(turn);
        copy_weights(tile.m64, share.first + k, turn);
      }
      if (TAPS > 1) {
        const FirstPixel first = {box.q - p.pad_l + s, box.p - p.pad_t + own / BOX_COLS, box.n};
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
template <class Product>
__device__ __forceinline__ void sum_of_cluster(const Ring<Product>& ring, int i, int part, float (&sums)[MT][NT][4]) {
  const u32 first = ring.smem + threadIdx.x / THREADS * (OWN * TILE_NT * THREADS * 16) + THREAD * 16;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    float sum[4] = {};
    for (int rank = 0; rank < CLUSTER_K; ++rank) {
      const uint4 bits = lds_128_of(first + (i * TILE_NT + part * NT + j) * THREADS * 16, rank);
      sum[0] += __uint_as_float(bits.x), sum[1] += __uint_as_float(bits.y);
      sum[2] += __uint_as_float(bits.z), sum[3] += __uint_as_float(bits.w);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[0][j][e] = sum[e];
  }
}

// Whether this block stores that part of the tile's 64 rows from m0 on.
__device__ __forceinline__ bool is_stored(const ConvParams& p, const Origin& tile, int m0, int part, int rank) {
  const bool none = TAPS == 1 && tile.column * TILE_N + part * BN >= p.n * p.p * p.q;
  return m0 < output_rows(p) && !none && part % CLUSTER_K == rank * (CLUSTER_K > 1);
}
// What a warpgroup stores of 64 rows, the i-th of its own, from this staging tile on.
__device__ __forceinline__ u32 staging_of(u32 staging, int i, int part) {
  return staging + (RES_AHEAD ? i * STORED + part / CLUSTER_K : 0) * STAGING_BYTES;
}

// Begins to copy the residual of all that the warpgroup stores of a tile, whose rows begin at m0. Tables first, y's for the stores:
// all copies' places are known before the first one is made, for no load of shared memory passes a copy that may write there.
__device__ __forceinline__ void copy_residual_ahead(const ConvParams& p, u32 staging, u32 tables, const Origin& tile,
                                                    const Corner& box, int m0, int rank) {
  constexpr int ROW_CHUNKS = BM / 8, PIXELS = THREADS / ROW_CHUNKS, TIMES = BN / PIXELS;  // of 16 bytes; at a time
  sync_threads();  // the last tile's stores have read all of this
  for (int n = THREAD; n < TILE_N; n += THREADS) {
    const int offset = tile_offset(p, tile.column, box, n);
    sts_32(tables + n * 4, offset);
    sts_32(tables + (TILE_N + n) * 4, residual_offset(p, offset));
  }
  sync_threads();
  const int m = THREAD % ROW_CHUNKS * 8, first = THREAD / ROW_CHUNKS;
#pragma unroll 1
  for (int part = 0; part < PARTS; ++part) {
    int offsets[TIMES];
#pragma unroll
    for (int k = 0; k < TIMES; ++k) offsets[k] = lds_32(tables + (TILE_N + part * BN + first + k * PIXELS) * 4);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int row = m0 + i * 64 + m;
      const bool real = row < output_rows(p);
      const __half* from = p.residual + (real ? row_offset<true>(p, row) : 0);
      if (!is_stored(p, tile, m0 + i * 64, part, rank)) continue;
#pragma unroll
      for (int k = 0; k < TIMES; ++k) {
        const bool ok = real && offsets[k] >= 0;
        cp_async_16(staged(staging_of(staging, i, part), m, first + k * PIXELS), from + (ok ? offsets[k] : 0), ok ? 16 : 0);
      }
    }
  }
  cp_async_commit();
}

// The products of a warpgroup, and its stores.
template <class Product>
__device__ __forceinline__ void multiply_stages(const ConvParams& p, const Ring<Product>& ring) {
  const int team = threadIdx.x / THREADS, rank = CLUSTER * CLUSTER_K > 1 ? cluster_rank() : 0;
  const int first = PINGPONG ? 0 : team * OWN;  // of the tile's 64 rows
  const u32 staging = ring.smem + ring.STAGING_AT + team * STAGINGS * STAGING_BYTES;
  const u32 tables = ring.smem + ring.TABLE_AT + team * TABLES * ROW_TABLE_BYTES;
  u32 turn = 0;
  int number = 0;
  bool begun = false;
  Share next;
  for (Share share = first_share(p); share.count; share = next, ++number) {
    next = after(p, share);
    if (PINGPONG && number % TEAMS != team) {
      turn += share.count;
      continue;
    }
    const Origin tile = origin(p, share);
    const Corner box = corner(p, tile.column);
    Product product(p, tile.m64 + first, share);
    if (!begun) wait_for_previous_launch();
    begun = true;
    if (RES_AHEAD) copy_residual_ahead(p, staging, tables, tile, box, (tile.m64 + first) * 64, rank);
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

    if (CLUSTER_K > 1)
      publish_sums(ring, acc);
    else if (!sum_splits(p, share, acc, staging, rank * TILE_TEAMS + (PINGPONG ? 0 : team), CLUSTER * TILE_TEAMS))
      continue;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int m0 = (tile.m64 + first + i) * 64;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        if (!is_stored(p, tile, m0, part, rank)) continue;
        float sums[MT][NT][4];
        if (CLUSTER_K > 1) sum_of_cluster(ring, i, part, sums);
#pragma unroll
        for (int j = 0; j < NT && CLUSTER_K == 1; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[0][j][e] = acc[i][part * NT + j][e];
        const u32 table = tables + RES_AHEAD * part * ROW_TABLE_BYTES;
        const auto offset_of = [&](int n) { return tile_offset(p, tile.column, box, part * BN + n); };
        epilogue<RES_AHEAD * BN>(p, sums, staging_of(staging, i, part), table, m0, offset_of);
      }
    }
  }
}

template <class Product>
__device__ __forceinline__ void convolve_with_tma(const ConvParams& all) {
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
    __syncwarp();
    if (CLUSTER_K > 1) sync_cluster();
  } else {
    if (TEAMS > 1) take_registers<232>();
    multiply_stages(p, ring);
  }
  if (CLUSTER * CLUSTER_K > 1) sync_cluster();  // no copy, arrival or load meets a block that has left
}
