// squeeze_excite: global average, two fully connected layers with their activations, one launch; the scale of squeeze-excite.
//
//   x [image][pixels][C]  ->  mean [C]  ->  act1(w1 mean + b1) [MID]  ->  act2(w2 hidden + b2) [K]  ->  y [image][K]
//        a block takes `vecs` vectors of 8 channels of `run` pixels   |   join   |   all of K, or its part
//
// The trick: the first layer is linear, so a block multiplies w1 with the average of its own share, and only MID sums per block
// meet: many blocks read x and w1. They are added in the order of blocks, so that the bits are the same in whatever order these
// run:
//
//   one block per image   nothing meets
//   CLUSTER > 1           an image's blocks are a cluster: they read each other's sums in shared memory, and each computes its
//                         part of the second layer
//   TICKETS               in memory: whoever arrives last at an image (counted in one counter per image, which it sets back
//                         to zero for the next launch) goes through the second layer alone; nobody waits for anybody
//
// What takes time is latency, load behind load, and fetching instructions that run once. So weights are prefetched before the
// launch may read x, those of a layer are in registers before its inputs are, and loops are unrolled as far as loads need it.
//
// Compile-time: CLUSTER, TICKETS; ACT1, ACT2, Acts without a slope. w1 is [MID][c8 * 8], w2 is [MID][k8 * 8]: rows of whole
// vectors.
#include "activation.cuh"
#include "bulk.cuh"
#include "tensor.cuh"

constexpr int THREADS = 256, MAX_HIDDEN = 1024;  // MAX_HIDDEN: values of MID
constexpr int ROW = THREADS + 32;                // of the threads' sums of a channel, with zeros behind them
constexpr int AHEAD = 6;                         // vectors of pixels that a thread has in flight
constexpr int HELD = 4;                          // and of weights
constexpr int MOST_PARTS = 32;                   // threads that share a vector of the second layer
constexpr int LINE = 64;                         // halfs
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
#if TICKETS
  float* partial;  // [image][block][mid]
  u32* counters;   // [image], zero before and after
#endif
  View in, out;
  int c8, pixels, mid, k, k8;  // c8, k8: vectors of 8 channels
  Divisor vecs, runs;          // vectors of a block, at most THREADS; runs of `run` pixels make an image
  int run, lanes, fold;        // lanes: threads of a vector; fold: how many sums of a channel are left first, whole vecs
  int log_near, log_mid;       // threads of a row of w1, at most a warp; of what is joined at a time, at least a warp
  Divisor width;               // vectors of the second layer that a block has in its threads at a time
  int parts, each;             // threads of such a vector; vectors of a block
  float scale, alpha1, beta1, alpha2, beta2;
};

// The weights, which no launch writes, into L2.
__device__ __forceinline__ void fetch_weights(const SqueezeExciteParams& p) {
  const int me = blockIdx.x * THREADS + threadIdx.x, all = gridDim.x * THREADS;
#pragma unroll 1
  for (int i = me * LINE; i < p.mid * max(p.c8, p.k8) * 8; i += all * LINE) {
    if (i < p.mid * p.c8 * 8) prefetch_l2(p.w1 + i);
    if (i < p.mid * p.k8 * 8) prefetch_l2(p.w2 + i);
    if (i < p.mid * 2) prefetch_l2(p.b1 + i / 2);
    if (i < p.k8 * 16) prefetch_l2(p.b2 + i / 2);
  }
}

// The thread's part of the sums: every lanes-th pixel of one vector.
__device__ __forceinline__ void add_pixels(const SqueezeExciteParams& p, int run, int lane, int group, float (&v)[8]) {
  if (group >= p.c8 || lane >= p.lanes) return;
  const int to = min((run + 1) * p.run, p.pixels), step = p.lanes * p.in.pixel;
  const __half* at = p.x + p.in.at(blockIdx.y, group * 8, run * p.run + lane);
#pragma unroll 1
  for (int first = run * p.run + lane; first < to; first += p.lanes * AHEAD) {
    uint4 bits[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, at += step) bits[i] = ldg_128_if(first + p.lanes * i < to, at);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      float x[8];
      unpack(bits[i], x);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] += x[j];
    }
  }
}

// The block's share of the averages, in shared[j * ROW + vec], from its threads' sums, which lie there by thread. A warp does
// those of one j: a lane adds every fold-th value, then every vecs-th of what is left.
__device__ __forceinline__ void average(const SqueezeExciteParams& p, float* shared) {
  float *row = shared + threadIdx.x / 32 * ROW, scale = p.scale;
  int used = p.lanes * p.vecs.d;
#pragma unroll 1
  for (int left = p.fold;; left = p.vecs.d) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < left; i += 32) {
      float sum = 0.f;
#pragma unroll 4
      for (int t = 0; t < used; t += left) sum += row[t + i];
      row[i] = sum * scale;
    }
    if (left == p.vecs.d) break;
    used = left, scale = 1.f;
    __syncwarp();
  }
  __syncthreads();
}

