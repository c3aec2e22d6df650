// conv_depthwise: each output channel from one input channel (groups == C, any K/C), FP16 in and out, FP32 accumulate.
//
//   +-----+-----+-----+   block    C_BLOCK x VEC channels of a patch of output pixels
//   | T T | T T | T T |   thread   TH x TW pixels of the patch (T) for VEC channels: 8 in one access (V >= 8), or 1 (linear);
//   | T T | T T | T T |            neighbours take a pixel's next channels (V >= 8) or the row's next pixels (linear)
//   +-----+-----+-----+   input    a thread loads a row's COLS columns once and slides over them the S taps of every output
//   | T T | T T | T T |            row that needs them; columns that two threads load come from L1
//   +-----+-----+-----+   weights  FP16 [tap][channel] in memory, FP32 in shared memory
//
// The trick: dilation d is d x d interleaved convolutions without dilation, and a block works on one of them. Its outputs lie
// STEP = d / gcd(d, stride) apart and read columns d * (j*E + s), E = stride / gcd(d, stride): every dilation slides alike.
//
// Two variants bring a block's patch of input to shared memory at once: STAGED (include/depthwise_staged.cuh), whose threads
// have VEC = 2 or 4 channels, and TENSOR, on tensor cores (include/depthwise_bands.cuh).
// Filters that registers or shared memory do not hold: SLICE columns at a time, of weights that come from L1.
//
// Compile-time: TENSOR, STAGED, VEC (8, 4, 2 or 1), R, S, SLICE (of those filters only), E_H, E_W, C_BLOCK, H_BLOCK x W_BLOCK threads over the patch, TH x TW,
// ACT, RES, AFFINE, LAST (include/activation.cuh), MULTIPLIED (1: K > C), HIDDEN (1: beside the outputs, their share of a
// squeeze-excite's hidden values, include/hidden_share.cuh).
#include "activation.cuh"
#include "tensor.cuh"

#ifndef HIDDEN
#define HIDDEN 0
#endif

#ifdef SLICE
constexpr bool SLICED = true;
#else
#define SLICE S
constexpr bool SLICED = false;
#endif

constexpr int SPOTS = H_BLOCK * W_BLOCK;  // T of the patch
constexpr int THREADS = C_BLOCK * (TENSOR ? 32 : SPOTS);
constexpr int TAPS = TENSOR || SLICED ? 0 : R * S;  // that are staged as FP32
constexpr int COLS = (TW - 1) * E_W + SLICE, ROWS = (TH - 1) * E_H + R;  // of input under a thread's outputs, at a time
constexpr int VECTORS = AFFINE ? 4 : 2;                              // per channel: bias, slope, and scale, shift
constexpr int PART = VEC == 8 ? 4 : VEC, PARTS = VEC / PART;         // channels whose products are formed at once
// Parts stand half of the banks apart, so that storing both parts of 4 chunks at once meets no bank twice.
constexpr int PART_BYTES = ((TAPS + VECTORS) * C_BLOCK * PART * 4 + 127) / 128 * 128 + 64;
static_assert(STAGED ? VEC == 4 || VEC == 2 : VEC == 8 || VEC == 1, "8 halfs in one access, or 1; of staged ones 4 or 2");
// As many as leave a thread the registers for its sums and input columns: other blocks then hide a block's latency.
constexpr int HELD = VEC * (TH * TW + COLS);
constexpr int MANY = HELD <= 54 ? 896 : HELD <= 60 ? 768 : HELD <= 70 ? 640 : HELD <= 106 ? 512 : 384;  // threads of an SM
constexpr bool LONG_END = AFFINE || ACT == ACT_SOFTPLUS || LAST == ACT_SOFTPLUS;  // an epilogue of more registers
constexpr int BANDS = TH > 4 ? 256 : LONG_END || RES ? 384 : 512;  // as MANY, on tensor cores
constexpr int LIMIT = STAGED ? MANY : TENSOR ? BANDS : 1, BLOCKS = THREADS <= LIMIT ? LIMIT / THREADS : 1;
static_assert(THREADS <= 1024, "a block has at most 1024 threads");
static_assert(PARTS * PART_BYTES <= 48 * 1024, "the weights lie in static shared memory");
static_assert(!SLICED || !(STAGED || TENSOR), "a patch in shared memory serves all of a filter's columns");
static_assert(COLS <= 32, "a word holds which columns lie inside the image");
#if HIDDEN
constexpr int SUM_VEC = VEC, SUM_CHANNELS = C_BLOCK * VEC, SUM_SPOTS = TENSOR ? 32 : SPOTS;
static_assert(!MULTIPLIED, "each channel is of its own");
#include "hidden_share.cuh"
#else
struct PixelSums {
  __device__ __forceinline__ void add(const u32 (&)[(VEC + 1) / 2], bool) {}
};
#endif

