// Not faulty: what the counters must say. Rows of 128 bytes, read by ldmatrix with and without an XOR swizzle.
extern __shared__ __align__(128) unsigned char smem[];

extern "C" __global__ void swizzle(const uint4* x, unsigned* out) {
    int l = threadIdx.x;
    unsigned base = (unsigned)__cvta_generic_to_shared(smem), sum = 0;
    for (int i = 0; i < 8; i++) {
        int chunk = l + 32 * i, row = chunk >> 3, c = chunk & 7;
#ifdef SWIZZLED
        c ^= row & 7;
#endif
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(base + row * 128 + c * 16), "r"(x[chunk].x), "r"(x[chunk].y), "r"(x[chunk].z), "r"(x[chunk].w));
    }
    __syncwarp();
    for (int c = 0; c < 8; c++) {
        int at = c;
#ifdef SWIZZLED
        at ^= l & 7;
#endif
        unsigned r[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(base + l * 128 + at * 16));
        sum += r[0] + 3 * r[1] + 5 * r[2] + 7 * r[3];
    }
    out[l] = sum;
}

// One request each: 128 contiguous bytes, and 32 words a sector or more apart; then 2-, 4- and 32-way conflicts.
extern "C" __global__ void requests(const int* x, int* out, int stride) {
    out[threadIdx.x] = x[threadIdx.x * stride];
}

extern "C" __global__ void conflicts(int* out, int stride) {
    int* s = (int*)smem;
    s[threadIdx.x * stride] = threadIdx.x;
    __syncwarp();
    out[threadIdx.x] = s[threadIdx.x * stride];
}

// A three-stage cp.async pipeline: eager and late completion must agree.
extern "C" __global__ void pipeline(const float4* x, float* out, int tiles, int valid) {
    const int n = blockDim.x;
    float4* stage = (float4*)smem;
    auto load = [&](int t) {
        unsigned d = (unsigned)__cvta_generic_to_shared(stage + (t % 3) * n + threadIdx.x);
        int bytes = t * n + threadIdx.x < valid ? 16 : 0;
        const float4* s = bytes ? x + t * n + threadIdx.x : x;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(d), "l"(s), "r"(bytes) : "memory");
    };
    float sum = 0;
    for (int t = 0; t < 2; t++) {
        if (t < tiles) load(t);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    for (int t = 0; t < tiles; t++) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        if (t + 2 < tiles) load(t + 2);
        asm volatile("cp.async.commit_group;" ::: "memory");
        float4 v = stage[(t % 3) * n + (threadIdx.x * 5 + t) % n];
        sum += v.x + 2 * v.y + 3 * v.z + 4 * v.w;
    }
    out[blockIdx.x * n + threadIdx.x] = sum;
}
