// What convolutions on tensor cores share: parameters and the epilogue.
//
//   Y[M, N] = W[M, K] X[K, N]     M = output channels, N = output pixels of all images, K = (tap r, s; input channel)
//
// K is cut into chunks of 8 channels (16 bytes): chunk j is channels 8*(j % c8).. of tap j / c8, so few channels waste
// little. A tensor's element is at n*ns + (c >> log2v)*bs + pixel*ps + (c & (V-1)) halfs (tactics/format.py).
#pragma once
#if OUT_F32
#define ROUNDED 0
#endif
#include "activation.cuh"
#include "nonfinite.cuh"
#include "result_pairs.cuh"
#include "swizzle.cuh"
#include "tensor_map.cuh"

// Compile-time values, set with -D:
//   BM x BN x BK   the block's tile: output channels, pixels, logical K per stage (32 or 64)
//   WARPS_M x WARPS_N   warps over the tile; STAGES of the cp.async pipeline
//   IN_LINEAR, OUT_LINEAR   1: V < 8 (chw, chw2, hwc), 2-byte accesses along pixels; 0: V >= 8, 16-byte accesses
//   SPLIT   1, 2: blocks share output tiles along K (include/split_k.cuh); GROUPED   1: blockIdx.y is the group
//   ACT   an Act; RES   a residual tensor in the output's format is added 1: before, 2: after it; AFFINE, LAST, TABLE   what follows
//   (include/activation.cuh)
//   D2S   0: the GEMM's pixels are y's; b: they lie in y as y_row, y_col and y_first say, and each becomes b x b pixels of y
//         (depth-to-space), in the stores and the residual's loads alike
//   PRO   1: x is max(x * scale + shift, 0) per channel, of a 1 x 1 kernel without padding (include/prologue.cuh)
//   GATE  1: x is x * gate per image and channel, of such a kernel; 2: max(x * gate, 0), 3: that between `low` and `high`;
//         blockIdx.z is then the image
//   NORM  1: x is (x - mean) / sqrt(variance + epsilon), both of a pixel's channels, of such a kernel of one group
//         (include/prologue.cuh)
//   BORDER   1: the taps outside of the image read `border`, not zeros; of vectors alone
//   OUT_F32   1: y is FP32, with OUT_LINEAR and no padded channels; a residual is FP16 all the same
//   X_BYTES   x and the weights are whole numbers of 8 bits: 1 x int8, 2 uint8; the sums are integers. All that moves operands
//         takes two channels for one of FP16: x's strides, c8 and k_tiles count pairs. x is vectors, with no prologue, no groups
//   Y_BYTES   y, and a residual, are bytes of whole numbers, to which the activation rounds: 1 int8, 2 uint8
//   MULTIPLIED   1: the sums are multiplied by a value of their channel, before the bias is added; RES_MULTIPLIED   1: so is the
//         residual, before it is added
//   WGMMA  1: a kernel of include/tma_gemm.cuh, which has tiles of its own: BM x BN is a part of one that a warpgroup stores at a
//          time, and CLUSTER how many blocks do the same share of neighbouring tiles
#ifndef D2S
#define D2S 0
#endif
#ifndef OUT_F32
#define OUT_F32 0
#endif
#ifndef WGMMA
#define WGMMA 0
#define CLUSTER 1
#endif
#ifndef X_BYTES
#define X_BYTES 0
#endif
#ifndef MULTIPLIED
#define MULTIPLIED 0
#endif
#ifndef RES_MULTIPLIED
#define RES_MULTIPLIED 0
#endif
#ifndef PRO
#define PRO 0
#endif
#ifndef GATE
#define GATE 0
#endif
#ifndef NORM
#define NORM 0
#endif
#ifndef BORDER
#define BORDER 0
#endif
constexpr int THREADS = 32 * WARPS_M * WARPS_N;
constexpr int WM = BM / WARPS_M, WN = BN / WARPS_N;  // a warp's tile
constexpr int MT = WM / 16, NT = WN / 8;             // its MMA tiles
constexpr int CHUNKS = BK / 8;                       // 16-byte chunks per pixel and stage
constexpr int B_BYTES = BN * BK * 2;