struct DepthwiseParams {
  u32* nonfinite;
  const __half* x;
  const __half* w;         // [R * S][w_pitch]
  const float* bias;       // [w_pitch], zeros where there is none
  const float* slope;      // [w_pitch], prelu only
  const __half* residual;  // y's format
  __half* y;
  View in, out, added;                 // added: the residual, which or y may lie inside another tensor
  int first, row_pixels, column_pixels;  // output (row, col) is pixel first + row * row_pixels + col * column_pixels of y
  int h, w_in, k, p, q;
  int y_c, w_pitch;  // channels of y, and of a row of weights, with padding
  int multiplier;
  int stride_h, stride_w, pad_t, pad_l, dil_h, dil_w, step_h, step_w;
  int tiles_h, tiles_w, phases_h, phases_w;  // patches of one interleaved convolution; how many of those there are
  float alpha, beta;
#if AFFINE
  const float* scales;  // [w_pitch]
  const float* shifts;
#endif
#if LAST
  float alpha_last, beta_last;
#endif
#if HIDDEN
  HiddenShare share;
#endif
};

struct Place {  // what a thread computes; channels and pixels past the tensor's end included
  int channel, local, image, row, col;  // row, col: first output pixel; local: its chunk within the block
};

// The block's first pixel and channel. Unsigned quotients take fewer instructions, and dilation is rare.
__device__ __forceinline__ Place first_place(const DepthwiseParams& p) {
  const u32 c_tiles = static_cast<u32>(p.y_c + C_BLOCK * VEC - 1) / (C_BLOCK * VEC);
  u32 id = blockIdx.x, phase_w = 0, phase_h = 0;
  const u32 c_tile = id % c_tiles;
  id /= c_tiles;
  const u32 tile_w = id % static_cast<u32>(p.tiles_w);
  id /= static_cast<u32>(p.tiles_w);
  const u32 tile_h = id % static_cast<u32>(p.tiles_h);
  id /= static_cast<u32>(p.tiles_h);
  if (p.phases_w * p.phases_h > 1) {
    phase_w = id % static_cast<u32>(p.phases_w);
    id /= static_cast<u32>(p.phases_w);
    phase_h = id % static_cast<u32>(p.phases_h);
    id /= static_cast<u32>(p.phases_h);
  }
  const int row = phase_h + p.step_h * tile_h * (H_BLOCK * TH), col = phase_w + p.step_w * tile_w * (W_BLOCK * TW);
  return {static_cast<int>(c_tile) * (C_BLOCK * VEC), 0, static_cast<int>(id), row, col};
}
__device__ __forceinline__ Place place(const DepthwiseParams& p, Place at, int local, int spot) {
  at.local = local, at.channel += local * VEC;
  at.row += p.step_h * (spot / W_BLOCK * TH), at.col += p.step_w * (spot % W_BLOCK * TW);
  return at;
}

