// Part of conv_depthwise.cu, which defines the names and the compile-time values used here.
//
// On tensor cores (TENSOR) a filter row is a product, for each channel: 16 pixels of a row times a band matrix, whose column n
// has the filter row from pixel n * E_W on, give 8 outputs beside each other. Its 16 rows are 16 T of TH x 8 outputs, so that a
// row of input is loaded once for all rows of a T that need it. Of 16 products 7 or 3 count, with 7 or 3 taps: of Hopper's
// 1,366 per clock and SM still 598 and 256, where the FP32 pipe has 128. The block transposes its patch as it copies it.
// Zeros of the band times infinity are NaN: a thread with a sum that is not finite sums its own outputs anew, tap by tap.
#pragma once

static_assert(VEC == 8 && TW == 8 && !MULTIPLIED, "a T's 8 columns, and 8 channels, each of its own input channel");
constexpr int STEPS = (7 * E_W + S + 15) / 16;  // products of a filter row, of 16 pixels each
// The patch of input, in dynamic shared memory: [channel][row][8 columns], and part of 128 bytes behind each 8 channels. Eight
// T beside each other, in a row or past its end, begin in eight different 16 bytes of the banks' 128.
constexpr int BH = TH * E_H, PITCH = E_W | 1;  // rows from a T to the next; 16 bytes
constexpr int PATCH_H = (H_BLOCK * TH - 1) * E_H + R, PATCH_W = (W_BLOCK * 8 - 1) * E_W + S;
constexpr int UNITS = (W_BLOCK - 1) * E_W + 2 * STEPS;  // 8 columns each
constexpr int ROW = (UNITS + E_W - 1) / E_W * PITCH;
constexpr bool apart(int band) {
  for (int s = 0; s < SPOTS; ++s)
    for (int other = s / 8 * 8; other < s; ++other)
      if ((s / W_BLOCK * band + s % W_BLOCK * PITCH - other / W_BLOCK * band - other % W_BLOCK * PITCH) % 8 == 0) return false;
  return true;
}
constexpr int padded(int band) { return apart(band) ? band : padded(band + 1); }
constexpr int BAND = padded(BH * ROW);
constexpr int PLANE = (PATCH_H + BH - 1) / BH * BAND * 16, CHUNK = 8 * PLANE + 128 / C_BLOCK;  // bytes
// Filters are words of taps t and t + 1 of filter row r, for t = -1...S - 1, [channel][r / 4][t mod 8][r % 4]; zeros where there
// are none. Of the last rows one or two are not filled up to four. Behind them are four times the channel's bias: 16 bytes, which
// spread a warp's stores over all banks.
constexpr int FOURS = (R + 3) / 4, REST = R % 4 == 1 || R % 4 == 2 ? R % 4 : 4;  // loads of a channel; rows of the last one
constexpr int BIAS = (FOURS - 1) * 128 + REST * 32, FILTER = BIAS + 16;          // bytes before it; of a channel
static_assert(S <= 7, "of words 8 taps apart one has taps");

