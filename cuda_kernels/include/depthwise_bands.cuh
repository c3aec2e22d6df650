// Part of conv_depthwise.cu, which defines the names and the compile-time values used here.
//
// On tensor cores (TENSOR), with stride 1, a filter row is a product, for each channel: 16 pixels of a row times a band matrix,
// whose column n has the filter row from pixel n on, give 8 outputs beside each other. Its 16 rows are 16 T of TH x 8 outputs,
// so that a row of input is loaded once for all rows of a T that need it. Of 16 products 7 or 3 count, with 7 or 3 taps: of
// Hopper's 1,366 per clock and SM still 598 and 256, where the FP32 pipe has 128. The block transposes its patch as it copies it,
// a warp sums the block's pixels of 8 channels, and outputs replace the patch, so that stores have the channels of several warps.
// Zeros of the band times infinity are NaN: a pixel that is NaN is summed anew, tap by tap.
#pragma once

static_assert(VEC == 8 && TW == 8 && !MULTIPLIED, "a T's 8 columns, and 8 channels, each of its own input channel");
static_assert(E_H == 1 && E_W == 1 && S <= 7 && SPOTS <= 16, "16 pixels hold what 8 outputs need, and a fragment all T");
constexpr int COLUMNS = W_BLOCK * 8;  // of the block's outputs
static_assert(32 % COLUMNS == 0 && H_BLOCK * TH * COLUMNS % 32 == 0, "a channel's threads store whole rows");
// The patch of input, in dynamic shared memory: [channel][row][8 columns], and part of 128 bytes behind each 8 channels. Eight
// T beside each other, in a row or past its end, begin in eight different 16 bytes of the banks' 128.
constexpr int PATCH_H = H_BLOCK * TH - 1 + R, PATCH_W = COLUMNS - 1 + S, UNITS = W_BLOCK + 1;  // units: 8 columns each
constexpr bool apart(int band) {
  for (int s = 0; s < SPOTS; ++s)
    for (int other = s / 8 * 8; other < s; ++other)
      if ((s / W_BLOCK * band + s % W_BLOCK - other / W_BLOCK * band - other % W_BLOCK) % 8 == 0) return false;
  return true;
}
constexpr int padded(int band) { return apart(band) ? band : padded(band + 1); }
constexpr int BAND = padded(TH * UNITS);  // from a T to the next below, in 16 bytes
constexpr int PLANE = (PATCH_H + TH - 1) / TH * BAND * 16, CHUNK = 8 * PLANE + 128 / C_BLOCK;  // bytes
// Filters are words of taps t and t + 1 of filter row r, for t = -1...S - 1, [channel][r / 4][t mod 8][r % 4]; zeros where there
// are none. Of the last rows one or two are not filled up to four. Behind them are four times the channel's bias: 16 bytes, which
// spread a warp's stores over all banks.
constexpr int FOURS = (R + 3) / 4, REST = R % 4 == 1 || R % 4 == 2 ? R % 4 : 4;  // loads of a channel; rows of the last one
constexpr int BIAS = (FOURS - 1) * 128 + REST * 32, FILTER = BIAS + 16;          // bytes before it; of a channel

// A thread's filter rows, each of a channel, and a channel's bias, between loading and storing: all are in flight at once.
struct Filters {
  static constexpr int CHANNELS = C_BLOCK * 8, COUNT = CHANNELS * FOURS * 4, EACH = COUNT / THREADS;
  u16 taps[EACH][S];
  float bias;
  __device__ __forceinline__ void load(const DepthwiseParams& p, int channel0) {
    const int own = channel0 + threadIdx.x;
    bias = threadIdx.x < CHANNELS && own < p.w_pitch ? p.bias[own] : 0.f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, r = i / 4 / CHANNELS * 4 + i % 4, channel = channel0 + i / 4 % CHANNELS;
      const u16* row = reinterpret_cast<const u16*>(p.w) + r * S * p.w_pitch + channel;
#pragma unroll
      for (int t = 0; t < S; ++t, row += p.w_pitch) taps[n][t] = channel < p.w_pitch && r < R ? *row : u16(0);
    }
  }
  __device__ __forceinline__ void store(u32 base) const {
    const u32 bits = __float_as_uint(bias);
    if (threadIdx.x < CHANNELS) sts_128(base + threadIdx.x * FILTER + BIAS, make_uint4(bits, bits, bits, bits));
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, four = i / 4 / CHANNELS, c = i / 4 % CHANNELS;
#pragma unroll
      for (int t = -1; t < 7; ++t) {
        const u32 lo = t >= 0 && t < S ? taps[n][t] : 0, hi = t < S - 1 ? taps[n][t + 1] : 0;
        const int rows = four == FOURS - 1 ? REST : 4;
        if (i % 4 < rows) sts_32(base + c * FILTER + four * 128 + ((t & 7) * rows + i % 4) * 4, lo | hi << 16);
      }
    }
  }
};

