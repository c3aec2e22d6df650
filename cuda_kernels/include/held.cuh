// reduce.cu's rows of vectors that lie one behind the other, in registers from the first statistic to the result. Lane l of a
// row has its vectors l, l + LANES, ...: a row of 96 channels is 12 vectors, three in each of 4 lanes, eight rows in a warp.
#pragma once

// A lane's vectors: the first one's place; how many of the row's are real, or padding that is written, from that one on.
struct Vectors {
  Place first;
  int real, inside;
  // Whether vector i of the lane's is one. Of rows that all lanes hold the same of, each is.
  __device__ __forceinline__ bool has(int i) const { return WHOLE || i * LANES < real; }
};

__device__ __forceinline__ Vectors vectors_of(const ReduceParams& p, const Share& mine) {
  const int first = mine.row.channel * p.element.channel + mine.lane;
  Vectors of = {mine.row, min(p.c / VEC - first, p.elements - mine.lane), p.elements - mine.lane};
  of.first.channel = first * VEC;
  if (!mine.works) of.real = 0;
  return of;
}

// Vector i of a lane's where its channels lie one behind the other. A row that is none reads row 0.
__device__ __forceinline__ uint4 load_held(const __half* first, const Vectors& of, int i) {
  return WHOLE ? ldg_128(first + i * LANES * VEC) : ldg_128_if(of.has(i), first + i * LANES * VEC);
}

// The lane's part of a row, and zeros where there is none.
__device__ __forceinline__ void hold(const ReduceParams& p, const Vectors& of, float (&x)[HELD][VEC]) {
  const __half* first = static_cast<const X*>(p.x.at) + p.x.spread.at(of.first);
  uint4 bits[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) bits[i] = load_held(first, of, i);
#if ADDED
  const __half* added = static_cast<const __half*>(p.added.at) + p.added.spread.at(of.first);
  uint4 more[HELD];
#pragma unroll
  for (int i = 0; i < HELD; ++i) more[i] = load_held(added, of, i);
#endif
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    unpack(bits[i], x[i]);
#if ADDED
    float y[VEC];
    unpack(more[i], y);
#pragma unroll
    for (int j = 0; j < VEC; ++j) x[i][j] += y[j];
#endif
  }
}

// Scale and bias of a lane's vectors, of those at a time that it has loaded: all of them, or one.
struct Scales {
  float4 four[EARLY ? HELD : 1][4];
  __device__ __forceinline__ void load(const ReduceParams& p, const Vectors& of, int i) {
    if (!SCALED || !of.has(i)) return;
    const long long at = p.affine.at(of.first) + i * LANES * VEC;
#pragma unroll
    for (int k = 0; k < 4; ++k) four[EARLY ? i : 0][k] = reinterpret_cast<const float4*>((k < 2 ? p.scale : p.bias) + at)[k % 2];
  }
  __device__ __forceinline__ float get(int i, int k) const {
    const float4& v = four[EARLY ? i : 0][k / 4];
    return k % 4 == 0 ? v.x : k % 4 == 1 ? v.y : k % 4 == 2 ? v.z : v.w;
  }
};

// A statistic of the row, in each of its lanes: of each vector, then of the lane's, then of the lanes'.
template <bool SECOND>
__device__ __forceinline__ float of_row(const Vectors& of, const float (&x)[HELD][VEC], float first) {
  constexpr int MERGE = SECOND ? SUM : FIRST;
  float result = neutral<MERGE>();
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    float of_vector = neutral<MERGE>();
#pragma unroll
    for (int j = 0; j < VEC; ++j) of_vector = merge<MERGE>(of_vector, SECOND ? term(x[i][j], first) : term(x[i][j]));
    if (of.has(i)) result = merge<MERGE>(result, of_vector);
  }
#pragma unroll
  for (int half = min(LANES, 32) / 2; half > 0; half /= 2)
    result = merge<MERGE>(result, __shfl_xor_sync(0xffffffffu, result, half));
#if LANES > 32
  __shared__ float room[256 / 32];
  const int warp = threadIdx.x / 32;
  room[warp] = result;  // the same of all lanes of a warp
  __syncthreads();
#pragma unroll
  for (int half = LANES / 64; half > 0; half /= 2) {
    const float other = room[warp ^ half];
    __syncthreads();
    result = merge<MERGE>(result, other);
    room[warp] = result;
    __syncthreads();
  }
#endif
  return result;
}

// Stores the thread's vectors, normalized.
__device__ __forceinline__ void store_held(const ReduceParams& p, const Vectors& of, float (&x)[HELD][VEC], float first,
                                           float second, Scales& scales) {
  Y* const y = p.y + p.out.at(of.first);
  Watch watch;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    if (!EARLY) scales.load(p, of, i);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      x[i][j] = normalized(x[i][j], first, second);
      if (SCALED) x[i][j] = x[i][j] * scales.get(i, j) + scales.get(i, VEC + j);
      if (!of.has(i)) x[i][j] = 0.f;  // padding
    }
#if SOURCES
    Place at = of.first;
    at.channel += i * LANES * VEC;
    run_chain(p, at, p.c, x[i]);
#endif
    if (!WHOLE && i * LANES >= of.inside) continue;
    const uint4 bits = pack(x[i]);
    stg_128(y + i * LANES * VEC, bits);
    watch.see(bits);
  }
  watch.report(p.nonfinite);
}

__device__ __forceinline__ void reduce_held(const ReduceParams& p) {
  const Share mine = share_of(p, blockIdx.x, 0, 1);
  const Vectors of = vectors_of(p, mine);
  Scales scales;
#pragma unroll
  for (int i = 0; i < HELD; ++i)
    if (EARLY) scales.load(p, of, i);
  wait_for_previous_launch();
  float x[HELD][VEC];
  hold(p, of, x);
  Statistics result = {};
  float& first = result.first[0];
  first = of_row<false>(of, x, 0.f);
  if (STATISTIC == MEAN || STATISTIC == STANDARD || STATISTIC == INV_STD) first /= p.count;
  if (SHIFTED) result.second[0] = of_row<true>(of, x, first);
  if (!mine.works) return;
  if constexpr (NORMALIZES)
    store_held(p, of, x, first, divisor(p, result.second[0]), scales);
  else
    store_statistic(p, mine, result);
}
