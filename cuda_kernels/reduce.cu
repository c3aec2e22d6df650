// reduce: one statistic of every row of a tensor (sum, maximum, norm, ...), or the tensor normalised by two of them (softmax,
// instance, group and layer normalization), with a chain of elementwise stages behind it. A row is any set of the axes n, c, h,
// w, with channels possibly in groups.
//
//     lanes:      0 1 2 3 0 1 2 3 ...                  each lane sums (or takes the maximum of) every LANES-th element,
//     element:    x x x x x x x x x x x   row b        then a tree over lanes and shared memory joins them in a fixed order:
//     element:    x x x x x x x x x x x   row b + 1    [0 1 2 3] -> [0+2 1+3] -> [0+2+1+3]
//
// A thread reads VEC neighbouring channels at a time. MIX 1: they belong to one row (channels are reduced), so they are
// joined first; MIX 0: they belong to VEC rows, which the thread carries side by side.
//
// The trick: two passes of plain FP32 sums, of x and then of what the first result shifts (exp(x - max), (x - mean)^2), instead
// of one pass of cancelling sums; the row stays in L1 or L2 between them.
//
// SPLIT (of STANDARD): few long rows, each by several blocks. The first half of the blocks to begin leave sum, count and
// squares about their own mean of a part of a row each; the others wait for all of those, join them in the order of parts, and
// normalise a part. A block knows its turn from a ticket, not from its index: so whoever waits does so for blocks that have
// begun and wait for nobody, in whatever order and however few at a time blocks run. SPLIT 1: rows are taken apart along their
// elements. SPLIT 2: rows are groups of channels that end within vectors, or that have padding behind them: the first blocks
// sum each channel by itself, and who normalizes a channel joins those of its group.
//
// HELD: rows of whole vectors of channels that a warp or a few have room for in registers. A lane holds HELD vectors, LANES
// apart, and all of its loads are on their way before the first is needed; both passes and the result are made of these.
//
// Compile-time: KIND, as STATISTIC below, the order of tactics/problems/reductions.py; VEC (8 or 1); MIX; C_FAST: channels vary
// fastest in the order of elements (else pixels do), as they lie in memory; SPLIT; ADDED: the rows are those of a sum of two
// tensors, which is never stored; X_F32, Y_F32 (include/types.cuh); OPS, OPERANDS, SOURCES (include/stages.cuh), of
// normalizations; HELD, LANES, and of what is held SCALED: whether there are scale and bias, EARLY: they
// are loaded first, for few rows, where waiting for them costs more than registers do.
constexpr int STATISTIC = KIND;
#undef KIND  // another thing to include/activation.cuh
#include "stages.cuh"

#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef ADDED
#define ADDED 0
#endif
#ifndef HELD
#define HELD 0
#define LANES 0
#define SCALED 0
#define EARLY 0
#define WHOLE 0
#endif

enum { SUM, MEAN, MAX, MIN, PROD, L1, L2, SUM_SQUARE, LOG_SUM, LOG_SUM_EXP, INV_STD, SOFTMAX, LOG_SOFTMAX, STANDARD };
static_assert(!SPLIT || STATISTIC == STANDARD, "only sums about a mean are joined from parts");
static_assert(!HELD || (VEC == 8 && MIX && !SPLIT && !X_F32 && !Y_F32), "vectors of one row, which no other block reads");
static_assert(SPLIT != 2 || !MIX, "channels that are summed by themselves");
constexpr int SLOTS = MIX ? 1 : VEC;  // rows that a thread carries side by side
constexpr int AHEAD = 4;              // elements that a thread has in flight
constexpr bool SHIFTED = STATISTIC >= LOG_SUM_EXP, NORMALIZES = STATISTIC >= SOFTMAX;
constexpr int FIRST = STATISTIC == MAX || STATISTIC == LOG_SUM_EXP || STATISTIC == SOFTMAX || STATISTIC == LOG_SOFTMAX ? MAX
                      : STATISTIC == MIN || STATISTIC == PROD                                                ? STATISTIC
                                                                                                   : SUM;

