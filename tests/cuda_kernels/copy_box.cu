// Copies a box of a tensor map, or with IM2COL a column of pixels, to y as it lies in shared memory.
#include "ptx.cuh"

#ifndef BYTES
#define BYTES 1024
#endif
#ifndef IM2COL
#define IM2COL 0
#endif

struct alignas(64) TensorMap { unsigned long long opaque[16]; };

struct CopyBoxParams {
  u32* y;
  TensorMap map;
  int at[4];  // coordinates, the innermost first; without IM2COL two of them
  int s, r;   // offsets
};

extern "C" __global__ void __launch_bounds__(32) copy_box(const __grid_constant__ CopyBoxParams p) {
  __shared__ alignas(1024) u32 tile[BYTES / 4];
  __shared__ alignas(8) unsigned long long arrived;
  const u32 to = u32(__cvta_generic_to_shared(tile)), bar = u32(__cvta_generic_to_shared(&arrived));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar), "n"(BYTES) : "memory");
#if IM2COL
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
                 :: "r"(to), "l"(&p.map), "r"(p.at[0]), "r"(p.at[1]), "r"(p.at[2]), "r"(p.at[3]), "r"(bar), "h"(short(p.s)), "h"(short(p.r)) : "memory");
#else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&p.map), "r"(p.at[0]), "r"(p.at[1]), "r"(bar) : "memory");
#endif
  }
  asm volatile("{\n.reg .pred done;\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra WAIT;\n}" :: "r"(bar) : "memory");
  for (int i = threadIdx.x; i < BYTES / 4; i += 32) p.y[i] = tile[i];
}
