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
// The trick: no thread touches what is multiplied. Copies run STAGES ahead, into the next tile too.
#include "tma_gemm.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((TEAMS + 1) * 128, RESIDENT)
    conv_dense_sm90(const __grid_constant__ ConvParams p) {
  convolve_with_tma<false>(p);
}
