// conv_stem: convolution of an image with few channels, straight from the network's input, on mma.sync.m16n8k16.
//
//       x as it lies             patch: FP16, channels interleaved       N: BN = TH x TW pixels of one image
//   +---------------+            +------------------------+          +-----------+
//   |   +-------+   |  convert   | rows x pairs of columns|  gather  |  X  KxBN  |  never stored: lane 4g+t picks words
//   |   | patch |   | ---------> | (c0 c1 c2, c0 c1 c2) ..| ------>  |           |  patch[pixel g + slot[k]] into B fragments
//   |   +-------+   |            +------------------------+   +------+-----------+
//   +---------------+            halo included, outside: zeros|W BMxK|  Y BMxBN |  W: all of K in shared memory, packed in
//                                                             +------+-----------+  fragment order (as in conv_dense)
//
// The trick: K is a list of taps in any order, so nothing is padded but its end. Where a pixel's first half is at an even
// place (PAIRED), a slot of K is a word of the patch: two taps, or one and a half that a mask clears; otherwise a slot is one
// half. The host sorts the slots so that the 4 which one load instruction reads for its 8 pixels never share a bank. Empty
// places of K repeat a tap of the same window (weight 0) or are cleared: a value that is not finite and not in the window can
// not reach the sum.
// Vectors as output: W's rows are permuted so that a lane's results are neighbouring channels of its pixels, and are stored
// from registers. With POOL 1 not Y is stored but the maxima over its windows: neighbouring tiles overlap by what a window
// reaches over its stride, so a little is computed twice and Y never touches memory.
// Blocks go from tile to tile: weights are copied once, and the next patch is on its way while results are stored.

// Compile-time, beside conv.cuh's: IN_TYPE 0 FP16, 1 FP32, 2 unsigned 8-bit; IN_HWC 1: channels of a pixel are neighbours; POOL 1:
// a max pool follows, and y is its output.
//   CHANNELS; STRIDE_H, STRIDE_W; a tile is (BN >> LOG2_TW) x (1 << LOG2_TW) pixels, its patch ROWS x PAIRS x 2 columns
//   STEPS of 16 along K, of which the first FULL need no masks; PAIRED as above
//   VEC   1: two neighbours in x are one aligned access and both inside the image or outside
//   WHOLE 1: y_c and k are multiples of BM; MIN_BLOCKS   that the registers of an SM are for
// conv.cuh's own loaders are not used here; these are values they accept.
#define BK 32
#define STAGES 2
#define IN_LINEAR 0
#define SPLIT 0
#include "conv.cuh"

static_assert(IN_TYPE >= 0 && IN_TYPE <= 2, "input elements are FP16, FP32 or unsigned 8-bit");

struct StemParams {
  ConvParams c;     // x_block, x_pixel: strides of a channel and of a pixel (V = 1)
  const u32* taps;  // [STEPS][4 lanes t][2 or, not PAIRED, 4]: byte offset in the patch of each slot; masks of steps from FULL on
  int per_block, longer, tiles_h, tiles_w;  // tiles of a block; how many blocks have one more; of an image
  int cols, shift;                         // columns in use; columns in front of the first window
#if POOL
  int pool_r, pool_s, pool_stride_h, pool_stride_w, pool_pad_t, pool_pad_l, pool_h, pool_w;
  int tile_h, tile_w;                        // outputs of the pool per tile
#endif
};

constexpr int TW = 1 << LOG2_TW, ROW_BYTES = PAIRS * CHANNELS * 4, PIXEL_BYTES = CHANNELS * 2;
constexpr int A_TILE = STEPS * 512, SLOTS = PAIRED ? 2 : 4, TAP_BYTES = STEPS * SLOTS * 16 + (PAIRED ? (STEPS - FULL) * 32 : 0);
constexpr int PATCH_BYTES = (ROWS * ROW_BYTES + 15) / 16 * 16, CHUNK = 2 * MT;  // CHUNK: a lane's neighbouring channels
constexpr int ITEMS = (ROWS * PAIRS + THREADS - 1) / THREADS;                   // pairs of columns per thread
constexpr int MOST = (MT * NT >= 16 ? 18 : 24) / (CHANNELS * (IN_TYPE == 1 ? 2 : 1));
constexpr int LIMIT = MT * NT >= 16 && MOST > 3 ? 3 : MOST, AHEAD = ITEMS < LIMIT ? ITEMS : LIMIT;  // on their way during stores
constexpr int AT_ONCE = STEPS <= 12 ? STEPS : 2;    // steps of an unrolled loop

