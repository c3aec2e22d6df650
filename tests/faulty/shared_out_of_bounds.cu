// One row too far in dynamic shared memory.
extern __shared__ float tile[];
extern "C" __global__ void kernel(const float* x, float* y, int n) {
#ifdef FIXED
    int at = threadIdx.x;
#else
    int at = threadIdx.x + 1;
#endif
    tile[at] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = tile[at];
}
