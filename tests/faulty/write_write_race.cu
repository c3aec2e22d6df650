// Both warps write the same word.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[32];
    int lane = threadIdx.x & 31;
#ifdef FIXED
    if (threadIdx.x < 32)
#endif
        s[lane] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[lane];
}
