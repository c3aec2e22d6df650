// Reads one element past the end of x; FIXED reads the last one.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
#ifdef FIXED
    y[i] = x[min(i + 1, n - 1)];
#else
    y[i] = x[i + 1];
#endif
}
