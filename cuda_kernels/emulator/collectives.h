// What the lanes of a warp compute together: shuffles, votes, matches, reductions, tensor core products.
#pragma once
#include "memory.h"
#include "mma_bytes.h"

namespace {

inline void shuffle(Block& k, Warp& w, const Ins& in, u32 m) {
    u32 a[LANES], r[LANES], inside = 0;
    memcpy(a, operand(k, w, in.o[2]), sizeof a);
    const u32 *b = (u32*)operand(k, w, in.o[3]), *c = (u32*)operand(k, w, in.o[4]);
    for (u32 i = 0; i < LANES; i++) {
        u32 bv = b[i] & 31, cv = c[i] & 31, seg = c[i] >> 8 & 31;
        u32 max = (i & seg) | (cv & ~seg), min = i & seg;
        s32 j;
        bool p;
        switch (in.sub) {
            case 0: j = (s32)(i - bv), p = j >= (s32)max; break;           // up
            case 1: j = (s32)(i + bv), p = j <= (s32)max; break;           // down
            case 2: j = (s32)(i ^ bv), p = j <= (s32)max; break;           // bfly
            default: j = (s32)(min | (bv & ~seg)), p = j <= (s32)max;      // idx
        }
        if (!p) j = (s32)i;
        r[i] = a[j], inside |= (u32)p << i;
    }
    if (in.o[0] >= 0) blend32(operand(k, w, in.o[0]), r, m);
    if (in.o[1] >= 0) {
        u32* d = pred(w, in.o[1]);
        *d = (*d & ~m) | (inside & m);
    }
}

inline void broadcast(Block& k, Warp& w, s32 o, u32 v, u32 m) {
    u32 r[LANES];
    for (u32& x : r) x = v;
    blend32(operand(k, w, o), r, m);
}

inline void vote(Block& k, Warp& w, const Ins& in, u32 m) {
    u32 p = *(u32*)operand(k, w, in.o[2]);
    if (in.flags & PRED_NOT) p = ~p;
    p &= m;
    if (in.sub == 0) return broadcast(k, w, in.o[0], p, m);  // ballot
    bool v = in.sub == 1 ? p != 0 : in.sub == 2 ? p == m : p == 0 || p == m;  // any, all, uni
    u32* d = pred(w, in.o[0]);
    *d = v ? *d | m : *d & ~m;
}

inline void match(Block& k, Warp& w, const Ins& in, u32 m) {
    u32 r[LANES] = {};
    u64 v[LANES];
    const u8* a = operand(k, w, in.o[2]);
    for (int i = 0; i < LANES; i++) v[i] = in.size == 8 ? ((const u64*)a)[i] : ((const u32*)a)[i];
    bool same = true;
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++)
            if ((m >> i & 1) && (m >> j & 1)) {
                if (v[i] == v[j]) r[i] |= 1u << j;
                else same = false;
            }
    if (in.sub == 0) return blend32(operand(k, w, in.o[0]), r, m);
    broadcast(k, w, in.o[0], same ? m : 0, m);
    if (in.o[1] >= 0) {
        u32* d = pred(w, in.o[1]);
        *d = same ? *d | m : *d & ~m;
    }
}

inline void reduce(Block& k, Warp& w, const Ins& in, u32 m) {
    const u32* a = (const u32*)operand(k, w, in.o[2]);
    u32 first = __builtin_ctz(m), r = a[first];
    for (u32 i = first + 1; i < LANES; i++)
        if (m >> i & 1) r = (u32)atom_result(in.sub & 255, in.sub >> 8, r, a[i], 0);
    broadcast(k, w, in.o[0], r, m);
}

// elect.sync: which lane it is, the ISA leaves open. CUTLASS lets the elected lane do what it asks of lane 0: it is the lowest.
inline void elect(Block& k, Warp& w, const Ins& in, u32 m) {
    const u32 leader = m & (~m + 1);
    if (in.o[0] >= 0) broadcast(k, w, in.o[0], (u32)__builtin_ctz(leader), m);
    u32* d = pred(w, in.o[1]);
    *d = (*d & ~m) | leader;
}

inline void movmatrix(Block& k, Warp& w, const Ins& in) {
    u16 s[8][8], t[8][8];
    memcpy(s, operand(k, w, in.o[1]), sizeof s);
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++) t[c][r] = s[r][c];
    memcpy(operand(k, w, in.o[0]), t, sizeof t);
}

inline void unordered(u32 pc, int row, int chunk, u32 code, int lane) {  // `lane` holds the code
    fault("metadata", pc, 1u << lane, format("sparse metadata of row %d, columns %d to %d is 0x%x; ::ordered_metadata allows 0x4, 0x8, "
        "0x9, 0xC, 0xD and 0xE", row, 4 * chunk, 4 * chunk + 3, code));
}

template <bool CHECK>
inline void tensor(Block& k, Warp& w, const Ins& in, u32 pc) {
    const bool acc16 = in.sub & MMA_ACC16;
    const int depth = in.size, cd = acc16 ? 2 : 4;
    const u8 *a[4] = {}, *b[4] = {}, *c[4] = {};
    u8* d[4] = {};
    const bool bytes = in.sub & MMA_BYTES;
    const int each = bytes ? 16 : in.sub & MMA_TF32 ? 4 : 8;  // of K in a register's row of four lanes
    const int na = in.kind == K_MMA ? 2 * depth / each : depth / each, nb = depth / each;
    int o = 0;
    for (int i = 0; i < cd; i++) d[i] = operand(k, w, in.o[o++]);
    for (int i = 0; i < na; i++) a[i] = operand(k, w, in.o[o++]);
    for (int i = 0; i < nb; i++) b[i] = operand(k, w, in.o[o++]);
    for (int i = 0; i < cd; i++) c[i] = operand(k, w, in.o[o++]);
    if (CHECK)
        for (int i = cd; i < o + (in.kind == K_MMA_SP); i++) written(k, w, in.o[i], false, FULL, pc, "mma reads");
    (in.kind == K_MMA ? k.mma : k.mma_sp)++;
    const u32* e = in.kind == K_MMA ? nullptr : (const u32*)operand(k, w, in.o[o]);
    int chunk;
    u32 code;
    if (bytes) {
        const int row = mma_bytes(a, b, c, d, depth, in.sub, e, &chunk, &code);
        if (row >= 0) unordered(pc, row, chunk, code, 4 * (row % 8) + row / 8 + 2 * (chunk / 8));
        return;
    }
    if (!e) return mma_dense(a, b, c, d, depth, in.sub, k.launch->sum_bits);
    u8 index[16][16];
    const int row = unpack_metadata(e, (int)in.imm, index, &chunk, &code);
    if (row >= 0) unordered(pc, row, chunk, code, 4 * (row % 8) + 2 * (int)in.imm + chunk / 4);
    mma_sparse(a, b, c, d, index, in.sub, k.launch->sum_bits);
}

inline void predicate(Block& k, Warp& w, const Ins& in, u32 m) {
    u32 a = *(u32*)operand(k, w, in.o[1]), b = *(u32*)operand(k, w, in.o[2]), r;
    switch (in.sub) {
        case 0: r = a; break;
        case 1: r = a & b; break;
        case 2: r = a | b; break;
        case 3: r = a ^ b; break;
        default: r = ~a;
    }
    u32* d = pred(w, in.o[0]);
    *d = (*d & ~m) | (r & m);
}

}  // namespace
