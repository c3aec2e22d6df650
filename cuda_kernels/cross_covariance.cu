// cross_covariance: attention whose scores are few, as where channels attend to each other over all tokens, in one launch.
//
//   S[i][j] = scale * sum over n of q[i][n] k[j][n]  (NORM: of rows of length 1)     P = softmax of each row of S
//   y[i][n] = sum over j of P[i][j] v[j][n]                                          for each head of each image
//
// A block holds all scores of one head and writes the outputs of `chunk` of the n; blocks of one head form the same scores, as
// q and k come from L2 faster than scores would go through memory. Warps share the 16-row stripes of S and the n between them;
// their sums meet in shared memory in a fixed order. q, k and v lie there as [n][i], as channels-last tensors do: the products
// over n take them transposed (movmatrix), those over j as they are.
//
// Compile-time: DIM: i and j, padded to a multiple of 16; NORM: rows of q and k are divided by max(length, epsilon); VECTOR: i
// and j lie one after the other, in vectors of 8 that begin at multiples of 16 bytes.
#include "attention.cuh"

constexpr int WM = DIM / 16, WK = 8 / WM > 0 ? 8 / WM : 1, WARPS = WM * WK, THREADS = 32 * WARPS;
constexpr int LD = DIM + 8;                   // rows then meet in no bank, 8 by 8
constexpr int TOKENS = DIM <= 32 ? 128 : 64;  // n of a stage
constexpr int STAGES = DIM <= 64 ? 3 : 2;
constexpr int V_TOKENS = 64;
constexpr int TILE_BYTES = TOKENS * LD * 2, RING = STAGES * 2 * TILE_BYTES, PARTS = WK * DIM * LD * 4;
static_assert(DIM % 16 == 0 && DIM >= 16 && DIM <= 128, "a block holds all scores of a head");
static_assert(TOKENS / 16 % WK == 0, "the warps that share a stripe take as many steps of 16 each");

struct CrossCovarianceParams {
  u32* nonfinite;
  const __half *q, *k, *v;
  const float* scale;  // [heads]
  __half* y;
  Operand q_at, k_at, v_at, y_at;  // .row: from one i or j to the next, .inner: from one n to the next
  int heads, rows, columns;        // how many i and j there are
  int inner, width;                // how many n q and k have, and v and y
  int chunk, chunks;               // outputs n of a block, and blocks of a head
  int padding;                     // zeros behind the last head's rows
  float epsilon;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) cross_covariance(const __grid_constant__ CrossCovarianceParams p) {
  release_next_launch();
  extern __shared__ __align__(16) unsigned char shared[];
  float* part = reinterpret_cast<float*>(shared);  // [WK][DIM][LD], where the ring was
  constexpr int BEFORE = RING > PARTS ? RING : PARTS;
  __half* weight = reinterpret_cast<__half*>(shared + BEFORE);                           // P: [DIM][LD]
  float* length = reinterpret_cast<float*>(shared + BEFORE + (DIM + V_TOKENS) * LD * 2);  // [2][WK][DIM]: of q, of k, squared
  float* inverse = length + 2 * WK * DIM;                                                 // [DIM]: 1 / sum of a row of P
  const u32 ring = smem_u32(shared), weights = smem_u32(weight), values = weights + DIM * LD * 2;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, wm = warp % WM, wk = warp / WM;
  const int chunk = blockIdx.x % p.chunks, head = blockIdx.x / p.chunks % p.heads, batch = blockIdx.x / p.chunks / p.heads;
  const __half *q = p.q + p.q_at.at(batch, head), *k = p.k + p.k_at.at(batch, head), *v = p.v + p.v_at.at(batch, head);
  const int first = chunk * p.chunk, last = min(first + p.chunk, p.width);
  wait_for_previous_launch();

  // ---- scores
  const int tiles = (p.inner + TOKENS - 1) / TOKENS;
  auto load = [&](int tile) {
    const int n = tile * TOKENS;
    const u32 to = ring + tile % STAGES * 2 * TILE_BYTES;
    const long long at = n;
    if (tile < tiles) {
      load_tile<TOKENS, DIM, LD, THREADS, VECTOR>(to, q + at * p.q_at.inner, p.q_at.inner, p.q_at.row, p.inner - n, p.rows);
      load_tile<TOKENS, DIM, LD, THREADS, VECTOR>(to + TILE_BYTES, k + at * p.k_at.inner, p.k_at.inner, p.k_at.row,
                                                  p.inner - n, p.columns);
    }
    cp_async_commit();
  };
  auto load_values = [&](int n) {
    load_tile<V_TOKENS, DIM, LD, THREADS, VECTOR>(values, v + static_cast<long long>(n) * p.v_at.inner, p.v_at.inner,
                                                  p.v_at.row, last - n, p.columns);
  };
  load_values(first);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) load(i);

  float s[2 * WM][4] = {}, of_q[2] = {}, of_k[2] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    load(tile + STAGES - 1);
    const u32 tile_at = ring + tile % STAGES * 2 * TILE_BYTES;