struct ReduceParams {
  u32* nonfinite;
  Source x;
  Y* y;
  const float* scale;  // STANDARD: both or none: FP32, as `affine` says where
  const float* bias;
  Spread out, affine;
  Place kept, element;  // how many indices each axis has among the rows, and inside one; their product is the axis
  int rows, elements;   // bundles of VEC channels count once
  int lanes, lane_step; // threads of one row are lane_step apart
  int c, per_vector;    // channels; 1 if `affine` spans them, else 0
  float count, epsilon; // elements of one row, one by one
#if ADDED
  Source added;
#endif
#if SPLIT
  char* partial;        // [rows][parts][SLOTS] of 16 bytes
  u32* counters;        // tickets taken, parts summed, blocks that need neither any more
  int parts, group;     // of a row, at most `lanes`; SPLIT 2: channels of a group
#endif
#if SOURCES
  Source source[NUM_SOURCES];
  float param[NUM_STAGES ? NUM_STAGES : 1][2];
#endif
};

template <int MERGE>
__device__ __forceinline__ float merge(float a, float b) {
  if (MERGE == MAX) return b > a || b != b ? b : a;
  if (MERGE == MIN) return b < a || b != b ? b : a;
  return MERGE == PROD ? a * b : a + b;
}
template <int MERGE>
__device__ __forceinline__ float neutral() {
  return MERGE == MAX ? MINUS_INFINITY : MERGE == MIN ? -MINUS_INFINITY : MERGE == PROD ? 1.f : 0.f;
}

// What an element adds to the first statistic, and to the second, which knows the first.
__device__ __forceinline__ float term(float x) {
  return STATISTIC == L1 ? fabsf(x) : STATISTIC == L2 || STATISTIC == SUM_SQUARE ? x * x : x;
}
__device__ __forceinline__ float term(float x, float first) {
  return STATISTIC == STANDARD || STATISTIC == INV_STD ? (x - first) * (x - first) : __expf(x - first);
}

// An index along an axis of `size`, taken off `i`. Divisions are slow, and most axes are of size 1.
__device__ __forceinline__ int taken_off(unsigned& i, unsigned size) {
  if (size == 1) return 0;
  const unsigned others = i / size, at = i - others * size;
  i = others;
  return at;
}

__device__ __forceinline__ Place taken_apart(unsigned i, const Place& size) {
  Place at;
  if (C_FAST) at.channel = taken_off(i, size.channel);
  at.column = taken_off(i, size.column);
  at.row = taken_off(i, size.row);
  if (!C_FAST) at.channel = taken_off(i, size.channel);
  at.image = i;
  return at;
}

// Element e of a row: every axis belongs to the rows or to the elements, channel groups to both.
__device__ __forceinline__ Place place(const ReduceParams& p, const Place& row, unsigned e) {
  Place at = taken_apart(e, p.element);
  at.image += row.image * p.element.image, at.row += row.row * p.element.row;
  at.column += row.column * p.element.column;
  at.channel = (at.channel + row.channel * p.element.channel) * VEC;
  return at;
}

// VEC values of the tensor, or of the sum.
__device__ __forceinline__ void load_input(const ReduceParams& p, const Place& at, float (&x)[VEC]) {
  load_vec(static_cast<const X*>(p.x.at) + p.x.spread.at(at), x);
#if ADDED
  float more[VEC];
  load_vec(static_cast<const __half*>(p.added.at) + p.added.spread.at(at), more);
#pragma unroll
  for (int j = 0; j < VEC; ++j) x[j] += more[j];
#endif
}

// What a thread does: row `index` (or SLOTS rows) of all, of which it takes every step-th element from the first on.
struct Share {
  Place row;
  int index, lane;
  bool works;
  unsigned first, step;
};

__device__ __forceinline__ Share share_of(const ReduceParams& p, int block, int part, int parts) {
  const int lanes = HELD ? LANES : p.lanes, per_block = (HELD ? blockDim.x : 256) / lanes;
  const bool neighbours = HELD || p.lane_step == 1;
  Share mine;
  mine.lane = neighbours ? threadIdx.x % lanes : threadIdx.x / per_block;
  mine.index = block * per_block + (neighbours ? threadIdx.x / lanes : threadIdx.x % per_block);
  mine.works = mine.index < p.rows;
  mine.row = taken_apart(mine.works ? mine.index : 0, p.kept);
  mine.first = part * lanes + mine.lane, mine.step = parts * lanes;
  return mine;
}

