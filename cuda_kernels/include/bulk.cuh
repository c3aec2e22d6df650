// Bulk copies, mbarriers and clusters of sm_90: every PTX instruction of theirs that a kernel uses, wrapped once, with its section
// of the PTX ISA (9.0). Addresses are those of this block's shared memory, as `smem_u32` gives them.
#pragma once
#include "ptx.cuh"
#include "tensor_map.cuh"

// 9.7.13.15.9 mbarrier.init: a phase ends when `count` threads have arrived and all expected bytes have.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// 9.7.13.5 fence.mbarrier_init: before other blocks of the cluster, and bulk copies, meet the barriers.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// 9.7.13.15.13 mbarrier.arrive.
__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same at the barrier that block `rank` of the cluster has at this address. 9.7.9.24 mapa: where that is.
__device__ __forceinline__ void mbarrier_arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// The same; so many bytes of copies are part of the phase.
__device__ __forceinline__ void mbarrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// 9.7.13.15.16 mbarrier.try_wait: until the phase of that parity has ended. Of a new barrier that of parity 1 has.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  u32 ended;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!ended);
}

// 9.7.9.25.4.1 cp.async.bulk: `bytes`, a multiple of 16, as they lie. COPIES: to this address in each of so many blocks of the
// cluster, whose barriers at `barrier` it completes.
template <int COPIES>
__device__ __forceinline__ void copy_bulk(u32 smem, const void* global, u32 bytes, u32 barrier) {
  if (COPIES > 1)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(smem),
        "l"(global), "r"(bytes), "r"(barrier), "h"(static_cast<u16>((1 << COPIES) - 1))
        : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem), "l"(global),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
// 9.7.9.27.1.2 cp.async.bulk.tensor of a box: of the map's rows from `row` on, the channels from `c` on. COPIES: as above.
template <int COPIES>
__device__ __forceinline__ void copy_rows(u32 smem, const TensorMap* map, int c, int row, u32 barrier) {
  if (COPIES > 1)
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(smem),
        "l"(map), "r"(c), "r"(row), "r"(barrier), "h"(static_cast<u16>((1 << COPIES) - 1))
        : "memory");
  else
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     smem),
                 "l"(map), "r"(c), "r"(row), "r"(barrier)
                 : "memory");
}
// The first pixel of a column, in the input: where the window's first tap lies.
struct FirstPixel {
  int w, h, n;
};
// The same of a column (im2col): of the pixels from `at` on, in the order of the output's, tap (r, s), of which the map has
// strides and padding: r and s are counted in pixels of the input.
template <int COPIES>
__device__ __forceinline__ void copy_column(u32 smem, const TensorMap* map, int c, const FirstPixel& at, int r, int s, u32 barrier) {
  if (COPIES > 1)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8}, %9;" ::"r"(smem),
        "l"(map), "r"(c), "r"(at.w), "r"(at.h), "r"(at.n), "r"(barrier), "h"(static_cast<u16>(s)), "h"(static_cast<u16>(r)),
        "h"(static_cast<u16>((1 << COPIES) - 1))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};" ::"r"(smem),
        "l"(map), "r"(c), "r"(at.w), "r"(at.h), "r"(at.n), "r"(barrier), "h"(static_cast<u16>(s)), "h"(static_cast<u16>(r))
        : "memory");
}

// The same of a box of the map's size, four-dimensional, from pixel `at` on.
template <int COPIES>
__device__ __forceinline__ void copy_box(u32 smem, const TensorMap* map, int c, const FirstPixel& at, u32 barrier) {
  if (COPIES > 1)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(smem),
        "l"(map), "r"(c), "r"(at.w), "r"(at.h), "r"(at.n), "r"(barrier), "h"(static_cast<u16>((1 << COPIES) - 1))
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            smem),
        "l"(map), "r"(c), "r"(at.w), "r"(at.h), "r"(at.n), "r"(barrier)
        : "memory");
}

// 9.7.13.1 bar: two warpgroups share a barrier; one arrives and goes on, the other waits for that.
__device__ __forceinline__ void tell_other_warpgroup(int barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void wait_for_other_warpgroup(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }

// 10.19 %cluster_ctarank: this block's number in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// 9.7.9.8 ld.shared::cluster of 16 bytes: from this address in block `rank` of the cluster.
__device__ __forceinline__ uint4 lds_128_of(u32 address, u32 rank) {
  uint4 r;
  asm volatile(
      "{ .reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %4, %5;\n"
      "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [there]; }"
      : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
      : "r"(address), "r"(rank)
      : "memory");
  return r;
}
// 9.7.9.13 st.async: a float to this address in block `rank` of the cluster, whose mbarrier at `barrier` it completes.
__device__ __forceinline__ void store_async(u32 address, float v, u32 rank, u32 barrier) {
  asm volatile(
      "{ .reg .b32 there, ends;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 ends, %3, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], %1, [ends]; }" ::"r"(address),
      "f"(v), "r"(rank), "r"(barrier)
      : "memory");
}
// 9.7.13.4 barrier.cluster: of all threads of all its blocks. `arrive`, for a `wait` later on, tells of mbarriers alone, which
// fence_mbarrier_init covers: with more there is a fence of the whole GPU in it.
__device__ __forceinline__ void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  wait_for_cluster();
}
// The same where no thread reads what another has written: a release would wait until all stores so far are in memory.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// 9.7.19.6 setmaxnreg: the warpgroup gives registers back, or waits until it has more of them.
template <int COUNT>
__device__ __forceinline__ void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