// A thread's filter rows, each of a channel, and a channel's bias, between loading and storing: all are in flight at once.
struct Filters {
  static constexpr int CHANNELS = C_BLOCK * 8, COUNT = CHANNELS * FOURS * 4, EACH = (COUNT + THREADS - 1) / THREADS;
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
      for (int t = 0; t < S; ++t, row += p.w_pitch) taps[n][t] = i < COUNT && channel < p.w_pitch && r < R ? *row : u16(0);
    }
  }
  __device__ __forceinline__ void store(u32 base) const {
    const u32 bits = __float_as_uint(bias);
    if (threadIdx.x < CHANNELS) sts_128(base + threadIdx.x * FILTER + BIAS, make_uint4(bits, bits, bits, bits));
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, four = i / 4 / CHANNELS, c = i / 4 % CHANNELS;
      if (i >= COUNT) break;
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

// Two units of a thread are in flight at once.
__device__ __forceinline__ void stage_patch(const DepthwiseParams& p, const Place& first, u32 base) {
  constexpr int ITEMS = PATCH_H * UNITS, LANES = THREADS / C_BLOCK;
  const int chunk = threadIdx.x % C_BLOCK, channel = first.channel + chunk * 8;
  const int h0 = first.row * p.stride_h - p.pad_t, w0 = first.col * p.stride_w - p.pad_l;
  const u32 rows = channel < p.k ? p.h : 0, columns = max(min(p.w_in, w0 + PATCH_W * p.dil_w), 0);
  const __half* from = p.x + p.in.at(first.image, channel, 0);
  base += chunk * CHUNK;
  for (int i0 = threadIdx.x / C_BLOCK; i0 < ITEMS; i0 += 2 * LANES) {
    Unit units[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = i0 + n * LANES, h = h0 + i / UNITS * p.dil_h, w = w0 + i % UNITS * 8 * p.dil_w;
      if (i < ITEMS) units[n].load(p, from + (h * p.w_in + w) * p.in.pixel, static_cast<u32>(h) < rows, w, columns);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int i = i0 + n * LANES, unit = i % UNITS, y = i / UNITS;
      if (i < ITEMS) units[n].store(base + (y * ROW + y / BH * (BAND - BH * ROW) + unit + unit / E_W * (PITCH - E_W)) * 16);
    }
  }
}

// Sums [channel][row of T][place in a fragment] of the warp's 16 T: of T g and g + 8 columns 2 * (lane % 4) and the next.
__device__ __forceinline__ void multiply_bands(u32 patch, int spot0, int chunk, u32 filters, float (&acc)[8][TH][4]) {
  const int lane = threadIdx.x % 32, spot = min(spot0 + lane % 16, SPOTS - 1);  // whose rows this lane addresses
  patch += chunk * CHUNK + (spot / W_BLOCK * BAND + spot % W_BLOCK * PITCH + lane / 16) * 16;
  // Of a lane's words of a filter row, 8 taps apart, one has taps: word `own`.
  const int first = lane % 4 * 2 - E_W * (lane / 4), tap = first & 7, own = ((tap == 7 ? -1 : tap) - first) / 8;
  filters += chunk * 8 * FILTER;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
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
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int unit = 2 * step, slot = i / BH * BAND + i % BH * ROW + unit / E_W * PITCH + unit % E_W;
        const uint4 x = ldmatrix_x4(patch + c * PLANE + slot * 16);
#pragma unroll
        for (int a = 0; a < TH; ++a) {
          const int r = i - a * E_H;
          if (r >= 0 && r < R) mma_16816(acc[c][a], x, own == unit ? w[r] : 0, own == unit + 1 ? w[r] : 0);
        }
      }
    }
  }
}

// A thread's outputs where the input is not finite, of which a band spoils those that do not read it.
__device__ __forceinline__ void sum_taps(const DepthwiseParams& p, const Place& first, u32 weights, Watch& watch) {
  const __half* from = p.x + p.in.at(first.image, first.channel, 0);
#pragma unroll 1
  for (int i = 0; i < TH * OUT_W; ++i) {
    float sums[1][1][VEC];
    Place at = first;
    at.row += i / OUT_W * p.step_h, at.col += i % OUT_W * p.step_w;
    if (at.row >= p.p || at.col >= p.q) continue;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      float v[PART];
      get(staged(weights, part, TAPS, at.local), v);
#pragma unroll
      for (int c = 0; c < PART; ++c) sums[0][0][part * PART + c] = v[c];
    }
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
    finish_pixels(p, at, weights, sums, watch);
  }
}

// Whether the sums tell that a band spoilt them: outputs do where an activation keeps NaN, and nothing else was added to them.
constexpr bool KEEPS_NAN = !RES && ACT != ACT_CLIP && ACT != ACT_HARD_SIGMOID && LAST != ACT_CLIP && LAST != ACT_HARD_SIGMOID;

__device__ __forceinline__ void compute_bands(const DepthwiseParams& p, u32 weights) {
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
  const int t = threadIdx.x, chunk = t / 32 % C_BLOCK, spot0 = t / 32 / C_BLOCK * 16;
  __syncthreads();
  float acc[8][TH][4];
  multiply_bands(smem_u32(patch), spot0, chunk, smem_u32(filters), acc);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int spot = spot0 + t % 32 / 4 + 8 * half;
    Place at = place(p, first, chunk, spot);
    at.col += t % 4 * 2 * p.step_w;
    if (spot >= SPOTS || at.channel >= p.y_c || at.row >= p.p || at.col >= p.q) continue;
    float own[TH][OUT_W][VEC], zero = 0.f;
#pragma unroll
    for (int a = 0; a < TH; ++a)
#pragma unroll
      for (int i = 0; i < OUT_W * VEC; ++i) {
        own[a][i / VEC][i % VEC] = acc[i % VEC][a][2 * half + i / VEC];
        if (!KEEPS_NAN) zero += 0.f * own[a][i / VEC][i % VEC];
      }
    Watch watch;
    bool spoilt = zero != 0.f;
    if (!spoilt) {
      finish_pixels(p, at, weights, own, watch);
      spoilt = KEEPS_NAN && *reinterpret_cast<const u32*>(&watch.sum) & 0x7fff7fffu;
    }
    if (spoilt && at.channel < p.k) {
      watch = Watch();
      sum_taps(p, at, weights, watch);
    }
    watch.report(p.nonfinite);
  }
}
