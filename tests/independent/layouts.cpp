// Evaluates CuTe's layouts on the host and prints them, one JSON record a line; layouts.py compiles and runs it. No CUDA compiler.
//
//   {"name", "threads", "values", "rows", "at"}   thread * values + value -> row + rows * column of the operand
//   {"name", "threads", "values", "at"}           ldmatrix: thread * values + value -> 8 * address of lane + column of that row
//   {"name", "chunks", "at"}                      swizzle: 16-byte chunk of a tile -> the chunk's place
//   {"name", "major", "at", "descriptors"}        a tile of 64 x 64 halves, k fastest: place of each half; a descriptor per 16 of k
//   {"name", "rows", "at"}                        metadata of 2:4: byte of each group of eight columns
#include <cstddef>
#include <cstdint>
#include <cstdio>
#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
alignas(4096) static unsigned char shared_memory[1 << 16];
inline size_t __cvta_generic_to_shared(const void* p) { return (const unsigned char*)p - shared_memory; }

#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/atom/mma_traits_sm90_gmma_sparse.hpp>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/builders/sm90_sparse_config.inl>

using namespace cute;
using cutlass::half_t;

template <class At>
void print_list(int count, At at) {
    printf("\"at\": [");
    for (int i = 0; i < count; i++) printf(i ? ",%d" : "%d", at(i));
    printf("]");
}

template <class Layout>
void fragment(const char* name, int rows, Layout layout, int threads) {
    const int values = size<1>(layout);
    printf("{\"name\": \"%s\", \"threads\": %d, \"values\": %d, \"rows\": %d, ", name, threads, values, rows);
    print_list(threads * values, [&](int i) { return int(layout(i / values, i % values)); });
    printf("}\n");
}

template <class Op>
void mma(const char* name) {
    using Traits = MMA_Traits<Op>;
    char full[64];
    snprintf(full, sizeof full, "%s A", name), fragment(full, 16, typename Traits::ALayout{}, 32);
    snprintf(full, sizeof full, "%s B", name), fragment(full, 8, typename Traits::BLayout{}, 32);
    snprintf(full, sizeof full, "%s C", name), fragment(full, 16, typename Traits::CLayout{}, 32);
}

// A source lane gives the address of 128 bits; a destination lane receives `values` halves of the bits that all gave.
template <class Op>
void ldmatrix(const char* name, int addresses) {
    using Traits = Copy_Traits<Op>;
    typename Traits::SrcLayout source;
    typename Traits::DstLayout target;
    const int values = size<1>(target) / 16;
    printf("{\"name\": \"%s\", \"threads\": 32, \"values\": %d, ", name, values);
    print_list(32 * values, [&](int i) {
        const int bit = target(i / values, i % values * 16);
        for (int lane = 0; lane < addresses; lane++)
            for (int column = 0; column < 8; column++)
                if (int(source(lane, 16 * column)) == bit) return 8 * lane + column;
        return -1;
    });
    printf("}\n");
}

template <class Swizzle>
void swizzle(const char* name, int chunks) {  // of a row
    printf("{\"name\": \"%s\", \"chunks\": %d, ", name, chunks);
    print_list(32 * chunks, [&](int i) { return int(Swizzle{}(16 * i)) / 16; });
    printf("}\n");
}

template <GMMA::Major M, class Atom>
void tile(const char* name) {
    auto all = make_tensor(make_smem_ptr((half_t*)shared_memory), tile_to_shape(Atom{}, Shape<_64, _64>{}));
    printf("{\"name\": \"%s\", \"major\": \"%s\", ", name, M == GMMA::Major::K ? "k" : "mn");
    print_list(64 * 64, [&](int i) { return int(&all(i / 64, i % 64) - (half_t*)shared_memory); });
    printf(", \"descriptors\": [");
    for_each(make_seq<4>{}, [&](auto step) {
        auto part = local_tile(all, Shape<_64, _16>{}, make_coord(0, step));
        printf("%s\"%016llx\"", int(step) ? "," : "", (unsigned long long)uint64_t(SM90::GMMA::make_gmma_desc<M>(part)));
    });
    printf("]}\n");
}

