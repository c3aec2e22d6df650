// What checks remember of shared and global memory, and the counters of bank conflicts and sectors.
//
// Races: every warp has an epoch; each barrier completion starts a new one and tells its participants up to which epoch
// they are ordered after each other. A cell remembers who wrote it last and who has read it since, with the epoch;
// an access is a race unless the accessing warp is ordered after those.
#pragma once
#include "clocks.h"
#include "order.h"

namespace {

// ---- shared-memory shadow

// Nearly all accesses are of 16 bytes: a line is one cell for 16 bytes, until a smaller access splits it into cells of the smallest
// size the program uses; the next write of the whole line makes it one again.
struct Shadow {
    Block& k;
    Warp& w;
    u32 pc;
    static constexpr u32 LINE = 1u << 31;  // more readers of a line rather than of a cell
    static constexpr u32 NONE = ~0u;       // ends a list of them
    u32 shift() const { return k.prog->cell_shift; }

    std::string name(u32 v) const {
        const Cluster& c = *k.cluster;
        if (v >= c.warps) return c.actors[v];
        const u32 each = c.warps / (u32)c.blocks.size();
        if (c.blocks.size() == 1) return format("warp %u", v);
        const u32* at = c.blocks[v / each]->ctaid;
        return format("warp %u of block (%u,%u,%u)", v % each, at[0], at[1], at[2]);
    }
    [[noreturn]] void race(const char* kind, u32 at, u32 other, const char* was, u32 lane) {
        fault("race", pc, 1u << lane, format("%s at shared address 0x%x: %s %s it and no barrier orders that before this access",
            kind, at, name(other).c_str(), was));
    }
    [[noreturn]] void pending(const char* what, u32 at, const Cell& c, u32 lane) {
        if (c.flags & OBJECT)
            fault("mbarrier", pc, 1u << lane, format("%s shared address 0x%x, where an mbarrier is: its bits are opaque", what, at));
        if (c.writer >= k.cluster->warps)
            fault("in flight", pc, 1u << lane, format("%s shared address 0x%x, to which %s is on its way", what, at, k.cluster->actors[c.writer]));
        fault("cp.async", pc, 1u << lane, format("%s shared address 0x%x, which a cp.async of warp %u lane %u writes and that thread "
            "has not waited for", what, at, c.writer, c.lane));
    }
    void check_writer(const Cell& c, u32 at, const char* kind, u32 lane) {
        if (c.writer != w.number && w.known[c.writer] < c.write_epoch) race(kind, at, c.writer, "wrote", lane);
    }
    // The first of these readers whom this warp is not ordered after; its own accesses it is.
    u32 unordered(u32 readers, u32 bank, u32 epoch) {
        if (w.min_known >= epoch) return NONE;
        for (u32 r = readers; r; r &= r - 1) {
            const u32 v = bank * 32 + (u32)__builtin_ctz(r);
            if (v != w.number && w.known[v] < epoch) return v;
        }
        return NONE;
    }
    void check_readers(u32 at, u32 readers, u32 bank, u32 epoch, u32 lane) {
        const u32 v = unordered(readers, bank, epoch);
        if (v != NONE) race("write after read", at, v, "read", lane);
    }

    // Readers beyond the last epoch's are lists in one array: a pipeline's stages have some in every line, anew each time round.
    u32& first_readers(u32 key) { return key & LINE ? k.first_of_line[key & ~LINE] : k.first_of_cell[key]; }
    void add_readers(Cell& c, u32 key, u32 mask, u32 epoch, u32 bank) {
        u32 at = k.free_readers;
        if (at == NONE) at = (u32)k.more_readers.size(), k.more_readers.push_back({});
        else k.free_readers = k.more_readers[at].next;
        k.more_readers[at] = {mask, epoch, NONE, bank};
        u32* end = &first_readers(key);
        if (!(c.flags & MORE_READERS)) *end = NONE, c.flags |= MORE_READERS;
        while (*end != NONE) end = &k.more_readers[*end].next;
        *end = at;
    }
    void drop_readers(u32 key) {
        u32 last = first_readers(key);
        while (k.more_readers[last].next != NONE) last = k.more_readers[last].next;
        k.more_readers[last].next = k.free_readers, k.free_readers = first_readers(key);
    }

