// conv_fp32: convolution in FP32 on CUDA cores, for what FP16 cannot hold: x, the residual and y are each FP16 or FP32.
//
//                 P_THREAD pixels, THREADS apart         block    THREADS threads along the output's pixels, all of the same
//               +---+---+---+---+                                 K_THREAD channels: a weight is one access for a whole warp,
//      K_THREAD |   |   |   |   |  sums of one thread             and neighbours read and write neighbouring pixels
//      channels |   |   |   |   |                        weights  [group][tile of channels][tap][input channel][K_THREAD]
//               +---+---+---+---+
//
// Plain on purpose: it runs where a layer's values leave FP16, which is rare, and there it is to be right. The one trick is
// that sums lie in registers: each pixel that is loaded serves K_THREAD products, each weight P_THREAD. Where pixels are few,
// SPLIT threads have one, each every SPLIT-th input channel; their sums meet by shuffles and in shared memory, in one order.
// The loads of AT_ONCE channels are on their way before the first product.
//
// Compile-time: K_THREAD (1, 4 or 8), P_THREAD, SPLIT (1, 8, 32 or 128), X_F32, ADDED_F32, Y_F32 (1: that tensor is FP32), ACT,
// RES, AFFINE, LAST.
#define ROUNDED 0
#include "activation.cuh"
#include "types.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int LANES = THREADS / SPLIT;          // threads with the same input channels and different pixels
constexpr int AT_ONCE = 4;                      // input channels
constexpr int RESIDENT = 4;  // blocks of an SM: where the compiler may choose, it saves registers and waits for each load
static_assert(K_THREAD == 1 || K_THREAD == 4 || K_THREAD == 8, "weights come one by one, or 4 in one access");
static_assert(SPLIT == 1 || (P_THREAD == 1 && LANES <= 32 && K_THREAD <= SPLIT), "each thread ends with one sum at most");

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

__device__ __forceinline__ void load_weights(bool there, const float* from, float (&w)[K_THREAD]) {
  if (K_THREAD == 1) w[0] = there ? *from : 0.f;
#pragma unroll
  for (int i = 0; i + 4 <= K_THREAD; i += 4) {
    const float4 four = there ? *reinterpret_cast<const float4*>(from + i) : make_float4(0.f, 0.f, 0.f, 0.f);
    w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
  }
}

struct Pixel {  // of the output
  int image, row, col;  // image -1: behind the last one
};
// Bias, residual and activation; where y is FP16, one rounding.
__device__ __forceinline__ void store_channel(const ConvFp32Params& p, const Pixel& of, int k, float sum) {
  const int corners = p.block * p.block, y_channels = p.k / corners;
  const int c = p.crd ? k / corners : k % y_channels, corner = p.crd ? k % corners : k / y_channels;
  const int at = p.first + of.row * p.row_pixels + of.col * p.column_pixels + corner / p.block * p.out_w + corner % p.block;
  const float added = RES ? load_one(p.residual + p.added.at(of.image, c, at)) : 0.f;
  const float slope = ACT == ACT_PRELU ? p.slope[k] : 0.f;
  const float v = finish<ACT, RES>(p, sum + p.bias[k], added, slope, tail_of(p, k));
  store_one(p.y + p.out.at(of.image, c, at), v, p.nonfinite);
}
__device__ __forceinline__ void clear_padding(const ConvFp32Params& p, const Pixel& of) {
  const int corners = p.block * p.block, pixel = p.first + of.row * p.row_pixels + of.col * p.column_pixels;
  for (int corner = 0; corner < corners; ++corner)
    for (int c = p.k / corners; c < p.y_c; ++c)
      p.y[p.out.at(of.image, c, pixel + corner / p.block * p.out_w + corner % p.block)] = 0.f;
}

