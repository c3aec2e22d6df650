// conv_dense: implicit-GEMM convolution on mma.sync.m16n8k16, FP16 in and out, FP32 accumulate.
//
//            N: pixels                    A (weights)  packed in fragment order: a warp's operand is one 16-byte load
//          +-----------+                               per lane, no ldmatrix, no bank conflict
//          |  X  BKxBN |                  B (pixels)   [pixel][BK channels] rows in shared memory, 16-byte chunks
//   +------+-----------+                               swizzled; ldmatrix.x4 reads 16 pixels x 16 channels
//   |W BMxBK|  Y BMxBN |  M: channels     warps        WARPS_M x WARPS_N, each WM x WN of Y in registers
//   +------+-----------+
//
// The trick: K runs over (tap, 8-channel chunk), so a stage may span taps and a 3-channel input wastes 5 of 8, not 61 of 64.
#include "dense_stage.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_dense(const __grid_constant__ ConvParams p) {
  convolve<DenseProduct>(p);
}
