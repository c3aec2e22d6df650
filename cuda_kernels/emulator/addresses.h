// Operands of 32 lanes: where they are in registers, the addresses that they hold, bounds and alignment of these.
#pragma once
#ifdef __SSE__
#include <immintrin.h>
#endif

#include "shadow.h"

namespace {

inline u8* operand(const Block& k, const Warp& w, s32 o) { return ((o & 1) ? k.consts : w.regs) + (o >> 1); }
inline u32* pred(const Warp& w, s32 o) { return (u32*)(w.regs + (o >> 1)); }

inline void blend32(void* d, const void* s, u32 m) {
    u32* D = (u32*)d;
    const u32* S = (const u32*)s;
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) D[i] = (m >> i & 1) ? S[i] : D[i];
}
inline void blend64(void* d, const void* s, u32 m) {
    u64* D = (u64*)d;
    const u64* S = (const u64*)s;
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) D[i] = ((u64)m >> i & 1) ? S[i] : D[i];
}

// The lanes' addresses; inactive lanes repeat the first active one, so that loops need no mask.
inline void addresses(const Block& k, const Warp& w, s32 o, s64 imm, bool wide, u32 m, u64* ad) {
    const u8* p = operand(k, w, o);
    if (wide)
        for (int i = 0; i < LANES; i++) ad[i] = ((const u64*)p)[i] + imm;
    else
        for (int i = 0; i < LANES; i++) ad[i] = (u32)(((const u32*)p)[i] + (u32)imm);
    if (m != FULL) {
        u64 first = ad[__builtin_ctz(m)];
        for (int i = 0; i < LANES; i++) ad[i] = (m >> i & 1) ? ad[i] : first;
    }
}

inline void range(const u64* ad, u64& lo, u64& hi, u64& all) {
    u64 l = ad[0], h = ad[0], o = 0;
    for (int i = 0; i < LANES; i++) l = ad[i] < l ? ad[i] : l, h = ad[i] > h ? ad[i] : h, o |= ad[i];
    lo = l, hi = h, all = o;
}

inline u32 lanes_where(const u64* ad, u32 m, bool (*bad)(u64, u64), u64 x) {
    u32 r = 0;
    for (int i = 0; i < LANES; i++)
        if ((m >> i & 1) && bad(ad[i], x)) r |= 1u << i;
    return r;
}

inline void aligned(const u64* ad, u64 all, u32 m, u32 size, u32 pc, const char* what) {
    if (all & (size - 1)) {
        u32 bad = lanes_where(ad, m, [](u64 a, u64 s) { return (a & (s - 1)) != 0; }, size);
        if (bad)
            fault("misaligned", pc, bad, format("%s of %u bytes at address 0x%llx", what, size,
                (unsigned long long)ad[__builtin_ctz(bad)]));
    }
}

inline bool inside(Block& k, u64 lo, u64 end) {
    for (auto& c : k.recent)
        if (lo >= c[0] && end <= c[1]) return true;
    const Allocation* a = find_allocation(*k.run, lo);
    if (!a || end > a->address + a->size) return false;
    auto& c = k.recent[k.recent_at++ & 3];
    c[0] = a->address, c[1] = a->address + a->size;
    return true;
}

inline void global_bounds(Block& k, const u64* ad, u64 lo, u64 hi, u32 m, u32 size, u32 pc, const char* what) {
    if (inside(k, lo, hi + size)) return;
    for (int i = 0; i < LANES; i++)
        if ((m >> i & 1) && !inside(k, ad[i], ad[i] + size)) {
            // run.py replaces @address@ by the nearest allocation
            fault("out of bounds", pc, 1u << i, format("global %s of %u bytes at address 0x%llx @%llu@", what, size,
                (unsigned long long)ad[i], (unsigned long long)ad[i]));
        }
}

inline void shared_bounds(const Block& k, const u64* ad, u64 lo, u64 hi, u32 m, u32 size, u32 pc, const char* what) {
    const Launch& l = *k.launch;
    if (lo >= l.smem_base && hi + size <= l.smem_end) return;
    for (int i = 0; i < LANES; i++)
        if ((m >> i & 1) && (ad[i] < l.smem_base || ad[i] + size > l.smem_end))
            fault("out of bounds", pc, 1u << i, format("shared %s of %u bytes at shared address 0x%llx%s; the block's shared "
                "memory is [0x%x, 0x%x), of which dynamic: %u bytes", what, size, (unsigned long long)ad[i],
                k.cluster->blocks.size() > 1 && (u32)ad[i] >> 24 ? ", which is of another block" : "", l.smem_base, l.smem_end, l.dynamic_smem));
}

// A launch that may begin before the one ahead of it has ended: until griddepcontrol.wait it may read constants, no more.
inline void early(Block& k, const u64* ad, u32 m, bool write, u32 pc) {
    for (; m; m &= m - 1) {
        int i = __builtin_ctz(m);
        if (!write && find_allocation(*k.run, ad[i])->constant) continue;
        fault("dependent launch", pc, 1u << i, format("global %s at address 0x%llx before griddepcontrol.wait: the launch ahead may "
            "still %s it@%llu@", write ? "store" : "load", (unsigned long long)ad[i], write ? "use" : "write", (unsigned long long)ad[i]));
    }
}

}  // namespace
