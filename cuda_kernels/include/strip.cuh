// The main loop of conv_strip.cu and conv_strip_sparse24.cu: a convolution whose output has the size of its input, with every
// pixel in shared memory once for all taps.
//
//   pixels of all images in one line; W = 5, 3 x 3 taps, BN = 8       K, turn by turn (64 of it)
//   . . . . . . . . . . . . . . . . . . . . . .                       block of 64 channels  0 0 0 0 0 0 0 0 0 1 1 ..
//     [------------- strip -------------]                             tap                   0 1 2 3 4 5 6 7 8 0 1 ..
//                 [--- BN ---]                                        weights, next strip   copied a few turns ahead
//      tap (r, s): those r * W + s further on than the strip's first
//
// A tap's pixels are a run of the strip. Where they are not the tap's (of the next row, the next image, or outside of all), the
// lane reads zeros that lie in the same banks.
#pragma once
#include "implicit_gemm.cuh"

// Compile-time values besides those of conv.cuh:
//   COPIES   pixels of the next strip that a thread copies of one chunk per turn, at most
static_assert(BK == 64 && !IN_LINEAR && !SPLIT && !PRO && !GATE && !NORM && !D2S, "of what conv.cuh offers, only its epilogues");

constexpr int ROW_BYTES = BK * 2, ZERO_BYTES = 8 * ROW_BYTES;  // of a pixel in a strip; of zeros, 8 pixels: all banks' phases
constexpr int ROWS_AT_ONCE = THREADS / CHUNKS;
static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's pixels have one phase of the swizzle: they are constants apart");

__device__ __forceinline__ int strip_rows(const ConvParams& p) { return BN + (p.r - 1) * p.w_in + p.s - 1; }
__device__ __forceinline__ int strip_bytes(const ConvParams& p) { return (strip_rows(p) + 7) / 8 * 8 * ROW_BYTES; }

// Copies strips: a thread has one chunk of every ROWS_AT_ONCE-th pixel.
struct StripLoader {
  int first, rows;   // pixel of the thread's first row, in the line of all images; how many rows there are from it on
  int pixels, area;  // of all images, of one
  u32 reciprocal;    // 2^32 / area, rounded down: an image's number at most one too small
  int between;       // elements from an image's last pixel to the next one's first, beyond a pixel's step
  int channel, next_block;  // elements to the thread's chunk; from a block of channels to the next
  u32 to;            // bytes of its first row in a strip

  __device__ __forceinline__ StripLoader(const ConvParams& p, int pixel0) {
    const int row = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS * 8;
    area = p.h * p.w_in, pixels = p.n * area, rows = strip_rows(p) - row;
    first = pixel0 - p.pad_t * p.w_in - p.pad_l + row;
    reciprocal = 0xffffffffu / area;
    between = p.x_n - area * p.x_pixel;
    channel = (c >> p.x_log2v) * p.x_block + (c & ((1 << p.x_log2v) - 1));
    next_block = (BK >> p.x_log2v) * p.x_block;
    to = swizzled<CHUNKS>(row, threadIdx.x % CHUNKS);
  }

  // Its row `ahead` rows further of channel block `block`, if `wanted`; `ahead`: a multiple of ROWS_AT_ONCE. Pixels outside of all
  // images are not copied: no tap reads them.
  __device__ __forceinline__ void copy(const ConvParams& p, u32 strip, int ahead, int block, bool wanted) const {
    const int pixel = first + ahead;
    int image = __umulhi(static_cast<u32>(pixel), reciprocal);
    image += pixel - image * area >= area;
    const bool real = wanted && ahead < rows && static_cast<u32>(pixel) < static_cast<u32>(pixels);
    cp_async_16_if(real, strip + ahead * ROW_BYTES + to,
                   element_at(p.x + block * next_block, pixel * p.x_pixel + image * between + channel),
                   static_cast<int>(threadIdx.x % CHUNKS) < p.c8 - block * CHUNKS ? 16 : 0);
  }
};

