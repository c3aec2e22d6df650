// The end of a tile whose results are stored as bytes, of whole numbers to which the activation has rounded: FP16 holds them, so
// movmatrix turns them as halfs; then a 16-byte store has 16 channels of a pixel. Included by conv.cuh.
#pragma once

// Byte address in the staging tile, [pixel][channel], of channels (m, m + 1) of pixel n.
__device__ __forceinline__ u32 staged_bytes(u32 staging, int m, int n) {
  if (BM == 16) return staging + n * 16 + m;
  return staging + swizzled<(BM > 16 ? BM / 16 : 2)>(n, m / 16) + m % 16;
}

// Two neighbouring bytes as halfs, 1024 (uint8) or 1152 (int8, whose sign bit is turned) too large: 0x6400 is 1024, and 0x6400 + v
// is 1024 + v for v up to 1023.
__device__ __forceinline__ u32 biased_halfs(u32 bytes) { return __byte_perm(Y_BYTES == 1 ? bytes ^ 0x8080 : bytes, 0x64, 0x4140); }

template <class Offsets>
__device__ __forceinline__ void byte_results(const ConvParams& p, float (&acc)[MT][NT][4], u32 staging, u32 rows, int m0,
                                             Offsets offset_of) {
  constexpr int ROW_CHUNKS = BM / 16, ALL = ROW_CHUNKS * BN;  // of 16 channels
  const int lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
  const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
  // The pipeline's last reads are over before its memory becomes the staging tile.
  cp_async_wait<0>();
  sync_threads();
  tabulate(rows, offset_of);
  sync_threads();
#if RES
  const char* residual = reinterpret_cast<const char*>(p.residual);
  for (int id = THREAD; id < ALL; id += THREADS) {
    const int n = id / ROW_CHUNKS, m = id % ROW_CHUNKS * 16, offset = residual_offset(p, static_cast<int>(lds_32(rows + n * 4)));
    const bool ok = offset >= 0 && m0 + m < output_rows(p);
    cp_async_16(staged_bytes(staging, m, n), residual + (ok ? offset + row_offset<true>(p, m0 + m) : 0), ok ? 16 : 0);
  }
  cp_async_commit();
  cp_async_wait<0>();
  sync_threads();
#endif

#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {  // rows g and g + 8 of each MMA tile
    const int m = warp_m + i * 8, channel = m0 + m + g;
    const bool real = real_row(p, channel);
    const float bias = real ? p.bias[channel] : 0.f, slope = ACT == ACT_PRELU && real ? p.slope[channel] : 0.f;
    const Tail tail = tail_of(p, real ? channel : 0);
#if RES_MULTIPLIED
    const float of_residual = real ? p.residual_multipliers[channel] : 0.f;
#else
    const float of_residual = 1.f;
#endif
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const u32 at = staged_bytes(staging, m + 2 * t, warp_n + j * 8 + g);
      float2 added = make_float2(0.f, 0.f);
      if (RES) {
        const u32 bits = movmatrix_trans(biased_halfs(lds_16(at)));  // of (pixel g, channels 2t, 2t+1), as the sums lie
        const float2 biased = __half22float2(*reinterpret_cast<const __half2*>(&bits));
        const float too_large = Y_BYTES == 1 ? 1152.f : 1024.f;
        added.x = (biased.x - too_large) * of_residual, added.y = (biased.y - too_large) * of_residual;
      }
      const float v0 = finish<ACT, RES>(p, acc[i / 2][j][i % 2 * 2] + bias, added.x, slope, tail);
      const float v1 = finish<ACT, RES>(p, acc[i / 2][j][i % 2 * 2 + 1] + bias, added.y, slope, tail);
      // 1536 + v, for v from -128 to 255, has v modulo 256 in its low byte.
      const __half2 h = __floats2half2_rn(1536.f + (real ? v0 : 0.f), 1536.f + (real ? v1 : 0.f));
      const u32 turned = movmatrix_trans(*reinterpret_cast<const u32*>(&h));
      sts_16(at, static_cast<u16>(__byte_perm(turned, 0, 0x4420)));
    }
  }
  sync_threads();
  char* y = reinterpret_cast<char*>(p.y);
  for (int id = THREAD; id < ALL; id += THREADS) {
    const int n = id / ROW_CHUNKS, m = id % ROW_CHUNKS * 16, offset = static_cast<int>(lds_32(rows + n * 4));
    if (offset >= 0 && m0 + m < output_rows(p)) stg_128(y + offset + row_offset<false>(p, m0 + m), lds_128(staged_bytes(staging, m, n)));
  }
}
