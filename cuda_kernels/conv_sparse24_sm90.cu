// conv_sparse24_sm90: conv_dense_sm90 on wgmma.sp.m64nNk32, for 2:4 weights, which go from L2 to registers.
//
//   A (weights)    of 64 rows, a tap and 32 channels, a k-step, the 16 values that are kept: 512 bytes of each warp's 16 rows, in
//                  the order of the fragments of mma_16816
//   E (metadata)   of both k-steps of 64 channels 8 bytes beside each other, which lanes t and t + 2 read
//
// The trick: the port of shared memory would bound tiles whose weights pass it twice, so that they never do. Weights of BATCH times
// 64 channels are in registers while those of the next BATCH are on their way there: all together, for ptxas counts them on one
// scoreboard, and who waits for one load waits for all. None goes to a register in flight. They are asked for ahead of the copies to
// the stage that is left then, behind which they would wait in L2's queue. Each step is selector 0, which has witnesses.
// WEIGHTS_STAY 1: all of K is BATCH times 64 channels of a tap, and a block's tiles have the same rows: loaded once.
#include "addresses.cuh"
#include "tma_gemm.cuh"
#ifndef WEIGHTS_STAY
#define WEIGHTS_STAY 0
#endif

struct SparseProduct {
  static constexpr int A_BYTES = 64 * 64, E_BYTES = 512, ARRIVING = 0;  // of 64 rows and 64 channels of a tap
  static constexpr int RING = WEIGHTS_STAY ? BATCH : 2 * BATCH, UNROLLED = RING / TAPS;  // stages
  static constexpr bool LOADS = true, RESIDENT = WEIGHTS_STAY;
  static_assert(BATCH % TAPS == 0, "whole stages");
  const char* values[OWN];
  const char* metadata[OWN];
  int last;  // 64 channels of the share
  uint4 a[RING][2][OWN];
  uint2 e[RING][OWN];

  __device__ __forceinline__ void begin(const ConvParams& p, int m64, const Share& share) {
    const int warp = THREAD / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {  // rows past the last are never stored: these are read again, for metadata must be legal
      const long long at = (static_cast<long long>(min(m64 + i, p.m16 / 4 - 1)) * p.k_tiles + share.first) * TAPS;
      values[i] = reinterpret_cast<const char*>(p.w) + at * A_BYTES + THREAD * 16;
      metadata[i] = reinterpret_cast<const char*>(p.meta) + at * E_BYTES + warp * 128 + lane / 4 * 16 + lane % 2 * 8;
    }
    last = share.count * TAPS - 1;
#pragma unroll
    for (int slot = 0; slot < BATCH; ++slot) fetch(slot, slot);
  }

  __device__ __forceinline__ void fetch(int slot, int number) {
    const int at = min(number, last);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
#pragma unroll
      for (int step = 0; step < 2; ++step) a[slot][step][i] = ldg_128(values[i] + at * A_BYTES + step * (A_BYTES / 2));
      e[slot][i] = ldg_64(metadata[i] + at * E_BYTES);
    }
  }

  __device__ __forceinline__ void multiply(const Ring<SparseProduct>& ring, u32 turn, int, int count, float (&acc)[OWN][TILE_NT][4]) {
    for (int k0 = 0; k0 < count; k0 += UNROLLED) {
#pragma unroll
      for (int k = 0; k < UNROLLED; ++k, ++turn) {
        if (k0 + k == count) return;
        const u32 pixels = ring.stage(turn) + ring.B_AT;
        ring.wait_until_full(turn);
#pragma unroll
        for (int r = 0; r < TAPS; ++r) {
          const int slot = TAPS * k + r;
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const u32 at = pixels + r * TAP_BYTES + step * 64;
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < OWN; ++i)
#pragma unroll
              for (int image = 0; image < IMAGES; ++image)
                wgmma_sparse(sums_of(acc[i], image), a[slot][step][i], rows_of_128_bytes(at + image * IMAGE_BYTES),
                             step ? e[slot][i].y : e[slot][i].x);
            wgmma_commit();
            wgmma_wait<1>();
            if (!RESIDENT && slot % BATCH + step == 0)
#pragma unroll
              for (int next = slot + BATCH; next < slot + RING; ++next) fetch(next % RING, k0 * TAPS + next);
            if (r + step == 0 && k0 + k) ring.leave(turn - 1);
          }
        }
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER* CLUSTER_K, 1, 1) __launch_bounds__((TEAMS + 1) * 128, 1)
    conv_sparse24_sm90(const __grid_constant__ TmaParams p) {
  convolve_with_tma<SparseProduct>(p);
}
