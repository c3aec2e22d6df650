// Not faulty: warp-wide instructions, divergence, atomics, local memory and calls.
extern "C" __global__ void shuffles(const unsigned* x, unsigned* out) {
    unsigned i = threadIdx.x, a = x[i], k = 0;
    auto put = [&](unsigned v) { out[k++ * 32 + i] = v; };
    put(__shfl_sync(~0u, a, i * 7)), put(__shfl_up_sync(~0u, a, 3)), put(__shfl_down_sync(~0u, a, 5)), put(__shfl_xor_sync(~0u, a, 9));
    put(__shfl_sync(~0u, a, 2, 8)), put(__shfl_up_sync(~0u, a, 1, 4)), put(__shfl_down_sync(~0u, a, 3, 16)), put(__shfl_xor_sync(~0u, a, 5, 8));
    put(__ballot_sync(~0u, a & 1)), put(__any_sync(~0u, a == 3)), put(__all_sync(~0u, a < 4000000000u));
    put(__match_any_sync(~0u, a & 3)), put(__reduce_add_sync(~0u, a)), put(__reduce_max_sync(~0u, a)), put(__reduce_xor_sync(~0u, a));
    unsigned odd = 0;
    if (i & 1) odd = __shfl_xor_sync(0xaaaaaaaau, a, 2) + __activemask();
    put(odd);
}

extern "C" __global__ void divergence(const int* x, int* out) {
    int i = threadIdx.x, n = x[i], steps = 0;
    while (n != 1) {  // every lane leaves at its own time, through unlike branches
        if (n & 1) n = 3 * n + 1;
        else n /= 2;
        steps++;
        if (steps > 1000) break;
    }
    switch (i % 7) {
        case 0: steps += 10; break;
        case 1: steps *= 2; break;
        case 2: steps -= 5;  // falls through
        case 3: steps ^= 21; break;
        case 4: if (steps > 10) { out[i] = -1; return; } break;
        default: steps = -steps;
    }
    out[i] = steps + __popc(__ballot_sync(__activemask(), 1)) * 0;
}

extern "C" __global__ void atomics(const int* x, int* out, float* sum, unsigned long long* wide) {
    __shared__ int hist[8];
    if (threadIdx.x < 8) hist[threadIdx.x] = 0;
    __syncthreads();
    int v = x[blockIdx.x * blockDim.x + threadIdx.x];
    atomicAdd(&hist[v & 7], 1);
    atomicMax(&out[8], v), atomicMin(&out[9], v), atomicOr((unsigned*)&out[10], 1u << (v & 31)), atomicAdd(sum, 1.5f), atomicAdd(wide, (unsigned long long)v);
    atomicInc((unsigned*)&out[11], 6);
    __syncthreads();
    if (threadIdx.x < 8) atomicAdd(&out[threadIdx.x], hist[threadIdx.x]);
}

__device__ __noinline__ float twice(float a, int n) {
    for (int i = 0; i < n; i++) a = a * 2 + 1;
    return a;
}

extern "C" __global__ void local_and_calls(const float* x, float* out, int n) {
    float keep[16];
    for (int i = 0; i < 16; i++) keep[i] = x[threadIdx.x] * i;
    for (int i = 0; i < n; i++) keep[(threadIdx.x + i) & 15] += i;
    float s = 0;
    for (int i = 0; i < 16; i++) s += keep[i] * (i + 1);
    out[threadIdx.x] = s + twice(x[threadIdx.x], threadIdx.x & 3) - twice(1.f, 2);
}

// Named barriers: half of the warps produce, half consume, and no __syncthreads orders them.
extern "C" __global__ void named_barriers(const int* x, int* out) {
    __shared__ int box[128];
    int w = threadIdx.x >> 5;
    if (w < 4) {
        box[threadIdx.x] = x[threadIdx.x] * 3;
        asm volatile("bar.arrive 1, 256;" ::: "memory");
    } else {
        asm volatile("bar.sync 1, 256;" ::: "memory");
        out[threadIdx.x - 128] = box[(threadIdx.x - 128) ^ 127];
    }
}

extern "C" __global__ void barrier_reductions(const int* x, int* out) {
    int c = __syncthreads_count(x[threadIdx.x] & 1), a = __syncthreads_and(x[threadIdx.x] >= 0), o = __syncthreads_or(x[threadIdx.x] == 77);
    out[threadIdx.x] = c * 4 + (a != 0) * 2 + (o != 0);
}

// A lock taken lane by lane inside one warp: only progress of the lane that holds it ends the others' spinning.
extern "C" __global__ void spin_lock(int* lock, int* out) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            out[0] += 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}