// The block's weights and vectors as FP32: [part][tap][chunk][PART]; taps from TAPS on are bias, slope, scale and shift.
__device__ __forceinline__ u32 staged(u32 base, int part, int tap, int local) {
  return base + part * PART_BYTES + (tap * C_BLOCK + local) * (PART * 4);
}
template <int N>
struct alignas(N * 4) Floats {
  float v[N];
};
template <int N>
struct alignas(N * 2) Halfs {
  __half v[N];
};
template <int N>
__device__ __forceinline__ void load_few(const __half* at, float (&v)[N]) {
  const Halfs<N> bits = *reinterpret_cast<const Halfs<N>*>(at);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = __half2float(bits.v[i]);
}
__device__ __forceinline__ void load_few(const __half* at, float (&v)[8]) { load_vec(at, v); }
// Predicated, so that no branch stands between the pixels of a thread.
__device__ __forceinline__ void store_if(bool ok, void* at, const u32 (&v)[1]) {
  if (VEC == 1 && ok) *static_cast<u16*>(at) = static_cast<u16>(v[0]);
  if (VEC == 1) return;
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %2, 0;\n@q st.global.b32 [%0], %1; }" ::"l"(at), "r"(v[0]),
               "r"(static_cast<u32>(ok))
               : "memory");
}
__device__ __forceinline__ void store_if(bool ok, void* at, const u32 (&v)[2]) {
  asm volatile("{ .reg .pred q; setp.ne.b32 q, %3, 0;\n@q st.global.v2.b32 [%0], {%1,%2}; }" ::"l"(at), "r"(v[0]), "r"(v[1]),
               "r"(static_cast<u32>(ok))
               : "memory");
}
__device__ __forceinline__ void store_if(bool ok, void* at, const u32 (&v)[4]) {
  if (ok) stg_128(at, make_uint4(v[0], v[1], v[2], v[3]));
}

__device__ __forceinline__ void put(u32 at, const float* v) {
  Floats<PART> bits;
#pragma unroll
  for (int i = 0; i < PART; ++i) bits.v[i] = v[i];
  *static_cast<Floats<PART>*>(__cvta_shared_to_generic(at)) = bits;
}
__device__ __forceinline__ void get(u32 at, float (&v)[PART]) {
  const Floats<PART> bits = *static_cast<const Floats<PART>*>(__cvta_shared_to_generic(at));
#pragma unroll
  for (int i = 0; i < PART; ++i) v[i] = bits.v[i];
}

// A thread's part of bias, slope, scale and shift, between loading and storing it.
static_assert(C_BLOCK * PARTS <= THREADS, "a thread has one part of each vector at most");
struct Vectors {
  Floats<PART> held[VECTORS];
  __device__ __forceinline__ void load(const DepthwiseParams& p, int channel0) {
    const int i = threadIdx.x, channel = channel0 + i * PART;
#pragma unroll
    for (int row = 0; row < VECTORS; ++row) {
      const float* from = row == 0 ? p.bias : p.slope;
#if AFFINE
      if (row > 1) from = row == 2 ? p.scales : p.shifts;
#endif
      held[row] = {};
      if ((row != 1 || ACT == ACT_PRELU) && i < C_BLOCK * PARTS && channel < p.w_pitch)
        held[row] = *reinterpret_cast<const Floats<PART>*>(from + channel);
    }
  }
  __device__ __forceinline__ void store(u32 base) const {
    const int i = threadIdx.x;
    if (i >= C_BLOCK * PARTS) return;
#pragma unroll
    for (int row = 0; row < VECTORS; ++row) put(staged(base, i % PARTS, TAPS + row, i / PARTS), held[row].v);
  }
};

