// Every thread waits for its own copies only, and then reads another warp's.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncthreads();
    unsigned d = (unsigned)__cvta_generic_to_shared(s + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(d), "l"(x + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#ifdef FIXED
    __syncthreads();
#endif
    y[threadIdx.x] = s[threadIdx.x ^ 33];
}
