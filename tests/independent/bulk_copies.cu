// Copies in bulk and what goes with them, by NVIDIA's wrappers (libcu++, CuTe, CUTLASS): the host knows what must arrive where.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/ptx>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/tensor.hpp>
#include <cutlass/arch/barrier.h>

using namespace cute;
using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;
constexpr int STEPS = 5, STAGES = 2, ROWS = 32, COLUMNS = 64, WORDS = 256;

// A ring of stages by libcu++'s barriers: one thread copies, two warps read and give the stage back.
__global__ void ring(int const* x, int* y) {
    using Barrier = cuda::barrier<cuda::thread_scope_block>;
    __shared__ alignas(128) int stage[STAGES][WORDS];
    __shared__ Barrier full[STAGES], empty[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) init(&full[s], 1), init(&empty[s], 64);
        cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    }
    __syncthreads();
    for (int t = 0; t < STEPS; t++) {
        const int s = t % STAGES, turn = t / STAGES & 1;
        if (threadIdx.x < 32) {
            if (threadIdx.x == 0) {
                empty[s].wait_parity(!turn);
                cuda::device::memcpy_async_tx(stage[s], x + t * WORDS, cuda::aligned_size_t<16>(sizeof stage[s]), full[s]);
                (void)cuda::device::barrier_arrive_tx(full[s], 1, sizeof stage[s]);
            }
        } else {
            full[s].wait_parity(turn);
            for (int i = threadIdx.x - 32; i < WORDS; i += 64) y[t * WORDS + i] = stage[s][i] + t;
            (void)empty[s].arrive();
        }
    }
}

// Each block of a cluster copies its part of a tile and of a row of words to all blocks; all read all, and give all parts back.
template <int BLOCKS, class Tma, class Tile>
__global__ void __cluster_dims__(BLOCKS, 1, 1) copies(const __grid_constant__ Tma tma, Tile, int const* x, int* y) {
    __shared__ alignas(1024) cutlass::half_t tiles[STAGES][ROWS * COLUMNS];
    __shared__ alignas(128) int words[STAGES][WORDS];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    const uint32_t rank = block_rank_in_cluster();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) Full::init(&full[s], 1), Empty::init(&empty[s], BLOCKS * blockDim.x);
        cutlass::arch::fence_barrier_init();
    }
    cluster_arrive();
    cluster_wait();
    Tensor all = tma.get_tma_tensor(Shape<Int<ROWS * STEPS>, Int<COLUMNS>>{});
    Tensor from = local_tile(all, Shape<Int<ROWS>, Int<COLUMNS>>{}, make_coord(_, 0));
    auto mine = tma.get_slice(rank);
    for (int t = 0; t < STEPS; t++) {
        const int s = t % STAGES, turn = t / STAGES & 1;
        Tensor to = make_tensor(make_smem_ptr(tiles[s]), Tile{});
        if (threadIdx.x == 0) {
            Empty::wait(&empty[s], !turn);
            Full::arrive_and_expect_tx(&full[s], sizeof tiles[s] + sizeof words[s]);
            int const* row = x + t * WORDS;
            if constexpr (BLOCKS > 1) {
                const uint16_t blocks = (1 << BLOCKS) - 1;
                const int part = WORDS / BLOCKS, first = rank * part;
                copy(tma.with(full[s], blocks), mine.partition_S(from(_, _, t)), mine.partition_D(to));
                cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, &words[s][first], row + first, 4 * part,
                    &full[s], blocks);
            } else {
                copy(tma.with(full[s]), mine.partition_S(from(_, _, t)), mine.partition_D(to));
                SM90_BULK_COPY_G2S::copy(row, &full[s], words[s], sizeof words[s]);
            }
        }
        __syncwarp();
        Full::wait(&full[s], turn);
        int* out = y + (rank * STEPS + t) * (ROWS * COLUMNS + WORDS);
        for (int i = threadIdx.x; i < ROWS * COLUMNS; i += blockDim.x) out[i] = int(float(to(i / COLUMNS, i % COLUMNS)));
        for (int i = threadIdx.x; i < WORDS; i += blockDim.x) out[ROWS * COLUMNS + i] = words[s][i];
        for (uint32_t block = 0; block < BLOCKS; block++) Empty::arrive(&empty[s], block, 1);
    }
    cluster_arrive();
    cluster_wait();
}

// Each thread of a cluster sends a word to the same thread of all blocks, which adds what it got.
template <int BLOCKS>
__global__ void __cluster_dims__(BLOCKS, 1, 1) sent(int const* x, int* y) {
    __shared__ int got[BLOCKS][64];
    __shared__ uint64_t full;
    auto cluster = cooperative_groups::this_cluster();
    const int rank = cluster.block_rank(), t = threadIdx.x;
    if (t == 0) {
        Full::init(&full, 1);
        cutlass::arch::fence_barrier_init();
        Full::arrive_and_expect_tx(&full, sizeof got);
    }
    __syncwarp();
    cluster_arrive_relaxed();
    cluster_wait();
    for (int block = 0; block < BLOCKS; block++)
        cuda::ptx::st_async(cluster.map_shared_rank(&got[rank][t], block), x[rank * 64 + t] + block, cluster.map_shared_rank(&full, block));
    Full::wait(&full, 0);
    int sum = 0;
    for (int block = 0; block < BLOCKS; block++) sum = 3 * sum + got[block][t];
    y[rank * 64 + t] = sum;
}