// All loads of a turn are in flight before its first store: a block's weights come from afar once.
__device__ __forceinline__ void stage_weights(const DepthwiseParams& p, int channel0, u32 base) {
  constexpr int COUNT = TAPS * C_BLOCK, EACH = (COUNT + THREADS - 1) / THREADS, AT_ONCE = EACH < 8 ? EACH > 0 ? EACH : 1 : 8;
  Vectors vectors;
  vectors.load(p, channel0);
  for (int i0 = threadIdx.x; i0 < COUNT; i0 += AT_ONCE * THREADS) {
    Halfs<VEC> taps[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = i0 + n * THREADS, channel = channel0 + i % C_BLOCK * VEC;
      taps[n] = {};
      if (i < COUNT && channel < p.w_pitch)
        taps[n] = *reinterpret_cast<const Halfs<VEC>*>(p.w + i / C_BLOCK * p.w_pitch + channel);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = i0 + n * THREADS;
      float v[VEC];
#pragma unroll
      for (int c = 0; c < VEC; ++c) v[c] = __half2float(taps[n].v[c]);
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (i < COUNT) put(staged(base, part, i / C_BLOCK, i % C_BLOCK), v + part * PART);
    }
  }
  vectors.store(base);
}

// Of a channel what its outputs need.
struct Ends {
  float bias, slope;
  Tail tail;
};
__device__ __forceinline__ void load_ends(u32 weights, int part, int local, Ends* ends) {
  float v[PART] = {};
  get(staged(weights, part, TAPS, local), v);
#pragma unroll
  for (int c = 0; c < PART; ++c) ends[c].bias = v[c];
  if (ACT == ACT_PRELU) get(staged(weights, part, TAPS + 1, local), v);
#pragma unroll
  for (int c = 0; c < PART; ++c) ends[c].slope = v[c];
  if (AFFINE) get(staged(weights, part, TAPS + 2, local), v);
#pragma unroll
  for (int c = 0; c < PART; ++c) ends[c].tail.scale = v[c];
  if (AFFINE) get(staged(weights, part, TAPS + 3, local), v);
#pragma unroll
  for (int c = 0; c < PART; ++c) ends[c].tail.shift = v[c];
}

constexpr int WORDS = (VEC + 1) / 2;
// Masks of words of 2 channels each, of which the first `known` are not padding: padded ones stay zero.
__device__ __forceinline__ void mask_padding(int known, u32 (&kept)[WORDS]) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) kept[i] = known - 2 * i > 1 ? 0xffffffffu : known - 2 * i > 0 ? 0xffffu : 0u;
}

// Bias, residual and activation in FP32, one rounding.
template <int A, int B>
__device__ __forceinline__ void finish_pixels(const DepthwiseParams& p, const Place& at, u32 weights, const float (&acc)[A][B][VEC],
                                              Watch& watch, PixelSums& sums) {
  Ends ends[VEC];
  u32 kept[WORDS];
  mask_padding(p.k - at.channel, kept);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) load_ends(weights, part, at.local, ends + part * PART);
  const int pixel = p.first + at.row * p.row_pixels + at.col * p.column_pixels;
  const int step_h = p.step_h * p.row_pixels, step_w = p.step_w * p.column_pixels;  // pixels of y
  char* row_to = reinterpret_cast<char*>(p.y + p.out.at(at.image, at.channel, pixel));
  const __half* row_from = RES ? p.residual + p.added.at(at.image, at.channel, pixel) : nullptr;
#pragma unroll
  for (int a = 0; a < A; ++a) {
    if (a > 0) {
      if (at.row + a * p.step_h >= p.p) break;
      row_to += static_cast<long long>(step_h) * p.out.pixel * 2;
      if (RES) row_from += static_cast<long long>(step_h) * p.added.pixel;
    }
    char* to = row_to;
    float added[B][VEC] = {};
    if (RES) {  // the whole row before its first store, which may be to the same bytes
      const __half* from = row_from;
#pragma unroll
      for (int b = 0; b < B; ++b, from += step_w * p.added.pixel)
        if (at.col + b * p.step_w < p.q) load_few(from, added[b]);
    }
#pragma unroll
    for (int b = 0; b < B; ++b, to += step_w * p.out.pixel * 2) {
      const bool inside = at.col + b * p.step_w < p.q;
      float v[WORDS * 2] = {};
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        v[c] = finish<ACT, RES>(p, acc[a][b][c] + ends[c].bias, added[b][c], ends[c].slope, ends[c].tail);
      }
      u32 bits[WORDS];
      Watch seen = watch;
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        const __half2 two = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
        bits[i] = *reinterpret_cast<const u32*>(&two) & kept[i];
        seen.see(*reinterpret_cast<const __half2*>(&bits[i]));
      }
      if (inside) watch = seen;
      sums.add(bits, inside);
      store_if(inside, to, bits);
    }
  }
}

