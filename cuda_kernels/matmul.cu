// matmul: C[b][m][n] = sum over k of A[b][m][k] * B[b][k][n], both computed tensors, batches that broadcast; FP32 inside.
//
//   block: 64 rows x 64 columns, 2 x 2 warps of 32 x 32       a warp's step: 16 of K, 2 x 4 mma.m16n8k16
//
// Operands may lie with any strides (a transposed operand is only other strides), so fragments are read straight from global
// memory, element by element or, where k is contiguous, in pairs; L1 serves the reuse between the warps of a block. Products
// with constants run as convolutions instead, and far faster: this kernel is for the few where both sides are computed.
//
// Compile-time: A_PAIRS, B_PAIRS: that operand's elements k and k + 1 lie in one aligned 4-byte word.
#include "nonfinite.cuh"

struct MatmulParams {
  u32* nonfinite;
  const __half *a, *b;
  __half* c;
  int batch, inner, m, n, k;  // batch: of the output; inner: its second batch dimension
  int a_outer, a_inner, a_m, a_k, b_outer, b_inner, b_k, b_n, c_batch, c_m;  // strides in elements; 0: repeated
};

// Elements k and k + 1 of a row, zero where outside.
template <bool PAIRS>
__device__ __forceinline__ u32 pair(const __half* row, bool inside, int k, int end, int stride) {
  if (!inside || k >= end) return 0;
  if (PAIRS) return *reinterpret_cast<const u32*>(row + k);
  const u32 low = *reinterpret_cast<const u16*>(row + static_cast<long long>(k) * stride);
  const u32 high = k + 1 < end ? *reinterpret_cast<const u16*>(row + static_cast<long long>(k + 1) * stride) : 0;
  return low | high << 16;
}

extern "C" __global__ void __launch_bounds__(128) matmul(const __grid_constant__ MatmulParams p) {
  release_next_launch();
  wait_for_previous_launch();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  // All tiles lie along x, columns first: y and z of a grid end at 65,535.
  const u32 columns_of_tiles = (p.n + 63) / 64, rows_of_tiles = (p.m + 63) / 64, row = blockIdx.x / columns_of_tiles;
  const int m0 = row % rows_of_tiles * 64 + warp / 2 * 32, n0 = blockIdx.x % columns_of_tiles * 64 + warp % 2 * 32;
  const int product = row / rows_of_tiles, outer = product / p.inner, inner = product % p.inner;
  const __half* a = p.a + static_cast<long long>(outer) * p.a_outer + static_cast<long long>(inner) * p.a_inner;
  const __half* b = p.b + static_cast<long long>(outer) * p.b_outer + static_cast<long long>(inner) * p.b_inner;

  float d[2][4][4] = {};
  for (int k0 = 0; k0 < p.k; k0 += 16) {
    const int k = k0 + 2 * t;
    u32 columns[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = n0 + 8 * j + g;
      const __half* column = b + static_cast<long long>(n) * p.b_n;
      columns[j][0] = pair<B_PAIRS>(column, n < p.n, k, p.k, p.b_k);
      columns[j][1] = pair<B_PAIRS>(column, n < p.n, k + 8, p.k, p.b_k);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int upper = m0 + 16 * i + g, lower = upper + 8;
      const __half *first = a + static_cast<long long>(upper) * p.a_m, *second = a + static_cast<long long>(lower) * p.a_m;
      uint4 rows;
      rows.x = pair<A_PAIRS>(first, upper < p.m, k, p.k, p.a_k);
      rows.y = pair<A_PAIRS>(second, lower < p.m, k, p.k, p.a_k);
      rows.z = pair<A_PAIRS>(first, upper < p.m, k + 8, p.k, p.a_k);
      rows.w = pair<A_PAIRS>(second, lower < p.m, k + 8, p.k, p.a_k);
#pragma unroll
      for (int j = 0; j < 4; ++j) mma_16816(d[i][j], rows, columns[j][0], columns[j][1]);
    }
  }

  Watch watch;
  __half* c = p.c + static_cast<long long>(product) * p.c_batch;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = m0 + 16 * i + g + 8 * (e / 2), n = n0 + 8 * j + 2 * t + e % 2;
        if (m >= p.m || n >= p.n) continue;
        const __half h = __float2half_rn(d[i][j][e]);
        c[static_cast<long long>(m) * p.c_m + n] = h;
        watch.see(h);
      }
  watch.report(p.nonfinite);
}
