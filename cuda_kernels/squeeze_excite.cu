// squeeze_excite: global average, two fully connected layers with their activations, in one launch or two; the scale of
// squeeze-excite.
//
//   x [image][pixels][C]  ->  mean [C]  ->  act1(w1 mean + b1) [MID]  ->  act2(w2 hidden + b2) [K]  ->  y [image][K]
//        a block takes `chunks` of 32 channels of `run` pixels        |   join   |   all of K, or its part
//
// The trick: the first layer is linear, so a block multiplies w1 with its own share of the pixels, and only MID sums per block
// meet: many blocks read x and w1. What takes time is latency, and fetching instructions that run once. So tensor cores do
// both layers, whose instructions are few:
//
//   first    16 hidden values x 32 channels of w1 times 32 channels x 8 pixels; one sum for all pixels, whose 8 columns are
//            added at the end. Where hidden values or pixels are many, SUMMED: each lane adds its pixels up before, in FP32.
//   second   16 channels x 32 hidden values of w2 times a matrix of 4 columns, whose sum is a hidden value in full: FP16 and
//            what that leaves, of a small one or, scaled, of one that is too large for FP16.
//
// Within 32 channels the order does not matter where it is one of both factors: a lane loads 16 bytes of each.
//
// Sums are added in the order of warps, then of blocks, so that the bits are the same in whatever order these run:
//
//   one block per image   nothing meets
//   CLUSTER > 1           an image's blocks are a cluster: they send each other their sums into shared memory, and each
//                         computes its part of the second layer
//   PARTIAL               in memory: whoever arrives last at an image (counted in one counter per image, which it sets back
//                         to zero for the next launch) goes through the second layer alone; nobody waits for anybody
//   PARTIAL, LAYER 1, 2   in memory, and the second layer is a launch of its own, whose blocks each compute their part of it
//
// SCALED: in the second of two launches, whose first one was the convolution ahead (include/hidden_share.cuh), a block has `each`
// times 16 channels of `run` pixels, which it multiplies by their scale where they lie.
//
// Where hidden values are many, more blocks of a first layer apart read the same pixels, each for some hidden values, and
// several warps of a second one share 16 channels of y. Warps that have no pixels of their own share hidden values, too.
//
// Weights are prefetched before the launch may read x, and the first ones of a layer are in registers before its inputs are.
//
// Compile-time: AHEAD, the groups of 8 pixels that a warp has in flight; CLUSTER, PARTIAL, SUMMED; LAYER, 0: both; SCALED, the
// block's warps; ACT1, ACT2 and, behind the multiplication, ACT3, Acts without a slope. w1 is [MID to whole 16][C to whole 32], w2
// is [K to whole 16][MID to whole 32], with zeros, in tiles of 16 x 32.
#include "activation_pairs.cuh"
#include "bulk.cuh"
#include "tensor.cuh"

#ifndef SCALED
#define SCALED 0
#endif

constexpr int WARPS = SCALED ? SCALED : 8, THREADS = 32 * WARPS;
constexpr int RESIDENT = SCALED ? 24 / WARPS : AHEAD > 7 ? 1 : PARTIAL ? 3 : 2;  // blocks of an SM that registers are for
constexpr int CHAINS = LAYER == 1 ? 1 : 2;                 // sums of a row, over groups in turn: registers leave room for one
constexpr int HELD = 3;                                    // groups of 32 hidden values of the second layer's weights
constexpr bool SHARED_ROWS = !PARTIAL || LAYER == 1;       // warps may share hidden values: registers leave no room for it else
constexpr int JOINED = SCALED ? 16 : 8;                    // blocks whose shares a thread has in flight
constexpr int LINE = 64;                                   // halfs
constexpr float LARGE = 32768.f, DOWN = 0x1p-28f, UP = 0x1p28f;  // hidden values from LARGE on are scaled
#if CLUSTER > 1
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

