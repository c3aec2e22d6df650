// conv_grouped: convolution in many small groups on mma.sync.m16n8k16, FP16 in and out, FP32 accumulate.
//
//      K: (tap, 8 channels)    n8       A (pixels)   a patch of the image with the channels of the block's units, loaded once;
//     +--------------------+ +----+                  [position][IN_CHUNKS] chunks, swizzled; ldmatrix reads 16 pixels x 16
//     | tap 0 | tap 1 | .. | | W  |     B (weights)  [unit][k16][n8][32 lanes] 8 bytes, fragment order, all of the block's
//     | 16 pixels of unit  | |unit|     unit         one group, or a few packed block-diagonally, whichever needs fewer MMAs
//     +--------------------+ +----+     warps        WARPS_UNIT x WARPS_PIXEL: a warp takes every WARPS_UNIT-th unit, one at
//                                                    a time, and its share of the pixels
// The trick: weights are the 8-wide operand and the taps of one unit stand densely along K, so 8 output channels of 8 input
// channels waste 10 % (9 taps in 5 steps), not half; a tap is a shift of the patch, so no pixel is loaded once per tap.
#include "activation.cuh"
#include "nonfinite.cuh"
#include "swizzle.cuh"

// Compile-time values, set with -D:
//   PIXELS   output pixels of a block, at most: tile_h x tile_w of one image
//   IN_CHUNKS, OUT_CHUNKS   16-byte chunks of 8 channels per pixel in the patch and in the staging tile of the output
//   NT   8-wide tiles that cover a unit's output channels; ODD   1: a unit has an odd number of them
//   UNIT_C, UNIT_K, PER_BLOCK   channels in and out of a unit; units per block. WHOLE   1: no block has fewer, k and y_c are equal
//   CHUNKS, SPAN, CHUNKS_K, STEPS   chunks of a unit per tap; of a block; of a unit over all taps; k16 steps
//   TAPS_W taps per row; DIL_H, DIL_W, STRIDE_H, STRIDE_W; TILE_H x TILE_W pixels
//   PATCH_H rows of the patch; PITCH positions per row, of them PHASE for each column modulo STRIDE_W, so that the columns that
//   one tap reads are neighbours; PATCH_W columns in use; ROW_MASK, COLUMN_MASK   remainders that taps read
//   IN_LINEAR, OUT_LINEAR, ACT, RES, AFFINE, LAST   as in conv.cuh
//   HIDDEN   1: beside the outputs, their share of a squeeze-excite's hidden values (include/hidden_share.cuh)
#ifndef HIDDEN
#define HIDDEN 0
#endif
constexpr int THREADS = 32 * WARPS_UNIT * WARPS_PIXEL;
constexpr int ALL = (TILE_H * TILE_W + 15) / 16;  // 16-pixel tiles that hold a pixel
constexpr int MT = PIXELS / 16 / WARPS_PIXEL, USED = ALL < MT ? ALL : MT;  // a warp's, and those of them that it computes
constexpr int UNROLL = STEPS <= 5 ? STEPS : 2;
constexpr int STAGING_BYTES = PIXELS * OUT_CHUNKS * 16;

static_assert(PIXELS % (16 * WARPS_PIXEL) == 0, "a warp has whole 16-pixel tiles");
static_assert((IN_CHUNKS & (IN_CHUNKS - 1)) == 0 && (OUT_CHUNKS & (OUT_CHUNKS - 1)) == 0, "the swizzle permutes powers of two");
static_assert(THREADS % IN_CHUNKS == 0, "a thread keeps to its chunk of the channels");
static_assert(IN_CHUNKS <= 16, "the tap table holds a chunk in 4 bits");
static_assert(PIXELS % 64 == 0, "rows of the linear staging tile are whole swizzle patterns");
#if HIDDEN
constexpr int SUM_VEC = 8, SUM_CHANNELS = OUT_CHUNKS * 8, SUM_SPOTS = THREADS / OUT_CHUNKS;
static_assert(!OUT_LINEAR && THREADS % OUT_CHUNKS == 0, "a thread stores pixels of the same channels");
#include "hidden_share.cuh"
#else
struct PixelSums {
  __device__ __forceinline__ void add(const u32 (&)[4], bool) {}
};
#endif