int main() {
    mma<SM80_16x8x8_F32F16F16F32_TN>("m16n8k8 f16");
    mma<SM80_16x8x16_F32F16F16F32_TN>("m16n8k16 f16");
    mma<SM80_16x8x8_F32BF16BF16F32_TN>("m16n8k8 bf16");
    mma<SM80_16x8x16_F32BF16BF16F32_TN>("m16n8k16 bf16");
    mma<SM80_16x8x8_F16F16F16F16_TN>("m16n8k8 f16 to f16");
    mma<SM80_16x8x16_F16F16F16F16_TN>("m16n8k16 f16 to f16");
    mma<SM80_16x8x8_F32TF32TF32F32_TN>("m16n8k8 tf32");
    mma<SM80_16x8x16_S32S8S8S32_TN>("m16n8k16 s8"), mma<SM80_16x8x32_S32S8S8S32_TN>("m16n8k32 s8");

    ldmatrix<SM75_U32x1_LDSM_N>("ldmatrix x1", 8), ldmatrix<SM75_U16x2_LDSM_T>("ldmatrix x1 trans", 8);
    ldmatrix<SM75_U32x2_LDSM_N>("ldmatrix x2", 16), ldmatrix<SM75_U16x4_LDSM_T>("ldmatrix x2 trans", 16);
    ldmatrix<SM75_U32x4_LDSM_N>("ldmatrix x4", 32), ldmatrix<SM75_U16x8_LDSM_T>("ldmatrix x4 trans", 32);

    swizzle<Swizzle<1, 4, 3>>("rows of 32 bytes", 2), swizzle<Swizzle<2, 4, 3>>("rows of 64 bytes", 4);
    swizzle<Swizzle<3, 4, 3>>("rows of 128 bytes", 8), swizzle<Swizzle<3, 4, 4>>("rows of 256 bytes", 16);

    using namespace SM90::GMMA;
    fragment("wgmma A", 64, ALayout_64x16{}, 128), fragment("wgmma C", 64, CLayout_64x16{}, 128);
    fragment("wgmma.sp A", 64, ALayout_64x32{}, 128), fragment("wgmma.sp metadata", 64, ELayout_64x32{}, 128);
    fragment("wgmma.sp A of bytes", 64, ALayout_64x64{}, 128), fragment("wgmma.sp metadata of bytes", 64, ELayout_64x64{}, 128);
    tile<Major::K, Layout_K_INTER_Atom<half_t>>("k-major, no swizzle"), tile<Major::K, Layout_K_SW32_Atom<half_t>>("k-major, 32 bytes");
    tile<Major::K, Layout_K_SW64_Atom<half_t>>("k-major, 64 bytes"), tile<Major::K, Layout_K_SW128_Atom<half_t>>("k-major, 128 bytes");
    tile<Major::MN, Layout_MN_INTER_Atom<half_t>>("mn-major, no swizzle"), tile<Major::MN, Layout_MN_SW32_Atom<half_t>>("mn-major, 32 bytes");
    tile<Major::MN, Layout_MN_SW64_Atom<half_t>>("mn-major, 64 bytes"), tile<Major::MN, Layout_MN_SW128_Atom<half_t>>("mn-major, 128 bytes");

    using Config = cutlass::Sm90GemmSparseConfig<sparse_elem<2, half_t>, Major::K, sparse_elem<8, uint8_t>, _64>;
    auto metadata = Config::fill_layoutE(make_shape(128, 64, 128, 1));
    printf("{\"name\": \"metadata of 128 x 128\", \"rows\": 128, ");
    print_list(128 * 16, [&](int i) { return int(metadata(i / 16, i % 16 * 8, 0)) / 8; });
    printf("}\n");
}
