// Tensor-core instructions on rows. With g = lane / 4 and t = lane % 4, register a0's 32 lanes x 2 halves are, in memory order,
// the 8x8 row-major block A[0:8, 0:8]; a1 is A[8:16, 0:8], a2 A[0:8, 8:16], a3 A[8:16, 8:16]. b0, b1, ... are the 8x8 blocks
// of B transposed (row n, column k). c0 and c1 hold the even and odd columns of C[0:8], c2 and c3 those of C[8:16].
#pragma once
#include <algorithm>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include "rows.h"

typedef float v8 __attribute__((vector_size(32), aligned(32)));

inline v8 load_h8(const void* p) {  // eight halves to eight floats
#ifdef __F16C__
    return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    v8 r;
    u16 h[8];
    memcpy(h, p, 16);
    for (int i = 0; i < 8; i++) r[i] = h2f(h[i]);
    return r;
#endif
}
inline v8 load_bf8(const void* p) {
    v8 r;
    u16 h[8];
    memcpy(h, p, 16);
    for (int i = 0; i < 8; i++) r[i] = bf2f(h[i]);
    return r;
}

enum { MMA_F16 = 0, MMA_BF16 = 1, MMA_ACC16 = 2, MMA_TF32 = 4 };  // MMA_ACC16: accumulator and result are halves in pairs

struct Tile {  // operands as floats, K up to 32
    alignas(64) float a[16][32];
    alignas(64) float b[32][8];
    alignas(64) float d[16 * 8];
};

inline void gather_a(Tile& t, const u8* const* a, int blocks, bool bf) {  // blocks of 8 columns
    for (int j = 0; j < blocks; j++)
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < 8; r++) {
                const u8* p = a[2 * j + half] + 16 * r;
                *(v8*)&t.a[8 * half + r][8 * j] = bf ? load_bf8(p) : load_h8(p);
            }
}

// tf32: a register is a row of lanes of one value each, 8 x 4 blocks; the low 13 bits are not read (PTX ISA, tf32 operands).
inline float tf32(const u8* p) {
    u32 v;
    memcpy(&v, p, 4);
    return bits<f32>(v & ~0x1fffu);
}
inline void gather_tf32(Tile& t, const u8* const* a, const u8* const* b) {
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 4; c++)
            for (int j = 0; j < 2; j++) {  // columns 4j .. 4j+3
                for (int half = 0; half < 2; half++) t.a[8 * half + r][4 * j + c] = tf32(a[2 * j + half] + 16 * r + 4 * c);
                t.b[4 * j + c][r] = tf32(b[j] + 16 * r + 4 * c);
            }
}

inline void gather_b(Tile& t, const u8* const* b, int blocks, bool bf) {
    for (int j = 0; j < blocks; j++) {
        alignas(32) float rows[8][8];
        for (int n = 0; n < 8; n++) *(v8*)rows[n] = bf ? load_bf8(b[j] + 16 * n) : load_h8(b[j] + 16 * n);
        for (int k = 0; k < 8; k++)
            for (int n = 0; n < 8; n++) t.b[8 * j + k][n] = rows[n][k];
    }
}

inline void gather_c(Tile& t, const u8* const* c, int flags) {
    if (flags & MMA_ACC16) {
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < 8; r++) *(v8*)&t.d[64 * half + 8 * r] = load_h8(c[half] + 16 * r);
        return;
    }
    for (int half = 0; half < 2; half++) {
        const float *even = (const float*)c[2 * half], *odd = (const float*)c[2 * half + 1];
        float* d = t.d + 64 * half;
        for (int i = 0; i < 32; i++) d[2 * i] = even[i], d[2 * i + 1] = odd[i];
    }
}

inline void scatter_d(const Tile& t, u8* const* d, int flags) {
    if (flags & MMA_ACC16) {
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 32; i++)
                ((u32*)d[half])[i] = f2h(t.d[64 * half + 2 * i]) | f2h(t.d[64 * half + 2 * i + 1]) << 16;
        return;
    }
    for (int half = 0; half < 2; half++) {
        float *even = (float*)d[2 * half], *odd = (float*)d[2 * half + 1];
        const float* s = t.d + 64 * half;
        for (int i = 0; i < 32; i++) even[i] = s[2 * i], odd[i] = s[2 * i + 1];
    }
}