struct GroupedParams {
  u32* nonfinite;
  const __half* x;
  const uint4* w;
  const float* bias;       // [k], zeros where there is none
  const float* slope;      // [k], prelu only
  const __half* residual;  // y's format
  __half* y;
  int c, h, w_in, k, p, q;
  int units, blocks_of_units, tiles_h, tiles_w;  // in all
  int stride_h, stride_w, pad_t, pad_l, dil_h, dil_w;
  int x_n, x_block, x_pixel, x_log2v;
  int y_n, y_block, y_pixel, y_log2v, y_c;  // y_c: channels of y with padding
  int r_n, r_block, r_pixel, r_log2v;       // the residual's strides: it or y may lie inside another tensor
  int first, row_pixels, column_pixels;     // output (row, col) is pixel first + row * row_pixels + col * column_pixels of y
  float alpha, beta;
#if AFFINE
  const float* scales;  // [k]
  const float* shifts;
#endif
#if LAST
  float alpha_last, beta_last;
#endif
#if HIDDEN
  HiddenShare share;
#endif
};

// What a block computes: a tile of one image's output pixels, and a run of units.
struct Part {
  int image, row0, column0, first_unit, units, first_chunk, channel0, channel_end;
};

__device__ __forceinline__ Part part_of_block(const GroupedParams& p) {
  // Blocks that share pixels are neighbours: units run fastest.
  const int of_units = blockIdx.x % p.blocks_of_units, tile = blockIdx.x / p.blocks_of_units;
  const int tile_row = tile / p.tiles_w, image = tile_row / p.tiles_h;
  Part b;
  b.image = image;
  b.row0 = (tile_row - image * p.tiles_h) * TILE_H;
  b.column0 = (tile - tile_row * p.tiles_w) * TILE_W;
  b.first_unit = of_units * PER_BLOCK;
  b.units = min(PER_BLOCK, p.units - b.first_unit);
  b.first_chunk = b.first_unit * UNIT_C / 8;
  b.channel0 = b.first_unit * UNIT_K;
  b.channel_end = of_units + 1 == p.blocks_of_units ? p.y_c : b.channel0 + PER_BLOCK * UNIT_K;
  return b;
}

__device__ __forceinline__ int channel_offset(int c, int block, int log2v) {
  return (c >> log2v) * block + (c & ((1 << log2v) - 1));
}

// Element offset of channel 0 at a patch position, or -1 where chunk `column` is padding there or nobody reads it.
__device__ __forceinline__ int source(const GroupedParams& p, const Part& b, u32 pos, int column) {
  const u32 row = pos / PITCH, rest = pos - row * PITCH, phase = STRIDE_W == 1 ? 0 : rest / PHASE;
  const u32 x = (rest - phase * PHASE) * STRIDE_W + phase;
  const int h = b.row0 * STRIDE_H - p.pad_t + static_cast<int>(row), w = b.column0 * STRIDE_W - p.pad_l + static_cast<int>(x);
  const bool ok = row < PATCH_H && phase < STRIDE_W && x < PATCH_W && (COLUMN_MASK >> phase & 1) &&
                  (ROW_MASK >> row % STRIDE_H & 1) && column < SPAN && (b.first_chunk + column) * 8 < p.c &&
                  static_cast<u32>(h) < static_cast<u32>(p.h) && static_cast<u32>(w) < static_cast<u32>(p.w_in);
  return ok ? b.image * p.x_n + (h * p.w_in + w) * p.x_pixel : -1;
}

