// reference_conv: convolution written as its definition, FP16 NCHW in, FP32 NCHW out, FP32 accumulation; a thread per output.
//
// What large shapes are checked against on a GPU. No tiles, no tensor cores, no formats: nothing it shares with the kernels
// under test but the activation (which small shapes check against NumPy).
//
// Compile-time: ACT, RES, AFFINE, LAST, TABLE, MULTIPLIED, RES_MULTIPLIED (include/conv.cuh).
#define ROUNDED 0
#include "activation.cuh"
#include "ptx.cuh"

struct ReferenceParams {
  const __half* x;         // [n, c, h, w]
  const __half* weights;   // [k, c / groups, r, s]
  const float* bias;       // [k], or null
  const float* slope;      // [k], prelu
  const __half* residual;  // as y, or null
  float* y;                // [n, k, p, q]
  long long total;         // outputs
  int c, h, w, k, p, q, r, s, groups;
  int stride_h, stride_w, pad_t, pad_l, dil_h, dil_w;
  float alpha, beta;
#if AFFINE
  const float* scales;  // [k]
  const float* shifts;
#endif
#if LAST
  float alpha_last, beta_last;
#endif
#if MULTIPLIED
  const float* multipliers;  // [k]
#endif
#if RES_MULTIPLIED
  const float* residual_multipliers;  // [k]
#endif
};

extern "C" __global__ void __launch_bounds__(256) reference_conv(const __grid_constant__ ReferenceParams p) {
  release_next_launch();
  wait_for_previous_launch();
  for (long long id = blockIdx.x * 256ll + threadIdx.x; id < p.total; id += gridDim.x * 256ll) {
    const int ow = static_cast<int>(id % p.q), oh = static_cast<int>(id / p.q % p.p);
    const int k = static_cast<int>(id / p.q / p.p % p.k);
    const long long n = id / p.q / p.p / p.k;
    const int cg = p.c / p.groups, c0 = k / (p.k / p.groups) * cg;
    const __half* x = p.x + (n * p.c + c0) * p.h * p.w;
    const __half* weights = p.weights + static_cast<long long>(k) * cg * p.r * p.s;
    float sum = 0.f;
    for (int c = 0; c < cg; ++c)
      for (int i = 0; i < p.r; ++i)
        for (int j = 0; j < p.s; ++j) {
          const int h = oh * p.stride_h - p.pad_t + i * p.dil_h, w = ow * p.stride_w - p.pad_l + j * p.dil_w;
          if (h < 0 || h >= p.h || w < 0 || w >= p.w) continue;
          sum += __half2float(x[(static_cast<long long>(c) * p.h + h) * p.w + w]) * __half2float(weights[(c * p.r + i) * p.s + j]);
        }
#if MULTIPLIED
    sum *= p.multipliers[k];
#endif
    if (p.bias) sum += p.bias[k];
    float added = RES ? __half2float(p.residual[id]) : 0.f;
#if RES_MULTIPLIED
    added *= p.residual_multipliers[k];
#endif
    p.y[id] = finish<ACT, RES>(p, sum, added, ACT == ACT_PRELU ? p.slope[k] : 0.f, tail_of(p, k));
  }
}
