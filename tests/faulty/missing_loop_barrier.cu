// The loop's write overwrites what a slower warp may still be reading: the barrier at the loop's end is missing.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    __shared__ float s[64];
    float sum = 0;
    for (int k = 0; k < 3; k++) {
        s[threadIdx.x] = x[threadIdx.x] + k;
        __syncthreads();
        sum += s[63 - threadIdx.x];
#ifdef FIXED
        __syncthreads();
#endif
    }
    y[threadIdx.x] = sum;
}
