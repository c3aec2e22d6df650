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
// On tensor cores (TENSOR) a filter row is a product, for each channel: 16 pixels of a row times a band matrix, whose column n
// has the filter row from pixel n * E_W on, give 8 outputs beside each other. Its 16 rows are 16 T of TH x 8 outputs, so that a
// row of input is loaded once for all rows of a T that need it. Of 16 products 7 or 3 count, with 7 or 3 taps: of Hopper's
// 1,366 per clock and SM still 598 and 256, where the FP32 pipe has 128. The block transposes its patch as it copies it.
// Zeros of the band times infinity are NaN: a thread with a sum that is not finite sums its own outputs anew, tap by tap.
//
// Compile-time: TENSOR, VEC (8 or 1), R, S, E_H, E_W, C_BLOCK, H_BLOCK x W_BLOCK threads over the patch, TH x TW, ACT, RES,
// AFFINE, LAST (include/activation.cuh), MULTIPLIED (1: K > C).
#include "activation.cuh"
#include "tensor.cuh"

constexpr int SPOTS = H_BLOCK * W_BLOCK, GROUPS = (SPOTS + 15) / 16;  // T of the patch, and of tensor cores its warps' 16
constexpr int THREADS = C_BLOCK * (TENSOR ? GROUPS * 32 : SPOTS);
constexpr int OUT_W = TENSOR ? 2 : TW;  // columns of T that one thread has
constexpr int TAPS = TENSOR ? 0 : R * S;  // that are staged as FP32
constexpr int COLS = (TW - 1) * E_W + S, ROWS = (TH - 1) * E_H + R;  // of input under a thread's outputs
constexpr int VECTORS = AFFINE ? 4 : 2;                              // per channel: bias, slope, and scale, shift
constexpr int PART = VEC == 8 ? 4 : 1, PARTS = VEC / PART;           // channels whose products are formed at once
// Parts stand half of the banks apart, so that storing both parts of 4 chunks at once meets no bank twice.
constexpr int PART_BYTES = ((TAPS + VECTORS) * C_BLOCK * PART * 4 + 127) / 128 * 128 + 64;
static_assert(VEC == 8 || VEC == 1, "8 halfs in one access, or 1");
static_assert(THREADS <= 1024, "a block has at most 1024 threads");
static_assert(PARTS * PART_BYTES <= 48 * 1024, "the weights lie in static shared memory");
static_assert(COLS <= 32, "a word holds which columns lie inside the image");

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
};

struct Place {  // what a thread computes; channels and pixels past the tensor's end included
  int channel, local, image, row, col;  // row, col: first output pixel; local: its chunk within the block
};

__device__ __forceinline__ Place place(const DepthwiseParams& p, int local, int spot) {
  int id = blockIdx.x;
  const int c_tiles = (p.y_c + C_BLOCK * VEC - 1) / (C_BLOCK * VEC), c_tile = id % c_tiles;
  id /= c_tiles;
  const int tile_w = id % p.tiles_w;
  id /= p.tiles_w;
  const int tile_h = id % p.tiles_h;
  id /= p.tiles_h;
  const int phase_w = id % p.phases_w;
  id /= p.phases_w;
  const int phase_h = id % p.phases_h;
  Place at;
  at.local = local, at.channel = (c_tile * C_BLOCK + local) * VEC, at.image = id / p.phases_h;
  at.row = phase_h + p.step_h * (tile_h * H_BLOCK + spot / W_BLOCK) * TH;
  at.col = phase_w + p.step_w * (tile_w * W_BLOCK + spot % W_BLOCK) * TW;
  return at;
}

// The block's weights and vectors as FP32: [part][tap][chunk][PART]; taps from TAPS on are bias, slope, scale and shift.
__device__ __forceinline__ u32 staged(u32 base, int part, int tap, int local) {
  return base + part * PART_BYTES + (tap * C_BLOCK + local) * (PART * 4);
}
__device__ __forceinline__ void put(u32 at, const float* v) {
  if (PART == 4)
    sts_128(at, make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])));
  else
    sts_32(at, __float_as_uint(v[0]));
}
__device__ __forceinline__ void get(u32 at, float (&v)[4]) {
  const uint4 bits = lds_128(at);
  v[0] = __uint_as_float(bits.x), v[1] = __uint_as_float(bits.y);
  v[2] = __uint_as_float(bits.z), v[3] = __uint_as_float(bits.w);
}
__device__ __forceinline__ void get(u32 at, float (&v)[1]) { v[0] = __uint_as_float(lds_32(at)); }

