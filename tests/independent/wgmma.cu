// wgmma through CuTe's atoms: descriptors, swizzles, fragments and metadata are CuTe's; the host compares with three loops.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // 224 columns
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <cute/arch/mma_sm90_gmma_sparse.hpp>
#include <cute/arch/mma_sm90_gmma_sparse_ext.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm90_gmma_ext.hpp>
#include <cute/atom/mma_traits_sm90_gmma_sparse.hpp>
#include <cute/atom/mma_traits_sm90_gmma_sparse_ext.hpp>
#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

using namespace cute;
using namespace cute::SM90::GMMA;
using hlf = cutlass::half_t;


// C[BM, BN] = A[BM, BK] B[BN, BK]^T by GROUPS warpgroups; sums begin anew at k-step RESTART.
template <class MMA, class T, class SA, class SB, int BM, int BN, int BK, int GROUPS, bool REGISTERS, int RESTART>
__global__ __launch_bounds__(128 * GROUPS) void dense(T const* a, T const* b, float* c) {
    extern __shared__ __align__(1024) unsigned char shared[];
    Tensor sa = make_tensor(make_smem_ptr((T*)shared), SA{});
    Tensor sb = make_tensor(make_smem_ptr((T*)shared + cosize_v<SA>), SB{});
    Tensor ga = make_tensor(make_gmem_ptr(a), make_layout(Shape<Int<BM>, Int<BK>>{}, LayoutRight{}));
    Tensor gb = make_tensor(make_gmem_ptr(b), make_layout(Shape<Int<BN>, Int<BK>>{}, LayoutRight{}));
    Tensor gc = make_tensor(make_gmem_ptr(c), make_layout(Shape<Int<BM>, Int<BN>>{}, LayoutRight{}));
    for (int i = threadIdx.x; i < BM * BK; i += blockDim.x) sa(i / BK, i % BK) = ga(i / BK, i % BK);
    for (int i = threadIdx.x; i < BN * BK; i += blockDim.x) sb(i / BK, i % BK) = gb(i / BK, i % BK);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    TiledMMA mma = make_tiled_mma(MMA{}, Layout<Shape<Int<GROUPS>, _1, _1>>{});
    ThrMMA mine = mma.get_thread_slice(threadIdx.x);
    Tensor out = mine.partition_C(gc);
    Tensor sums = mine.make_fragment_C(out);
    Tensor rb = mine.make_fragment_B(mine.partition_B(sb));
    auto multiply = [&](auto const& ra) {
        warpgroup_fence_operand(sums);
        warpgroup_arrive();
        CUTE_UNROLL
        for (int k = 0; k < size<2>(ra); k++) {
            mma.accumulate_ = k == 0 || k == RESTART ? ScaleOut::Zero : ScaleOut::One;
            gemm(mma, ra(_, _, k), rb(_, _, k), sums);
        }
    };
    if constexpr (REGISTERS) {
        Tensor from = mine.partition_A(ga);
        Tensor ra = mine.make_fragment_A(from);
        copy(from, ra);
        multiply(ra);
    } else
        multiply(mine.make_fragment_A(mine.partition_A(sa)));
    warpgroup_commit_batch();
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    for (int i = 0; i < size(sums); i++) out(i) = float(sums(i));
}

// Sparse A of 64 rows: kept values in shared memory or registers, metadata as CuTe's ELayout has it, a k32 step at a time.
template <class Atom, class SA, class SB, int BN, int BK, bool REGISTERS, Major MB>
__global__ __launch_bounds__(128) void sparse(hlf const* a, hlf const* b, unsigned char const* codes, float* c) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using Traits = MMA_Traits<Atom>;
    Tensor sa = make_tensor(make_smem_ptr((hlf*)shared), SA{});
    Tensor sb = make_tensor(make_smem_ptr((hlf*)shared + cosize_v<SA>), SB{});
    for (int i = threadIdx.x; i < 64 * BK / 2; i += 128) sa(i / (BK / 2), i % (BK / 2)) = a[i];
    for (int i = threadIdx.x; i < BN * BK; i += 128) sb(i / BK, i % BK) = b[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const typename Traits::ELayout places_e{};  // (thread, value) -> row + 64 k
    const typename Traits::ALayout places_a{};  // k counts the columns before pruning
    const typename Traits::CLayout places_c{};
    float sums[BN / 2];
    for (float& x : sums) x = 0;
    CUTE_UNROLL
    for (int s = 0; s < BK / 32; s++) {
        uint32_t e = 0, r[4] = {};
        for (int v = 0; v < size<1>(places_e); v += 4) {  // four bits describe four columns of a row
            const int at = places_e(threadIdx.x, v);
            e |= (uint32_t)codes[(at % 64 * BK + 32 * s + at / 64) / 4] << v;
        }
        for (int v = 0; v < 8; v += 2) {
            const int at = places_a(threadIdx.x, 2 * v);
            memcpy(&r[v / 2], &a[at % 64 * (BK / 2) + 16 * s + at / 64 / 2], 4);
        }
        const uint64_t db = make_gmma_desc<MB>(local_tile(sb, Shape<Int<BN>, _32>{}, make_coord(0, s)));
        const uint64_t da = make_gmma_desc<Major::K>(local_tile(sa, Shape<_64, _16>{}, make_coord(0, s)));
        for (float& x : sums) warpgroup_fence_operand(x);
        warpgroup_arrive();
        [&]<int... I>(std::integer_sequence<int, I...>) {
            if constexpr (REGISTERS) Atom::fma(r[0], r[1], r[2], r[3], db, sums[I]..., e, ScaleOut::One);
            else Atom::fma(da, db, sums[I]..., e, ScaleOut::One);
        }(std::make_integer_sequence<int, BN / 2>{});
        warpgroup_commit_batch();
        warpgroup_wait<0>();
    }
    for (int i = 0; i < BN / 2; i++) {
        const int at = places_c(threadIdx.x, i);
        c[at % 64 * BN + at / 64] = sums[i];
    }
}

