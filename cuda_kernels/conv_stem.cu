// conv_stem: convolution of an image with few channels, straight from the network's input, on mma.sync.m16n8k16.
//
//       x as it lies             patch: FP16 planes in shared memory     N: BN = TH x TW pixels of one image
//   +---------------+            +--------+--------+--------+          +-----------+
//   |   +-------+   |  convert   | rows x | channel|   ..   |  gather  |  X  KxBN  |  never stored: lane 4g+t picks halfs
//   |   | patch |   | ---------> | pitch  |   1    |        | ------>  |           |  patch[pixel g + tap[k]] into B fragments
//   |   +-------+   |            +--------+--------+--------+   +------+-----------+
//   +---------------+            halo included, outside: zeros  |W BMxK|  Y BMxBN |  W: all of K in shared memory, packed in
//                                                               +------+-----------+  fragment order (as in conv_dense)
//
// The trick: K is a list of (channel, row, column) taps in any order, so nothing is padded but its end, and the host sorts
// it so that the 4 taps which one load instruction reads for its 8 pixels never share a bank. Empty places of K repeat a tap
// of the same window (weight 0): a value that is not finite and not in the window can not reach the sum.
// With POOL 1 the tile of Y is not stored but the maxima over its windows are: neighbouring tiles overlap by what a window
// reaches over its stride, so a little is computed twice and Y never touches memory.
// No pipeline: a block loads everything, then multiplies; the blocks resident beside it overlap.

// Compile-time, beside conv.cuh's: IN_TYPE 0 FP16, 1 FP32, 2 unsigned 8-bit; IN_HWC 1: channels of a pixel are neighbours; POOL 1:
// a max pool follows, and y is its output.
// conv.cuh's own loaders are not used here; these are values they accept.
#define BK 32
#define STAGES 2
#define IN_LINEAR 0
#define SPLIT 0
#include "conv.cuh"

static_assert(IN_TYPE >= 0 && IN_TYPE <= 2, "input elements are FP16, FP32 or unsigned 8-bit");

struct StemParams {
  ConvParams c;     // k_tiles: steps of 16 along K; x_block, x_pixel: strides of a channel and of a pixel (V = 1)
  const u32* taps;  // [k_tiles][4 lanes t][4]: byte offset in the patch of k = 2t, 2t+1, 2t+8, 2t+9
  int log2_tw, tiles_h, tiles_w;           // a tile is (BN >> log2_tw) x (1 << log2_tw) pixels
  int rows, cols, pitch, plane;            // patch: rows x cols are needed; pitch and plane are strides in halfs
  u32 by_pitch, by_plane_or_c;             // 2**32 / divisor, rounded up: exact for dividends below 2**16
#if POOL
  int pool_r, pool_s, pool_stride_h, pool_stride_w, pool_pad_t, pool_pad_l, pool_h, pool_w;
  int tile_h, tile_w;                      // outputs of the pool per tile
#endif
};

#if POOL
static_assert(!OUT_LINEAR && BM % 64 == 0 && !RES, "8 neighbouring threads read one pixel's 64 channels: all banks, once");

// (row0, column0): the tile's first pixel of Y, which may lie outside; (i0, j0): its first output of the pool. 8 channels of
// one output per thread and turn.
__device__ __forceinline__ void store_maxima(const StemParams& p, u32 staging, int m0, int image, int i0, int j0, int row0,
                                             int column0) {
  for (int id = threadIdx.x; id < p.tile_h * p.tile_w * (BM / 8); id += THREADS) {
    const int m = id % (BM / 8) * 8, n = id / (BM / 8), i = n / p.tile_w, j = n - i * p.tile_w;
    if (i0 + i >= p.pool_h || j0 + j >= p.pool_w || m0 + m >= p.c.y_c) continue;
    const __half2 lowest = __half2half2(__ushort_as_half(0xfc00));  // minus infinity
    __half2 best[4] = {lowest, lowest, lowest, lowest};
    for (int r = 0; r < p.pool_r; ++r)
      for (int s = 0; s < p.pool_s; ++s) {
        const int row = i * p.pool_stride_h + r, column = j * p.pool_stride_w + s;
        if (static_cast<u32>(row0 + row) >= static_cast<u32>(p.c.p) || static_cast<u32>(column0 + column) >= static_cast<u32>(p.c.q))
          continue;
        const uint4 v = lds_128(staged(staging, m, (row << p.log2_tw) + column));
        const __half2* h = reinterpret_cast<const __half2*>(&v);
#pragma unroll
        for (int e = 0; e < 4; ++e) best[e] = __hmax2(best[e], h[e]);
      }
    const int c = m0 + m, pixel = (i0 + i) * p.pool_w + j0 + j;
    stg_128(p.c.y + image * p.c.y_n + pixel * p.c.y_pixel + row_offset<false>(p.c, c), *reinterpret_cast<const uint4*>(best));
  }
}
#endif

__device__ __forceinline__ u16 load_half(const void* x, int at) {
  if (IN_TYPE == 0) return __half_as_ushort(static_cast<const __half*>(x)[at]);
  const float v = IN_TYPE == 1 ? static_cast<const float*>(x)[at] : static_cast<float>(static_cast<const unsigned char*>(x)[at]);
  return __half_as_ushort(__float2half_rn(v));
}

