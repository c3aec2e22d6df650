// conv_dense_sm90: convolution on wgmma.m64nNk16, Hopper's asynchronous tensor cores, and TMA, for sm_90a alone.
//
//              N: pixels                     A (weights)  64 rows of 64 channels of one tap, 128 bytes each, packed as tensor
//            +-------------+                              cores read them: a bulk copy each
//            | X 64xTILE_N |                 B (pixels)   [pixel][64 channels] by im2col maps, zeros outside included; 1 x 1 of
//   +--------+-------------+                              stride 1 by maps of rows
//   |W TILE_M|  Y          |  M: channels    warpgroups   TEAMS multiply, one copies
//   |   x64  |             |
//   +--------+-------------+
//
// The trick: no thread touches what is multiplied. Copies run STAGES ahead, into the next tile too. K_STEPS of 16 channels of a stage
// are multiplied; the others of its 64 are zeros.
#include "tma_gemm.cuh"

struct DenseProduct {
  static constexpr int A_BYTES = 64 * 128, E_BYTES = 0, ARRIVING = A_BYTES;
  static constexpr bool LOADS = false, RESIDENT = false;
  __device__ __forceinline__ void begin(const ConvParams&, int, const Share&) {}

  __device__ __forceinline__ void multiply(const Ring<DenseProduct>& ring, u32 turn, int first, int count,
                                           float (&acc)[OWN][TILE_NT][4]) {
    for (int k = 0; k < count; ++k, ++turn) {
      const u32 weights = ring.stage(turn) + first * TAPS * A_BYTES, pixels = ring.stage(turn) + ring.B_AT;
      ring.wait_until_full(turn);
      wgmma_fence();
#pragma unroll
      for (int r = 0; r < TAPS; ++r)
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
#pragma unroll
          for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int image = 0; image < IMAGES; ++image)
              wgmma_dense(sums_of(acc[i], image), rows_of_128_bytes(weights + (i * TAPS + r) * A_BYTES + step * 32),
                          rows_of_128_bytes(pixels + image * IMAGE_BYTES + r * TAP_BYTES + step * 32));
      wgmma_commit();
      wgmma_wait<1>();
      if (k) ring.leave(turn - 1);
    }
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER* CLUSTER_K, 1, 1) __launch_bounds__((TEAMS + 1) * 128, 1)
    conv_dense_sm90(const __grid_constant__ TmaParams p) {
  convolve_with_tma<DenseProduct>(p);
}
