// Half of a warp waits at one barrier, the other half at another.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
#ifdef FIXED
    asm volatile("bar.sync 0;" ::: "memory");
    y[threadIdx.x] = s[63 - threadIdx.x];
#else
    if (x[threadIdx.x] > x[threadIdx.x ^ 1]) {
        asm volatile("bar.sync 0;" ::: "memory");
        y[threadIdx.x] = s[63 - threadIdx.x];
    } else {
        asm volatile("bar.sync 1;" ::: "memory");
        y[threadIdx.x] = -s[63 - threadIdx.x];
    }
#endif
}
