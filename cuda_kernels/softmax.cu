// softmax: over the channels of every pixel, FP32 inside; a warp per pixel, lanes along channels, any format.
//
// The row is read three times (maximum, sum, result); it stays in L1, so only the first pass costs memory traffic.
#include "tensor.cuh"

struct SoftmaxParams {
  const __half* x;
  __half* y;
  View in, out;
  int n, c, pixels, out_c;  // out_c: channels with the output's padding, which gets zeros
};

extern "C" __global__ void __launch_bounds__(256) softmax(const __grid_constant__ SoftmaxParams p) {
  release_next_launch();
  wait_for_previous_launch();
  const int lane = threadIdx.x % 32, row = blockIdx.x * 8 + threadIdx.x / 32;
  const int image = row / p.pixels, pixel = row % p.pixels;
  if (image >= p.n) return;
  float top = MINUS_INFINITY, sum = 0.f;
  for (int c = lane; c < p.c; c += 32) top = fmaxf(top, __half2float(p.x[p.in.at(image, c, pixel)]));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, d));
  for (int c = lane; c < p.c; c += 32) sum += __expf(__half2float(p.x[p.in.at(image, c, pixel)]) - top);
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  const float scale = 1.f / sum;
  for (int c = lane; c < p.out_c; c += 32)
    p.y[p.out.at(image, c, pixel)] =
        __float2half_rn(c < p.c ? __expf(__half2float(p.x[p.in.at(image, c, pixel)]) - top) * scale : 0.f);
}
