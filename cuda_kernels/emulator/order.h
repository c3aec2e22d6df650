// Global memory between blocks: what another block of this launch wrote may be read only behind a chain of
//     its store, __threadfence, atomic (or strong store)  ->  atomic (or strong load) at that address here, __threadfence.
//
// A block counts its fences. Every stored byte remembers (block, fences so far); an atomic publishes at its address how many
// fences of which blocks lie behind it; whoever meets that address observes this, and knows it from its next fence on. A read is
// ordered if the block knows of a fence that came after the write. What bypasses L1 (ld.cg, cp.async.cg) may read what is only
// observed; strong loads and atomics may read anything. Blocks count as one: order among their warps is for barriers to make.
#pragma once
#include "sectors.h"

namespace {

inline void merge(Fences& into, const Fences& from) {
    for (auto& f : from) {
        u32& v = into[f.first];
        if (f.second > v) v = f.second;
    }
}

inline void fence(Block& k) {
    k.fences++;
    if (!k.observed.empty()) merge(k.known, k.observed), k.observed.clear();
}

// Before an atomic or a strong store takes effect.
inline void publish(Block& k, const u64* ad, u32 m, s32 order) {
    if (order & RELEASE) fence(k);
    if (!k.fences && k.known.empty()) return;
    std::lock_guard<std::mutex> hold(k.run->order_lock);
    for (u32 r = m; r; r &= r - 1) {
        Fences& at = k.run->published[ad[__builtin_ctz(r)]];
        at[k.linear] = k.fences;
        if (!k.known.empty()) merge(at, k.known);
    }
}

// After an atomic or a strong load has taken effect.
inline void observe(Block& k, const u64* ad, u32 m, s32 order) {
    std::lock_guard<std::mutex> hold(k.run->order_lock);
    if (k.run->published.empty()) return;
    for (u32 r = m; r; r &= r - 1) {
        auto at = k.run->published.find(ad[__builtin_ctz(r)]);
        if (at != k.run->published.end()) merge(order & ACQUIRE ? k.known : k.observed, at->second);
    }
}

using Cells = std::atomic<u64>;  // block + 1 and its fences; 0 for bytes nobody has written

inline Cells* cells_of(Block& k, u64 chunk, bool make) {
    auto& place = k.run->written[chunk];
    Cells* cells = place.load(std::memory_order_acquire);
    if (cells || !make) return cells;
    auto* fresh = (Cells*)calloc(CHUNK * 32 >> k.prog->global_shift, sizeof(Cells));
    if (place.compare_exchange_strong(cells, fresh)) return fresh;
    free((void*)fresh);
    return cells;
}

inline void remember_writer(Block& k, const u64* ad, u32 m, u32 size) {
    const u32 shift = k.prog->global_shift;
    const u64 mine = (u64)(k.linear + 1) << 32 | k.fences;
    for (u32 r = m; r; r &= r - 1) {
        u64 a = ad[__builtin_ctz(r)], at;
        if (!sector_index(k, a >> 5, at)) continue;
        Cells* cells = cells_of(k, at / CHUNK, true) + ((at % CHUNK * 32 + (a & 31)) >> shift);
        for (u32 i = 0; i < size >> shift; i++) cells[i].store(mine, std::memory_order_relaxed);
    }
}

inline void check_writer(Block& k, const u64* ad, u32 m, u32 size, s32 order, u32 pc) {
    const u32 shift = k.prog->global_shift;
    for (u32 r = m; r; r &= r - 1) {
        u64 a = ad[__builtin_ctz(r)], at;
        if (!sector_index(k, a >> 5, at)) continue;
        Cells* cells = cells_of(k, at / CHUNK, false);
        if (!cells) continue;
        cells += (at % CHUNK * 32 + (a & 31)) >> shift;
        for (u32 i = 0; i < size >> shift; i++) {
            u64 c = cells[i].load(std::memory_order_relaxed);
            u32 writer = (u32)(c >> 32) - 1, fences = (u32)c;
            if (!c || writer == k.linear) continue;
            auto past = [&](const Fences& f) {
                auto found = f.find(writer);
                return found != f.end() && found->second > fences;
            };
            if (past(k.known)) continue;
            bool seen = past(k.observed);
            if (seen && (order & UNCACHED)) continue;
            const u32* g = k.launch->grid;
            fault("global order", pc, r & -r, format("address 0x%llx was written in this launch by block (%u,%u,%u), and %s@%llu@",
                (unsigned long long)a, writer % g[0], writer / g[0] % g[1], writer / g[0] / g[1],
                seen ? "no __threadfence() (or .acquire) stands between the atomic that saw it and this read"
                     : "no chain of __threadfence() and an atomic there, and an atomic on the same address here, orders the two",
                (unsigned long long)a));
        }
    }
}

}  // namespace
