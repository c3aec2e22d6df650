// How fast a GPU writes what SMs hold: three ways to store the same bytes, for gpu_facts.
//
// by_threads   each thread stores 16 bytes at a time, neighbours next to each other
// in_bulk      SLOTS threads of a block copy pieces of 8 KB each from shared memory (cp.async.bulk, PTX ISA 9.7.9.25.4.1)
// by_boxes     the same pieces as boxes of 64 pixels x 64 channels of a tensor (cp.async.bulk.tensor, 9.7.9.27.1.2)
//
// Pieces go to blocks in turn; a slot is written out twice before its thread waits, as the end of a tile would. sm_90a.
constexpr int SLOTS = 4, PIECE = 8192, THREADS = 128, CHANNELS = 64;
struct alignas(64) Map { unsigned char bytes[128]; };

extern "C" __global__ void by_threads(uint4* y, long long words) {
  const uint4 v = make_uint4(threadIdx.x, blockIdx.x, 0x3c003c00u, 0x3c003c00u);
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < words; i += (long long)gridDim.x * blockDim.x) y[i] = v;
}

// Shared memory holds something, and the copies see it.
__device__ __forceinline__ unsigned filled(unsigned* slots) {
  for (int i = threadIdx.x; i < SLOTS * PIECE / 4; i += THREADS) slots[i] = 0x3c003c00u + i;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  return (unsigned)__cvta_generic_to_shared(slots);
}
__device__ __forceinline__ void committed() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS) in_bulk(unsigned char* y, int pieces) {
  __shared__ alignas(128) unsigned slots[SLOTS * PIECE / 4];
  const unsigned from = filled(slots);
  if (threadIdx.x >= SLOTS) return;
  for (int p = blockIdx.x * SLOTS + threadIdx.x; p < pieces; p += gridDim.x * SLOTS) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(y + (long long)p * PIECE),
                 "r"(from + threadIdx.x * PIECE), "r"(PIECE) : "memory");
    committed();
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS) by_boxes(const __grid_constant__ Map map, int pieces, int across) {
  __shared__ alignas(128) unsigned slots[SLOTS * PIECE / 4];
  const unsigned from = filled(slots);
  if (threadIdx.x >= SLOTS) return;
  for (int p = blockIdx.x * SLOTS + threadIdx.x; p < pieces; p += gridDim.x * SLOTS) {
    const int c = p % across * CHANNELS, row = p / across * (PIECE / 2 / CHANNELS);
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(c), "r"(row),
                 "r"(from + threadIdx.x * PIECE) : "memory");
    committed();
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
