// Loads, stores, atomics, cp.async and ldmatrix of 32 lanes; with CHECK each access also goes through shadow.h.
#pragma once
#include "clusters.h"

namespace {

// ---- one space at a time

// A register that no instruction wrote keeps its first value, and copies of it do. It must not reach global memory or an mma.
inline void written(const Block& k, const Warp& w, s32 o, bool wide, u32 m, u32 pc, const char* where) {
    const u8* row = operand(k, w, o);
    u32 bad = 0;
    if (wide)
        for (int i = 0; i < LANES; i++) bad |= (u32)(((const u64*)row)[i] == ((u64)UNWRITTEN << 32 | UNWRITTEN)) << i;
    else
        for (int i = 0; i < LANES; i++) bad |= (u32)(((const u32*)row)[i] == UNWRITTEN) << i;
    if (bad & m) fault("uninitialised", pc, bad & m, format("%s a register that no instruction has written", where));
}

template <class T>
inline void load_rows(Block& k, const Warp& w, const Ins& in, u8* const* p, u32 m) {
    bool wide = in.flags & WIDE, sign = in.flags & SIGNED;
#ifdef __SSE__
    if (sizeof(T) == 4 && in.vec == 4 && m == FULL && !wide && in.o[0] >= 0 && in.o[1] >= 0 && in.o[2] >= 0 && in.o[3] >= 0) {
        float* d[4];
        for (int j = 0; j < 4; j++) d[j] = (float*)operand(k, w, in.o[j]);
        for (int i = 0; i < LANES; i += 4) {
            __m128 x0 = _mm_loadu_ps((const float*)p[i]), x1 = _mm_loadu_ps((const float*)p[i + 1]);
            __m128 x2 = _mm_loadu_ps((const float*)p[i + 2]), x3 = _mm_loadu_ps((const float*)p[i + 3]);
            _MM_TRANSPOSE4_PS(x0, x1, x2, x3);
            _mm_store_ps(d[0] + i, x0), _mm_store_ps(d[1] + i, x1), _mm_store_ps(d[2] + i, x2), _mm_store_ps(d[3] + i, x3);
        }
        return;
    }
#endif
    for (u32 j = 0; j < in.vec; j++) {
        if (in.o[j] < 0) continue;  // `_`
        u8* d = operand(k, w, in.o[j]);
        u8* out = m == FULL ? d : k.scratch[0];
        for (int i = 0; i < LANES; i++) {
            T v;
            memcpy(&v, p[i] + j * sizeof(T), sizeof(T));
            if (wide) ((u64*)out)[i] = sign ? (u64)(s64)(typename std::make_signed<T>::type)v : (u64)v;
            else ((u32*)out)[i] = sign ? (u32)(s32)(typename std::make_signed<T>::type)v : (u32)v;
        }
        if (m != FULL) wide ? blend64(d, out, m) : blend32(d, out, m);
    }
}

template <class T>
inline void store_rows(Block& k, const Warp& w, const Ins& in, u8* const* p, u32 m) {
    bool wide = in.flags & WIDE;
    for (u32 j = 0; j < in.vec; j++) {
        const u8* s = operand(k, w, in.o[j]);
        for (int i = 0; i < LANES; i++) {
            if (!(m >> i & 1)) continue;
            T v = wide ? (T)((const u64*)s)[i] : (T)((const u32*)s)[i];
            memcpy(p[i] + j * sizeof(T), &v, sizeof(T));
        }
    }
}

inline void move_rows(Block& k, const Warp& w, const Ins& in, u8* const* p, u32 m) {
    bool store = in.kind == K_ST;
    switch (in.size) {
        case 1: return store ? store_rows<u8>(k, w, in, p, m) : load_rows<u8>(k, w, in, p, m);
        case 2: return store ? store_rows<u16>(k, w, in, p, m) : load_rows<u16>(k, w, in, p, m);
        case 4: return store ? store_rows<u32>(k, w, in, p, m) : load_rows<u32>(k, w, in, p, m);
        default: return store ? store_rows<u64>(k, w, in, p, m) : load_rows<u64>(k, w, in, p, m);
    }
}

// The lanes of a store to shared memory that change it, of those in m, and those that write it first.
inline u32 changing(Block& k, const Warp& w, const Ins& in, const u64* ad, u32 m) {
    if (in.kind != K_ST) return m;
    u32 differ = 0;
    for (u32 j = 0; j < in.vec; j++) {
        const u8* row = operand(k, w, in.o[j]);
        for (u32 r = m; r; r &= r - 1) {
            u32 i = __builtin_ctz(r);
            const u8* value = in.flags & WIDE ? row + 8 * i : row + 4 * i;
            if (memcmp(k.smem + ad[i] + j * in.size, value, in.size)) differ |= 1u << i;
        }
    }
    Shadow shadow{k, const_cast<Warp&>(w), 0};
    for (u32 r = m & ~differ; r; r &= r - 1)
        if (!shadow.valid((u32)ad[__builtin_ctz(r)], in.size * in.vec)) differ |= r & -r;
    return differ;
}

template <bool CHECK>
void resolve_cluster(Block& k, Warp& w, const u64* ad, u32 m, u32 size, u32 pc, const Ins& in, u8** p, bool write, u8 cell_flags);

// Check one access of the lanes in m, all in one space, and turn the addresses into pointers.
template <bool CHECK>
inline void resolve(Block& k, Warp& w, u8 space, u64* ad, u32 m, u32 size, u32 pc, const Ins& in, u8** p, bool write, u8 cell_flags) {
    u64 lo, hi, all;
    range(ad, lo, hi, all);
    const char* what = write ? "store" : "load";
    if (in.kind == K_ATOM) what = "atomic";
    aligned(ad, all, m, size, pc, what);
    if (space == GLOBAL) {
        global_bounds(k, ad, lo, hi, m, size, pc, what);
        if (CHECK) {
            if (k.launch->dependent && (m & ~w.waited)) early(k, ad, m & ~w.waited, write, pc);
            bool written = count_global(k, pc, ad, m, size, in.kind == K_ATOM ? LOADED | STORED : write ? STORED : LOADED);
            if (write || (in.flags & NC)) mark_global(k, ad, m, size, write, pc);
            if (k.run->many) {
                if ((in.order & SYNC) && write) publish(k, w, ad, m, in.order);
                if (write) remember_writer(k, w, ad, m, size);
                else if (written && !(in.order & SYNC)) check_writer(k, ad, m, size, pc);
            }
        }
        for (int i = 0; i < LANES; i++) p[i] = (u8*)ad[i];
    } else if (space == SHARED) {
        shared_bounds(k, ad, lo, hi, m, size, pc, what);
        if (CHECK) {
            count_shared(k.counts[pc], ad, m, size);
            Shadow shadow{k, w, pc};
            if (in.kind == K_ATOM) shadow.read_lanes(ad, m, size, true);
            if (write) shadow.write_lanes(ad, k.launch->same_value ? changing(k, w, in, ad, m) : m, size, cell_flags);
            else shadow.read_lanes(ad, m, size, (in.flags & STRONG) != 0);
        }
        for (int i = 0; i < LANES; i++) p[i] = k.smem + ad[i];
    } else if (space == CLUSTER) {
        resolve_cluster<CHECK>(k, w, ad, m, size, pc, in, p, write, cell_flags);
    } else if (space == LOCAL) {
        u32 each = k.prog->local_bytes;
        if (hi + size > each || hi + size < size) {
            u32 bad = lanes_where(ad, m, [](u64 a, u64 s) { return a > s; }, each - size);
            fault("out of bounds", pc, bad, format("local %s of %u bytes at local address 0x%llx of %u", what, size, (unsigned long long)hi, each));
        }
        for (int i = 0; i < LANES; i++) p[i] = k.local + (u64)(w.index * LANES + i) * each + ad[i];
    } else {  // PARAM
        if (write || hi + size > k.launch->param_bytes || hi + size < size)
            fault("out of bounds", pc, m, format("param %s of %u bytes at offset %llu of %llu", what, size, (unsigned long long)hi,
                (unsigned long long)k.launch->param_bytes));
        for (int i = 0; i < LANES; i++) p[i] = (u8*)k.launch->params + ad[i];
    }
}

// Accesses to the shared memory of the cluster's blocks are as those blocks' own, by this warp.
template <bool CHECK>
__attribute__((noinline)) void resolve_cluster(Block& k, Warp& w, const u64* ad, u32 m, u32 size, u32 pc, const Ins& in, u8** p, bool write,
                                               u8 cell_flags) {
    for (u32 left = m; left;) {
        const u32 first = __builtin_ctz(left);
        u32 part = 0;
        u64 at[LANES];
        u8* where[LANES];
        for (int i = 0; i < LANES; i++) part |= (u32)((left >> i & 1) && ad[i] >> RANK_SHIFT == ad[first] >> RANK_SHIFT) << i;
        for (int i = 0; i < LANES; i++) at[i] = ((part >> i & 1) ? ad[i] : ad[first]) & OFFSET;
        resolve<CHECK>(owner(k, w, ad[first], part, pc), w, SHARED, at, part, size, pc, in, where, write, cell_flags);
        for (int i = 0; i < LANES; i++)
            if ((part >> i & 1) || !(m >> i & 1)) p[i] = where[i];
        left &= ~part;
    }
}

inline u8 space_of(u64 a) {
    u64 window = a & WINDOW_MASK;
    return window == SHARED_WINDOW ? ((u32)a > OFFSET ? CLUSTER : SHARED) : window == LOCAL_WINDOW ? LOCAL : window == PARAM_WINDOW ? PARAM : GLOBAL;
}

// Of isspacep: the cluster's window holds the block's.
__attribute__((noinline)) bool is_in(u64 a, u16 space) { return space_of(a) == space || (space == CLUSTER && space_of(a) == SHARED); }

// Run `use(space, addresses, mask)` once per space that occurs; nearly always once.
template <class F>
inline void by_space(u8 space, u64* ad, u32 m, F use) {
    if (space == CLUSTER)
        for (int i = 0; i < LANES; i++) ad[i] |= SHARED_WINDOW;
    else if (space != GENERIC) return use(space, ad, m);
    while (m) {
        u8 s = space_of(ad[__builtin_ctz(m)]);
        u32 part = 0;
        u64 first = 0, sub[LANES];
        for (int i = 0; i < LANES; i++)
            if ((m >> i & 1) && space_of(ad[i]) == s) {
                if (!part) first = ad[i];
                part |= 1u << i;
            }
        for (int i = 0; i < LANES; i++) sub[i] = ((part >> i & 1) ? ad[i] : first) & ~(s == GLOBAL ? 0 : WINDOW_MASK);
        use(s, sub, part);
        m &= ~part;
    }
}

inline u64 digest(u64 h, u64 x) { return (h ^ x) * 0x9e3779b97f4a7c15ull + (h >> 29); }

// With `found`, a digest of what was read where.
template <bool CHECK>
inline void load_store(Block& k, Warp& w, const Ins& in, u32 m, u32 pc, u64* found = nullptr) {
    u64 ad[LANES];
    u8* p[LANES];
    addresses(k, w, in.o[8], in.imm, in.flags & ADDR64, m, ad);
    bool write = in.kind == K_ST;
    by_space(in.space, ad, m, [&](u8 space, u64* a, u32 part) {
        resolve<CHECK>(k, w, space, a, part, in.size * in.vec, pc, in, p, write, (in.flags & STRONG) ? VALID | ATOMIC : VALID);
        if (CHECK && write && space == GLOBAL)
            for (u32 j = 0; j < in.vec; j++) written(k, w, in.o[j], in.flags & WIDE, part, pc, "global store of");
        move_rows(k, w, in, p, part);
        if (CHECK && !write && (in.order & SYNC) && space == GLOBAL && k.run->many) observe(k, a, part, in.order);
        if (!found) return;
        for (u32 r = part; r; r &= r - 1) {
            u32 i = __builtin_ctz(r);
            for (u32 j = 0; j < in.vec; j++)
                if (in.o[j] >= 0) {
                    const u8* d = operand(k, w, in.o[j]);
                    *found = digest(digest(*found, (u64)p[i]), in.flags & WIDE ? ((const u64*)d)[i] : ((const u32*)d)[i]);
                }
        }
    });
}

// ---- atomics

enum AtomOp : u16 { A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC };
enum AtomType : u16 { T_U32, T_S32, T_U64, T_S64, T_F32, T_F64, T_F16, T_F16X2, T_BF16, T_BF16X2 };

inline u64 atom_result(u16 op, u16 type, u64 old, u64 b, u64 c) {
    switch (op) {
        case A_AND: return old & b;
        case A_OR: return old | b;
        case A_XOR: return old ^ b;
        case A_EXCH: return b;
        case A_CAS: return old == b ? c : old;
        case A_INC: return (u32)old >= (u32)b ? 0 : old + 1;
        case A_DEC: return ((u32)old == 0 || (u32)old > (u32)b) ? b : old - 1;
        case A_MIN: case A_MAX: {
            bool less = type == T_S32 ? (s32)old < (s32)b : type == T_S64 ? (s64)old < (s64)b : old < b;
            return less == (op == A_MIN) ? old : b;
        }
        default: break;
    }
    switch (type) {  // add
        case T_F32: return bits<u32>(bits<f32>((u32)old) + bits<f32>((u32)b));
        case T_F64: return bits<u64>(bits<f64>(old) + bits<f64>(b));
        case T_F16: return f2h(h2f((u32)old) + h2f((u32)b));
        case T_F16X2: return f2h(h2f((u32)old & 0xffff) + h2f((u32)b & 0xffff)) | f2h(h2f((u32)old >> 16) + h2f((u32)b >> 16)) << 16;
        case T_BF16: return f2bf(bf2f((u32)old) + bf2f((u32)b));
        case T_BF16X2: return f2bf(bf2f((u32)old) + bf2f((u32)b)) | f2bf(bf2f((u32)old >> 16) + bf2f((u32)b >> 16)) << 16;
        default: return old + b;
    }
}

template <class T>
inline u64 atom_at(u8* p, u16 op, u16 type, u64 b, u64 c) {
    T* at = (T*)p;
    T old = __atomic_load_n(at, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(at, &old, (T)atom_result(op, type, old, b, c), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return old;
}

// Returns a digest of what it found, or 0 when it changed memory.
template <bool CHECK>
inline u64 atomic(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    u64 ad[LANES], found = 1;
    bool changed = false;
    u8* p[LANES];
    addresses(k, w, in.o[1], in.imm, in.flags & ADDR64, m, ad);
    by_space(in.space, ad, m, [&](u8 space, u64* a, u32 part) {
        resolve<CHECK>(k, w, space, a, part, in.size, pc, in, p, true, VALID | ATOMIC);
        const u8 *b = operand(k, w, in.o[2]), *c = operand(k, w, in.o[3]);
        u16 op = in.sub & 255, type = in.sub >> 8;
        u64 result[LANES];
        for (int i = 0; i < LANES; i++) {
            if (!(part >> i & 1)) continue;
            u64 x = in.size == 8 ? ((const u64*)b)[i] : ((const u32*)b)[i], y = in.size == 8 ? ((const u64*)c)[i] : ((const u32*)c)[i];
            if (in.size == 2) x &= 0xffff, y &= 0xffff;
            result[i] = in.size == 8 ? atom_at<u64>(p[i], op, type, x, y) : in.size == 4 ? atom_at<u32>(p[i], op, type, x, y)
                                                                                     : atom_at<u16>(p[i], op, type, x, y);
            changed |= atom_result(op, type, result[i], x, y) != result[i];
            found = digest(digest(found, (u64)p[i]), result[i]);
        }
        if (CHECK && space == GLOBAL && (in.order & SYNC) && k.run->many) observe(k, a, part, in.order);
        if (in.o[0] < 0) return;
        u8* d = operand(k, w, in.o[0]);
        for (int i = 0; i < LANES; i++)
            if (part >> i & 1) (in.size == 8 ? ((u64*)d)[i] = result[i] : ((u32*)d)[i] = (u32)result[i]);
    });
    return changed ? 0 : found | 1;
}

// ---- cp.async

inline void copy_now(Block& k, u32 dst, u64 src, u32 bytes, u32 take) {
    if (take == 16) {  // a copy the compiler knows the size of
        memcpy(k.smem + dst, (const void*)src, 16);
        return;
    }
    if (take) memcpy(k.smem + dst, (const void*)src, take);
    if (take < bytes) memset(k.smem + dst + take, 0, bytes - take);
}

template <bool CHECK>
inline void cp_async(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    u64 dst[LANES], src[LANES], lo, hi, all;
    u32 bytes = in.size, take[LANES];
    addresses(k, w, in.o[0], in.imm, in.flags & ADDR64, m, dst);
    addresses(k, w, in.o[1], in.imm2, true, m, src);
    for (int i = 0; i < LANES; i++) take[i] = bytes;
    if (in.o[2] >= 0) memcpy(take, operand(k, w, in.o[2]), sizeof take);
    if (in.o[3] >= 0) {
        u32 ignore = *pred(w, in.o[3]);
        for (int i = 0; i < LANES; i++) take[i] = (ignore >> i & 1) ? 0 : take[i];
    }
    range(dst, lo, hi, all);
    aligned(dst, all, m, bytes, pc, "cp.async write");
    shared_bounds(k, dst, lo, hi, m, bytes, pc, "cp.async write");
    u32 reading = 0;
    for (int i = 0; i < LANES; i++) {
        if (!(m >> i & 1)) continue;
        if (take[i] > bytes) fault("cp.async", pc, 1u << i, format("src-size %u is larger than cp-size %u", take[i], bytes));
        if (take[i]) reading |= 1u << i;
    }
    if (reading) {
        if (reading != FULL) {
            u64 first = src[__builtin_ctz(reading)];
            for (int i = 0; i < LANES; i++) src[i] = (reading >> i & 1) ? src[i] : first;
        }
        range(src, lo, hi, all);
        aligned(src, all, reading, bytes, pc, "cp.async read");
        if (!inside(k, lo, hi + bytes))
            for (int i = 0; i < LANES; i++)
                if (reading >> i & 1) global_bounds(k, src, src[i], src[i], 1u << i, take[i], pc, "cp.async read");
    }
    k.async_bytes += (u64)__builtin_popcount(m) * bytes;
    if (CHECK) {
        Count& c = k.counts[pc];
        count_shared(c, dst, m, bytes);
        u64 written = c.bytes;
        if (k.launch->dependent && (reading & ~w.waited)) early(k, src, reading & ~w.waited, false, pc);
        if (reading && count_global(k, pc, src, reading, bytes, LOADED) && k.run->many)
            check_writer(k, src, reading, bytes, pc);
        c.bytes = written;
        Shadow shadow{k, w, pc};
        shadow.write_lanes(dst, m, bytes, PENDING);
    }
    bool late = k.launch->late;
    for (int i = 0; i < LANES; i++) {
        if (!(m >> i & 1)) continue;
        if (late) memset(k.smem + dst[i], 0xff, bytes);
        else copy_now(k, (u32)dst[i], src[i], bytes, take[i]);
    }
    if (!CHECK && !late) return;
    w.async.emplace_back();
    AsyncCopy& a = w.async.back();
    a.pc = pc, a.mask = m, a.bytes = bytes;
    for (int i = 0; i < LANES; i++) a.dst[i] = (u32)dst[i], a.src[i] = src[i], a.take[i] = take[i], a.group[i] = w.committed[i];
}

// Complete what the lanes in m have waited for: all but the last `keep` groups, or everything.
template <bool CHECK>
inline void cp_wait(Block& k, Warp& w, u32 m, s64 keep, bool everything, u32 pc) {
    Shadow shadow{k, w, pc};
    size_t left = 0;
    for (size_t j = 0; j < w.async.size(); j++) {
        AsyncCopy& a = w.async[j];
        for (u32 r = a.mask & m; r; r &= r - 1) {
            u32 i = __builtin_ctz(r);
            if (!everything && (s64)a.group[i] >= (s64)w.committed[i] - keep) continue;
            if (k.launch->late) copy_now(k, a.dst[i], a.src[i], a.bytes, a.take[i]);
            if (CHECK) shadow.complete(a.dst[i], a.bytes);
            a.mask &= ~(1u << i);
        }
        if (a.mask) {
            if (left != j) w.async[left] = a;
            left++;
        }
    }
    w.async.resize(left);
}

// ---- parameters

inline void load_param(Block& k, const Warp& w, const Ins& in, u32 m) {
    const u8* p = k.launch->params + in.imm;
    for (u32 j = 0; j < in.vec; j++, p += in.size) {
        u64 v = 0;
        memcpy(&v, p, in.size);
        if (in.flags & SIGNED) v = (u64)((s64)(v << (64 - 8 * in.size)) >> (64 - 8 * in.size));
        u8* d = m == FULL ? operand(k, w, in.o[j]) : k.scratch[0];
        if (in.flags & WIDE)
            for (int i = 0; i < LANES; i++) ((u64*)d)[i] = v;
        else
            for (int i = 0; i < LANES; i++) ((u32*)d)[i] = (u32)v;
        if (m != FULL) in.flags & WIDE ? blend64(operand(k, w, in.o[j]), d, m) : blend32(operand(k, w, in.o[j]), d, m);
    }
}

// ---- ldmatrix, stmatrix

template <bool CHECK>
inline void ldmatrix(Block& k, Warp& w, const Ins& in, u32 pc) {
    u64 ad[LANES], lo, hi, all;
    addresses(k, w, in.o[8], in.imm, in.flags & ADDR64, FULL, ad);
    u32 lanes = 8 * in.vec, m = lanes == 32 ? FULL : (1u << lanes) - 1;
    for (int i = 0; i < LANES; i++) ad[i] = ad[i & (lanes - 1)];
    if (in.space == GENERIC)
        for (int i = 0; i < LANES; i++) {
            if (space_of(ad[i]) != SHARED) fault("out of bounds", pc, 1u << i, "the address of a matrix's row is not in shared memory");
            ad[i] &= ~WINDOW_MASK;
        }
    range(ad, lo, hi, all);
    const bool store = in.kind == K_STMATRIX;
    const char* what = store ? "stmatrix row" : "ldmatrix row";
    aligned(ad, all, m, 16, pc, what);
    shared_bounds(k, ad, lo, hi, m, 16, pc, what);
    if (CHECK) {
        count_shared(k.counts[pc], ad, m, 16);
        Shadow shadow{k, w, pc};
        store ? shadow.write_lanes(ad, m, 16, VALID) : shadow.read_lanes(ad, m, 16, false);
    }
    for (u32 j = 0; j < in.vec; j++) {
        u8* d = operand(k, w, in.o[j]);
        if (!in.sub && !store)
            for (int r = 0; r < 8; r++) memcpy(d + 16 * r, k.smem + ad[8 * j + r], 16);
        else if (!in.sub)
            for (int r = 0; r < 8; r++) memcpy(k.smem + ad[8 * j + r], d + 16 * r, 16);
        else
            for (int r = 0; r < 8; r++)
                for (int c = 0; c < 8; c++) {
                    u8 *at = k.smem + ad[8 * j + r] + 2 * c, *lane = d + 16 * c + 2 * r;
                    store ? memcpy(at, lane, 2) : memcpy(lane, at, 2);
                }
    }
}

}  // namespace
