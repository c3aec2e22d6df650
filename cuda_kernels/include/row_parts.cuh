// Part of reduce.cu, which defines the names used here, for SPLIT: parts of rows, which blocks leave for each other, and how they
// are joined (Chan, Golub and LeVeque: sums of squares about the parts' own means).
#pragma once

struct Part {
  float sum, values, squares, unused;  // squares: about the part's own mean
};

__device__ __forceinline__ Part* part_at(const ReduceParams& p, int row, int part) {
  return reinterpret_cast<Part*>(p.partial) + (static_cast<long long>(row) * p.parts + part) * SLOTS;
}

// Leaves what there is to know of a part of the rows.
__device__ __forceinline__ void leave_part(const ReduceParams& p, const Share& mine, int part, float (*room)[256]) {
  float sum[SLOTS + 1], own[SLOTS], mean[SLOTS], squares[SLOTS];
  sum[SLOTS] = accumulate<false>(p, mine, mean, own);
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) sum[j] = own[j];
  across_lanes<SUM>(p, mine.lane, room, sum);
  const float values = sum[SLOTS];
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) mean[j] = values > 0.f ? sum[j] / values : 0.f;
  accumulate<true>(p, mine, mean, squares);
  across_lanes<SUM>(p, mine.lane, room, squares);
  if (mine.works && mine.lane == 0)
#pragma unroll
    for (int j = 0; j < SLOTS; ++j)
      stg_128(part_at(p, mine.index, part) + j,
              make_uint4(__float_as_uint(sum[j]), __float_as_uint(values), __float_as_uint(squares[j]), 0u));
  __threadfence();  // release: the block's stores come before its arrival
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(p.counters + 1, 1u);
}

// Returns once all parts of all rows are known; the last block to leave sets the counters back.
__device__ __forceinline__ void wait_for_parts(const ReduceParams& p, unsigned all) {
  if (threadIdx.x == 0) {
    while (*static_cast<volatile u32*>(p.counters + 1) < all) {
    }
    __threadfence();
    if (atomicAdd(p.counters + 2, 1u) == all - 1) p.counters[0] = 0, p.counters[1] = 0, p.counters[2] = 0;
  }
  __syncthreads();
  __threadfence();
}

__device__ __forceinline__ Part load_part(const ReduceParams& p, int row, int part, int slot) {
  const uint4 bits = ldg_128_cg(part_at(p, row, part) + slot);
  return {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), 0.f};
}

// What a part adds to the squares about the mean of all.
__device__ __forceinline__ float squares_about(const Part& part, float mean) {
  const float off = part.values > 0.f ? __fdividef(part.sum, part.values) - mean : 0.f;  // a division would be a call
  return part.squares + part.values * off * off;
}

#if SPLIT == 2
// The lane's share of the sums over each of its channels' groups, of values or of squares about the mean.
template <bool SQUARES>
__device__ __forceinline__ void sum_of_group(const ReduceParams& p, const Share& mine, const float (&mean)[SLOTS],
                                             float (&result)[SLOTS]) {
  const int image = mine.index - mine.row.channel, entries = mine.works ? p.group * p.parts : 0;  // image: its first row
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    const int first = min(mine.row.channel * VEC + j, p.c - 1) / p.group * p.group;  // of padding: any
    float sum = 0.f;
#pragma unroll 1
    for (int k = mine.lane; k < entries; k += p.lanes) {
      const int channel = first + k / p.parts;
      const Part part = load_part(p, image + channel / VEC, k % p.parts, channel % VEC);
      sum += SQUARES ? squares_about(part, mean[j]) : part.sum;
    }
    result[j] = sum;
  }
}
#endif

// The statistics of whole rows.
__device__ __forceinline__ void join_parts(const ReduceParams& p, const Share& mine, float (*room)[256], Statistics& of) {
#if SPLIT == 1
  Part part[SLOTS] = {};
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    if (mine.works && mine.lane < p.parts) part[j] = load_part(p, mine.index, mine.lane, j);
    of.first[j] = part[j].sum;
  }
  across_lanes<SUM>(p, mine.lane, room, of.first);
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    of.first[j] /= p.count;
    of.second[j] = squares_about(part[j], of.first[j]);
  }
#else
  sum_of_group<false>(p, mine, of.first, of.first);
  across_lanes<SUM>(p, mine.lane, room, of.first);
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) of.first[j] /= p.count;
  sum_of_group<true>(p, mine, of.first, of.second);
#endif
  across_lanes<SUM>(p, mine.lane, room, of.second);
}
