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
// ROW_STEPS (sm_90a): wgmma reads the pixels where they lie. With 4 channels to a pixel and stride 2, windows of neighbours begin
// 16 bytes apart: of 8 pixels a pair of columns is a block of operand B, 128 bytes on end, and blocks overlap. Nothing is gathered,
// and K is longer (7x7x3: 224 for 160). A lane has all rows of two columns: it takes their maxima in registers, and a block that
// goes down whole images keeps its last CARRIED rows for the next tile's windows.
// Blocks go from tile to tile: weights are copied once, and the next patch is on its way while results are stored.

#include "activation_pairs.cuh"
#include "stem_patch.cuh"

#if POOL
#define LOWEST __half2half2(__ushort_as_half(0xfc00))  // minus infinity
static_assert(!OUT_LINEAR && BM % 64 == 0 && (ASYNC || MT > 1) && !RES, "8 threads read one pixel's 64 channels: all banks, once");

// 8 channels of one output per thread and turn. ASYNC: the staging tile holds maxima over the rows of each column.
__device__ __forceinline__ void store_maxima(const StemParams& p, u32 staging, int m0, const Place& at) {
  const int i0 = at.i * TILE_H, j0 = at.j * TILE_W, row0 = at.row(p), column0 = at.column(p);
#pragma unroll 1
  for (int id = threadIdx.x; id < TILE_H * TILE_W * (BM / 8); id += THREADS) {
    const int m = id % (BM / 8) * 8, n = id / (BM / 8), i = n / TILE_W, j = n - i * TILE_W;
    if (i0 + i >= p.pool_h || j0 + j >= p.pool_w || m0 + m >= p.c.y_c) continue;
    __half2 best[4] = {LOWEST, LOWEST, LOWEST, LOWEST};
#pragma unroll
    for (int r = 0; r < (ASYNC ? 1 : POOL_R); ++r)
#pragma unroll
      for (int s = 0; s < POOL_S; ++s) {
        const int row = ASYNC ? i : i * POOL_STRIDE_H + r, column = j * POOL_STRIDE_W + s;
        const bool ok = ASYNC || static_cast<u32>(row0 + row) < static_cast<u32>(p.c.p);
        const uint4 v = lds_128(staged(staging, m, (row << LOG2_TW) + column));
        const __half2* h = reinterpret_cast<const __half2*>(&v);
        const bool inside = ok && static_cast<u32>(column0 + column) < static_cast<u32>(p.c.q);
#pragma unroll
        for (int e = 0; e < 4; ++e) best[e] = __hmax2(best[e], inside ? h[e] : LOWEST);
      }
    const int c = m0 + m, pixel = (i0 + i) * p.pool_w + j0 + j;
    stg_128(p.c.y + at.image * p.c.y_n + pixel * p.c.y_pixel + row_offset<false>(p.c, c), *reinterpret_cast<const uint4*>(best));
  }
}
#endif

// Bytes between the patch's windows of the tile's pixels 0 and n; the sum of what n's bits add.
__device__ __forceinline__ constexpr u32 window(int n) {
  return (n >> LOG2_TW) * STRIDE_H * ROW_BYTES + (n & (TW - 1)) * STRIDE_W * PIXEL_BYTES;
}

// Which pixel of an 8-wide MMA tile is its column: a lane's two results are pixels of its own, and 4 lanes' of the first are
// neighbours. The linear epilogue wants them in order, and so do the maxima: their banks.
__device__ __forceinline__ constexpr int pixel_of(int column) {
  return OUT_LINEAR || POOL ? column : (column & 1) * 4 + (column >> 1);
}

// Where a thread's warp is in the tile: the four of a warpgroup have the same pixels.
__device__ __forceinline__ int warp_m(int thread) { return ASYNC ? thread / 32 % WARPS_M : thread / 32 / WARPS_N; }
__device__ __forceinline__ int warp_n(int thread) { return ASYNC ? thread / 32 / WARPS_M : thread / 32 % WARPS_N; }

// Vectors as output: the first of a thread's CHUNK neighbouring channels in the block.
__device__ __forceinline__ int channel_of(int thread) { return warp_m(thread) * WM + thread % 32 / 4 * CHUNK; }

// Two of K: a word of the patch, or a half from each place.
__device__ __forceinline__ u32 two_taps(u32 first, u32 second) {
  return PAIRED ? lds_32(first) : lds_16(first) | static_cast<u32>(lds_16(second)) << 16;
}