// A sum as tensor cores form it (arXiv 2511.10909, section V; microsoft/MMA-Sim): the addend and `each` products are aligned to the
// largest exponent, cut off `bits` places below it, added exactly, and cut off again to 24 bits (a half is rounded). Exponents are
// those of the factors, added: a product is not normalised. Ampere and Ada: 24 places, 8 products; Hopper's mma: 25, all.
struct Sums {
    int bits, each;
    bool half_factors, half_result;
};
inline int exponent(double x, bool half) {  // subnormal values have the least one
    int e;
    if (x == 0) return -126;
    frexp(x, &e);
    return std::max(e - 1, half ? -14 : -126);
}
inline float cut_off(double x, bool half) {
    if (half) return h2f(d2h(x));
    float f = (float)x;
    if (std::isfinite(x) && std::fabs((double)f) > std::fabs(x)) f = std::nextafter(f, 0.f);
    return f;
}
template <class Column>
inline void truncated(Tile& t, int products, const Sums& s, Column column) {  // column(row, j): B's row for A's j-th value
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            double sum = t.d[8 * m + n];
            for (int first = 0; first < products; first += s.each) {
                int most = exponent(sum, s.half_result), last = std::min(products, first + s.each);
                double plain = sum;
                for (int j = first; j < last; j++) {
                    float a = t.a[m][j], b = t.b[column(m, j)][n];
                    plain += (double)a * b;
                    most = std::max(most, a == 0 || b == 0 ? -252 : exponent(a, s.half_factors) + exponent(b, s.half_factors));
                }
                if (!std::isfinite(plain)) {
                    sum = plain;
                    continue;
                }
                s64 total = (s64)std::ldexp(sum, s.bits - most);
                for (int j = first; j < last; j++) total += (s64)std::ldexp((double)t.a[m][j] * t.b[column(m, j)][n], s.bits - most);
                sum = cut_off(std::ldexp((double)total, most - s.bits), s.half_result);
            }
            t.d[8 * m + n] = (float)sum;
        }
}
inline Sums sums_of(u32 bits, int flags) {
    return {(int)bits, flags & MMA_TF32 ? bits == 24 ? 4 : 8 : bits == 24 ? 8 : 16, !(flags & (MMA_BF16 | MMA_TF32)), (flags & MMA_ACC16) != 0};
}