    // One cell. Nearly always: written, complete, ordered before this warp; read by nobody who is not.
    void read_cell(Cell& c, u32 key, u32 at, u32 n, u32 lane, bool atomic) {
        if ((c.flags & (VALID | PENDING)) == VALID && w.known[c.writer] >= c.write_epoch &&
            (c.read_epoch == w.epoch || w.min_known >= c.read_epoch)) {
            c.readers = (c.read_epoch == w.epoch ? c.readers : 0) | 1u << (w.number & 31);
            c.read_epoch = w.epoch;
            if (c.bank != w.number >> 5) c.bank = (u8)(w.number >> 5);
        } else read_rare(c, key, at, n, lane, atomic);
    }
    __attribute__((noinline)) void read_rare(Cell& c, u32 key, u32 at, u32 n, u32 lane, bool atomic) {
        if (c.flags & PENDING) pending("read of", at, c, lane);
        if (!(c.flags & VALID) && !k.launch->any_shared_read)
            fault("uninitialised", pc, 1u << lane, format("read of %u bytes at shared address 0x%x, never written by this block", n, at));
        if (!(atomic && (c.flags & ATOMIC))) check_writer(c, at, "read after write", lane);
        if (c.read_epoch == w.epoch) c.readers |= 1u << (w.number & 31);  // those of one epoch are in one bank
        else {
            if (unordered(c.readers, c.bank, c.read_epoch) != NONE) add_readers(c, key, c.readers, c.read_epoch, c.bank);
            c.readers = 1u << (w.number & 31), c.read_epoch = w.epoch, c.bank = (u8)(w.number >> 5);
        }
    }
    void write_cell(Cell& c, u32 key, u32 at, u32 lane, u8 flags) {
        if ((c.flags & (PENDING | MORE_READERS)) || w.known[c.writer] < c.write_epoch || w.min_known < c.read_epoch)
            write_rare(c, key, at, lane, flags);
        c = Cell{w.epoch, 0, 0, (u8)w.number, flags, (u8)lane, 0};
    }
    __attribute__((noinline)) void write_rare(Cell& c, u32 key, u32 at, u32 lane, u8 flags) {
        if (c.flags & PENDING) pending("write to", at, c, lane);
        if (!(c.flags & flags & ATOMIC)) check_writer(c, at, "write after write", lane);
        if (!c.readers || (flags & c.flags & ATOMIC)) return;
        check_readers(at, c.readers, c.bank, c.read_epoch, lane);
        if (!(c.flags & MORE_READERS)) return;
        for (u32 r = first_readers(key); r != NONE; r = k.more_readers[r].next)
            check_readers(at, k.more_readers[r].mask, k.more_readers[r].bank, k.more_readers[r].epoch, lane);
        drop_readers(key);
    }

    // The cells of a line, from now on each for itself.
    Cell* split(u32 line) {
        Cell *c = &k.lines[line], *cells = &k.cells[line << (4 - shift())];
        if (c->flags & SPLIT) return cells;
        for (u32 i = 0; i < 16u >> shift(); i++) {
            cells[i] = *c;
            if (!(c->flags & MORE_READERS)) continue;
            cells[i].flags &= ~MORE_READERS;
            for (u32 r = first_readers(LINE | line); r != NONE; r = k.more_readers[r].next)
                add_readers(cells[i], (line << (4 - shift())) + i, k.more_readers[r].mask, k.more_readers[r].epoch, k.more_readers[r].bank);
        }
        if (c->flags & MORE_READERS) drop_readers(LINE | line);
        c->flags = SPLIT;
        return cells;
    }
    template <class F>
    void each_cell(u32 at, u32 n, F use) {
        Cell* c = split(at >> 4);
        for (u32 i = (at & 15) >> shift(), e = ((at & 15) + n) >> shift(); i < e; i++)
            use(c[i], (at >> 4 << (4 - shift())) + i, (at & ~15u) + (i << shift()));
    }