#if SPLIT > 1
// The sum of channel threadIdx.x / LANES of the thread's pixel, of all threads that share it.
__device__ __forceinline__ float join(float (&acc)[K_THREAD]) {
  __shared__ float sums[WARPS][K_THREAD][LANES];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, channel = threadIdx.x / LANES;
#pragma unroll
  for (int j = 0; j < K_THREAD; ++j) {
#pragma unroll
    for (int away = LANES; away < 32; away *= 2) acc[j] += __shfl_xor_sync(0xffffffffu, acc[j], away);
    if (lane < LANES) sums[warp][j][lane] = acc[j];
  }
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i)
    if (channel < K_THREAD) sum += sums[i][channel][threadIdx.x % LANES];
  return sum;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) conv_fp32(const __grid_constant__ ConvFp32Params p) {
  release_next_launch();
  wait_for_previous_launch();
  const int all_tiles = p.k / p.k_group * p.tiles, tile = blockIdx.x % all_tiles, group = tile / p.tiles;
  const int k0 = group * p.k_group + tile % p.tiles * K_THREAD, k_end = min(k0 + K_THREAD, (group + 1) * p.k_group);
  const int first = blockIdx.x / all_tiles * (LANES * P_THREAD) + threadIdx.x % LANES, part = threadIdx.x / LANES;

  Pixel of[P_THREAD];
#pragma unroll
  for (int i = 0; i < P_THREAD; ++i) {
    const int pixel = first + i * LANES;
    of[i] = {pixel < p.pixels ? pixel / (p.p * p.q) : -1, pixel / p.q % p.p, pixel % p.q};
  }

  // Sums over taps and the group's input channels.
  float acc[P_THREAD][K_THREAD] = {};
  const float* of_tap = p.w + (static_cast<long long>(tile) * p.r * p.s * p.c_group + part) * K_THREAD;
  for (int r = 0; r < p.r; ++r)
    for (int s = 0; s < p.s; ++s, of_tap += p.c_group * K_THREAD) {
      long long from[P_THREAD];
      bool inside[P_THREAD];
#pragma unroll
      for (int i = 0; i < P_THREAD; ++i) {
        const int h = of[i].row * p.stride_h - p.pad_t + r * p.dil_h, w = of[i].col * p.stride_w - p.pad_l + s * p.dil_w;
        inside[i] = of[i].image >= 0 && h >= 0 && h < p.h && w >= 0 && w < p.w_in;
        from[i] = inside[i] ? p.in.at(of[i].image, 0, h * p.w_in + w) : 0;
      }
      const float* weights = of_tap;
#pragma unroll 1
      for (int c0 = part; c0 < p.c_group; c0 += AT_ONCE * SPLIT, weights += AT_ONCE * SPLIT * K_THREAD) {
        float w[AT_ONCE][K_THREAD], x[AT_ONCE][P_THREAD];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          const int c = c0 + n * SPLIT;
          const bool there = c < p.c_group;
          const long long channel = p.in.at(0, group * p.c_group + c, 0);
          load_weights(there, weights + n * SPLIT * K_THREAD, w[n]);
#pragma unroll
          for (int i = 0; i < P_THREAD; ++i) x[n][i] = there && inside[i] ? load_one(p.x + from[i] + channel) : 0.f;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
#pragma unroll
          for (int i = 0; i < P_THREAD; ++i)
#pragma unroll
            for (int j = 0; j < K_THREAD; ++j) acc[i][j] += x[n][i] * w[n][j];
      }
    }

#if SPLIT > 1
  const float sum = join(acc[0]);
  if (of[0].image >= 0 && part < k_end - k0) store_channel(p, of[0], k0 + part, sum);
  if (of[0].image >= 0 && part == 0 && tile == all_tiles - 1) clear_padding(p, of[0]);
#else
#pragma unroll
  for (int i = 0; i < P_THREAD; ++i) {
    if (of[i].image < 0) continue;
#pragma unroll
    for (int j = 0; j < K_THREAD; ++j) {
      if (k0 + j >= k_end) break;
      store_channel(p, of[i], k0 + j, acc[i][j]);
    }
    if (tile == all_tiles - 1) clear_padding(p, of[i]);  // padded channels are zero
  }
#endif
}