// Where a lane's ldmatrix finds the pixels of a tap: in the strip, or zeros for those that the tap has outside of their image.
struct Tap {
  u32 rows, zeros;  // addresses, of the lane's first pixel and for any
  u32 inside;       // bit j: the lane's pixel j
};

// A lane's pixels: PIXELS of them, APART apart, of which ldmatrix takes one each time.
template <int PIXELS, int APART>
struct LanePixels {
  static_assert(APART % 8 == 0, "they have one phase of the swizzle");
  int first, chunk;   // row of the strip at tap (0, 0)
  u32 in_rows, in_columns;  // bit r * PIXELS + j: row r of the kernel lies inside of pixel j's image; columns likewise

  // Bits t * PIXELS for 0 <= at + t < size, t < taps; taps * PIXELS < 32.
  static __device__ __forceinline__ u32 inside(int at, int taps, int size) {
    u32 every = 0;
#pragma unroll
    for (int t = 0; t < 32; t += PIXELS) every |= 1u << t;
    const int from = max(-at, 0), to = max(min(taps, size - at), 0);
    return every << min(from * PIXELS, 31) & ((1u << to * PIXELS) - 1);
  }

  __device__ __forceinline__ void init(const ConvParams& p, int pixel0, int row, int of_chunk) {
    const int area = p.p * p.q;
    first = row, chunk = of_chunk, in_rows = in_columns = 0;
#pragma unroll
    for (int j = 0; j < PIXELS; ++j) {
      const int pixel = pixel0 + row + j * APART, rest = pixel % area, oh = rest / p.q, ow = rest - oh * p.q;
      const bool real = pixel < p.n * area;
      in_rows |= (real ? inside(oh - p.pad_t, p.r, p.h) : 0) << j;
      in_columns |= inside(ow - p.pad_l, p.s, p.w_in) << j;
    }
  }

  // `shift`: r * W + s.
  __device__ __forceinline__ Tap tap(u32 strip, u32 zeros, int r, int s, int shift) const {
    const u32 at = swizzled<CHUNKS>(first + shift, chunk);
    return {strip + at, zeros + at % ZERO_BYTES, in_rows >> r * PIXELS & in_columns >> s * PIXELS};
  }
};

// Pixel j of a tap, chunks of the k-th `BYTES` of a row: what they add to the chunk, the swizzle's XOR leaves to an XOR. The address
// is a sum, not a choice: the products between which ptxas puts it need no predicate registers then, of which there are 7.
template <int BYTES, int APART>
__device__ __forceinline__ uint4 fetch_pixels(const Tap& tap, int j, int k) {
  const u32 row = (tap.rows ^ k * BYTES) + j * APART * ROW_BYTES, zero = tap.zeros ^ k * BYTES;
  return ldmatrix_x4(zero + (tap.inside >> j & 1) * (row - zero));
}

