// pool: max or average over a window, and a chain of elementwise stages behind it (a difference, a scale, a residual), FP32
// inside (maxima of FP16 are exact as they are, and bytes are FP16 inside) and rounded once; input and output in formats of the
// same vector width.
//
// A thread owns VEC channels (8 in one 16-byte access, or 1) of OUTPUTS output pixels below each other. It walks down the rows
// of all of their windows: of each row the maximum or sum of S columns, which every window that has the row takes up. Windows
// that overlap share rows, so that less is loaded, and less of it by neighbouring SMs twice. Neighbouring threads take
// neighbouring channels where V >= 8 and neighbouring pixels where the tensor is linear: whole sectors either way.
//
// Compile-time: VEC (8 or 1), AVG (0 max, 1 average), X_F32, Y_F32, X_BYTES and Y_BYTES of maxima (include/types.cuh); OPS,
// OPERANDS, SOURCES (include/stages.cuh); ROWS: a source of the chain spans one of the axes h and w without the other. R, S: the window, so that
// all loads are on their way before the first is needed, or 0: the launch knows it. OUTPUTS > 1: of windows without dilation,
// STRIDE rows apart.
#include "stages.cuh"

#ifndef ROWS
#define ROWS 0
#endif
#ifndef R
#define R 0
#define S 0
#endif
#ifndef OUTPUTS
#define OUTPUTS 1
#define STRIDE 0
#endif

struct PoolParams {
  u32* nonfinite;
  const X* x;
  Y* y;
  View in, out;
  int n, groups, in_groups, h, w, p, q;  // (in_)groups: channels of the padded output (input) / VEC
  int r, s, stride_h, stride_w, pad_t, pad_l, dil_h, dil_w;
  int h_end, w_end;  // average: a window counts positions below these (the image, or the padded image)
  int count_pad;
#if SOURCES
  int c;
  Source source[NUM_SOURCES];
  float param[NUM_STAGES ? NUM_STAGES : 1][2];
#endif
};

// What is known of a window: maxima of FP16 as such, else FP32.
constexpr bool HALVES = VEC == 8 && !AVG;

struct Values {
  float v[VEC];
  __half2 h[HALVES ? 4 : 1];

  __device__ __forceinline__ Values() {
    for (int j = 0; j < VEC; ++j) v[j] = AVG ? 0.f : MINUS_INFINITY;
    for (int j = 0; HALVES && j < 4; ++j) h[j] = __half2half2(__ushort_as_half(0xfc00));
  }
  __device__ __forceinline__ void take(const Values& other, bool first) {
    if (first) {
      *this = other;
      return;
    }
#pragma unroll
    for (int j = 0; HALVES && j < 4; ++j) h[j] = __hmax2_nan(h[j], other.h[j]);
#pragma unroll
    for (int j = 0; !HALVES && j < VEC; ++j) {
      const float x = other.v[j];
      v[j] = AVG ? v[j] + x : (x > v[j] || x != x ? x : v[j]);
    }
  }
  __device__ __forceinline__ void result(float (&y)[VEC]) const {
#pragma unroll
    for (int j = 0; HALVES && j < 4; ++j) {
      const float2 two = __half22float2(h[j]);
      y[2 * j % VEC] = two.x, y[(2 * j + 1) % VEC] = two.y;
    }
#pragma unroll
    for (int j = 0; !HALVES && j < VEC; ++j) y[j] = v[j];
  }
};

// 8 channels where `ok`, else what adds nothing to a window: predicated, so that no branch stands between loads.
#if X_BYTES
static_assert(HALVES, "maxima");
__device__ __forceinline__ uint4 load_if(bool ok, const X* at) {
  uint2 r;
  asm("{ .reg .pred q; setp.ne.b32 q, %3, 0; mov.b32 %0, %4; mov.b32 %1, %4; @q ld.global.v2.b32 {%0,%1}, [%2]; }"
      : "=&r"(r.x), "=&r"(r.y)
      : "l"(at), "r"(static_cast<u32>(ok)), "n"(X_BYTES == 1 ? 0x80808080u : 0u)
      : "memory");
  return halves_of<X>(r);
}
#else
__device__ __forceinline__ uint4 load_if(bool ok, const __half* at) {
  uint4 r;
  asm("{ .reg .pred q; setp.ne.b32 q, %5, 0;\n"
      "mov.b32 %0, %6; mov.b32 %1, %6; mov.b32 %2, %6; mov.b32 %3, %6;\n"
      "@q ld.global.v4.b32 {%0,%1,%2,%3}, [%4]; }"
      : "=&r"(r.x), "=&r"(r.y), "=&r"(r.z), "=&r"(r.w)
      : "l"(at), "r"(static_cast<u32>(ok)), "n"(AVG ? 0u : 0xfc00fc00u)
      : "memory");
  return r;
}
#endif

