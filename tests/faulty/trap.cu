// The kernel gives up by itself.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
#ifndef FIXED
    if (threadIdx.x == 40) __trap();
#endif
    y[threadIdx.x] = x[threadIdx.x];
}
