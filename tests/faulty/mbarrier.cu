// Warp 0 hands 32 numbers to warp 1 through an mbarrier, twice. FAULT names what is wrong; 0: nothing; 18: nothing either, a lane arrives for all.
__device__ bool waited(unsigned at, unsigned parity) {
    unsigned ready;
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
        : "=r"(ready) : "r"(at), "r"(parity) : "memory");
    return ready;
}
__device__ void arrive(unsigned at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
__device__ void init(unsigned at, unsigned count) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }

extern "C" __global__ void kernel(const float* x, float* y) {
    __shared__ __align__(16) float s[32];
    __shared__ __align__(8) unsigned long long full, empty;
    const unsigned t = threadIdx.x, f = (unsigned)__cvta_generic_to_shared(&full), e = (unsigned)__cvta_generic_to_shared(&empty);
    if (t == 0 && FAULT != 1) {
        init(f, FAULT >= 17 ? 1 : FAULT == 2 ? 16 : FAULT == 3 ? 33 : FAULT == 4 ? (unsigned)x[0] : FAULT == 5 ? 1 << 20 : 32);
        if (FAULT == 6) init(f, 32);
        init(e, 32);
    }
    if (FAULT != 7) __syncthreads();
    for (unsigned round = 0; round < 2; round++) {
        if (t < 32) {
            while (!waited(e, FAULT == 8 ? 1 : (round & 1) ^ 1)) {}
            s[t] = x[t] + round;
            if (FAULT == 9) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16;" ::"r"(f) : "memory");
            else if (FAULT == 10) asm volatile("mbarrier.expect_tx.shared::cta.b64 [%0], %1;" ::"r"(f), "r"(1 << 20) : "memory");
            else if (FAULT < 17) arrive(f);
            if (FAULT == 18) __syncwarp();
            if (FAULT >= 17 && t == 0) arrive(f);
            if (FAULT == 11) s[t] = 0;
        } else {
            while (!waited(f, FAULT == 12 ? 1 : FAULT == 13 ? 0 : FAULT == 14 ? 2 : round & 1)) {}
            y[32 * round + t - 32] = s[(t ^ 5) & 31];
            if (FAULT == 15 && round) y[0] = *(volatile float*)&full;
            arrive(e);
        }
    }
    if (FAULT != 16) return;
    __syncthreads();
    if (t == 0) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(f) : "memory");
    __syncthreads();
    arrive(f);
}
