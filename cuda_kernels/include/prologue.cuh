// What happens to pixels between shared memory and the tensor cores, in FP16: max(x * scale + shift, 0) per channel, or
// x * gate per image and channel, which may then be clipped.
//
// A stage holds the constants of its BK channels behind its pixels. Lane t multiplies channels 2t and 2t + 1 of a chunk of 8:
// one word of each constant, which all lanes of the same t share.
//
// A norm of a pixel's channels is not applied to pixels but to results, in FP32, once its statistics are known:
//     W ((x - mean) / std) = (W x - mean * sum of W's row) / std
// While a stage is in shared memory, each warp adds up some of its pixels on the tensor cores.
#pragma once
#include "addresses.cuh"
#include "conv.cuh"

constexpr int PRO_BYTES = PRO ? 2 * BK * 2 : GATE ? 128 : 0;  // of a stage; rows of pixels keep their phase against the banks

// What no launch writes.
__device__ __forceinline__ void load_constants(const ConvParams& p, int tile, u32 smem, bool wanted) {
#if PRO
  const int piece = threadIdx.x * 16;
  cp_async_16_if(wanted && piece < PRO_BYTES, smem + piece, p.affine + tile * PRO_BYTES + piece, 16);
#endif
}

// What a launch before this one has written.
__device__ __forceinline__ void load_gate(const ConvParams& p, int tile, u32 smem, bool wanted) {
#if GATE
  const int chunk = tile * CHUNKS + threadIdx.x, c = chunk * 8;
  cp_async_16_if(wanted && threadIdx.x < CHUNKS, smem + threadIdx.x * 16,
                 p.gate + (c >> p.g_log2v) * p.g_block + (c & ((1 << p.g_log2v) - 1)), chunk < p.c8 ? 16 : 0);
#endif
}

// The constants of one chunk of a stage, and what they do to its words.
struct Prologue {
  u32 scale, shift;

  // Of chunk `chunk` of the stage whose constants are at `stage_constants`.
  __device__ __forceinline__ void load(u32 stage_constants, int chunk) {
#if PRO
    const u32 at = stage_constants + chunk / 4 * 128 + chunk % 4 * 16 + threadIdx.x % 4 * 4;
    scale = lds_32(at), shift = lds_32(at + 64);
#elif GATE
    scale = lds_32(stage_constants + chunk * 16 + threadIdx.x % 4 * 4);
#endif
  }

  __device__ __forceinline__ u32 operator()(const ConvParams& p, u32 v) const {
    if (!PRO && !GATE) return v;
    const __half2 x = *reinterpret_cast<const __half2*>(&v), s = *reinterpret_cast<const __half2*>(&scale);
#if PRO
    const __half2 y = __hmax2(__hfma2(x, s, *reinterpret_cast<const __half2*>(&shift)), __float2half2_rn(0.f));
#else
    __half2 y = __hmul2(x, s);
#endif
#if GATE > 1
    y = __hmax2(y, __float2half2_rn(GATE == 2 ? 0.f : p.low));
#endif
#if GATE > 2
    y = __hmin2(y, __float2half2_rn(p.high));
#endif
    return *reinterpret_cast<const u32*>(&y);
  }
};

#if NORM
// Sums over channels, and sums of squares, of the tile's pixels: 8 pixels at a time, dealt to the warps in turn. One MMA gives
// both: rows 0 to 7 of its operand A are the 8 pixels, rows 8 to 15 are ones, and B is the pixels again.
//
//                    8 pixels          Each pixel is taken less its first channel, so that the square of the mean, which the
//   8 pixels  x 16   d . .             variance is less, cannot be large beside it; and halved, so that FP16 holds any
//   channels         . d .             difference. d: the squares that are kept; s: the sums, 8 times the same.
//   ones             s s s
struct PixelSums {
  static constexpr int TILES = BN / 8, WARPS = THREADS / 32, OWN = (TILES + WARPS - 1) / WARPS;
  float sum[OWN][4];
  u32 origin[OWN];  // of pixel g: minus half of its first channel, twice

  __device__ __forceinline__ PixelSums() {
#pragma unroll
    for (int q = 0; q < OWN; ++q) {
      origin[q] = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[q][e] = 0.f;
    }
  }

  // First pixel of the warp's q-th 8, BN or more for none.
  static __device__ __forceinline__ int first_pixel(int q) { return (threadIdx.x / 32 + q * WARPS) * 8; }