template <class T>
T* on_device(std::vector<T> const& x) {
    T* p;
    cudaMalloc(&p, x.size() * sizeof(T));
    cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

int pick(int lo, int hi) { return lo + rand() % (hi - lo + 1); }
int failures = 0, cases = 0;

void judge(char const* name, std::vector<float> const& a, std::vector<float> const& b, float* device, int m, int n, int k, int sign) {
    const cudaError_t error = cudaGetLastError();
    std::vector<float> c(m * n);
    cudaMemcpy(c.data(), device, c.size() * 4, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float s = 0;
            for (int x = 0; x < k; x++) s += a[i * k + x] * b[j * k + x];
            wrong += sign * s != c[i * n + j];
        }
    cases++, failures += wrong || error;
    printf("%s: %s, %d of %d wrong\n", wrong || error ? "Failed" : "ok", name, wrong, m * n);
    fflush(stdout);
}

template <class MMA, class T, class AtomA, class AtomB, int BM, int BN, int BK, int GROUPS = 1, bool REGISTERS = false, int RESTART = 0>
void run_dense(char const* name, int sign = 1) {
    using SA = decltype(tile_to_shape(AtomA{}, Shape<Int<BM>, Int<BK>>{}));
    using SB = decltype(tile_to_shape(AtomB{}, Shape<Int<BN>, Int<BK>>{}));
    std::vector<T> a(BM * BK), b(BN * BK);
    std::vector<float> fa(a.size()), fb(b.size());
    for (size_t i = 0; i < a.size(); i++) a[i] = T(fa[i] = pick(-4, 4));
    for (size_t i = 0; i < b.size(); i++) b[i] = T(fb[i] = pick(-4, 4));
    float* dc = on_device(std::vector<float>(BM * BN));
    dense<MMA, T, SA, SB, BM, BN, BK, GROUPS, REGISTERS, RESTART>
        <<<1, 128 * GROUPS, (cosize_v<SA> + cosize_v<SB>)*2>>>(on_device(a), on_device(b), dc);
    for (size_t i = 0; i < fa.size(); i++) fa[i] *= i % BK >= 16 * RESTART;
    judge(name, fa, fb, dc, BM, BN, BK, sign);
}

template <class Atom, class AtomA, class AtomB, int BN, int BK, bool REGISTERS, Major MB>
void run_sparse(char const* name) {
    using SA = decltype(tile_to_shape(AtomA{}, Shape<_64, Int<BK / 2>>{}));
    using SB = decltype(tile_to_shape(AtomB{}, Shape<Int<BN>, Int<BK>>{}));
    std::vector<hlf> a(64 * BK / 2), b(BN * BK);
    std::vector<float> full(64 * BK), fb(BN * BK);
    std::vector<unsigned char> codes(64 * BK / 4);
    for (size_t i = 0; i < codes.size(); i++) {
        const int low = pick(0, 2), high = pick(low + 1, 3);
        codes[i] = low | high << 2;
        a[2 * i] = hlf(full[4 * i + low] = pick(1, 4)), a[2 * i + 1] = hlf(full[4 * i + high] = pick(-4, -1));
    }
    for (size_t i = 0; i < b.size(); i++) b[i] = hlf(fb[i] = pick(-4, 4));
    float* dc = on_device(std::vector<float>(64 * BN));
    sparse<Atom, SA, SB, BN, BK, REGISTERS, MB>
        <<<1, 128, (cosize_v<SA> + cosize_v<SB>)*2>>>(on_device(a), on_device(b), on_device(codes), dc);
    judge(name, full, fb, dc, 64, BN, BK, 1);
}

#define ATOM(A) Layout_##A##_Atom<hlf>
#define DENSE(N, MA, MB, A, B) run_dense<MMA_64x##N##x16_F32F16F16_SS<Major::MA, Major::MB>, hlf, ATOM(A), ATOM(B), 64, N, 64>(#N " " #A " " #B)
#define SPARSED(N, MB, A, B) \
    run_sparse<SPARSE::GMMA_64x##N##x32_F32F16F16_SS<Major::K, Major::MB>, ATOM(A), ATOM(B), N, 128, false, Major::MB>("sparse " #N " " #A " " #B)

int main() {
    using Halves = MMA_64x64x16_F32F16F16_SS<Major::K, Major::K>;
    using FromRegisters = MMA_64x64x16_F32F16F16_RS<Major::K, Major::K>;
    using Negated = MMA_64x64x16_F32F16F16_SS<Major::K, Major::K, ScaleIn::Neg, ScaleIn::One>;
    using NegatedB = MMA_64x64x16_F32F16F16_SS<Major::K, Major::K, ScaleIn::One, ScaleIn::Neg>;
    using K128 = ATOM(K_SW128);
    using K64 = ATOM(K_SW64);
    using Sparse = SPARSE::GMMA_64x64x32_F32F16F16_RS<Major::K, Major::K>;
    DENSE(64, K, K, K_SW128, K_SW128);
    DENSE(64, K, K, K_SW64, K_SW64);
    DENSE(64, K, K, K_SW32, K_SW32);
    DENSE(64, K, K, K_INTER, K_INTER);
    DENSE(64, MN, MN, MN_SW128, MN_SW128);
    DENSE(64, MN, MN, MN_SW64, MN_SW64);
    DENSE(64, MN, MN, MN_SW32, MN_SW32);
    DENSE(64, MN, MN, MN_INTER, MN_INTER);
    DENSE(128, K, MN, K_SW64, MN_SW128);
    DENSE(256, MN, K, MN_SW32, K_SW128);
    DENSE(8, K, K, K_SW128, K_SW32);
    DENSE(192, K, K, K_SW128, K_SW128);
    DENSE(16, K, K, K_SW128, K_SW128);
    DENSE(32, K, K, K_SW128, K_SW128);
    DENSE(96, K, K, K_SW128, K_SW128);
    DENSE(224, K, K, K_SW128, K_SW128);
    run_dense<FromRegisters, hlf, K128, K128, 64, 64, 64, 1, true>("A in registers");
    run_dense<MMA_64x64x16_F32F16F16_RS<Major::K, Major::MN>, hlf, K128, ATOM(MN_SW64), 64, 64, 64, 1, true>("A in registers, MN_SW64");
    run_dense<MMA_64x64x16_F16F16F16_SS<Major::K, Major::K>, hlf, K128, K64, 64, 64, 64>("sums of halves");
    run_dense<MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::MN>, cutlass::bfloat16_t, Layout_K_SW64_Atom<cutlass::bfloat16_t>,
        Layout_MN_SW128_Atom<cutlass::bfloat16_t>, 64, 64, 64>("bfloat16");
    run_dense<Negated, hlf, K128, K128, 64, 64, 64>("A negated", -1);
    run_dense<NegatedB, hlf, K128, K128, 64, 64, 64>("B negated", -1);
    run_dense<Halves, hlf, K128, K128, 128, 128, 128>("two by two tiles, two patterns of K");
    run_dense<Halves, hlf, K128, K128, 128, 64, 128, 2>("two warpgroups");
    run_dense<FromRegisters, hlf, K128, K64, 64, 64, 64, 1, true, 2>("sums that begin anew");
    SPARSED(64, K, K_SW128, K_SW128);
    SPARSED(64, K, K_SW64, K_SW64);
    SPARSED(64, MN, K_SW32, MN_SW128);
    SPARSED(128, MN, K_INTER, MN_SW64);
    SPARSED(16, K, K_SW128, K_SW128);
    SPARSED(32, K, K_SW128, K_SW128);
    SPARSED(96, K, K_SW128, K_SW128);
    SPARSED(192, K, K_SW128, K_SW128);
    SPARSED(224, K, K_SW128, K_SW128);
    SPARSED(256, K, K_SW128, K_SW128);
    run_sparse<Sparse, K128, K128, 64, 128, true, Major::K>("sparse A in registers");
    printf("%s: %d of %d\n", failures ? "Failed" : "Passed", cases - failures, cases);
    return failures;
}
