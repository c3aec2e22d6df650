// move: output elements copied from other places of the input: reformat, cast, slice, pad, concat piece, upsample, shuffles.
//
// A thread owns 8 output channels of one pixel; neighbouring threads own neighbouring pixels, so a linear side is read or
// written in whole sectors, and a vector side in 16-byte pieces.
//
// Compile-time: KIND as below; IN_VEC / OUT_VEC: that side moves 8 channels in one 16-byte access (V >= 8, aligned channels,
// and, for IN_VEC, consecutive channels map to consecutive channels); IN_TYPE: 0 FP16, 1 FP32, 2 unsigned 8-bit;
// OUT_F32: the output is FP32 instead of FP16.
#include "types.cuh"

enum { KIND_WINDOW, KIND_UPSAMPLE, KIND_D2S_DCR, KIND_D2S_CRD, KIND_S2D_DCR, KIND_S2D_CRD, KIND_CHANNELS };
static_assert(!(IN_VEC && IN_TYPE) && !(OUT_VEC && OUT_F32), "16-byte accesses move halfs");

struct MoveParams {
  u32* nonfinite;
  const void* x;
  void* y;
  View in, out;
  int n, c, h, w;          // input
  int out_c, out_h, out_w; // this launch's part of the output; channels past `filled` (format padding) get zeros
  int filled, first_c;     // first_c: where the part begins along the output's channels
  int start_c, start_h, start_w, step_c, step_h, step_w;
  float fill;
};

__device__ __forceinline__ float load(const MoveParams& p, long long at) {
  if (IN_TYPE == 2) return static_cast<float>(static_cast<const unsigned char*>(p.x)[at]);
  return IN_TYPE == 1 ? static_cast<const float*>(p.x)[at] : __half2float(static_cast<const __half*>(p.x)[at]);
}

extern "C" __global__ void __launch_bounds__(256) move(const __grid_constant__ MoveParams p) {
  release_next_launch();
  wait_for_previous_launch();
  const int groups = (p.out_c + 7) / 8, pixels = p.out_h * p.out_w;
  const long long id = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  const int pixel = static_cast<int>(id % pixels), c0 = static_cast<int>(id / pixels % groups) * 8;
  const int image = static_cast<int>(id / pixels / groups);
  if (image >= p.n) return;
  const int oh = pixel / p.out_w, ow = pixel % p.out_w;

  int h = p.start_h + oh * p.step_h, w = p.start_w + ow * p.step_w, corner = 0;
  if (KIND == KIND_UPSAMPLE) h = oh / p.step_h, w = ow / p.step_w;
  if (KIND == KIND_D2S_DCR || KIND == KIND_D2S_CRD)
    h = oh / p.step_h, w = ow / p.step_h, corner = (oh % p.step_h) * p.step_h + ow % p.step_h;
  if (KIND == KIND_CHANNELS) h = oh, w = ow;
  const bool inside = static_cast<unsigned>(h) < static_cast<unsigned>(p.h) && static_cast<unsigned>(w) < static_cast<unsigned>(p.w);

  float v[8];
  if (IN_VEC) {
    const int c = p.start_c + c0;
    const bool ok = inside && c >= 0 && c < ((p.c + 7) & ~7);
    if (ok)
      load_vec(static_cast<const __half*>(p.x) + p.in.at(image, c, h * p.w + w), v);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (!ok || c + j >= p.c) v[j] = p.fill;
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      int c = p.start_c + (c0 + j) * p.step_c;
      if (KIND == KIND_UPSAMPLE) c = c0 + j;
      if (KIND == KIND_D2S_DCR) c = corner * p.filled + c0 + j;
      if (KIND == KIND_D2S_CRD) c = (c0 + j) * p.step_h * p.step_h + corner;
      int at_h = h, at_w = w;  // space-to-depth: step_h is the block, h and w its first pixel
      if (KIND == KIND_S2D_DCR || KIND == KIND_S2D_CRD) {
        const int corners = p.step_h * p.step_h, which = KIND == KIND_S2D_DCR ? (c0 + j) / p.c : (c0 + j) % corners;
        c = KIND == KIND_S2D_DCR ? (c0 + j) % p.c : (c0 + j) / corners;
        at_h += which / p.step_h, at_w += which % p.step_h;
      }
      if (KIND == KIND_CHANNELS) c = (c0 + j) % p.step_h * (p.c / p.step_h) + (c0 + j) / p.step_h;  // step_h groups
      const bool ok = inside && c0 + j < p.filled && c >= 0 && c < p.c;
      v[j] = ok ? load(p, p.in.at(image, c, at_h * p.w + at_w)) : p.fill;
    }
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (c0 + j >= p.filled) v[j] = 0.f;

  if (OUT_VEC) {
    store_vec(static_cast<__half*>(p.y) + p.out.at(image, p.first_c + c0, pixel), v, p.nonfinite);
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (c0 + j >= p.out_c) break;
    const long long at = p.out.at(image, p.first_c + c0 + j, pixel);
    if (OUT_F32)
      store_one(static_cast<float*>(p.y) + at, v[j], p.nonfinite);
    else
      store_one(static_cast<__half*>(p.y) + at, v[j], p.nonfinite);
  }
}
