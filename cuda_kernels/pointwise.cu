// pointwise: a chain of elementwise stages in one pass over its tensors, FP32 inside, rounded once.
//
//   source 0 --> [ stage 0 ] --> [ stage 1 ] --> ... --> y        a stage's operand: a source, or its own scalar
//                     ^               ^
//                 source 1      c.param[1]                        e.g. hard_swish(x * scale + t), one launch
//
// A thread owns VEC neighbouring channels (8 in one 16-byte access, or 1) of one output pixel. Threads go in the order of the
// output's memory: position = ((image * blocks + block) * pixels + pixel) * inner + i, channel = block * v + i * VEC, where
// channels-last is one block and chwV has one block per V channels.
//
// The trick: broadcasting is a stride of 0, so a source that spans only some axes costs an address, never a copy; and each
// chain is straight-line code, because the stages are compile-time digits and everything else is an argument.
//
// Compile-time: VEC; OPS, two decimal digits per stage from the right: its op, 0 ends; OPERANDS, one digit per stage: its
// source + 1, or 0 for its scalar; SOURCES, one digit per source: its kind below, 0 ends; ROWS: a source spans one of the
// axes h and w without the other, so that pixels must be taken apart; Y_F32 (include/types.cuh). The numbers are those of
// tactics/problems/pointwise_ops.py.
#include "activation.cuh"
#include "broadcast.cuh"
#include "types.cuh"

enum {
  OP_ADD = 20, OP_SUB, OP_RSUB, OP_MUL, OP_DIV, OP_RDIV, OP_MAX, OP_MIN, OP_POW, OP_RPOW, OP_PRELU,
  OP_ABS = 40, OP_CEIL, OP_ERF, OP_EXP, OP_FLOOR, OP_LOG, OP_ROUND, OP_SIGN, OP_SOFTSIGN, OP_SQRT, OP_SQUARE, OP_THRESHOLDED_RELU
};
// Kinds of sources. Constants are FP32 in the order n, h, w, c, with c padded to whole vectors.
enum { TENSOR = 1, TENSOR_ONE_CHANNEL, CONSTANT, CONSTANT_ONE_CHANNEL, TENSOR_F32, TENSOR_F32_ONE_CHANNEL };

constexpr int digits(long long packed, int base, int i) { return i ? digits(packed / base, base, i - 1) : packed % base; }
constexpr int count(long long packed, int base) { return packed ? 1 + count(packed / base, base) : 0; }
constexpr int NUM_STAGES = count(OPS, 100), NUM_SOURCES = count(SOURCES, 10);
static_assert(VEC == 8 || VEC == 1, "8 halfs in one access, or 1");
static_assert(NUM_SOURCES > 0, "a chain begins with source 0");

struct PointwiseParams {
  u32* nonfinite;
  Y* y;
  Source source[NUM_SOURCES];
  View out;
  int total;                             // threads with work
  int inner, pixels, blocks, v, c, w;    // w: pixels per row with ROWS, else all of them are one row
  float param[NUM_STAGES ? NUM_STAGES : 1][2];
};

template <int OP>
__device__ __forceinline__ float apply(float v, float b, float p, float q) {
  if (OP == OP_ADD) return v + b;
  if (OP == OP_SUB) return v - b;
  if (OP == OP_RSUB) return b - v;
  if (OP == OP_MUL) return v * b;
  if (OP == OP_DIV) return v / b;
  if (OP == OP_RDIV) return b / v;
  if (OP == OP_MAX) return b > v || b != b ? b : v;  // NaN stays NaN, as in ONNX
  if (OP == OP_MIN) return b < v || b != b ? b : v;
  if (OP == OP_POW) return powf(v, b);
  if (OP == OP_RPOW) return powf(b, v);
  if (OP == OP_PRELU) return v >= 0.f ? v : v * b;
  if (OP == OP_ABS) return fabsf(v);
  if (OP == OP_CEIL) return ceilf(v);
  if (OP == OP_ERF) return erff(v);
  if (OP == OP_EXP) return __expf(v);
  if (OP == OP_FLOOR) return floorf(v);
  if (OP == OP_LOG) return logf(v);
  if (OP == OP_ROUND) return rintf(v);
  if (OP == OP_SIGN) return v > 0.f ? 1.f : v < 0.f ? -1.f : v;
  if (OP == OP_SOFTSIGN) return v / (1.f + fabsf(v));
  if (OP == OP_SQRT) return sqrtf(v);
  if (OP == OP_SQUARE) return v * v;
  if (OP == OP_THRESHOLDED_RELU) return v > p ? v : 0.f;
  return activate<OP>(v, p, q, 0.f);
}