// This thread's number, not what was computed from it for the last tile: that would take registers all along.
__device__ __forceinline__ int thread() {
  int me = threadIdx.x;
  asm volatile("" : "+r"(me));
  return me;
}

// A tile: which of its image's, the first of its pixels, in Y, and the first of its patch's, in x. Both may lie outside.
struct Place {
  int image, i, j;  // i, j: of the tile
  __device__ __forceinline__ void next(const StemParams& p) {
    const bool row_ends = ++j == p.tiles_w, image_ends = row_ends && i + 1 == p.tiles_h;
    j = row_ends ? 0 : j, i = image_ends ? 0 : i + row_ends, image += image_ends;
  }
#if POOL
  __device__ __forceinline__ int row(const StemParams& p) const { return i * p.tile_h * p.pool_stride_h - p.pool_pad_t; }
  __device__ __forceinline__ int column(const StemParams& p) const { return j * p.tile_w * p.pool_stride_w - p.pool_pad_l; }
#else
  __device__ __forceinline__ int row(const StemParams& p) const { return i * (BN >> LOG2_TW); }
  __device__ __forceinline__ int column(const StemParams& p) const { return j << LOG2_TW; }
#endif
};

#if POOL
static_assert(!OUT_LINEAR && BM % 64 == 0 && MT > 1 && !RES, "8 threads read one pixel's 64 channels: all banks, once");

// 8 channels of one output per thread and turn.
__device__ __forceinline__ void store_maxima(const StemParams& p, u32 staging, int m0, const Place& at) {
  const int i0 = at.i * p.tile_h, j0 = at.j * p.tile_w, row0 = at.row(p), column0 = at.column(p);
  for (int id = threadIdx.x; id < p.tile_h * p.tile_w * (BM / 8); id += THREADS) {
    const int m = id % (BM / 8) * 8, n = id / (BM / 8), i = n / p.tile_w, j = n - i * p.tile_w;
    if (i0 + i >= p.pool_h || j0 + j >= p.pool_w || m0 + m >= p.c.y_c) continue;
    const __half2 lowest = __half2half2(__ushort_as_half(0xfc00));  // minus infinity
    __half2 best[4] = {lowest, lowest, lowest, lowest};
    for (int r = 0; r < p.pool_r; ++r)
      for (int s = 0; s < p.pool_s; ++s) {
        const int row = i * p.pool_stride_h + r, column = j * p.pool_stride_w + s;
        const bool ok = static_cast<u32>(row0 + row) < static_cast<u32>(p.c.p);
        if (!ok || static_cast<u32>(column0 + column) >= static_cast<u32>(p.c.q)) continue;
        const uint4 v = lds_128(staged(staging, m, (row << LOG2_TW) + column));
        const __half2* h = reinterpret_cast<const __half2*>(&v);
#pragma unroll
        for (int e = 0; e < 4; ++e) best[e] = __hmax2(best[e], h[e]);
      }
    const int c = m0 + m, pixel = (i0 + i) * p.pool_w + j0 + j;
    stg_128(p.c.y + at.image * p.c.y_n + pixel * p.c.y_pixel + row_offset<false>(p.c, c), *reinterpret_cast<const uint4*>(best));
  }
}
#endif

// Two elements of x as they lie.
#if IN_TYPE == 1
typedef float One;
typedef float2 Two;
__device__ __forceinline__ u32 halfs(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const u32*>(&h);
}
#elif IN_TYPE == 0
typedef u16 One;
typedef ushort2 Two;
__device__ __forceinline__ u32 halfs(u16 a, u16 b) { return a | static_cast<u32>(b) << 16; }
#else
typedef unsigned char One;
typedef uchar2 Two;
__device__ __forceinline__ u32 halfs(unsigned char a, unsigned char b) {
  const __half2 h = __floats2half2_rn(static_cast<float>(a), static_cast<float>(b));
  return *reinterpret_cast<const u32*>(&h);
}
#endif

