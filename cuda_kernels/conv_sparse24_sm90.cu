// conv_sparse24_sm90: conv_dense_sm90 on wgmma.sp.m64nNk32, for 2:4 weights.
//
//   A (weights)    64 rows of the 32 values that are kept of 64 channels, 64 bytes each
//   E (metadata)   behind them, 512 bytes for 64 rows: words of 16 rows and a k32 step, which a warp loads to registers a step ahead
//
// The trick: both k32 steps are selector 0, which has witnesses; a word is loaded anew, never into a register in flight.
#include "tma_gemm.cuh"

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__((TEAMS + 1) * 128, RESIDENT)
    conv_sparse24_sm90(const __grid_constant__ ConvParams p) {
  convolve_with_tma<true>(p);
}
