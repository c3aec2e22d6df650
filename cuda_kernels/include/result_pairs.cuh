// Results of a convolution in pairs, as the staging tile holds them in shared memory until they are stored (include/conv.cuh).
#pragma once
#include "ptx.cuh"

#ifndef Y_BYTES
#define Y_BYTES 0
#endif
#if Y_BYTES
#define RESULT char     // an element of y and of the residual, and its bytes
#define RESULT_BYTES 1
#define OUT_VECTOR 16   // channels in 16 bytes
#define RESULTS(tensor) reinterpret_cast<RESULT*>(const_cast<__half*>(tensor))
// Two results: halves in either case, for FP16 holds whole numbers of 8 bits, and movmatrix turns halves. 0x6400 is 1024, and
// 0x6400 + v is 1024 + v for v up to 1023; of an int8 the sign bit is turned, and 128 more are subtracted.
__device__ __forceinline__ u32 load_pair(u32 at) {
  const u32 bits = __byte_perm(Y_BYTES == 1 ? lds_16(at) ^ 0x8080 : lds_16(at), 0x64, 0x4140);
  const __half2 pair = __hsub2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(Y_BYTES == 1 ? 1152.f : 1024.f));
  return *reinterpret_cast<const u32*>(&pair);
}
// 1536 + v, for v from -128 to 255, has v modulo 256 in its low byte.
__device__ __forceinline__ void store_pair(u32 at, u32 bits) {
  const __half2 pair = __hadd2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(1536.f));
  sts_16(at, static_cast<u16>(__byte_perm(*reinterpret_cast<const u32*>(&pair), 0, 0x4420)));
}
#else
#define RESULT __half
#define RESULT_BYTES 2
#define OUT_VECTOR 8
#define RESULTS(tensor) tensor
#define load_pair lds_32
#define store_pair sts_32
#endif