static_assert(BM % (16 * WARPS_M) == 0 && BN % ((WGMMA ? 8 : 16) * WARPS_N) == 0, "a warp's tile is a multiple of 16 x 16");
static_assert(BK == 32 || BK == 64, "a stage holds 32 or 64 of K: the swizzle knows 64- and 128-byte rows");
static_assert(OUT_LINEAR || !OUT_F32, "FP32 results are stored one by one");
static_assert((PRO != 0) + (GATE != 0) + NORM <= 1, "one of them is in front of a convolution");
static_assert(!NORM || (!SPLIT && !IN_LINEAR), "a block reads all channels of its pixels, as vectors");
static_assert(!(X_BYTES && (IN_LINEAR || PRO || GATE || NORM)) && !(Y_BYTES && (OUT_LINEAR || OUT_F32 || D2S)), "bytes: vectors alone");
static_assert(STAGES >= 2, "cp.async needs a stage to fill while another is read");
static_assert(WGMMA || ((BN * CHUNKS) % THREADS == 0 && THREADS % CHUNKS == 0), "each thread loads the same number of chunks");
static_assert(THREADS % BN == 0 || BN % THREADS == 0 || !IN_LINEAR, "linear input: a thread keeps to its pixels");

struct ConvParams {
  u32* nonfinite;
  const __half* x;
  const uint4* w;          // fragments of operand A: [m16][K/16 or, sparse, K/32][32 lanes]
  const u32* meta;         // sparse: [m32][K/64][32 lanes][2]: words of two 16-row tiles
  const float* bias;       // [16 * m16], zeros where there is none
  const float* slope;      // [16 * m16], prelu only; or a table
  const __half* residual;  // y's format
  __half* y;               // OUT_F32: floats
  int n, c, h, w_in, k, p, q, r, s;
  int c8, k_tiles, m16;    // input chunks of 8 channels; stages over K; 16-row tiles of packed weights
  int stride_h, stride_w, pad_t, pad_l, dil_h, dil_w;
  int x_n, x_block, x_pixel, x_log2v;
  int y_n, y_block, y_pixel, y_log2v, y_c;  // y_c: channels of y with padding
  float alpha, beta;
#if RES
  int r_n, r_block, r_pixel, r_log2v;  // the residual's strides: it or y may lie inside another tensor
#endif
#if D2S
  int y_row, y_col, y_first;  // GEMM pixel (oh, ow) is at element y_first + oh*y_row + ow*y_col of its image of y
  int y_corner;               // elements from one pixel row of y to the next
#if RES
  // The residual's pixel for GEMM pixel (oh, ow) is at r_first + oh / r_up * r_row + ow / r_up * r_col, and the next ones of its
  // block r_corner and r_step further: none, where the residual has one pixel for all of them.
  int r_first, r_row, r_col, r_up, r_corner, r_step;
#endif
#endif
#if SPLIT
  void* partial;   // [block][SPLIT][accumulator], FP32
  u32* counters;   // [tile], zero before and after
  int splits, tiles;  // SPLIT 1: blocks per tile; SPLIT 2: tiles in all
#endif
#if GROUPED
  int x_group, y_group;  // elements from one group's first channel to the next one's
#endif
#if PRO
  const char* affine;  // [K/32][scale | shift][32] halfs
#endif
#if GATE
  const __half* gate;
  int g_n, g_block, g_log2v, g_group;  // its strides, and elements from one group's first channel to the next one's; n is 1
  float low, high;
#endif
#if NORM
  const float* sums;          // [16 * m16]: of each row of the weights
  float per_channel, epsilon; // 1 / c
#endif
#if BORDER
  const uint4* border;  // one, of the number outside of the image
#endif
#if WGMMA
  TensorMap map;   // of x
  int im2col;      // whether the map has taps; else its rows are pixels
  int tap_stages;  // stages over the channels of one tap
  int units;       // tiles, of a cluster as many as it has blocks, of all
#endif
#if AFFINE
  const float* scales;  // [16 * m16]
  const float* shifts;
#endif
#if LAST
  float alpha_last, beta_last;
#endif
#if MULTIPLIED
  const float* multipliers;  // [16 * m16]
#endif
#if RES_MULTIPLIED
  const float* residual_multipliers;  // [16 * m16]
#endif
};