__device__ __forceinline__ void load_patch(const GroupedParams& p, const Part& b, u32 patch) {
  constexpr int positions = PATCH_H * PITCH;
#if IN_LINEAR
  // Neighbouring threads take neighbouring positions; 8 plain loads per chunk.
  const int padded = (positions + 7) / 8 * 8;
  for (int id = threadIdx.x; id < padded * SPAN; id += THREADS) {
    const int column = id / padded, pos = id - column * padded;
    const int from = source(p, b, pos, column), c = (b.first_chunk + column) * 8;
    u32 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      v[j] = from >= 0 && c + j < p.c ? __half_as_ushort(p.x[from + channel_offset(c + j, p.x_block, p.x_log2v)]) : 0;
    sts_128(patch + swizzled<IN_CHUNKS>(pos, column),
            make_uint4(v[0] | v[1] << 16, v[2] | v[3] << 16, v[4] | v[5] << 16, v[6] | v[7] << 16));
  }
#else
  const int column = threadIdx.x % IN_CHUNKS, channel = channel_offset((b.first_chunk + column) * 8, p.x_block, p.x_log2v);
#pragma unroll 4
  for (int first = 0; first < positions; first += THREADS / IN_CHUNKS) {
    const int pos = first + threadIdx.x / IN_CHUNKS, from = source(p, b, pos, column);
    if (positions % (THREADS / IN_CHUNKS) == 0 || pos < positions)
      cp_async_16(patch + swizzled<IN_CHUNKS>(pos, column), p.x + (from >= 0 ? from + channel : 0), from >= 0 ? 16 : 0);
  }
#endif
}

// Byte address in the staging tile of channel m (and m + 1) of pixel n, or, linear, of pixel n of channel m.
__device__ __forceinline__ u32 staged(u32 staging, int m, int n) {
  return OUT_LINEAR ? staging + swizzled<PIXELS / 8>(m, n / 8) + n % 8 * 2
                    : staging + swizzled<OUT_CHUNKS>(n, m / 8) + m % 8 * 2;
}

__device__ __forceinline__ int at_output(const GroupedParams& p, const Part& b, int pixel, int c) {
  return b.image * p.y_n + pixel * p.y_pixel + channel_offset(c, p.y_block, p.y_log2v);
}
__device__ __forceinline__ int at_residual(const GroupedParams& p, const Part& b, int pixel, int c) {
  return b.image * p.r_n + pixel * p.r_pixel + channel_offset(c, p.r_block, p.r_log2v);
}

// Before the arithmetic: the residual enters the staging tile as y will leave it; chunks that no unit fills get zeros.
// `rows`: which pixel of y each pixel of the tile is, -1 for none.
__device__ __forceinline__ void prepare_staging(const GroupedParams& p, const Part& b, u32 staging, u32 rows) {
  if (WHOLE && !RES && !OUT_LINEAR) return;
  const int real_end = min(p.k, b.channel0 + b.units * UNIT_K);
  if (OUT_LINEAR) {
    if (!RES) return;
    for (int id = threadIdx.x; id < (real_end - b.channel0) * PIXELS; id += THREADS) {
      const int m = id / PIXELS, n = id % PIXELS, pixel = static_cast<int>(lds_32(rows + n * 4));
      const __half* at = p.residual + at_residual(p, b, pixel, b.channel0 + m);
      sts_16(staged(staging, m, n), pixel >= 0 ? __half_as_ushort(*at) : u16(0));
    }
    return;
  }
  if (!RES && real_end % 8 == 0 && b.channel_end == real_end) return;
  for (int id = threadIdx.x; id < PIXELS * OUT_CHUNKS; id += THREADS) {
    const int n = id / OUT_CHUNKS, m = id % OUT_CHUNKS * 8, c = b.channel0 + m;
    if (RES) {
      const int pixel = static_cast<int>(lds_32(rows + n * 4));
      const bool ok = pixel >= 0 && c < b.channel_end;
      cp_async_16(staged(staging, m, n), p.residual + (ok ? at_residual(p, b, pixel, c) : 0), ok ? 16 : 0);
    } else if (c + 8 > real_end) {
      sts_128(staged(staging, m, n), make_uint4(0, 0, 0, 0));
    }
  }
}

__device__ __forceinline__ void store(const GroupedParams& p, const Part& b, u32 staging, u32 rows, PixelSums& sums) {
  if (OUT_LINEAR) {
    for (int id = threadIdx.x; id < (b.channel_end - b.channel0) * PIXELS; id += THREADS) {
      const int m = id / PIXELS, n = id % PIXELS, c = b.channel0 + m, pixel = static_cast<int>(lds_32(rows + n * 4));
      if (pixel >= 0) p.y[at_output(p, b, pixel, c)] = __ushort_as_half(c < p.k ? lds_16(staged(staging, m, n)) : u16(0));
    }
    return;
  }
#pragma unroll 4
  for (int id = threadIdx.x; id < PIXELS * OUT_CHUNKS; id += THREADS) {
    const int n = id / OUT_CHUNKS, m = id % OUT_CHUNKS * 8, c = b.channel0 + m, pixel = static_cast<int>(lds_32(rows + n * 4));
    if (pixel < 0 || c >= b.channel_end) continue;
    const uint4 bits = lds_128(staged(staging, m, n));
    sums.add({bits.x, bits.y, bits.z, bits.w}, true);
    stg_128(p.y + at_output(p, b, pixel, c), bits);
  }
}

