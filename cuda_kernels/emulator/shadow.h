// What checks remember of shared and global memory, and the counters of bank conflicts and sectors.
//
// Races: every warp has an epoch; each barrier completion starts a new one and tells its participants up to which epoch
// they are ordered after each other. A cell remembers who wrote it last and who has read it since, with the epoch;
// an access is a race unless the accessing warp is ordered after those.
#pragma once
#include "order.h"

namespace {

// ---- shared-memory shadow

struct Shadow {
    Block& k;
    Warp& w;
    u32 pc;
    u32 shift() const { return k.prog->cell_shift; }

    [[noreturn]] void race(const char* kind, u32 cell, u32 other, const char* was, u32 lane) {
        fault("race", pc, 1u << lane, format("%s at shared address 0x%x: warp %u %s it and no barrier orders that before this access",
            kind, (cell << shift()), other, was));
    }
    [[noreturn]] void pending(const char* what, u32 at, const Cell& c, u32 lane) {
        fault("cp.async", pc, 1u << lane, format("%s shared address 0x%x, which a cp.async of warp %u lane %u writes and that thread "
            "has not waited for", what, at << shift(), c.writer, c.lane));
    }
    void check_writer(const Cell& c, u32 at, const char* kind, u32 lane) {
        if (c.writer != w.index && w.known[c.writer] < c.write_epoch) race(kind, at, c.writer, "wrote", lane);
    }
    bool ordered(u32 readers, u32 epoch) {
        if (w.min_known >= epoch) return true;
        for (u32 r = readers & ~(1u << w.index); r; r &= r - 1)
            if (w.known[__builtin_ctz(r)] < epoch) return false;
        return true;
    }
    void read(u32 at, u32 n, u32 lane, bool atomic) {
        const u32 me = 1u << w.index, epoch = w.epoch;
        for (u32 i = at >> shift(), e = (at + n) >> shift(); i < e; i++) {
            Cell& c = k.cells[i];
            // Nearly always: written, complete, ordered before this warp; read by nobody who is not.
            if ((c.flags & (VALID | PENDING)) == VALID && w.known[c.writer] >= c.write_epoch &&
                (c.read_epoch == epoch || w.min_known >= c.read_epoch)) {
                c.readers = (c.read_epoch == epoch ? c.readers : 0) | me;
                c.read_epoch = epoch;
                continue;
            }
            if (c.flags & PENDING) pending("read of", i, c, lane);
            if (!(c.flags & VALID))
                fault("uninitialised", pc, 1u << lane, format("read of %u bytes at shared address 0x%x: byte 0x%x was never written by "
                    "this block", n, at, i << shift()));
            if (!(atomic && (c.flags & ATOMIC))) check_writer(c, i, "read after write", lane);
            if (c.read_epoch == w.epoch) c.readers |= 1u << w.index;
            else {
                if (c.readers && !ordered(c.readers, c.read_epoch)) {
                    k.more_readers[i].push_back({c.readers, c.read_epoch});
                    c.flags |= MORE_READERS;
                }
                c.readers = 1u << w.index, c.read_epoch = w.epoch;
            }
        }
    }
    void write(u32 at, u32 n, u32 lane, u8 flags) {
        for (u32 i = at >> shift(), e = (at + n) >> shift(); i < e; i++) {
            Cell& c = k.cells[i];
            if (!(c.flags & (PENDING | MORE_READERS)) && w.known[c.writer] >= c.write_epoch && w.min_known >= c.read_epoch) {
                c = Cell{w.epoch, 0, 0, (u8)w.index, flags, (u16)lane};
                continue;
            }
            if (c.flags & PENDING) pending("write to", i, c, lane);
            if (!(c.flags & flags & ATOMIC)) check_writer(c, i, "write after write", lane);
            if (c.readers && !(flags & c.flags & ATOMIC)) {
                check_readers(i, c.readers, c.read_epoch, lane);
                if (c.flags & MORE_READERS) {
                    for (auto& r : k.more_readers[i]) check_readers(i, r.first, r.second, lane);
                    k.more_readers.erase(i);
                }
            }
            c.writer = (u8)w.index, c.write_epoch = w.epoch, c.readers = 0, c.read_epoch = 0, c.flags = flags, c.lane = (u16)lane;
        }
    }
    void check_readers(u32 i, u32 readers, u32 epoch, u32 lane) {
        if (w.min_known >= epoch) return;
        for (u32 r = readers & ~(1u << w.index); r; r &= r - 1)
            if (w.known[__builtin_ctz(r)] < epoch) race("write after read", i, __builtin_ctz(r), "read", lane);
    }
    void complete(u32 at, u32 n) {
        for (u32 i = at >> shift(), e = (at + n) >> shift(); i < e; i++)
            k.cells[i].flags = VALID, k.cells[i].write_epoch = w.epoch;
    }
};

// ---- counters

// Wavefronts of one phase: the most distinct units that fall on one bank group.
inline u32 phase_wavefronts(const u32* unit, u32 n, u32 groups) {
    u32 first[32], seen = 0;
    bool conflict = false;
    for (u32 i = 0; i < n; i++) {
        u32 b = unit[i] & (groups - 1);
        if (!(seen >> b & 1)) seen |= 1u << b, first[b] = unit[i];
        else conflict |= first[b] != unit[i];
    }
    if (!conflict) return 1;
    u32 worst = 1;
    for (u32 b = 0; b < groups; b++) {
        u32 distinct[32], count = 0;
        for (u32 i = 0; i < n; i++) {
            if ((unit[i] & (groups - 1)) != b) continue;
            bool known = false;
            for (u32 j = 0; j < count; j++) known |= distinct[j] == unit[i];
            if (!known) distinct[count++] = unit[i];
        }
        worst = count > worst ? count : worst;
    }
    return worst;
}

// 128 bytes a wavefront: accesses of 4 bytes go in one phase of 32 lanes, of 8 in two of 16, of 16 in four of 8.
inline void count_shared(Count& c, const u64* ad, u32 m, u32 size) {
    u32 unit = size < 4 ? 4 : size, lanes = 128 / unit;
    c.bytes += (u64)__builtin_popcount(m) * size;
    for (u32 first = 0; first < LANES; first += lanes) {
        u32 units[32], n = 0;
        for (u32 i = first; i < first + lanes; i++)
            if (m >> i & 1) units[n++] = (u32)ad[i] / unit;
        if (!n) continue;
        c.min_wavefronts++, c.wavefronts += phase_wavefronts(units, n, lanes);
    }
}

// `how`: LOADED, STORED or both. True when this launch has written to the neighbourhood.
inline bool count_global(Block& k, u32 pc, const u64* ad, u32 m, u32 size, u32 how) {
    Count& c = k.counts[pc];
    u64 sector[LANES];
    u32 used[LANES], n = 0, last = 0, unique = 0;
    for (int i = 0; i < LANES; i++) {
        if (!(m >> i & 1)) continue;
        u64 s = ad[i] >> 5;
        u32 bytes = (u32)(((1ull << size) - 1) << (ad[i] & 31));
        if (n && sector[last] == s) {
            used[last] |= bytes;
            continue;
        }
        u32 j = 0;
        while (j < n && sector[j] != s) j++;
        if (j == n) sector[n] = s, used[n++] = 0;
        used[j] |= bytes, last = j;
    }
    for (u32 j = 0; j < n; j++) unique += __builtin_popcount(used[j]);
    c.bytes += (u64)__builtin_popcount(m) * size, c.sectors += n, c.ideal_sectors += (unique + 31) / 32;
    return touch_sectors(k, sector, n, how);
}

// Per-byte record of a launch: written how often, and read through the non-coherent path.
inline void mark_global(Block& k, const u64* ad, u32 m, u32 size, bool write, u32 pc) {
    for (int i = 0; i < LANES; i++) {
        if (!(m >> i & 1)) continue;
        const Allocation* a = find_allocation(*k.run, ad[i]);
        if (!a || !a->shadow) continue;
        u8* s = a->shadow + (ad[i] - a->address);
        for (u32 b = 0; b < size; b++) {
            u8 old = __atomic_load_n(s + b, __ATOMIC_RELAXED);
            if (write) {
                if ((old & 127) < 127) old = __atomic_fetch_add(s + b, 1, __ATOMIC_RELAXED);
                if (!(old & 128)) continue;
            } else {
                if (!(old & 128)) old = __atomic_fetch_or(s + b, 128, __ATOMIC_RELAXED);
                if (!(old & 127)) continue;
            }
            fault("non-coherent load", pc, 1u << i, format("address 0x%llx is %s in a launch that also %s it @%llu@",
                (unsigned long long)(ad[i] + b), write ? "written" : "read through ld.global.nc", write ? "reads" : "writes",
                (unsigned long long)(ad[i] + b)));
        }
    }
}

}  // namespace