// A thread's number among the THREADS that store a tile together, and their barrier: of the block; or of a warpgroup, 9.7.13.1
// bar.sync with a number of its own, for 0 is __syncthreads'.
#if WGMMA
#define THREAD (threadIdx.x % THREADS)
__device__ __forceinline__ void sync_threads() {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.x / THREADS), "n"(THREADS) : "memory");
}
#else
#define THREAD threadIdx.x
#define sync_threads __syncthreads
#endif

// Epilogue: bias, residual, activation in FP32, one rounding, and stores in y's format through a swizzled staging tile:
// V >= 8: [pixel][channel], transposed in registers by movmatrix, so that 16-byte stores run along channels;
// linear: [channel][pixel], 2-byte stores along pixels. A residual enters the staging tile the same way y leaves it.
//
// D2S > 1: a row of the GEMM is a channel of one corner (i, j) of the b x b block that a GEMM pixel becomes; the host orders
// the weights' rows so that DCR and CRD look alike here:
//   V >= 8: row = (i*b + j)*y_c + c   every corner padded like a pixel of y: whole vectors are stored, padding included
//   linear: row = (c*b + i)*b + j     b neighbouring rows are b neighbouring pixels: stores interleave them
constexpr int STAGING_BYTES = BM * BN * RESULT_BYTES;
constexpr int ROW_TABLE_BYTES = BN * 4;
// Whether the residual may be on its way while the main loop still runs: it needs copies of 16 bytes, a block that is sure to
// store its tile, and memory that nothing takes between the loop and the epilogue.
constexpr bool RESIDUAL_EARLY = RES && !OUT_LINEAR && !SPLIT && !NORM;
constexpr int BLOCK = D2S > 1 ? D2S : 1, CORNERS = BLOCK * BLOCK;

// Rows of the GEMM that are stored.
__device__ __forceinline__ int output_rows(const ConvParams& p) { return CORNERS * p.y_c; }

__device__ __forceinline__ int output_offset(const ConvParams& p, int pixel) {
  const int n = pixel / (p.p * p.q), rest = pixel - n * (p.p * p.q);
  if (pixel >= p.n * p.p * p.q) return -1;
#if D2S
  const int oh = rest / p.q, ow = rest - oh * p.q;
  return n * p.y_n + p.y_first + oh * p.y_row + ow * p.y_col;
#else
  return n * p.y_n + rest * p.y_pixel;
#endif
}

// Where the residual has the pixel that lies at `offset` in y.
__device__ __forceinline__ int residual_offset(const ConvParams& p, int offset) {
#if RES && D2S
  const int rest = offset % p.y_n - p.y_first, oh = rest / p.y_row, ow = rest % p.y_row / p.y_col;
  return offset < 0 ? -1 : offset / p.y_n * p.r_n + p.r_first + oh / p.r_up * p.r_row + ow / p.r_up * p.r_col;
#elif RES
  if (p.r_n == p.y_n && p.r_pixel == p.y_pixel) return offset;  // the divisions' time is seen
  return offset < 0 ? -1 : offset / p.y_n * p.r_n + offset % p.y_n / p.y_pixel * p.r_pixel;
#else
  return offset;
#endif
}

// What a row adds to its pixel's offset.
template <bool OF_RESIDUAL>
__device__ __forceinline__ int row_offset(const ConvParams& p, int row) {
  int c = row, corner = 0;
#if D2S > 1
  const int which = OUT_LINEAR ? row % CORNERS : row / p.y_c;
  c = OUT_LINEAR ? row / CORNERS : row - which * p.y_c;
  corner = which / BLOCK * p.y_corner + which % BLOCK * p.y_pixel;
#if RES
  if (OF_RESIDUAL) corner = which / BLOCK * p.r_corner + which % BLOCK * p.r_step;
#endif
#endif
#if RES
  if (OF_RESIDUAL) return corner + (c >> p.r_log2v) * p.r_block + (c & ((1 << p.r_log2v) - 1));
#endif
  return corner + (c >> p.y_log2v) * p.y_block + (c & ((1 << p.y_log2v) - 1));
}

