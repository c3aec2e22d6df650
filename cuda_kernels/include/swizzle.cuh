// Where a 16-byte chunk stands in a tile of rows in shared memory, so that neither rows nor columns of chunks meet in a bank.
#pragma once
#include "ptx.cuh"

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of ROW_CHUNKS chunks per row. The XOR spreads the 8 rows that
// ldmatrix reads at once, and the 8 chunks that a row store writes, over all banks. Rows count modulo 8 only.
template <int ROW_CHUNKS>
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
  static_assert(ROW_CHUNKS >= 2, "a row is at least 32 bytes");
  if (ROW_CHUNKS >= 8) return (row * ROW_CHUNKS + (chunk ^ (row & 7))) * 16;
  if (ROW_CHUNKS == 4) return (row * 4 + (chunk ^ ((row >> 1) & 3))) * 16;
  return (row * 2 + (chunk ^ ((row >> 2) & 1))) * 16;
}
