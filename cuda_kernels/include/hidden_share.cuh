// The first half of a squeeze-excite in the convolution that writes its input; squeeze_excite.cu's second launch goes on.
//
//   outputs as stored -> sums over a thread's pixels -> [spot][channel] -> [part][channel] -> times w: a hidden value's share,
//   by LANES neighbours of 8 channels each -> partial[block][hidden value]
//
// The first layer is linear, so each block multiplies its own share of the sums. All are added in one order, so that the bits are
// the same in whatever order blocks run. The kernel that includes this has THREADS threads, of which SUM_SPOTS each have sums of
// the same SUM_VEC of the block's SUM_CHANNELS channels.
#pragma once
#include "tensor.cuh"

constexpr int LANES = SUM_CHANNELS / 8;                                   // that share a hidden value
constexpr int SUM_PARTS = SUM_SPOTS > SUM_VEC ? SUM_SPOTS / SUM_VEC : 1;  // threads that add up a channel's sums
constexpr int HIDDEN_ROWS = THREADS / LANES, HIDDEN_AT_ONCE = 4;          // hidden values of a turn; of a thread, in flight
static_assert(SUM_VEC > 1 && SUM_CHANNELS * SUM_PARTS <= THREADS && THREADS % LANES == 0, "whole vectors, and threads for all");

struct HiddenShare {
  const __half* w;  // [hidden][pitch], whatever behind a block's channels
  float* partial;   // [block][hidden]
  int hidden, pitch;
  int held_at;      // of dynamic shared memory, in bytes
  float per_pixel;  // one over the pixels of an image
};

struct PixelSums {
  float v[SUM_VEC] = {};
  __device__ __forceinline__ void add(const u32 (&bits)[SUM_VEC / 2], bool inside) {
#pragma unroll
    for (int i = 0; i < SUM_VEC / 2; ++i) {
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&bits[i]));
      v[2 * i] += inside ? two.x : 0.f, v[2 * i + 1] += inside ? two.y : 0.f;
    }
  }
};

// The block's first weights, of HIDDEN_AT_ONCE hidden values of each thread, which alone reads them again. No launch writes them,
// so they are on their way before the one ahead has ended; whoever calls commits the copies.
struct HiddenHeld {
  u32 at;
  __device__ __forceinline__ void copy(const HiddenShare& p, u32 shared, int channel0) {
    at = shared + p.held_at + threadIdx.x * 16;
    const int row = threadIdx.x / LANES;
    const __half* from = p.w + row * p.pitch + channel0 + threadIdx.x % LANES * 8;
#pragma unroll
    for (int i = 0; i < HIDDEN_AT_ONCE; ++i, from += HIDDEN_ROWS * p.pitch)
      if (row + i * HIDDEN_ROWS < p.hidden) cp_async_16(at + i * THREADS * 16, from, 16);
  }
};
struct HiddenWeights {
  uint4 rows[HIDDEN_AT_ONCE];
  __device__ __forceinline__ void load(const HiddenShare& p, int channel0, int first) {
    const int row = first + threadIdx.x / LANES;
    const __half* at = p.w + row * p.pitch + channel0 + threadIdx.x % LANES * 8;
#pragma unroll
    for (int i = 0; i < HIDDEN_AT_ONCE; ++i)
      rows[i] = ldg_128_if(row + i * HIDDEN_ROWS < p.hidden, at + i * HIDDEN_ROWS * p.pitch);
  }
  __device__ __forceinline__ void load(const HiddenShare& p, const HiddenHeld& held) {
#pragma unroll
    for (int i = 0; i < HIDDEN_AT_ONCE; ++i)
      rows[i] = threadIdx.x / LANES + i * HIDDEN_ROWS < p.hidden ? lds_128(held.at + i * THREADS * 16) : uint4{};
  }
};

// Of the block, whose threads have all come here. channel0: a function that gives the block's first channel, which takes long and
// is seldom needed; from: the thread's first channel in the block; spot: of the threads with the same channels.
template <class Channel>
__device__ __forceinline__ void share_hidden(const HiddenShare& p, const HiddenHeld& held, Channel channel0, int from, int spot,
                                             const PixelSums& sums) {
  __shared__ __align__(16) float all[SUM_SPOTS * SUM_CHANNELS];
  constexpr int TURN = HIDDEN_AT_ONCE * HIDDEN_ROWS, STEP = SUM_PARTS * SUM_CHANNELS;
  const int t = threadIdx.x;
  HiddenWeights now, next;
  if (p.hidden > TURN) next.load(p, channel0(), TURN);
#pragma unroll
  for (int i = 0; i < SUM_VEC; ++i) all[spot * SUM_CHANNELS + from + i] = sums.v[i];
  __syncthreads();
  if (t < STEP) {  // a thread's first element is its own
    float sum = all[t];
#pragma unroll
    for (int i = STEP; i < SUM_SPOTS * SUM_CHANNELS; i += STEP) sum += i + t < SUM_SPOTS * SUM_CHANNELS ? all[i + t] : 0.f;
    all[t] = sum;
  }
  __syncthreads();
  float x[8] = {};
#pragma unroll
  for (int part = 0; part < SUM_PARTS; ++part) {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] += all[part * SUM_CHANNELS + t % LANES * 8 + j];
  }
  const u32 lanes = THREADS % 32 && t / 32 == THREADS / 32 ? (1u << THREADS % 32) - 1 : 0xffffffffu;  // of the warp
  float* to = p.partial + static_cast<long long>(blockIdx.x) * p.hidden;
  cp_async_wait<0>();
  now.load(p, held);
#pragma unroll 1
  for (int first = 0;;) {
#pragma unroll
    for (int i = 0; i < HIDDEN_AT_ONCE; ++i) {
      if (first + i * HIDDEN_ROWS >= p.hidden) return;
      float w[8], sum = 0.f;
      unpack(now.rows[i], w);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += w[j] * x[j];
#pragma unroll
      for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(lanes, sum, step);
      const int row = first + i * HIDDEN_ROWS + t / LANES;
      if (t % LANES == 0 && row < p.hidden) to[row] = sum * p.per_pixel;
    }
    first += TURN;
    if (first >= p.hidden) return;
    now = next;
    if (first + TURN < p.hidden) next.load(p, channel0(), first + TURN);
  }
}