#pragma unroll
    for (int step = 0; step < TOKENS / 16 / WK; ++step) {
      const u32 at = tile_at + (step * WK + wk) * 16 * LD * 2;
      const uint4 a = transposed(square<LD, false>(at + wm * 32));
      if (NORM) of_q[0] += squares(a.x) + squares(a.z), of_q[1] += squares(a.y) + squares(a.w);
#pragma unroll
      for (int j = 0; j < WM; ++j) {
        const uint4 b = transposed(square<LD, false>(at + TILE_BYTES + j * 32));
        mma_16816(s[2 * j], a, b.x, b.z);
        mma_16816(s[2 * j + 1], a, b.y, b.w);
        if (NORM && j == wm) of_k[0] += squares(b.x) + squares(b.z), of_k[1] += squares(b.y) + squares(b.w);
      }
    }
  }
  cp_async_wait<0>();
  __syncthreads();  // all have read the ring

  // ---- sums of the warps that share a stripe
#pragma unroll
  for (int j = 0; j < 2 * WM; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float* at = part + (wk * DIM + wm * 16 + g + 8 * e) * LD + j * 8 + 2 * t;
      *reinterpret_cast<float2*>(at) = make_float2(s[j][2 * e], s[j][2 * e + 1]);
    }
  if (NORM) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float one = over_quad(of_q[e]), other = over_quad(of_k[e]);
      if (t == 0) length[wk * DIM + wm * 16 + g + 8 * e] = one, length[(WK + wk) * DIM + wm * 16 + g + 8 * e] = other;
    }
  }
  __syncthreads();
  const float scale = p.scale[head];
  auto unit = [&](int which, int i) {  // 1 / length
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WK; ++w) sum += length[(which * WK + w) * DIM + i];
    return 1.f / fmaxf(sqrtf(sum), p.epsilon);
  };

  // ---- softmax: a warp takes a row
  for (int i = warp; i < DIM; i += WARPS) {
    float x[(DIM + 31) / 32], most = MINUS_INFINITY, sum = 0.f;
    const float of_row = NORM ? scale * unit(0, i) : scale;
#pragma unroll
    for (int c = 0; c < (DIM + 31) / 32; ++c) {
      const int j = c * 32 + lane;
      x[c] = MINUS_INFINITY;
      if (j < p.columns) {
        float dot = 0.f;
#pragma unroll
        for (int w = 0; w < WK; ++w) dot += part[(w * DIM + i) * LD + j];
        x[c] = dot * of_row * (NORM ? unit(1, j) : 1.f);
      }
      most = x[c] > most || x[c] != x[c] ? x[c] : most;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, most, d);
      most = other > most || other != other ? other : most;
    }
#pragma unroll
    for (int c = 0; c < (DIM + 31) / 32; ++c) {
      const int j = c * 32 + lane;
      const float e = j < p.columns ? fast_exp(x[c] - most) : 0.f;
      if (j < DIM) weight[i * LD + j] = __float2half_rn(i < p.rows ? e : 0.f);
      sum += e;
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (lane == 0) inverse[i] = 1.f / sum;
  }
  __syncthreads();

  // ---- outputs: a warp takes 16 x 16 of them
  Watch watch;
  __half* y = p.y + p.y_at.at(batch, head);
  for (int n = first; n < last; n += V_TOKENS) {
    if (n > first) {
      __syncthreads();
      load_values(n);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    for (int part_of = warp; part_of < V_TOKENS / 16 * WM; part_of += WARPS) {
      const int row = part_of / WM * 16, i0 = part_of % WM * 16;
      if (n + row >= last) continue;
      float d[2][4] = {};
#pragma unroll
      for (int j = 0; j < WM; ++j) {
        const uint4 a = square<LD, true>(values + (row * LD + j * 16) * 2);
        const uint4 b = square<LD, false>(weights + (i0 * LD + j * 16) * 2);
        mma_16816(d[0], a, b.x, b.y);
        mma_16816(d[1], a, b.z, b.w);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int at = n + row + g + 8 * e, i = i0 + 8 * c + 2 * t;
          if (at >= last || i >= p.rows) continue;
          const __half2 h = __floats2half2_rn(d[c][2 * e] * inverse[i], i + 1 < p.rows ? d[c][2 * e + 1] * inverse[i + 1] : 0.f);
          __half* to = y + static_cast<long long>(at) * p.y_at.inner + static_cast<long long>(i) * p.y_at.row;
          if (VECTOR) {
            *reinterpret_cast<__half2*>(to) = h;
          } else {
            to[0] = __low2half(h);
            if (i + 1 < p.rows) to[p.y_at.row] = __high2half(h);
          }
          watch.see(h);
        }
    }
    if (head == p.heads - 1)
      for (int i = threadIdx.x; i < min(V_TOKENS, last - n) * p.padding; i += THREADS)
        y[static_cast<long long>(n + i / p.padding) * p.y_at.inner + p.rows + i % p.padding] = __ushort_as_half(0);
  }
  watch.report(p.nonfinite);
}