// Whether a row is a channel, not padding.
__device__ __forceinline__ bool real_row(const ConvParams& p, int row) {
  if (OUT_LINEAR || D2S <= 1) return row < p.k;
  return row < output_rows(p) && row % p.y_c < p.k / CORNERS;
}

// Byte address in the staging tile of channels (m, m+1) of pixel n, or, linear, of pixels (n, n+1) of channel m. Linear rows
// are rotated by 12 of 32 banks each: 8 rows x 4 words (fragments) and b rows x 32/b pixels (stores) both miss each other.
__device__ __forceinline__ u32 staged(u32 staging, int m, int n) {
#if Y_BYTES
  return staging + (BM == 16 ? n * 16 : swizzled<(BM > 16 ? BM / 16 : 2)>(n, m / 16)) + m % 16;
#endif
  if (!OUT_LINEAR) return staging + swizzled<BM / 8>(n, m / 8) + (m % 8) * 2;
  constexpr int WORDS = BN / 2 < 32 ? BN / 2 : 32;  // that a row rotates through
  static_assert(!OUT_LINEAR || (BN / 2 % WORDS == 0 && WORDS >= 16), "linear output: a row is 16 words, or a multiple of 32");
  const int word = n / 2, turned = (word + (WORDS == 32 ? 12 * m : m / 2 * 4)) % WORDS;
  return staging + (m * (BN / 2) + word / WORDS * WORDS + turned) * 4 + n % 2 * 2;
}

