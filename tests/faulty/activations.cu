// y[i] = activation ACT of x[i], both FP32.
#include "activation.cuh"

struct Params {
  const float* x;
  float* y;
  int n;
  float a, b;
};

extern "C" __global__ void activations(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.y[i] = activate<ACT>(p.x[i], p.a, p.b, 0.f);
}
