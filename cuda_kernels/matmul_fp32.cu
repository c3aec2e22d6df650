// matmul_fp32: C[b][m][n] = sum over k of A[b][m][k] * B[b][k][n] as matmul computes it, but on CUDA cores and with each of the
// three FP16 or FP32: for values that FP16 cannot hold. A thread owns one element of C, neighbours own neighbouring columns; the
// loads of AT_ONCE products are on their way before the first of these.
//
// Compile-time: A_F32, B_F32, Y_F32 (1: that tensor is FP32).
#include "types.cuh"

constexpr int THREADS = 256, AT_ONCE = 8;
constexpr int RESIDENT = 4;  // blocks of an SM: where the compiler may choose, it saves registers and waits for each load

struct MatmulFp32Params {
  u32* nonfinite;
  const TypeOf<A_F32>::type* a;
  const TypeOf<B_F32>::type* b;
  Y* c;
  int batch, inner, m, n, k;  // batch: of the output; inner: its second batch dimension
  int a_outer, a_inner, a_m, a_k, b_outer, b_inner, b_k, b_n, c_batch, c_m;  // strides in elements; 0: repeated
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) matmul_fp32(const __grid_constant__ MatmulFp32Params p) {
  release_next_launch();
  wait_for_previous_launch();
  const unsigned id = blockIdx.x * THREADS + threadIdx.x;
  const int n = id % p.n, m = id / p.n % p.m, batch = id / p.n / p.m, outer = batch / p.inner, inner = batch % p.inner;
  if (batch >= p.batch) return;
  const auto* a = p.a + static_cast<long long>(outer) * p.a_outer + inner * p.a_inner + m * p.a_m;
  const auto* b = p.b + static_cast<long long>(outer) * p.b_outer + inner * p.b_inner + n * p.b_n;
  float sum = 0.f;
#pragma unroll 1
  for (int k = 0; k < p.k; k += AT_ONCE, a += AT_ONCE * p.a_k, b += AT_ONCE * p.b_k) {
    float x[AT_ONCE], y[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      x[i] = k + i < p.k ? load_one(a + i * p.a_k) : 0.f;
      y[i] = k + i < p.k ? load_one(b + i * p.b_k) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) sum += x[i] * y[i];
  }
  store_one(p.c + static_cast<long long>(batch) * p.c_batch + m * p.c_m + n, sum, p.nonfinite);
}
