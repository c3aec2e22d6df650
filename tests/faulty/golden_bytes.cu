// Not faulty: products of bytes by the wrappers, with every register of every lane in memory, [lane][register].
#include "mma_bytes.cuh"

extern "C" __global__ void dense(const uint4* a, const uint2* b, const float4* c, float4* d) {
    const uint2 v = b[threadIdx.x];
    const float4 w = c[threadIdx.x];
    float sums[4] = {w.x, w.y, w.z, w.w};
    mma_16832_bytes<UNSIGNED>(sums, a[threadIdx.x], v.x, v.y);
    d[threadIdx.x] = make_float4(sums[0], sums[1], sums[2], sums[3]);
}

extern "C" __global__ void sparse(const uint4* a, const uint4* b, const float4* c, const unsigned* e, float4* d) {
    const float4 w = c[threadIdx.x];
    float sums[4] = {w.x, w.y, w.z, w.w};
    mma_sp_16864_bytes<UNSIGNED>(sums, a[threadIdx.x], b[threadIdx.x], e[threadIdx.x]);
    d[threadIdx.x] = make_float4(sums[0], sums[1], sums[2], sums[3]);
}
