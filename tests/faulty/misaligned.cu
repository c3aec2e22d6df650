// A 16-byte load from an address that is a multiple of 4 only.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
#ifdef FIXED
    float4 v = *(const float4*)(x + 4 * (threadIdx.x & 15));
#else
    float4 v = *(const float4*)(x + 4 * (threadIdx.x & 15) + (threadIdx.x == 5));
#endif
    y[threadIdx.x] = v.x + v.y + v.z + v.w;
}