// Divisors of small numbers: i / d is i * inverse >> 22 for i < 1024 and d <= 1024.
struct Divisor {
  int d;
  u32 inverse;
  __device__ __forceinline__ int quotient(u32 i) const { return i * inverse >> 22; }
};

struct SqueezeExciteParams {
  u32* nonfinite;
  const __half* x;
  const __half* w1;
  const __half* w2;
  const float* b1;
  const float* b2;
  __half* y;
#if PARTIAL
  float* partial;  // [image][block][mid]
  u32* counters;   // [image], zero before and after; LAYER 0 alone
#endif
  View in, out;
  int c, pixels, mid, k;   // c: whole vectors
  int deep, wide, k_wide;  // columns of w1 and of w2: channels and hidden values, to whole 32; channels of y with padding
  Divisor runs;            // of `run` pixels, whole eights, make an image
  int blocks;              // of an image, in the first layer; those that share hidden values are one
  int run, chunks;         // chunks of 32 channels that a block has
  int log_near, log_rows;  // of the warps that share a chunk's pixels, and of those that share its hidden values
  int log_apart;           // LAYER 1: of the blocks that share the hidden values
  int log_deep;            // LAYER 2: of the warps that share the hidden values
  int log_mid;             // of the hidden values that are joined at a time, 32 or more
  int each;                // 16 channels of y, so many times, that a block has
  float down, scale, alpha1, beta1, alpha2, beta2;
#if SCALED
  Divisor vectors;  // of 8 channels, of a block's pixel
  float alpha3, beta3;
#endif
};

// The weights, which no launch writes, into L2.
__device__ __forceinline__ void fetch_weights(const SqueezeExciteParams& p) {
  const int me = (blockIdx.x * THREADS + threadIdx.x) * LINE, all = gridDim.x * THREADS * LINE;
  const int size1 = (p.mid + 15) / 16 * 16 * p.deep, size2 = (p.k_wide + 15) / 16 * 16 * p.wide;
#pragma unroll 1
  for (int i = me; i < max(size1, size2); i += all) {
    if (i < size1) prefetch_l2(p.w1 + i);
    if (i < size2) prefetch_l2(p.w2 + i);
    if (i < p.wide * 2) prefetch_l2(p.b1 + i / 2);
    if (i < p.k_wide * 2) prefetch_l2(p.b2 + i / 2);
  }
}

// A factor of two products, 16 rows x 32 columns of weights: of rows g and g + 8 a lane's columns 8t..8t+3, then 8t+4..8t+7, as
// mma reads them. `tile`: of all, row after row.
struct Weights {
  uint4 part[2];
};
__device__ __forceinline__ Weights load_weights(const __half* w, int tile) {
  const __half* at = w + tile * 512 + threadIdx.x % 32 * 8;
  return {{ldg_128(at), ldg_128(at + 256)}};
}
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Weights& w, const uint4& x) {
  mma_16816(sum[0], w.part[0], x.x, x.y);
  mma_16816(sum[1], w.part[1], x.z, x.w);
}
// Lane t = 0 gets the sum of columns 0, 1 and `scale` times that of 2, 3 of row g, lane 1 that of row g + 8; lanes 2 and 3 the
// same of columns 4 to 7.
__device__ __forceinline__ float gather(const float (&sum)[2][4], float scale) {
  const bool odd = threadIdx.x & 1;
  const float low = (sum[0][0] + sum[1][0]) + (sum[0][1] + sum[1][1]), high = (sum[0][2] + sum[1][2]) + (sum[0][3] + sum[1][3]);
  const float got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
  return odd ? got + scale * high : low + scale * got;
}

