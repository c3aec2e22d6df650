// What swizzle.cuh makes of each chunk of 32 rows: out[row][chunk].
#include "swizzle.cuh"

extern "C" __global__ void micro(const u32* in, u32* out) {
  for (int chunk = 0; chunk < CHUNKS; chunk++) out[threadIdx.x * CHUNKS + chunk] = swizzled<CHUNKS>(threadIdx.x, chunk);
}
