// move: output elements copied from other places of the input: reformat, cast, slice, pad, concat piece, upsample, shuffles.
//
// A thread owns N output channels of one pixel, ITEMS times: 8, or 4 where FP32 moves in 16-byte accesses. Neighbouring threads
// own `fast` neighbouring runs of N channels, then those of the next pixel, then other channels, so that a warp touches whole
// sectors on both sides:
//
//   fast   where a pixel's channels are neighbours   a warp's 32 x N elements
//   all    on both sides                             channels as they lie, of one pixel or many
//   2      on one; the other has planes              16 pixels x 2 N channels: sectors along pixels here, along channels there
//   4      bytes written on that one                 8 pixels x 4 N channels
//   1      on neither                                32 pixels of N planes
//
// Planes that stay as they are the host describes as pixels, and their pixels as channels.
//
// Compile-time: KIND as below; IN_VEC / OUT_VEC: that side moves N channels in one access (they are neighbours, aligned, and,
// for IN_VEC, consecutive channels map to consecutive channels); IN_LINEAR / OUT_LINEAR: its vectors are of one channel;
// IN_TYPE: 0 FP16, 1 FP32, 2 unsigned 8-bit, 3 signed;
// OUT_F32: the output is FP32 instead of FP16; OUT_BYTES: 1 signed, 2 unsigned bytes, rounded and saturated (include/bytes.cuh);
// ITEMS: with IN_VEC, all of them are on their way before the first is stored.
#include "tensor.cuh"

#ifndef OUT_BYTES
#define OUT_BYTES 0
#endif
#if IN_TYPE >= 2 || OUT_BYTES
#include "bytes.cuh"
#endif

enum { KIND_WINDOW, KIND_UPSAMPLE, KIND_D2S_DCR, KIND_D2S_CRD, KIND_S2D_DCR, KIND_S2D_CRD, KIND_CHANNELS, KIND_PART };
constexpr int N = (IN_VEC && IN_TYPE == 1) || (OUT_VEC && OUT_F32) ? 4 : 8;
constexpr int SIZE = IN_TYPE >= 2 ? 1 : IN_TYPE == 1 ? 4 : 2;  // bytes of an input element
constexpr bool SAME_TYPE = IN_TYPE == 0 ? !OUT_F32 && !OUT_BYTES : IN_TYPE + OUT_BYTES == 4;  // which needs no conversion
constexpr bool TO_SPACE = KIND == KIND_D2S_DCR || KIND == KIND_D2S_CRD, TO_DEPTH = KIND == KIND_S2D_DCR || KIND == KIND_S2D_CRD;

// A division of less than 2^31 by a number that the host knows: multiply, shift; and for the rest, multiply and add.
struct Divisor {
  int by;
  u32 reciprocal;  // 2^(31 + shift) / by, rounded up
  int shift;       // log2(by), rounded up
  __device__ __forceinline__ int divide(int x, int& rest) const {
    const int quotient = __umulhi(2 * x, reciprocal) >> shift;
    rest = x - quotient * by;
    return quotient;
  }
};

struct MoveParams {
  u32* nonfinite;
  const void* x;
  void* y;
  View in, out;
  int n, c, h, w;                           // input
  int out_c, filled, first_c, first_pixel;  // this launch's part of the output: where it begins; zeros from `filled` on
  int start_c, start_h, start_w, step_c, step_h, step_w;
  float fill;
  Divisor fast, pixels, runs, width;  // as above; of the output: pixels, runs of fast * N channels, columns
  Divisor rows, columns, inner;       // steps or blocks; channels of a corner, corners, or groups
};

// N output channels from c on of a pixel.
struct Item {
  int image, c, pixel;
  int h, w, corner;  // of the input: the pixel, or its block's first
  bool inside;
};

template <int LINEAR>
__device__ __forceinline__ int offset(const View& v, int image, int c, int pixel) {  // below 2^31, as the host checks
  if (LINEAR) return image * v.n + pixel * v.pixel + c * v.block;
  return image * v.n + (c >> v.log2v) * v.block + pixel * v.pixel + (c & ((1 << v.log2v) - 1));
}

