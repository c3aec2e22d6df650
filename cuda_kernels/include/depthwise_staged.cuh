// Part of conv_depthwise.cu, which defines the names and the compile-time values used here.
//
//   +--------------+   patch    all input pixels of the block in dynamic shared memory, [row][column][channel], by copies of 16
//   |  +---+---+   |            bytes that are all in flight at once: a block waits for memory once, while others compute
//   |  | T | T |   |   lanes    neighbours take a pixel's next channels, then the next T; T lie an odd number of pixels apart:
//   |  +---+---+   |            those of a warp meet no bank twice
//   +--------------+   thread   each input row once into registers, where it is FP32 for all taps and rows of T that need it
#pragma once

constexpr int PIXEL = C_BLOCK * VEC * 2, CHUNKS = PIXEL / 16;              // bytes of a pixel; copies
constexpr int TURN = PIXEL < 128 ? 128 / PIXEL : 1;                        // pixels that all banks hold
constexpr int BH = TH * E_H, BW = TW * E_W, PITCH = TURN > 1 ? BW | 1 : BW;  // pixels from a T to the next; with padding
constexpr int PATCH_H = (H_BLOCK * TH - 1) * E_H + R, PATCH_W = (W_BLOCK * TW - 1) * E_W + S;
constexpr int row_pitch(int pixels, int tries) {  // T past the end of a row of T go on in the next banks too, if they can
  return tries == 0 || (BH * pixels - W_BLOCK * PITCH) % TURN == 0 ? pixels : row_pitch(pixels + 1, tries - 1);
}
constexpr int ROW = row_pitch(PATCH_W / BW * PITCH + PATCH_W % BW, TURN - 1) * PIXEL;
constexpr int column_at(int column) { return (column / BW * PITCH + column % BW) * PIXEL; }

__device__ __forceinline__ void copy_patch(const DepthwiseParams& p, const Place& first, u32 base) {
  constexpr int LINE = PATCH_W * CHUNKS, LANES = LINE < THREADS ? LINE : THREADS, ROWS_AT_ONCE = THREADS / LANES;
  constexpr int TURNS = (PATCH_H + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const int t = threadIdx.x;
  if (t >= LANES * ROWS_AT_ONCE) return;
  const int h0 = first.row * p.stride_h - p.pad_t, w0 = first.col * p.stride_w - p.pad_l;
  for (int i = t % LANES; i < LINE; i += LANES) {
    const int column = i / CHUNKS, channel = first.channel + i % CHUNKS * 8, w = w0 + column * p.dil_w;
    const bool known = channel < p.k && static_cast<u32>(w) < static_cast<u32>(p.w_in);
    const __half* from = p.x + p.in.at(first.image, channel, w);
    const u32 to = base + t / LANES * ROW + column_at(column) + i % CHUNKS * 16;
    const int h = h0 + t / LANES * p.dil_h, row = ROWS_AT_ONCE * p.dil_h;
    const char* at = reinterpret_cast<const char*>(from) + 2ll * h * p.w_in * p.in.pixel;
    const int next = 2 * row * p.w_in * p.in.pixel;
#pragma unroll(TURNS <= 12 ? TURNS : 4)
    for (int n = 0; n < TURNS; ++n, at += next) {  // outside of the image nothing is read
      const int y = t / LANES + n * ROWS_AT_ONCE;
      const bool inside = known && static_cast<u32>(h + n * row) < static_cast<u32>(p.h);
      if (y < PATCH_H) cp_async_16(to + n * (ROWS_AT_ONCE * ROW), at, inside ? 16 : 0);
    }
  }
}

__device__ __forceinline__ void load_row(u32 at, float (&v)[COLS][VEC]) {
#pragma unroll
  for (int j = 0; j < COLS; ++j) {
    u32 bits[VEC / 2];
    if (VEC == 4) {
      const uint2 two = lds_64(at + column_at(j));
      bits[0] = two.x, bits[VEC / 2 - 1] = two.y;
    } else {
      bits[0] = lds_32(at + column_at(j));
    }
#pragma unroll
    for (int c = 0; c < VEC / 2; ++c) {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(bits + c));
      v[j][2 * c] = f.x, v[j][2 * c + 1] = f.y;
    }
  }
}

__device__ __forceinline__ void multiply_rows(u32 patch, u32 weights, int local, float (&acc)[TH][TW][VEC]) {
#pragma unroll(R <= 3 ? ROWS : 1)
  for (int i = 0; i < ROWS; ++i) {
    float v[COLS][VEC];
    load_row(patch + i * ROW, v);
#pragma unroll
    for (int a = 0; a < TH; ++a) {
      const int r = i - a * E_H;  // the filter row through which this input row enters output row a
      if (static_cast<u32>(r) >= R) continue;
#pragma unroll
      for (int s = 0; s < S; ++s) {
        float w[PART];
        get(staged(weights, 0, r * S + s, local), w);
#pragma unroll
        for (int b = 0; b < TW; ++b)
#pragma unroll
          for (int c = 0; c < VEC; ++c) acc[a][b][c] += w[c] * v[b * E_W + s][c];
      }
    }
  }
}

__device__ __forceinline__ void compute_staged(const DepthwiseParams& p, u32 weights, PixelSums& sums) {
  extern __shared__ __align__(16) char patch[];
  const int t = threadIdx.x, spot = t / C_BLOCK;
  const Place first = first_place(p), at = place(p, first, t % C_BLOCK, spot);
  wait_for_previous_launch();
  copy_patch(p, first, smem_u32(patch));
  cp_async_commit();
  stage_weights(p, first.channel, weights);
  cp_async_wait<0>();
  __syncthreads();
  if (at.channel >= p.y_c || at.row >= p.p || at.col >= p.q) return;
  float acc[TH][TW][VEC] = {};
  const u32 own = smem_u32(patch) + spot / W_BLOCK * BH * ROW + spot % W_BLOCK * PITCH * PIXEL + at.local * VEC * 2;
  multiply_rows(own, weights, at.local, acc);
  Watch watch;
  finish_pixels(p, at, weights, acc, watch, sums);
  watch.report(p.nonfinite);
}
