// Output byte coverage: element 5 is written twice and element 6 never, and no other check would notice.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    int i = threadIdx.x;
#ifndef FIXED
    if (i == 6) i = 5;
#endif
    y[i] = x[i];
}