// Of HELD rows of w, `rows` apart from row `m` on, vector `vec` of `wide`; zeros where not `ok`.
__device__ __forceinline__ void load_rows(const __half* w, int wide, int vec, int m, int rows, int mid, bool ok,
                                          uint4 (&bits)[HELD]) {
  const __half* at = w + (m * wide + vec) * 8;
#pragma unroll
  for (int i = 0; i < HELD; ++i, at += rows * wide * 8) bits[i] = ldg_128_if(ok && m + rows * i < mid, at);
}

// What the block's share gives to each hidden value. Zeros come behind them, to whole vectors.
__device__ __forceinline__ void first_layer(const SqueezeExciteParams& p, int slice, uint4 (&bits)[HELD], const float* mean,
                                            float* to) {
  const int near = threadIdx.x & ((1 << p.log_near) - 1), mine = threadIdx.x >> p.log_near, rows = THREADS >> p.log_near;
  const int other = mine - ((threadIdx.x & ~31) >> p.log_near);  // rows of the warp before the thread's
  const int mid = TICKETS ? p.mid : (p.mid + 3) / 4 * 4;
#pragma unroll 1
  for (int first = mine; first - other < mid; first += rows * HELD) {
    float sum[HELD] = {};
#pragma unroll 1
    for (int vec = near; vec < p.vecs.d; vec += 1 << p.log_near) {
      const int group = slice * p.vecs.d + vec;
      if (first > mine || vec > near) load_rows(p.w1, p.c8, group, first, rows, p.mid, group < p.c8, bits);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (first - other + rows * i >= mid) break;
        float w[8];
        unpack(bits[i], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i] += w[j] * mean[j * ROW + vec];
      }
    }
#pragma unroll 1
    for (int d = 1 << p.log_near >> 1; d > 0; d >>= 1)
#pragma unroll
      for (int i = 0; i < HELD; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], d);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const int m = first + rows * i;
      if (near == 0 && m < mid) to[m] = m < p.mid ? sum[i] : 0.f;
    }
  }
}

// The channel that is i-th in shared memory, where the first halves of `width` vectors come before their second ones.
__device__ __forceinline__ int channel_of(int width, int i) {
  const int second = i >= width * 4;
  i -= second * width * 4;
  return i / 4 * 8 + second * 4 + i % 4;
}

// What a thread has of the second layer before it knows the hidden values.
struct Second {
  int from, to, part, mine;  // vectors of the block; the thread's rows, and vector of `width`
  float bias;
  uint4 bits[HELD];
};
__device__ __forceinline__ void prepare_second(const SqueezeExciteParams& p, Second& s) {
  s.part = p.width.quotient(threadIdx.x), s.mine = threadIdx.x - s.part * p.width.d;
  s.from = CLUSTER > 1 ? blockIdx.x * p.each : 0, s.to = min(s.from + p.each, p.k8);
  const int k = s.from + s.mine, channel = s.from * 8 + channel_of(p.width.d, threadIdx.x);
  load_rows(p.w2, p.k8, k, s.part, p.parts, p.mid, s.part < p.parts && k < s.to, s.bits);
  s.bias = channel < s.to * 8 ? p.b2[channel] : 0.f;
}

