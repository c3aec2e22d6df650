// Every PTX instruction that C++ cannot say, wrapped once, with its section of the PTX ISA (9.0).
// Conventions: lane = 4*g + t. Shared addresses are 32-bit, as `smem_u32` gives them.
#pragma once
#include <cuda_fp16.h>

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ u32 smem_u32(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// 9.7.14.5.8 mma.m16n8k16: d[4] += a[8 halfs] * b[4 halfs].
// a: (g,2t) (g+8,2t) (g,2t+8) (g+8,2t+8); b: rows 2t and 2t+8 of column g; d: (g,2t) (g,2t+1) (g+8,2t) (g+8,2t+1).
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint4& a, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// 9.7.14.6 mma.sp::ordered_metadata.m16n8k32: a holds the 2 kept values of each 4 columns, b all 32 rows.
// SELECTOR 0 reads the metadata words of lanes t = 0, 1; 1 those of lanes t = 2, 3.
template <int SELECTOR>
__device__ __forceinline__ void mma_sp_16832(float (&d)[4], const uint4& a, const uint4& b, u32 metadata) {
  asm volatile(
      "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b.x), "r"(b.y), "r"(b.z), "r"(b.w), "r"(metadata), "n"(SELECTOR));
}

// 9.7.14.5.15 ldmatrix: four 8x8 matrices of halfs; lanes 8i..8i+7 give the row addresses of matrix i.
__device__ __forceinline__ uint4 ldmatrix_x4(u32 address) {
  uint4 r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}

// 9.7.14.5.17 movmatrix: transposes an 8x8 matrix of halfs held as (row g, columns 2t, 2t+1).
__device__ __forceinline__ u32 movmatrix_trans(u32 v) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

// 9.7.9.25.3.1 cp.async: 16 bytes global -> shared; `bytes` 0 reads nothing and writes zeros.
__device__ __forceinline__ void cp_async_16(u32 smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// 9.7.9.8, 9.7.9.12 ld/st.global of 16 bytes: left to itself the compiler may split them into their members. Not volatile:
// a load may move, but never past a store (its "memory" clobber).
__device__ __forceinline__ uint4 ldg_128(const void* address) {
  uint4 r;
  asm("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(address) : "memory");
  return r;
}
// The same past L1: for bytes that another block of this launch has written.
__device__ __forceinline__ uint4 ldg_128_cg(const void* address) {
  uint4 r;
  asm volatile("ld.global.cg.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(address)
               : "memory");
  return r;
}
// The same where `ok`, else zeros: predicated, so that no branch stands between the loads of a row.
__device__ __forceinline__ uint4 ldg_128_if(bool ok, const void* address) {
  uint4 r;
  asm("{ .reg .pred q; setp.ne.b32 q, %5, 0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@q ld.global.v4.b32 {%0,%1,%2,%3}, [%4]; }"
      : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w)
      : "l"(address), "r"(static_cast<u32>(ok))
      : "memory");
  return r;
}
// 9.7.9.15 prefetch: the cache line of an address into L2, which nothing waits for.
__device__ __forceinline__ void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
__device__ __forceinline__ void stg_128(void* address, const uint4& v) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// 9.7.9 ld/st.shared with explicit widths, so that bank behaviour is what the source says.
__device__ __forceinline__ uint4 lds_128(u32 address) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(address)
               : "memory");
  return r;
}
__device__ __forceinline__ uint2 lds_64(u32 address) {
  uint2 r;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ u32 lds_32(u32 address) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ u16 lds_16(u32 address) {
  u16 r;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(r) : "r"(address) : "memory");
  return r;
}
__device__ __forceinline__ void sts_128(u32 address, const uint4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void sts_32(u32 address, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void sts_16(u32 address, u16 v) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}

// 9.7.3.22, 9.7.3.16 ex2 and rcp, one instruction each: 2^v within 2 ulp and 1 / v within 1 ulp; subnormal operands and results
// are 0, and 1 / v is that from |v| > 2^126 on.
__device__ __forceinline__ float ex2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
// exp(v): 0 below v = -87.3. Rounding v log2 e first adds |v| 0.7 ulp.
constexpr float LOG2_E = 1.44269504f;
__device__ __forceinline__ float fast_exp(float v) { return ex2_approx(v * LOG2_E); }
__device__ __forceinline__ float rcp_approx(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// 9.7.13.13 griddepcontrol, sm_90: of a launch that may begin before the one ahead of it has ended. `wait` returns when that
// one has ended and its stores can be seen; whatever it wrote or still reads is touched after `wait` only. `release` lets the
// next launch begin as soon as all blocks of this one have; it waits by itself for what it needs.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void release_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
