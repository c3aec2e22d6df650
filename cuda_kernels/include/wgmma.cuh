// Hopper's tensor cores, sm_90a only: every PTX instruction of theirs that a kernel uses, wrapped once, with its section of the
// PTX ISA (9.0). Four warps, the first of which is a multiple of four, execute each of them as one: a warpgroup.
//
// A product of wgmma_dense or wgmma_sparse is in flight until a wait covers its group: no register of `d`, `a` and `e` and no byte
// that a descriptor covers may be written before, and no `d` read.
#pragma once
#include "ptx.cuh"

typedef unsigned long long u64;

// 9.7.15.5.1 Matrix descriptor of rows of 64 halfs, 128 bytes, along K, which swizzled<8> spreads: a pattern has 8 of them, 1,024
// bytes, where `smem` begins, or a step of K of less than a row behind. The leading offset is not used.
__device__ __forceinline__ u64 rows_of_128_bytes(u32 smem) { return (smem & 0x3ffff) >> 4 | 64ull << 32 | 1ull << 62; }

// 9.7.15.7.1 wgmma.fence: accesses of registers come before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// 9.7.15.7.2, 9.7.15.7.3 The products so far are a group; wait until at most PENDING groups are in flight.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// No instruction, but the compiler leaves whatever reads or writes `d` on its side of this.
template <int MT, int NT>
__device__ __forceinline__ void keep_apart(float (&d)[MT][NT][4]) {
#pragma unroll
  for (int i = 0; i < MT; ++i)
#pragma unroll
    for (int j = 0; j < NT; ++j) asm volatile("" : "+f"(d[i][j][0]), "+f"(d[i][j][1]), "+f"(d[i][j][2]), "+f"(d[i][j][3])::"memory");
}
// 9.7.13.4 fence.proxy.async: what this thread has written to shared memory comes before what tensor cores read behind a barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// 9.7.14.5.16 stmatrix of four or two 8x8 matrices, each transposed on its way: of columns g the row pairs 2t, 2t + 1, as sums lie,
// become of rows g the column pairs. `address`: of row lane % 8 of matrix lane / 8. 9.7.14.5.15 ldmatrix: the way back, of two
// matrices with zeros behind them.
__device__ __forceinline__ void stmatrix_trans(u32 address, const u32 (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]),
               "r"(v[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_trans(u32 address, const u32 (&v)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(address), "r"(v[0]), "r"(v[1]) : "memory");
}
template <int MATRICES>
__device__ __forceinline__ uint4 ldmatrix_trans(u32 address) {
  uint4 r = {0, 0, 0, 0};
  if (MATRICES == 2)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(address)
                 : "memory");
  return r;
}

// %T0, to %T9, : the names of ten operands.
#define TEN(T) "%" #T "0, %" #T "1, %" #T "2, %" #T "3, %" #T "4, %" #T "5, %" #T "6, %" #T "7, %" #T "8, %" #T "9, "
#define FIFTY(A, B, C, D, E) TEN(A) TEN(B) TEN(C) TEN(D) TEN(E)
#define SUMS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SUMS_16 TEN() "%10, %11, %12, %13, %14, %15"
#define SUMS_28 TEN() TEN(1) "%20, %21, %22, %23, %24, %25, %26, %27"
#define SUMS_32 TEN() TEN(1) TEN(2) "%30, %31"
#define SUMS_48 TEN() TEN(1) TEN(2) TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_56 FIFTY(, 1, 2, 3, 4) "%50, %51, %52, %53, %54, %55"
#define SUMS_64 FIFTY(, 1, 2, 3, 4) TEN(5) "%60, %61, %62, %63"
#define SUMS_96 FIFTY(, 1, 2, 3, 4) TEN(5) TEN(6) TEN(7) TEN(8) "%90, %91, %92, %93, %94, %95"
#define SUMS_112 FIFTY(, 1, 2, 3, 4) FIFTY(5, 6, 7, 8, 9) TEN(10) "%110, %111"
#define SUMS_128 FIFTY(, 1, 2, 3, 4) FIFTY(5, 6, 7, 8, 9) TEN(10) TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"
#define D_1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define D_2(j) D_1(j), D_1(j + 1)
#define D_4(j) D_2(j), D_2(j + 2)
#define D_7(j) D_4(j), D_2(j + 4), D_1(j + 6)
#define D_8(j) D_4(j), D_4(j + 4)
#define D_12(j) D_8(j), D_4(j + 8)
#define D_14(j) D_12(j), D_2(j + 12)
#define D_16(j) D_8(j), D_8(j + 8)
#define D_24(j) D_16(j), D_8(j + 16)
#define D_28(j) D_24(j), D_4(j + 24)
#define D_32(j) D_16(j), D_16(j + 16)
// The operands behind the sums: A, a descriptor or of sparse products four registers, the descriptor of B, metadata.
#define DENSE(N, SUMS, D, A, B)                                                                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" SUMS "}, %" #A ", %" #B ", 1, 1, 1, 0, 0;" \
               : D                                                                                               \
               : "l"(a), "l"(b))
