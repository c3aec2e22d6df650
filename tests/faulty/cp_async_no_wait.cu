// Reads what cp.async brings after the barrier, but without waiting for the copy.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[64];
    unsigned d = (unsigned)__cvta_generic_to_shared(s + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(d), "l"(x + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
#ifdef FIXED
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#else
    asm volatile("cp.async.wait_group 1;" ::: "memory");  // one group may still be in flight: this one
#endif
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x ^ 33];
}
