// squeeze_excite: global average, two fully connected layers with their activations, one launch; the scale of squeeze-excite.
//
//   x [image][pixels][C]  ->  mean [C]  ->  act1(w1 mean + b1) [MID]  ->  act2(w2 hidden + b2) [K]  ->  y [image][K]
//        a block takes an image:  8 channels x every 64th pixel per thread | a warp per hidden value | 8 outputs per thread
//
// The trick: none of the three fills a GPU at batch 1, and each alone costs a launch; a block does them one after the other
// with what lies between in shared memory, FP32. The scale itself is left to the pointwise kernel that reads y.
//
// Compile-time: ACT1, ACT2, Acts without a slope. w1 is [MID][c8 * 8], w2 is [MID][k8 * 8]: rows of whole vectors.
#include "activation.cuh"
#include "tensor.cuh"

constexpr int THREADS = 512, LANES = THREADS / 8, WARPS = THREADS / 32;
constexpr int ROOM = 12;  // floats that a vector of 8 channels has in shared memory: 8 vectors then meet in no bank, 4 by 4

struct SqueezeExciteParams {
  u32* nonfinite;
  const __half* x;
  const __half* w1;
  const __half* w2;
  const float* b1;
  const float* b2;
  __half* y;
  View in, out;
  int c8, pixels, mid, k, k8;  // c8, k8: vectors of 8 channels
  float scale, alpha1, beta1, alpha2, beta2;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) squeeze_excite(const __grid_constant__ SqueezeExciteParams p) {
  release_next_launch();
  extern __shared__ __align__(16) float shared[];
  float* mean = shared;                              // [c8][ROOM]
  float* hidden = mean + p.c8 * ROOM;                // [mid]
  float* part = hidden + (p.mid + 3) / 4 * 4;        // [WARPS][8][ROOM]
  const int image = blockIdx.x, vec = threadIdx.x % 8, lane = threadIdx.x / 8, warp = threadIdx.x / 32;
  wait_for_previous_launch();

  for (int first = 0; first < p.c8; first += 8) {  // 64 channels at a time
    float v[8] = {};
    if (first + vec < p.c8)
      for (int pixel = lane; pixel < p.pixels; pixel += LANES) {
        float x[8];
        load_vec(p.x + p.in.at(image, (first + vec) * 8, pixel), x);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] += x[j];
      }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      v[j] += __shfl_xor_sync(0xffffffffu, v[j], 8);
      v[j] += __shfl_xor_sync(0xffffffffu, v[j], 16);
      if (threadIdx.x % 32 < 8) part[(warp * 8 + vec) * ROOM + j] = v[j];
    }
    __syncthreads();
    const int at = threadIdx.x % 32 / 4, j = threadIdx.x % 4 + warp * 4;  // two warps: 4 channels of each vector
    if (warp < 2 && first + at < p.c8) {
      float sum = 0.f;
      for (int i = 0; i < WARPS; ++i) sum += part[(i * 8 + at) * ROOM + j];
      mean[(first + at) * ROOM + j] = sum * p.scale;
    }
    __syncthreads();
  }

  for (int m = warp; m < p.mid; m += THREADS / 32) {
    float sum = 0.f;
    for (int c = threadIdx.x % 32; c < p.c8; c += 32) {
      float w[8];
      load_vec(p.w1 + (m * p.c8 + c) * 8, w);
      const float4 low = *reinterpret_cast<const float4*>(mean + c * ROOM), high = *reinterpret_cast<const float4*>(mean + c * ROOM + 4);
      sum += w[0] * low.x + w[1] * low.y + w[2] * low.z + w[3] * low.w;
      sum += w[4] * high.x + w[5] * high.y + w[6] * high.z + w[7] * high.w;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) hidden[m] = activate<ACT1>(sum + p.b1[m], p.alpha1, p.beta1, 0.f);
  }
  __syncthreads();

  for (int k = threadIdx.x; k < p.k8; k += THREADS) {
    float v[8] = {};
    for (int m = 0; m < p.mid; ++m) {
      float w[8];
      load_vec(p.w2 + (m * p.k8 + k) * 8, w);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] += w[j] * hidden[m];
    }
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = k * 8 + j < p.k ? activate<ACT2>(v[j] + p.b2[k * 8 + j], p.alpha2, p.beta2, 0.f) : 0.f;  // padding stays zero
    store_vec(p.y + p.out.at(image, k * 8, 0), v, p.nonfinite);
  }
}