// Linear: the staging tile's rows, from the residual or to y, 2 bytes at a time. Padded channels (chw2) are stored too: the
// staging tile holds zeros there.
template <bool TO_SHARED>
__device__ __forceinline__ void move_rows(const ConvParams& p, u32 staging, u32 rows, int m0, __half* tensor) {
  constexpr int ALL = (BM + 2 * (BLOCK - 1)) / BLOCK * BLOCK * BN, AT_ONCE = TO_SHARED ? 8 : 1;  // loads that do not wait
  const int early = m0 % BLOCK;  // the tile may begin within a group of BLOCK rows
  for (int first = THREAD; first < ALL; first += AT_ONCE * THREADS) {
    u16 loaded[AT_ONCE];
    u32 to[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int id = first + i * THREADS, m = id / (BLOCK * BN) * BLOCK + id % BLOCK - early, n = id / BLOCK % BN;
      const int offset = static_cast<int>(lds_32(rows + n * 4));
      const bool inside = m >= 0 && m < BM, ok = inside && offset >= 0 && m0 + m < output_rows(p);
      __half* at = tensor + offset + row_offset<TO_SHARED>(p, m0 + m);
      to[i] = inside ? staged(staging, m, n) : ~0u;
      if (TO_SHARED)
        loaded[i] = ok ? __half_as_ushort(*at) : u16(0);
      else if (ok)
        *at = __ushort_as_half(lds_16(to[i]));
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (TO_SHARED && to[i] != ~0u) sts_16(to[i], loaded[i]);
  }
}

// V >= 8: the residual of pixels FIRST to END into the staging tile, by copies of which none waits for another, as loads into
// registers would before they are stored. `rows`: where the pixels lie in the residual, or IN_Y in y.
template <int FIRST, int END, bool IN_Y>
__device__ __forceinline__ void copy_residual(const ConvParams& p, u32 staging, u32 rows, int m0) {
  constexpr int ROW_CHUNKS = BM / OUT_VECTOR, PIXELS = THREADS / ROW_CHUNKS;  // 16 bytes each; at a time
  static_assert(THREADS % ROW_CHUNKS == 0, "a thread keeps to its channels");
  const int m = THREAD % ROW_CHUNKS * OUT_VECTOR, first = FIRST + THREAD / ROW_CHUNKS;
  const bool real = m0 + m < output_rows(p);
  const RESULT* from = RESULTS(p.residual) + (real ? row_offset<true>(p, m0 + m) : 0);
#pragma unroll 4
  for (int i = 0; i < (END - FIRST + PIXELS - 1) / PIXELS; ++i) {
    const int n = first + i * PIXELS;
    if ((END - FIRST) % PIXELS && n >= END) break;
    const int pixel = static_cast<int>(lds_32(rows + n * 4)), offset = IN_Y ? residual_offset(p, pixel) : pixel;
    const bool ok = real && offset >= 0;
    cp_async_16(staged(staging, m, n), from + (ok ? offset : 0), ok ? 16 : 0);
  }
}

__device__ __forceinline__ void store_tile(const ConvParams& p, u32 staging, u32 rows, int m0) {
#pragma unroll 4
  for (int id = THREAD; id < BM * BN / OUT_VECTOR; id += THREADS) {
    const int n = id / (BM / OUT_VECTOR), m = id % (BM / OUT_VECTOR) * OUT_VECTOR, offset = static_cast<int>(lds_32(rows + n * 4));
    const bool ok = offset >= 0 && m0 + m < output_rows(p);
    RESULT* at = RESULTS(p.y) + offset + row_offset<false>(p, m0 + m);
    if (ok) stg_128(at, lds_128(staged(staging, m, n)));
  }
}

// A table at `rows`: where the tile's pixels lie in y. Nobody waits for it here.
template <class Offsets>
__device__ __forceinline__ void tabulate(u32 rows, Offsets offset_of) {
  for (int n = THREAD; n < BN; n += THREADS) sts_32(rows + n * 4, offset_of(n));
}

// The first half: results, rounded, into the staging tile. `offset_of(n)`: where channel 0 of the tile's pixel n lies in y,
// in elements; -1 for no pixel. COPIED: of how many pixels the residual is under way; where there are any, their table is at
// `rows`, otherwise room for it.
template <int KIND, int ORDER, int COPIED = 0, class Offsets>
__device__ __forceinline__ void stage_results(const ConvParams& p, float (&acc)[MT][NT][4], u32 staging, u32 rows, int m0,
                                              Offsets offset_of) {
  const int lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
  const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;

  float biases[2 * MT];
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int channel = m0 + warp_m + i * 8 + g;
    biases[i] = real_row(p, channel) ? p.bias[channel] : 0.f;
  }
  // The pipeline's last reads are over before its memory becomes the staging tile.
  cp_async_wait<0>();
  sync_threads();
  if (ORDER && !COPIED) {
    tabulate(rows, [&](int n) { return residual_offset(p, offset_of(n)); });
    sync_threads();
    if (OUT_LINEAR)
      move_rows<true>(p, staging, rows, m0, const_cast<__half*>(p.residual));
    else
      copy_residual<0, BN, false>(p, staging, rows, m0);
    sync_threads();
  } else if (ORDER && COPIED < BN) {
    copy_residual<COPIED, BN, true>(p, staging, rows, m0);
  }
  cp_async_commit();
  // While the residual is under way: where y's pixels lie.
  if (!COPIED) tabulate(rows, offset_of);
  if (ORDER && COPIED < BN) {
    cp_async_wait<0>();
    sync_threads();
  }

  Watch watch;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
#pragma unroll
    for (int half_tile = 0; half_tile < 2; ++half_tile) {  // rows g and g + 8 of the MMA tile
      const int m = warp_m + i * 16 + half_tile * 8, channel = m0 + m + g;
      const bool real = real_row(p, channel);
      const float bias = biases[2 * i + half_tile];
      const float slope = KIND == ACT_PRELU && real ? p.slope[channel] : 0.f;
      const Tail tail = tail_of(p, real ? channel : 0);
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const int n = warp_n + j * 8;
        // (channel g, pixels 2t, 2t+1) is how the accumulator lies; (pixel g, channels 2t, 2t+1) how V >= 8 is staged.
        const u32 at = OUT_LINEAR ? staged(staging, m + g, n + 2 * t) : staged(staging, m + 2 * t, n + g);
        float2 added = make_float2(0.f, 0.f);
        if (ORDER) {
          const u32 bits = OUT_LINEAR ? load_pair(at) : movmatrix_trans(load_pair(at));
          added = __half22float2(*reinterpret_cast<const __half2*>(&bits));
        }
#if RES_MULTIPLIED
        const float of_residual = real ? p.residual_multipliers[channel] : 0.f;
        added.x *= of_residual, added.y *= of_residual;
#endif
        const float v0 = finish<KIND, ORDER>(p, acc[i][j][2 * half_tile] + bias, added.x, slope, tail);
        const float v1 = finish<KIND, ORDER>(p, acc[i][j][2 * half_tile + 1] + bias, added.y, slope, tail);
        const __half2 h = __floats2half2_rn(real ? v0 : 0.f, real ? v1 : 0.f);  // padded channels stay zero
        watch.see(h);
        const u32 bits = *reinterpret_cast<const u32*>(&h);
        store_pair(at, OUT_LINEAR ? bits : movmatrix_trans(bits));
      }
    }
  }
  watch.report(p.nonfinite);
  sync_threads();
}