// COUNT pairs of columns per thread, from the thread's FIRST one on, through registers: `load` waits for nothing. Threads run
// along the patch, ends of rows included, so that neighbours in a warp are neighbours in x and in shared memory.
template <int COUNT>
struct Pieces {
  Two v[COUNT][CHANNELS];  // of a channel; VEC and IN_HWC: in x's order
  u32 inside;              // 2 bits per pair

  __device__ __forceinline__ void load(const StemParams& p, const Place& at, int first) {
    const One* x = reinterpret_cast<const One*>(p.c.x) + at.image * p.c.x_n;
    const int h0 = at.row(p) * STRIDE_H - p.c.pad_t, w0 = at.column(p) * STRIDE_W - p.c.pad_l - p.shift;
    const int me = thread();
    inside = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int id = (first + i) * THREADS + me, row = id / PAIRS, col = (id - row * PAIRS) * 2;
      const int h = h0 + row, w = w0 + col, pixel = h * p.c.w_in + w;
      const bool here = row < ROWS && static_cast<u32>(h) < static_cast<u32>(p.c.h);
      const bool ok0 = here && col < p.cols && static_cast<u32>(w) < static_cast<u32>(p.c.w_in);
      const bool ok1 = VEC ? ok0 : here && col + 1 < p.cols && static_cast<u32>(w + 1) < static_cast<u32>(p.c.w_in);
      inside |= (ok0 ? 1u : 0u) << 2 * i;
      if (!VEC) inside |= (ok1 ? 2u : 0u) << 2 * i;
      const One* from = x + (ok0 ? pixel * p.c.x_pixel : 0);
      const One* next = x + (ok1 ? (pixel + 1) * p.c.x_pixel : 0);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
        if (VEC)
          v[i][c] = IN_HWC ? reinterpret_cast<const Two*>(from)[c] : *reinterpret_cast<const Two*>(from + c * p.c.x_block);
        else
          v[i][c].x = from[c * p.c.x_block], v[i][c].y = next[c * p.c.x_block];
      }
    }
  }

  __device__ __forceinline__ void store(u32 patch, int first) const {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int id = (first + i) * THREADS + threadIdx.x;
      const bool ok0 = inside >> 2 * i & 1, ok1 = VEC ? ok0 : inside >> 2 * i & 2;
      u32 word[CHANNELS];
#pragma unroll
      for (int j = 0; j < CHANNELS; ++j) {
        // Halfs of the pair: column, then channel.
        const int low = 2 * j, high = 2 * j + 1;
        const Two a = v[i][VEC && IN_HWC ? j : low % CHANNELS], b = v[i][VEC && IN_HWC ? j : high % CHANNELS];
        const bool low_first = VEC && IN_HWC || low < CHANNELS, high_first = !(VEC && IN_HWC) && high < CHANNELS;
        word[j] = halfs(low_first ? a.x : a.y, high_first ? b.x : b.y);
        const u32 keep = ((low < CHANNELS ? ok0 : ok1) ? 0xffffu : 0u) | ((high < CHANNELS ? ok0 : ok1) ? 0xffff0000u : 0u);
        word[j] = VEC ? (ok0 ? word[j] : 0u) : word[j] & keep;
      }
      if (id >= ROWS * PAIRS) continue;
      const u32 to = patch + id * CHANNELS * 4;
      if (CHANNELS == 4) {
        sts_128(to, make_uint4(word[0], word[1 % CHANNELS], word[2 % CHANNELS], word[3 % CHANNELS]));
      } else {
        const int turn = CHANNELS == 2 ? threadIdx.x >> 4 & 1 : 0;  // half a warp begins with the other word: all banks, once
#pragma unroll
        for (int j = 0; j < CHANNELS; ++j) sts_32(to + (j ^ turn) * 4, turn ? word[j ^ (CHANNELS == 2)] : word[j]);
      }
    }
  }
};

