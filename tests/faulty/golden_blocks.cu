// Blocks that meet in global memory. FIXED: the twin that is right.
#ifdef FIXED
#define FENCE() __threadfence()
#else
#define FENCE()
#endif

// The last block to arrive sums what all have left, in ascending order: stores, fence, atomic; atomic, fence, loads.
// RELEASE_FENCE and ACQUIRE_FENCE can be left out one by one.
extern "C" __global__ void last_arriver(const float* x, float* partial, int* counter, float* out) {
    __shared__ bool last;
    partial[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x] * (blockIdx.x + 1);
#ifdef RELEASE_FENCE
    __threadfence();
#endif
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(counter, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
#ifdef ACQUIRE_FENCE
    __threadfence();
#endif
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) sum += partial[b * blockDim.x + threadIdx.x];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *counter = 0;
}

// The same with one fence, by thread 0: it orders what the others have stored only behind a barrier of the block (or, in blocks of
// one warp, of the warp) that stands in front of it. BEFORE and BEHIND: the barrier's place.
extern "C" __global__ void one_fence(const float* x, float* partial, int* counter, float* out) {
    __shared__ bool last;
    partial[blockIdx.x * blockDim.x + threadIdx.x] = x[threadIdx.x] * (blockIdx.x + 1);
#ifdef BEFORE
    BEFORE();
#endif
    if (threadIdx.x == 0) __threadfence();
#ifdef BEHIND
    BEHIND();
#endif
    if (threadIdx.x == 0) last = atomicAdd(counter, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    float sum = 0;
    for (unsigned b = 0; b < gridDim.x; b++) sum += partial[b * blockDim.x + threadIdx.x];
    out[threadIdx.x] = sum;
    if (threadIdx.x == 0) *counter = 0;
}

// Each block waits for the one after it, block 0 ends last: only co-resident blocks can do that.
extern "C" __global__ void chain(volatile int* flag, int* out) {
    if (threadIdx.x == 0) {
        if (blockIdx.x + 1 < gridDim.x)
            while (flag[blockIdx.x + 1] == 0) {}
        FENCE();
        out[blockIdx.x] = blockIdx.x + 1 < gridDim.x ? out[blockIdx.x + 1] + 1 : 1;
        FENCE();
        flag[blockIdx.x] = 1;
    }
}

// A barrier of the whole grid, twice.
extern "C" __global__ void grid_barrier(int* count, int* data) {
    for (int round = 1; round <= 2; round++) {
        data[round * gridDim.x + blockIdx.x] = data[(round - 1) * gridDim.x + (blockIdx.x + 1) % gridDim.x] + 1;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(count, 1);
            while (atomicAdd(count, 0) < round * (int)gridDim.x) __nanosleep(100);
            __threadfence();
        }
        __syncthreads();
    }
}

// Warp 0 waits for something no one does; warp 1 waits for warp 0.
extern "C" __global__ void nobody_writes(volatile int* flag, int* out) {
    if (threadIdx.x < 32)
        while (flag[0] == 0) {}
    __syncthreads();
    out[threadIdx.x] = 1;
}

__device__ int acquired(const int* flag) {
    int seen;
    asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    return seen;
}

// Block after block, by a semaphore as CUTLASS has it: one thread looks, all meet at a barrier until it has seen its turn. NOBODY: the
// first turn never comes.
extern "C" __global__ void semaphore(int* turn, int* out) {
#ifdef NOBODY
    const int mine = blockIdx.x + 1;
#else
    const int mine = blockIdx.x;
#endif
    int seen = -1;
    while (__syncthreads_and(seen != mine))
        if (threadIdx.x == 0) seen = acquired(turn);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = 10 * mine;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        asm volatile("st.global.release.gpu.b32 [%0], %1;" :: "l"(turn), "r"(mine + 1) : "memory");
    }
}

// One thread reads the same again and again, at a barrier, while another counts: no circle.
extern "C" __global__ void others_count(int* flag, int* out) {
    int count = 0;
    while (__syncthreads_or(count < 300)) {
        if (threadIdx.x == 0) acquired(flag);
        if (threadIdx.x >= 32) count++;
        else count = 300;
    }
    out[threadIdx.x] = count;
}

// One thread waits for something no one does; all others wait for it at a barrier of the block.
extern "C" __global__ void one_spins(int* flag, int* out) {
    if (threadIdx.x == 0) {
        while (acquired(flag) == 0) {}
    }
    __syncthreads();
    out[threadIdx.x] = 1;
}

// One lane spins, another of the same warp sets the flag; and many reads of one place that do end.
extern "C" __global__ void patience(volatile int* flag, int* out) {
    int sum = 0;
    for (int i = 0; i < 5000; i++) sum += flag[1];
    if (threadIdx.x == 0)
        while (flag[0] == 0) {}
    else if (threadIdx.x == 7) flag[0] = 1;
    __syncwarp();
    out[threadIdx.x] = sum;
}

// A block reads what its neighbour writes, with nothing between.
extern "C" __global__ void neighbours(int* x, int* out) {
    x[blockIdx.x * 32 + threadIdx.x] = threadIdx.x;
#ifdef FIXED
    out[blockIdx.x * 32 + threadIdx.x] = x[blockIdx.x * 32 + (threadIdx.x ^ 1)];
#else
    out[blockIdx.x * 32 + threadIdx.x] = x[(blockIdx.x ^ 1) * 32 + threadIdx.x];
#endif
}

// Chains of three: block 1 passes on what block 0 left; flags with .release and .acquire.
extern "C" __global__ void relay(int* data, int* flag, int* out) {
    if (threadIdx.x) return;
    int b = blockIdx.x, seen = 0;
    if (b == 0) data[0] = 7;
    else
        while (!seen) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag + b - 1) : "memory");
    if (b == 2) out[0] = data[0];
#ifdef FIXED
    asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag + b) : "memory");
#else
    asm volatile("st.relaxed.gpu.global.s32 [%0], 1;" ::"l"(flag + b) : "memory");
#endif
}
