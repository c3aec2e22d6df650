// The main loop of conv_dense_sm90.cu and conv_sparse24_sm90.cu: tiles of Y by Hopper's warpgroups, whose tensor cores read weights
// and pixels from shared memory, where one thread of a warpgroup of its own has them copied (TMA).
//
//   copies      wait until stage is empty    expect its bytes; weights; pixels         ..  next stage, also of the next tile
//   products    wait until stage is full     products of it; wait for those before  ..  previous stage is empty
//
// Compile-time: TILE_M x TILE_N, the tile: output channels, pixels; TEAMS warpgroups that multiply; PINGPONG   0: each a part of the
// tile's channels; 1: each a tile of its own, so that one stores while the other multiplies; CLUSTER   2: two blocks have tiles
// side by side in M, each copies half of the pixels to both; RESIDENT blocks of an SM. What one warpgroup stores at a time, BM x BN, is the
// tile that include/conv.cuh knows.
//
// K is (tap; input channel), and a stage has 64 channels of one tap: what lies past the last channel, or outside of the image, is
// zero, as TMA has it. Blocks go on from tile to tile (include/split_k.cuh).
#pragma once
#include "bulk.cuh"
#include "grouped.cuh"
#include "wgmma.cuh"

constexpr int M64 = TILE_M / 64, OWN = M64 / (PINGPONG ? 1 : TEAMS);  // 64 rows each: of a tile, of a warpgroup
constexpr int TILE_NT = TILE_N / 8, PARTS = TILE_N / BN;
constexpr int TILE_TEAMS = PINGPONG ? 1 : TEAMS;  // that store a tile
constexpr int OTHERS_TURN = 1 + TEAMS;            // the first barrier behind those of sync_threads

static_assert(BK == 64, "a pixel's row is 128 bytes, a pattern of the swizzle 8 of them");
static_assert(WGMMA && BM == 64 && THREADS == 128 && TILE_N % BN == 0, "a warpgroup stores 64 rows at a time");
static_assert(TILE_M % 64 == 0 && M64 % TILE_TEAMS == 0 && (TEAMS > 1 || !PINGPONG), "whole products of 64 rows");
static_assert(TILE_N / CLUSTER % 8 == 0, "each block copies whole patterns");
static_assert(!IN_LINEAR && !PRO && !GATE && !NORM, "pixels go from memory to tensor cores as they are");

// A stage: weights, each 64 rows of 128 (2:4: 64) bytes, swizzled as wgmma's descriptors have it | metadata | pixels alike.
// Behind all stages: of each warpgroup the part of the tile that it stores, and the table of where its pixels lie; barriers.
template <bool SPARSE>
struct Stages {
  static constexpr int A64 = SPARSE ? 4096 : 8192, E64 = SPARSE ? 512 : 0;  // bytes of 64 rows
  static constexpr int E_AT = M64 * A64, B_AT = (E_AT + M64 * E64 + 1023) / 1024 * 1024, BYTES = B_AT + TILE_N * 128;
  static constexpr int ARRIVING = M64 * (A64 + E64) + TILE_N * 128;
  static constexpr int STAGING_AT = STAGES * BYTES, TABLE_AT = STAGING_AT + TEAMS * STAGING_BYTES;
  static constexpr int FULL_AT = TABLE_AT + TEAMS * ROW_TABLE_BYTES, EMPTY_AT = FULL_AT + STAGES * 8;
  static constexpr int WARPS_READING = 4 * TILE_TEAMS * CLUSTER;  // which leave a stage
};

// The first channel and pixel of a share's tile in this block.
struct Origin {
  int m64, pixel;
};
__device__ __forceinline__ Origin origin(const ConvParams& p, const Share& share) {
  const int wide = ((output_rows(p) + TILE_M - 1) / TILE_M + CLUSTER - 1) / CLUSTER;  // clusters that have all channels
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  return {(share.tile % wide * CLUSTER + rank) * M64, share.tile / wide * TILE_N};
}

// Of the block's group.
__device__ __forceinline__ int first_channel(const ConvParams& p) {
#if GROUPED
  return blockIdx.y * p.x_group;
#else
  return 0;
#endif
}

