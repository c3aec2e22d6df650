// resize: each output pixel is a weighted sum of input pixels, weights and indices from one table per axis, FP32 inside.
//
//   y[n, c, h, w] = sum over i, k of row_weight[h][i] * column_weight[w][k] * x[n, c, row[h][i], column[w][k]]
//
// The host computes the taps, so linear and cubic, every coordinate mode and antialiasing are one kernel; with two taps per
// axis this is bilinear. A thread owns VEC channels (8 in one 16-byte access, or 1) of one output pixel; neighbouring threads
// own neighbouring channels where V >= 8 and neighbouring pixels where the tensor is linear.
//
// Compile-time: VEC (8 or 1), X_F32, Y_F32 (include/types.cuh).
#include "place.cuh"
#include "types.cuh"

struct ResizeParams {
  u32* nonfinite;
  const X* x;
  Y* y;
  const int *row, *column;  // [out_h, row_taps], [out_w, column_taps]; -1: outside the image
  const float *row_weight, *column_weight;
  View in, out;
  int n, c, groups, in_groups, w;  // (in_)groups: channels of the padded output (input) / VEC; w: the input's width
  int out_h, out_w, row_taps, column_taps;
  float outside;
};

extern "C" __global__ void __launch_bounds__(256, 4) resize(const __grid_constant__ ResizeParams p) {
  release_next_launch();
  wait_for_previous_launch();
  Owned at;
  if (!place_of_thread(p.n, p.groups, p.out_h * p.out_w, at)) return;
  const int c = at.c, pixel = at.pixel, image = at.image;
  const int h = pixel / p.out_w, w = pixel % p.out_w;

  float v[VEC] = {};
  if (c < p.in_groups * VEC) {
    if (p.row[h * p.row_taps] < 0 || p.column[w * p.column_taps] < 0) {
#pragma unroll
      for (int j = 0; j < VEC; ++j) v[j] = c + j < p.c ? p.outside : 0.f;
    } else {
      for (int i = 0; i < p.row_taps; ++i) {
        const int line = p.row[h * p.row_taps + i] * p.w;
        const float weight = p.row_weight[h * p.row_taps + i];
        for (int k = 0; k < p.column_taps; ++k) {
          const float both = weight * p.column_weight[w * p.column_taps + k];
          if (both == 0.f) continue;  // an edge pixel's second tap: what is not read cannot be NaN
          float x[VEC];
          load_vec(p.x + p.in.at(image, c, line + p.column[w * p.column_taps + k]), x);
#pragma unroll
          for (int j = 0; j < VEC; ++j) v[j] += both * x[j];
        }
      }
    }
  }
  store_vec(p.y + p.out.at(image, c, pixel), v, p.nonfinite);
}