// A thread's next AHEAD elements from e on, all of whose loads are on their way before the first is needed. Of those behind the
// row's end, and of padding, the channel is p.c or more, and x is of another element.
struct Ahead {
  Place at[AHEAD];
  float x[AHEAD][VEC];
  __device__ __forceinline__ void load(const ReduceParams& p, const Share& mine, unsigned e) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const bool real = e + i * mine.step < p.elements;
      at[i] = place(p, mine.row, real ? e + i * mine.step : e);
      Place from = at[i];
      if (from.channel >= p.c) from.channel = 0;
      load_input(p, from, x[i]);
      if (!real) at[i].channel = p.c;
    }
  }
};

// Merges each of N values over the lanes of a row: in every lane the same. `room`: shared memory.
template <int MERGE, int N>
__device__ __forceinline__ void across_lanes(const ReduceParams& p, int lane, float (*room)[256], float (&v)[N]) {
  const int me = threadIdx.x, near = p.lane_step == 1 ? min(p.lanes, 32) : 1;  // lanes of one row within a warp
  if (p.lanes > near) {
#pragma unroll
    for (int j = 0; j < N; ++j) room[j][me] = v[j];
    __syncthreads();
    for (int half = p.lanes / 2; half >= near; half /= 2) {
      if (lane < half)
#pragma unroll
        for (int j = 0; j < N; ++j) room[j][me] = merge<MERGE>(room[j][me], room[j][me + half * p.lane_step]);
      __syncthreads();
    }
    if (lane < near)
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = room[j][me];
  }
  for (int half = near / 2; half > 0; half /= 2)
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = merge<MERGE>(v[j], __shfl_down_sync(0xffffffffu, v[j], half, near));
  if (p.lanes > near) {
    if (lane == 0)
#pragma unroll
      for (int j = 0; j < N; ++j) room[j][me] = v[j];
    __syncthreads();
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = room[j][me - lane * p.lane_step];
    __syncthreads();
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = __shfl_sync(0xffffffffu, v[j], 0, near);
  }
}

// The thread's part of the statistic of each of its rows, and how many values of a row it is of.
template <bool SECOND>
__device__ __forceinline__ float accumulate(const ReduceParams& p, const Share& mine, const float (&first)[SLOTS],
                                            float (&result)[SLOTS]) {
  constexpr int MERGE = SECOND ? SUM : FIRST;
  float each[VEC], values = 0.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) each[j] = neutral<MERGE>();
  for (unsigned e = mine.first; mine.works && e < p.elements; e += AHEAD * mine.step) {
    Ahead of;
    of.load(p, mine, e);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int j = 0; j < VEC; ++j)
        if (of.at[i].channel + j < p.c) {
          each[j] = merge<MERGE>(each[j], SECOND ? term(of.x[i][j], first[MIX ? 0 : j]) : term(of.x[i][j]));
          values += MIX || j == 0 ? 1.f : 0.f;
        }
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) result[MIX ? 0 : j] = MIX && j ? merge<MERGE>(result[0], each[j]) : each[j];
  return values;
}

// Of a row: its mean, or another first statistic, then the second.
struct Statistics {
  float first[SLOTS], second[SLOTS];
};

__device__ __forceinline__ void statistics(const ReduceParams& p, const Share& mine, float (*room)[256], Statistics& of) {
  accumulate<false>(p, mine, of.first, of.first);
  across_lanes<FIRST>(p, mine.lane, room, of.first);
  if (STATISTIC == MEAN || STATISTIC == STANDARD || STATISTIC == INV_STD)
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) of.first[j] /= p.count;
  if constexpr (SHIFTED) {
    accumulate<true>(p, mine, of.first, of.second);
    across_lanes<SUM>(p, mine.lane, room, of.second);
  }
}

#if SPLIT
#include "row_parts.cuh"
#endif

// Stores the statistic of a row.
__device__ __forceinline__ void store_statistic(const ReduceParams& p, const Share& mine, const Statistics& of) {
  if (mine.lane > 0) return;
  Place at = mine.row;
  at.channel *= MIX ? 1 : VEC;
  float v[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    v[j] = of.first[MIX ? 0 : j];
    if (STATISTIC == L2) v[j] = sqrtf(v[j]);
    if (STATISTIC == LOG_SUM) v[j] = logf(v[j]);
    if (STATISTIC == LOG_SUM_EXP) v[j] += logf(of.second[MIX ? 0 : j]);
    if (STATISTIC == INV_STD) v[j] = rsqrtf(of.second[MIX ? 0 : j] / p.count + p.epsilon);
    if (MIX ? j > 0 : at.channel + j >= p.c) v[j] = 0.f;  // padding
  }
  store_vec(p.y + p.out.at(at), v, p.nonfinite);
}

