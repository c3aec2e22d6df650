// Global memory between blocks: what another block of this launch wrote may be read only behind a chain of
//     its store, __threadfence, atomic (or strong store)  ->  atomic (or strong load) at that address here, __threadfence.
//
// A block numbers its fences. Every stored byte remembers who stored it: block, warp, lane, the warp's epoch (shadow.h) and the
// number of fences so far. A later fence covers the store if the same thread executes it, or another one that a barrier orders
// after the store: not a fence by thread 0 alone with no barrier in front of it. An atomic publishes at its address how many
// fences of which blocks lie behind it; whoever meets that address observes this, and knows it from its next fence on. A read is
// ordered if the block knows of a fence that covers the write, also where it bypasses L1 (ld.cg, cp.async.cg): a cache operator
// is a hint and leaves the order as it is (PTX ISA, "Cache Operators"). Strong loads and atomics may read anything. What is
// published and known is so by whole blocks.
#pragma once
#include "sectors.h"

namespace {

inline void merge(Fences& into, const Fences& from) {
    for (auto& f : from) {
        u32& v = into[f.first];
        if (f.second > v) v = f.second;
    }
}

inline void fence(Block& k, const Warp& w, u32 m) {
    {
        std::lock_guard<std::mutex> hold(k.run->order_lock);
        FenceBy by{w.index, m, w.epoch, {}};
        const u32* block = w.known + (w.number - w.index);  // of its own block alone
        std::copy(block, block + 32, by.known);
        k.run->fences[k.linear].push_back(by);
    }
    k.fences++;
    if (!k.observed.empty()) merge(k.known, k.observed), k.observed.clear();
}

// Before an atomic or a strong store takes effect.
inline void publish(Block& k, const Warp& w, const u64* ad, u32 m, s32 order) {
    if (order & RELEASE) fence(k, w, m);
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

// Who stored a byte, in 64 bits: block + 1 (0: nobody), warp, lane, epoch and fences so far. Larger epochs and numbers of fences
// than fit are taken for the largest that do, blocks that do not fit are not remembered: a missing fence may go unseen there.
struct Writer {
    u32 block, warp, lane, epoch, fences;
    static constexpr u32 MOST = (1 << 15) - 1, BLOCKS = (1 << 24) - 1;
    static u32 upto(u32 n) { return n < MOST ? n : MOST; }
    u64 packed() const {
        return (u64)(block + 1) << 40 | (u64)warp << 35 | (u64)lane << 30 | (u64)upto(epoch) << 15 | upto(fences);
    }
    explicit Writer(u64 c)
        : block((u32)(c >> 40) - 1), warp(c >> 35 & 31), lane(c >> 30 & 31), epoch(c >> 15 & MOST), fences(c & MOST) {}
    Writer(u32 b, u32 w, u32 l, u32 e, u32 f) : block(b), warp(w), lane(l), epoch(e), fences(f) {}
    bool covered(const FenceBy& by) const {
        if (by.warp != warp) return by.known[warp] >= epoch;
        return (by.mask >> lane & 1) || upto(by.epoch) > epoch || epoch == MOST;
    }
};

using Cells = std::atomic<u64>;  // packed writers

inline Cells* cells_of(Block& k, u64 chunk, bool make) {
    auto& place = k.run->written[chunk];
    Cells* cells = place.load(std::memory_order_acquire);
    if (cells || !make) return cells;
    auto* fresh = (Cells*)calloc(CHUNK * 32 >> k.prog->global_shift, sizeof(Cells));
    if (place.compare_exchange_strong(cells, fresh)) return fresh;
    free((void*)fresh);
    return cells;
}

inline void remember_writer(Block& k, const Warp& w, const u64* ad, u32 m, u32 size) {
    const u32 shift = k.prog->global_shift;
    if (k.linear >= Writer::BLOCKS) return;
    for (u32 r = m; r; r &= r - 1) {
        const u32 lane = __builtin_ctz(r);
        const u64 a = ad[lane], mine = Writer(k.linear, w.index, lane, w.epoch, k.fences).packed();
        u64 at;
        if (!sector_index(k, a >> 5, at)) continue;
        Cells* cells = cells_of(k, at / CHUNK, true) + ((at % CHUNK * 32 + (a & 31)) >> shift);
        for (u32 i = 0; i < size >> shift; i++) cells[i].store(mine, std::memory_order_relaxed);
    }
}

// Among the fences of that block up to the number known of it, is there one that covers the store?
inline bool ordered_after(Block& k, const Writer& by, const Fences& known) {
    auto found = known.find(by.block);
    if (found == known.end() || found->second <= by.fences) return false;
    std::lock_guard<std::mutex> hold(k.run->order_lock);
    const auto& fences = k.run->fences[by.block];
    for (u32 i = by.fences; i < found->second; i++)
        if (by.covered(fences[i])) return true;
    return false;
}

inline void check_writer(Block& k, const u64* ad, u32 m, u32 size, u32 pc) {
    const u32 shift = k.prog->global_shift;
    for (u32 r = m; r; r &= r - 1) {
        u64 a = ad[__builtin_ctz(r)], at;
        if (!sector_index(k, a >> 5, at)) continue;
        Cells* cells = cells_of(k, at / CHUNK, false);
        if (!cells) continue;
        cells += (at % CHUNK * 32 + (a & 31)) >> shift;
        for (u32 i = 0; i < size >> shift; i++) {
            u64 c = cells[i].load(std::memory_order_relaxed);
            const Writer by(c);
            const u32 writer = by.block;
            if (!c || writer == k.linear || ordered_after(k, by, k.known)) continue;
            bool seen = ordered_after(k, by, k.observed);
            const u32* g = k.launch->grid;
            fault("global order", pc, r & -r, format("address 0x%llx was written in this launch by block (%u,%u,%u), and %s@%llu@",
                (unsigned long long)a, writer % g[0], writer / g[0] % g[1], writer / g[0] / g[1],
                seen ? "no __threadfence() (or .acquire) stands between the atomic that saw it and this read"
                     : "no chain of __threadfence() (by the thread that wrote, or behind a barrier) and an atomic there, and an "
                       "atomic on the same address here, orders the two",
                (unsigned long long)a));
        }
    }
}

}  // namespace