// 8 pixels beside each other of 8 channels: loaded, and stored transposed.
struct Unit {
  uint4 x[8];
  __device__ __forceinline__ void load(const DepthwiseParams& p, const __half* pixel, bool known, int w, u32 columns) {
#pragma unroll
    for (int n = 0; n < 8; ++n, pixel += p.dil_w * p.in.pixel)
      x[n] = ldg_128_if(known && static_cast<u32>(w + n * p.dil_w) < columns, pixel);
  }
  __device__ __forceinline__ void store(u32 at) const {
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
};

// As few rounds as have at most two or three units of a thread in flight: registers that sums take later.
__device__ __forceinline__ void stage_patch(const DepthwiseParams& p, const Place& first, u32 base) {
  constexpr int ITEMS = PATCH_H * UNITS, ROUND = TH > 4 ? 96 : 64, ROUNDS = (ITEMS + ROUND - 1) / ROUND;
  constexpr int AT_ONCE = (ITEMS + 32 * ROUNDS - 1) / (32 * ROUNDS);
  const int chunk = threadIdx.x % C_BLOCK, channel = first.channel + chunk * 8;
  const int h0 = first.row * p.stride_h - p.pad_t, w0 = first.col * p.stride_w - p.pad_l;
  const u32 rows = channel < p.k ? p.h : 0, columns = max(min(p.w_in, w0 + PATCH_W * p.dil_w), 0);
  const __half* from = p.x + p.in.at(first.image, channel, 0);
  base += chunk * CHUNK;
  for (int i0 = threadIdx.x / C_BLOCK; i0 < ITEMS; i0 += AT_ONCE * 32) {
    Unit units[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = i0 + n * 32, h = h0 + i / UNITS * p.dil_h, w = w0 + i % UNITS * 8 * p.dil_w;
      if (i < ITEMS) units[n].load(p, from + (h * p.w_in + w) * p.in.pixel, static_cast<u32>(h) < rows, w, columns);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const int i = i0 + n * 32, unit = i % UNITS, y = i / UNITS;
      if (i < ITEMS) units[n].store(base + (y * UNITS + y / TH * (BAND - TH * UNITS) + unit) * 16);
    }
  }
}

// Sums [channel][row of T][place in a fragment] of four channels: of T g and g + 8 columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void multiply_bands(u32 patch, u32 filters, float (&acc)[4][TH][4]) {
  const int lane = threadIdx.x % 32, spot = min(lane % 16, SPOTS - 1);  // whose rows this lane addresses
  patch += (spot / W_BLOCK * BAND + spot % W_BLOCK + lane / 16) * 16;
  // Of a lane's words of a filter row, 8 taps apart, one has taps: word `own`.
  const int first = lane % 4 * 2 - lane / 4, tap = first & 7, own = ((tap == 7 ? -1 : tap) - first) / 8;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 w[FOURS * 4];
#pragma unroll
    for (int i = 0; i < FOURS; ++i) {
      const int rows = i == FOURS - 1 ? REST : 4;
      const u32 at = filters + c * FILTER + i * 128 + tap * rows * 4;
      if (rows == 4) {
        const uint4 four = lds_128(at);
        w[4 * i] = four.x, w[4 * i + 1] = four.y, w[4 * i + 2] = four.z, w[4 * i + 3] = four.w;
      } else if (rows == 2) {
        const uint2 two = lds_64(at);
        w[4 * i] = two.x, w[4 * i + 1] = two.y;
      } else {
        w[4 * i] = lds_32(at);
      }
    }
    const Floats<4> bias = *static_cast<const Floats<4>*>(__cvta_shared_to_generic(filters + c * FILTER + BIAS));
#pragma unroll
    for (int i = 0; i < TH * 4; ++i) acc[c][i / 4][i % 4] = bias.v[i % 4];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const uint4 x = ldmatrix_x4(patch + c * PLANE + (i / TH * BAND + i % TH * UNITS) * 16);
#pragma unroll
      for (int a = 0; a < TH; ++a) {
        const int r = i - a;
        if (r >= 0 && r < R) mma_16816(acc[c][a], x, own == 0 ? w[r] : 0, own == 1 ? w[r] : 0);
      }
    }
  }
}