// Two warpgroups take turns, each telling the other that it may begin.
__global__ void turns(int* y) {
    __shared__ int sums[128];
    const int group = threadIdx.x / 128, t = threadIdx.x % 128;
    if (group == 0) sums[t] = t;
    for (int i = 0; i < 4; i++) {
        if (group || i) cutlass::arch::NamedBarrier::sync(256, 1 + group);
        sums[t] = 3 * sums[t] + group;
        if (!group || i < 3) cutlass::arch::NamedBarrier::arrive(256, 2 - group);
    }
    if (group) y[t] = sums[t];
}

// The two halves of a warp exchange values from two branches, where their lanes meet at two __syncwarp(), as CUDA allows from Volta on.
__global__ void halves(int const* x, int* y) {
    __shared__ int theirs[32];
    const int lane = threadIdx.x;
    if (lane < 16) {
        theirs[lane] = x[lane];
        __syncwarp();
        y[lane] = 3 * theirs[lane + 16];
    } else {
        theirs[lane] = x[lane] + 1;
        __syncwarp();
        y[lane] = theirs[lane - 16] - 7;
    }
}

// Numbers that are not below a limit, as NaN is not, and the smaller of two without a sign.
__global__ void compared(float const* x, unsigned const* limits, int* y) {
    const int t = threadIdx.x;
    const bool large = !(fabsf(x[t]) < 3.f);
    y[t] = static_cast<int>(x[t] * (large ? 0.25f : 8.f)) + (large ? 100 : 0);
    y[32 + t] = min(limits[t], limits[31 - t]);
}

template <class T>
T* on_device(std::vector<T> const& x) {
    T* p;
    cudaMalloc(&p, x.size() * sizeof(T));
    cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

int failures = 0;

void judge(char const* name, int const* device, std::vector<int> const& want) {
    const cudaError_t error = cudaGetLastError();
    std::vector<int> got(want.size());
    cudaMemcpy(got.data(), device, got.size() * 4, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i];
    failures += wrong || error;
    printf("%s: %s, %d of %d wrong\n", wrong || error ? "Failed" : "ok", name, wrong, (int)want.size());
    fflush(stdout);
}

template <int BLOCKS, class How>
void run_copies(char const* name, std::vector<int> const& x, How how) {
    std::vector<cutlass::half_t> h(STEPS * ROWS * COLUMNS);
    std::vector<int> want;
    for (auto& v : h) v = cutlass::half_t(float(rand() % 1000));
    for (int i = 0; i < BLOCKS * STEPS; i++) {
        const int t = i % STEPS;
        for (int j = 0; j < ROWS * COLUMNS; j++) want.push_back(int(float(h[t * ROWS * COLUMNS + j])));
        want.insert(want.end(), &x[t * WORDS], &x[t * WORDS] + WORDS);
    }
    auto tile = tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<cutlass::half_t>{}, Shape<Int<ROWS>, Int<COLUMNS>>{});
    Tensor source = make_tensor(make_gmem_ptr(on_device(h)), make_layout(Shape<Int<STEPS * ROWS>, Int<COLUMNS>>{}, LayoutRight{}));
    auto tma = make_tma_copy(how, source, tile, Shape<Int<ROWS>, Int<COLUMNS>>{}, Int<BLOCKS>{});
    int* y = on_device(std::vector<int>(want.size()));
    copies<BLOCKS><<<BLOCKS, 64>>>(tma, tile, on_device(x), y);
    judge(name, y, want);
}

int main() {
    std::vector<int> x(STEPS * WORDS), want(x.size());
    for (size_t i = 0; i < x.size(); i++) want[i] = (x[i] = rand() % 1000) + i / WORDS;
    int* y = on_device(std::vector<int>(x.size()));
    ring<<<1, 96>>>(on_device(x), y);
    judge("a ring of copies", y, want);

    run_copies<1>("copies to one block", x, SM90_TMA_LOAD{});
    run_copies<2>("copies to two blocks", x, SM90_TMA_LOAD_MULTICAST{});

    std::vector<int> sums(4 * 64);
    for (int i = 0; i < 4 * 64; i++)
        for (int block = 0; block < 4; block++) sums[i] = 3 * sums[i] + x[block * 64 + i % 64] + i / 64;
    sent<4><<<4, 64>>>(on_device(x), y);
    judge("words sent to four blocks", y, sums);

    std::vector<int> after(128), exchanged(32);
    for (int i = 0; i < 128; i++) {
        after[i] = i;
        for (int k = 0; k < 8; k++) after[i] = 3 * after[i] + k % 2;
    }
    turns<<<1, 256>>>(y);
    judge("turns of two warpgroups", y, after);

    for (int i = 0; i < 32; i++) exchanged[i] = i < 16 ? 3 * (x[i + 16] + 1) : x[i - 16] - 7;
    halves<<<1, 32>>>(on_device(x), y);
    judge("halves of a warp", y, exchanged);

    std::vector<float> numbers(32);
    std::vector<unsigned> limits(32);
    std::vector<int> found(64);
    for (int i = 0; i < 32; i++) numbers[i] = i - 16.f, limits[i] = i % 3 ? 0x80000000u + i : i * 977;
    for (int i = 0; i < 32; i++) {
        const bool large = numbers[i] >= 3 || numbers[i] <= -3;
        found[i] = static_cast<int>(numbers[i] * (large ? 0.25f : 8.f)) + (large ? 100 : 0);
        found[32 + i] = static_cast<int>(limits[i] < limits[31 - i] ? limits[i] : limits[31 - i]);
    }
    numbers[5] = NAN, found[5] = 100;
    compared<<<1, 32>>>(on_device(numbers), on_device(limits), y);
    judge("numbers compared", y, found);
    printf("%s: %d wrong\n", failures ? "Failed" : "Passed", failures);
    return failures;
}
