// How a warpgroup's sums of 64 channels and BN pixels become outputs, of whole vectors: in registers, then by stmatrix in a staging
// tile, [pixel][channel], where the residual lies (compare stage_results of include/conv.cuh). WHOLE_ROWS   1: none is padding.
#pragma once
#include "activation_pairs.cuh"
#include "grouped.cuh"
#include "wgmma.cuh"

// What a row of the product adds to its sums: of a thread's two rows, `row_of_thread` and eight further.
struct Row {
  float bias, slope;
  Tail tail;
  bool real;
};
__device__ __forceinline__ Row row_of(const ConvParams& p, int row) {
  return {p.bias[row], ACT == ACT_PRELU ? p.slope[row] : 0.f, tail_of(p, row), WHOLE_ROWS || real_row(p, row)};
}
__device__ __forceinline__ int row_of_thread(int m0) { return m0 + THREAD / 32 * 16 + THREAD % 32 / 4; }

// Where this lane's row of four 8x8 matrices begins in a staging tile: of the warp's two eights of channels and of two eights of
// pixels. The next two eights of pixels lie 16 rows further, as the swizzle counts rows modulo 8.
__device__ __forceinline__ u32 matrix_rows(u32 staging) {
  const int lane = THREAD % 32, warp = THREAD / 32;
  return staging + swizzled<BM / 8>(lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2);
}

// Results of 64 rows, rounded, into a staging tile, [pixel][channel], where a residual lies; `at`: the lane's `matrix_rows`. A warp
// reads and writes its own channels alone.
__device__ __forceinline__ void stage_rows(const ConvParams& p, const float (&acc)[NT][4], u32 at, const Row (&rows)[2], Watch& watch) {
  constexpr int PAIRS = (NT + 1) / 2, EACH = NT < 2 ? 2 : 4;  // eights of pixels two by two, or the only one; their 8x8 matrices
  uint4 added[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; ++j)  // together: none waits for another
    added[j] = RES ? ldmatrix_trans<EACH>(at + j * 16 * BM * 2) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int j = 0; j < PAIRS; ++j) {
    const u32 residuals[4] = {added[j].x, added[j].y, added[j].z, added[j].w};
    u32 bits[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k) {  // rows g, then g + 8, of pixels 2t and 2t + 1; then those of the next eight pixels
      const Row& row = rows[k % 2];
      const float* sums = &acc[2 * j + k / 2][k % 2 * 2];
      const float2 residual = __half22float2(*reinterpret_cast<const __half2*>(&residuals[k]));
      bits[k] = finish_pair<ACT, RES>(p, sums[0] + row.bias, sums[1] + row.bias, residual, row, row);
      if (!WHOLE_ROWS && !row.real) bits[k] = 0;  // padded channels stay zero, also of infinity times a weight of zero
      watch.see(*reinterpret_cast<const __half2*>(&bits[k]));
    }
    stmatrix_trans(at + j * 16 * BM * 2, bits);
  }
}

// Results of a part into y, by its warpgroup's threads. `table`: room for where its pixels lie in y; RES_AHEAD: the residual is
// under way to the staging tile.
template <class Offsets>
__device__ __forceinline__ void store_by_threads(const ConvParams& p, float (&acc)[MT][NT][4], u32 staging, u32 table, int m0,
                                                 Offsets offset_of) {
  const int row = row_of_thread(m0);
  const Row rows[2] = {row_of(p, row), row_of(p, row + 8)};
  cp_async_wait<0>();
  sync_threads();  // the last part's stores have read the staging tile, and this one's residual is there
  tabulate(table, offset_of);
  if (RES && !RES_AHEAD) {
    sync_threads();
    copy_residual<0, BN, true>(p, staging, table, m0);
    cp_async_commit();
    cp_async_wait<0>();
    sync_threads();
  }
  Watch watch;
  stage_rows(p, acc[0], matrix_rows(staging), rows, watch);
  watch.report(p.nonfinite);
  sync_threads();
  store_tile(p, staging, table, m0);
}
