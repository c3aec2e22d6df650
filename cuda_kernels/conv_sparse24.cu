// conv_sparse24: implicit-GEMM convolution with 2:4 sparse weights on mma.sp.m16n8k32, FP16 in and out, FP32 accumulate.
//
//             N: pixels                   A (weights)  kept values in fragment order, half the bytes of dense: one
//           +-----------+                              16-byte load per lane feeds 32 of K
//           |  X  64xBN |                 E (metadata) one 32-bit word per lane and 64 of K: lanes t = 0, 1 hold the
//   +-------+-----------+                              codes of the first k32 step, lanes t = 2, 3 of the second
//   |W BMx32|  Y BMxBN  |  M: channels    B (pixels)   as in conv_dense; ldmatrix.x4 reads 8 pixels x 32 channels
//   |E BMx4 |           |
//   +-------+-----------+
//
// The trick: weights are operand A, the only one that may be sparse, and selectors 0 and 1 read one metadata load twice.
//
// X_BYTES: a stage has 128 of K, whose bytes lie as those of 64 halfs would, and a step 64. A word of metadata describes 32 columns of
// one row, so a lane has a word for each step.
#include "implicit_gemm.cuh"

static_assert(BK == 64, "a metadata word covers two k32 steps");
static_assert(MT % 2 == 0 || BM == 16, "a warp has whole pairs of 16-row tiles, or the block has but one tile");

struct SparseProduct {
  static constexpr int A_TILE = 2 * 512;  // bytes of one 16-row tile per stage: two k32 steps of kept values
#if X_BYTES
  static constexpr int WORDS = 2, E_PAIR = 32 * 16;  // of metadata per lane, tile and stage; bytes of those of two tiles
#else
  static constexpr int E_PAIR = 32 * 8;   // metadata of two: a lane's words lie beside each other, one load brings both
#endif
  // Where a stage takes longer than L2, metadata comes straight to registers, a stage ahead: the port of shared memory, which
  // holds these tiles back, sees it once or twice instead of three times. A block of 64 rows and 4 warps would wait for it; so
  // would those of other architectures that have more than two stages (benchmarks/NOTES.md).
  static constexpr bool LARGE = MT == 4 && BM >= 128;
#if X_BYTES
  static constexpr bool DIRECT = false;
#else
  static constexpr bool DIRECT = LARGE && (STAGES == 2 || __CUDA_ARCH__ == 800 || (__CUDA_ARCH__ == 1000 && BM == 128));
#endif
  static constexpr int E_BYTES = DIRECT ? 0 : (BM + 31) / 32 * E_PAIR;
  static constexpr int E_AT = BM / 16 * A_TILE, B_AT = E_AT + E_BYTES;
  static constexpr int PARTS = NT >= 4 ? 2 : 1, PART = NT / PARTS;  // of a k32 step, along pixels: fewer registers hold pixels
  static constexpr int STEPS = 2 * PARTS;
  static constexpr bool LAST_TURN_APART = MT * NT < 32;
  // Whether copies lie apart, weights early in a turn and pixels late: a third stage gives them time to arrive. Where this gains
  // was found by simulation (benchmarks/NOTES.md).
  static constexpr bool APART = LARGE && STAGES > 2 && !(IN_LINEAR || PRO || GATE || NORM) &&
                                (__CUDA_ARCH__ == 900 ? BM == 128 && NT == 8 :
                                 THREADS == 256 && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 1000));
  // Beside split-K's sums ptxas orders the loop of 128x256 otherwise: in the others' order it falls behind CUTLASS's.
  static constexpr bool SUMMED = SPLIT == 1 && __CUDA_ARCH__ == 800;
  static constexpr Turn TURN = !APART      ? Turn{1, 1, 1, 1, 2, LARGE ? 1u << (8 + STEPS - 1) : (1u << STEPS) - 1}
                               : BN != 256 ? Turn{5, 9, 0, 3, 3, 5}
                               : SUMMED    ? Turn{6, 9, 2, 3, 3, 12}
                                           : Turn{6, 9, 0, 3, 3, 4};
  u32 a_at, e_at, b_at;  // of this lane in a stage, first step
  uint4 a[2][MT], b[2][PART];
#if X_BYTES
  u32 e[MT][WORDS], next_e[MT][WORDS];
#else
  u32 e[MT], next_e[MT];