// FP32 results go straight from the accumulators: 4 lanes hold 8 neighbouring pixels of a channel, a sector of a plane.
template <class Offsets>
__device__ __forceinline__ void store_single(const ConvParams& p, float (&acc)[MT][NT][4], int m0, Offsets offset_of) {
  const int lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
  const int first_m = m0 + warp / WARPS_N * WM + g, first_n = warp % WARPS_N * WN + 2 * t;
  float* y = reinterpret_cast<float*>(p.y);
  Watch watch;
  if (SPLIT) sync_threads();  // the block may go on to another tile, whose loads overwrite what a slower warp still reads
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int offset = offset_of(first_n + j * 8 + e), added_at = residual_offset(p, offset);
      if (offset < 0) continue;
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i) {  // rows g and g + 8 of each MMA tile
        const int row = first_m + i * 8;
        if (row >= output_rows(p)) break;
#if RES_MULTIPLIED
        const float added = p.residual_multipliers[row] * __half2float(p.residual[added_at + row_offset<true>(p, row)]);
#else
        const float added = RES ? __half2float(p.residual[added_at + row_offset<true>(p, row)]) : 0.f;
#endif
        const float slope = ACT == ACT_PRELU ? p.slope[row] : 0.f;
        const float v = finish<ACT, RES>(p, acc[i / 2][j][i % 2 * 2 + e] + p.bias[row], added, slope, tail_of(p, row));
        y[offset + row_offset<false>(p, row)] = v;
        watch.see(v);
      }
    }
  }
  watch.report(p.nonfinite);
}

#if MULTIPLIED
// The sums times the values of their channels.
__device__ __forceinline__ void multiply_sums(const ConvParams& p, float (&acc)[MT][NT][4], int m0) {
  const int row = m0 + THREAD / 32 / WARPS_N * WM + THREAD % 32 / 4;
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {  // rows g and g + 8 of each MMA tile
    const float multiplier = real_row(p, row + i * 8) ? p.multipliers[row + i * 8] : 0.f;
#pragma unroll
    for (int j = 0; j < NT; ++j) acc[i / 2][j][i % 2 * 2] *= multiplier, acc[i / 2][j][i % 2 * 2 + 1] *= multiplier;
  }
}
#endif

// A tile's results into y. `rows`, COPIED: as above.
template <int COPIED = 0, class Offsets>
__device__ __forceinline__ void epilogue(const ConvParams& p, float (&acc)[MT][NT][4], u32 staging, u32 rows, int m0,
                                         Offsets offset_of) {
#if MULTIPLIED
  multiply_sums(p, acc, m0);
#endif
  if constexpr (OUT_F32) {
    store_single(p, acc, m0, offset_of);
  } else {
    stage_results<ACT, RES, COPIED>(p, acc, staging, rows, m0, offset_of);
    if (OUT_LINEAR)
      move_rows<false>(p, staging, rows, m0, p.y);
    else
      store_tile(p, staging, rows, m0);
  }
}