// The values at an element of the input where `ok`, else what adds nothing. `some`: an address that may be read.
__device__ __forceinline__ Values values_at(bool ok, const X* at, const X* some) {
  Values of;
#if VEC == 8
  const uint4 bits = load_if(ok, at);
  if (HALVES)
#pragma unroll
    for (int j = 0; j < 4; ++j) of.h[j % (HALVES ? 4 : 1)] = reinterpret_cast<const __half2*>(&bits)[j];
  else
    unpack(bits, of.v);
#else
  const float x = load_one(ok ? at : some);
  if (ok) of.v[0] = x;
#endif
  return of;
}

struct Owned {
  int image, c, row, column;  // the first of OUTPUTS rows
};

// False: the tensor has no place for this thread.
__device__ __forceinline__ bool place_of_thread(const PoolParams& p, Owned& at) {
  unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
  const unsigned groups = p.groups, columns = p.q, rows = (p.p + OUTPUTS - 1) / OUTPUTS;
  if (VEC == 8) at.c = id % groups * VEC, id /= groups;
  at.column = id % columns, id /= columns;
  at.row = id % rows * OUTPUTS, id /= rows;
  if (VEC == 1) at.c = id % groups, id /= groups;
  at.image = id;
  return at.image < p.n;
}

// How many of `taps` positions from `first` on are between `low` and `high`.
__device__ __forceinline__ int counted(int first, int taps, int step, int low, int high) {
  int count = 0;
  for (int i = 0; i < taps; ++i) count += first + i * step >= low && first + i * step < high;
  return count;
}

// Blocks of 256 threads in an SM: as many as loads that are on their way together leave registers for.
constexpr int BLOCKS = R == 0 ? 4 : OUTPUTS > 2 || R * S > 9 ? 2 : 3;

extern "C" __global__ void __launch_bounds__(256, BLOCKS) pool(const __grid_constant__ PoolParams p) {
  release_next_launch();
  Owned at;
  const bool works = place_of_thread(p, at);
  wait_for_previous_launch();
  if (!works) return;
  if (at.c >= p.in_groups * VEC) {  // the output's format pads further than the input's
    const float zeros[VEC] = {};
    for (int o = 0; o < OUTPUTS && at.row + o < p.p; ++o)
      store_vec(p.y + p.out.at(at.image, at.c, (at.row + o) * p.q + at.column), zeros, p.nonfinite);
    return;
  }
  const int taps_h = R ? R : p.r, taps_w = S ? S : p.s, stride = STRIDE ? STRIDE : p.stride_h;
  const int h0 = at.row * stride - p.pad_t, w0 = at.column * p.stride_w - p.pad_l;
  Values of[OUTPUTS];
  const X* row = p.x + p.in.at(at.image, at.c, h0 * p.w + w0);
  const int down = p.dil_h * p.w * p.in.pixel, right = p.dil_w * p.in.pixel;  // in elements
#pragma unroll
  for (int i = 0; i < (OUTPUTS - 1) * stride + taps_h; ++i, row += down) {
    const int h = h0 + i * p.dil_h;
    const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(p.h);
    Values of_row;
#pragma unroll
    for (int k = 0; k < taps_w; ++k) {
      const int w = w0 + k * p.dil_w;
      const bool ok = inside && static_cast<unsigned>(w) < static_cast<unsigned>(p.w);
      of_row.take(values_at(ok, row + k * right, p.x), k == 0);
    }
#pragma unroll
    for (int o = 0; o < OUTPUTS; ++o)
      if (i >= o * stride && i < o * stride + taps_h) of[o].take(of_row, i == o * stride);
  }
  const int low = p.count_pad ? -p.pad_l - p.pad_t : 0;  // no position is below, or none of the image
#pragma unroll
  for (int o = 0; o < OUTPUTS; ++o) {
    if (at.row + o >= p.p) break;
    float v[VEC];
    of[o].result(v);
    if (AVG) {
      const int count = counted(h0 + o * stride, taps_h, p.dil_h, low, p.h_end) * counted(w0, taps_w, p.dil_w, low, p.w_end);
      const float scale = 1.f / max(count, 1);
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[j] *= scale;
    }
    const int pixel = (at.row + o) * p.q + at.column;
#if SOURCES
    run_chain(p, Place{at.image, at.c, ROWS ? at.row + o : 0, ROWS ? at.column : pixel}, p.c, v);
#endif
    store_vec(p.y + p.out.at(at.image, at.c, pixel), v, p.nonfinite);
  }
}