// Four channels of a thread's pixels of T `spot`.
__device__ __forceinline__ void load_residual(const DepthwiseParams& p, const Place& first, int part, int spot,
                                              uint2 (&added)[TH][2]) {
  const int column = spot % W_BLOCK * 8 + threadIdx.x % 4 * 2, channel = first.channel + part * 4;
#pragma unroll
  for (int i = 0; i < TH * 2; ++i) {
    const int h = first.row + (spot / W_BLOCK * TH + i / 2) * p.step_h, w = first.col + (column + i % 2) * p.step_w;
    if (spot < SPOTS && channel < p.y_c && h < p.p && w < p.q) {
      const int pixel = p.first + h * p.row_pixels + w * p.column_pixels;
      added[i / 2][i % 2] = *reinterpret_cast<const uint2*>(p.residual + p.added.at(first.image, channel, pixel));
    }
  }
}

// Whether NaN stays NaN, so that an output tells that a band spoilt its sum.
constexpr bool KEEPS_NAN = ACT != ACT_CLIP && ACT != ACT_HARD_SIGMOID && LAST != ACT_CLIP && LAST != ACT_HARD_SIGMOID;
static_assert(H_BLOCK * TH * COLUMNS * 8 <= 4 * PLANE, "outputs of four channels fit where their input was");

// What was summed, as FP16 [pixel of the patch][4 channels], into the planes of these channels: the warp needs them no more.
__device__ __forceinline__ void keep_outputs(const DepthwiseParams& p, const Place& first, u32 weights, int part, u32 to,
                                             const float (&acc)[4][TH][4]) {
  const int lane = threadIdx.x % 32;
  Ends ends[4];
  load_ends(weights, part, first.local, ends);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int spot = lane / 4 + 8 * half, column = spot % W_BLOCK * 8 + lane % 4 * 2;
    uint2 added[TH][2] = {};
    if (RES) {
      __syncwarp();  // no more loads in flight than registers allow
      load_residual(p, first, part, spot, added);
    }
#pragma unroll
    for (int a = 0; a < TH; ++a) {
      if (LONG_END) __syncwarp();  // row after row, so that registers suffice
      float v[8];  // of two pixels
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int c = i % 4;
        const float sum = acc[c][a][2 * half + i / 4];
        const __half2 two = reinterpret_cast<const __half2*>(&added[a][i / 4])[c / 2];
        const float residual = __half2float(c % 2 ? __high2half(two) : __low2half(two));
        v[i] = finish<ACT, RES>(p, sum, residual, ends[c].slope, ends[c].tail);
        if (!KEEPS_NAN && sum != sum) v[i] = sum;
      }
      const int row = spot / W_BLOCK * TH + a;
      if (spot < SPOTS) sts_128(to + (row * COLUMNS + column) * 8, pack(v));
    }
  }
}

// A pixel whose input is not finite, of which a band spoils outputs that do not read it.
__device__ __forceinline__ void sum_taps(const DepthwiseParams& p, const Place& at, u32 weights, Watch& watch, PixelSums& all) {
  const __half* from = p.x + p.in.at(at.image, at.channel, 0);
  float sums[1][1][VEC] = {};
  const int h0 = at.row * p.stride_h - p.pad_t, w0 = at.col * p.stride_w - p.pad_l;
#pragma unroll 1
  for (int tap = 0; tap < R * S; ++tap) {
    const int h = h0 + tap / S * p.dil_h, w = w0 + tap % S * p.dil_w;
    if (static_cast<u32>(h) >= static_cast<u32>(p.h) || static_cast<u32>(w) >= static_cast<u32>(p.w_in)) continue;
    float x[VEC], of[VEC];
    load_vec(from + (h * p.w_in + w) * p.in.pixel, x);
    load_vec(p.w + tap * p.w_pitch + at.channel, of);
#pragma unroll
    for (int c = 0; c < VEC; ++c) sums[0][0][c] += of[c] * x[c];
  }
  finish_pixels(p, at, weights, sums, watch, all);
}

