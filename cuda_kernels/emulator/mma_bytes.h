// Tensor-core products of bytes, with 32-bit integer sums. A register's 32 lanes x 4 bytes are, in memory order, an 8x16 row-major
// block: a0 is A[0:8, 0:16], a1 A[8:16, 0:16], a2 A[0:8, 16:32], a3 A[8:16, 16:32]; b0, b1, ... are the 8x16 blocks of B
// transposed (row n, column k). So operands lie as those of mma.h with half the K; C and D lie as they do there.
#pragma once
#include "mma.h"

enum { MMA_BYTES = 8, MMA_UNSIGNED_A = 16, MMA_UNSIGNED_B = 32, MMA_SATURATE = 64 };  // flags beside those of mma.h

typedef s32 sums8 __attribute__((vector_size(32), aligned(32)));

struct ByteTile {  // operands as numbers of 16 bits, K up to 64
    alignas(64) s16 a[16][64];
    alignas(64) s16 b[32][8][2];  // rows 2j and 2j + 1 of B: their values of a column are beside each other
    alignas(64) s32 d[16][8];
};

inline void widen16(s16* to, const u8* from, bool is_unsigned) {
    if (is_unsigned)
        for (int i = 0; i < 16; i++) to[i] = from[i];
    else
        for (int i = 0; i < 16; i++) to[i] = (s8)from[i];
}

inline void gather_a_bytes(ByteTile& t, const u8* const* a, int blocks, bool is_unsigned) {  // blocks of 16 columns
    for (int j = 0; j < blocks; j++)
        for (int m = 0; m < 16; m++) widen16(&t.a[m][16 * j], a[2 * j + m / 8] + 16 * (m % 8), is_unsigned);
}

inline void gather_b_bytes(ByteTile& t, const u8* const* b, int blocks, bool is_unsigned) {
    for (int j = 0; j < blocks; j++) {
        alignas(32) s16 rows[8][16];
        for (int n = 0; n < 8; n++) widen16(rows[n], b[j] + 16 * n, is_unsigned);
        for (int pair = 0; pair < 8; pair++)
            for (int n = 0; n < 8; n++) memcpy(t.b[8 * j + pair][n], &rows[n][2 * pair], 4);
    }
}

// Adds the products of two values of a row of A with two rows of B. |sum| <= 64 x 255 x 255: 32 bits hold it.
inline sums8 add_pair(sums8 sum, const s16* a, const s16 (*b)[2]) {
#ifdef __AVX2__
    s32 both;
    memcpy(&both, a, 4);
    return sum + (sums8)_mm256_madd_epi16(_mm256_set1_epi32(both), _mm256_load_si256((const __m256i*)b));
#else
    for (int n = 0; n < 8; n++) sum[n] += a[0] * b[n][0] + a[1] * b[n][1];
    return sum;
#endif
}

// Adds C, wrapping or clamped (.satfinite). Every register of C is read before the first of D is written: they may be the same.
inline void add_c_bytes(ByteTile& t, const u8* const* c, u8* const* d, bool saturate) {
    for (int half = 0; half < 2; half++) {
        const s32 *even = (const s32*)c[2 * half], *odd = (const s32*)c[2 * half + 1];
        s32* sums = t.d[8 * half];
        for (int i = 0; i < 64; i++) {
            const s64 sum = (s64)sums[i] + (i % 2 ? odd : even)[i / 2];
            sums[i] = (s32)(saturate ? std::clamp<s64>(sum, INT32_MIN, INT32_MAX) : sum);
        }
    }
    for (int half = 0; half < 2; half++) {
        s32 *even = (s32*)d[2 * half], *odd = (s32*)d[2 * half + 1];
        const s32* sums = t.d[8 * half];
        for (int i = 0; i < 32; i++) even[i] = sums[2 * i], odd[i] = sums[2 * i + 1];
    }
}

// Moves the kept values of a sparse A [16][32] to their columns of 64; the others are zero, which adds nothing to integers. A word
// of metadata describes 32 columns of one row: lane 4g + t has columns 32 (t / 2) .. of row g + 8 (t % 2). So the codes of row 9,
// columns 36 to 39, are bits 4 to 7 of lane 7's. Returns -1, or the row of the first code that is not allowed (*chunk, *code).
inline int expand_bytes(ByteTile& t, const u32* e, int* chunk, u32* code) {
    for (int m = 0; m < 16; m++) {
        alignas(64) s16 row[64] = {};
        for (int c = 0; c < 16; c++) {
            const u32 kept = e[4 * (m % 8) + m / 8 + 2 * (c / 8)] >> 4 * (c % 8) & 15;
            if (!(0x7310u >> kept & 1)) {
                *chunk = c, *code = kept;
                return m;
            }
            row[4 * c + (kept & 3)] = t.a[m][2 * c], row[4 * c + (kept >> 2)] = t.a[m][2 * c + 1];
        }
        memcpy(t.a[m], row, sizeof row);
    }
    return -1;
}

// K = 16 or 32; with metadata `e`, A is sparse and K = 64. Returns as expand_bytes does.
inline int mma_bytes(const u8* const* a, const u8* const* b, const u8* const* c, u8* const* d, int k, int flags, const u32* e,
                     int* chunk, u32* code) {
    ByteTile t;
    gather_a_bytes(t, a, (e ? k / 2 : k) / 16, flags & MMA_UNSIGNED_A);
    if (e) {
        const int row = expand_bytes(t, e, chunk, code);
        if (row >= 0) return row;
    }
    gather_b_bytes(t, b, k / 16, flags & MMA_UNSIGNED_B);
    for (int m = 0; m < 16; m += 4) {
        sums8 acc[4] = {};
        for (int pair = 0; pair < k / 2; pair++)
            for (int i = 0; i < 4; i++) acc[i] = add_pair(acc[i], &t.a[m + i][2 * pair], t.b[pair]);
        for (int i = 0; i < 4; i++) *(sums8*)t.d[m + i] = acc[i];
    }
    add_c_bytes(t, c, d, flags & MMA_SATURATE);
    return -1;
}
