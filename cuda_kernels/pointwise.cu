// pointwise: y = act(x op operand), element by element, for tensors that share one format.
//
// Memory is walked in its own order, 8 halfs (VEC = 8) or 1 per thread; the channel is recovered from the position:
//   position = (block * pixels + pixel) * inner + i   ->   channel = (block % blocks) * v + i * VEC
// where channels-last is one block of all pixels, and chwV has one block per V channels and image.
//
// Compile-time: VEC (8 or 1), OP, OPERAND, SWAP, ACT, in the order of tactics/problem.py.
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
  const int channel = static_cast<int>(i / p.inner / p.pixels % p.blocks) * p.v + static_cast<int>(i % p.inner) * VEC;
  float x[VEC], other[VEC] = {};
  load_vec(p.x + i * VEC, x);
  if (OPERAND == OPERAND_TENSOR) load_vec(p.other + i * VEC, other);
#pragma unroll
  for (int j = 0; j < VEC; ++j) x[j] = compute(p, x[j], other[j], channel + j);
  store_vec(p.y + i * VEC, x);
}
