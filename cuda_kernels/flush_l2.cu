// flush_l2: leaves nothing but `data` in L2, clean, and lasts at least `clocks`, so that the host can queue what follows.
//
// Reads, not writes: dirty lines would be written back while the next kernel is timed. Only the timing of tactics launches it.
#include "ptx.cuh"

struct FlushParams {
  const uint4* data;  // zeros
  uint4* sink;        // written only if they are not, which keeps the loads
  long long words;    // 16-byte words of data
  long long clocks;   // SM clocks
};

extern "C" __global__ void __launch_bounds__(256) flush_l2(const __grid_constant__ FlushParams p) {
  release_next_launch();
  wait_for_previous_launch();
  const long long start = clock64();
  u32 any = 0;
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < p.words; i += gridDim.x * 256ll) {
    const uint4 v = p.data[i];
    any |= v.x | v.y | v.z | v.w;
  }
  if (any) *p.sink = make_uint4(any, any, any, any);
  if (blockIdx.x == 0)
    while (clock64() - start < p.clocks) {
    }
}