__device__ __forceinline__ void stage_weights(const DepthwiseParams& p, int channel0, u32 base) {
  for (int i = threadIdx.x; i < TAPS * C_BLOCK; i += THREADS) {
    const int tap = i / C_BLOCK, local = i % C_BLOCK, channel = channel0 + local * VEC;
    float v[VEC] = {};
    if (channel < p.w_pitch) load_vec(p.w + tap * p.w_pitch + channel, v);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) put(staged(base, part, tap, local), v + part * PART);
  }
#pragma unroll
  for (int row = 0; row < VECTORS; ++row) {
    if (row == 1 && ACT != ACT_PRELU) continue;
    for (int i = threadIdx.x; i < C_BLOCK * PARTS; i += THREADS) {
      const int channel = channel0 + i * PART;
      const float* from = (row ? p.slope : p.bias) + channel;
#if AFFINE
      if (row > 1) from = (row == 2 ? p.scales : p.shifts) + channel;
#endif
      float v[PART] = {};
      if (channel < p.w_pitch) {
        if (PART == 4) {
          const uint4 bits = ldg_128(from);
          v[0] = __uint_as_float(bits.x), v[PART / 4] = __uint_as_float(bits.y);
          v[PART / 2] = __uint_as_float(bits.z), v[PART - 1] = __uint_as_float(bits.w);
        } else {
          v[0] = *from;
        }
      }
      put(staged(base, i % PARTS, TAPS + row, i / PARTS), v);
    }
  }
  __syncthreads();
}

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

template <class Bits, class Source>  // what one access brings, and how it becomes VEC channels
__device__ __forceinline__ void multiply(const DepthwiseParams& p, const Place& at, u32 weights, float (&acc)[TH][TW][VEC]) {
  const int channel = MULTIPLIED ? at.channel / p.multiplier : at.channel, chunk = channel & ~(VEC - 1);
  Source source;
  if (MULTIPLIED) source.init(at.channel, p.multiplier);
  const int h0 = at.row * p.stride_h - p.pad_t, w0 = at.col * p.stride_w - p.pad_l;
  u32 inside = 0;
#pragma unroll
  for (int j = 0; j < COLS; ++j) inside |= static_cast<u32>(static_cast<u32>(w0 + j * p.dil_w) < static_cast<u32>(p.w_in)) << j;
  const __half* from = p.x + p.in.at(at.image, chunk, 0);
  const int column = p.dil_w * p.in.pixel;

  for (int i = 0; i < ROWS; ++i) {
    const int h = h0 + i * p.dil_h;
    if (static_cast<u32>(h) >= static_cast<u32>(p.h)) continue;
    const int offset = (h * p.w_in + w0) * p.in.pixel;
    Bits x[COLS];
#pragma unroll
    for (int j = 0; j < COLS; ++j) x[j] = load_if(inside >> j & 1, from + (offset + j * column), source);
    if (MULTIPLIED) {
#pragma unroll
      for (int j = 0; j < COLS; ++j) x[j] = source.apply(x[j]);
    }
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      float v[COLS][PART];
#pragma unroll
      for (int j = 0; j < COLS; ++j) unpack_part(x[j], part, v[j]);
#pragma unroll
      for (int a = 0; a < TH; ++a) {
        const int r = i - a * E_H;  // the filter row through which this input row enters output row a
        if (static_cast<u32>(r) >= R) continue;
#pragma unroll
        for (int s = 0; s < S; ++s) {
          float w[PART];
          get(staged(weights, part, r * S + s, at.local), w);
#pragma unroll
          for (int b = 0; b < TW; ++b)
#pragma unroll
            for (int c = 0; c < PART; ++c) acc[a][b][part * PART + c] += w[c] * v[b * E_W + s][c];
        }
      }
    }
  }
}