  static __device__ __forceinline__ u32 difference(u32 v, u32 origin) {
    const __half2 x = *reinterpret_cast<const __half2*>(&v), less = *reinterpret_cast<const __half2*>(&origin);
    const __half2 d = __hfma2(x, __float2half2_rn(0.5f), less);
    return *reinterpret_cast<const u32*>(&d);
  }

  // Of two channels, of which a pixel has the first `left`.
  static __device__ __forceinline__ u32 real(u32 v, int left) { return left > 1 ? v : left > 0 ? v & 0xffffu : 0u; }

  // Stage `tile` of K, whose pixels are at `pixels`.
  __device__ __forceinline__ void add(const ConvParams& p, int tile, u32 pixels) {
    const int lane = threadIdx.x % 32;
    const u32 ones = 0x3c003c00u;
#pragma unroll
    for (int q = 0; q < OWN; ++q) {
      const int n = first_pixel(q);
      if (TILES % WARPS && n >= BN) break;
      if (tile == 0) {
        const __half first = __ushort_as_half(lds_16(pixels + swizzled<CHUNKS>(n + lane / 4, 0)));
        const __half2 less = __half2half2(__hmul(first, __float2half(-0.5f)));
        origin[q] = *reinterpret_cast<const u32*>(&less);
      }
#pragma unroll
      for (int k = 0; k < BK / 32; ++k) {
        uint4 b = ldmatrix_x4(pixels + swizzled<CHUNKS>(n + (lane & 7), k * 4 + (lane >> 3)));
        b.x = difference(b.x, origin[q]), b.y = difference(b.y, origin[q]);
        b.z = difference(b.z, origin[q]), b.w = difference(b.w, origin[q]);
        const int left = p.c - tile * BK - k * 32;
        if (left < 32) {
          const int from = left - lane % 4 * 2;
          b.x = real(b.x, from), b.y = real(b.y, from - 8), b.z = real(b.z, from - 16), b.w = real(b.w, from - 24);
        }
        mma_16816(sum[q], make_uint4(b.x, ones, b.y, ones), b.x, b.y);
        mma_16816(sum[q], make_uint4(b.z, ones, b.w, ones), b.z, b.w);
      }
    }
  }

  // Normalizes the tile's sums. The pipeline's memory at `smem` becomes a table of 1 / std and -mean / std of each pixel.
  __device__ __forceinline__ void normalize(const ConvParams& p, float (&acc)[MT][NT][4], u32 smem, int m0) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int q = 0; q < OWN; ++q) {
      const int n = first_pixel(q);
      if (TILES % WARPS && n >= BN) break;
      const float mean = (g % 2 ? sum[q][3] : sum[q][2]) * p.per_channel;  // of differences
      const float variance = fmaxf((g % 2 ? sum[q][1] : sum[q][0]) * p.per_channel - mean * mean, 0.f);
      const float scale = rsqrtf(4.f * variance + p.epsilon);
      const float less = __low2float(*reinterpret_cast<const __half2*>(&origin[q]));
      if (t == g / 2) {  // the lane that has the diagonal's
        sts_32(smem + (n + g) * 8, __float_as_uint(scale));
        sts_32(smem + (n + g) * 8 + 4, __float_as_uint(2.f * (less - mean) * scale));
      }
    }
    __syncthreads();
    float row[2 * MT];
#pragma unroll
    for (int i = 0; i < 2 * MT; ++i) {
      const int m = m0 + warp / WARPS_N * WM + i * 8 + g;
      row[i] = m < p.m16 * 16 ? p.sums[m] : 0.f;
    }
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const uint4 bits = lds_128(smem + (warp % WARPS_N * WN + j * 8 + 2 * t) * 8);
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i) {
        float& low = acc[i / 2][j][i % 2 * 2];
        float& high = acc[i / 2][j][i % 2 * 2 + 1];
        low = low * __uint_as_float(bits.x) + row[i] * __uint_as_float(bits.y);
        high = high * __uint_as_float(bits.z) + row[i] * __uint_as_float(bits.w);
      }
    }
  }
};
#else
struct PixelSums {
  __device__ __forceinline__ void add(const ConvParams&, int, u32) {}
  __device__ __forceinline__ void normalize(const ConvParams&, float (&)[MT][NT][4], u32, int) const {}
};
#endif