// All of a patch that is not on its way yet: from the thread's pair FIRST on.
template <int FIRST>
__device__ __forceinline__ void load_patch(const StemParams& p, u32 patch, const Place& at) {
  constexpr int LEFT = ITEMS - FIRST, COUNT = LEFT < 4 ? LEFT : 4;
#pragma unroll 1
  for (int first = FIRST; first < ITEMS; first += COUNT) {
    Pieces<COUNT> pieces;
    pieces.load(p, at, first);
    pieces.store(patch, first);
  }
}

// Bytes between the patch's windows of the tile's pixels 0 and n; the sum of what n's bits add.
__device__ __forceinline__ constexpr u32 window(int n) {
  return (n >> LOG2_TW) * STRIDE_H * ROW_BYTES + (n & (TW - 1)) * STRIDE_W * PIXEL_BYTES;
}

// Which pixel of an 8-wide MMA tile is its column: a lane's two results are pixels of its own, and 4 lanes' of the first are
// neighbours. The linear epilogue wants them in order, and so do the maxima: their banks.
__device__ __forceinline__ constexpr int pixel_of(int column) {
  return OUT_LINEAR || POOL ? column : (column & 1) * 4 + (column >> 1);
}

// Vectors as output: the first of a thread's CHUNK neighbouring channels in the block.
__device__ __forceinline__ int channel_of(int thread) { return thread / 32 / WARPS_N * WM + thread % 32 / 4 * CHUNK; }

// One step of K. `taps`, `weights`, `pixel`: this lane's slots, its fragment of the warp's first 16 rows, its window.
template <bool MASKED>
__device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], u32 taps, u32 weights, u32 pixel, int k) {
  uint4 a[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) a[i] = lds_128(weights + i * A_TILE + k * 512);
  if (PAIRED) {
    const uint2 slot = lds_64(taps + k * 32);
    uint2 mask = make_uint2(~0u, ~0u);
    if (MASKED) mask = lds_64(taps + (STEPS + k - FULL) * 32);
    const u32 at0 = pixel + slot.x, at1 = pixel + slot.y;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const u32 b0 = lds_32(at0 + window(j * 8)) & mask.x, b1 = lds_32(at1 + window(j * 8)) & mask.y;
#pragma unroll
      for (int i = 0; i < MT; ++i) mma_16816(acc[i][j], a[i], b0, b1);
    }
  } else {
    const uint4 slot = lds_128(taps + k * 64);
    const u32 at0 = pixel + slot.x, at1 = pixel + slot.y, at2 = pixel + slot.z, at3 = pixel + slot.w;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const u32 b0 = lds_16(at0 + window(j * 8)) | static_cast<u32>(lds_16(at1 + window(j * 8))) << 16;
      const u32 b1 = lds_16(at2 + window(j * 8)) | static_cast<u32>(lds_16(at3 + window(j * 8))) << 16;
#pragma unroll
      for (int i = 0; i < MT; ++i) mma_16816(acc[i][j], a[i], b0, b1);
    }
  }
}

#if !OUT_LINEAR
struct Chunk {
  __half2 h[MT];
};
__device__ __forceinline__ Chunk load_chunk(const __half* from) {
  Chunk v;
  u32* words = reinterpret_cast<u32*>(&v);
  if constexpr (MT == 4) {
    *reinterpret_cast<uint4*>(words) = ldg_128(from);
  } else if constexpr (MT == 2) {
    *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
  } else {
    words[0] = *reinterpret_cast<const u32*>(from);
  }
  return v;
}
__device__ __forceinline__ void store_chunk(__half* to, const Chunk& v) {
  const u32* words = reinterpret_cast<const u32*>(&v);
  if constexpr (MT == 4)
    stg_128(to, make_uint4(words[0], words[1], words[2], words[3]));
  else if constexpr (MT == 2)
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  else
    *reinterpret_cast<u32*>(to) = words[0];
}
// `turn`: whether a chunk of two words begins with the other one, as every other pixel's does: all banks, once.
__device__ __forceinline__ void stage_chunk(u32 to, const Chunk& v, int turn) {
  const u32* words = reinterpret_cast<const u32*>(&v);
  if constexpr (MT == 4)
    sts_128(to, make_uint4(words[0], words[1], words[2], words[3]));
  else
#pragma unroll
    for (int i = 0; i < MT; ++i) sts_32(to + (i ^ turn) * 4, turn ? words[MT - 1 - i] : words[i]);
}