#if TENSOR
static_assert(VEC == 8 && TW == 8 && !MULTIPLIED, "a T's 8 columns, and 8 channels, each of its own input channel");
constexpr int STEPS = (7 * E_W + S + 15) / 16;  // products of a filter row, of 16 pixels each
// The patch of input, in dynamic shared memory: [channel][row][8 columns], and 64 bytes behind each 8 channels. Eight T beside
// each other, in a row or past its end, begin in eight different 16 bytes of the banks' 128.
constexpr int BH = TH * E_H, PITCH = E_W | 1;  // rows from a T to the next; 16 bytes
constexpr int PATCH_H = (H_BLOCK * TH - 1) * E_H + R, PATCH_W = (W_BLOCK * 8 - 1) * E_W + S;
constexpr int UNITS = (W_BLOCK - 1) * E_W + 2 * STEPS;  // 8 columns each
constexpr int ROW = (UNITS + E_W - 1) / E_W * PITCH, BAND = BH * ROW + ((W_BLOCK * PITCH - BH * ROW) % 8 + 8) % 8;
constexpr int PLANE = (PATCH_H + BH - 1) / BH * BAND * 16, CHUNK = 8 * PLANE + 64;  // bytes
// Filters are words [channel][t + 2][r] of taps t and t + 1 of filter row r, for t = -2...S, zeros where there are none. Two
// rows are loaded at once; an odd number of such loads' bytes lies between one t and the next, and between channels: no bank is
// met twice.
constexpr int ROW_PAIRS = (R + 1) / 2, FILTER = ((S + 3) * (ROW_PAIRS | 1) | 1) * 8;  // bytes of a channel

__device__ __forceinline__ void stage_filters(const DepthwiseParams& p, int channel0, u32 base) {
  constexpr int CHANNELS = C_BLOCK * 8, ALL = (S + 3) * ROW_PAIRS * 2;
  for (int i = threadIdx.x; i < CHANNELS * ALL; i += THREADS) {
    const int c = i % CHANNELS, r = i / CHANNELS % (ROW_PAIRS * 2), t = i / CHANNELS / (ROW_PAIRS * 2) - 2;
    const int channel = channel0 + c;
    const __half* row = p.w + r * S * p.w_pitch + channel;
    const bool known = channel < p.w_pitch && r < R;
    const u32 lo = known && t >= 0 && t < S ? __half_as_ushort(row[t * p.w_pitch]) : 0;
    const u32 hi = known && t >= -1 && t < S - 1 ? __half_as_ushort(row[(t + 1) * p.w_pitch]) : 0;
    sts_32(base + c * FILTER + (t + 2) * (ROW_PAIRS | 1) * 8 + r * 4, lo | hi << 16);
  }
}

// 8 pixels beside each other of 8 channels at a time, transposed.
__device__ __forceinline__ void stage_patch(const DepthwiseParams& p, const Place& first, u32 base) {
  const int h0 = first.row * p.stride_h - p.pad_t, w0 = first.col * p.stride_w - p.pad_l;
  for (int i = threadIdx.x; i < PATCH_H * UNITS * C_BLOCK; i += THREADS) {
    const int chunk = i % C_BLOCK, unit = i / C_BLOCK % UNITS, y = i / C_BLOCK / UNITS, channel = first.channel + chunk * 8;
    const int h = h0 + y * p.dil_h;
    const bool known = channel < p.k && static_cast<u32>(h) < static_cast<u32>(p.h);
    const __half* from = p.x + p.in.at(first.image, channel, 0);
    uint4 x[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int w = w0 + (unit * 8 + n) * p.dil_w;
      const bool inside = known && unit * 8 + n < PATCH_W && static_cast<u32>(w) < static_cast<u32>(p.w_in);
      x[n] = ldg_128_if(inside, from + (h * p.w_in + w) * p.in.pixel);
    }
    const u32 at = base + chunk * CHUNK + (y / BH * BAND + y % BH * ROW + unit / E_W * PITCH + unit % E_W) * 16;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      u32 v[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 &a = x[2 * n], &b = x[2 * n + 1];
        const u32 of_a = c < 2 ? a.x : c < 4 ? a.y : c < 6 ? a.z : a.w, of_b = c < 2 ? b.x : c < 4 ? b.y : c < 6 ? b.z : b.w;
        v[n] = __byte_perm(of_a, of_b, c % 2 ? 0x7632 : 0x5410);
      }
      sts_128(at + c * PLANE, make_uint4(v[0], v[1], v[2], v[3]));
    }
  }
}

