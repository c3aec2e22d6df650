// Copies, loads and addresses as the implicit GEMM's main loop needs them: no branches, few instructions beside the products.
#pragma once
#include "ptx.cuh"

// As cp_async_16, or nothing at all: predicated, so that no branch parts the copies from what is computed beside them.
__device__ __forceinline__ void cp_async_16_if(bool wanted, u32 smem, const void* global, int bytes) {
  asm volatile(
      "{ .reg .pred q; setp.ne.b32 q, %3, 0;\n"
      "@q cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2; }" ::"r"(smem),
      "l"(global), "r"(bytes), "r"(static_cast<u32>(wanted))
      : "memory");
}

// 9.7.9.8 ld.global of 8 bytes. Volatile: a stage's loads stay where the loop has them.
__device__ __forceinline__ uint2 ldg_64(const void* address) {
  uint2 r;
  asm volatile("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(address) : "memory");
  return r;
}

// The address of an element: ptxas makes one instruction of both, IMAD.WIDE. Left to itself the compiler adds offsets, widens the
// sum and adds the base: four.
__device__ __forceinline__ const __half* element_at(const __half* base, int offset) {
  const __half* r;
  asm("{ .reg .b64 bytes; mul.wide.s32 bytes, %1, 2; add.s64 %0, %2, bytes; }" : "=l"(r) : "r"(offset), "l"(base));
  return r;
}
