// y[i] = activation ACT of x[i], both FP32; PAIRS 1: of x[2i] and x[2i + 1] together, rounded to FP16.
#include "activation_pairs.cuh"

struct Params {
  const float* x;
  float* y;
  int n;
  float a, b;
};

extern "C" __global__ void activations(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
#if PAIRS
  float v = p.x[2 * i], w = p.x[2 * i + 1];
  activate_pair<ACT, true>(v, w, p.a, p.b, 0.f, 0.f);
  reinterpret_cast<u32*>(p.y)[i] = rounded_pair<false>(v, w);
#else
  if (i < p.n) p.y[i] = activate<ACT>(p.x[i], p.a, p.b, 0.f);
#endif
}