// The copies of a block, by one thread. Weights of the first stages come ahead of the wait, for they depend on no other launch.
template <bool SPARSE>
__device__ __forceinline__ void copy_stages(const ConvParams& p, const TensorMap* map, u32 smem) {
  using In = Stages<SPARSE>;
  const int last = p.m16 / 4 - 1;  // rows past it are never stored: these are read again, for metadata must be legal
  auto copy_weights = [&](int m64, int k_tile, u32 stage) {
    const u32 full = smem + In::FULL_AT + stage * 8, to = smem + stage * In::BYTES;
    mbarrier_arrive_expecting(full, In::ARRIVING);
#pragma unroll
    for (int i = 0; i < M64; ++i) {
      const long long at = static_cast<long long>(min(m64 + i, last)) * p.k_tiles + k_tile;
      copy_bulk(to + i * In::A64, reinterpret_cast<const char*>(p.w) + at * In::A64, In::A64, full);
      if (SPARSE) copy_bulk(to + In::E_AT + i * In::E64, reinterpret_cast<const char*>(p.meta) + at * In::E64, In::E64, full);
    }
  };
  Share share = first_share(p);
  const int ahead = min(share.count, STAGES), first_m64 = origin(p, share).m64;
  for (int stage = 0; stage < ahead; ++stage) copy_weights(first_m64, share.first + stage, stage);
  wait_for_previous_launch();

  constexpr int HALF = TILE_N / CLUSTER;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0, group_c = first_channel(p);
  u32 turn = 0;
  for (; share.count; share = next_share(p, share)) {
    const Origin tile = origin(p, share);
    const int pixel = tile.pixel + rank * HALF, n = pixel / (p.p * p.q), rest = pixel - n * (p.p * p.q), oh = rest / p.q;
    const FirstPixel at = {(rest - oh * p.q) * p.stride_w - p.pad_l, oh * p.stride_h - p.pad_t, n};
    int tap = share.first / p.tap_stages, c = share.first - tap * p.tap_stages, r = tap / p.s, s = tap - r * p.s;
    for (int k = 0; k < share.count; ++k, ++turn) {
      const u32 stage = turn % STAGES, full = smem + In::FULL_AT + stage * 8;
      const u32 to = smem + stage * In::BYTES + In::B_AT + rank * HALF * 128;
      if (turn >= ahead) {
        mbarrier_wait(smem + In::EMPTY_AT + stage * 8, turn / STAGES % 2 ^ 1);
        copy_weights(tile.m64, share.first + k, stage);
      }
      if (p.im2col)
        copy_column<CLUSTER>(to, map, group_c + c * 64, at, r * p.dil_h, s * p.dil_w, full);
      else
        copy_rows<CLUSTER>(to, map, group_c + c * 64, pixel, full);
      if (++c == p.tap_stages) c = 0, ++s;
      if (s == p.s) s = 0, ++r;
    }
  }
}

