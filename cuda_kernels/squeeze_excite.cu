// squeeze_excite: global average, two fully connected layers with their activations, one launch; the scale of squeeze-excite.
//
//   x [image][pixels][C]  ->  mean [C]  ->  act1(w1 mean + b1) [MID]  ->  act2(w2 hidden + b2) [K]  ->  y [image][K]
//        a block takes `vecs` vectors of 8 channels of `run` pixels   |   an image's last block: the rest
//
// The trick: the first layer is linear, so a block multiplies w1 with the average of its own share, and only MID sums per block
// meet in memory: many blocks read x and w1. Whoever arrives last at an image (counted in one counter per image, which it sets
// back to zero for the next launch) adds those sums in the order of their blocks, so that the bits are the same in every order
// of blocks, and goes through the second layer alone. Nobody waits for anybody.
//
// Compile-time: ACT1, ACT2, Acts without a slope. w1 is [MID][c8 * 8], w2 is [MID][k8 * 8]: rows of whole vectors.
#include "activation.cuh"
#include "tensor.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr int AHEAD = 4;          // loads that a thread has in flight
constexpr int MAX_HIDDEN = 1024;  // values of MID

struct SqueezeExciteParams {
  u32* nonfinite;
  const __half* x;
  const __half* w1;
  const __half* w2;
  const float* b1;
  const float* b2;
  __half* y;
  float* partial;  // [image][block][mid]
  u32* counters;   // [image], zero before and after
  View in, out;
  int c8, pixels, mid, k, k8;  // c8, k8: vectors of 8 channels
  int vecs, run, runs;         // vecs: a power of 2, at most 8; runs of `run` pixels make an image
  float scale, alpha1, beta1, alpha2, beta2;
};

// The block's share of the average, of 8 channels: of those at `group`, the same sums in all threads whose `vec` is the same.
__device__ __forceinline__ void average(const SqueezeExciteParams& p, float* shared, int group, int vec, float (&v)[8]) {
  const int image = blockIdx.y, lane = threadIdx.x / p.vecs, lanes = THREADS / p.vecs, warp = threadIdx.x / 32;
  const int from = blockIdx.x % p.runs * p.run, to = min(from + p.run, p.pixels), width = p.vecs * 8;
  if (group < p.c8)
    for (int first = from + lane; first < to; first += lanes * AHEAD) {
      uint4 bits[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + lanes * i < to) bits[i] = ldg_128(p.x + p.in.at(image, group * 8, first + lanes * i));
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (first + lanes * i >= to) continue;
        float x[8];
        unpack(bits[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += x[j];
      }
    }
  for (int d = p.vecs; d < 32; d *= 2)
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] += __shfl_xor_sync(0xffffffffu, v[j], d);
  if (threadIdx.x % 32 < p.vecs)
#pragma unroll
    for (int j = 0; j < 8; ++j) shared[warp * width + j * p.vecs + vec] = v[j];
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < width)
    for (int i = 0; i < WARPS; ++i) sum += shared[i * width + threadIdx.x];
  __syncthreads();
  if (threadIdx.x < width) shared[threadIdx.x] = sum * p.scale;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) v[j] = shared[j * p.vecs + vec];
}

// What the block's share gives to each hidden value: `vecs` threads per value.
__device__ __forceinline__ void share_of_hidden(const SqueezeExciteParams& p, const float (&v)[8], int group, int vec, float* to) {
  const int lanes = THREADS / p.vecs;
#pragma unroll 2
  for (int first = 0; first < p.mid; first += lanes) {
    const int m = first + threadIdx.x / p.vecs;
    float sum = 0.f;
    if (m < p.mid && group < p.c8) {
      float w[8];
      load_vec(p.w1 + (static_cast<long long>(m) * p.c8 + group) * 8, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += w[j] * v[j];
    }
    for (int d = 1; d < p.vecs; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (vec == 0 && m < p.mid) to[m] = sum;
  }
}

// The weights, which no launch writes: those of the block's share of the first layer, and some of the second's.
__device__ __forceinline__ void fetch_weights(const SqueezeExciteParams& p) {
  constexpr int LINE = 64;  // halfs
  const int first = blockIdx.x / p.runs * p.vecs * 8;
  for (int m = threadIdx.x; m < p.mid; m += THREADS) prefetch_l2(p.w1 + static_cast<long long>(m) * p.c8 * 8 + first);
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < p.mid * p.k8 * 8 / LINE; i += gridDim.x * THREADS)
    prefetch_l2(p.w2 + static_cast<long long>(i) * LINE);
}

// Whether this block is the image's last; then it sees what all of them have written.
__device__ __forceinline__ bool arrives_last(u32* counter, u32* ticket) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *ticket = atomicAdd(counter, 1u);
  __syncthreads();
  if (*ticket != gridDim.x - 1) return false;
  __threadfence();
  if (threadIdx.x == 0) *counter = 0;
  return true;
}

