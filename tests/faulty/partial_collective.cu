// Odd lanes alone execute a shuffle that names all lanes.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    float v = x[threadIdx.x];
#ifdef FIXED
    v = __shfl_xor_sync(~0u, v, 2);
#else
    if (threadIdx.x & 1) v = __shfl_xor_sync(~0u, v, 2);
    else v = __shfl_xor_sync(~0u, v, 4) * 2;
#endif
    y[threadIdx.x] = v;
}