// Where a warp is in its share of the block's pixels and channels, and these channels' weights for the first hidden values.
struct First {
  int tile, end_tile, from, pixel, end;  // of 32 channels, of all; pixels
  int turn, step;                        // pixels between two groups of the warp, and halfs
  int row;                               // the warp's first 16 hidden values
  const __half* x;
  bool whole;  // the lane's channels are there
  Weights weights;
};
__device__ __forceinline__ void load_row(const SqueezeExciteParams& p, int row, First& f) {
  if (row < p.mid) f.weights = load_weights(p.w1, row / 16 * (p.deep / 32) + f.tile);
}
__device__ __forceinline__ void begin_tile(const SqueezeExciteParams& p, First& f) {
  const int channel = f.tile * 32 + threadIdx.x % 4 * 8;
  f.pixel = f.from, f.whole = channel < p.c;
  f.x = p.x + p.in.at(blockIdx.y, channel, f.from + threadIdx.x % 32 / 4);
}
__device__ __forceinline__ void prepare_first(const SqueezeExciteParams& p, int slice, int run, int part, First& f) {
  const int log_rows = SHARED_ROWS ? p.log_rows : 0, warp = threadIdx.x / 32, near = warp >> log_rows;
  f.tile = slice * p.chunks + (near >> p.log_near), f.end_tile = min((slice + 1) * p.chunks, p.deep / 32);
  f.from = run * p.run + (near & ((1 << p.log_near) - 1)) * 8, f.end = min((run + 1) * p.run, p.pixels);
  f.turn = 8 << p.log_near, f.step = f.turn * p.in.pixel;
  f.row = (part << log_rows | (warp & ((1 << log_rows) - 1))) * 16;
  begin_tile(p, f);
  if (f.tile < f.end_tile) load_row(p, f.row, f);
}
__device__ __forceinline__ void load_pixels(const First& f, uint4 (&x)[AHEAD]) {
  const int pixel = f.pixel + threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) x[i] = ldg_128_if(f.whole && pixel + f.turn * i < f.end, f.x + i * f.step);
}

#if SUMMED
// The lane's channels added up over its pixels; then as FP16 and what that leaves, times `down`, so that FP16 holds the sum.
struct Pixels {
  float sum[8];
  __device__ __forceinline__ void add(const uint4 (&x)[AHEAD]) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      float v[8];
      unpack(x[i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += v[j];
    }
  }
  __device__ __forceinline__ void split(float down, uint4 (&parts)[2]) {
    float high[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] *= down;
    parts[0] = pack(sum);
    unpack(parts[0], high);
#pragma unroll
    for (int j = 0; j < 8; ++j) high[j] = fabsf(high[j]) <= 65504.f ? sum[j] - high[j] : 0.f;
    parts[1] = pack(high);
  }
};
#endif

