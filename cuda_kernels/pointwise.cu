// pointwise: a chain of elementwise stages in one pass over its tensors, FP32 inside, rounded once.
//
//   source 0 --> [ stage 0 ] --> [ stage 1 ] --> ... --> y        a stage's operand: a source, or its own scalar
//                     ^               ^
//                 source 1      c.param[1]                        e.g. hard_swish(x * scale + t), one launch
//
// A thread owns VEC neighbouring channels (8 in one 16-byte access, in 8 bytes of bytes, or 1) of one output pixel. Threads go in the order of the
// output's memory: position = ((image * blocks + block) * pixels + pixel) * inner + i, channel = block * v + i * VEC, where
// channels-last is one block and chwV has one block per V channels.
//
// The trick: broadcasting is a stride of 0, so a source that spans only some axes costs an address, never a copy; and each
// chain is straight-line code, because the stages are compile-time digits and everything else is an argument.
//
// Compile-time: VEC; OPS, OPERANDS, SOURCES, BYTES, PLANES (include/stages.cuh); ROWS: a source spans one of the axes h and
// w without the other, so that pixels must be taken apart; Y_F32, Y_BYTES (include/types.cuh).
#include "stages.cuh"

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
