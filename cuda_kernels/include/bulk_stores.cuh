// Bulk copies the way back, of sm_90: from shared memory to a tensor (beside include/bulk.cuh; sections of the PTX ISA 9.0). TMA
// leaves out what lies outside of the tensor.
#pragma once
#include "bulk.cuh"

// 9.7.9.27.1.2 cp.async.bulk.tensor: to the map's box from pixel `at` on, the channels from `c` on.
__device__ __forceinline__ void store_box(const TensorMap* map, int c, const FirstPixel& at, u32 smem) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c), "r"(at.w),
               "r"(at.h), "r"(at.n), "r"(smem)
               : "memory");
}
// 9.7.9.25.4.4 This thread's stores so far are a group; 9.7.9.25.4.5 wait until all groups but the last PENDING have read shared
// memory.
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_reading_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
