// Not faulty: what the counters of unique bytes must say. Every kernel stores one float per thread.
extern __shared__ __align__(128) float smem[];

#define AT (blockIdx.x * blockDim.x + threadIdx.x)

extern "C" __global__ void strided(const float* x, float* out, int stride) { out[AT] = x[AT * stride]; }

// Each block reads its own floats and one on either side: the border sectors are read by two blocks.
extern "C" __global__ void halo(const float* x, float* out, int n) {
    int left = max((int)AT - 1, 0), right = min((int)AT + 1, n - 1);
    out[AT] = x[left] + x[AT] + x[right];
}

// 16-byte loads that start in the middle of a sector.
extern "C" __global__ void vectors(const float4* x, float* out, int offset) { out[AT] = x[AT + offset].x; }

// The source of a 16-byte cp.async; threads from `valid` on read nothing.
extern "C" __global__ void copies(const float4* x, float* out, int valid) {
    unsigned d = (unsigned)__cvta_generic_to_shared(smem + 4 * threadIdx.x);
    int bytes = (int)threadIdx.x < valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(d), "l"(x + threadIdx.x), "r"(bytes) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    out[AT] = smem[4 * threadIdx.x];
}

// In place: each sector is loaded and stored, and counts once. Then an atomic to one more.
extern "C" __global__ void in_place(float* x, float* total, int) {
    float v = x[AT] + 1.f;
    x[AT] = v;
    atomicAdd(total, v);
}
