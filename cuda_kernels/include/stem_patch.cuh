// A stem's parameters; where a tile lies in x and in Y, and its patch on the way into shared memory (conv_stem.cu).
#pragma once

// Compile-time, beside conv.cuh's: IN_TYPE 0 FP16, 1 FP32, 2 unsigned 8-bit; IN_HWC 1: channels of a pixel are neighbours; POOL 1:
// a max pool follows, and y is its output; POOL_R x POOL_S, POOL_STRIDE_H, POOL_STRIDE_W are its windows, else one result each.
//   CHANNELS; STRIDE_H, STRIDE_W; a tile is (BN >> LOG2_TW) x (1 << LOG2_TW) pixels, its patch ROWS x PAIRS x 2 columns
//   STEPS of 16 along K, of which the first FULL need no masks; PAIRED 1: a slot of K is a word of the patch (conv_stem.cu)
//   VEC   1: two neighbours in x are one aligned access and both inside the image or outside
//   ROW_STEPS   steps along K of a row of the window that wgmma reads in the patch, 0: mma.sync; CARRIED   rows of the tile above
//   WHOLE 1: y_c and k are multiples of BM; MIN_BLOCKS   that the registers of an SM are for
// conv.cuh's own loaders are not used here; these are values they accept.
#define BK 32
#define STAGES 2
#define IN_LINEAR 0
#define SPLIT 0
#include "conv.cuh"
#include "wgmma.cuh"
#define ASYNC (ROW_STEPS > 0)

static_assert(IN_TYPE >= 0 && IN_TYPE <= 2, "input elements are FP16, FP32 or unsigned 8-bit");
static_assert(!ASYNC || (POOL && MT == 1 && WARPS_M == 4 && STRIDE_W == 2), "a warpgroup has 64 channels of 8 columns of pixels");

struct StemParams {
  ConvParams c;     // x_block, x_pixel: strides of a channel and of a pixel (V = 1)
  const u32* taps;  // [STEPS][4 lanes t][2 or, not PAIRED, 4]: byte offset in the patch of each slot; masks of steps from FULL on
  int per_block, longer, tiles_h, tiles_w;  // tiles of a block; how many blocks have one more; of an image
  int cols, shift;                         // columns in use; columns in front of the first window
  int pool_pad_t, pool_pad_l, pool_h, pool_w;
};

constexpr int PITCH = ASYNC ? 4 : CHANNELS;  // halfs of a pixel in the patch
constexpr int TW = 1 << LOG2_TW, ROW_BYTES = PAIRS * PITCH * 4, PIXEL_BYTES = PITCH * 2;
constexpr int A_TILE = STEPS * 512, SLOTS = PAIRED ? 2 : 4, TAP_BYTES = STEPS * SLOTS * 16 + (PAIRED ? (STEPS - FULL) * 32 : 0);
// ASYNC: ahead of the patch lies a second copy with zeros for its even columns: a window's first pair begins with a column that is
// not of that window.
constexpr int PLANE_BYTES = (ROWS * ROW_BYTES + 15) / 16 * 16, PATCH_BYTES = (ASYNC + 1) * PLANE_BYTES;
constexpr int TILE_H = ((BN >> LOG2_TW) + CARRIED - POOL_R) / POOL_STRIDE_H + 1;  // outputs
constexpr int TILE_W = (TW - POOL_S) / POOL_STRIDE_W + 1, CHUNK = 2 * MT;  // CHUNK: a lane's neighbouring channels
constexpr int ITEMS = (ROWS * PAIRS + THREADS - 1) / THREADS;                   // pairs of columns per thread
constexpr int MOST = (MT * NT >= 16 ? 18 : 24) / (CHANNELS * (IN_TYPE == 1 ? 2 : 1));
constexpr int LIMIT = MT * NT >= 16 && MOST > 3 ? 3 : MOST, AHEAD = ITEMS < LIMIT ? ITEMS : LIMIT;  // on their way during stores
constexpr int AT_ONCE = STEPS <= 12 ? STEPS : 2;    // steps of an unrolled loop

// This thread's number. The compiler cannot know it is threadIdx.x, so it keeps no values that follow from it in registers.
__device__ __forceinline__ int thread() {
  int me = threadIdx.x;
  asm volatile("" : "+r"(me));
  return me;
}

// A tile: which of its image's, the first of its pixels, in Y, and the first of its patch's, in x. Both may lie outside.
struct Place {
  int image, i, j;  // i, j: of the tile
  __device__ __forceinline__ void next(const StemParams& p) {
    const bool column_ends = ++i == p.tiles_h, image_ends = column_ends && j + 1 == p.tiles_w;
    i = column_ends ? 0 : i, j = image_ends ? 0 : j + column_ends, image += image_ends;
  }
  __device__ __forceinline__ int row(const StemParams& p) const { return i * TILE_H * POOL_STRIDE_H - p.pool_pad_t + CARRIED; }
  __device__ __forceinline__ int column(const StemParams& p) const { return j * TILE_W * POOL_STRIDE_W - p.pool_pad_l; }
};

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
      u32 word[PITCH];
      auto half_of = [&](int n) {  // the pair's nth: column, then channel
        const int column = n / PITCH, c = n % PITCH, lies = column * CHANNELS + c;
        const Two two = v[i][c < CHANNELS ? VEC && IN_HWC ? lies / 2 : c : 0];
        return c >= CHANNELS ? One(0) : (VEC && IN_HWC ? lies % 2 : column) ? two.y : two.x;
      };
#pragma unroll
      for (int j = 0; j < PITCH; ++j) {
        const u32 keep = ((2 * j < PITCH ? ok0 : ok1) ? 0xffffu : 0u) | ((2 * j + 1 < PITCH ? ok0 : ok1) ? 0xffff0000u : 0u);
        word[j] = halfs(half_of(2 * j), half_of(2 * j + 1));
        word[j] = VEC ? (ok0 ? word[j] : 0u) : word[j] & keep;
      }
      if (id >= ROWS * PAIRS) continue;
      const u32 to = patch + (ASYNC ? PLANE_BYTES : 0) + id * PITCH * 4;
      if (PITCH == 4) {
        sts_128(to, make_uint4(word[0], word[1 % PITCH], word[2 % PITCH], word[3 % PITCH]));
        if (ASYNC) sts_128(to - PLANE_BYTES, make_uint4(0, 0, word[2 % PITCH], word[3 % PITCH]));
      } else {
        const int turn = PITCH == 2 ? threadIdx.x >> 4 & 1 : 0;  // half a warp begins with the other word: all banks, once
#pragma unroll
        for (int j = 0; j < PITCH; ++j) sts_32(to + (j ^ turn) * 4, turn ? word[j ^ (PITCH == 2)] : word[j]);
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
