// Whole numbers of 8 bits, signed or not, which FP16 and FP32 hold exactly: 8 of them in one access of 8 bytes.
#pragma once
#include "tensor.cuh"

template <int WHICH>
struct ByteOf {  // of 1
  typedef signed char type;
};
template <>
struct ByteOf<2> {
  typedef unsigned char type;
};

// 8 bytes as 8 halfs. A half of the bits 0x6400 + u is 1024 + u; of a signed byte, u is the byte + 128.
template <typename Byte>
__device__ __forceinline__ uint4 halves_of(const uint2& bytes) {
  constexpr bool SIGNED = static_cast<Byte>(-1) < 0;
  const __half2 zero = __half2half2(__ushort_as_half(SIGNED ? 0x6480 : 0x6400));  // 1024 + 128, or 1024
  uint4 bits;
  __half2* h = reinterpret_cast<__half2*>(&bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 word = (i < 2 ? bytes.x : bytes.y) ^ (SIGNED ? 0x80808080u : 0u);
    const u32 two = __byte_perm(word, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
    h[i] = __hsub2(*reinterpret_cast<const __half2*>(&two), zero);
  }
  return bits;
}

// A number in the low byte: halves to even, saturated, so that none wraps; NaN becomes the least. The sum with 1.5 x 2^23 has
// units of 1 in its last bits.
template <typename Byte>
__device__ __forceinline__ u32 byte_of(float v) {
  constexpr float LEAST = static_cast<Byte>(-1) < 0 ? -128.f : 0.f;
  return __float_as_uint(fminf(fmaxf(v, LEAST), LEAST + 255.f) + 12582912.f);
}
template <typename Byte>
__device__ __forceinline__ u32 bytes_of(const float* v) {  // 4 of them
  const u32 low = __byte_perm(byte_of<Byte>(v[0]), byte_of<Byte>(v[1]), 0x0040);
  return __byte_perm(low, __byte_perm(byte_of<Byte>(v[2]), byte_of<Byte>(v[3]), 0x0040), 0x5410);
}

// 8 bytes in one access, which the compiler would split in two (include/ptx.cuh).
template <typename Byte>
__device__ __forceinline__ void load_bytes(const Byte* at, float (&v)[8]) {
  uint2 r;
  asm("ld.global.v2.b32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(at) : "memory");
  unpack(halves_of<Byte>(r), v);
}
__device__ __forceinline__ void load_vec(const signed char* at, float (&v)[8]) { load_bytes(at, v); }
__device__ __forceinline__ void load_vec(const unsigned char* at, float (&v)[8]) { load_bytes(at, v); }
// Bytes are finite, so nothing is told.
template <typename Byte>
__device__ __forceinline__ void store_bytes(Byte* at, const float (&v)[8]) {
  *reinterpret_cast<uint2*>(at) = {bytes_of<Byte>(v), bytes_of<Byte>(v + 4)};
}
__device__ __forceinline__ void store_vec(signed char* at, const float (&v)[8], u32*) { store_bytes(at, v); }
__device__ __forceinline__ void store_vec(unsigned char* at, const float (&v)[8], u32*) { store_bytes(at, v); }
