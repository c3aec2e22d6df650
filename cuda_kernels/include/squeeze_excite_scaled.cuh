// Part of squeeze_excite.cu, which defines the names and the compile-time values used here: tensor y, times a scale for each
// channel, in its own memory. Neighbours take a pixel's next 8 channels, then the next pixel; a thread has PIXELS of them, which
// are on their way while the scale is computed.
#pragma once

constexpr int PIXELS = 4;

struct Scaled {
  uint4 x[PIXELS];
  int vector, pixel, turn;  // of the block's, whose first pixel this is; pixels of a turn
  bool own;                 // the thread has pixels
};
__device__ __forceinline__ int channel_of(const SqueezeExciteParams& p, const Scaled& s) {
  return blockIdx.x * p.each * 16 + s.vector * 8;
}
__device__ __forceinline__ void load_scaled(const SqueezeExciteParams& p, Scaled& s) {
  const int spot = p.vectors.quotient(threadIdx.x);
  s.vector = threadIdx.x - spot * p.vectors.d, s.turn = p.run / PIXELS, s.pixel = blockIdx.z * p.run + spot;
  s.own = spot < s.turn && channel_of(p, s) < p.k_wide;
  const __half* at = p.y + p.out.at(blockIdx.y, channel_of(p, s), s.pixel);
#pragma unroll
  for (int i = 0; i < PIXELS; ++i)
    s.x[i] = ldg_128_if(s.own && s.pixel + i * s.turn < p.pixels, at + i * s.turn * p.out.pixel);
}
// scale: of the block's channels.
__device__ __forceinline__ void store_scaled(const SqueezeExciteParams& p, const Scaled& s, const float* scale) {
  __syncthreads();
  if (!s.own) return;
  const int channel = channel_of(p, s);
  __half* at = p.y + p.out.at(blockIdx.y, channel, s.pixel);
  float of[8];
  u32 mask[4];
#pragma unroll
  for (int j = 0; j < 8; ++j) of[j] = scale[s.vector * 8 + j];
#pragma unroll
  for (int i = 0; i < 4; ++i) mask[i] = p.k - channel > 2 * i + 1 ? 0xffffffffu : p.k - channel > 2 * i ? 0xffffu : 0u;
  Watch watch;
#pragma unroll
  for (int i = 0; i < PIXELS; ++i) {
    if (s.pixel + i * s.turn >= p.pixels) break;
    float v[8];
    unpack(s.x[i], v);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      v[j] *= of[j], v[j + 1] *= of[j + 1];
      activate_pair<ACT3, true>(v[j], v[j + 1], p.alpha3, p.beta3, 0.f, 0.f);
    }
    uint4 bits = pack(v);
    bits = make_uint4(bits.x & mask[0], bits.y & mask[1], bits.z & mask[2], bits.w & mask[3]);  // padding stays zero
    watch.see(bits);
    stg_128(at + i * s.turn * p.out.pixel, bits);
  }
  watch.report(p.nonfinite);
}
