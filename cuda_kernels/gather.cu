// gather: out[n, c, h, w] = x at one index per axis, each from a table; Transpose, Slice, Pad, Gather, nearest Resize, Concat.
//
// Every tensor format is separable: an element's address is a sum of one term per axis. So output axis a, which walks input
// axis `axis[a]`, adds term(axis[a], table_a[i]) of its own, and one kernel serves every permutation and every table.
//
// A thread owns 8 output channels of one pixel. Neighbouring threads own neighbouring pixels, or, where channels lie together on
// both sides, neighbouring channels: whole sectors either way.
//
// Compile-time: IN_VEC / OUT_VEC: that side moves 8 channels in one 16-byte access (for IN_VEC, channels stay as they are);
// BY_CHANNEL: neighbouring threads own neighbouring channels; X_F32, Y_F32 (include/types.cuh).
#include "types.cuh"

struct GatherParams {
  u32* nonfinite;
  const X* x;
  Y* y;
  const int* table;  // all tables, one after the other
  View in, out;
  int in_c, in_w;                             // input channels and width
  int n, c, h, w;                             // this launch's part of the output
  int covered;                                // its channels with the format's padding, which gets zeros
  int first_n, first_c, first_h, first_w;     // where the part lies in the output
  int out_w;                                  // width of the whole output
  int axis_n, axis_c, axis_h, axis_w;         // input axis that each output axis walks
  int table_n, table_c, table_h, table_w;     // where its table begins; -1: every index in order
  float fill;
};

__device__ __forceinline__ int look_up(const GatherParams& p, int table, int i) { return table < 0 ? i : p.table[table + i]; }

// What index i of an input axis adds to the address.
__device__ __forceinline__ long long term(const GatherParams& p, int axis, int i) {
  if (axis == 1) return static_cast<long long>(i >> p.in.log2v) * p.in.block + (i & ((1 << p.in.log2v) - 1));
  const long long stride = axis == 0 ? p.in.n : axis == 2 ? static_cast<long long>(p.in_w) * p.in.pixel : p.in.pixel;
  return i * stride;
}

extern "C" __global__ void __launch_bounds__(256) gather(const __grid_constant__ GatherParams p) {
  release_next_launch();
  wait_for_previous_launch();
  const unsigned groups = (p.covered + 7) / 8, pixels = p.h * p.w, near = BY_CHANNEL ? groups : pixels;
  const unsigned id = blockIdx.x * 256 + threadIdx.x, others = id / near;  // a tensor has fewer than 2^31 elements
  const int n = others / (BY_CHANNEL ? pixels : groups);
  if (n >= p.n) return;
  const int across = id - others * near, along = others - n * (BY_CHANNEL ? pixels : groups);
  const int c0 = (BY_CHANNEL ? across : along) * 8, pixel = BY_CHANNEL ? along : across, h = pixel / p.w, w = pixel % p.w;

  const int from_n = look_up(p, p.table_n, n), from_h = look_up(p, p.table_h, h), from_w = look_up(p, p.table_w, w);
  const bool inside = from_n >= 0 && from_h >= 0 && from_w >= 0;
  const X* x = p.x;
  if (inside) x += term(p, p.axis_n, from_n) + term(p, p.axis_h, from_h) + term(p, p.axis_w, from_w);

  float v[8];
  if (IN_VEC) {
    if (inside && c0 < p.in_c)
      load_vec(x + term(p, 1, c0), v);
    else
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = p.fill;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int c = c0 + j < p.c ? look_up(p, p.table_c, c0 + j) : -1;
      v[j] = inside && c >= 0 ? load_one(x + term(p, p.axis_c, c)) : p.fill;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (c0 + j >= p.c) v[j] = 0.f;

  const int at = (p.first_h + h) * p.out_w + p.first_w + w;
  if (OUT_VEC) {
    store_vec(p.y + p.out.at(p.first_n + n, p.first_c + c0, at), v, p.nonfinite);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (c0 + j < p.covered) store_one(p.y + p.out.at(p.first_n + n, p.first_c + c0 + j, at), v[j], p.nonfinite);
}
