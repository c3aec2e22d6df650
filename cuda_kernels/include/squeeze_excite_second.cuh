// Part of squeeze_excite.cu, which defines the names and the compile-time values used here: the second layer by warps, 16
// channels of y from the hidden values. In: these one by one (`put`). A warp's first weights are loaded before they are known.
// SCALED: what it gives stays in shared memory, behind the sums of warps.
#pragma once

// Hidden value m in the four columns of the second layer's factor, hidden[m / 32][column][m % 32].
__device__ __forceinline__ void put(__half* hidden, int m, float v) {
  const bool large = !(fabsf(v) < LARGE);
  v *= large ? DOWN : 1.f;
  const __half h = __float2half_rn(v), none = __float2half_rn(0.f);
  const __half left = fabsf(v) < LARGE ? __float2half_rn(v - __half2float(h)) : none;
  __half* at = hidden + m / 32 * 128 + m % 32;
  at[0] = large ? none : h, at[32] = large ? none : left;
  at[64] = large ? h : none, at[96] = large ? left : none;
}

// What a warp has of the second layer before it knows the hidden values.
struct Second {
  int tile, to;  // its first 16 channels of y, and where the block's end
  int m, step;   // hidden values: its first 32, and from those to its next
  float bias;
  Weights weights[HELD];
};
__device__ __forceinline__ void load_held(const SqueezeExciteParams& p, Second& s, int m) {
#pragma unroll
  for (int i = 0; i < HELD; ++i)
    if (m + i * s.step < p.wide) s.weights[i] = load_weights(p.w2, (s.tile * p.wide + m + i * s.step) / 32);
}
__device__ __forceinline__ void load_second(const SqueezeExciteParams& p, Second& s) {
  if (s.tile >= s.to) return;
  load_held(p, s, s.m);
  s.bias = p.b2[s.tile * 16 + threadIdx.x % 2 * 8 + threadIdx.x % 32 / 4];
}
__device__ __forceinline__ void prepare_second(const SqueezeExciteParams& p, Second& s) {
  const int from = CLUSTER > 1 || LAYER == 2 ? blockIdx.x * p.each : 0, warp = threadIdx.x / 32;
  s.tile = from + warp, s.to = min(from + p.each, (p.k_wide + 15) / 16);
  s.m = 0, s.step = 32;
  if (LAYER == 2) s.tile = from + (warp >> p.log_deep), s.m = (warp & ((1 << p.log_deep) - 1)) * 32, s.step = 32 << p.log_deep;
  load_second(p, s);
}

// The lane's sum of its hidden values. column: its place in the second layer's factor.
__device__ __forceinline__ float multiply_second(const SqueezeExciteParams& p, Second& s, u32 column) {
  float sum[2][4] = {};
#pragma unroll 1
  for (int m = s.m;;) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (m + i * s.step >= p.wide) break;
      uint4 bits = {};
      if (threadIdx.x % 32 < 16) bits = lds_128(column + (m + i * s.step) * 8);
      multiply(sum, s.weights[i], bits);
    }
    m += HELD * s.step;
    if (m >= p.wide) break;
    load_held(p, s, m);
  }
  return gather(sum, UP);
}
__device__ __forceinline__ void store_channel(const SqueezeExciteParams& p, int tile, float v, float* shared) {
  const int lane = threadIdx.x % 32, channel = tile * 16 + lane % 2 * 8 + lane / 4;
#if SCALED
  if (lane % 4 < 2) shared[WARPS * 16 + channel - blockIdx.x * p.each * 16] = activate<ACT2>(v, p.alpha2, p.beta2, 0.f);
  return;
#endif
  if (lane % 4 < 2 && channel < p.k_wide)
    store_half(p.y + p.out.at(blockIdx.y, channel, 0), channel < p.k ? activate<ACT2>(v, p.alpha2, p.beta2, 0.f) : 0.f,
               p.nonfinite);  // padding stays zero
}

// `shared`: 16 sums of each warp, of which several may have parts of the same.
__device__ __forceinline__ void second_layer(const SqueezeExciteParams& p, Second& s, const __half* hidden, float* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 column = smem_u32(hidden + lane * 8);
#if LAYER == 2
  const int warps = 1 << p.log_deep;
  float sum = s.tile < s.to ? multiply_second(p, s, column) : 0.f;
  if (warps > 1) {
    float* mine = shared + warp * 16 + lane % 2 * 8 + lane / 4;
    if (lane % 4 < 2) *mine = sum;
    __syncthreads();
#pragma unroll 1
    for (int i = 1; i < warps && lane % 4 < 2 && s.m == 0; ++i) sum += mine[i * 16];
  }
  if (s.tile < s.to && s.m == 0) store_channel(p, s.tile, sum + s.bias, shared);
#else
#pragma unroll 1
  while (s.tile < s.to) {
    Second next = s;
    next.tile += WARPS;
    load_second(p, next);
    store_channel(p, s.tile, multiply_second(p, s, column) + s.bias, shared);
    s = next;
  }
#endif
}
