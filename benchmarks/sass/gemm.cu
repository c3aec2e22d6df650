// CUTLASS's matrix product d[m, n] = a[m, k] b[n, k], FP16 with FP32 sums. BM, BN, BK: the block's tile; WARPS_M x WARPS_N warps
// share it; STAGES of shared memory.
#include "cutlass/gemm/device/gemm.h"

using Half = cutlass::half_t;
using Row = cutlass::layout::RowMajor;
using Gemm = cutlass::gemm::device::Gemm<
    Half, Row, Half, cutlass::layout::ColumnMajor, Half, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<BM, BN, BK>, cutlass::gemm::GemmShape<BM / WARPS_M, BN / WARPS_N, BK>,
    cutlass::gemm::GemmShape<16, 8, 16>, cutlass::epilogue::thread::LinearCombination<Half, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, STAGES>;

// -> cutlass::Status.
extern "C" int run(Half* a, Half* b, Half* d, int m, int n, int k) {
    const typename Gemm::Arguments arguments{{m, n, k}, {a, k}, {b, k}, {d, n}, {d, n}, {1.0f, 0.0f}};
    Gemm op;
    cutlass::Status status = op.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = op.initialize(arguments);
    return int(status == cutlass::Status::kSuccess ? op() : status);
}