    // Accesses of up to 16 bytes, aligned to their size.
    void read(u32 at, u32 n, u32 lane, bool atomic) {
        Cell& line = k.lines[at >> 4];
        if (n == 16 && !(line.flags & SPLIT)) return read_cell(line, LINE | at >> 4, at, n, lane, atomic);
        each_cell(at, n, [&](Cell& c, u32 key, u32 a) { read_cell(c, key, a, n, lane, atomic); });
    }
    void write(u32 at, u32 n, u32 lane, u8 flags) {
        Cell& line = k.lines[at >> 4];
        if (n == 16 && !(line.flags & SPLIT)) return write_cell(line, LINE | at >> 4, at, lane, flags);
        each_cell(at, n, [&](Cell& c, u32 key, u32 a) { write_cell(c, key, a, lane, flags); });
        if (n == 16) line = Cell{w.epoch, 0, 0, (u8)w.number, flags, (u8)lane, 0};
    }
    // The same for lanes in m, with what they share kept in registers.
    void read_lanes(const u64* ad, u32 m, u32 n, bool atomic) {
        const u32 epoch = w.epoch, least = w.min_known, me = 1u << (w.number & 31), *known = w.known;
        w.touched |= m;
        const u8 bank = (u8)(w.number >> 5);
        Cell* lines = k.lines.data();
        for (u32 r = m; r; r &= r - 1) {
            u32 i = __builtin_ctz(r);
            Cell& c = lines[ad[i] >> 4];
            if (n == 16 && (c.flags & (VALID | PENDING | SPLIT)) == VALID && known[c.writer] >= c.write_epoch &&
                (c.read_epoch == epoch || least >= c.read_epoch)) {
                c.readers = (c.read_epoch == epoch ? c.readers : 0) | me, c.read_epoch = epoch;
                if (c.bank != bank) c.bank = bank;
            } else read((u32)ad[i], n, i, atomic);
        }
    }
    void write_lanes(const u64* ad, u32 m, u32 n, u8 flags) {
        const u32 least = w.min_known, *known = w.known;
        w.touched |= m;
        const Cell fresh{w.epoch, 0, 0, (u8)w.number, flags, 0, 0};
        Cell* lines = k.lines.data();
        for (u32 r = m; r; r &= r - 1) {
            u32 i = __builtin_ctz(r);
            Cell& c = lines[ad[i] >> 4];
            if (n == 16 && !(c.flags & (PENDING | MORE_READERS | SPLIT)) && known[c.writer] >= c.write_epoch && least >= c.read_epoch)
                c = fresh, c.lane = (u8)i;
            else write((u32)ad[i], n, i, flags);
        }
    }
    bool valid(u32 at, u32 n) {
        const Cell& line = k.lines[at >> 4];
        if (!(line.flags & SPLIT)) return (line.flags & (VALID | PENDING)) == VALID;
        bool all = true;
        each_cell(at, n, [&](Cell& c, u32, u32) { all &= (c.flags & (VALID | PENDING)) == VALID; });
        return all;
    }
    void complete(u32 at, u32 n) {
        Cell& line = k.lines[at >> 4];
        if (n == 16 && !(line.flags & SPLIT)) line.flags = VALID, line.write_epoch = w.epoch;
        else each_cell(at, n, [&](Cell& c, u32, u32) { c.flags = VALID, c.write_epoch = w.epoch; });
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
    const u32 shift = size < 4 ? 2 : __builtin_ctz(size), lanes = 128 >> shift;
    c.bytes += (u64)__builtin_popcount(m) * size;
    if (m == FULL) {  // nearly always no two lanes of a phase meet in a bank
        u32 bank[LANES], phases = LANES / lanes, met = FULL;
        for (u32 i = 0; i < LANES; i++) bank[i] = 1u << ((u32)ad[i] >> shift & (lanes - 1));
        for (u32 j = 0; j < phases; j++) {
            u32 all = 0;
            for (u32 i = 0; i < lanes; i++) all |= bank[j * lanes + i];
            met &= all;
        }
        if (met == (lanes == 32 ? FULL : (1u << lanes) - 1)) {
            c.min_wavefronts += phases, c.wavefronts += phases;
            return;
        }
    }
    for (u32 first = 0; first < LANES; first += lanes) {
        u32 units[32], n = 0;
        for (u32 i = first; i < first + lanes; i++)
            if (m >> i & 1) units[n++] = (u32)ad[i] >> shift;
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
