// Stores in bulk and what goes with them, by NVIDIA's wrappers (libcu++, CuTe): the host knows what must arrive where.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda/ptx>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/tensor.hpp>

using namespace cute;
constexpr int STEPS = 7, SLOTS = 2, WORDS = 256;

// Two slots: a slot is filled again as soon as the store from it has read it; the other slot's may still be under way.
__global__ void ring(int const* x, int* y) {
    namespace ptx = cuda::ptx;
    __shared__ alignas(128) int slot[SLOTS][WORDS];
    for (int t = 0; t < STEPS; t++) {
        int* mine = slot[t % SLOTS];
        for (int i = threadIdx.x; i < WORDS; i += blockDim.x) mine[i] = 3 * x[t * WORDS + i] + t;
        ptx::fence_proxy_async(ptx::space_shared);
        __syncthreads();
        if (threadIdx.x == 0) {
            ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, y + t * WORDS, mine, uint32_t(sizeof slot[0]));
            ptx::cp_async_bulk_commit_group();
            ptx::cp_async_bulk_wait_group_read(ptx::n32_t<SLOTS - 1>{});
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) ptx::cp_async_bulk_wait_group_read(ptx::n32_t<0>{});
}

// A warp's fragments by stmatrix: which element a lane's value is, and which of them its row holds then, is CuTe's to say.
template <class Atom, int MATRICES>
__global__ void matrices(unsigned short* y) {
    using Traits = Copy_Traits<Atom>;
    __shared__ alignas(128) unsigned short rows[32][8];
    const int lane = threadIdx.x;
    uint32_t v[MATRICES];
    for (int i = 0; i < MATRICES; i++) {
        const auto element = [&](int j) { return uint32_t(typename Traits::SrcLayout{}(lane, (2 * i + j) * 16) / 16); };
        v[i] = element(0) | element(1) << 16;
    }
    auto& row = *reinterpret_cast<uint128_t*>(rows[lane % (8 * MATRICES)]);
    if constexpr (MATRICES == 1)
        Atom::copy(v[0], row);
    else if constexpr (MATRICES == 2)
        Atom::copy(v[0], v[1], row);
    else
        Atom::copy(v[0], v[1], v[2], v[3], row);
    __syncwarp();
    if (lane < 8 * MATRICES) memcpy(y + lane * 8, rows[lane], sizeof rows[lane]);
}

// PTX ISA 9.7.9.21: `.relu` makes zero of what is negative, NaN stays NaN, and the first source is the upper half. No wrapper has it.
__global__ void clamped(float const* x, unsigned* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(y[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
}

template <class T>
T* on_device(std::vector<T> const& x) {
    T* p;
    cudaMalloc(&p, x.size() * sizeof(T));
    cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

int failures = 0;

template <class T>
void judge(char const* name, T const* device, std::vector<T> const& want) {
    const cudaError_t error = cudaGetLastError();
    std::vector<T> got(want.size());
    cudaMemcpy(got.data(), device, got.size() * sizeof(T), cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i];
    failures += wrong || error;
    printf("%s: %s, %d of %d wrong\n", wrong || error ? "Failed" : "ok", name, wrong, (int)want.size());
    fflush(stdout);
}

template <class Atom, int MATRICES>
void run_matrices(char const* name) {
    std::vector<unsigned short> want(MATRICES * 64);
    for (size_t i = 0; i < want.size(); i++) want[i] = typename Copy_Traits<Atom>::DstLayout{}(int(i / 8), int(i % 8 * 16)) / 16;
    auto* y = on_device(std::vector<unsigned short>(want.size(), 0xffff));
    matrices<Atom, MATRICES><<<1, 32>>>(y);
    judge(name, y, want);
}

// NVIDIA's rounding on the host.
unsigned short half_of(float x) {
    const __half h = __float2half_rn(x);
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
}

int main() {
    std::vector<int> x(STEPS * WORDS), want(x.size());
    for (size_t i = 0; i < x.size(); i++) want[i] = 3 * (x[i] = rand() % 1000) + i / WORDS;
    int* y = on_device(std::vector<int>(x.size()));
    ring<<<1, 64>>>(on_device(x), y);
    judge("a ring of stores", y, want);

    run_matrices<SM90_U32x1_STSM_N, 1>("a matrix");
    run_matrices<SM90_U32x2_STSM_N, 2>("two matrices");
    run_matrices<SM90_U32x4_STSM_N, 4>("four matrices");
    run_matrices<SM90_U16x2_STSM_T, 1>("a matrix transposed");
    run_matrices<SM90_U16x4_STSM_T, 2>("two matrices transposed");
    run_matrices<SM90_U16x8_STSM_T, 4>("four matrices transposed");

    std::vector<float> numbers(4096);
    std::vector<unsigned> halves(numbers.size() / 2);
    for (auto& v : numbers) v = ldexpf(rand() % 40001 - 20000, rand() % 40 - 36);  // subnormal halves to infinity
    numbers[2] = NAN, numbers[5] = -NAN, numbers[8] = -INFINITY, numbers[11] = INFINITY, numbers[14] = -0.f;
    for (size_t i = 0; i < numbers.size(); i++) {
        const float v = numbers[i];
        halves[i / 2] |= (std::isnan(v) ? 0x7fffu : v > 0 ? half_of(v) : 0u) << i % 2 * 16;
    }
    unsigned* pairs = on_device(std::vector<unsigned>(halves.size()));
    clamped<<<halves.size() / 256, 256>>>(on_device(numbers), pairs);
    judge("numbers clamped as they are rounded", pairs, halves);
    printf("%s: %d wrong\n", failures ? "Failed" : "Passed", failures);
    return failures;
}
