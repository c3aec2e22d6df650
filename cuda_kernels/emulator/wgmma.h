// wgmma: what four warps multiply together, asynchronously. The fourth warp that issues it starts it; early it is done there, late
// when the first of them waits for it. Until a warp has waited, none of its instructions may touch the registers (Warp::flying).
//
// Operands lie in 8 x 8 blocks of halves, 8 pieces of 16 bytes each, where a descriptor says (PTX ISA, "Matrix descriptor";
// tests/test_layouts.py compares with CuTe). A warp's 16 rows are then products of mma.h, eight columns at a time.
#pragma once
#include "async.h"
#include "mma.h"

namespace {

// Bits of a record's `sub`, above mma.h's: A or B not along K, negated; A in registers; sparse.
enum : u16 { A_ALONG_MN = 8, B_ALONG_MN = 16, NEGATE_A = 32, NEGATE_B = 64, A_IN_REGISTERS = 128, SPARSE = 256 };
// What a row of registers is in flight for: an operand, or from FLYING_SUMS on sums of a shape.
enum : u8 { FLYING_OPERAND = 1, FLYING_SUMS = 2 };

struct Matrix {
    u32 start, leading, stride, width;  // width: of the swizzle, in 16 bytes
    bool along_mn;
};

// The descriptor of a matrix of `mn` x `depth` halves.
inline Matrix described(u64 d, bool along_mn, u32 mn, u32 depth, u32 pc) {
    static const u32 widths[4] = {1, 8, 4, 2};
    const Matrix x{(u32)(d & 0x3fff) << 4, (u32)(d >> 16 & 0x3fff) << 4, (u32)(d >> 32 & 0x3fff) << 4, widths[d >> 62], along_mn};
    auto wrong = [&](const char* why) {
        fault("descriptor", pc, FULL, format("matrix descriptor 0x%llx: %s", (unsigned long long)d, why));
    };
    if (d & 0x3ff1c000c000c000ull) wrong("bits that the ISA reserves are set");
    if (d >> 49 & 7) wrong("a base offset; only patterns that begin where their size divides the address are executed");
    if (x.width == 1) return x;
    // Along K it may begin in any row of a pattern: the address's bits decide, as CUTLASS's sparse collective has it (tiles at 128).
    const u32 row = 16 * x.width;
    if (along_mn && x.start % (8 * row)) wrong("it does not begin where a swizzle's pattern does: what that means the ISA leaves open");
    if (!along_mn && x.start % row + 2 * depth > row) wrong("its columns are wider than a row of the swizzle's pattern");
    if (along_mn && mn > 8 * x.width && !x.leading) wrong("a leading offset of 0");
    return x;
}

// Where 16 bytes lie: along K row i, columns 8j to 8j + 7; else rows 8i to 8i + 7, column j.
inline u32 piece(const Matrix& x, u32 i, u32 j) {
    u32 off;
    if (!x.along_mn) off = i % 8 * x.width * 16 + i / 8 * x.stride + j * (x.width > 1 ? 16 : x.leading);
    else if (x.width > 1) off = i % x.width * 16 + i / x.width * x.leading + j % 8 * x.width * 16 + j / 8 * x.stride;
    else off = i * x.stride + j % 8 * 16 + j / 8 * x.leading;
    const u32 at = x.start + off;
    return at ^ (at >> 7 & (x.width - 1)) << 4;
}

template <class F>
inline void each_piece(const Matrix& x, u32 mn, u32 depth, F use) {
    const u32 rows = x.along_mn ? mn / 8 : mn, columns = x.along_mn ? depth : depth / 8;
    for (u32 i = 0; i < rows; i++)
        for (u32 j = 0; j < columns; j++) use(piece(x, i, j));
}

// Rows 8i to 8i + 7, columns 8j to 8j + 7, by rows.
inline void gather_block(const Block& k, const Matrix& x, u32 i, u32 j, bool negate, u16* out) {
    for (u32 r = 0; r < 8; r++) {
        if (!x.along_mn) {
            memcpy(out + 8 * r, k.smem + piece(x, 8 * i + r, j), 16);
            continue;
        }
        u16 column[8];
        memcpy(column, k.smem + piece(x, i, 8 * j + r), 16);
        for (u32 c = 0; c < 8; c++) out[8 * c + r] = column[c];
    }
    for (u32 c = 0; negate && c < 64; c++) out[c] ^= 0x8000;
}

struct Shape {  // of a wgmma's record: eights of columns, K, stored K of A, registers of sums and of A
    u32 n8, depth, stored, sums, a;
    explicit Shape(const Ins& in)
        : n8(in.size), depth(in.vec), stored(in.sub & SPARSE ? in.vec / 2 : in.vec), sums(in.size * (in.sub & MMA_ACC16 ? 2 : 4)),
          a(in.sub & A_IN_REGISTERS ? 4 : 0) {}
    u8 code(const Ins& in) const { return (u8)(FLYING_SUMS + n8 + (in.sub & SPARSE ? 64 : 0) + (in.sub & MMA_ACC16 ? 128 : 0)); }
};

// One warp's 16 rows; b: the blocks of B.
inline void warp_product(Block& k, Warp& w, const Ins& in, const Step& s, const Shape& shape, const u16 (*b)[4][64]) {
    const u32* regs = &k.prog->tables[in.imm];
    const u32 each = in.sub & MMA_ACC16 ? 2 : 4;
    alignas(64) static const u8 zero[128] = {};
    alignas(64) u16 own[4][64];
    const u8 *a[4] = {}, *bs[4] = {}, *c[4] = {};
    u8* d[4] = {};
    for (u32 j = 0; j < shape.stored / 8; j++)
        for (u32 half = 0; half < 2; half++) {
            u16* block = own[2 * j + half];
            if (shape.a) {
                memcpy(block, operand(k, w, (s32)regs[shape.sums + 2 * j + half]), 128);
                for (u32 x = 0; (in.sub & NEGATE_A) && x < 64; x++) block[x] ^= 0x8000;
            } else
                gather_block(k, described(s.values[0], in.sub & A_ALONG_MN, 64, shape.stored, s.pc), 2 * (w.index & 3) + half, j,
                    in.sub & NEGATE_A, block);
            a[2 * j + half] = (const u8*)block;
        }
    u8 index[16][16];
    int chunk;
    u32 code;
    if (in.sub & SPARSE) {
        const int row = unpack_metadata((const u32*)operand(k, w, in.o[3]), 0, index, &chunk, &code);
        if (row >= 0)
            fault("metadata", s.pc, 1u << (4 * (row % 8) + chunk / 4), format("sparse metadata of row %d of warp %u, columns %d to %d is "
                "0x%x; 0x4, 0x8, 0x9, 0xC, 0xD and 0xE are ordered", row, w.index, 4 * chunk, 4 * chunk + 3, code));
    }
    const int flags = in.sub & 7;
    for (u32 n = 0; n < shape.n8; n++) {
        for (u32 j = 0; j < shape.depth / 8; j++) bs[j] = (const u8*)b[n][j];
        for (u32 i = 0; i < each; i++) d[i] = operand(k, w, (s32)regs[n * each + i]), c[i] = s.values[2] ? d[i] : zero;
        if (in.sub & SPARSE) mma_sparse(a, bs, c, d, index, flags, k.launch->sum_bits);
        else mma_dense(a, bs, c, d, (int)shape.depth, flags, k.launch->sum_bits);
    }
}

inline void compute(Block& k, Step& s, u32 first_warp) {
    const Ins& in = k.prog->ins[s.pc];
    const Shape shape(in);
    alignas(64) u16 b[32][4][64];
    const Matrix x = described(s.values[1], in.sub & B_ALONG_MN, 8 * shape.n8, shape.depth, s.pc);
    for (u32 n = 0; n < shape.n8; n++)
        for (u32 j = 0; j < shape.depth / 8; j++) gather_block(k, x, n, j, in.sub & NEGATE_B, b[n][j]);
    for (u32 v = first_warp; v < first_warp + 4; v++) warp_product(k, k.warps[v], in, s, shape, b);
    (in.sub & SPARSE ? k.mma_sp : k.mma) += 4 * shape.n8;
    s.done = true;
}

// All four have issued it: its matrices in shared memory are read from now on.
template <bool CHECK>
inline void begin(Block& k, Step& s, u32 first_warp) {
    const Ins& in = k.prog->ins[s.pc];
    const Shape shape(in);
    const u32 number = agent(k, PRODUCTS | k.warps[first_warp].number, "a wgmma");
    s.epoch = ++k.cluster->epochs;
    Warp& as = acting(k, number, s.epoch, s.known, s.fenced);
    Shadow shadow{k, as, s.pc};
    auto reads = [&](u64 descriptor, bool along_mn, u32 mn, u32 depth) {
        each_piece(described(descriptor, along_mn, mn, depth, s.pc), mn, depth, [&](u32 at) {
            if (at < k.launch->smem_base || at + 16 > k.launch->smem_end) shared_object(k, at, 16, 16, 0, s.pc, "wgmma operand");
            if (CHECK) fenced_bytes(k, as, at, 16, s.pc), shadow.read(at, 16, 0, false);
        });
    };
    if (!shape.a) reads(s.values[0], in.sub & A_ALONG_MN, 64, shape.stored);
    reads(s.values[1], in.sub & B_ALONG_MN, 8 * shape.n8, shape.depth);
}

// A descriptor or a predicate that all lanes must share.
inline u64 uniform(Block& k, const Warp& w, s32 o, u32 pc) {
    const u64* d = (const u64*)operand(k, w, o);
    for (u32 i = 1; i < LANES; i++)
        if (d[i] != d[0])
            fault("descriptor", pc, 1u << i, format("matrix descriptor 0x%llx, and 0x%llx in lane 0: all lanes must have the same",
                (unsigned long long)d[i], (unsigned long long)d[0]));
    return d[0];
}

// From now on this warp's registers are in flight.
template <bool CHECK>
inline void take_registers(Block& k, Warp& w, const Ins& in, const Shape& shape, bool adds, u32 pc) {
    const u32* regs = &k.prog->tables[in.imm];
    const u8 code = shape.code(in);
    if (w.flying.empty()) w.flying.assign(k.prog->warp_bytes / 128 + 1, 0);
    w.watch = 0;
    auto take = [&](s32 o, u8 as, bool reads) {
        if (o & 1) return;  // a constant
        if (CHECK && reads) written(k, w, o, false, FULL, pc, "wgmma reads");
        u8& row = w.flying[o >> 8];
        if (row && row != as)
            fault("wgmma", pc, FULL, row == FLYING_OPERAND || as == FLYING_OPERAND
                ? "one of its registers is in flight in another role, for a wgmma that has not been waited for"
                : "its sums are in flight in a wgmma of another shape: only between equal shapes they are ordered without a wait");
        row = as;
    };
    for (u32 i = 0; i < shape.sums; i++) take((s32)regs[i], code, adds && !w.flying[regs[i] >> 8]);
    for (u32 i = 0; i < shape.a; i++) take((s32)regs[shape.sums + i], FLYING_OPERAND, true);
    if (in.sub & SPARSE) take(in.o[3], FLYING_OPERAND, true);
}

// Operands: scale-d, descriptors of A and B, metadata; in the tables the registers of sums and of A.
template <bool CHECK>
inline void issue(Block& k, Warp& w, const Ins& in, u32 pc) {
    Warpgroup& g = group_of(k, w, pc);
    const Shape shape(in);
    const u32 scale = in.o[0] < 0 ? FULL : *(const u32*)operand(k, w, in.o[0]);
    if (scale && scale != FULL) fault("wgmma", pc, ~scale, "scale-d differs between lanes");
    if (in.flags & UNFENCED)
        fault("wgmma", pc, FULL, "a register that it adds to or reads was accessed, and no wgmma.fence stands between on every way here");
    const u64 a = shape.a ? 0 : uniform(k, w, in.o[1], pc), b = uniform(k, w, in.o[2], pc);
    take_registers<CHECK>(k, w, in, shape, scale != 0, pc);
    Step& s = agree(k, w, g, pc, a, b, scale != 0);
    s.product = true, s.commit = w.commits;
    if (s.warps == 15) {
        begin<CHECK>(k, s, w.index & ~3u);
        if (!later(k))
            for (Step& before : g.steps)  // in their order
                if (before.product && !before.done && before.warps == 15) compute(k, before, w.index & ~3u);
    }
    advance(k, g, w);
}

// Wait for all groups but the last `keep`.
inline After wait_products(Block& k, Warp& w, const Ins& in, u32 pc) {
    Warpgroup& g = group_of(k, w, pc);
    auto covered = [&](const Step& s) { return s.product && (s64)s.commit < (s64)w.commits - in.imm; };
    for (Step& s : g.steps)
        if (covered(s) && s.warps != 15) {
            w.state = WAITS;
            return AGAIN;
        }
    const u32 number = agent(k, PRODUCTS | (w.number & ~3u), "a wgmma");
    std::fill(w.flying.begin(), w.flying.end(), 0);
    bool any = false;
    for (Step& s : g.steps) {
        if (covered(s)) {
            if (!s.done) compute(k, s, w.index & ~3u);
            s.waited |= 1u << (w.index & 3), w.known[number] = std::max(w.known[number], s.epoch);
        } else if (s.product && (s.warps >> (w.index & 3) & 1)) {
            const Ins& later = k.prog->ins[s.pc];
            const Shape shape(later);
            const u32* regs = &k.prog->tables[later.imm];
            any = true;
            for (u32 i = 0; i < shape.sums; i++) w.flying[regs[i] >> 8] = shape.code(later);
            for (u32 i = 0; i < shape.a; i++) if (!(regs[shape.sums + i] & 1)) w.flying[regs[shape.sums + i] >> 8] = FLYING_OPERAND;
            if ((later.sub & SPARSE) && !(later.o[3] & 1)) w.flying[later.o[3] >> 8] = FLYING_OPERAND;
        }
    }
    if (!any) w.flying.clear();
    agree(k, w, g, pc);
    advance(k, g, w);
    return NEXT;
}

}  // namespace