// The products of a warpgroup, and its stores.
template <bool SPARSE>
__device__ __forceinline__ void multiply_stages(const ConvParams& p, u32 smem) {
  using In = Stages<SPARSE>;
  const int team = threadIdx.x / THREADS, lane = threadIdx.x % 32, warp = thread() / 32;
  const int first = PINGPONG ? 0 : team * OWN;  // of the tile's 64 rows
  const u32 staging = smem + In::STAGING_AT + team * STAGING_BYTES, table = smem + In::TABLE_AT + team * ROW_TABLE_BYTES;
  const int rank = CLUSTER > 1 ? cluster_rank() : 0;
  auto wait_until_full = [&](u32 turn) { mbarrier_wait(smem + In::FULL_AT + turn % STAGES * 8, turn / STAGES % 2); };
  auto leave = [&](u32 turn) {  // a lane for each block whose copies come here
    const u32 empty = smem + In::EMPTY_AT + turn % STAGES * 8;
    __syncwarp();
    if (CLUSTER == 1 && lane == 0) mbarrier_arrive(empty);
    if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_at(empty, lane);
  };
  u32 e[2][OWN];  // of a step and the next
  auto fetch_metadata = [&](u32 turn, int step) {  // of 16 rows and a step 64 bytes, which lanes t and t + 2 read
    const u32 words = smem + turn % STAGES * In::BYTES + In::E_AT + (warp * 2 + step) * 64 + lane / 4 * 8 + lane % 2 * 4;
#pragma unroll
    for (int i = 0; i < OWN; ++i) e[step][i] = lds_32(words + (first + i) * In::E64);
  };
  wait_for_previous_launch();

  u32 turn = 0;
  int number = 0;
  Share next;
  for (Share share = first_share(p); share.count; share = next, ++number) {
    next = next_share(p, share);
    if (PINGPONG && number % TEAMS != team) {
      turn += share.count;
      continue;
    }
    // A stage's barrier tells two phases apart, not three: nobody waits for a tile while the one before it is not all there.
    if (PINGPONG && number) wait_for_other_warpgroup(OTHERS_TURN + team);
    float acc[OWN][TILE_NT][4] = {};
    if (SPARSE) {
      wait_until_full(turn);
      fetch_metadata(turn, 0);
    }
    keep_apart(acc);
    for (int k = 0; k < share.count; ++k, ++turn) {
      const u32 stage = smem + turn % STAGES * In::BYTES, pixels = stage + In::B_AT, weights = stage + first * In::A64;
      if constexpr (SPARSE) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < OWN; ++i)
            wgmma_sparse(acc[i], rows_of_64_bytes(weights + i * In::A64 + step * 32), rows_of_128_bytes(pixels + step * 64), e[step][i]);
          wgmma_commit();
          wgmma_wait<1>();
          if (step == 0) {
            if (k) leave(turn - 1);
            fetch_metadata(turn, 1);
          } else if (k + 1 < share.count) {
            wait_until_full(turn + 1);
            fetch_metadata(turn + 1, 0);
          }
        }
      } else {
        wait_until_full(turn);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BK / 16; ++step)
#pragma unroll
          for (int i = 0; i < OWN; ++i)
            wgmma_dense(acc[i], rows_of_128_bytes(weights + i * In::A64 + step * 32), rows_of_128_bytes(pixels + step * 32));
        wgmma_commit();
        wgmma_wait<1>();
        if (k) leave(turn - 1);
      }
    }
    if (PINGPONG && next.count) tell_other_warpgroup(OTHERS_TURN + (team ^ 1));
    wgmma_wait<0>();
    keep_apart(acc);
    leave(turn - 1);

    const Origin tile = origin(p, share);
    const int which = rank * TILE_TEAMS + (PINGPONG ? 0 : team);
    if (!sum_splits(p, share, acc, staging, which, CLUSTER * TILE_TEAMS)) continue;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int m0 = (tile.m64 + first + i) * 64;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int pixel0 = tile.pixel + part * BN;
        if (m0 >= output_rows(p) || pixel0 >= p.n * p.p * p.q) continue;
        float sums[MT][NT][4];
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[0][j][e] = acc[i][part * NT + j][e];
        epilogue(p, sums, staging, table, m0, [&](int n) { return output_offset(p, pixel0 + n); });
      }
    }
  }
}

template <bool SPARSE>
__device__ __forceinline__ void convolve_with_tma(const ConvParams& all) {
  using In = Stages<SPARSE>;
  extern __shared__ __align__(1024) char patterns[];
  const u32 smem = smem_u32(patterns);
  const ConvParams& p = of_group<In::A64 / 4, In::E64 / 2>(all);
  release_next_launch();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(smem + In::FULL_AT + stage * 8, 1);
      mbarrier_init(smem + In::EMPTY_AT + stage * 8, In::WARPS_READING);
    }
    fence_mbarrier_init();
  }
  if (CLUSTER > 1)
    sync_cluster();
  else
    __syncthreads();
  // 384 threads begin with 168 registers each: multiplying ones need more.
  if (threadIdx.x >= TEAMS * THREADS) {
    if (TEAMS > 1) keep_registers<40>();
    if (threadIdx.x == TEAMS * THREADS) copy_stages<SPARSE>(p, &all.map, smem);
    __syncwarp();
  } else {
    if (TEAMS > 1) take_registers<232>();
    multiply_stages<SPARSE>(p, smem);
  }
  if (CLUSTER > 1) sync_cluster();  // no copy or arrival meets a block that has left
}
