// reduce: one statistic of every row of a tensor (sum, maximum, norm, ...), or the tensor normalised by two of them (softmax,
// instance, group and layer normalization). A row is any set of the axes n, c, h, w, with channels possibly in groups.
//
//     lanes:      0 1 2 3 0 1 2 3 ...                  each lane sums (or takes the maximum of) every LANES-th element,
//     element:    x x x x x x x x x x x   row b        then a tree over shared memory joins the lanes in a fixed order:
//     element:    x x x x x x x x x x x   row b + 1    [0 1 2 3] -> [0+2 1+3] -> [0+2+1+3]
//
// A thread reads VEC neighbouring channels at a time. MIX 1: they belong to one row (channels are reduced), so they are
// joined first; MIX 0: they belong to VEC rows, which the thread carries side by side.
//
// The trick: two passes of plain FP32 sums, of x and then of what the first result shifts (exp(x - max), (x - mean)^2), instead
// of one pass of cancelling sums; the row stays in L1 or L2 between them.
//
// Compile-time: KIND as below, the order of tactics/problems/reductions.py; VEC (8 or 1); MIX; C_FAST: channels vary fastest in the
// order of elements (else pixels do), as they lie in memory; X_F32, Y_F32 (include/types.cuh).
#include "broadcast.cuh"
#include "types.cuh"

enum { SUM, MEAN, MAX, MIN, PROD, L1, L2, SUM_SQUARE, LOG_SUM, LOG_SUM_EXP, INV_STD, SOFTMAX, LOG_SOFTMAX, STANDARD };
static_assert(VEC == 8 || VEC == 1, "8 halfs in one access, or 1");
constexpr bool SHIFTED = KIND >= LOG_SUM_EXP, NORMALIZES = KIND >= SOFTMAX;
constexpr int FIRST = KIND == MAX || KIND == LOG_SUM_EXP || KIND == SOFTMAX || KIND == LOG_SOFTMAX ? MAX
                      : KIND == MIN || KIND == PROD                                                ? KIND
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
  return KIND == L1 ? fabsf(x) : KIND == L2 || KIND == SUM_SQUARE ? x * x : x;
}
__device__ __forceinline__ float term(float x, float first) {
  return KIND == STANDARD || KIND == INV_STD ? (x - first) * (x - first) : __expf(x - first);
}

__device__ __forceinline__ Place taken_apart(unsigned i, const Place& size) {
  Place at;
  if (C_FAST) at.channel = i % size.channel, i /= size.channel;
  at.column = i % size.column, i /= size.column;
  at.row = i % size.row, i /= size.row;
  if (!C_FAST) at.channel = i % size.channel, i /= size.channel;
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

// The statistic of each of the thread's VEC rows over all lanes, in every lane; with MIX all of them are the same row's.
template <bool SECOND>
__device__ __forceinline__ void statistic(const ReduceParams& p, const Place& row, bool works, int lane, const float (&first)[VEC],
                                          float (&result)[VEC]) {
  constexpr int MERGE = SECOND ? SUM : FIRST, SLOTS = MIX ? 1 : VEC;
  __shared__ float part[SLOTS][256];
#pragma unroll
  for (int j = 0; j < VEC; ++j) result[j] = neutral<MERGE>();
  for (unsigned e = lane; works && e < p.elements; e += p.lanes) {
    const Place at = place(p, row, e);
    if (at.channel >= p.c) continue;  // padding
    float x[VEC];
    load_vec(static_cast<const X*>(p.x.at) + p.x.spread.at(at), x);
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      if (at.channel + j < p.c) result[j] = merge<MERGE>(result[j], SECOND ? term(x[j], first[j]) : term(x[j]));
  }
  if (MIX)
#pragma unroll
    for (int j = 1; j < VEC; ++j) result[0] = merge<MERGE>(result[0], result[j]);
  const int me = threadIdx.x;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) part[j][me] = result[j];
  __syncthreads();
  for (int half = p.lanes / 2; half > 0; half /= 2) {
    if (lane < half)
#pragma unroll
      for (int j = 0; j < SLOTS; ++j) part[j][me] = merge<MERGE>(part[j][me], part[j][me + half * p.lane_step]);
    __syncthreads();
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) result[j] = part[MIX ? 0 : j][me - lane * p.lane_step];
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(256) reduce(const __grid_constant__ ReduceParams p) {
  release_next_launch();
  const int per_block = 256 / p.lanes;
  const int lane = p.lane_step == 1 ? threadIdx.x % p.lanes : threadIdx.x / per_block;
  const int mine = blockIdx.x * per_block + (p.lane_step == 1 ? threadIdx.x / p.lanes : threadIdx.x % per_block);
  const bool works = mine < p.rows;
  const Place row = taken_apart(works ? mine : 0, p.kept);

  wait_for_previous_launch();
  float first[VEC], second[VEC] = {};
  statistic<false>(p, row, works, lane, second, first);
  if (KIND == MEAN || KIND == STANDARD || KIND == INV_STD)
#pragma unroll
    for (int j = 0; j < VEC; ++j) first[j] /= p.count;
  if constexpr (SHIFTED) statistic<true>(p, row, works, lane, first, second);
  if (!works) return;

  if constexpr (!NORMALIZES) {
    if (lane > 0) return;
    Place at = row;
    at.channel *= MIX ? 1 : VEC;
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      float v = first[j];
      if (KIND == L2) v = sqrtf(v);
      if (KIND == LOG_SUM) v = logf(v);
      if (KIND == LOG_SUM_EXP) v += logf(second[j]);
      if (KIND == INV_STD) v = rsqrtf(second[j] / p.count + p.epsilon);
      first[j] = (MIX ? j == 0 : at.channel + j < p.c) ? v : 0.f;  // padding
    }
    store_vec(p.y + p.out.at(at), first, p.nonfinite);
  } else {
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      if (KIND == SOFTMAX) second[j] = 1.f / second[j];
      if (KIND == LOG_SOFTMAX) second[j] = logf(second[j]);
      if (KIND == STANDARD) second[j] = rsqrtf(second[j] / p.count + p.epsilon);
    }
    for (unsigned e = lane; e < p.elements; e += p.lanes) {
      const Place at = place(p, row, e);
      float x[VEC] = {};
      if (at.channel < p.c) load_vec(static_cast<const X*>(p.x.at) + p.x.spread.at(at), x);
      const long long i = p.affine.at(at);
#pragma unroll
      for (int j = 0; j < VEC; ++j) {
        if (at.channel + j >= p.c) {
          x[j] = 0.f;  // padding
          continue;
        }
        if (KIND == SOFTMAX) x[j] = __expf(x[j] - first[j]) * second[j];
        if (KIND == LOG_SOFTMAX) x[j] = x[j] - first[j] - second[j];
        if (KIND == STANDARD) x[j] = (x[j] - first[j]) * second[j];
        if (KIND == STANDARD && p.scale) x[j] = x[j] * p.scale[i + j * p.per_vector] + p.bias[i + j * p.per_vector];
      }
      store_vec(p.y + p.out.at(at), x, p.nonfinite);
    }
  }
}
