// attention: softmax of the products of queries and keys, times values, in one launch; scores never leave registers.
//
//   S[i][j] = scale * sum over c of q[i][c] k[j][c] + bias[i][j]     P = softmax of each row of S     y[i][e] = sum over j of P v[j][e]
//
// A block takes 64 rows i of one head, a warp 16 of them; keys and values pass through shared memory 32 at a time, the next
// while these are worked on. The softmax is taken as they pass: what was summed under a smaller maximum is scaled down when a
// larger one comes. A warp's scores are laid out as the second product wants its left operand; the values, [j][e] as they lie
// in channels-last tensors, are transposed on their way from shared memory (movmatrix).
//
// Compile-time: DIM: c and e, padded to a multiple of 16; NORM: rows of q and k are divided by max(length, epsilon); ADDED: 1: an
// FP32 constant, 2: an FP16 tensor, 3: both are added to the scores; VECTOR: c and e lie one after the other, in vectors of 8
// that begin at multiples of 16 bytes.
#include "attention.cuh"

constexpr int THREADS = 128, ROWS = 64, KEYS = 32, LD = DIM + 8, STEPS = DIM / 16;
constexpr int QUERY_BYTES = ROWS * LD * 2, TILE_BYTES = KEYS * LD * 2;
static_assert(DIM % 16 == 0 && DIM >= 16 && DIM <= 128, "a warp holds 16 rows of y in registers");

struct AttentionParams {
  u32* nonfinite;
  const __half *q, *k, *v;
  const float* scale;  // [heads]
  const float* bias;   // times log2 e; null without, as is mask
  const __half* mask;
  __half* y;
  Operand q_at, k_at, v_at, y_at, bias_at, mask_at;
  int heads, tiles;          // blocks of a head
  int rows, columns;         // how many i and j there are
  int inner, width;          // how many c and e
  int padding;               // zeros behind the last head's e
  float epsilon;
};

