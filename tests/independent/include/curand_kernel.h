// As much of cuRAND's device API as CUTLASS's tensor_fill.h names: a counter through a bit mixer. Any random numbers will do.
#pragma once

struct curandState_t {
  unsigned long long counter;
};

__device__ inline void curand_init(unsigned long long seed, unsigned long long sequence, unsigned long long offset, curandState_t* state) {
  state->counter = (seed << 40) + (sequence << 16) + offset;
}

__device__ inline unsigned curand(curandState_t* state) {
  unsigned long long mixed = ++state->counter * 0x9e3779b97f4a7c15ull;
  mixed ^= mixed >> 32;
  return static_cast<unsigned>(mixed * 0xd6e8feb86659fd93ull >> 32);
}

__device__ inline float curand_uniform(curandState_t* state) { return (1 + (curand(state) >> 8)) * 0x1p-24f; }
__device__ inline double curand_uniform_double(curandState_t* state) { return curand_uniform(state); }

// A sum of uniform numbers: near enough to a normal one.
__device__ inline float curand_normal(curandState_t* state) {
  float sum = -6;
  for (int i = 0; i < 12; i++) sum += curand_uniform(state);
  return sum;
}
__device__ inline double curand_normal_double(curandState_t* state) { return curand_normal(state); }
