// cp.async.bulk and cp.async.bulk.tensor: copies between global and shared memory by the asynchronous proxy. And st.async: values of
// registers into another block's shared memory, by the generic proxy, which end as a load does.
//
// A load ends at an mbarrier. Early its bytes land when it is issued; late, and by chance with a seed, when somebody waits at the mbarrier and only bytes are
// missing there: the source is read then, and what was in shared memory is lost from the start. Whoever reads without that wait is
// not ordered behind it. A store reads its source, at the latest, when its thread waits for that (.read), and writes when it waits
// for all of it or the block ends.
#pragma once
#include "async.h"

namespace {

enum : u16 { BULK_STORE = 1, BULK_TENSOR = 2, BULK_IM2COL = 4, BULK_SHARED = 8, BULK_VALUES = 16 };  // a record's `sub`
constexpr u8 BULK_READ = STRONG;                                  // a wait: until sources are free

[[noreturn]] inline void wrong_copy(const Copy& c, const std::string& why) { fault("bulk copy", c.pc, 1u << c.lane, why); }

// A lane's tensor map, which may be a parameter or lie in global memory.
inline TensorMap map_at(Block& k, u64 address, const Copy& c) {
    TensorMap t;
    const u8* p = (const u8*)address;
    if (address % 64) wrong_copy(c, format("a tensor map at 0x%llx: it must be aligned to 64 bytes", (unsigned long long)address));
    if ((address & WINDOW_MASK) == PARAM_WINDOW) {
        address &= ~WINDOW_MASK;
        if (address + sizeof t > k.launch->param_bytes) wrong_copy(c, "a tensor map outside the parameters");
        p = k.launch->params + address;
    } else if ((address & WINDOW_MASK) || !inside(k, address, address + sizeof t))
        wrong_copy(c, "a tensor map that lies neither in a parameter nor in global memory");
    memcpy(&t, p, sizeof t);
    if (!is_map(t)) wrong_copy(c, "what it takes for a tensor map is none");
    return t;
}

inline void check_map(const Ins& in, const Copy& c) {
    const TensorMap& t = c.map;
    if (t.rank != in.vec) wrong_copy(c, format("a tensor map of %u dimensions, the instruction has %u", t.rank, in.vec));
    if ((t.kind == IM2COL) != ((in.sub & BULK_IM2COL) != 0)) wrong_copy(c, "a tensor map of the other kind: tiles, or im2col");
    if (t.swizzle > 1 && t.row_bytes() != 16u * t.swizzle)
        wrong_copy(c, format("rows of %u bytes in a swizzle of %u: no program of others shows where they lie", t.row_bytes(), 16 * t.swizzle));
    if (c.shared % 128)  // a swizzle is of the address's bits, wherever a tile begins: CUTLASS's epilogues count on it
        wrong_copy(c, format("shared address 0x%x: expected a multiple of 128 for tensors", c.shared));
    for (u32 d = 1; t.kind == IM2COL && d + 1 < t.rank; d++) {
        const s64 low = t.lower[d - 1], high = (s64)t.last[d] + t.upper[d - 1];
        const u32 most = t.rank == 3 ? 65535 : t.rank == 4 ? 255 : 31;
        if (c.at[d] < low || c.at[d] > high || (c.at[d] - low) % t.step[d])
            wrong_copy(c, format("im2col from coordinate %d of dimension %u: its box has %lld to %lld in steps of %u", c.at[d], d,
                (long long)low, (long long)high, t.step[d]));
        if (c.offset[d - 1] > most) wrong_copy(c, format("im2col offset %u: at most %u", c.offset[d - 1], most));
    }
}

// The block that a copy goes to, also the first of several.
inline u32 receiver(Block& k, const Warp& w, const Copy& c, u32 shared, u32 barrier) {
    const Block& o = owner(k, w, shared, 1u << c.lane, c.pc, false);
    if (o.rank != rank_of(k, barrier))
        wrong_copy(c, format("a copy to shared address 0x%x ends at the mbarrier 0x%x of another block", shared, barrier));
    return o.rank;
}

// What one lane's st.async writes.
inline void take_values(Block& k, Warp& w, const Ins& in, Copy& c) {
    if (k.cluster->blocks.size() == 1) wrong_copy(c, "st.async in a cluster of one block");
    c.bytes = 4u * in.vec, c.read.resize(c.bytes);
    for (u32 i = 0; i < in.vec; i++) memcpy(&c.read[4 * i], (const u32*)operand(k, w, in.o[4 + i]) + c.lane, 4);
    shared_object(k, c.shared, c.bytes, c.bytes, c.lane, c.pc, "st.async");
}

// What one lane's copy is.
inline Copy described_copy(Block& k, Warp& w, const Ins& in, u32 lane, u32 pc) {
    Copy c{};
    auto word = [&](int n) { return in.o[n] < 0 ? 0 : ((const u32*)operand(k, w, in.o[n]))[lane]; };
    c.pc = pc, c.warp = w.index, c.lane = lane, c.epoch = ++k.cluster->epochs, c.group = w.copy_groups[lane];
    c.store = in.sub & BULK_STORE, c.tensor = in.sub & BULK_TENSOR, c.inside = in.sub & BULK_SHARED, c.values = in.sub & BULK_VALUES;
    c.from = c.to = k.rank, c.shared = word(0), c.barrier = word(3);
    if (!c.store) c.to = receiver(k, w, c, c.shared, c.barrier), c.shared &= OFFSET, c.barrier &= OFFSET;
    if (c.values) return take_values(k, w, in, c), c;
    const u64 address = c.inside ? word(1) : ((const u64*)operand(k, w, in.o[1]))[lane] + (u64)in.imm2;
    if (c.tensor) {
        c.map = map_at(k, address, c);
        for (u32 d = 0; d < in.vec; d++) c.at[d] = (s32)word(4 + (int)d);
        for (u32 d = 0; d < 3; d++) c.offset[d] = word(9 + (int)d) & 0xffff;
        check_map(in, c);
        const u64 bytes = c.map.row_bytes() * c.map.rows();
        if (bytes >> 20) wrong_copy(c, format("a box of %llu bytes", (unsigned long long)bytes));
        c.bytes = (u32)bytes;
    } else {
        c.global = address, c.bytes = word(2), c.map.element = 1;
        if ((address | c.shared | c.bytes) % 16)
            wrong_copy(c, format("%u bytes between shared address 0x%x and 0x%llx: expected multiples of 16", c.bytes, c.shared,
                (unsigned long long)address));
        if (c.inside) shared_object(k, (u32)address, c.bytes, 16, lane, pc, "source of a bulk copy"), c.global = (u64)(k.smem + address);
    }
    shared_object(k, c.shared, c.bytes, 16, lane, pc, "bulk copy");
    return c;
}

// use(addresses of all lanes, bytes): what a copy accesses in global memory, each time a sector, or what of it lies together.
template <class F>
inline void each_global(const Copy& c, F use) {
    u64 a = 0, end = 0;  // of pieces that follow each other, what is left of the last sector
    auto upto = [&](u64 stop) {
        for (u64 next; a < stop; a = next) {
            next = std::min(end, (a | 31) + 1);
            u64 ad[LANES];
            for (u64& x : ad) x = a;
            use(ad, (u32)(next - a));
        }
    };
    each_piece(c, [&](u32, u64 global, u32 first, u32 last) {
        if (global + first != end) upto(end), a = global + first;
        end = global + last, upto(end & ~31ull);
    });
    upto(end);
}

// Bounds of what it reads or writes in global memory, and with CHECK what is counted and known of it.
template <bool CHECK>
inline void account(Block& k, Warp& w, const Copy& c) {
    const u32 lane = 1u << c.lane;
    each_global(c, [&](const u64* ad, u32 n) {
        global_bounds(k, ad, ad[0], ad[0], lane, n, c.pc, c.store ? "bulk store" : "bulk load");
        if (!CHECK) return;
        if (k.launch->dependent && !(w.waited & lane)) early(k, ad, lane, c.store, c.pc);
        const bool written = count_global(k, c.pc, ad, lane, n, c.store ? STORED : LOADED);
        if (c.store) mark_global(k, ad, lane, n, true, c.pc);
        else if (written && k.run->many) check_writer(k, ad, lane, n, c.pc);
    });
}

// What a store has written counts as its thread's, once that has waited for it; `done`: it has.
inline void written_globally(Block& k, Warp& w, const Copy& c, bool done) {
    if (!k.launch->checks || !k.run->many) return;
    const u32 fences = k.fences;
    if (!done) k.fences = Writer::MOST;  // no fence covers it
    each_global(c, [&](const u64* ad, u32 n) { remember_writer(k, w, ad, 1u << c.lane, n); });
    k.fences = fences;
}

inline void move_in(Block& k, const Copy& c) {
    each_piece(c, [&](u32 at, u64 global, u32 first, u32 last) {
        if (first != last) memcpy(k.smem + at + first, (const u8*)global + first, last - first);
        if (c.tensor && (first || last != 16)) fill_outside(c.map, k.smem + at, first, last);
    });
}

// A store's source, piece by piece; and what was read of it, to where it belongs.
inline void move_out(Block& k, Copy& c, bool read, bool write) {
    size_t n = 0;
    if (read) c.read.resize(c.bytes);
    each_piece(c, [&](u32 at, u64 global, u32 first, u32 last) {
        if (read) memcpy(&c.read[n], k.smem + at, 16);
        if (write && first != last) memcpy((u8*)global + first, &c.read[n + first], last - first);
        n += 16;
    });
    c.landed |= read, c.written |= write;
}

template <bool CHECK>
inline void land(Block& k, Copy& c) {
    MBarrier& b = k.async->barriers.at(c.barrier);
    move_in(k, c);
    if (CHECK) {
        Warp& as = k.async->as;
        as.number = c.agent, as.epoch = c.epoch;
        each_piece(c, [&](u32 at, u64, u32, u32) { Shadow{k, as, c.pc}.complete(at, piece_bytes(c)); });
    }
    c.landed = true, b.flying -= c.bytes, b.known[c.agent] = std::max(b.known[c.agent], c.epoch);
    transaction(b, -(s64)c.bytes, c.barrier, c.lane, c.pc);
    settle(k, b, c.barrier, c.pc);
    k.progressed = true;
}

// One block's load, of a copy that block k sends.
template <bool CHECK>
inline void load_bulk(Block& k, Warp& w, Copy c) {
    Block& o = *k.cluster->blocks[c.to];
    MBarrier& b = mbarrier_at(o, w, c.barrier, c.lane, c.pc);
    if (!c.values && !b.visible && w.fenced[b.by] < b.epoch && !k.launch->unfenced)
        fault("mbarrier", c.pc, 1u << c.lane, format("no fence.mbarrier_init or fence.proxy.async stands between the initialisation of the "
            "mbarrier at shared address 0x%x and this copy", c.barrier));
    if (!b.agent) b.agent = agent(k, COPIES | (u64)c.to << 32 | c.barrier, c.values ? "st.async" : "a bulk copy");
    c.agent = b.agent;
    if (c.to != c.from && !c.values) k.uses[c.agent] = c.epoch;
    Warp& as = acting(k, c.agent, c.epoch, w.known, w.fenced);
    if (CHECK) each_piece(c, [&](u32 at, u64 source, u32, u32) {
        if (c.inside) {
            const u32 from = (u32)(source - (u64)k.smem);
            fenced_bytes(k, as, from, 16, c.pc);
            Shadow{k, as, c.pc}.read(from, 16, c.lane, false);
        }
        if (!c.values) fenced_bytes(o, as, at, 16, c.pc);
        Shadow{o, as, c.pc}.write(at, piece_bytes(c), c.lane, PENDING);
    });
    b.flying += c.bytes, b.awaited = false, b.copied = b.phase, b.pc = c.pc;
    if (!later(k)) return land<CHECK>(o, c);
    each_piece(c, [&](u32 at, u64, u32, u32) { memset(o.smem + at, 0xff, piece_bytes(c)); });
    o.async->copies.push_back(std::move(c));
}

template <bool CHECK>
inline void store_bulk(Block& k, Warp& w, Copy& c) {
    c.agent = agent(k, STORES | w.number, "a bulk store");
    Warp& as = acting(k, c.agent, c.epoch, w.known, w.fenced);
    account<CHECK>(k, w, c);
    if (CHECK) each_piece(c, [&](u32 at, u64, u32, u32) {
        fenced_bytes(k, as, at, 16, c.pc);
        Shadow{k, as, c.pc}.read(at, 16, c.lane, false);
    });
    written_globally(k, w, c, false);
    if (!later(k)) move_out(k, c, true, true);
    k.async->copies.push_back(std::move(c));
}

// The same bytes to the same place in the blocks of a mask, each of which is told at its own mbarrier.
template <bool CHECK>
inline void multicast(Block& k, Warp& w, Copy& c, u32 mask) {
    const u32 blocks = (u32)k.cluster->blocks.size();
    if (c.to != k.rank) wrong_copy(c, "a multicast names its place in another block's shared memory, not in its own");
    if (!mask || mask >> blocks) wrong_copy(c, format("a multicast to the blocks 0x%x of a cluster of %u", mask, blocks));
    for (; mask; mask &= mask - 1) {
        c.to = __builtin_ctz(mask);
        owner(k, w, address_in(k, c.to, c.shared), 1u << c.lane, c.pc, false);
        load_bulk<CHECK>(k, w, c);
    }
}

template <bool CHECK>
inline void bulk(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    for (u32 r = m; r; r &= r - 1) {
        Copy c = described_copy(k, w, in, __builtin_ctz(r), pc);
        k.async_bytes += c.bytes;
        if (c.store) {
            store_bulk<CHECK>(k, w, c);
            continue;
        }
        if (!c.inside && !c.values) account<CHECK>(k, w, c);
        if (in.o[12] < 0) load_bulk<CHECK>(k, w, c);
        else multicast<CHECK>(k, w, c, ((const u32*)operand(k, w, in.o[12]))[c.lane] & 0xffff);
    }
}

// The lanes in m wait for all groups of stores but the last `keep`: for their sources alone, or for all they write.
inline void wait_stores(Block& k, Warp& w, const Ins& in, u32 m) {
    auto& copies = k.async->copies;
    size_t left = 0;
    for (size_t i = 0; i < copies.size(); i++) {
        Copy& c = copies[i];
        bool covered = c.store && c.warp == w.index && (m >> c.lane & 1) && (s64)c.group < (s64)w.copy_groups[c.lane] - in.imm;
        if (covered) {
            const bool all = !(in.flags & BULK_READ);
            move_out(k, c, !c.landed, all && !c.written);
            w.known[c.agent] = std::max(w.known[c.agent], c.epoch);
            c.source_free = true;
            if (all) {
                written_globally(k, w, c, true);
                continue;
            }
        }
        if (left != i) copies[left] = std::move(c);
        left++;
    }
    copies.resize(left);
}

// Before somebody who waits at an mbarrier looks: where only bytes are missing, they come now.
template <bool CHECK>
inline void arrive_late(Block& k, u32 at) {
    auto& copies = k.async->copies;
    auto found = k.async->barriers.find(at);
    if (copies.empty() || found == k.async->barriers.end() || found->second.pending) return;
    std::vector<Copy> mine;
    for (size_t i = 0; i < copies.size();) {
        if (copies[i].store || copies[i].barrier != at) {
            i++;
            continue;
        }
        mine.push_back(std::move(copies[i]));
        copies.erase(copies.begin() + (long)i);
    }
    for (Copy& c : mine) land<CHECK>(k, c);
}

inline void end_bulk(Block& k) {
    for (Copy& c : k.async->copies) {
        if (!c.source_free) fault("pending", c.pc, 1u << c.lane, c.store
            ? "the block ends while a bulk store may still read its shared memory: no cp.async.bulk.wait_group covers it"
            : std::string("the block ends while ") + (c.values ? "st.async" : "a bulk copy") + (c.from == k.rank ? "" : " of " + name_of(*k.cluster->blocks[c.from])) +
                " is on its way into its shared memory");
        if (!c.written) move_out(k, c, false, true);
    }
    k.async->copies.clear();
}

}  // namespace
