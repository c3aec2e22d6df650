// pool_global: max or average over whole images, one value per channel, FP32 inside.
//
// V >= 8: a block takes 8 neighbouring vectors of 8 channels (128 bytes per pixel) and 32 pixels at a time. Of the 32
// partial results four are combined within a warp, the eight of its warps by a thread for each channel. Linear: a warp takes one channel, lanes along pixels. Few channels make few
// blocks, which wait for memory: each thread has AHEAD loads in flight, added up in the order of their pixels.
//
// Compile-time: VEC (8 or 1), AVG (0 max, 1 average).
#include "tensor.cuh"

struct PoolGlobalParams {
  u32* nonfinite;
  const __half* x;
  __half* y;
  View in, out;
  int n, groups, in_groups, pixels;  // (in_)groups: channels of the padded output (input) / VEC
  float scale;            // average: 1 / pixels
};

constexpr int AHEAD = 8;

__device__ __forceinline__ float merge(float a, float b) { return AVG ? a + b : (b > a || b != b ? b : a); }

extern "C" __global__ void __launch_bounds__(256) pool_global(const __grid_constant__ PoolGlobalParams p) {
  release_next_launch();
  wait_for_previous_launch();
  const float start = AVG ? 0.f : MINUS_INFINITY;
  if constexpr (VEC == 8) {
    __shared__ float part[8][64];  // of a warp's pixels, each channel: turned by 4 in every second four vectors, for the banks
    const int vec = threadIdx.x % 8, lane = threadIdx.x / 8, tiles = (p.groups + 7) / 8;
    const int group = blockIdx.x % tiles * 8 + vec, image = blockIdx.x / tiles;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = start;
    if (group < p.in_groups)
      for (int first = lane; first < p.pixels; first += 32 * AHEAD) {
        uint4 bits[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; ++i)
          if (first + 32 * i < p.pixels) bits[i] = ldg_128(p.x + p.in.at(image, group * 8, first + 32 * i));
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (first + 32 * i >= p.pixels) continue;
          float x[8];
          unpack(bits[i], x);
#pragma unroll
          for (int j = 0; j < 8; ++j) v[j] = merge(v[j], x[j]);
        }
      }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int d = 8; d < 32; d *= 2) v[j] = merge(v[j], __shfl_xor_sync(0xffffffffu, v[j], d));
      if (lane % 4 == 0) part[lane / 4][vec * 8 + (j ^ (vec & 4))] = v[j];
    }
    __syncthreads();
    const int own = threadIdx.x / 8, channel = threadIdx.x % 8, of = blockIdx.x % tiles * 8 + own;  // one of 64 channels
    if (own < 8 && of < p.groups) {
      float sum = part[0][own * 8 + (channel ^ (own & 4))];
#pragma unroll
      for (int i = 1; i < 8; ++i) sum = merge(sum, part[i][own * 8 + (channel ^ (own & 4))]);
      sum = of >= p.in_groups ? 0.f : AVG ? sum * p.scale : sum;  // format padding
      store_half(p.y + p.out.at(image, of * 8 + channel, 0), sum, p.nonfinite);
    }
  } else {
    const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
    const int c = row % p.groups, image = row / p.groups;
    if (image >= p.n) return;
    float v = start;
    for (int first = lane; first < p.pixels; first += 32 * AHEAD) {
      __half x[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + 32 * i < p.pixels) x[i] = p.x[p.in.at(image, c, first + 32 * i)];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + 32 * i < p.pixels) v = merge(v, __half2float(x[i]));
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v = merge(v, __shfl_xor_sync(0xffffffffu, v, d));
    if (lane == 0) store_half(p.y + p.out.at(image, c, 0), AVG ? v * p.scale : v, p.nonfinite);
  }
}