// Sums [channel][row of T][place in a fragment] of the warp's 16 T: of T g and g + 8 columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void multiply_bands(u32 patch, int spot0, int chunk, u32 filters, float (&acc)[8][TH][4]) {
  const int lane = threadIdx.x % 32, spot = min(spot0 + lane % 16, SPOTS - 1);  // whose rows this lane addresses
  patch += chunk * CHUNK + (spot / W_BLOCK * BAND + spot % W_BLOCK * PITCH + lane / 16) * 16;
  filters += chunk * 8 * FILTER;
  int tap[STEPS][2];
#pragma unroll
  for (int i = 0; i < 2 * STEPS; ++i)
    tap[i / 2][i % 2] = (min(max(8 * i + lane % 4 * 2 - E_W * (lane / 4), -2), S) + 2) * (ROW_PAIRS | 1) * 8;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    u32 b[ROW_PAIRS * 2][STEPS][2];
#pragma unroll
    for (int i = 0; i < ROW_PAIRS * STEPS * 2; ++i) {
      const int pair = i / 2 / STEPS, step = i / 2 % STEPS;
      const uint2 two = lds_64(filters + tap[step][i % 2] + c * FILTER + pair * 8);
      b[2 * pair][step][i % 2] = two.x, b[2 * pair + 1][step][i % 2] = two.y;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int unit = 2 * step, slot = i / BH * BAND + i % BH * ROW + unit / E_W * PITCH + unit % E_W;
        const uint4 x = ldmatrix_x4(patch + c * PLANE + slot * 16);
#pragma unroll
        for (int a = 0; a < TH; ++a) {
          const int r = i - a * E_H;
          if (r >= 0 && r < R) mma_16816(acc[c][a], x, b[r][step][0], b[r][step][1]);
        }
      }
    }
  }
}

// A thread's outputs where the input is not finite, of which a band spoils those that do not read it.
__device__ __noinline__ void multiply_taps(const DepthwiseParams& p, const Place& at, float (&acc)[TH][OUT_W][VEC]) {
  const __half* from = p.x + p.in.at(at.image, at.channel, 0);
  for (int i = 0; i < TH * OUT_W; ++i) {
    float sums[VEC] = {};
    const int h0 = (at.row + i / OUT_W * p.step_h) * p.stride_h - p.pad_t;
    const int w0 = (at.col + i % OUT_W * p.step_w) * p.stride_w - p.pad_l;
    for (int tap = 0; tap < R * S; ++tap) {
      const int h = h0 + tap / S * p.dil_h, w = w0 + tap % S * p.dil_w;
      if (static_cast<u32>(h) >= static_cast<u32>(p.h) || static_cast<u32>(w) >= static_cast<u32>(p.w_in)) continue;
      float x[VEC], of[VEC];
      load_vec(from + (h * p.w_in + w) * p.in.pixel, x);
      load_vec(p.w + tap * p.w_pitch + at.channel, of);
#pragma unroll
      for (int c = 0; c < VEC; ++c) sums[c] += of[c] * x[c];
    }
#pragma unroll
    for (int a = 0; a < TH; ++a)
#pragma unroll
      for (int b = 0; b < OUT_W; ++b)
#pragma unroll
        for (int c = 0; c < VEC; ++c)
          if (i == a * OUT_W + b) acc[a][b][c] = sums[c];
  }
}
#endif

