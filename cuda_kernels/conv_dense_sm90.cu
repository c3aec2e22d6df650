// conv_dense_sm90: conv_dense on wgmma.m64nNk16, Hopper's asynchronous tensor cores, for sm_90a alone.
//
//            N: pixels                    A (weights)  conv_dense's fragments: each warp of a warpgroup loads those of its own
//          +-----------+                               16 rows to registers, so that packing and accumulators are the same
//          |  X  64xBN |                  B (pixels)   [pixel][64 channels] rows of 128 bytes in shared memory, swizzled as
//   +------+-----------+                               wgmma's descriptors have it: tensor cores read them by themselves
//   |W BMx64  Y BMxBN  |  M: channels     warps        WARPS_M x 1, each BM / WARPS_M x BN of Y
//   +------+-----------+
//
// The trick: a step's weights go to one of two sets of registers while the other's products are in flight: no wait for all.
#include "wgmma_gemm.cuh"

struct DenseWgmma {
  static constexpr int A_TILE = BK / 16 * 512, E_PAIR = 0, E_BYTES = 0;  // bytes of one 16-row tile per stage
  static constexpr int STEPS = BK / 16;
  static constexpr bool LAST_TURN_APART = false;
  uint4 a[2][MT];

  __device__ __forceinline__ void fetch(u32 stage, int step) {
    const u32 at = stage + threadIdx.x / 32 * MT * A_TILE + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < MT; ++i) a[step % 2][i] = lds_128(at + i * A_TILE + step * 512);
  }

  __device__ __forceinline__ void multiply(u32 pixels, int step, float (&acc)[MT][NT][4]) const {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < MT; ++i) wgmma_dense(acc[i], a[step % 2][i], rows_of_128_bytes(pixels + step * 32));
    wgmma_commit();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_dense_sm90(const __grid_constant__ ConvParams p) {
  convolve_with_wgmma<DenseWgmma>(p);
}
