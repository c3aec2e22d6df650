// Reads through the read-only path what the same launch writes.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    y[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    float v;
#ifdef FIXED
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(y + (threadIdx.x ^ 1)) : "memory");
#else
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(y + (threadIdx.x ^ 1)) : "memory");
#endif
    __syncthreads();
    y[threadIdx.x] = v;
}
