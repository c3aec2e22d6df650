// What both attention kernels share: where an operand's elements lie, and how a tile of them gets to shared memory.
#pragma once
#include "tensor.cuh"

// Element (batch, head, row, inner) of an operand: a tensor, a part of one, or one seen in another order; in elements.
struct Operand {
  int start, batch, head, row, inner;
  __device__ __forceinline__ long long at(int b, int h) const {
    return start + static_cast<long long>(b) * batch + static_cast<long long>(h) * head;
  }
  __device__ __forceinline__ long long within(int i, int j) const {
    return static_cast<long long>(i) * row + static_cast<long long>(j) * inner;
  }
};

// A tile of LINES lines of WIDE halfs to shared memory, PITCH apart; zeros from line `lines` and from element `count` of a line
// on. Neighbours in a line are `step` apart in memory, lines `line` apart. VECTORS: 16 bytes at a time, asynchronously.
template <int LINES, int WIDE, int PITCH, int BLOCK, bool VECTORS>
__device__ __forceinline__ void load_tile(u32 to, const __half* from, int line, int step, int lines, int count) {
  static_assert(LINES % 8 == 0 && WIDE % 8 == 0, "vectors of 8, 8 lines side by side");
  if (VECTORS) {
#pragma unroll 4
    for (int i = threadIdx.x; i < LINES * (WIDE / 8); i += BLOCK) {
      const int y = i % 8 + i / WIDE * 8, x = i / 8 % (WIDE / 8) * 8;  // 8 lines side by side: they meet in no bank
      const bool ok = y < lines && x < count;
      cp_async_16(to + (y * PITCH + x) * 2, ok ? from + static_cast<long long>(y) * line + x : from, ok ? 16 : 0);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < LINES * WIDE; i += BLOCK) {
      // Neighbouring threads read neighbouring memory.
      const int y = step == 1 ? i / WIDE : i % LINES, x = step == 1 ? i % WIDE : i / LINES;
      const bool ok = y < lines && x < count;
      const long long at = static_cast<long long>(y) * line + static_cast<long long>(x) * step;
      sts_16(to + (y * PITCH + x) * 2, ok ? __half_as_ushort(from[at]) : static_cast<u16>(0));
    }
  }
}

// The address that a lane gives to ldmatrix_x4 for the four 8x8 matrices of the 16x16 at `to`: those of rows 0 to 7 first, or,
// ROWS_FIRST, those of columns 0 to 7.
template <int PITCH, bool ROWS_FIRST>
__device__ __forceinline__ uint4 square(u32 to) {
  const int lane = threadIdx.x % 32, row = lane % 8, a = lane / 8 % 2 * 8, b = lane / 16 * 8;
  return ldmatrix_x4(to + (ROWS_FIRST ? (row + a) * PITCH + b : (row + b) * PITCH + a) * 2);
}
__device__ __forceinline__ uint4 transposed(const uint4& m) {
  return make_uint4(movmatrix_trans(m.x), movmatrix_trans(m.y), movmatrix_trans(m.z), movmatrix_trans(m.w));
}

__device__ __forceinline__ float squares(u32 pair) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return f.x * f.x + f.y * f.y;
}
// The sum over the four lanes that hold a row of a fragment.
__device__ __forceinline__ float over_quad(float v) {
  v += __shfl_xor_sync(0xffffffffu, v, 1);
  return v + __shfl_xor_sync(0xffffffffu, v, 2);
}