// Threads run along x's memory: along columns of a plane, or, hwc, along channels and then columns. Whole pitches are
// written, so that neighbours in a warp are neighbours in shared memory too, rows' ends included.
__device__ __forceinline__ void load_patch(const StemParams& p, u32 patch, int image, int h0, int w0) {
  constexpr int AT_ONCE = 8;  // loads in flight per thread
  const int total = p.c.c * (IN_HWC ? p.rows * p.pitch : p.plane);
  for (int first = threadIdx.x; first < total; first += THREADS * AT_ONCE) {
    u16 v[AT_ONCE];
    int to[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int id = first + i * THREADS, outer = static_cast<int>(__umulhi(id, p.by_plane_or_c));
      const int c = IN_HWC ? id - outer * p.c.c : outer, pixel = IN_HWC ? outer : id - outer * p.plane;
      const int row = static_cast<int>(__umulhi(pixel, p.by_pitch)), col = pixel - row * p.pitch, h = h0 + row, w = w0 + col;
      const bool ok = id < total && row < p.rows && col < p.cols && static_cast<u32>(h) < static_cast<u32>(p.c.h) &&
                      static_cast<u32>(w) < static_cast<u32>(p.c.w_in);
      to[i] = c * p.plane + pixel;
      v[i] = ok ? load_half(p.c.x, image * p.c.x_n + c * p.c.x_block + (h * p.c.w_in + w) * p.c.x_pixel) : u16(0);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (first + i * THREADS < total) sts_16(patch + to[i] * 2, v[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_stem(const __grid_constant__ StemParams p) {
  release_next_launch();
  extern __shared__ __align__(128) char shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int steps = p.c.k_tiles, a_tile = steps * 512;
  const u32 taps = smem_u32(shared), weights = taps + steps * 64, patch = weights + BM / 16 * a_tile;

  // Which tile: channels fastest, so that blocks sharing a patch are neighbours.
  const int m_tiles = (p.c.y_c + BM - 1) / BM, rest = blockIdx.x / m_tiles, m0 = blockIdx.x % m_tiles * BM;
  const int image = rest / (p.tiles_h * p.tiles_w), tile = rest - image * p.tiles_h * p.tiles_w;
  const int tw_mask = (1 << p.log2_tw) - 1;
#if POOL
  const int i0 = tile / p.tiles_w * p.tile_h, j0 = tile % p.tiles_w * p.tile_w;
  const int oh0 = i0 * p.pool_stride_h - p.pool_pad_t, ow0 = j0 * p.pool_stride_w - p.pool_pad_l;
#else
  const int oh0 = tile / p.tiles_w * (BN >> p.log2_tw), ow0 = tile % p.tiles_w << p.log2_tw;
#endif

  // Weights and taps fly while the patch is converted. Rows past the last are read from the last 16 and never stored.
  for (int i = 0; i < BM / 16; ++i) {
    const char* from = reinterpret_cast<const char*>(p.c.w) + static_cast<long long>(min(m0 / 16 + i, p.c.m16 - 1)) * a_tile;
    for (int piece = threadIdx.x; piece < steps * 32; piece += THREADS)
      cp_async_16(weights + i * a_tile + piece * 16, from + piece * 16, 16);
  }
  for (int piece = threadIdx.x; piece < steps * 4; piece += THREADS) cp_async_16(taps + piece * 16, p.taps + piece * 4, 16);
  cp_async_commit();
  wait_for_previous_launch();
  load_patch(p, patch, image, oh0 * p.c.stride_h - p.c.pad_t, ow0 * p.c.stride_w - p.c.pad_l);
  cp_async_wait<0>();
  __syncthreads();

  // This lane's pixel of each 8-wide MMA tile.
  u32 pixel[NT];
  const int warp_m = warp / WARPS_N * MT, warp_n = warp % WARPS_N * WN;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int n = warp_n + j * 8 + g;
    pixel[j] = patch + ((n >> p.log2_tw) * p.c.stride_h * p.pitch + (n & tw_mask) * p.c.stride_w) * 2;
  }

  float acc[MT][NT][4] = {};
  for (int k = 0; k < steps; ++k) {
    const uint4 tap = lds_128(taps + (k * 4 + t) * 16);
    uint4 a[MT];
#pragma unroll
    for (int i = 0; i < MT; ++i) a[i] = lds_128(weights + (warp_m + i) * a_tile + k * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const u32 b0 = lds_16(pixel[j] + tap.x) | static_cast<u32>(lds_16(pixel[j] + tap.y)) << 16;
      const u32 b1 = lds_16(pixel[j] + tap.z) | static_cast<u32>(lds_16(pixel[j] + tap.w)) << 16;
#pragma unroll
      for (int i = 0; i < MT; ++i) mma_16816(acc[i][j], a[i], b0, b1);
    }
  }

#if POOL
  stage_results<ACT, 0>(p.c, acc, taps, taps + STAGING_BYTES, m0, [](int) { return 0; });
  store_maxima(p, taps, m0, image, i0, j0, oh0, ow0);
#else
  epilogue(p.c, acc, taps, taps + STAGING_BYTES, m0, [&](int n) {
    const int oh = oh0 + (n >> p.log2_tw), ow = ow0 + (n & tw_mask);
    return oh < p.c.p && ow < p.c.q ? image * p.c.y_n + (oh * p.c.q + ow) * p.c.y_pixel : -1;
  });
#endif
}