// Bias, residual and activation in FP32, one rounding.
__device__ __forceinline__ void finish_pixels(const DepthwiseParams& p, const Place& at, u32 weights,
                                              const float (&acc)[TH][OUT_W][VEC]) {
  float bias[VEC], slope[VEC];
  Tail tail[VEC];
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    float v[PART] = {};
    get(staged(weights, part, TAPS, at.local), v);
#pragma unroll
    for (int c = 0; c < PART; ++c) bias[part * PART + c] = v[c];
    if (ACT == ACT_PRELU) get(staged(weights, part, TAPS + 1, at.local), v);
#pragma unroll
    for (int c = 0; c < PART; ++c) slope[part * PART + c] = v[c];
    if (AFFINE) get(staged(weights, part, TAPS + 2, at.local), v);
#pragma unroll
    for (int c = 0; c < PART; ++c) tail[part * PART + c].scale = v[c];
    if (AFFINE) get(staged(weights, part, TAPS + 3, at.local), v);
#pragma unroll
    for (int c = 0; c < PART; ++c) tail[part * PART + c].shift = v[c];
  }
#pragma unroll
  for (int a = 0; a < TH; ++a) {
    const int row = at.row + a * p.step_h;
    if (row >= p.p) break;
    const int pixel = p.first + row * p.row_pixels + at.col * p.column_pixels, step = p.step_w * p.column_pixels;
    const long long to = p.out.at(at.image, at.channel, pixel);
    float added[OUT_W][VEC] = {};
    if (RES) {  // the whole row before its first store, which may be to the same bytes
      const long long from = p.added.at(at.image, at.channel, pixel);
#pragma unroll
      for (int b = 0; b < OUT_W; ++b)
        if (at.col + b * p.step_w < p.q) load_vec(p.residual + from + b * step * p.added.pixel, added[b]);
    }
#pragma unroll
    for (int b = 0; b < OUT_W; ++b) {
      if (at.col + b * p.step_w >= p.q) break;
      float v[VEC];
#pragma unroll
      for (int c = 0; c < VEC; ++c) {
        v[c] = finish<ACT, RES>(p, acc[a][b][c] + bias[c], added[b][c], slope[c], tail[c]);
        if (at.channel + c >= p.k) v[c] = 0.f;  // padded channels stay zero
      }
      store_vec(p.y + to + b * step * p.out.pixel, v, p.nonfinite);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_depthwise(const __grid_constant__ DepthwiseParams p) {
  release_next_launch();
  __shared__ __align__(16) char shared[PARTS * PART_BYTES];
  const u32 weights = smem_u32(shared);
  const int t = threadIdx.x;
#if TENSOR
  extern __shared__ __align__(16) char patch[];
  __shared__ __align__(8) char filters[C_BLOCK * 8 * FILTER];
  const Place first = place(p, 0, 0);
  stage_filters(p, first.channel, smem_u32(filters));
  stage_weights(p, first.channel, weights);
  wait_for_previous_launch();
  stage_patch(p, first, smem_u32(patch));
  __syncthreads();
  const int chunk = t / 32 % C_BLOCK, spot0 = t / 32 / C_BLOCK * 16;
  float acc[8][TH][4] = {};
  multiply_bands(smem_u32(patch), spot0, chunk, smem_u32(filters), acc);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int spot = spot0 + t % 32 / 4 + 8 * half;
    Place at = place(p, chunk, spot);
    at.col += t % 4 * 2 * p.step_w;
    if (spot >= SPOTS || at.channel >= p.y_c || at.row >= p.p || at.col >= p.q) continue;
    float own[TH][OUT_W][VEC], zero = 0.f;
#pragma unroll
    for (int a = 0; a < TH; ++a)
#pragma unroll
      for (int i = 0; i < OUT_W * VEC; ++i) {
        own[a][i / VEC][i % VEC] = acc[i % VEC][a][2 * half + i / VEC];
        zero += 0.f * own[a][i / VEC][i % VEC];
      }
    if (zero != 0.f && at.channel < p.k) multiply_taps(p, at, own);
    finish_pixels(p, at, weights, own);
  }
#else
  const Place at = place(p, VEC == 8 ? t % C_BLOCK : t / SPOTS, VEC == 8 ? t / C_BLOCK : t % SPOTS);
  stage_weights(p, at.channel - at.local * VEC, weights);
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
  finish_pixels(p, at, weights, acc);
#endif
}