// A pixel's results in this lane, channels `c` on, rounded. `added`: the residual's; `e`: which of the lane's pixels of tile j.
__device__ __forceinline__ Chunk finished(const StemParams& p, const float (&acc)[MT][NT][4], int j, int e, int c,
                                          const Chunk& added, Watch& watch) {
  constexpr bool PLAIN = (ACT == ACT_NONE || ACT == ACT_RELU) && !RES && !AFFINE && !LAST;
  Chunk y;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    float v[2] = {acc[i][j][e], acc[i][j][2 + e]};
    if (!PLAIN) {
      const float2 r = RES ? __half22float2(added.h[i]) : make_float2(0.f, 0.f);
#pragma unroll
      for (int half_tile = 0; half_tile < 2; ++half_tile) {
        const int channel = WHOLE ? c + 2 * i + half_tile : min(c + 2 * i + half_tile, p.c.k - 1);
        const float slope = ACT == ACT_PRELU ? p.c.slope[channel] : 0.f;
        v[half_tile] = finish<ACT, RES>(p.c, v[half_tile], half_tile ? r.y : r.x, slope, tail_of(p.c, channel));
      }
    }
    if (!WHOLE) v[0] = c + 2 * i < p.c.k ? v[0] : 0.f, v[1] = c + 2 * i + 1 < p.c.k ? v[1] : 0.f;  // padded channels stay zero
    y.h[i] = __floats2half2_rn(v[0], v[1]);
    if (PLAIN && ACT == ACT_RELU) y.h[i] = __hmax2_nan(y.h[i], __half2half2(__ushort_as_half(0)));  // rounding keeps the order
    watch.see(y.h[i]);
  }
  return y;
}

// Vectors as output: a lane has CHUNK neighbouring channels, from m0 + m on, of two pixels per 8-wide tile, FIRST to END.
template <int FIRST, int END>
__device__ __forceinline__ void store_chunks(const StemParams& p, const float (&acc)[MT][NT][4], u32 staging, int m0,
                                             const Place& at, Watch& watch) {
  const int me = thread(), t = me % 4, m = channel_of(me), c = m0 + m, warp_n = me / 32 % WARPS_N * WN;
  const int row0 = at.row(p), column0 = at.column(p);
  if (!POOL && !WHOLE && c >= p.c.y_c) return;
  __half* y = p.c.y + at.image * p.c.y_n + row_offset<false>(p.c, c);
#if RES
  const __half* residual = p.c.residual + at.image * p.c.r_n + row_offset<true>(p.c, c);
#endif
#pragma unroll
  for (int j = FIRST; j < END; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int n = warp_n + j * 8 + pixel_of(2 * t + e), row = n >> LOG2_TW, column = n & (TW - 1);
      const bool ok = row0 + row < p.c.p && column0 + column < p.c.q;
      const int pixel = (row0 + row) * p.c.q + column0 + column;
      Chunk added = {};
#if RES
      if (ok) added = load_chunk(residual + pixel * p.c.r_pixel);
#endif
      const Chunk chunk = finished(p, acc, j, e, c, added, watch);
      if (POOL)
        stage_chunk(staged(staging, m, n), chunk, t & 1);
      else if (ok)
        store_chunk(y + pixel * p.c.y_pixel, chunk);
    }
  }
}
#endif

// Weights, taps and bias of the block's channels into shared memory. Weights and taps fly on.
__device__ __forceinline__ void load_weights(const StemParams& p, u32 taps, u32 biases, u32 weights, int m0) {
  constexpr int PIECES = BM / 16 * STEPS * 32;
#pragma unroll 8
  for (int first = 0; first < PIECES; first += THREADS) {
    const int piece = first + threadIdx.x;
    if (piece < PIECES) cp_async_16(weights + piece * 16, p.c.w + m0 / 16 * (STEPS * 32) + piece, 16);
  }
#pragma unroll 1
  for (int piece = threadIdx.x; piece < TAP_BYTES / 16; piece += THREADS) cp_async_16(taps + piece * 16, p.taps + piece * 4, 16);
  cp_async_commit();
#pragma unroll 1
  for (int m = threadIdx.x; m < BM; m += THREADS)
    sts_32(biases + m * 4, OUT_LINEAR || m0 + m >= p.c.k ? 0u : __float_as_uint(p.c.bias[m0 + m]));
}