// A kernel's Product holds the fragments that the tensor cores multiply. It gives
//   A_TILE, E_PAIR             bytes per turn of weights of one 16-row tile, of metadata of two (0: dense)
//   STEPS                      of a turn, an even number
//   FENCES                     whether a NOP ahead of each step changes ptxas's order for the better (implicit_gemm.cuh)
//   pixels                     LanePixels
//   fetch(stage, tap, step)    loads a step's fragments into one of two sets of registers, in turn
//   multiply(step, acc)        adds the products of that step
// Shared memory: zeros | strip | strip of the next block, if any | STAGES of weights and metadata. The turns are those of
// implicit_gemm.cuh; a strip is copied while the one before is read, until STAGES - 1 turns before its own first.
template <class Product>
__device__ __forceinline__ void convolve_strip(const ConvParams& p) {
  constexpr int E_AT = BM / 16 * Product::A_TILE, E_PAIR = Product::E_PAIR;
  constexpr int STAGE_BYTES = E_AT + BM / 32 * E_PAIR;
  static_assert(Product::STEPS % 2 == 0 && Product::STEPS > 2, "copies, in the second step, are before the last one's wait");
  extern __shared__ __align__(128) char shared[];
  const u32 smem = smem_u32(shared);
  const int blocks = (p.c8 + CHUNKS - 1) / CHUNKS, turns = p.k_tiles;
  const u32 size = strip_bytes(p), stages = smem + ZERO_BYTES + (blocks > 1 ? 2 : 1) * size;
  const int m_tiles = (output_rows(p) + BM - 1) / BM;
  const int m0 = blockIdx.x % m_tiles * BM, pixel0 = blockIdx.x / m_tiles * BN;
  release_next_launch();

  if (threadIdx.x < ZERO_BYTES / 16) sts_128(smem + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
  WeightLoader<Product::A_TILE> weights;
  const long long a_stride = static_cast<long long>(turns) * Product::A_TILE;
  weights.init(reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride, a_stride, p.m16 - m0 / 16);
  WeightLoader<E_PAIR ? E_PAIR : 16, 32> metadata;
  const long long e_stride = static_cast<long long>(turns) * E_PAIR;
  if (E_PAIR) metadata.init(reinterpret_cast<const char*>(p.meta) + m0 / 32 * e_stride, e_stride, (p.m16 + 1) / 2 - m0 / 32);
  StripLoader loader(p, pixel0);
  Product product;
  product.init(p, pixel0);
  float acc[MT][NT][4] = {};

  auto load_weights = [&](u32 to, bool wanted) {
    weights.load(to, wanted);
    if (E_PAIR) metadata.load(to + E_AT, wanted);
  };
  auto wait_for_stage = [&] {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
  };

  // The first strip belongs to the first stage's group. Weights first: they depend on no other launch.
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    load_weights(stages + stage * STAGE_BYTES, stage < turns);
    if (stage == 0) {
      wait_for_previous_launch();
      for (int ahead = 0; ahead < strip_rows(p); ahead += ROWS_AT_ONCE) loader.copy(p, smem + ZERO_BYTES, ahead, 0, true);
    }
    cp_async_commit();
  }

  u32 strip = smem + ZERO_BYTES, other = strip + size;
  u32 read = 0, write = (STAGES - 1) * STAGE_BYTES;  // bytes from the first stage
  int block = 0, r = 0, s = 0, shift = 0, ahead = 0;
  Tap tap = product.pixels.tap(strip, smem, 0, 0, 0);
  wait_for_stage();
  product.fetch(stages, tap, 0);
  for (int turn = 0; turn < turns; ++turn) {
    const bool more = turn + STAGES - 1 < turns, again = turn + 1 < turns;
    const u32 here = stages + read, to = stages + write;
    write = read;
    read = read == (STAGES - 1) * STAGE_BYTES ? 0 : read + STAGE_BYTES;
    const u32 next = again ? stages + read : here;  // after the last turn nobody multiplies what is fetched
#pragma unroll
    for (int step = 0; step < Product::STEPS; ++step) {
      if (Product::FENCES) __syncwarp();
      if (step < Product::STEPS - 1) {
        product.fetch(here, tap, step + 1);
      } else {
        // To the next tap, or to the next block's first: digits with carries, without a branch.
        s += again, shift += again;
        const bool next_row = s == p.s;
        s = next_row ? 0 : s, r += next_row, shift += next_row ? p.w_in - p.s : 0;
        const bool next_block = r == p.r;
        r = next_block ? 0 : r, shift = next_block ? 0 : shift, block += next_block;
        ahead = next_block ? 0 : ahead;
        const u32 past = strip;
        strip = next_block ? other : strip, other = next_block ? past : other;
        tap = product.pixels.tap(strip, smem, r, s, shift);
        wait_for_stage();
        product.fetch(next, tap, 0);
      }
      if (step == 1) {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) loader.copy(p, other, ahead + i * ROWS_AT_ONCE, block + 1, block + 1 < blocks);
        ahead += COPIES * ROWS_AT_ONCE;
        load_weights(to, more);
        cp_async_commit();
      }
      product.multiply(step, acc);
    }
  }
  epilogue(p, acc, smem, smem + STAGING_BYTES, m0, [&](int n) { return output_offset(p, pixel0 + n); });
}