#define SPARSE(N, SUMS, D, A0, A1, A2, A3, B, E)                                                                        \
  asm volatile("wgmma.mma_async.sp.sync.aligned.m64n" #N "k32.f32.f16.f16 {" SUMS "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
               "}, %" #B ", %" #E ", 0, 1, 1, 1, 0;"                                                                     \
               : D                                                                                                      \
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(e))

constexpr bool wgmma_has(int nt) {
  return nt == 2 || nt == 4 || nt == 7 || nt == 8 || nt == 12 || nt == 14 || nt == 16 || nt == 24 || nt == 28 || nt == 32;
}

// 9.7.15.5.2 wgmma.mma_async.m64nNk16, N = 8 * NT: d += a * b. A warp's 16 rows of d are as mma_16816 has them, d's eights of
// columns one behind the other.
template <int NT>
__device__ __forceinline__ void wgmma_dense(float (&d)[NT][4], u64 a, u64 b) {
  static_assert(wgmma_has(NT), "wgmma has no such N here");
  if constexpr (NT == 2) DENSE(16, SUMS_8, D_2(0), 8, 9);
  if constexpr (NT == 7) DENSE(56, SUMS_28, D_7(0), 28, 29);
  if constexpr (NT == 4) DENSE(32, SUMS_16, D_4(0), 16, 17);
  if constexpr (NT == 8) DENSE(64, SUMS_32, D_8(0), 32, 33);
  if constexpr (NT == 12) DENSE(96, SUMS_48, D_12(0), 48, 49);
  if constexpr (NT == 14) DENSE(112, SUMS_56, D_14(0), 56, 57);
  if constexpr (NT == 16) DENSE(128, SUMS_64, D_16(0), 64, 65);
  if constexpr (NT == 24) DENSE(192, SUMS_96, D_24(0), 96, 97);
  if constexpr (NT == 28) DENSE(224, SUMS_112, D_28(0), 112, 113);
  if constexpr (NT == 32) DENSE(256, SUMS_128, D_32(0), 128, 129);
}

// 9.7.15.6 wgmma.mma_async.sp.m64nNk32: a holds the 2 kept values of each 4 columns, a warp's 16 rows as mma_16816 has them, b all
// 32. Selector 0: the metadata words of lanes t = 0, 1 are read, as mma_sp_16832 has them.
template <int NT>
__device__ __forceinline__ void wgmma_sparse(float (&d)[NT][4], const uint4& a, u64 b, u32 e) {
  static_assert(wgmma_has(NT), "wgmma has no such N here");
  if constexpr (NT == 2) SPARSE(16, SUMS_8, D_2(0), 8, 9, 10, 11, 12, 13);
  if constexpr (NT == 7) SPARSE(56, SUMS_28, D_7(0), 28, 29, 30, 31, 32, 33);
  if constexpr (NT == 4) SPARSE(32, SUMS_16, D_4(0), 16, 17, 18, 19, 20, 21);
  if constexpr (NT == 8) SPARSE(64, SUMS_32, D_8(0), 32, 33, 34, 35, 36, 37);
  if constexpr (NT == 12) SPARSE(96, SUMS_48, D_12(0), 48, 49, 50, 51, 52, 53);
  if constexpr (NT == 14) SPARSE(112, SUMS_56, D_14(0), 56, 57, 58, 59, 60, 61);
  if constexpr (NT == 16) SPARSE(128, SUMS_64, D_16(0), 64, 65, 66, 67, 68, 69);
  if constexpr (NT == 24) SPARSE(192, SUMS_96, D_24(0), 96, 97, 98, 99, 100, 101);
  if constexpr (NT == 28) SPARSE(224, SUMS_112, D_28(0), 112, 113, 114, 115, 116, 117);
  if constexpr (NT == 32) SPARSE(256, SUMS_128, D_32(0), 128, 129, 130, 131, 132, 133);
}