inline v8 fma8(float a, v8 b, v8 c) {
#ifdef __FMA__
    return (v8)_mm256_fmadd_ps(_mm256_set1_ps(a), (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
// B as floats: one row of `bt` per k, its even columns first, then the odd ones (the order of the accumulator registers).
inline void columns_b(float (*bt)[8], const u8* const* b, int blocks) {
    alignas(64) static const u16 pick[32] = {0, 16, 32, 48, 8,  24, 40, 56, 1, 17, 33, 49, 9,  25, 41, 57,
                                             2, 18, 34, 50, 10, 26, 42, 58, 3, 19, 35, 51, 11, 27, 43, 59};
    const __m512i first = _mm512_load_si512(pick), second = _mm512_add_epi16(first, _mm512_set1_epi16(4));
    for (int j = 0; j < blocks; j++) {
        __m512i lo = _mm512_load_si512(b[j]), hi = _mm512_load_si512(b[j] + 64);
        for (int q = 0; q < 2; q++) {
            __m512i x = _mm512_permutex2var_epi16(lo, q ? second : first, hi);
            _mm512_store_ps(bt[8 * j + 4 * q], _mm512_cvtph_ps(_mm512_castsi512_si256(x)));
            _mm512_store_ps(bt[8 * j + 4 * q + 2], _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)));
        }
    }
}

// m16n8k16 with f32 accumulators, in C's own lane order: a vector holds four rows x four lanes of one accumulator register.
// For each k, B's even (or odd) columns are one 128-bit group repeated for the four rows; A[row][k] fills its group.
inline void mma_k16_f16(const u8* const* a, const u8* const* b, const u8* const* c, u8* const* d) {
    alignas(64) float bt[16][8];
    columns_b(bt, b, 2);
    __m512 all[2][2][2];  // kept until the end: d may lie on a, b or c
    for (int half = 0; half < 2; half++) {
        auto& acc = all[half];  // [rows 0-3, 4-7][even, odd]
        for (int r = 0; r < 2; r++)
            for (int p = 0; p < 2; p++) acc[r][p] = _mm512_load_ps(c[2 * half + p] + 64 * r);
        for (int j = 0; j < 2; j++) {
            const u8* blk = a[2 * j + half];
            __m512 rows[4];  // rows 2i and 2i+1, eight columns each
            for (int i = 0; i < 4; i++) rows[i] = _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)(blk + 32 * i)));
            for (int q = 0; q < 2; q++) {  // columns 4q..4q+3 of four rows
                __m512 r0 = q ? _mm512_shuffle_f32x4(rows[0], rows[1], 0xdd) : _mm512_shuffle_f32x4(rows[0], rows[1], 0x88);
                __m512 r1 = q ? _mm512_shuffle_f32x4(rows[2], rows[3], 0xdd) : _mm512_shuffle_f32x4(rows[2], rows[3], 0x88);
#define STEP(K)                                                                              \
    {                                                                                        \
        __m512 even = _mm512_broadcast_f32x4(_mm_load_ps(&bt[8 * j + 4 * q + K][0]));        \
        __m512 odd = _mm512_broadcast_f32x4(_mm_load_ps(&bt[8 * j + 4 * q + K][4]));         \
        __m512 x = _mm512_permute_ps(r0, K * 0x55), y = _mm512_permute_ps(r1, K * 0x55);     \
        acc[0][0] = _mm512_fmadd_ps(x, even, acc[0][0]), acc[0][1] = _mm512_fmadd_ps(x, odd, acc[0][1]); \
        acc[1][0] = _mm512_fmadd_ps(y, even, acc[1][0]), acc[1][1] = _mm512_fmadd_ps(y, odd, acc[1][1]); \
    }
                STEP(0) STEP(1) STEP(2) STEP(3)
#undef STEP
            }
        }
    }
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < 2; r++)
            for (int p = 0; p < 2; p++) _mm512_store_ps((float*)(d[2 * half + p] + 64 * r), all[half][r][p]);
}
#define HAVE_MMA_K16_F16 1
#endif

// Dense, k = 8 or 16. Every accumulator register is read before the first result register is written.
inline void mma_dense(const u8* const* a, const u8* const* b, const u8* const* c, u8* const* d, int k, int flags, u32 sum_bits) {
#ifdef HAVE_MMA_K16_F16
    if (k == 16 && flags == MMA_F16 && !sum_bits) return mma_k16_f16(a, b, c, d);
#endif
    Tile t;
    bool bf = flags & MMA_BF16;
    if (flags & MMA_TF32) gather_tf32(t, a, b);
    else gather_a(t, a, k / 8, bf), gather_b(t, b, k / 8, bf);
    gather_c(t, c, flags);
    if (sum_bits) {
        truncated(t, k, sums_of(sum_bits, flags), [](int, int j) { return j; });
        return scatter_d(t, d, flags);
    }
    for (int m = 0; m < 16; m += 4) {
        v8 acc[4];
        for (int i = 0; i < 4; i++) acc[i] = *(v8*)&t.d[8 * (m + i)];
        for (int j = 0; j < k; j++)
            for (int i = 0; i < 4; i++) acc[i] = fma8(t.a[m + i][j], *(v8*)t.b[j], acc[i]);
        for (int i = 0; i < 4; i++) *(v8*)&t.d[8 * (m + i)] = acc[i];
    }
    scatter_d(t, d, flags);
}

