// conv_fp32: convolution in FP32 on CUDA cores, for what FP16 cannot hold: x, the residual and y are each FP16 or FP32.
//
//                 P_THREAD pixels, THREADS apart         block    THREADS threads along the output's pixels, all of the same
//               +---+---+---+---+                                 K_THREAD channels: a weight is one access for a whole warp,
//      K_THREAD |   |   |   |   |  sums of one thread             and neighbours read and write neighbouring pixels
//      channels |   |   |   |   |                        weights  [group][tile of channels][tap][input channel][K_THREAD]
//               +---+---+---+---+
//
// Plain on purpose: it runs where a layer's values leave FP16, which is rare, and there it is to be right. The one trick is
// that sums lie in registers: each pixel that is loaded serves K_THREAD products, each weight P_THREAD.
//
// Compile-time: K_THREAD (1, 4 or 8), P_THREAD, X_F32, ADDED_F32, Y_F32 (1: that tensor is FP32), ACT, RES, AFFINE, LAST.
#include "activation.cuh"
#include "types.cuh"

constexpr int THREADS = 128;
static_assert(K_THREAD == 1 || K_THREAD == 4 || K_THREAD == 8, "weights come one by one, or 4 in one access");

typedef TypeOf<ADDED_F32>::type Added;

struct ConvFp32Params {
  u32* nonfinite;
  const X* x;
  const float* w;
  const float* bias;     // [k], zeros where there is none
  const float* slope;    // [k], prelu only
  const Added* residual;
  Y* y;
  View in, out, added;                   // added: the residual, which or y may lie inside another tensor
  int first, row_pixels, column_pixels;  // output (row, col) is pixel first + row * row_pixels + col * column_pixels of y
  int pixels, p, q;                      // of all images; of one: rows and columns
  int h, w_in, k, y_c;                   // y_c: channels of y with padding
  int c_group, k_group, tiles;           // channels of a group of x, of y; tiles of K_THREAD that the latter are
  int block, crd, out_w;                 // depth-to-space of block x block pixels, in the order CRD or DCR; y's width
  int r, s, stride_h, stride_w, pad_t, pad_l, dil_h, dil_w;
  float alpha, beta;
#if AFFINE
  const float* scales;  // [k]
  const float* shifts;
#endif
#if LAST
  float alpha_last, beta_last;
#endif
};

__device__ __forceinline__ void load_weights(const float* from, float (&w)[K_THREAD]) {
  if (K_THREAD == 1) w[0] = *from;
#pragma unroll
  for (int i = 0; i + 4 <= K_THREAD; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) conv_fp32(const __grid_constant__ ConvFp32Params p) {
  release_next_launch();
  wait_for_previous_launch();
  const int all_tiles = p.k / p.k_group * p.tiles, tile = blockIdx.x % all_tiles, group = tile / p.tiles;
  const int k0 = group * p.k_group + tile % p.tiles * K_THREAD, k_end = min(k0 + K_THREAD, (group + 1) * p.k_group);
  const int first = blockIdx.x / all_tiles * (THREADS * P_THREAD) + threadIdx.x;

  int image[P_THREAD], row[P_THREAD], col[P_THREAD];
#pragma unroll
  for (int i = 0; i < P_THREAD; ++i) {
    const int pixel = first + i * THREADS;
    image[i] = pixel < p.pixels ? pixel / (p.p * p.q) : -1;  // -1: behind the last one
    row[i] = pixel / p.q % p.p, col[i] = pixel % p.q;
  }

  // Sums over taps and the group's input channels.
  float acc[P_THREAD][K_THREAD] = {};
  const float* weights = p.w + static_cast<long long>(tile) * p.r * p.s * p.c_group * K_THREAD;
  for (int r = 0; r < p.r; ++r)
    for (int s = 0; s < p.s; ++s) {
      long long from[P_THREAD];
      bool inside[P_THREAD];
#pragma unroll
      for (int i = 0; i < P_THREAD; ++i) {
        const int h = row[i] * p.stride_h - p.pad_t + r * p.dil_h, w = col[i] * p.stride_w - p.pad_l + s * p.dil_w;
        inside[i] = image[i] >= 0 && h >= 0 && h < p.h && w >= 0 && w < p.w_in;
        from[i] = inside[i] ? p.in.at(image[i], 0, h * p.w_in + w) : 0;
      }
#pragma unroll 2  // more do not fit the registers that the compiler aims at
      for (int c = 0; c < p.c_group; ++c, weights += K_THREAD) {
        const long long channel = p.in.at(0, group * p.c_group + c, 0);
        float w[K_THREAD];
        load_weights(weights, w);
#pragma unroll
        for (int i = 0; i < P_THREAD; ++i) {
          const float x = inside[i] ? load_one(p.x + from[i] + channel) : 0.f;
#pragma unroll
          for (int j = 0; j < K_THREAD; ++j) acc[i][j] += x * w[j];
        }
      }
    }

  // Bias, residual and activation; where y is FP16, one rounding.
  const int corners = p.block * p.block, y_channels = p.k / corners;
#pragma unroll
  for (int i = 0; i < P_THREAD; ++i) {
    if (image[i] < 0) continue;
    const int pixel = p.first + row[i] * p.row_pixels + col[i] * p.column_pixels;
#pragma unroll
    for (int j = 0; j < K_THREAD; ++j) {
      const int k = k0 + j;
      if (k >= k_end) break;
      const int c = p.crd ? k / corners : k % y_channels, corner = p.crd ? k % corners : k / y_channels;
      const int at = pixel + corner / p.block * p.out_w + corner % p.block;
      const float added = RES ? load_one(p.residual + p.added.at(image[i], c, at)) : 0.f;
      const float slope = ACT == ACT_PRELU ? p.slope[k] : 0.f;
      const float v = finish<ACT, RES>(p, acc[i][j] + p.bias[k], added, slope, tail_of(p, k));
      store_one(p.y + p.out.at(image[i], c, at), v, p.nonfinite);
    }
    if (tile == all_tiles - 1)  // padded channels are zero
      for (int corner = 0; corner < corners; ++corner)
        for (int c = y_channels; c < p.y_c; ++c)
          p.y[p.out.at(image[i], c, pixel + corner / p.block * p.out_w + corner % p.block)] = 0.f;
  }
}
