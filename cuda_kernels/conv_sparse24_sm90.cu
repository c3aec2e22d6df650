// conv_sparse24_sm90: conv_dense_sm90 on wgmma.sp.m64nNk32, for 2:4 weights, which go from L2 to registers.
//
//   A (weights)    of 64 rows and 32 channels, a k-step, the 16 values that are kept: 512 bytes of each warp's 16 rows, in the order
//                  of the fragments of mma_16816
//   E (metadata)   64 bytes each, which lanes t and t + 2 read
//
// The trick: the port of shared memory would bound tiles whose weights pass it twice, so that they never do. RING k-steps of weights
// are in registers or on their way there; one is loaded anew as soon as its product has ended, never in flight. Each step is
// selector 0, which has witnesses.
#include "tma_gemm.cuh"

struct SparseProduct {
  static constexpr int A_BYTES = 64 * 64, E_BYTES = 512, ARRIVING = 0;
  static constexpr int STEPS = 2 * TAPS, UNROLLED = RING / STEPS;  // of a stage; stages
  static_assert(RING % STEPS == 0, "whole stages");
  const char* values[OWN];
  const char* metadata[OWN];
  int last;  // k-step of the share
  uint4 a[RING][OWN];
  u32 e[RING][OWN];

  __device__ __forceinline__ SparseProduct(const ConvParams& p, int m64, const Share& share) {
    const int warp = thread() / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {  // rows past the last are never stored: these are read again, for metadata must be legal
      const long long at = (static_cast<long long>(min(m64 + i, p.m16 / 4 - 1)) * p.k_tiles + share.first) * TAPS;
      values[i] = reinterpret_cast<const char*>(p.w) + at * A_BYTES + threadIdx.x % THREADS * 16;
      metadata[i] = reinterpret_cast<const char*>(p.meta) + at * E_BYTES + warp * 64 + lane / 4 * 8 + lane % 2 * 4;
    }
    last = share.count * STEPS - 1;
#pragma unroll
    for (int step = 0; step < RING - 1; ++step) fetch(step, step);
  }

  __device__ __forceinline__ void fetch(int slot, int step) {
    const int at = min(step, last);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      a[slot][i] = ldg_128(values[i] + at * (A_BYTES / 2));
      e[slot][i] = ldg_32(metadata[i] + at * (E_BYTES / 2));
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
        for (int step = 0; step < STEPS; ++step) {
          const int slot = STEPS * k + step;
          const u32 at = pixels + step / 2 * TAP_BYTES + step % 2 * 64;
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < OWN; ++i)
#pragma unroll
            for (int image = 0; image < IMAGES; ++image)
              wgmma_sparse(sums_of(acc[i], image), a[slot][i], rows_of_128_bytes(at + image * IMAGE_BYTES), e[slot][i]);
          wgmma_commit();
          wgmma_wait<1>();
          if (step == 0 && k0 + k) ring.leave(turn - 1);
          fetch((slot + RING - 1) % RING, k0 * STEPS + slot + RING - 1);
        }
      }
    }
  }
};

extern "C" __global__ void __cluster_dims__(CLUSTER* CLUSTER_K, 1, 1) __launch_bounds__((TEAMS + 1) * 128, 1)
    conv_sparse24_sm90(const __grid_constant__ ConvParams p) {
  convolve_with_tma<SparseProduct>(p);
}