__device__ __forceinline__ float most_of_quad(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ u32 halves(float low, float high) {
  const __half2 h = __floats2half2_rn(low, high);
  return *reinterpret_cast<const u32*>(&h);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ AttentionParams p) {
  release_next_launch();
  extern __shared__ __align__(16) unsigned char shared[];
  const u32 queries = smem_u32(shared), ring = queries + QUERY_BYTES;  // [64][LD]; two stages of keys, then values
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int first = blockIdx.x % p.tiles * ROWS, head = blockIdx.x / p.tiles % p.heads, batch = blockIdx.x / p.tiles / p.heads;
  const __half *q = p.q + p.q_at.at(batch, head), *k = p.k + p.k_at.at(batch, head), *v = p.v + p.v_at.at(batch, head);
  wait_for_previous_launch();

  const long long row_at = static_cast<long long>(first) * p.q_at.row;
  load_tile<ROWS, DIM, LD, THREADS, VECTOR>(queries, q + row_at, p.q_at.row, p.q_at.inner, p.rows - first, p.inner);
  auto load = [&](int j) {
    const u32 to = ring + j / KEYS % 2 * 2 * TILE_BYTES;
    const long long at = j;
    if (j < p.columns) {
      load_tile<KEYS, DIM, LD, THREADS, VECTOR>(to, k + at * p.k_at.row, p.k_at.row, p.k_at.inner, p.columns - j, p.inner);
      load_tile<KEYS, DIM, LD, THREADS, VECTOR>(to + TILE_BYTES, v + at * p.v_at.row, p.v_at.row, p.v_at.inner, p.columns - j,
                                                p.width);
    }
    cp_async_commit();
  };
  load(0);

  const float scale = p.scale[head] * LOG2_E;
  const int row[2] = {first + warp * 16 + g, first + warp * 16 + g + 8};  // of this thread
  // Scores are times log2 e from the start: a weight is 2^(score - most), and a mask of -1e9 or less cannot overflow on the way.
  float y[2 * STEPS][4] = {}, most[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {}, of_row[2] = {scale, scale};
  for (int j0 = 0; j0 < p.columns; j0 += KEYS) {
    cp_async_wait<0>();
    __syncthreads();
    load(j0 + KEYS);
    const u32 keys = ring + j0 / KEYS % 2 * 2 * TILE_BYTES, values = keys + TILE_BYTES;

    // ---- scores of 16 rows and 32 keys
    float s[KEYS / 8][4] = {}, of_q[2] = {}, of_k[KEYS / 8] = {};
#pragma unroll
    for (int c = 0; c < STEPS; ++c) {
      const uint4 a = square<LD, true>(queries + (warp * 16 * LD + c * 16) * 2);
      if (NORM) of_q[0] += squares(a.x) + squares(a.z), of_q[1] += squares(a.y) + squares(a.w);
#pragma unroll
      for (int j = 0; j < KEYS / 16; ++j) {
        const uint4 b = square<LD, false>(keys + (j * 16 * LD + c * 16) * 2);
        mma_16816(s[2 * j], a, b.x, b.y);
        mma_16816(s[2 * j + 1], a, b.z, b.w);
        if (NORM) of_k[2 * j] += squares(b.x) + squares(b.y), of_k[2 * j + 1] += squares(b.z) + squares(b.w);
      }
    }
    if (NORM) {
#pragma unroll
      for (int e = 0; e < 2; ++e) of_row[e] = scale / fmaxf(sqrtf(over_quad(of_q[e])), p.epsilon);
#pragma unroll
      for (int j = 0; j < KEYS / 8; ++j) {  // a thread knows key g, and has scores of keys 2t and 2t + 1
        const float unit = 1.f / fmaxf(sqrtf(over_quad(of_k[j])), p.epsilon);
        const float low = __shfl_sync(0xffffffffu, unit, 8 * t), high = __shfl_sync(0xffffffffu, unit, 8 * t + 4);
        s[j][0] *= low, s[j][1] *= high, s[j][2] *= low, s[j][3] *= high;
      }
    }
    float now[2] = {most[0], most[1]};
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = j0 + 8 * j + 2 * t + e % 2;
        float x = s[j][e] * of_row[e / 2];
        const bool ok = at < p.columns && row[e / 2] < p.rows;
        if (ADDED & 1 && ok) x += p.bias[p.bias_at.at(batch, head) + p.bias_at.within(row[e / 2], at)];
        if (ADDED & 2 && ok)
          x = fmaf(__half2float(p.mask[p.mask_at.at(batch, head) + p.mask_at.within(row[e / 2], at)]), LOG2_E, x);
        s[j][e] = ok ? x : MINUS_INFINITY;
        now[e / 2] = fmaxf(now[e / 2], s[j][e]);
      }

    // ---- their share of the softmax, and of the outputs under the maximum that there is now
    float base[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      now[e] = most_of_quad(now[e]);
      base[e] = now[e] == MINUS_INFINITY ? 0.f : now[e];  // nothing yet: 2^(-infinity - 0) is 0, where -infinity - -infinity is NaN
      const float before = ex2_approx(most[e] - base[e]);
      most[e] = now[e], sum[e] *= before;
#pragma unroll
      for (int c = 0; c < 2 * STEPS; ++c) y[c][2 * e] *= before, y[c][2 * e + 1] *= before;
    }
#pragma unroll
    for (int j = 0; j < KEYS / 16; ++j) {
      float w[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        w[e] = ex2_approx(s[2 * j + e / 4][e % 4] - base[e % 4 / 2]);
        sum[e % 4 / 2] += w[e];
      }
      const uint4 left = make_uint4(halves(w[0], w[1]), halves(w[2], w[3]), halves(w[4], w[5]), halves(w[6], w[7]));
#pragma unroll
      for (int c = 0; c < STEPS; ++c) {
        const uint4 b = transposed(square<LD, false>(values + (j * 16 * LD + c * 16) * 2));
        mma_16816(y[2 * c], left, b.x, b.z);
        mma_16816(y[2 * c + 1], left, b.y, b.w);
      }
    }
  }

  // ---- outputs
  Watch watch;
  __half* out = p.y + p.y_at.at(batch, head);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float share = 1.f / over_quad(sum[e]);
    if (row[e] >= p.rows) continue;
    __half* line = out + static_cast<long long>(row[e]) * p.y_at.row;
#pragma unroll
    for (int c = 0; c < 2 * STEPS; ++c) {
      const int at = 8 * c + 2 * t;
      if (at >= p.width) continue;
      const __half2 h = __floats2half2_rn(y[c][2 * e] * share, at + 1 < p.width ? y[c][2 * e + 1] * share : 0.f);
      __half* to = line + static_cast<long long>(at) * p.y_at.inner;
      if (VECTOR) {
        *reinterpret_cast<__half2*>(to) = h;
      } else {
        to[0] = __low2half(h);
        if (at + 1 < p.width) to[p.y_at.inner] = __high2half(h);
      }
      watch.see(h);
    }
  }
  if (head == p.heads - 1)
    for (int i = threadIdx.x; i < min(ROWS, p.rows - first) * p.padding; i += THREADS)
      out[static_cast<long long>(first + i / p.padding) * p.y_at.row + p.width + i % p.padding] = __ushort_as_half(0);
  watch.report(p.nonfinite);
}
