// Split-K: several blocks share one output tile, each takes a run of its K stages; the last to arrive sums and stores.
//
// Partial sums go to workspace in the accumulator's own order, 16 bytes per lane. Whoever arrives last (counted in one
// counter per tile, which it sets back to zero for the next launch) adds them in ascending K: the same bits every time,
// whatever the order of blocks. Nobody waits for anybody, and nothing is added with atomics.
#pragma once
#include "conv.cuh"

// Which tile of the output, and which of its K stages, a block has.
struct Share {
  int tile, split, first, count;
};

__device__ __forceinline__ Share share_of_block(const ConvParams& p) {
#if SPLIT
  const int split = blockIdx.x % p.splits, first = split * p.k_tiles / p.splits;
  return {static_cast<int>(blockIdx.x) / p.splits, split, first, (split + 1) * p.k_tiles / p.splits - first};
#else
  return {static_cast<int>(blockIdx.x), 0, 0, p.k_tiles};
#endif
}

// Returns whether this block stores the tile; then `acc` holds the sum over all splits.
__device__ __forceinline__ bool sum_splits(const ConvParams& p, const Share& share, float (&acc)[MT][NT][4], u32 smem) {
#if SPLIT
  constexpr int PER_BLOCK = MT * NT * THREADS;  // 16-byte pieces
  char* tile = static_cast<char*>(p.partial) + static_cast<long long>(share.tile) * p.splits * PER_BLOCK * 16;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j)
      stg_128(tile + (static_cast<long long>(share.split) * PER_BLOCK + (i * NT + j) * THREADS + threadIdx.x) * 16,
              *reinterpret_cast<const uint4*>(acc[i][j]));
  // Release: all of the block's stores come before its arrival. Acquire: the last one's loads come after all arrivals.
  cp_async_wait<0>();
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) sts_32(smem, atomicAdd(p.counters + share.tile, 1u));
  __syncthreads();
  if (lds_32(smem) != static_cast<u32>(p.splits - 1)) return false;
  __threadfence();
  if (threadIdx.x == 0) p.counters[share.tile] = 0;
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const char* piece = tile + (static_cast<long long>(i * NT + j) * THREADS + threadIdx.x) * 16;
      float sum[4] = {};
      for (int s = 0; s < p.splits; ++s) {
        const uint4 bits = ldg_128_cg(piece + static_cast<long long>(s) * PER_BLOCK * 16);
        sum[0] += __uint_as_float(bits.x), sum[1] += __uint_as_float(bits.y);
        sum[2] += __uint_as_float(bits.z), sum[3] += __uint_as_float(bits.w);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[i][j][e] = sum[e];
    }
#endif
  return true;
}
