// CUTLASS's 2:4 sparse matrix product for Hopper, of its example 62: d[m, n] = a[m, k] b[n, k], FP16 with FP32 sums. BM, BN, BK:
// the block's tile, which two warpgroups share; STAGES of shared memory.
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/transform/device/transform_universal_adapter.hpp"
#include "cutlass/transform/kernel/sparse_gemm_compressor.hpp"
#include "cutlass/util/packed_stride.hpp"

using Half = cutlass::half_t;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Tile = cute::Shape<cute::Int<BM>, cute::Int<BN>, cute::Int<BK>>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
using Problem = cute::Shape<int, int, int, int>;
using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float,
    float, Half, Row, 8, Half, Row, 8, cutlass::epilogue::NoSmemWarpSpecialized>::CollectiveOp;
using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassSparseTensorOp, Half, Row, 8, Half, Column, 8, float, Tile, Cluster,
    cutlass::gemm::collective::StageCount<STAGES>, cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
using Config = typename Mainloop::SparseConfig;
using Compressed = cutlass::transform::kernel::StructuredSparseCompressorUtility<Problem, Half, Row, Config>;
using Compressor = cutlass::transform::device::TransformUniversalAdapter<
    cutlass::transform::kernel::StructuredSparseCompressor<Problem, Half, Row, Config, cutlass::arch::Sm90>>;

// values, metadata: room for a's, k and k / 8 bytes a row, rows and k rounded up to 256. -> cutlass::Status.
extern "C" int run(Half* a, Half* b, Half* d, Half* values, typename Mainloop::ElementE* metadata, int m, int n, int k) {
    const Problem problem{m, n, k, 1};
    const auto rows = cutlass::make_cute_packed_stride(cutlass::gemm::TagToStrideA_t<Row>{}, {m, k, 1});
    typename Compressor::Arguments compress{problem, {a, rows, values, metadata}, {}};
    Compressor compressor;
    cutlass::Status status = compressor.can_implement(compress);
    if (status == cutlass::Status::kSuccess) status = compressor.initialize(compress, nullptr);
    if (status == cutlass::Status::kSuccess) status = compressor.run();
    if (status != cutlass::Status::kSuccess) return int(status);
    const auto columns = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, {n, k, 1});
    const auto out = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, {m, n, 1});
    typename Gemm::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        problem,
        {values, Config::fill_layoutA(problem), b, columns, metadata, Config::fill_layoutE(problem)},
        {{1.0f, 0.0f}, d, out, d, out}};
    arguments.hw_info.sm_count = 132;
    Gemm op;
    status = op.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = op.initialize(arguments);
    return int(status == cutlass::Status::kSuccess ? op.run() : status);
}
