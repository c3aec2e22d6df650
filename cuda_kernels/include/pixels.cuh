// Operand B of the implicit GEMM: a stage's chunks of 8 channels of the tile's pixels, taps and zero padding included.
#pragma once
#include "addresses.cuh"
#include "conv.cuh"

// Vector formats: a thread owns one chunk column and every (THREADS / CHUNKS)-th pixel of the tile. At most 15 x 15 taps.
struct PixelLoader {
  static constexpr int ROWS = BN * CHUNKS / THREADS, OWN = ROWS;  // copies of a stage
  static_assert(THREADS / CHUNKS % 8 == 0, "a thread's rows have one phase of the swizzle: they are constants apart");
  int row_offset[ROWS];  // element offset of tap (0, 0), channel 0; 32 bits: the host refuses larger tensors
  u32 row_taps[ROWS];    // which taps lie inside the image: bit r for kernel row r, bit 16 + s for column s
  int r, s, c8;          // where this thread's chunk column stands in K
  int r_step, s_step, c8_step;  // CHUNKS further in K, as digits of that number: a stage spans taps where channels are few
  const __half* from;           // of the stage being copied
  u32 need;

  // Bit t: 0 <= first + t * step < size, for t < taps.
  static __device__ __forceinline__ u32 inside(int first, int step, int taps, int size) {
    if (step == 1) return (0xffffu << min(max(-first, 0), 31)) & ((1u << max(min(taps, size - first), 0)) - 1);
    u32 bits = 0;
    for (int t = 0; t < taps; ++t)
      bits |= static_cast<u32>(static_cast<u32>(first + t * step) < static_cast<u32>(size)) << t;
    return bits;
  }

  __device__ __forceinline__ void init(const ConvParams& p, int pixel0, int first_tile) {
    const int pixels = p.n * p.p * p.q;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int pixel = pixel0 + threadIdx.x / CHUNKS + i * (THREADS / CHUNKS);
      const int n = pixel / (p.p * p.q), rest = pixel - n * (p.p * p.q);
      const int oh = rest / p.q, ow = rest - oh * p.q;
      const int h = oh * p.stride_h - p.pad_t, w = ow * p.stride_w - p.pad_l;
      const u32 taps = inside(h, p.dil_h, p.r, p.h) | inside(w, p.dil_w, p.s, p.w_in) << 16;
      row_taps[i] = pixel < pixels ? taps : 0;
      row_offset[i] = n * p.x_n + (h * p.w_in + w) * p.x_pixel;
    }
    const int chunk = first_tile * CHUNKS + threadIdx.x % CHUNKS, tap = chunk / p.c8, taps = CHUNKS / p.c8;
    c8 = chunk - tap * p.c8, r = tap / p.s, s = tap - r * p.s;
    c8_step = CHUNKS - taps * p.c8, r_step = taps / p.s, s_step = taps - r_step * p.s;
  }

  // To the next stage: digits add up with carries, without a branch.
  __device__ __forceinline__ void advance(const ConvParams& p) {
    c8 += c8_step;
    const bool next_tap = c8 >= p.c8;
    c8 -= next_tap ? p.c8 : 0;
    s += s_step + next_tap;
    const bool next_row = s >= p.s;
    s -= next_row ? p.s : 0;
    r += r_step + next_row;
  }

  // Copy `i` of the next stage, in order. Nothing is copied unless `wanted`; outside of the image zeros are, or the border, and
  // the address is not read.
  __device__ __forceinline__ void piece(const ConvParams& p, u32 smem, bool wanted, int i) {
    if (i == 0) {
      const int c = c8 * 8;
      const int tap = (r * p.dil_h * p.w_in + s * p.dil_w) * p.x_pixel + (c >> p.x_log2v) * p.x_block + (c & ((1 << p.x_log2v) - 1));
      from = element_at(p.x, tap);
      need = 1u << min(r, 15) | 0x10000u << s;  // past the end of K: bit 15 is never set
    }
    const u32 to = smem + swizzled<CHUNKS>(threadIdx.x / CHUNKS, threadIdx.x % CHUNKS);
#if BORDER
    const void* x = element_at(from, row_offset[i]);
    cp_async_16_if(wanted, to + i * THREADS * 16, (need & ~row_taps[i]) == 0 ? x : p.border, 16);
#else
    cp_async_16_if(wanted, to + i * THREADS * 16, element_at(from, row_offset[i]), (need & ~row_taps[i]) == 0 ? 16 : 0);
#endif
    if (i == OWN - 1) advance(p);
  }

  __device__ __forceinline__ void finish(u32, bool) {}
};

// Linear input: neighbouring threads take neighbouring pixels, 8 plain loads per chunk; `piece` fetches into
// registers before the stage's arithmetic and `finish` writes them to shared memory after it.
struct LinearLoader {
  static constexpr int ITEMS = BN * CHUNKS / THREADS, OWN = 1;  // loads of all at once
  uint4 held[ITEMS];
  int pixel0, tile;

  __device__ __forceinline__ void init(const ConvParams&, int first_pixel, int first_tile) {
    pixel0 = first_pixel, tile = first_tile;
  }

  __device__ __forceinline__ void piece(const ConvParams& p, u32, bool wanted, int) {
    if (!wanted) return;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int id = threadIdx.x + i * THREADS;
      const int pixel = pixel0 + id % BN, chunk = tile * CHUNKS + id / BN;
      const int n = pixel / (p.p * p.q), rest = pixel - n * (p.p * p.q), oh = rest / p.q, ow = rest - oh * p.q;
      const int t = chunk / p.c8, c = (chunk - t * p.c8) * 8, r = t / p.s, s = t - r * p.s;
      const int h = oh * p.stride_h - p.pad_t + r * p.dil_h, w = ow * p.stride_w - p.pad_l + s * p.dil_w;
      const bool ok = pixel < p.n * p.p * p.q && r < p.r && static_cast<u32>(h) < static_cast<u32>(p.h) &&
                      static_cast<u32>(w) < static_cast<u32>(p.w_in);
      const int at = n * p.x_n + (h * p.w_in + w) * p.x_pixel, low = (1 << p.x_log2v) - 1;
      u32 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        v[j] = ok && c + j < p.c ? __half_as_ushort(p.x[at + ((c + j) >> p.x_log2v) * p.x_block + ((c + j) & low)]) : 0;
      held[i] = make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16);
    }
    ++tile;
  }

  __device__ __forceinline__ void finish(u32 smem, bool wanted) {
    if (!wanted) return;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int id = threadIdx.x + i * THREADS;
      sts_128(smem + swizzled<CHUNKS>(id % BN, id / BN), held[i]);
    }
  }
};

#if IN_LINEAR
using Pixels = LinearLoader;
#else
using Pixels = PixelLoader;
#endif