// A tile's products; vectors as output: with the bias, which the linear epilogue adds itself.
__device__ __forceinline__ void multiply_all(float (&acc)[MT][NT][4], u32 taps, u32 biases, u32 weights, u32 patch) {
  const int me = thread(), lane = me % 32, warp = me / 32;
  const u32 slots = taps + lane % 4 * (SLOTS * 4), fragments = weights + warp / WARPS_N * MT * A_TILE + lane * 16;
  const u32 pixel = patch + window(warp % WARPS_N * WN + pixel_of(lane / 4));
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const uint2 bias = lds_64(biases + (channel_of(me) + 2 * i) * 4);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      acc[i][j][0] = acc[i][j][1] = __uint_as_float(bias.x);
      acc[i][j][2] = acc[i][j][3] = __uint_as_float(bias.y);
    }
  }
#pragma unroll AT_ONCE
  for (int k = 0; k < FULL; ++k) multiply<false>(acc, slots, fragments, pixel, k);
#pragma unroll AT_ONCE
  for (int k = FULL; k < STEPS; ++k) multiply<true>(acc, slots, fragments, pixel, k);
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) conv_stem(const __grid_constant__ StemParams p) {
  release_next_launch();
  extern __shared__ __align__(128) char shared[];
  const u32 taps = smem_u32(shared), biases = taps + TAP_BYTES, weights = biases + BM * 4;
  const u32 patches = weights + BM / 16 * A_TILE, staging = patches + 2 * PATCH_BYTES;

  // Which tiles: a run of neighbours, channels fastest, so that blocks sharing patches are neighbours.
  const int m_tiles = (p.c.y_c + BM - 1) / BM, m0 = blockIdx.x % m_tiles * BM, run = blockIdx.x / m_tiles;
  const int first = run * p.per_block + min(run, p.longer);
  load_weights(p, taps, biases, weights, m0);
  wait_for_previous_launch();
  const int row = first / p.tiles_w, image = row / p.tiles_h;
  Place at = {image, row - image * p.tiles_h, first - row * p.tiles_w};
  load_patch<0>(p, patches, at);
  cp_async_wait<0>();
  __syncthreads();

  u32 patch = patches;
  for (int left = p.per_block + (run < p.longer);; --left) {
    float acc[MT][NT][4];
    multiply_all(acc, taps, biases, weights, patch);

    const Place here = at;
    const bool more = left > 1;
    if (more) at.next(p);
    Pieces<AHEAD> pieces;
#if OUT_LINEAR
    epilogue(p.c, acc, staging, staging + STAGING_BYTES, m0, [&](int n) {
      const int oh = here.row(p) + (n >> LOG2_TW), ow = here.column(p) + (n & (TW - 1));
      return oh < p.c.p && ow < p.c.q ? here.image * p.c.y_n + (oh * p.c.q + ow) * p.c.y_pixel : -1;
    });
    if (more) pieces.load(p, at, 0);
#else
    // The next patch is on its way as soon as registers are free.
    constexpr int EARLY = RES || AFFINE || ACT == ACT_PRELU ? NT : NT / 2;
    Watch watch;
    store_chunks<0, EARLY>(p, acc, staging, m0, here, watch);
    if (more) pieces.load(p, at, 0);
    store_chunks<EARLY, NT>(p, acc, staging, m0, here, watch);
    watch.report(p.c.nonfinite);
#endif
#if POOL
    __syncthreads();
    store_maxima(p, staging, m0, here);
#endif
    if (!more) break;
    patch = 2 * patches + PATCH_BYTES - patch;
    pieces.store(patch, 0);
    if constexpr (AHEAD < ITEMS) load_patch<AHEAD>(p, patch, at);
    __syncthreads();
  }
}
