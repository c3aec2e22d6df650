// Clusters of two blocks. Twice each block sends 32 numbers to both, and waits for its own and its neighbour's; an mbarrier of the sender tells when
// both have read. Then each block reads numbers in the other's shared memory. FAULT names what is wrong; 0: nothing.
__device__ unsigned shared(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ bool waited(unsigned at, unsigned parity) {
    unsigned ready;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(ready) : "r"(at), "r"(parity) : "memory");
    return ready;
}
__device__ unsigned mapped(unsigned at, unsigned rank) {
    unsigned there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}
__device__ void arrive(unsigned at) { asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ void init(unsigned at, unsigned count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }
__device__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ void cluster_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(64) kernel(const float* x, float* y) {
    __shared__ __align__(128) float tile[2][32];
    __shared__ __align__(16) float own[64];
    __shared__ __align__(8) unsigned long long full, empty;
    const unsigned t = threadIdx.x, f = shared(&full), e = shared(&empty);
    unsigned rank, at;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const unsigned other = rank ^ 1;
    if (FAULT == 3) cluster_arrive(), cluster_wait();
    if (t == 0) {
        init(f, 1), init(e, FAULT == 10 ? 64 : 128);
        if (FAULT != 14 && FAULT != 15) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (FAULT == 8 && rank) asm volatile("bar.sync 1, 128;" ::: "memory");
    if (FAULT == 14) cluster_arrive();
    else if (FAULT != 1 && FAULT != 3 && FAULT != 6) cluster_relaxed();
    if (FAULT == 9) cluster_relaxed();
    if (FAULT != 1 && FAULT != 3) cluster_wait();
    if (FAULT == 7) {
        if (rank == 0) while (!waited(e, 0)) {}
        return;
    }
    if (FAULT == 16) while (!waited(mapped(e, other), 1)) {}
    for (unsigned round = 0; round < 2; round++) {
        if (t == 0) {
            while (!waited(e, (round & 1) ^ 1)) {}
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(f), "r"(FAULT == 18 && rank ? 128 : 256) : "memory");
            const unsigned short mask = FAULT == 4 ? 6 : FAULT == 5 && rank == 0 ? 1 : 3;
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 128, [%2], %3;"
                ::"r"(shared(tile[rank])), "l"(x + 32 * (2 * blockIdx.x + round)), "r"(FAULT == 19 ? mapped(f, other) : f), "h"(mask) : "memory");
        }
        if (FAULT != 12 || rank == 0 || round == 0) {
            while (!waited(f, round & 1)) {}
            y[(blockIdx.x * 3 + round) * 64 + t] = tile[t / 32][(t ^ 1) & 31];
        }
        if (FAULT == 11 && round == 1) return;
        arrive(mapped(e, 0));
        if (FAULT != 10) arrive(mapped(e, 1));
        else arrive(e);
    }
    own[t] = y[blockIdx.x * 192 + t];
    if (FAULT == 13) cluster_relaxed();
    else cluster_arrive();
    cluster_wait();
    if (FAULT == 20) own[t] = 0;
    at = mapped(shared(&own[63 - t]), FAULT == 17 ? 2 : other);
    float v;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at + (FAULT == 21 ? 1 << 12 : 0)) : "memory");
    y[blockIdx.x * 192 + 128 + t] = v;
    if (FAULT == 22) asm volatile("ld.shared::cta.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    if (FAULT == 23) {
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v + 1) : "memory");
        y[blockIdx.x * 192 + 128 + t] = own[t];
    }
    if (FAULT != 2) cluster_arrive(), cluster_wait();
}
