// Read after write between warps with no barrier in between.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncthreads();
    s[threadIdx.x] = x[threadIdx.x];
#ifdef FIXED
    __syncthreads();
#else
    __syncwarp();
#endif
    y[threadIdx.x] = s[63 - threadIdx.x];
}