#if TENSOR
#include "depthwise_bands.cuh"
#elif STAGED
#include "depthwise_staged.cuh"
#else
// Multiplier m > 1: output channels k..k+7 read at most 4 neighbouring input channels, all of one chunk: `shift` bits into it.
// Pair j of outputs takes two halfs of those four, as the byte permutation `pick[j]` says.
struct Spread {
  int shift;
  u32 pick[4];
  __device__ __forceinline__ void init(int channel, int m) {
    const int first = channel / m;
    shift = first % 8 * 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const u32 a = (channel + 2 * j) / m - first, b = (channel + 2 * j + 1) / m - first;
      pick[j] = 0x1010 + 0x22 * a + 0x2200 * b;
    }
  }
  __device__ __forceinline__ uint4 apply(const uint4& x) const {
    typedef unsigned long long u64;
    const u64 lo = x.x | static_cast<u64>(x.y) << 32, hi = x.z | static_cast<u64>(x.w) << 32;
    const u64 four = shift >= 64 ? hi >> (shift - 64) : lo >> shift | hi << 1 << (63 - shift);
    const u32 a = static_cast<u32>(four), b = static_cast<u32>(four >> 32);
    return make_uint4(__byte_perm(a, b, pick[0]), __byte_perm(a, b, pick[1]), __byte_perm(a, b, pick[2]),
                      __byte_perm(a, b, pick[3]));
  }
};
struct Single {  // the linear variant's channel is its own
  __device__ __forceinline__ void init(int, int) {}
  __device__ __forceinline__ u16 apply(u16 x) const { return x; }
};

__device__ __forceinline__ uint4 load_if(bool ok, const __half* at, Spread) { return ldg_128_if(ok, at); }
__device__ __forceinline__ u16 load_if(bool ok, const __half* at, Single) { return ok ? __half_as_ushort(*at) : u16(0); }
__device__ __forceinline__ void unpack_part(const uint4& x, int part, float (&v)[4]) {
  const u32 a = part ? x.z : x.x, b = part ? x.w : x.y;
  const float2 lo = __half22float2(*reinterpret_cast<const __half2*>(&a));
  const float2 hi = __half22float2(*reinterpret_cast<const __half2*>(&b));
  v[0] = lo.x, v[1] = lo.y, v[2] = hi.x, v[3] = hi.y;
}
__device__ __forceinline__ void unpack_part(u16 x, int, float (&v)[1]) { v[0] = __half2float(__ushort_as_half(x)); }