__device__ __forceinline__ uint4 kept_output(u32 at) {
  const uint2 lo = lds_64(at), hi = lds_64(at + 4 * PLANE);
  return make_uint4(lo.x, lo.y, hi.x, hi.y);
}
__device__ __forceinline__ bool has_nan(const uint4& bits) {
  float v[8];
  unpack(bits, v);
  bool any = false;
#pragma unroll
  for (int c = 0; c < 8; ++c) any |= v[c] != v[c];
  return any;
}

// Neighbours take a pixel's next channels, so that an access meets few lines of memory, and then the row's next pixels. Several
// pixels at once, or one by one where a value is not finite or a channel is padding, which stays zero.
__device__ __forceinline__ void store_outputs(const DepthwiseParams& p, Place at, u32 weights, u32 from, PixelSums& sums) {
  constexpr int TURN = 32 / COLUMNS, TURNS = H_BLOCK * TH / TURN, AT_ONCE = TURNS % 7 ? 4 : 7;  // rows of a turn
  static_assert(TURNS % AT_ONCE == 0, "whole turns");
  const int spot = threadIdx.x / C_BLOCK, down = TURN * p.step_h;
  at.row += spot / COLUMNS * p.step_h, at.col += spot % COLUMNS * p.step_w;
  if (at.channel >= p.y_c || at.col >= p.q) return;
  const int known = p.k - at.channel, left = (p.p - at.row + down - 1) / down;
  from += spot * 8;
  __half* to = p.y + p.out.at(at.image, at.channel, p.first + at.row * p.row_pixels + at.col * p.column_pixels);
  const long long next = static_cast<long long>(down * p.row_pixels) * p.out.pixel;
  Watch watch;
#pragma unroll 1
  for (int n0 = 0; n0 < min(TURNS, left); n0 += AT_ONCE) {
    const int turns = min(TURNS, left) - n0;
    uint4 bits[AT_ONCE];
    Watch seen;
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      bits[n] = kept_output(from + n * 256);
      seen.see(bits[n]);
    }
    if (known >= 8 && !(*reinterpret_cast<const u32*>(&seen.sum) & 0x7fff7fffu)) {
#pragma unroll
      for (int n = 0; n < AT_ONCE; ++n) {
        sums.add({bits[n].x, bits[n].y, bits[n].z, bits[n].w}, n < turns);
        if (n < turns) stg_128(to + n * next, bits[n]);
      }
      from += AT_ONCE * 256, to += AT_ONCE * next;
      continue;
    }
    u32 mask[WORDS];
    mask_padding(known, mask);
#pragma unroll 1
    for (int n = 0; n < AT_ONCE && n < turns; ++n, from += 256, to += next) {
      uint4 one = kept_output(from);
      one = make_uint4(one.x & mask[0], one.y & mask[1], one.z & mask[2], one.w & mask[3]);
      if (has_nan(one)) {
        Place spoilt = at;
        spoilt.row += (n0 + n) * down;
        sum_taps(p, spoilt, weights, watch, sums);
      } else {
        watch.see(one);
        sums.add({one.x, one.y, one.z, one.w}, true);
        stg_128(to, one);
      }
    }
  }
  watch.report(p.nonfinite);
}

__device__ __forceinline__ void compute_bands(const DepthwiseParams& p, u32 weights, PixelSums& sums) {
  extern __shared__ __align__(16) char patch[];
  __shared__ __align__(16) char filters[C_BLOCK * 8 * FILTER];
  const Place first = first_place(p);
  Filters own_filters;
  Vectors vectors;
  own_filters.load(p, first.channel);
  vectors.load(p, first.channel);
  wait_for_previous_launch();
  stage_patch(p, first, smem_u32(patch));
  own_filters.store(smem_u32(filters));
  vectors.store(weights);
  const int chunk = threadIdx.x / 32, to_store = threadIdx.x % C_BLOCK;
  const Place own = place(p, first, chunk, 0);
  __syncthreads();
#pragma unroll 1
  for (int part = 0; part < 2; ++part) {
    const u32 planes = smem_u32(patch) + chunk * CHUNK + part * 4 * PLANE;
    float acc[4][TH][4];
    multiply_bands(planes, smem_u32(filters) + (chunk * 2 + part) * 4 * FILTER, acc);
    __syncwarp();
    keep_outputs(p, own, weights, part, planes, acc);
  }
  __syncthreads();
  store_outputs(p, place(p, first, to_store, 0), weights, smem_u32(patch) + to_store * CHUNK, sums);
}
