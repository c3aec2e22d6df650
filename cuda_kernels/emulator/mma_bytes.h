// Tensor-core products of bytes, with 32-bit integer sums. A register's 32 lanes x 4 bytes are, in memory order, an 8x16
// row-major block: a0 is A[0:8, 0:16], a1 A[8:16, 0:16], a2 A[0:8, 16:32], a3 A[8:16, 16:32]; b0, b1, ... are the 8x16 blocks
// of B transposed (row n, column k). So operands lie as those of mma.h with half the K; C and D lie as they do there.
#pragma once
#include "mma.h"

enum { MMA_BYTES = 8, MMA_UNSIGNED_A = 16, MMA_UNSIGNED_B = 32, MMA_SATURATE = 64 };  // flags beside those of mma.h

// A row's columns 0, 2, 4, 6, then 1, 3, 5, 7, since a register of C holds the even or the odd ones. Each has 32 bits: a sum,
// or values of two rows of B, the first in the low half.
typedef u32 columns8 __attribute__((vector_size(32), aligned(32)));
typedef u16 values16 __attribute__((vector_size(32), aligned(32)));
typedef s16 signed16 __attribute__((vector_size(32), aligned(32)));
typedef u8 bytes16 __attribute__((vector_size(16)));
typedef s8 signed_bytes16 __attribute__((vector_size(16)));

struct ByteTile {  // factors as numbers of 16 bits
    alignas(64) s16 a[16][32];
    columns8 b[16][16];  // of each four rows of B the two that a code of metadata names: 4 rows 0 and 1, 14 rows 2 and 3
    alignas(64) u32 d[4][LANES];  // as the registers of C
};

inline void gather_a_bytes(ByteTile& t, const u8* const* a, int blocks, bool is_unsigned) {  // blocks of 16 columns
    for (int j = 0; j < blocks; j++)
        for (int m = 0; m < 16; m++) {
            bytes16 row;
            memcpy(&row, a[2 * j + m / 8] + 16 * (m % 8), 16);
            const values16 wide = is_unsigned ? __builtin_convertvector(row, values16)
                                              : (values16)__builtin_convertvector((signed_bytes16)row, signed16);
            *(values16*)&t.a[m][16 * j] = wide;
        }
}

inline void gather_b_bytes(ByteTile& t, const u8* const* b, int blocks, bool is_unsigned) {
    const columns8 low = columns8{} + 0xffff;
    for (int four = 0; four < 4 * blocks; four++) {
        const u8* block = b[four / 4] + 4 * (four % 4);
        u32 n[8];
        for (int i = 0; i < 8; i++) memcpy(&n[i], block + 16 * i, 4);
        const columns8 rows = {n[0], n[2], n[4], n[6], n[1], n[3], n[5], n[7]};  // four, a byte each
        const values16 first = (values16)rows << 8, second = (values16)rows;
        const columns8 even = (columns8)(is_unsigned ? first >> 8 : (values16)((signed16)first >> 8));  // rows 0 and 2
        const columns8 odd = (columns8)(is_unsigned ? second >> 8 : (values16)((signed16)second >> 8));
        columns8* to = t.b[four];
        to[4] = (even & low) | odd << 16, to[14] = even >> 16 | (odd & ~low);
        to[8] = even, to[9] = (odd & low) | (even & ~low), to[12] = (even & low) | (odd & ~low), to[13] = odd;
    }
}

// Adds the products of two values of a row of A with two rows of B. |sum| <= 32 x 255 x 255: 32 bits hold it.
inline columns8 add_pair(columns8 sum, const s16* a, columns8 b) {
#ifdef __AVX2__
    s32 both;
    memcpy(&both, a, 4);
    return sum + (columns8)_mm256_madd_epi16(_mm256_set1_epi32(both), (__m256i)b);
#else
    for (int n = 0; n < 8; n++) sum[n] += (u32)(a[0] * (s16)b[n] + a[1] * (s16)(b[n] >> 16));
    return sum;
#endif
}

inline void put_row(ByteTile& t, int m, columns8 sums) {
    for (int odd = 0; odd < 2; odd++) memcpy(&t.d[m / 8 * 2 + odd][4 * (m % 8)], (const u32*)&sums + 4 * odd, 16);
}