// What 32 channels give to each of the warp's hidden values is added to what is at `to`, the lane's place among 16. x: groups
// of 8 pixels, or the parts of their sum.
template <int GROUPS>
__device__ __forceinline__ void multiply_rows(const SqueezeExciteParams& p, First& f, const uint4 (&x)[GROUPS], u32 to) {
#pragma unroll 1
  for (int row = f.row; row < p.mid;) {
    const Weights now = f.weights;
    const u32 at = to + row * 4;
    row += 16 << (SHARED_ROWS ? p.log_rows + p.log_apart : 0);
    load_row(p, row, f);
    float sum[2][4] = {}, odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < GROUPS; ++i) {
      if (!SUMMED && i % 2 == 0 && f.pixel + f.turn * i >= f.end) break;  // pixels that are not there are zeros
      multiply(i % CHAINS ? odd : sum, now, x[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i / 4][i % 4] += odd[i / 4][i % 4];
    float both = gather(sum, 1.f);
    both += __shfl_xor_sync(0xffffffffu, both, 2);
    if (threadIdx.x % 4 < 2) sts_32(at, __float_as_uint(__uint_as_float(lds_32(at)) + both));
  }
}

// The warp's share. The first loads come straight after the launch before: all they need is there.
__device__ __forceinline__ void first_layer(const SqueezeExciteParams& p, First& f, u32 to) {
  if (f.tile >= f.end_tile || f.from >= f.end) return;
  uint4 x[AHEAD];
  load_pixels(f, x);
#if SUMMED
  Pixels pixels = {};
#endif
#pragma unroll 1
  while (true) {
#if SUMMED
    pixels.add(x);
#else
    multiply_rows(p, f, x, to);
#endif
    f.pixel += f.turn * AHEAD, f.x += f.step * AHEAD;
    if (f.pixel >= f.end) {
#if SUMMED
      uint4 parts[2];
      pixels.split(p.down, parts);
      pixels = {};
      multiply_rows(p, f, parts, to);
#endif
      f.tile += WARPS >> (SHARED_ROWS ? p.log_near + p.log_rows : p.log_near);
      if (f.tile >= f.end_tile) return;
      begin_tile(p, f);
    }
    load_pixels(f, x);
    if (!SUMMED || f.pixel == f.from) load_row(p, f.row, f);
  }
}

#include "squeeze_excite_second.cuh"
#if SCALED
#include "squeeze_excite_scaled.cuh"
#endif

#if PARTIAL && LAYER == 0
// Whether this block is the image's last; then it sees what all of them have written. 9.7.13.5 atom of one thread, as a release
// of all its block has stored and an acquire of what others have: one fence, where __threadfence around it would be two of all.
__device__ __forceinline__ bool arrives_last(u32* counter, u32* ticket) {
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(*ticket) : "l"(counter) : "memory");
  __syncthreads();
  if (*ticket != gridDim.x - 1) return false;
  if (threadIdx.x == 0) *counter = 0;
  return true;
}
#endif

#if PARTIAL
__device__ __forceinline__ float* partial_of(const SqueezeExciteParams& p) {
  return p.partial + static_cast<long long>(blockIdx.y) * p.blocks * p.mid;
}

// The hidden values: of every `parts`-th block a thread adds the shares, then the first ones add those sums.
__device__ __forceinline__ void join(const SqueezeExciteParams& p, float* shared, __half* hidden) {
  const float* from = partial_of(p);
  const int width = 1 << p.log_mid, part = threadIdx.x >> p.log_mid, parts = THREADS >> p.log_mid;
  const int step = parts * p.mid;
#pragma unroll 1
  for (int first = 0; first < p.wide; first += width) {
    const int m = first + (threadIdx.x & (width - 1));
    const float bias = m < p.mid ? p.b1[m] : 0.f;
    const float* at = from + part * p.mid + m;
    float sum = 0.f;
#pragma unroll 1
    for (int left = m < p.mid ? p.blocks - part : 0; left > 0; left -= JOINED * parts, at += JOINED * step) {
      float shares[JOINED];
#pragma unroll
      for (int i = 0; i < JOINED; ++i) shares[i] = i * parts < left ? __ldcg(at + i * step) : 0.f;
#pragma unroll
      for (int i = 0; i < JOINED; ++i) sum += shares[i];
    }
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && m < p.wide) {
#pragma unroll 4
      for (int i = m - first + width; i < THREADS; i += width) sum += shared[i];
      put(hidden, m, m < p.mid ? activate<ACT1>(sum + bias, p.alpha1, p.beta1, 0.f) : 0.f);
    }
    __syncthreads();
  }
}
#endif

// The block's share of hidden value m, from what its warps have.
__device__ __forceinline__ float share(const SqueezeExciteParams& p, const float* rows, int m) {
  float sum = rows[m];
#pragma unroll
  for (int warp = 1; warp < WARPS; ++warp) sum += rows[warp * p.wide + m];
  return sum * p.scale;
}

