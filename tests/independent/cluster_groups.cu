// Cooperative groups' clusters of 2 x 2 blocks: a histogram whose counters lie in all four blocks' shared memory, and sums that go round a ring of blocks.
#include <cooperative_groups.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace cg = cooperative_groups;
constexpr int BINS = 64, THREADS = 96, VALUES = 1000;

__global__ void __cluster_dims__(2, 2, 1) count(const int* values, int* bins, int* sums) {
    __shared__ int mine[BINS], passed[2];
    cg::cluster_group cluster = cg::this_cluster();
    const unsigned rank = cluster.block_rank(), blocks = cluster.num_blocks();
    const int group = blockIdx.x / 2 + gridDim.x / 2 * (blockIdx.y / 2), t = threadIdx.x;
    for (int i = t; i < BINS; i += THREADS) mine[i] = 0;
    if (t == 0) passed[0] = (int)(100 * rank + cluster.block_index().x + 10 * cluster.block_index().y);
    cluster.sync();
    for (int i = (int)rank * THREADS + t; i < VALUES; i += (int)blocks * THREADS) {
        const int v = values[group * VALUES + i];
        atomicAdd(cluster.map_shared_rank(mine, v / BINS) + v % BINS, 1);
    }
    for (unsigned step = 0; step < blocks; step++) {
        if (t == 0) *cluster.map_shared_rank(&passed[(step + 1) & 1], (rank + 1) % blocks) = passed[step & 1] + 1;
        auto token = cluster.barrier_arrive();
        cluster.barrier_wait(std::move(token));
    }
    const unsigned other = (rank + 3) % blocks;
    int* there = cluster.map_shared_rank(mine, other);
    for (int i = t; i < BINS; i += THREADS) bins[(group * blocks + other) * BINS + i] = there[i];
    if (t == 0) {
        sums[group * blocks + rank] = passed[0] + 1000 * (int)cluster.query_shared_rank(there) + 10000 * (int)cluster.dim_blocks().y;
    }
    cluster.sync();
}

int main() {
    constexpr int GROUPS = 6;  // of a grid of 6 x 4 blocks
    std::vector<int> values(GROUPS * VALUES), bins(GROUPS * 4 * BINS), sums(GROUPS * 4), want(bins.size());
    for (size_t i = 0; i < values.size(); i++) want[i / VALUES * 4 * BINS + (values[i] = rand() % (4 * BINS))]++;
    int *x, *b, *s;
    cudaMalloc(&x, values.size() * 4), cudaMalloc(&b, bins.size() * 4), cudaMalloc(&s, sums.size() * 4);
    cudaMemcpy(x, values.data(), values.size() * 4, cudaMemcpyHostToDevice);
    count<<<dim3(6, 4), THREADS>>>(x, b, s);
    cudaMemcpy(bins.data(), b, bins.size() * 4, cudaMemcpyDeviceToHost);
    cudaMemcpy(sums.data(), s, sums.size() * 4, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (size_t i = 0; i < bins.size(); i++) wrong += bins[i] != want[i];
    for (int i = 0; i < GROUPS * 4; i++) {  // passed[0] has gone round four blocks: its own again
        const int rank = i % 4, first = 100 * rank + rank % 2 + 10 * (rank / 2);
        wrong += sums[i] != first + 4 + 1000 * ((rank + 3) % 4) + 20000;
    }
    printf("%s: %d wrong\n", wrong ? "Failed" : "Passed", wrong);
    return wrong > 0;
}