// Bias is in the accumulator already. Residual and activation in FP32, one rounding, into the staging tile.
__device__ __forceinline__ void stage_pair(const GroupedParams& p, u32 staging, int m, int n, int channel, int in_unit,
                                           float v0, float v1, Watch& watch) {
  const bool ok0 = in_unit < UNIT_K && (WHOLE || channel < p.k), ok1 = in_unit + 1 < UNIT_K && (WHOLE || channel + 1 < p.k);
  if (!OUT_LINEAR && !ODD) {  // both or none, in one word
    if (!ok0) return;
    const u32 at = staged(staging, m, n);
    float2 added = make_float2(0.f, 0.f);
    if (RES) {
      const u32 bits = lds_32(at);
      added = __half22float2(*reinterpret_cast<const __half2*>(&bits));
    }
    constexpr bool RELU_LAST = ACT == ACT_RELU && RES != 2 && !AFFINE && !LAST;  // on halfs: rounding keeps the order
    constexpr int KIND = RELU_LAST ? ACT_NONE : ACT;
    v0 = finish<KIND, RES>(p, v0, added.x, ACT == ACT_PRELU ? p.slope[channel] : 0.f, tail_of(p, channel));
    v1 = finish<KIND, RES>(p, v1, added.y, ACT == ACT_PRELU ? p.slope[channel + 1] : 0.f, tail_of(p, channel + 1));
    __half2 h = __floats2half2_rn(v0, v1);
    if (RELU_LAST) h = __hmax2_nan(h, __half2half2(__ushort_as_half(0)));
    watch.see(h);
    sts_32(at, *reinterpret_cast<const u32*>(&h));
    return;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (!(e ? ok1 : ok0)) continue;
    const u32 at = staged(staging, m + e, n);
    const float added = RES ? __half2float(__ushort_as_half(lds_16(at))) : 0.f;
    const float slope = ACT == ACT_PRELU ? p.slope[channel + e] : 0.f;
    const float v = finish<ACT, RES>(p, e ? v1 : v0, added, slope, tail_of(p, channel + e));
    const __half h = __float2half_rn(v);
    watch.see(h);
    sts_16(at, __half_as_ushort(h));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_grouped(const __grid_constant__ GroupedParams p) {
  release_next_launch();
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int warp_unit = warp / WARPS_PIXEL, pixel0 = warp % WARPS_PIXEL * MT * 16;
  const Part b = part_of_block(p);
#if HIDDEN
  HiddenHeld held;
  held.copy(p.share, smem_u32(shared), b.channel0);
#endif
  const int unit_bytes = STEPS * NT * 256;
  const u32 patch = smem_u32(shared), weights = patch + (PATCH_H * PITCH + 7) / 8 * 8 * IN_CHUNKS * 16;
  const u32 staging = weights + PER_BLOCK * unit_bytes, rows = staging + STAGING_BYTES, taps = rows + PIXELS * 4;

  // Everything the block reads is on its way at once; other blocks of the SM compute meanwhile.
  const char* w = reinterpret_cast<const char*>(p.w) + static_cast<long long>(b.first_unit) * unit_bytes;
  for (int at = threadIdx.x * 16; at < b.units * unit_bytes; at += THREADS * 16) cp_async_16(weights + at, w + at, 16);
  wait_for_previous_launch();
  load_patch(p, b, patch);

  // Tables: which pixel of y each pixel of the tile is, and how far in the patch each chunk of K stands from the pixel's first
  // tap. Past the last chunk weights are zero and the last one is read again.
  const int tile_pixels = TILE_H * TILE_W;
#pragma unroll 1
  for (int n = threadIdx.x; n < PIXELS; n += THREADS) {
    const int row = n / TILE_W, oh = b.row0 + row, ow = b.column0 + n - row * TILE_W;
    const bool ok = n < tile_pixels && oh < p.p && ow < p.q;
    sts_32(rows + n * 4, ok ? p.first + oh * p.row_pixels + ow * p.column_pixels : -1);
  }
#pragma unroll 1
  for (int j = threadIdx.x; j < 2 * STEPS; j += THREADS) {
    const int chunk = min(j, CHUNKS_K - 1), tap = chunk / CHUNKS, r = tap / TAPS_W, s = tap - r * TAPS_W;
    const int column = s * DIL_W, shift = r * DIL_H * PITCH + column % STRIDE_W * PHASE + column / STRIDE_W;
    sts_32(taps + j * 4, shift << 4 | (chunk - tap * CHUNKS));
  }
  if (RES) __syncthreads();  // the residual's loads read `rows`
  prepare_staging(p, b, staging, rows);
  cp_async_commit();

  // Lane l of ldmatrix.x4 addresses pixel l % 16, K half l / 16. Lanes past the tile's last pixel repeat an earlier one that
  // keeps 8 neighbours on 8 different banks.
  const int pixels = min(TILE_H, p.p - b.row0) * TILE_W, tiles = (pixels - pixel0 + 15) / 16;
  int base[USED];
#pragma unroll
  for (int i = 0; i < USED; ++i) {
    int n = pixel0 + i * 16 + lane % 16;
    if (n >= pixels) n -= (n - pixels + 8) / 8 * 8;
    if (n < 0) n = pixels - 1;
    const int row = n / TILE_W;
    base[i] = row * STRIDE_H * PITCH + n - row * TILE_W;
  }
  cp_async_wait<0>();
  __syncthreads();

  Watch watch;
  for (int unit = warp_unit; unit < b.units && pixel0 < pixels; unit += WARPS_UNIT) {
    const int first = unit * UNIT_K;  // of its output channels in the block
    const int chunk0 = (b.first_unit + unit) * UNIT_C / 8 - b.first_chunk;
    float acc[USED][NT][4];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int c = j * 8 + 2 * t, channel = b.channel0 + first + c;
      const float b0 = c < UNIT_K && (WHOLE || channel < p.k) ? p.bias[channel] : 0.f;
      const float b1 = c + 1 < UNIT_K && (WHOLE || channel + 1 < p.k) ? p.bias[channel + 1] : 0.f;
#pragma unroll
      for (int i = 0; i < USED; ++i) acc[i][j][0] = acc[i][j][2] = b0, acc[i][j][1] = acc[i][j][3] = b1;
    }

    const u32 fragments = weights + unit * unit_bytes + lane * 8;
#pragma unroll UNROLL
    for (int k = 0; k < STEPS; ++k) {
      const u32 tap = lds_32(taps + (2 * k + lane / 16) * 4);
      const int shift = tap >> 4, chunk = chunk0 + static_cast<int>(tap & 15);
      uint2 w8[NT];
#pragma unroll
      for (int j = 0; j < NT; ++j) w8[j] = lds_64(fragments + (k * NT + j) * 256);
      uint4 a[USED];  // all loads, then the products of tiles that hold a pixel: none waits for another's
#pragma unroll
      for (int i = 0; i < USED; ++i) a[i] = ldmatrix_x4(patch + swizzled<IN_CHUNKS>(base[i] + shift, chunk));
#pragma unroll
      for (int i = 0; i < USED; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j)
          if (i < tiles) mma_16816(acc[i][j], a[i], w8[j].x, w8[j].y);
    }

#pragma unroll
    for (int i = 0; i < USED; ++i) {
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int c = j * 8 + 2 * t, n = pixel0 + i * 16 + g;
        stage_pair(p, staging, first + c, n, b.channel0 + first + c, c, acc[i][j][0], acc[i][j][1], watch);
        stage_pair(p, staging, first + c, n + 8, b.channel0 + first + c, c, acc[i][j][2], acc[i][j][3], watch);
      }
    }
  }
  watch.report(p.nonfinite);
  __syncthreads();
  PixelSums sums;
  store(p, b, staging, rows, sums);
#if HIDDEN
  share_hidden(p.share, held, [&] { return b.channel0; }, threadIdx.x % OUT_CHUNKS * 8, threadIdx.x / OUT_CHUNKS, sums);
#endif
}