template <int I>
__device__ __forceinline__ void load_sources(const PointwiseParams& p, const Place& at, float (&s)[NUM_SOURCES][VEC]) {
  if constexpr (I < NUM_SOURCES) {
    constexpr int kind = digits(SOURCES, 10, I);
    const Source& source = p.source[I];
    const long long i = source.spread.at(at);
    const __half* half = static_cast<const __half*>(source.at) + i;
    const float* single = static_cast<const float*>(source.at) + i;
    if constexpr (kind == TENSOR) {
      load_vec(half, s[I]);
    } else if constexpr (kind == CONSTANT && VEC == 8) {
      const float4 low = *reinterpret_cast<const float4*>(single), high = *reinterpret_cast<const float4*>(single + 4);
      s[I][0] = low.x, s[I][1] = low.y, s[I][2] = low.z, s[I][3] = low.w;
      s[I][4] = high.x, s[I][5] = high.y, s[I][6] = high.z, s[I][7] = high.w;
    } else if constexpr (kind == TENSOR_F32) {
      load_vec(single, s[I]);
    } else {
      const float value = kind == TENSOR_ONE_CHANNEL ? __half2float(*half) : *single;
#pragma unroll
      for (int j = 0; j < VEC; ++j) s[I][j] = value;
    }
    load_sources<I + 1>(p, at, s);
  }
}

template <int I>
__device__ __forceinline__ void run_stages(const PointwiseParams& p, const float (&s)[NUM_SOURCES][VEC], float (&v)[VEC]) {
  if constexpr (I < NUM_STAGES) {
    constexpr int from = digits(OPERANDS, 10, I);
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      v[j] = apply<digits(OPS, 100, I)>(v[j], from ? s[from ? from - 1 : 0][j] : p.param[I][0], p.param[I][0], p.param[I][1]);
    run_stages<I + 1>(p, s, v);
  }
}

extern "C" __global__ void __launch_bounds__(256) pointwise(const __grid_constant__ PointwiseParams p) {
  release_next_launch();
  const unsigned i = blockIdx.x * 256 + threadIdx.x;
  if (i >= static_cast<unsigned>(p.total)) return;
  const unsigned line = i / p.inner, plane = line / p.pixels, pixel = line % p.pixels;
  Place at;
  at.image = plane / p.blocks, at.channel = plane % p.blocks * p.v + i % p.inner * VEC;
  at.row = ROWS ? pixel / p.w : 0, at.column = ROWS ? pixel % p.w : pixel;

  wait_for_previous_launch();
  float v[VEC] = {};
  if (at.channel < p.c) {  // beyond it there is only padding, which a source need not have
    float s[NUM_SOURCES][VEC];
    load_sources<0>(p, at, s);
#pragma unroll
    for (int j = 0; j < VEC; ++j) v[j] = s[0][j];
    run_stages<0>(p, s, v);
#pragma unroll
    for (int j = 0; j < VEC; ++j)
      if (at.channel + j >= p.c) v[j] = 0.f;  // padded channels stay zero, whatever op(0) is
  }
  store_vec(p.y + p.out.at(at.image, at.channel, pixel), v, p.nonfinite);
}
