// A two-stage pipeline that refills a stage before all warps have read it: the copy is issued in front of the barrier.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[2][64];
    float sum = 0;
    auto load = [&](int k) {
        unsigned d = (unsigned)__cvta_generic_to_shared(&s[k & 1][threadIdx.x]);
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(d), "l"(x + threadIdx.x) : "memory");
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    load(0);
    for (int k = 0; k < 4; k++) {
#ifdef FIXED
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        load(k + 1);
#else
        load(k + 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
#endif
        sum += s[k & 1][63 - threadIdx.x] * (k + 1);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    y[threadIdx.x] = sum;
}
