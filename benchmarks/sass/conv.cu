// CUTLASS's convolution of kOptimized addresses: y[n, p, q, k] = x[n, h, w, c] * f[k, r, s, c], FP16 with FP32 sums, pixels along
// its rows. BM, BN, BK: the block's tile; WARPS_M x WARPS_N warps share it; STAGES of shared memory.
#include "cutlass/conv/kernel/default_conv2d_fprop.h"

#include "cutlass/conv/device/implicit_gemm_convolution.h"

using Half = cutlass::half_t;
using Layout = cutlass::layout::TensorNHWC;
using Kernel = cutlass::conv::kernel::DefaultConv2dFprop<
    Half, Layout, Half, Layout, Half, Layout, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<BM, BN, BK>, cutlass::gemm::GemmShape<BM / WARPS_M, BN / WARPS_N, BK>,
    cutlass::gemm::GemmShape<16, 8, 16>, cutlass::epilogue::thread::LinearCombination<Half, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, STAGES, cutlass::arch::OpMultiplyAdd,
    cutlass::conv::IteratorAlgorithm::kOptimized>::Kernel;
using Convolution = cutlass::conv::device::ImplicitGemmConvolution<Kernel>;

// Square images and filters, stride 1, padding for outputs of the same size -> cutlass::Status.
extern "C" int run(Half* x, Half* f, Half* y, int n, int size, int c, int k, int r) {
    const int pad = r / 2;
    const cutlass::conv::Conv2dProblemSize problem({n, size, size, c}, {k, r, r, c}, {pad, pad, pad, pad}, {1, 1}, {1, 1},
                                                   cutlass::conv::Mode::kCrossCorrelation, 1);
    const auto pixels = Layout::packed({n, size, size, c}), out = Layout::packed({n, size, size, k});
    const typename Convolution::Arguments arguments{problem, {x, pixels}, {f, Layout::packed({k, r, r, c})}, {y, out}, {y, out},
                                                    {1.0f, 0.0f}};
    Convolution op;
    cutlass::Status status = op.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = op.initialize(arguments);
    return int(status == cutlass::Status::kSuccess ? op() : status);
}
