// Which 32-byte sectors of global memory a block and a launch touch: what caches could at best reduce the traffic to.
//
// A cell per sector: bits 0-1 loaded and stored by the block whose number stands in bits 4-31, bits 2-3 loaded and stored by any
// block. The number makes an old block's bits void, so nothing is cleared between blocks. Cells come in chunks when touched.
#pragma once
#include "interp.h"

namespace {

constexpr u32 CHUNK = 1024;  // sectors: 32 KB of memory, 4 KB of cells
enum Touch : u32 { LOADED = 1, STORED = 2 };

inline const Allocation* find_allocation(const Run& r, u64 a) {  // the last one that starts at or before a
    size_t lo = 0, hi = r.allocations.size();
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (r.allocations[mid].address <= a) lo = mid + 1;
        else hi = mid;
    }
    return lo ? &r.allocations[lo - 1] : nullptr;
}

// A sector's place among the cells of all allocations; false outside of them.
inline bool sector_index(Block& k, u64 sector, u64& index) {
    Sectors& t = k.sectors;
    u64 at = sector - t.first;
    if (at >= t.count) {
        const Allocation* a = find_allocation(*k.run, sector * 32 + 31);
        if (!a) return false;
        t.first = a->address >> 5, t.count = (a->size + 31) >> 5, t.chunk = a->chunk, at = sector - t.first;
        if (at >= t.count) return false;
    }
    index = t.chunk * CHUNK + at;
    return true;
}

// True when another access of this launch has written to the neighbourhood.
inline bool touch_sectors(Block& k, const u64* sector, u32 n, u32 how) {
    Sectors& t = k.sectors;
    bool written = false;
    for (u32 i = 0; i < n; i++) {
        u64 at;
        if (!sector_index(k, sector[i], at)) continue;
        auto& chunk = t.chunks[at / CHUNK];
        if (!chunk) chunk.reset(new u32[CHUNK]());
        written |= k.run->written[at / CHUNK].load(std::memory_order_relaxed) != nullptr;
        u32 cell = chunk[at % CHUNK];
        if (cell >> 4 != t.block) cell = t.block << 4 | (cell & 12);
        u32 fresh = how & ~cell;
        if (!fresh) continue;
        t.touched += !(cell & 3), t.loaded += fresh & 1, t.stored += fresh >> 1;
        chunk[at % CHUNK] = cell | fresh | fresh << 2;
    }
    return written;
}

// Bytes, each sector once: totals[0..2] by any block - touched, loaded, stored - and totals[3..5] the same summed over blocks.
inline void unique_bytes(const Run& r, u64* totals) {
    for (size_t c = 0; c < r.chunks; c++) {
        u8 any[CHUNK] = {};
        bool used = false;
        for (auto& w : r.places)
            if (const u32* chunk = w->sectors.chunks.empty() ? nullptr : w->sectors.chunks[c].get()) {
                used = true;
                for (u32 i = 0; i < CHUNK; i++) any[i] |= chunk[i] >> 2 & 3;
            }
        if (!used) continue;
        for (u8 x : any) totals[0] += 32 * (x != 0), totals[1] += 32 * (x & 1), totals[2] += 32 * (x >> 1);
    }
    for (auto& w : r.places) totals[3] += 32 * w->sectors.touched, totals[4] += 32 * w->sectors.loaded, totals[5] += 32 * w->sectors.stored;
}

}  // namespace