__device__ __forceinline__ Item item(const MoveParams& p, int id) {
  Item at;
  int low, high, row, column;
  const int rest = p.fast.divide(id, low);
  at.image = p.runs.divide(p.pixels.divide(rest, at.pixel), high);
  at.c = (high * p.fast.by + low) * N;
  at.h = 0, at.w = p.start_w + at.pixel, at.inside = at.image < p.n;
  if (KIND == KIND_PART) return at;
  const int oh = p.width.divide(at.pixel, column);
  at.h = p.start_h + oh * p.step_h, at.w = p.start_w + column * p.step_w;
  if (KIND == KIND_UPSAMPLE || TO_SPACE) {
    at.h = p.rows.divide(oh, row), at.w = p.columns.divide(column, column);
    at.corner = row * p.columns.by + column;
  }
  at.inside = at.inside && static_cast<u32>(at.h) < static_cast<u32>(p.h) && static_cast<u32>(at.w) < static_cast<u32>(p.w);
  return at;
}

// The input's channel for an output channel that is `c` or, where that is divided, `high` x inner + `low`; moves to its corner.
__device__ __forceinline__ int channel(const MoveParams& p, const Item& at, int c, int high, int low, int& h, int& w) {
  if (TO_DEPTH) {
    int column;
    h += p.rows.divide(KIND == KIND_S2D_DCR ? high : low, column), w += column;
    return KIND == KIND_S2D_DCR ? low : high;
  }
  if (KIND == KIND_CHANNELS) return low * p.step_c + high;
  if (KIND == KIND_D2S_DCR) return at.corner * p.filled + c;
  if (KIND == KIND_D2S_CRD) return c * p.inner.by + at.corner;
  return p.start_c + c * p.step_c;
}

__device__ __forceinline__ const void* address(const MoveParams& p, int from) {
  return static_cast<const char*>(p.x) + static_cast<long long>(from) * SIZE;
}

// Reads an item's channels, as they lie, to `bits`: how many the input has, from its first on.
__device__ __forceinline__ int read(const MoveParams& p, const Item& at, uint4& bits) {
  int high = 0, low = 0, h = at.h, w = at.w;
  if (TO_DEPTH) high = p.inner.divide(at.c, low);
  const int c = channel(p, at, at.c, high, low, h, w);
  const int known = KIND == KIND_PART ? at.inside ? p.filled - at.c : 0 : at.inside && c >= 0 ? p.c - c : 0;
  const void* from = address(p, offset<IN_LINEAR>(p.in, at.image, c, h * p.w + w));
  if (N * SIZE == 16) {
    bits = ldg_128_if(known > 0, from);
  } else if (N * SIZE == 8) {
    const uint2 half = known > 0 ? *static_cast<const uint2*>(from) : uint2{};
    bits.x = half.x, bits.y = half.y;
  } else if (known > 0) {
    bits.x = *static_cast<const u32*>(from);
  }
  return known;
}

// The bits of an input element, or 0; and their value.
__device__ __forceinline__ u32 read_if(bool ok, const MoveParams& p, int from) {
#define LOAD(TYPE) \
  asm("{ .reg .pred q; setp.ne.b32 q, %2, 0; mov.b32 %0, 0; @q ld.global." TYPE " %0, [%1]; }" \
      : "=&r"(bits) : "l"(address(p, from)), "r"(static_cast<u32>(ok)))
  u32 bits;
  if (IN_TYPE == 0) LOAD("u16");
  if (IN_TYPE == 1) LOAD("b32");
  if (IN_TYPE >= 2) LOAD("u8");
  return bits;
}
__device__ __forceinline__ float number(u32 bits) {
  if (IN_TYPE == 0) return __half2float(__ushort_as_half(bits));
  if (IN_TYPE == 3) return static_cast<float>(static_cast<signed char>(bits));
  return IN_TYPE == 1 ? __uint_as_float(bits) : static_cast<float>(bits);
}

__device__ __forceinline__ void convert(const uint4& bits, float (&v)[N]) {
#if IN_TYPE >= 2
  float eight[8];
  unpack(halves_of<ByteOf<4 - IN_TYPE>::type>({bits.x, bits.y}), eight);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = eight[j];
#else
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (IN_TYPE == 0) v[j] = number(words[j / 2] >> j % 2 * 16 & 65535);
    if (IN_TYPE == 1) v[j] = number(words[j % 4]);
  }
#endif
}