#if !PARTIAL
// The hidden values, in every block. `barrier`: of a cluster, completed when all its blocks have sent their shares to `sums`.
__device__ __forceinline__ void meet(const SqueezeExciteParams& p, const float* rows, float* sums, u32 barrier, float bias,
                                     __half* hidden) {
#if CLUSTER > 1
  wait_for_cluster();  // all blocks have begun, and their mbarriers are there
#pragma unroll 1
  for (int m = threadIdx.x; m < p.mid; m += THREADS) {
    const float v = share(p, rows, m);
    const u32 to = smem_u32(sums + cluster_rank() * p.wide + m);
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) store_async(to, v, block, barrier);
  }
  mbarrier_wait(barrier, 0);
  __syncwarp();
#endif
#pragma unroll 1
  for (int m = threadIdx.x; m < p.wide; m += THREADS) {
    float v = 0.f;
    if (m < p.mid) {  // what is padded takes no part: an infinite mean gives NaN there
      if (CLUSTER == 1) v = share(p, rows, m);
#pragma unroll
      for (int block = 0; block < (CLUSTER > 1 ? CLUSTER : 0); ++block) v += sums[block * p.wide + m];
      v = activate<ACT1>(v + (m < THREADS ? bias : p.b1[m]), p.alpha1, p.beta1, 0.f);
    }
    put(hidden, m, v);
  }
  __syncthreads();
}
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, RESIDENT)
    squeeze_excite(const __grid_constant__ SqueezeExciteParams p) {
  release_next_launch();
  extern __shared__ __align__(16) float rows[];  // [warp][wide], then [block][wide], then the second layer's factor
  float* sums = rows + WARPS * p.wide;
  __half* hidden = reinterpret_cast<__half*>(sums + CLUSTER * p.wide);
  Second s;
#if LAYER == 2
  prepare_second(p, s);
  wait_for_previous_launch();
#if SCALED
  Scaled own;
  load_scaled(p, own);
#endif
  join(p, rows, hidden);
#else
  const int log_apart = LAYER == 1 ? p.log_apart : 0;
  const int block = blockIdx.x >> log_apart, part = blockIdx.x - (block << log_apart);
  const int slice = p.runs.quotient(block), run = block - slice * p.runs.d, warp = threadIdx.x / 32;
  u32 barrier = 0;
#if CLUSTER > 1
  __shared__ __align__(8) unsigned long long arrived;
  barrier = smem_u32(&arrived);
  if (threadIdx.x == 0) {
    mbarrier_init(barrier, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expecting(barrier, CLUSTER * p.mid * 4);
  }
  __syncwarp();
  arrive_at_cluster();
#endif
  if (blockIdx.y == 0) fetch_weights(p);
  First f;
  prepare_first(p, slice, run, part, f);
#if !PARTIAL
  prepare_second(p, s);
  const float bias = threadIdx.x < p.mid ? p.b1[threadIdx.x] : 0.f;
#endif
#pragma unroll 1
  for (int m = threadIdx.x % 32; m < p.wide; m += 32) rows[warp * p.wide + m] = 0.f;
  const u32 mine = smem_u32(rows + warp * p.wide + threadIdx.x % 2 * 8 + threadIdx.x % 32 / 4);
  __syncwarp();
  wait_for_previous_launch();
  first_layer(p, f, mine);
  __syncthreads();
#if PARTIAL
  float* partial = partial_of(p);
#pragma unroll 1
  for (int m = threadIdx.x; m < p.mid; m += THREADS)
    if (LAYER == 0 || (m / 16 >> p.log_rows & ((1 << log_apart) - 1)) == part)
      partial[block * p.mid + m] = share(p, rows, m);
#if LAYER == 1
  return;
#else
  __shared__ u32 ticket;
  if (!arrives_last(p.counters + blockIdx.y, &ticket)) return;
  prepare_second(p, s);
  join(p, rows, hidden);
#endif
#else
  meet(p, rows, sums, barrier, bias, hidden);
#endif
#endif
  second_layer(p, s, hidden, rows);
#if SCALED
  store_scaled(p, own, rows + WARPS * 16);
#endif
}