// The hidden values: of every `parts`-th block a thread adds the shares, then the first ones add those sums.
__device__ __forceinline__ void sum_shares(const SqueezeExciteParams& p, const float* from, float* shared, float* hidden) {
  const int width = min((p.mid + 31) / 32 * 32, THREADS), parts = THREADS / width, part = threadIdx.x / width;
  for (int first = 0; first < p.mid; first += width) {
    const int m = first + threadIdx.x % width;
    float sum = 0.f;
    if (part < parts && m < p.mid)
#pragma unroll 8
      for (int block = part; block < gridDim.x; block += parts) sum += __ldcg(from + block * p.mid + m);
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (part == 0 && m < p.mid) {
      for (int i = 1; i < parts; ++i) sum += shared[i * width + threadIdx.x];
      hidden[m] = activate<ACT1>(sum + p.b1[m], p.alpha1, p.beta1, 0.f);
    }
    __syncthreads();
  }
}

// The second layer: 8 outputs per thread, of every `parts`-th hidden value; then the first threads add those sums.
__device__ __forceinline__ void second_layer(const SqueezeExciteParams& p, float* shared, const float* hidden) {
  const int width = min(p.k8, THREADS), parts = THREADS / width, part = threadIdx.x / width;
  for (int first = 0; first < p.k8; first += width) {
    const int k = first + threadIdx.x % width;
    float v[8] = {};
    if (part < parts && k < p.k8)
#pragma unroll 4
      for (int m = part; m < p.mid; m += parts) {
        float w[8];
        load_vec(p.w2 + (static_cast<long long>(m) * p.k8 + k) * 8, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += w[j] * hidden[m];
      }
#pragma unroll
    for (int j = 0; j < 8; ++j) shared[j * THREADS + threadIdx.x] = v[j];
    __syncthreads();
    if (part == 0 && k < p.k8) {
      for (int i = 1; i < parts; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += shared[j * THREADS + i * width + threadIdx.x];
#pragma unroll
      for (int j = 0; j < 8; ++j)  // padding stays zero
        v[j] = k * 8 + j < p.k ? activate<ACT2>(v[j] + p.b2[k * 8 + j], p.alpha2, p.beta2, 0.f) : 0.f;
      store_vec(p.y + p.out.at(blockIdx.y, k * 8, 0), v, p.nonfinite);
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) squeeze_excite(const __grid_constant__ SqueezeExciteParams p) {
  release_next_launch();
  __shared__ float shared[8 * THREADS], hidden[MAX_HIDDEN];
  __shared__ u32 ticket;
  const int vec = threadIdx.x % p.vecs, group = blockIdx.x / p.runs * p.vecs + vec;
  float* partial = p.partial + static_cast<long long>(blockIdx.y) * gridDim.x * p.mid;
  if (blockIdx.y == 0) fetch_weights(p);
  wait_for_previous_launch();

  float mean[8] = {};
  average(p, shared, group, vec, mean);
  share_of_hidden(p, mean, group, vec, partial + blockIdx.x * p.mid);
  if (!arrives_last(p.counters + blockIdx.y, &ticket)) return;
  sum_shares(p, partial, shared, hidden);
  second_layer(p, shared, hidden);
}
