// CUTLASS's 2:4 sparse matrix product d[m, n] = a[m, k] b[n, k], FP16 with FP32 sums. BM, BN, BK: the block's tile; WARPS_M x
// WARPS_N warps share it; STAGES of shared memory.
#include "cutlass/gemm/device/gemm_sparse.h"
#include "cutlass/util/host_reorder.h"

using Half = cutlass::half_t;
using Row = cutlass::layout::RowMajor;
using Gemm = cutlass::gemm::device::SparseGemm<
    Half, Row, Half, cutlass::layout::ColumnMajor, Half, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<BM, BN, BK>, cutlass::gemm::GemmShape<BM / WARPS_M, BN / WARPS_N, BK>,
    cutlass::gemm::GemmShape<16, 8, 32>, cutlass::epilogue::thread::LinearCombination<Half, 8, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>, STAGES>;

// a: the m x k / 2 values that are kept; e, m x k / 16, of each its place among four, two bits; reordered: as much room.
// -> cutlass::Status.
extern "C" int run(Half* a, Half* b, Half* d, Gemm::ElementE* e, Gemm::ElementE* reordered, int m, int n, int k) {
    const int words = k / Gemm::kSparse / Gemm::kElementsPerElementE;
    const auto layout = Gemm::LayoutE::packed({m, words});
    cutlass::reorder_meta(cutlass::TensorRef<Gemm::ElementE, Gemm::LayoutE>(reordered, layout),
                          cutlass::TensorRef<Gemm::ElementE, Row>(e, words), {m, n, words});
    const typename Gemm::Arguments arguments{{m, n, k}, {a, k / Gemm::kSparse}, {b, k}, {d, n}, {d, n}, {reordered, layout},
                                             {1.0f, 0.0f}};
    Gemm op;
    cutlass::Status status = op.can_implement(arguments);
    if (status == cutlass::Status::kSuccess) status = op.initialize(arguments);
    return int(status == cutlass::Status::kSuccess ? op() : status);
}