// The second statistic as `normalized` takes it.
__device__ __forceinline__ float divisor(const ReduceParams& p, float second) {
  if (STATISTIC == STANDARD) return rsqrtf(second / p.count + p.epsilon);
  return STATISTIC == SOFTMAX ? 1.f / second : logf(second);
}
__device__ __forceinline__ float normalized(float x, float first, float second) {
  if (STATISTIC == STANDARD) return (x - first) * second;
  return STATISTIC == SOFTMAX ? __expf(x - first) * second : x - first - second;
}

// By the vectors of the place, all of whose values are on their way before the first is needed; of padding, by others.
__device__ __forceinline__ void scale_and_shift(const ReduceParams& p, Place at, float (&x)[VEC]) {
  const int last = p.c - 1 - at.channel;  // of these VEC channels, below 0 where all are padding
  if (last < 0) at.channel = 0;
  const long long i = p.affine.at(at);
  float scale[VEC], bias[VEC];
#pragma unroll
  for (int j = 0; j < VEC; ++j) {
    const int k = j <= last ? j * p.per_vector : 0;
    scale[j] = p.scale[i + k], bias[j] = p.bias[i + k];
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) x[j] = x[j] * scale[j] + bias[j];
}

// Stores the thread's elements of a row, normalized.
__device__ __forceinline__ void store_normalized(const ReduceParams& p, const Share& mine, Statistics& of) {
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) of.second[j] = divisor(p, of.second[j]);
  for (unsigned first = mine.first; first < p.elements; first += AHEAD * mine.step) {
    Ahead ahead;
    ahead.load(p, mine, first);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      if (first + k * mine.step >= p.elements) break;
      const Place& at = ahead.at[k];
      float(&x)[VEC] = ahead.x[k];
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[j] = normalized(x[j], of.first[MIX ? 0 : j], of.second[MIX ? 0 : j]);
      if (STATISTIC == STANDARD && p.scale) scale_and_shift(p, at, x);
#pragma unroll
      for (int j = 0; j < VEC; ++j) x[j] = at.channel + j < p.c ? x[j] : 0.f;  // padding
#if SOURCES
      run_chain(p, at, p.c, x);
#endif
      store_vec(p.y + p.out.at(at), x, p.nonfinite);
    }
  }
}

#if HELD
#include "held.cuh"
#endif

// Two blocks of an SM at least: of itself the compiler aims at more, and spills what the groups of eight channels need.
// Rows in registers: as many blocks as those leave room for.
constexpr int BLOCKS = !HELD ? (SPLIT == 2 ? 2 : 1) : EARLY || SOURCES ? 2 : HELD > 3 || ADDED ? 3 : HELD > 2 ? 4 : 5;

extern "C" __global__ void __launch_bounds__(256, BLOCKS) reduce(const __grid_constant__ ReduceParams p) {
  release_next_launch();
#if HELD
  reduce_held(p);
#else
  __shared__ float room[SLOTS + (SPLIT > 0)][256];
  Statistics of;
#if SPLIT
  __shared__ unsigned ticket;
  wait_for_previous_launch();
  if (threadIdx.x == 0) ticket = atomicAdd(p.counters, 1u);
  __syncthreads();
  const unsigned all = gridDim.x / 2, turn = ticket % all;  // parts of all rows, by two blocks each
  const Share mine = share_of(p, turn / p.parts, turn % p.parts, p.parts);
  if (ticket < all) return leave_part(p, mine, turn % p.parts, room);
  wait_for_parts(p, all);
  join_parts(p, mine, room, of);
#else
  const Share mine = share_of(p, blockIdx.x, 0, 1);
  wait_for_previous_launch();
  statistics(p, mine, room, of);
#endif
  if (!mine.works) return;
  if constexpr (NORMALIZES)
    store_normalized(p, mine, of);
  else
    store_statistic(p, mine, of);
#endif
}