// One step of K. `taps`, `weights`, `pixel`: this lane's slots, its fragment of the warp's first 16 rows, its window.
template <bool MASKED>
__device__ __forceinline__ void multiply(float (&acc)[MT][NT][4], u32 taps, u32 weights, u32 pixel, int k) {
  uint4 a[MT];
#pragma unroll
  for (int i = 0; i < MT; ++i) a[i] = lds_128(weights + i * A_TILE + k * 512);
  const uint2 words = PAIRED ? lds_64(taps + k * 32) : make_uint2(0, 0);
  const uint4 slot = PAIRED ? make_uint4(words.x, 0, words.y, 0) : lds_128(taps + k * 64);
  const uint2 mask = MASKED ? lds_64(taps + (STEPS + k - FULL) * 32) : make_uint2(~0u, ~0u);
  const u32 at0 = pixel + slot.x, at1 = pixel + slot.y, at2 = pixel + slot.z, at3 = pixel + slot.w;
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const u32 b0 = two_taps(at0 + window(j * 8), at1 + window(j * 8)) & mask.x;
    const u32 b1 = two_taps(at2 + window(j * 8), at3 + window(j * 8)) & mask.y;
#pragma unroll
    for (int i = 0; i < MT; ++i) mma_16816(acc[i][j], a[i], b0, b1);
  }
}

#if !OUT_LINEAR
// A pixel's neighbouring channels in a lane: one access.
struct alignas(2 * CHUNK) Chunk {
  __half2 h[MT];
};
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
  Chunk y;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const int low = c + 2 * i, high = low + 1, last = WHOLE ? high : p.c.k - 1;
    const float2 r = RES ? __half22float2(added.h[i]) : make_float2(0.f, 0.f);
    const Channel of_low = channel_at<ACT>(p.c, min(low, last)), of_high = channel_at<ACT>(p.c, min(high, last));
    u32 bits = finish_pair<ACT, RES>(p.c, acc[i][j][e], acc[i][j][2 + e], r, of_low, of_high);
    if (!WHOLE) bits &= (low <= last ? 0xffffu : 0u) | (high <= last ? 0xffff0000u : 0u);  // padded channels stay zero
    y.h[i] = *reinterpret_cast<const __half2*>(&bits);
    watch.see(y.h[i]);
  }
  return y;
}

// Vectors as output: a lane has CHUNK neighbouring channels, from m0 + m on, of two pixels per 8-wide tile, FIRST to END.
template <int FIRST, int END>
__device__ __forceinline__ void store_chunks(const StemParams& p, const float (&acc)[MT][NT][4], u32 staging, int m0,
                                             const Place& at, Watch& watch) {
  const int me = thread(), t = me % 4, m = channel_of(me), c = m0 + m, n0 = warp_n(me) * WN;
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
      const int n = n0 + j * 8 + pixel_of(2 * t + e), row = n >> LOG2_TW, column = n & (TW - 1);
      const bool ok = row0 + row < p.c.p && column0 + column < p.c.q;
      const int pixel = (row0 + row) * p.c.q + column0 + column;
      Chunk added = {};
#if RES
      if (ok) added = *reinterpret_cast<const Chunk*>(residual + pixel * p.c.r_pixel);
#endif
      const Chunk chunk = finished(p, acc, j, e, c, added, watch);
      if (POOL)
        stage_chunk(staged(staging, m, n), chunk, t & 1);
      else if (ok)
        *reinterpret_cast<Chunk*>(y + pixel * p.c.y_pixel) = chunk;
    }
  }
}
#endif

#if ASYNC && POOL
// A lane has 8-wide tiles one below the other: the rows of two columns, whose maxima it stages. `carried`: of the tile above,
// the last rows, with which this one's windows begin.
__device__ __forceinline__ void stage_maxima(const StemParams& p, const float (&acc)[MT][NT][4], u32 staging, int m0,
                                             const Place& at, __half2 (&carried)[2][CARRIED + 1], Watch& watch) {
  const int me = thread(), m = channel_of(me), row0 = at.row(p);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    __half2 h[CARRIED + NT];
#pragma unroll
    for (int j = 0; j < CARRIED; ++j) h[j] = at.i ? carried[e][j] : LOWEST;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const __half2 y = finished(p, acc, j, e, m0 + m, {}, watch).h[0];
      h[CARRIED + j] = static_cast<u32>(row0 + j) < static_cast<u32>(p.c.p) ? y : LOWEST;
    }
#pragma unroll
    for (int j = 0; j < CARRIED; ++j) carried[e][j] = h[NT + j];
