// Tensor-core products of bytes with integer sums. Operands lie as those of ptx.cuh's products of halves, two bytes for each
// half; A is signed (weights), B signed or not (pixels). The registers of d hold the bits of integers, so that kernels have one
// array of sums for halves and bytes: zero is 0.f, a sum __float_as_int(d[i]). A sum wraps beyond 32 bits.
#pragma once
#include "ptx.cuh"

// 9.7.14.5.10 mma.m16n8k32: d[4] += a[16 bytes] * b[8 bytes].
// a: (g,4t) (g+8,4t) (g,4t+16) (g+8,4t+16) and three columns more; b: rows 4t.. and 4t+16.. of column g; d as of mma_16816.
template <bool UNSIGNED_PIXELS>
__device__ __forceinline__ void mma_16832_bytes(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  int(&sum)[4] = reinterpret_cast<int(&)[4]>(d);
  if (UNSIGNED_PIXELS)
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// 9.7.14.6.2.6 mma.sp::ordered_metadata.m16n8k64: a holds the 2 kept values of each 4 columns, b all 64 rows. Every lane's word
// of metadata is read: 32 columns from 32 (t / 2) of row g + 8 (t % 2), where m16n8k32 of halves has 16 columns of two rows.
template <bool UNSIGNED_PIXELS>
__device__ __forceinline__ void mma_sp_16864_bytes(float (&d)[4], const uint4& a, const uint4& b, u32 metadata) {
  int(&sum)[4] = reinterpret_cast<int(&)[4]>(d);
  if (UNSIGNED_PIXELS)
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.u8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0;"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata));
  else
    asm volatile(
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, 0;"
        : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata));
}