// A metadata byte describes two chunks: the columns (0 to 7) its four values belong to, one per byte; ~0 if not allowed.
struct Codes {
    u32 columns[256];
    constexpr Codes() : columns() {
        for (u32 byte = 0; byte < 256; byte++) {
            u32 lo = byte & 15, hi = byte >> 4;
            bool legal = (0x7310u >> lo & 1) && (0x7310u >> hi & 1);  // 4, 8, 9, 12, 13, 14: what ::ordered_metadata allows
            columns[byte] = legal ? (lo & 3) | (lo >> 2) << 8 | (4 + (hi & 3)) << 16 | (4 + (hi >> 2)) << 24 : ~0u;
        }
    }
};
constexpr Codes CODES;

// Which columns a sparse row keeps: for row r and 4-wide chunk c, nibble 4*(r/8) + c%4 of the word that lane 4*(r%8) + L holds.
// Returns -1, or the row of the first nibble that is not allowed (*chunk, *code).
inline int unpack_metadata(const u32* e, int selector, u8 (*index)[16], int* chunk, u32* code) {
    for (int r = 0; r < 16; r++)
        for (int c = 0; c < 8; c += 2) {
            int lane = 4 * (r % 8) + 2 * selector + c / 4;
            u32 byte = e[lane] >> (16 * (r / 8) + 4 * (c % 4)) & 255, columns = CODES.columns[byte];
            if (columns == ~0u) {
                bool first = !(0x7310u >> (byte & 15) & 1);
                *chunk = first ? c : c + 1, *code = first ? byte & 15 : byte >> 4;
                return r;
            }
            columns += 0x01010101u * (u32)(4 * c);
            memcpy(&index[r][2 * c], &columns, 4);
        }
    return -1;
}

// Sparse A: 32 logical columns, half of them stored. Columns not kept are not multiplied: 0 x Inf cannot arise.
inline void mma_sparse(const u8* const* a, const u8* const* b, const u8* const* c, u8* const* d, u8 (*index)[16], int flags,
                       u32 sum_bits) {
    Tile t;
#ifdef HAVE_MMA_K16_F16
    if (flags == MMA_F16 && !sum_bits) {
        columns_b(t.b, b, 4), gather_a(t, a, 2, false);
        for (int half = 0; half < 2; half++) {
            __m256 acc[8];
            for (int i = 0; i < 8; i++)
                acc[i] = _mm256_set_m128(_mm_load_ps((const float*)(c[2 * half + 1] + 16 * i)), _mm_load_ps((const float*)(c[2 * half] + 16 * i)));
            const float* av = t.a[8 * half];
            const u8* at = index[8 * half];
            for (int j = 0; j < 16; j++)
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    acc[i] = _mm256_fmadd_ps(_mm256_set1_ps(av[32 * i + j]), _mm256_load_ps(t.b[at[16 * i + j]]), acc[i]);
            for (int i = 0; i < 8; i++) _mm256_store_ps(&t.d[64 * half + 8 * i], acc[i]);
        }
        for (int half = 0; half < 2; half++)
            for (int i = 0; i < 8; i++) {
                memcpy(d[2 * half] + 16 * i, &t.d[64 * half + 8 * i], 16);
                memcpy(d[2 * half + 1] + 16 * i, &t.d[64 * half + 8 * i + 4], 16);
            }
        return;
    }
#endif
    bool bf = flags & MMA_BF16;
    gather_a(t, a, 2, bf), gather_b(t, b, 4, bf), gather_c(t, c, flags);
    if (sum_bits) {
        truncated(t, 16, sums_of(sum_bits, flags), [&](int m, int j) { return index[m][j]; });
        return scatter_d(t, d, flags);
    }
    for (int m = 0; m < 16; m += 4) {
        v8 acc[4];
        for (int i = 0; i < 4; i++) acc[i] = *(v8*)&t.d[8 * (m + i)];
        for (int j = 0; j < 16; j++)
            for (int i = 0; i < 4; i++) acc[i] = fma8(t.a[m + i][j], *(v8*)t.b[index[m + i][j]], acc[i]);
        for (int i = 0; i < 4; i++) *(v8*)&t.d[8 * (m + i)] = acc[i];
    }
    scatter_d(t, d, flags);
}
