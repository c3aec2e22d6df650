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
constexpr int ROW = (UNITS + E_W - 1) / E_W * PITCH, BAND = BH * ROW + ((W_BLOCK * PITCH - BH * ROW) % 8 + 8) % 8;
constexpr int PLANE = (PATCH_H + BH - 1) / BH * BAND * 16, CHUNK = 8 * PLANE + 128 / C_BLOCK;  // bytes
// Filters are words [channel][t + 2][r] of taps t and t + 1 of filter row r, for t = -2...S, zeros where there are none. Two
// rows are loaded at once; an odd number of such loads' bytes lies between one t and the next, and between channels: no bank is
// met twice.
constexpr int ROW_PAIRS = (R + 1) / 2, FILTER = ((S + 3) * (ROW_PAIRS | 1) | 1) * 8;  // bytes of a channel

// A thread's filter rows, each of a channel, between loading and storing them: all its taps are in flight at once.
struct Filters {
  static constexpr int CHANNELS = C_BLOCK * 8, COUNT = CHANNELS * ROW_PAIRS * 2, EACH = (COUNT + THREADS - 1) / THREADS;
  u16 taps[EACH][S];
  __device__ __forceinline__ void load(const DepthwiseParams& p, int channel0) {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, r = i / 2 / CHANNELS * 2 + i % 2, channel = channel0 + i / 2 % CHANNELS;
      const u16* row = reinterpret_cast<const u16*>(p.w) + r * S * p.w_pitch + channel;
#pragma unroll
      for (int t = 0; t < S; ++t) taps[n][t] = i < COUNT && channel < p.w_pitch && r < R ? row[t * p.w_pitch] : u16(0);
    }
  }
  __device__ __forceinline__ void store(u32 base) const {
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int i = threadIdx.x + n * THREADS, r = i / 2 / CHANNELS * 2 + i % 2, c = i / 2 % CHANNELS;
      if (i >= COUNT) break;
#pragma unroll
      for (int t = -2; t <= S; ++t) {
        const u32 lo = t >= 0 && t < S ? taps[n][t] : 0, hi = t >= -1 && t < S - 1 ? taps[n][t + 1] : 0;
        sts_32(base + c * FILTER + (t + 2) * (ROW_PAIRS | 1) * 8 + r * 4, lo | hi << 16);
      }
    }
  }
};

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
__device__ __forceinline__ void multiply_taps(const DepthwiseParams& p, const Place& at, float (&acc)[TH][OUT_W][VEC]) {
  const __half* from = p.x + p.in.at(at.image, at.channel, 0);
#pragma unroll 1
  for (int i = 0; i < TH * OUT_W; ++i) {
    float sums[VEC] = {};
    const int h0 = (at.row + i / OUT_W * p.step_h) * p.stride_h - p.pad_t;
    const int w0 = (at.col + i % OUT_W * p.step_w) * p.stride_w - p.pad_l;
#pragma unroll 1
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

__device__ __forceinline__ void compute_bands(const DepthwiseParams& p, u32 weights) {
  extern __shared__ __align__(16) char patch[];
  __shared__ __align__(8) char filters[C_BLOCK * 8 * FILTER];
  const Place first = first_place(p);
  Filters own_filters;
  Vectors vectors;
  own_filters.load(p, first.channel);
  vectors.load(p, first.channel);
  wait_for_previous_launch();
  stage_patch(p, first, smem_u32(patch));
  own_filters.store(smem_u32(filters));
  vectors.store(weights);
  __syncthreads();
  const int t = threadIdx.x, chunk = t / 32 % C_BLOCK, spot0 = t / 32 / C_BLOCK * 16;
  float acc[8][TH][4] = {};
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
        zero += 0.f * own[a][i / VEC][i % VEC];
      }
    if (zero != 0.f && at.channel < p.k) multiply_taps(p, at, own);
    finish_pixels(p, at, weights, own);
  }
}