#endif
  bool odd;  // of a tile of 16 rows: whether its words are the second ones of its pair
  Prologue chunk[2][4];
  const char* next_pair[DIRECT ? MT / 2 : 1];  // where this lane's words of the next stage are

  __device__ __forceinline__ SparseProduct(const ConvParams& p, int m0, int first) : odd(m0 / 16 % 2) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Matrix i of ldmatrix.x4: chunk i of the step's 32 channels, pixels 0-7.
    a_at = warp / WARPS_N * MT * A_TILE + lane * 16;
    e_at = E_AT + warp / WARPS_N * MT / 2 * E_PAIR + lane * (E_PAIR / 32);
    b_at = B_AT + swizzled<CHUNKS>(warp % WARPS_N * WN + (lane & 7), lane >> 3);
    if (DIRECT) {
#pragma unroll
      for (int i = 0; i < MT / 2; ++i) {  // past the last pair that one again, as WeightLoader does
        const long long pair = min((m0 / 16 + warp / WARPS_N * MT) / 2 + i, (p.m16 - 1) / 2);
        next_pair[i] = reinterpret_cast<const char*>(p.meta) + (pair * p.k_tiles + first) * E_PAIR + lane * 8;
      }
      next_metadata(false);
    }
  }

#if X_BYTES
  __device__ __forceinline__ void next_metadata(bool) {}
#else
  __device__ __forceinline__ void next_metadata(bool more) {
    if (!DIRECT) return;
#pragma unroll
    for (int i = 0; i < MT / 2; ++i) {
      if (more) next_pair[i] += E_PAIR;
      const uint2 words = ldg_64(next_pair[i]);
      next_e[2 * i] = words.x, next_e[2 * i + 1] = words.y;
    }
  }
#endif

  __device__ __forceinline__ void fetch(u32 stage, int step) {
    const int k = step / PARTS, part = step % PARTS;
    if (step == 0 && !DIRECT) {
#pragma unroll
      for (int i = 0; i < MT; i += 2) {
#if X_BYTES
        const uint4 words = lds_128(stage + e_at + i / 2 * E_PAIR);
        next_e[i][0] = MT == 1 && odd ? words.z : words.x, next_e[i][1] = MT == 1 && odd ? words.w : words.y;
        if (MT > 1) next_e[(i + 1) % MT][0] = words.z, next_e[(i + 1) % MT][1] = words.w;
#else
        const uint2 words = lds_64(stage + e_at + i / 2 * E_PAIR);
        next_e[i] = MT == 1 && odd ? words.y : words.x;
        if (MT > 1) next_e[i + 1] = words.y;
#endif
      }
    }
    if (part == 0) {
#pragma unroll
      for (int i = 0; i < MT; ++i) a[k][i] = lds_128(stage + a_at + i * A_TILE + k * 512);
#pragma unroll
      for (int i = 0; i < 4; ++i) chunk[k][i].load(stage + B_AT + B_BYTES, k * 4 + i);
    }
    // A k32 step is four chunks: what it adds to the chunk, the swizzle's XOR leaves to an XOR, for stages begin at whole rows.
#pragma unroll
    for (int j = 0; j < PART; ++j)
      b[step % 2][j] = ldmatrix_x4(((stage + b_at) ^ k * 64) + (part * PART + j) * 8 * CHUNKS * 16);
  }

  __device__ __forceinline__ void multiply(const ConvParams& p, int step, float (&acc)[MT][NT][4]) {
    const int k = step / PARTS, part = step % PARTS;
    if (step == 0) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#if X_BYTES
        e[i][0] = next_e[i][0], e[i][1] = next_e[i][1];
#else
        e[i] = next_e[i];
#endif
      }
    }
#pragma unroll
    for (int j = 0; j < PART; ++j) {
      uint4 v = b[step % 2][j];
      v.x = chunk[k][0](p, v.x), v.y = chunk[k][1](p, v.y), v.z = chunk[k][2](p, v.z), v.w = chunk[k][3](p, v.w);
#pragma unroll
      for (int i = 0; i < MT; ++i) {
#if X_BYTES
        mma_sp_16864_bytes<X_BYTES == 2>(acc[i][part * PART + j], a[k][i], v, e[i][k]);
#else
        if (k == 0)
          mma_sp_16832<0>(acc[i][part * PART + j], a[k][i], v, e[i]);
        else
          mma_sp_16832<1>(acc[i][part * PART + j], a[k][i], v, e[i]);
#endif
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) conv_sparse24(const __grid_constant__ ConvParams p) {
  convolve<SparseProduct>(p);
}