__device__ __forceinline__ void read_each(const MoveParams& p, const Item& at, float (&v)[N]) {
  int high = 0, low = 0;
  u32 bits[N], known = 0;  // all elements are on their way before one is converted
  if (TO_DEPTH || KIND == KIND_CHANNELS) high = p.inner.divide(at.c, low);
  const int first = offset<IN_LINEAR>(p.in, at.image, p.start_c + at.c, at.w);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    int h = at.h, w = at.w;
    const int c = channel(p, at, at.c + j, high, low, h, w), from = offset<IN_LINEAR>(p.in, at.image, c, h * p.w + w);
    const bool ok = at.inside && at.c + j < p.filled && (KIND == KIND_PART || (c >= 0 && c < p.c));
    known |= static_cast<u32>(ok) << j;
    bits[j] = read_if(ok, p, IN_LINEAR && KIND == KIND_PART ? first + j * p.in.block : from);
    if (++low == p.inner.by) low = 0, ++high;
  }
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = KIND == KIND_PART || (known >> j & 1) ? number(bits[j]) : p.fill;
}

__device__ __forceinline__ int place(const MoveParams& p, const Item& at, int j = 0) {
  return offset<OUT_LINEAR>(p.out, at.image, p.first_c + at.c + j, p.first_pixel + at.pixel);
}

#if OUT_BYTES
__device__ __forceinline__ void write(const MoveParams& p, const Item& at, const float (&v)[N], Watch&) {
  typedef ByteOf<OUT_BYTES>::type Byte;
  Byte* const y = static_cast<Byte*>(p.y);
  if (OUT_VEC && N == 8)
    *reinterpret_cast<uint2*>(y + place(p, at)) = {bytes_of<Byte>(v), bytes_of<Byte>(v + N - 4)};
  else if (OUT_VEC)
    *reinterpret_cast<u32*>(y + place(p, at)) = bytes_of<Byte>(v);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (OUT_VEC || at.c + j >= p.out_c) break;
    y[place(p, at, j)] = byte_of<Byte>(v[j]);
  }
}
#else
__device__ __forceinline__ void write(const MoveParams& p, const Item& at, const float (&v)[N], Watch& watch) {
  __half* const half = static_cast<__half*>(p.y);
  float* const single = static_cast<float*>(p.y);
  float zero = 0.f;  // or NaN, as Watch has it
#pragma unroll
  for (int j = 0; j < N; ++j)
    if (OUT_F32) zero = fmaf(0.f, v[j], zero);
  if (OUT_VEC && OUT_F32) {
    stg_128(single + place(p, at), {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])});
  } else if (OUT_VEC) {
    __half2 pairs[4] = {};
#pragma unroll
    for (int j = 0; j < N; j += 2) pairs[j / 2] = __floats2half2_rn(v[j], v[j + 1]), watch.see(pairs[j / 2]);
    const uint4& bits = *reinterpret_cast<const uint4*>(pairs);
    if (N == 8)
      stg_128(half + place(p, at), bits);
    else
      *reinterpret_cast<uint2*>(half + place(p, at)) = {bits.x, bits.y};
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (OUT_VEC || at.c + j >= p.out_c) break;
    const __half rounded = __float2half_rn(v[j]);
    if (OUT_F32)
      single[place(p, at, j)] = v[j];
    else
      half[place(p, at, j)] = rounded, watch.see(rounded);
  }
  if (OUT_F32) watch.see(zero);
}
#endif

extern "C" __global__ void __launch_bounds__(256, KIND == KIND_PART ? 8 : 6) move(const __grid_constant__ MoveParams p) {
  release_next_launch();
  wait_for_previous_launch();
  Item at[ITEMS];
  uint4 bits[ITEMS];
  int known[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    at[i] = item(p, (blockIdx.x * ITEMS + i) * 256 + threadIdx.x);
    if (IN_VEC) known[i] = read(p, at[i], bits[i]);
  }
  Watch watch;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (at[i].image >= p.n || at[i].c >= p.out_c) continue;
    if (KIND == KIND_PART && IN_VEC && OUT_VEC && SAME_TYPE && at[i].c + N <= p.filled) {
      if (OUT_BYTES)
        *reinterpret_cast<uint2*>(static_cast<char*>(p.y) + place(p, at[i])) = {bits[i].x, bits[i].y};
      else
        stg_128(static_cast<__half*>(p.y) + place(p, at[i]), bits[i]), watch.see(bits[i]);
      continue;
    }
    float v[N];
    if (IN_VEC)
      convert(bits[i], v);
    else
      read_each(p, at[i], v);
    if (IN_VEC && KIND != KIND_PART && known[i] < N) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (j >= known[i]) v[j] = p.fill;
    }
    if ((IN_VEC || KIND != KIND_PART) && at[i].c + N > p.filled) {
#pragma unroll
      for (int j = 0; j < N; ++j)
        if (at[i].c + j >= p.filled) v[j] = 0.f;
    }
    write(p, at[i], v, watch);
  }
  watch.report(p.nonfinite);
}
