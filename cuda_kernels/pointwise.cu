// pointwise: y = act(x op operand), element by element, for tensors that share one format.
//
// A thread takes 8 channels (VEC = 8) or 1, in the order of memory; image, channel and pixel are recovered from the position:
//   position = ((image * blocks + block) * pixels + pixel) * inner + i   ->   channel = block * v + i * VEC
// where channels-last is one block, and chwV has one block per V channels.
//   STRIDED 0: all tensors are whole, so the position is the address.
//   STRIDED 1: one of them lies inside another tensor (a slice of a concat's channels), so each has strides of its own:
//       |<-------- pixel stride -------->|
//       | other | x: inner * VEC | other |  next pixel ...      the accesses stay 16 bytes wide
//
// Compile-time: VEC (8 or 1), OP, OPERAND, SWAP, ACT, in the order of tactics/problem.py; STRIDED.
#include "activation.cuh"
#include "tensor.cuh"

enum { OP_COPY, OP_ADD, OP_SUB, OP_MUL, OP_DIV, OP_MAX, OP_MIN };
enum { OPERAND_NONE, OPERAND_TENSOR, OPERAND_CHANNEL, OPERAND_SCALAR };
static_assert(VEC == 8 || VEC == 1, "8 halfs in one access, or 1");

struct PointwiseParams {
  const __half* x;
  const __half* other;   // OPERAND_TENSOR: as x
  const float* operand;  // OPERAND_CHANNEL: [c]; OPERAND_SCALAR: [1]
  const float* slope;    // prelu: [c]
  __half* y;
  long long total;       // accesses of VEC halfs
  int inner, pixels, blocks, v, c;
  float alpha, beta;
  View x_view, other_view, y_view;
};

__device__ __forceinline__ float combine(float x, float b) {
  const float l = SWAP ? b : x, r = SWAP ? x : b;
  if (OP == OP_ADD) return l + r;
  if (OP == OP_SUB) return l - r;
  if (OP == OP_MUL) return l * r;
  if (OP == OP_DIV) return l / r;
  if (OP == OP_MAX) return fmaxf(l, r);
  if (OP == OP_MIN) return fminf(l, r);
  return x;
}

__device__ __forceinline__ float compute(const PointwiseParams& p, float x, float other, int channel) {
  if (channel >= p.c) return 0.f;  // padded channels stay zero
  float b = other;
  if (OPERAND == OPERAND_CHANNEL) b = p.operand[channel];
  if (OPERAND == OPERAND_SCALAR) b = p.operand[0];
  return activate<ACT>(combine(x, b), p.alpha, p.beta, ACT == ACT_PRELU ? p.slope[channel] : 0.f);
}

extern "C" __global__ void __launch_bounds__(256) pointwise(const __grid_constant__ PointwiseParams p) {
  const long long i = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= p.total) return;
  const long long row = i / p.inner, plane = row / p.pixels;
  const int channel = static_cast<int>(plane % p.blocks) * p.v + static_cast<int>(i % p.inner) * VEC;
  long long x_at = i * VEC, other_at = x_at, y_at = x_at;
  if (STRIDED) {
    const int image = static_cast<int>(plane / p.blocks), pixel = static_cast<int>(row % p.pixels);
    x_at = p.x_view.at(image, channel, pixel), y_at = p.y_view.at(image, channel, pixel);
    other_at = p.other_view.at(image, channel, pixel);
  }
  float x[VEC], other[VEC] = {};
  load_vec(p.x + x_at, x);
  if (OPERAND == OPERAND_TENSOR) load_vec(p.other + other_at, other);
#pragma unroll
  for (int j = 0; j < VEC; ++j) x[j] = compute(p, x[j], other[j], channel + j);
  store_vec(p.y + y_at, x);
}
