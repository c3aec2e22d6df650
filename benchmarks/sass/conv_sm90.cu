// CUTLASS's convolution for Hopper: y[n, p, q, k] = x[n, h, w, c] * f[k, r, s, c], FP16 with FP32 sums, pixels along its rows, by
// im2col tensor maps. BM, BN, BK: the block's tile; STAGES of shared memory. One warpgroup multiplies, one copies.
#include "cute/tensor.hpp"
#include <cutlass/kernel_hardware_info.hpp>
#include "cutlass/conv/collective/collective_builder.hpp"
#include "cutlass/conv/convolution.h"
#include "cutlass/conv/device/conv_universal_adapter.hpp"
#include "cutlass/conv/kernel/conv_universal.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"

using Half = cutlass::half_t;
using Layout = cutlass::layout::TensorNHWC;
using Tile = cute::Shape<cute::Int<BM>, cute::Int<BN>, cute::Shape<cute::Int<BK>>>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    Half, Layout, 8, Half, Layout, 8, cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cutlass::conv::Operator::kFprop, Half, Layout, 8, Half, Layout, 8, float,
    Tile, Cluster, cutlass::conv::collective::StageCount<STAGES>, cutlass::conv::collective::KernelScheduleAuto>::CollectiveOp;
using Problem = cutlass::conv::ConvProblemShape<cutlass::conv::Operator::kFprop, 2>;
using Conv = cutlass::conv::device::ConvUniversalAdapter<cutlass::conv::kernel::ConvUniversal<Problem, Mainloop, Epilogue>>;

// Square images and filters, stride 1, padding for outputs of the same size -> cutlass::Status.
extern "C" int run(Half* x, Half* f, Half* y, int n, int size, int c, int k, int r) {
    const int pad = r / 2;
    const Problem problem(cutlass::conv::Mode::kCrossCorrelation, {n, size, size, c}, {k, r, r, c}, {pad, pad}, {pad, pad}, {1, 1},
                          {1, 1}, 1);
    typename Epilogue::StrideD out{};
    cute::for_each(cute::make_seq<3>{}, [&](auto i) { cute::get<0, i>(out) = problem.stride_C[2 - i]; });
    typename Conv::Arguments arguments{};
    arguments.problem_shape = problem;
    arguments.mainloop = {x, f};
    arguments.epilogue = {{1.0f, 0.0f}, y, out, y, out};
    Conv op;
    cutlass::Status status = op.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = op.initialize(arguments);
    return int(status == cutlass::Status::kSuccess ? op.run() : status);
}