inline void multiply_bytes(ByteTile& t, int k) {
    for (int m = 0; m < 16; m += 4) {
        columns8 acc[4] = {};
#pragma GCC unroll 1  // unrolled more, the sums do not stay in registers
        for (int j = 0; j < k / 4; j++)
            for (int i = 0; i < 4; i++) {
                acc[i] = add_pair(acc[i], &t.a[m + i][4 * j], t.b[j][4]);
                acc[i] = add_pair(acc[i], &t.a[m + i][4 * j + 2], t.b[j][14]);
            }
        for (int i = 0; i < 4; i++) put_row(t, m + i, acc[i]);
    }
}

// Sparse A, 64 logical columns. A word of metadata describes 32 columns of one row: lane 4g + t has columns 32 (t / 2) .. of
// row g + 8 (t % 2). So the code of row 9, columns 36 to 39, is bits 4 to 7 of lane 7's.
inline u64 codes_of(const u32* e, int m) {  // of 16 times four columns
    const u32* quad = e + 4 * (m % 8) + m / 8;
    return quad[0] | (u64)quad[2] << 32;
}
inline void multiply_kept_bytes(ByteTile& t, const u32* e) {
    for (int m = 0; m < 16; m += 4) {
        columns8 acc[4] = {};
        u64 codes[4];
        for (int i = 0; i < 4; i++) codes[i] = codes_of(e, m + i);
#pragma GCC unroll 1
        for (int j = 0; j < 16; j++)
            for (int i = 0; i < 4; i++) {
                acc[i] = add_pair(acc[i], &t.a[m + i][2 * j], t.b[j][codes[i] & 15]);
                codes[i] >>= 4;
            }
        for (int i = 0; i < 4; i++) put_row(t, m + i, acc[i]);
    }
}

// The first row with a code that is not allowed (*chunk, *code), or -1. Allowed is a code whose second index is larger than its
// first: then 8 + second - first - 1 has bit 3.
inline int illegal_code(const u32* e, int* chunk, u32* code) {
    u32 all = ~0u;
    for (int i = 0; i < LANES; i++) all &= ((e[i] >> 2 & 0x33333333) | 0x88888888) - (e[i] & 0x33333333) - 0x11111111;
    if ((all & 0x88888888) == 0x88888888) return -1;
    for (int m = 0; m < 16; m++)
        for (int c = 0; c < 16; c++) {
            const u32 found = codes_of(e, m) >> 4 * c & 15;
            if ((found >> 2) > (found & 3)) continue;
            *chunk = c, *code = found;
            return m;
        }
    return -1;
}

// Adds C, wrapping or clamped (.satfinite). Every register of C is read before the first of D is written: they may be the same.
inline void add_c_bytes(ByteTile& t, const u8* const* c, u8* const* d, bool saturate) {
    for (int r = 0; r < 4; r++)
        for (int lane = 0; lane < LANES; lane++) {
            const u32 product = t.d[r][lane], addend = ((const u32*)c[r])[lane], sum = product + addend;
            const u32 end = 0x7fffffff + (addend >> 31), beyond = (sum ^ product) & (sum ^ addend) & (saturate ? ~0u : 0);
            t.d[r][lane] = (s32)beyond < 0 ? end : sum;  // then the sum's sign is that of neither addend
        }
    for (int r = 0; r < 4; r++) memcpy(d[r], t.d[r], sizeof t.d[r]);
}

// K = 16 or 32; with metadata `e`, A is sparse and K = 64. Returns as illegal_code does, and computes nothing then.
inline int mma_bytes(const u8* const* a, const u8* const* b, const u8* const* c, u8* const* d, int k, int flags, const u32* e,
                     int* chunk, u32* code) {
    const int row = e ? illegal_code(e, chunk, code) : -1;
    if (row >= 0) return row;
    ByteTile t;
    gather_a_bytes(t, a, (e ? k / 2 : k) / 16, flags & MMA_UNSIGNED_A);
    gather_b_bytes(t, b, k / 16, flags & MMA_UNSIGNED_B);
    e ? multiply_kept_bytes(t, e) : multiply_bytes(t, k);
    add_c_bytes(t, c, d, flags & MMA_SATURATE);
    return -1;
}