__device__ __forceinline__ void second_layer(const SqueezeExciteParams& p, Second& s, float* shared, const float* hidden) {
  const int width = p.width.d, stride = width * 8 + (width * 28 & 31);  // of parts: without bank conflicts
#pragma unroll 1
  for (int first = s.from; first < s.to; first += width) {
    float v[8] = {};
#pragma unroll 1
    for (int m = s.part; m < p.mid; m += p.parts * HELD) {
      const int k = first + s.mine;
      if (first > s.from || m > s.part) load_rows(p.w2, p.k8, k, m, p.parts, p.mid, s.part < p.parts && k < s.to, s.bits);
#pragma unroll
      for (int i = 0; i < HELD; ++i) {
        if (m + p.parts * i >= p.mid) break;
        float w[8];
        unpack(s.bits[i], w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += w[j] * hidden[m + p.parts * i];
      }
    }
    if (s.part < p.parts) {
      float* to = shared + s.part * stride + s.mine * 4;
      *reinterpret_cast<float4*>(to) = make_float4(v[0], v[1], v[2], v[3]);
      *reinterpret_cast<float4*>(to + width * 4) = make_float4(v[4], v[5], v[6], v[7]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < width * 8; i += THREADS) {
      const int channel = first * 8 + channel_of(width, i);
      if (channel >= s.to * 8) continue;
      float sum = first == s.from && i < THREADS ? s.bias : p.b2[channel];
#pragma unroll 4
      for (int part = 0; part < p.parts; ++part) sum += shared[part * stride + i];
      sum = channel < p.k ? activate<ACT2>(sum, p.alpha2, p.beta2, 0.f) : 0.f;  // padding stays zero
      store_half(p.y + p.out.at(blockIdx.y, channel, 0), sum, p.nonfinite);
    }
    __syncthreads();
  }
}

#if TICKETS
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

// The hidden values: of every `parts`-th block a thread adds the shares, then the first ones add those sums.
__device__ __forceinline__ void join(const SqueezeExciteParams& p, const float* from, float* shared, float* hidden) {
  const int width = 1 << p.log_mid, part = threadIdx.x >> p.log_mid, parts = THREADS >> p.log_mid;
#pragma unroll 1
  for (int first = 0; first < p.mid; first += width) {
    const int m = first + (threadIdx.x & (width - 1));
    const float bias = m < p.mid ? p.b1[m] : 0.f;
    float sum = 0.f;
    if (m < p.mid)
#pragma unroll 8
      for (int block = part; block < gridDim.x; block += parts) sum += __ldcg(from + block * p.mid + m);
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && m < p.mid) {
#pragma unroll 4
      for (int i = 1; i < parts; ++i) sum += shared[i * width + threadIdx.x];
      hidden[m] = activate<ACT1>(sum + bias, p.alpha1, p.beta1, 0.f);
    }
    __syncthreads();
  }
}
#else
// The hidden values, in every block: four per thread. `sums`: what the block itself has, whole vectors.
__device__ __forceinline__ void join(const SqueezeExciteParams& p, const float* sums, float* hidden, Second& s) {
  const int m = threadIdx.x * 4;
#if CLUSTER > 1
  __cluster_barrier_arrive();
#else
  __syncthreads();
#endif
  prepare_second(p, s);
  float v[4] = {};
  if (m < p.mid)
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = m + e < p.mid ? p.b1[m + e] : 0.f;
#if CLUSTER > 1
  __cluster_barrier_wait();
#endif
  if (m < p.mid) {
#pragma unroll
    for (int block = 0; block < CLUSTER; ++block) {
      const u32 at = smem_u32(sums + m);
      const uint4 bits = CLUSTER > 1 ? lds_128_of(at, block) : lds_128(at);
      v[0] += __uint_as_float(bits.x), v[1] += __uint_as_float(bits.y);
      v[2] += __uint_as_float(bits.z), v[3] += __uint_as_float(bits.w);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) v[e] = activate<ACT1>(v[e], p.alpha1, p.beta1, 0.f);
    *reinterpret_cast<float4*>(hidden + m) = make_float4(v[0], v[1], v[2], v[3]);
  }
#if CLUSTER > 1
  __cluster_barrier_arrive();  // it has read what others have
#endif
  __syncthreads();
}
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, 4)
    squeeze_excite(const __grid_constant__ SqueezeExciteParams p) {
  release_next_launch();
  __shared__ __align__(16) float shared[8 * THREADS + MOST_PARTS * 28], hidden[MAX_HIDDEN];
  const int slice = p.runs.quotient(blockIdx.x), run = blockIdx.x - slice * p.runs.d;
  const int lane = p.vecs.quotient(threadIdx.x), vec = threadIdx.x - lane * p.vecs.d;
  if (blockIdx.y == 0) fetch_weights(p);
  shared[threadIdx.x / 32 * ROW + THREADS + threadIdx.x % 32] = 0.f;
  wait_for_previous_launch();

  float v[8] = {};
  add_pixels(p, run, lane, slice * p.vecs.d + vec, v);
#pragma unroll
  for (int j = 0; j < 8; ++j) shared[j * ROW + threadIdx.x] = v[j];
  uint4 bits[HELD];
  const int near = threadIdx.x & ((1 << p.log_near) - 1), group = slice * p.vecs.d + near, rows = THREADS >> p.log_near;
  load_rows(p.w1, p.c8, group, threadIdx.x >> p.log_near, rows, p.mid, near < p.vecs.d && group < p.c8, bits);
  __syncthreads();
  average(p, shared);

  Second s;
#if TICKETS
  __shared__ u32 ticket;
  float* partial = p.partial + static_cast<long long>(blockIdx.y) * gridDim.x * p.mid;
  first_layer(p, slice, bits, shared, partial + blockIdx.x * p.mid);
  if (!arrives_last(p.counters + blockIdx.y, &ticket)) return;
  prepare_second(p, s);
  join(p, partial, shared, hidden);
#else
  __shared__ __align__(16) float sums[MAX_HIDDEN];
  first_layer(p, slice, bits, shared, sums);
  join(p, sums, hidden, s);
#endif
  second_layer(p, s, shared, hidden);
#if CLUSTER > 1
  __cluster_barrier_wait();  // others may still read its sums
#endif
}