// What a row of a thread's input, row i of ROWS and row h of the image, adds under N columns of the filter, from column s0 on.
template <int N, class Bits, class Source>
__device__ __forceinline__ void multiply_row(const DepthwiseParams& p, const Place& at, u32 weights, const Source& source,
                                             const __half* from, int i, int h, int s0, float (&acc)[TH][TW][VEC]) {
  constexpr int HERE = COLS - SLICE + N;
  const int w0 = at.col * p.stride_w - p.pad_l + s0 * p.dil_w;
  u32 inside = 0;
#pragma unroll
  for (int j = 0; j < HERE; ++j) inside |= static_cast<u32>(static_cast<u32>(w0 + j * p.dil_w) < static_cast<u32>(p.w_in)) << j;
  const int offset = (h * p.w_in + w0) * p.in.pixel, column = p.dil_w * p.in.pixel;
  Bits x[HERE];
#pragma unroll
  for (int j = 0; j < HERE; ++j) x[j] = load_if(inside >> j & 1, from + (offset + j * column), source);
  if (MULTIPLIED) {
#pragma unroll
    for (int j = 0; j < HERE; ++j) x[j] = source.apply(x[j]);
  }
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    float v[HERE][PART];
#pragma unroll
    for (int j = 0; j < HERE; ++j) unpack_part(x[j], part, v[j]);
#pragma unroll
    for (int a = 0; a < TH; ++a) {
      const int r = i - a * E_H;  // the filter row through which this input row enters output row a
      if (static_cast<u32>(r) >= R) continue;
#pragma unroll
      for (int s = 0; s < N; ++s) {
        float w[PART];
        if (SLICED) {
          load_few(p.w + (r * S + s0 + s) * p.w_pitch + at.channel + part * PART, w);
        } else {
          get(staged(weights, part, r * S + s, at.local), w);
        }
#pragma unroll
        for (int b = 0; b < TW; ++b)
#pragma unroll
          for (int c = 0; c < PART; ++c) acc[a][b][part * PART + c] += w[c] * v[b * E_W + s][c];
      }
    }
  }
}

template <class Bits, class Source>  // what one access brings, and how it becomes VEC channels
__device__ __forceinline__ void multiply(const DepthwiseParams& p, const Place& at, u32 weights, float (&acc)[TH][TW][VEC]) {
  const int channel = MULTIPLIED ? at.channel / p.multiplier : at.channel, chunk = channel & ~(VEC - 1);
  Source source;
  if (MULTIPLIED) source.init(at.channel, p.multiplier);
  const __half* from = p.x + p.in.at(at.image, chunk, 0);
  for (int i = 0; i < ROWS; ++i) {
    const int h = at.row * p.stride_h - p.pad_t + i * p.dil_h;
    if (static_cast<u32>(h) >= static_cast<u32>(p.h)) continue;
    for (int s0 = 0; s0 + SLICE <= S; s0 += SLICE) multiply_row<SLICE, Bits>(p, at, weights, source, from, i, h, s0, acc);
    if constexpr (S % SLICE > 0) multiply_row<S % SLICE, Bits>(p, at, weights, source, from, i, h, S / SLICE * SLICE, acc);
  }
}

__device__ __forceinline__ void compute_direct(const DepthwiseParams& p, u32 weights, PixelSums& sums) {
  const int t = threadIdx.x;
  const Place first = first_place(p);
  const Place at = place(p, first, VEC == 8 ? t % C_BLOCK : t / SPOTS, VEC == 8 ? t / C_BLOCK : t % SPOTS);
  stage_weights(p, first.channel, weights);
  __syncthreads();
  wait_for_previous_launch();
  if (at.channel >= p.y_c || at.row >= p.p || at.col >= p.q) return;

  float acc[TH][TW][VEC] = {};
  if (at.channel < p.k) {  // not all padding
#if VEC == 8
    multiply<uint4, Spread>(p, at, weights, acc);
#else
    multiply<u16, Single>(p, at, weights, acc);
#endif
  }
  Watch watch;
  finish_pixels(p, at, weights, acc, watch, sums);
  watch.report(p.nonfinite);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_depthwise(const __grid_constant__ DepthwiseParams p) {
  release_next_launch();
  __shared__ __align__(16) char shared[PARTS * PART_BYTES];
  const u32 weights = smem_u32(shared);
  PixelSums sums;
#if HIDDEN
  extern __shared__ __align__(16) char patch[];
  HiddenHeld held;
  held.copy(p.share, smem_u32(patch), first_place(p).channel);
  cp_async_commit();
#endif
#if TENSOR
  compute_bands(p, weights, sums);
#elif STAGED
  compute_staged(p, weights, sums);
#else
  compute_direct(p, weights, sums);
#endif
#if HIDDEN
  const int t = threadIdx.x;
  share_hidden(p.share, held, [&] { return first_place(p).channel; }, t % C_BLOCK * VEC, t / C_BLOCK, sums);
#endif
}
