// A warpgroup multiplies two k-steps: y[64, 16] = x[64, 32] w[16, 32]^T, A of the second step from registers. FAULT names what is
// wrong; 0: nothing. Matrices lie without a swizzle: 8 x 8 blocks of 128 bytes, 1024 (A) or 256 (B) bytes between eights of k.
#include <cuda_fp16.h>

#define SUMS "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define OUT "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])

__device__ unsigned long long described(const void* p, unsigned leading) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(p);
    return (unsigned long long)(at >> 4) | (unsigned long long)(leading >> 4) << 16 | 8ull << 32;
}
__device__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

extern "C" __global__ __launch_bounds__(128) void kernel(const __half* x, const __half* w, float* y) {
    __shared__ __align__(128) __half a[64 * 32], b[16 * 32];
    const unsigned t = threadIdx.x, warp = t / 32, lane = t % 32;
    for (unsigned i = t; i < 64 * 32; i += 128) a[i / 32 / 8 * 64 + i / 32 % 8 * 8 + i % 32 / 8 * 512 + i % 8] = x[i];
    for (unsigned i = t; i < 16 * 32; i += 128) b[i / 32 / 8 * 64 + i / 32 % 8 * 8 + i % 32 / 8 * 128 + i % 8] = w[i];
    if (FAULT != 1 && !(FAULT == 2 && t)) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (FAULT != 3) __syncthreads();
    unsigned r[4];  // A's columns 16 to 31 as an mma holds them
    for (int i = 0; i < 4; i++)
        r[i] = *(const unsigned*)&x[(16 * warp + lane / 4 + i % 2 * 8) * 32 + 16 + i / 2 * 8 + lane % 4 * 2];
    unsigned long long da = described(a, 1024), db = described(b, 256);
    if (FAULT == 4) da += lane == 5;
    if (FAULT == 5) da |= 1ull << 49;
    if (FAULT == 6) db = (db & ~0x7ull) + 7 | 1ull << 62;  // 128-byte swizzle, from the last piece of a row on
    if (FAULT == 7) da += warp == 2 ? 8 : 0;
    if (FAULT == 8) db += 0x3000;
    float d[8] = {};
    for (float& v : d) asm volatile("" : "+f"(v)::"memory");
    if (FAULT != 9) fence();
    if (FAULT == 10) asm volatile("add.f32 %0, %0, 0f3f800000;" : "+f"(d[3])::"memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " SUMS ", %8, %9, 1, 1, 1, 0, 0;" : OUT : "l"(da), "l"(db));
    if (FAULT == 11) asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(da), "l"(db));
    if (FAULT == 12 && warp == 3) return;
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " SUMS ", {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
        : OUT : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(db + 32));
    commit();
    if (FAULT == 13) asm volatile("add.f32 %0, %0, 0f3f800000;" : "+f"(d[3])::"memory");
    if (FAULT == 14) asm volatile("add.u32 %0, %0, 1;" : "+r"(r[2])::"memory");
    if (FAULT == 15) b[t] = __float2half(1.0f);
    if (FAULT == 16) {
        fence();
        asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " SUMS ", {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
            : OUT : "r"(r[0]), "r"(__float_as_uint(d[0])), "r"(r[2]), "r"(r[3]), "l"(db + 32));
        commit();
    }
    if (FAULT == 17) return;
    if (FAULT == 18) asm volatile("wgmma.wait_group.sync.aligned 1;" : OUT::"memory");
    else asm volatile("wgmma.wait_group.sync.aligned 0;" : OUT::"memory");
    for (int i = 0; i < 8; i++)
        y[(16 * warp + lane / 4 + i / 2 % 2 * 8) * 16 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
    if (FAULT != 14) return;
    y[t] += r[2];
}