#pragma unroll
    for (int i = 0; i < TILE_H; ++i) {
      __half2 best = h[i * POOL_STRIDE_H];
#pragma unroll
      for (int r = 1; r < POOL_R; ++r) best = __hmax2(best, h[i * POOL_STRIDE_H + r]);
      sts_32(staged(staging, m, i * TW + warp_n(me) * 8 + me % 4 * 2 + e), *reinterpret_cast<const u32*>(&best));
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

#if ASYNC
// 9.7.15.5.1 Matrix descriptor of blocks of 8 rows of 16 bytes, 128 bytes on end; bytes to the next one along K, along rows.
__device__ __forceinline__ u64 rows_of_16_bytes(u32 smem, int along_k, int along_rows) {
  return (smem & 0x3ffff) >> 4 | static_cast<u64>(along_k >> 4) << 16 | static_cast<u64>(along_rows >> 4) << 32;
}

// Step k of K: two pairs of columns of a row of the window, of 8 neighbouring pixels and of those below them. A row's first pair
// begins in front of the window: that column is zero in the patch's first plane.
__device__ __forceinline__ u64 windows(u32 patch, int k) {
  const int row = k / ROW_STEPS * ROW_BYTES, step = k % ROW_STEPS;
  return rows_of_16_bytes(patch + row + (step ? PLANE_BYTES + step * 32 : 0), step ? 16 : PLANE_BYTES + 16, STRIDE_H * ROW_BYTES);
}
#endif

// A tile's products; vectors as output: with the bias, which the linear epilogue adds itself.
__device__ __forceinline__ void multiply_all(float (&acc)[MT][NT][4], u32 taps, u32 biases, u32 weights, u32 patch) {
  const int me = thread(), lane = me % 32;
#pragma unroll
  for (int i = 0; i < MT; ++i) {
    const uint2 bias = lds_64(biases + (channel_of(me) + 2 * i) * 4);
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      acc[i][j][0] = acc[i][j][1] = __uint_as_float(bias.x);
      acc[i][j][2] = acc[i][j][3] = __uint_as_float(bias.y);
    }
  }
#if ASYNC
  keep_apart(acc);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < STEPS; ++k)
    wgmma_dense(acc[0], rows_of_16_bytes(weights + k * 2048, 1024, 128), windows(patch + warp_n(me) * 128, k));
  wgmma_commit();
#else
  const u32 slots = taps + lane % 4 * (SLOTS * 4), fragments = weights + warp_m(me) * MT * A_TILE + lane * 16;
  const u32 pixel = patch + window(warp_n(me) * WN + pixel_of(lane / 4));
#pragma unroll AT_ONCE
  for (int k = 0; k < FULL; ++k) multiply<false>(acc, slots, fragments, pixel, k);
#pragma unroll AT_ONCE
  for (int k = FULL; k < STEPS; ++k) multiply<true>(acc, slots, fragments, pixel, k);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) conv_stem(const __grid_constant__ StemParams p) {
  release_next_launch();
  extern __shared__ __align__(128) char shared[];
  const u32 taps = smem_u32(shared), biases = taps + TAP_BYTES, weights = biases + BM * 4;
  const u32 patches = weights + BM / 16 * A_TILE, staging = patches + 2 * PATCH_BYTES;

  // Which tiles: a run of neighbours, channels fastest, so that blocks sharing patches are neighbours.
  const int m_tiles = (p.c.y_c + BM - 1) / BM, m0 = blockIdx.x % m_tiles * BM, run = blockIdx.x / m_tiles;
  const int unit = CARRIED ? p.tiles_h : 1, first = (run * p.per_block + min(run, p.longer)) * unit;
  load_weights(p, taps, biases, weights, m0);
  wait_for_previous_launch();
  const int column = first / p.tiles_h, image = column / p.tiles_w;
  Place at = {image, first - column * p.tiles_h, column - image * p.tiles_w};
  load_patch<0>(p, patches, at);
  cp_async_wait<0>();

  u32 patch = patches;
  [[maybe_unused]] __half2 carried[2][CARRIED + 1];
  for (int left = (p.per_block + (run < p.longer)) * unit;; --left) {
    __syncwarp();  // lanes apart would fence their own stores alone
    if (ASYNC) fence_proxy_async();
    __syncthreads();
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
    constexpr int EARLY = ASYNC ? 0 : RES || AFFINE || ACT == ACT_PRELU ? NT : NT / 2;
    Watch watch;
    store_chunks<0, EARLY>(p, acc, staging, m0, here, watch);
    if (more) pieces.load(p, at, 0);
#if ASYNC
    wgmma_wait<0>();
    keep_apart(acc);
    stage_maxima(p, acc, staging, m0, here, carried, watch);
#else
    store_chunks<EARLY, NT>(p, acc, staging, m0, here, watch);
#endif
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
  }
}
