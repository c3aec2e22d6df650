// CUTLASS's matrix product for Hopper, of its example 48: d[m, n] = a[m, k] b[n, k], FP16 with FP32 sums. BM, BN, BK: the
// block's tile; STAGES of shared memory; two warpgroups share a tile or, with PINGPONG, each has its own in turn.
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"

using Half = cutlass::half_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::Int<BM>, cute::Int<BN>, cute::Int<BK>>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Schedule = cute::conditional_t<PINGPONG, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                     cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float,
    Half, Row, 8, Half, Row, 8, cutlass::epilogue::NoSmemWarpSpecialized>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Half, Row, 8, Half, Column, 8, float, Tile, Cluster,
    cutlass::gemm::collective::StageCount<STAGES>, Schedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

// -> cutlass::Status.
extern "C" int run(Half* a, Half* b, Half* d, int m, int n, int k) {
    const auto rows = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, {m, k, 1});
    const auto columns = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    const auto out = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm, {m, n, k}, {a, rows, b, columns}, {{1.0f, 0.0f}, d, out, d, out}};
    arguments.hw_info.sm_count = 132;
    Gemm op;
    cutlass::Status status = op.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = op.initialize(arguments);
    return int(status == cutlass::Status::kSuccess ? op.run() : status);
}
