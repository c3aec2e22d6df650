// pool: max or average over a window, and a chain of elementwise stages behind it (a difference, a scale, a residual), FP32
// inside and rounded once; input and output in formats of the same vector width.
//
// A thread owns VEC channels (8 in one 16-byte access, or 1) of one output pixel and walks the window. Neighbouring threads
// take neighbouring channels where V >= 8 and neighbouring pixels where the tensor is linear: whole sectors either way.
//
// Compile-time: VEC (8 or 1), AVG (0 max, 1 average), X_F32, Y_F32 (include/types.cuh); OPS, OPERANDS, SOURCES
// (include/stages.cuh); ROWS: a source of the chain spans one of the axes h and w without the other.
#include "place.cuh"
#include "stages.cuh"

#ifndef ROWS
#define ROWS 0
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

extern "C" __global__ void __launch_bounds__(256, 4) pool(const __grid_constant__ PoolParams p) {
  release_next_launch();
  wait_for_previous_launch();
  Owned at;
  if (!place_of_thread(p.n, p.groups, p.p * p.q, at)) return;
  const int c = at.c, pixel = at.pixel, image = at.image;
  const int h0 = pixel / p.q * p.stride_h - p.pad_t, w0 = pixel % p.q * p.stride_w - p.pad_l;

  float v[VEC] = {};
  if (c >= p.in_groups * VEC) {  // the output's format pads further than the input's
    store_vec(p.y + p.out.at(image, c, pixel), v, p.nonfinite);
    return;
  }
#pragma unroll
  for (int j = 0; j < VEC; ++j) v[j] = AVG ? 0.f : MINUS_INFINITY;
  int count = 0;
  for (int i = 0; i < p.r; ++i) {
    const int h = h0 + i * p.dil_h;
    for (int k = 0; k < p.s; ++k) {
      const int w = w0 + k * p.dil_w;
      const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(p.h) && static_cast<unsigned>(w) < static_cast<unsigned>(p.w);
      count += p.count_pad ? h < p.h_end && w < p.w_end : inside;
      if (!inside) continue;
      float x[VEC];
      load_vec(p.x + p.in.at(image, c, h * p.w + w), x);
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[j] = AVG ? v[j] + x[j] : (x[j] > v[j] || x[j] != x[j] ? x[j] : v[j]);
    }
  }
  const float scale = AVG ? 1.f / max(count, 1) : 1.f;
#pragma unroll
  for (int j = 0; j < VEC; ++j) v[j] *= scale;
#if SOURCES
  run_chain(p, Place{image, c, ROWS ? pixel / p.q : 0, ROWS ? pixel % p.q : pixel}, p.c, v);
#endif
  store_vec(p.y + p.out.at(image, c, pixel), v, p.nonfinite);
}
