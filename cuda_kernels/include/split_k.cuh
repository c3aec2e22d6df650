// Split-K: blocks share output tiles along K, each takes a run of their stages; the last to arrive at a tile sums and stores.
//
//   SPLIT 1   split-K: every tile by `splits` blocks          SPLIT 2   stream-K: all stages of all tiles in one line, cut
//   tile 0     |  tile 1     |                                tile 0     |  tile 1     |  tile 2     |       evenly
//   b0 | b1    |  b2 | b3    |                                b0      | b1      | b2       | b3      |
//
// Partial sums go to workspace in the accumulator's own order, 16 bytes per lane. Whoever arrives last (counted in one
// counter per tile, which it sets back to zero for the next launch) adds them in ascending K: the same bits every time,
// whatever the order of blocks. Nobody waits for anybody, and nothing is added with atomics.
#pragma once
#include "conv.cuh"

// A run of K stages of one output tile; of a cluster, of one tile of each of its blocks.
struct Share {
  int tile, first, count;
};

// What has shares, in a line: blocks, or clusters.
__device__ __forceinline__ u32 worker() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ u32 workers() { return gridDim.x / CLUSTER; }

#if SPLIT
// Where a block's work begins in the line of all stages; the end is where the next block's begins. Stream-K: the first
// `longer` blocks have one stage more than the others.
__device__ __forceinline__ int work_begin(const ConvParams& p, int block) {
  if (SPLIT == 1) return block / p.splits * p.k_tiles + block % p.splits * p.k_tiles / p.splits;
  const int blocks = workers(), each = p.tiles * p.k_tiles / blocks, longer = p.tiles * p.k_tiles % blocks;
  return block * each + min(block, longer);
}

// The block that has a stage of the line; split-K: of a tile's first and last stage only.
__device__ __forceinline__ int block_of(const ConvParams& p, int stage) {
  if (SPLIT == 1) return stage / p.k_tiles * p.splits + (stage % p.k_tiles ? p.splits - 1 : 0);
  const int blocks = workers(), each = p.tiles * p.k_tiles / blocks, longer = p.tiles * p.k_tiles % blocks;
  return stage < longer * (each + 1) ? stage / (each + 1) : longer + (stage - longer * (each + 1)) / each;
}

__device__ __forceinline__ Share share_at(const ConvParams& p, int begin, int end) {
  const int tile = begin / p.k_tiles, first = begin - tile * p.k_tiles;
  return {tile, first, min(p.k_tiles - first, end - begin)};
}
#endif

__device__ __forceinline__ Share first_share(const ConvParams& p) {
#if SPLIT
  return share_at(p, work_begin(p, worker()), work_begin(p, worker() + 1));
#elif WGMMA
  return {static_cast<int>(worker()), 0, static_cast<int>(worker()) < p.units ? p.k_tiles : 0};
#else
  return {static_cast<int>(blockIdx.x), 0, p.k_tiles};
#endif
}

// What the block does next; a share of no stages ends it.
__device__ __forceinline__ Share next_share(const ConvParams& p, const Share& done) {
#if SPLIT == 2
  const int begin = done.tile * p.k_tiles + done.first + done.count, end = work_begin(p, worker() + 1);
  if (begin < end) {
    if (!WGMMA) __syncthreads();  // the last share's reads of shared memory are over
    return share_at(p, begin, end);
  }
#elif WGMMA && !SPLIT
  const int tile = done.tile + static_cast<int>(workers());
  if (tile < p.units) return {tile, 0, p.k_tiles};
#endif
  Share none = done;
  none.count = 0;
  return none;
}

// Returns whether these threads store the tile; then `acc` holds the sum over all blocks that have a part of it. `which`, `many`:
// of a share's sums that such groups of threads have, in a cluster and in a block. `smem`: a word that only they use.
template <int I, int J>
__device__ __forceinline__ bool sum_splits(const ConvParams& p, const Share& share, float (&acc)[I][J][4], u32 smem, int which = 0,
                                           int many = 1) {
#if SPLIT
  if (share.count == p.k_tiles) return true;
  constexpr int PER_PART = I * J * THREADS;  // 16-byte pieces
  const int begin = share.tile * p.k_tiles, first_block = block_of(p, begin), last_block = block_of(p, begin + p.k_tiles - 1);
  // Of two tiles at most has a block a part: stream-K's first and last. Only a tile's first block can have begun before it.
  const int early = SPLIT == 2 && work_begin(p, first_block) < begin;
  auto part = [&](int block) {
    const int slot = block * SPLIT + (block == first_block ? early : 0);
    return static_cast<char*>(p.partial) + (static_cast<long long>(slot * many + which) * PER_PART + THREAD) * 16;
  };
  char* own = part(worker());
#pragma unroll
  for (int i = 0; i < I; ++i)
#pragma unroll
    for (int j = 0; j < J; ++j)
      stg_128(own + (i * J + j) * THREADS * 16, *reinterpret_cast<const uint4*>(acc[i][j]));
  // Release: all of the block's stores come before its arrival. Acquire: the last one's loads come after all arrivals.
  cp_async_wait<0>();
  __threadfence();
  sync_threads();
  if (THREAD == 0) sts_32(smem, atomicAdd(p.counters + (share.tile * many + which), 1u));
  sync_threads();
  if (lds_32(smem) != static_cast<u32>(last_block - first_block)) return false;
  __threadfence();
  if (THREAD == 0) p.counters[share.tile * many + which] = 0;
  // Pieces at a time: of one after the other each would wait for L2 by itself. A block's own part is in registers still; with
  // more accumulators they would not suffice for both.
  constexpr int AT_ONCE = 8;
  constexpr bool KEEPS = I * J <= 16;
#pragma unroll
  for (int first = 0; first < I * J; first += AT_ONCE) {
    float sums[AT_ONCE][4] = {};
    for (int block = first_block; block <= last_block; ++block) {
      if (KEEPS && block == static_cast<int>(worker())) {
#pragma unroll
        for (int k = 0; k < AT_ONCE && first + k < I * J; ++k)
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[k][e] += acc[(first + k) / J][(first + k) % J][e];
        continue;
      }
      const char* from = part(block) + first * THREADS * 16;
      uint4 bits[AT_ONCE];
#pragma unroll
      for (int k = 0; k < AT_ONCE && first + k < I * J; ++k) bits[k] = ldg_128_cg(from + k * THREADS * 16);
#pragma unroll
      for (int k = 0; k < AT_ONCE && first + k < I * J; ++k) {
        sums[k][0] += __uint_as_float(bits[k].x), sums[k][1] += __uint_as_float(bits[k].y);
        sums[k][2] += __uint_as_float(bits[k].z), sums[k][3] += __uint_as_float(bits[k].w);
      }
    }
#pragma unroll
    for (int k = 0; k < AT_ONCE && first + k < I * J; ++k)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[(first + k) / J][(first + k) % J][e] = sums[k][e];
  }
#endif
  return true;
}
