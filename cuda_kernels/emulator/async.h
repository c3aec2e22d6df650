// What a block's asynchronous operations have in flight: the agents of clocks.h, mbarriers, registers that setmaxnreg moves, and
// the steps that the four warps of a warpgroup take together.
#pragma once
#include <deque>
#include <map>

#include "memory.h"
#include "tensor_map.h"

// An mbarrier. Its 64 bits in shared memory are opaque, so what they mean is kept here, by their address.
struct MBarrier {
    u32 count, pending;       // arrivals that a phase expects, and that are missing
    s64 bytes = 0;            // transaction count
    u64 phase = 0;            // phases completed
    u32 agent = 0, by, lane, epoch;  // of the copies that end here, from the first on; the warp and lane that initialised it, and when
    u32 pc;                   // of the copy issued last
    bool visible = false;     // to the asynchronous proxy: fence.mbarrier_init, or that lane's fence.proxy.async
    bool awaited = true;      // somebody has waited since the phase of the last copy was completed
    u64 copied = 0;           // that phase
    u32 flying = 0;           // bytes of copies that have not landed
    u32 announced = 0;        // what its fence.mbarrier_init counts as, for the cluster's other blocks
    u32 known[NUMBERS] = {}, fenced[NUMBERS] = {};            // of those who arrived in this phase
    u32 done_known[NUMBERS] = {}, done_fenced[NUMBERS] = {};  // in phases that are complete
};

// An instruction that all warps of a warpgroup must execute alike.
struct Step {
    u32 pc;
    u64 values[3];
    u32 warps = 0, waited = 0;  // of the four: who has executed it, who has waited for it
    u32 commit = 0, epoch = 0;  // of a wgmma: commits before it; its epoch as the warpgroup's agent
    bool product = false, done = false;
    u32 known[NUMBERS], fenced[NUMBERS];  // what all four were ordered after
};

struct Warpgroup {
    std::deque<Step> steps;
    u64 first = 0;  // number of steps.front()
};

struct Async {
    std::map<u32, MBarrier> barriers;
    Warpgroup groups[8];
    std::vector<Copy> copies;  // on their way, and stores that their threads have not waited for
    s64 pool = 0;   // registers that setmaxnreg.dec gave back
    u64 total = 0;  // of the block
    Warp as;        // an agent, as shadow.h wants it
    u32 known[NUMBERS], fenced[NUMBERS];  // that it is ordered after
};

namespace {

// Whether an operation is done later than it is issued: always, or by chance where a seed draws orders.
inline bool later(Block& k) { return k.launch->late || (k.launch->seed && (k.random() & 1)); }

// The number of an agent. Where there are more of them than numbers, some share one: a missing order may then go unseen.
inline u32 agent(Block& k, u64 what, const char* name) {
    Cluster& c = *k.cluster;
    auto found = c.agents.find(what);
    if (found != c.agents.end()) return found->second;
    const u32 room = c.numbers - c.warps;
    if (!room) fault("asynchronous", k.warps[k.last].pc, FULL, "copies in bulk or wgmma in a block of more than 992 threads, or in eight of more than "
            "512: the check of races has no numbers for them");
    u32 number = c.warps + (u32)c.agents.size() % room;
    c.agents[what] = number, c.actors[number] = name;
    if (number >= c.clocks) c.clocks = number + 1;
    for (Block* b : c.blocks)
        for (auto& w : b->warps) w.min_known = 0;  // nobody knows it yet
    return number;
}

// An operation of an agent that is ordered after `known` and sees what is `fenced`, as shadow.h wants it.
inline Warp& acting(Block& k, u32 number, u32 epoch, const u32* known, const u32* fenced) {
    Warp& a = k.async->as;
    const u32 bytes = k.cluster->numbers * 4;
    a.number = number, a.epoch = epoch, a.min_known = ~0u, a.known = k.async->known, a.fenced = k.async->fenced;
    memcpy(a.known, known, bytes), memcpy(a.fenced, fenced, bytes);
    a.known[number] = ~0u;
    for (u32 v = 0; v < k.cluster->clocks; v++) a.min_known = a.known[v] < a.min_known ? a.known[v] : a.min_known;
    return a;
}

// What warps wrote to these bytes must be fenced before an asynchronous operation reads or overwrites it.
inline void fenced_bytes(Block& k, const Warp& a, u32 at, u32 n, u32 pc) {
    if (k.launch->unfenced) return;
    auto look = [&](const Cell& c) {
        if ((c.flags & (VALID | PENDING)) != VALID || c.writer >= k.cluster->warps) return;
        if (a.fenced[c.writer] >= c.write_epoch || a.known[c.writer] < c.write_epoch) return;  // without any order it is a race
        fault("proxy fence", pc, 1, format("shared address 0x%x was written by %s, and no fence.proxy.async stands between that "
            "and this asynchronous access", at, Shadow{k, k.async->as, pc}.name(c.writer).c_str()));
    };
    const Cell& line = k.lines[at >> 4];
    if (!(line.flags & SPLIT)) return look(line);
    Shadow{k, k.async->as, pc}.each_cell(at, n, [&](Cell& c, u32, u32) { look(c); });
}

// ---- mbarriers

inline void shared_object(Block& k, u32 at, u32 bytes, u32 align, u32 lane, u32 pc, const char* what) {
    u64 ad[LANES];
    for (u64& a : ad) a = at;
    aligned(ad, at, 1u << lane, align, pc, what);
    shared_bounds(k, ad, at, at, 1u << lane, bytes, pc, what);
}

inline MBarrier& mbarrier_at(Block& k, const Warp& w, u32 at, u32 lane, u32 pc) {
    auto found = k.async->barriers.find(at);
    if (found == k.async->barriers.end())
        fault("mbarrier", pc, 1u << lane, format("shared address 0x%x holds no mbarrier: mbarrier.init has not made one there", at));
    MBarrier& b = found->second;
    if (w.known[b.by] < b.epoch && !(b.announced && w.known[b.announced] >= b.epoch))
        fault("mbarrier", pc, 1u << lane, format("%s initialised the mbarrier at shared address 0x%x, and no barrier orders that "
            "before this use", Shadow{k, k.async->as, pc}.name(b.by).c_str(), at));
    return b;
}

inline void init(Block& k, Warp& w, u32 at, u32 count, u32 lane, u32 pc, bool check) {
    shared_object(k, at, 8, 8, lane, pc, "mbarrier");
    if (!count || count >= 1u << 20) fault("mbarrier", pc, 1u << lane, format("mbarrier of %u arrivals: 1 to 1048575 are possible", count));
    if (k.async->barriers.count(at)) fault("mbarrier", pc, 1u << lane, format("shared address 0x%x already holds an mbarrier", at));
    if (check) Shadow{k, w, pc}.write(at, 8, lane, PENDING | OBJECT);
    MBarrier b;
    b.count = b.pending = count, b.by = w.number, b.lane = lane, b.epoch = w.epoch, b.pc = pc;
    k.async->barriers.emplace(at, b);
}

inline void invalidate(Block& k, Warp& w, u32 at, u32 lane, u32 pc, bool check) {
    MBarrier& b = mbarrier_at(k, w, at, lane, pc);
    if (b.flying || b.bytes || !b.awaited)
        fault("mbarrier", pc, 1u << lane, format("mbarrier.inval at shared address 0x%x, for whose copies nobody has waited", at));
    k.async->barriers.erase(at);
    if (check) Shadow{k, w, pc}.each_cell(at, 8, [&](Cell& c, u32, u32) { c = Cell{w.epoch, 0, 0, (u8)w.number, 0, (u8)lane, 0}; });
}

// The phase is complete when nothing is missing any more.
inline void settle(const Block& k, MBarrier& b, u32 at, u32 pc) {
    if (b.pending || b.bytes) return;
    if (b.flying)
        fault("mbarrier", pc, 1, format("the mbarrier at shared address 0x%x completes its phase while %u bytes are still on their way "
            "to it: its transaction count expects too few", at, b.flying));
    for (u32 v = 0; v < k.cluster->clocks; v++) {
        b.done_known[v] = std::max(b.done_known[v], b.known[v]), b.done_fenced[v] = std::max(b.done_fenced[v], b.fenced[v]);
        b.known[v] = b.fenced[v] = 0;
    }
    b.phase++, b.pending = b.count;
}

inline void transaction(MBarrier& b, s64 bytes, u32 at, u32 lane, u32 pc) {
    b.bytes += bytes;
    if (b.bytes >= 1 << 20 || b.bytes <= -(1 << 20))
        fault("mbarrier", pc, 1u << lane, format("transaction count %lld of the mbarrier at shared address 0x%x: it has 20 bits",
            (long long)b.bytes, at));
}

inline void arrive(Block& k, const Warp& w, MBarrier& b, u32 m, u32 count, u32 at, u32 lane, u32 pc) {
    if (count > b.pending)
        fault("mbarrier", pc, 1u << lane, format("%u arrivals at the mbarrier at shared address 0x%x, whose phase expects %u more", count,
            at, b.pending));
    join(k, w, b.known, b.fenced, m);
    b.pending -= count;
}

enum MBarrierOp : u16 { M_INIT, M_INVAL, M_ARRIVE, M_TRY, M_TEST };
constexpr u8 BY_STATE = SIGNED;  // a wait: for the phase that a state names, not for a parity

// Operands: result, address, count or state or parity, transaction bytes.
template <bool CHECK>
inline After mbarrier(Block& k, Warp& w, const Ins& in, u32 m, u32 pc, u64& found) {
    u32 ready = 0, kept = m;
    const bool missed = in.sub == M_TRY && k.launch->seed && (k.random() & 7) == 0;  // it may fail, the ISA says, at any time
    for (u32 r = m; r; r &= r - 1) {
        const u32 lane = __builtin_ctz(r);
        auto word = [&](int n) { return ((const u32*)operand(k, w, in.o[n]))[lane]; };
        const u32 whole = word(1), at = whole & OFFSET;
        Block& o = owner(k, w, whole, 1u << lane, pc);
        if (in.sub != M_ARRIVE && &o != &k)
            fault("cluster", pc, 1u << lane, format("the mbarrier at shared address 0x%x is of another block: only arrivals reach that", whole));
        if (in.sub == M_INIT) init(k, w, at, word(2), lane, pc, CHECK);
        else if (in.sub == M_INVAL) invalidate(k, w, at, lane, pc, CHECK);
        else {
            MBarrier& b = mbarrier_at(o, w, at, lane, pc);
            if (in.sub == M_ARRIVE) {
                if (in.o[0] >= 0) ((u64*)operand(k, w, in.o[0]))[lane] = b.phase;
                if (in.o[3] >= 0) transaction(b, word(3), at, lane, pc);
                if (in.o[2] >= 0) arrive(k, w, b, m, word(2), at, lane, pc);
                settle(k, b, at, pc);
                continue;
            }
            bool done = in.flags & BY_STATE ? b.phase != ((const u64*)operand(k, w, in.o[2]))[lane] : (b.phase & 1) != (word(2) & 1);
            if (!(in.flags & BY_STATE) && word(2) > 1) fault("mbarrier", pc, 1u << lane, format("parity %u: it is 0 or 1", word(2)));
            const bool overlooked = done && missed;
            done &= !missed;
            if (done) learn(k, w, b.done_known, b.done_fenced), b.awaited |= b.phase > b.copied;
            ready |= (u32)done << lane, found = digest(digest(found | 1, at), b.phase + overlooked);
        }
    }
    if (in.sub < M_TRY) {
        w.epoch = ++k.cluster->epochs;  // what follows is not handed on
        w.repeats = w.idle = 0, k.progressed = true;
        return NEXT;
    }
    u32* d = pred(w, in.o[0]);
    *d = (*d & ~kept) | ready;
    return ready == m ? NEXT : FAILED;
}

// ---- the steps of a warpgroup

inline Warpgroup& group_of(Block& k, const Warp& w, u32 pc) {
    if ((w.index | 3) >= k.warps.size()) fault("wgmma", pc, w.active, "its warpgroup has fewer than four warps");
    return k.async->groups[w.index / 4];
}

// Take the warpgroup's next step: what its other warps have done as that must be the same.
inline Step& agree(const Block& k, Warp& w, Warpgroup& g, u32 pc, u64 a = 0, u64 b = 0, u64 c = 0) {
    const u64 at = w.steps++ - g.first;
    if (at == g.steps.size()) {
        g.steps.emplace_back();
        Step& fresh = g.steps.back();
        fresh.pc = pc, fresh.values[0] = a, fresh.values[1] = b, fresh.values[2] = c;
        std::fill_n(fresh.known, k.cluster->numbers, ~0u), std::fill_n(fresh.fenced, k.cluster->numbers, ~0u);
    }
    Step& s = g.steps[at];
    if (s.pc != pc)
        fault("warpgroup", pc, FULL, format("the warps of a warpgroup disagree: another one executed @pc%u@ where this one is", s.pc));
    if (s.values[0] != a || s.values[1] != b || s.values[2] != c)
        fault("warpgroup", pc, FULL, format("the warps of a warpgroup disagree: operands 0x%llx, 0x%llx, 0x%llx here and 0x%llx, 0x%llx, "
            "0x%llx in another one", (unsigned long long)a, (unsigned long long)b, (unsigned long long)c, (unsigned long long)s.values[0],
            (unsigned long long)s.values[1], (unsigned long long)s.values[2]));
    s.warps |= 1u << (w.index & 3);
    for (u32 v = 0; v < k.cluster->numbers; v++) s.known[v] = std::min(s.known[v], w.known[v]), s.fenced[v] = std::min(s.fenced[v], w.fenced[v]);
    return s;
}

// Steps that all have taken, and waited for, are over; warps that waited for the others look again.
inline void advance(Block& k, Warpgroup& g, const Warp& w) {
    while (!g.steps.empty() && g.steps.front().warps == 15 && (!g.steps.front().product || g.steps.front().waited == 15))
        g.steps.pop_front(), g.first++;
    for (u32 v = w.index & ~3u; v < (w.index | 3u) + 1; v++)
        if (k.warps[v].state == WAITS) k.warps[v].state = RUNNABLE;
    k.progressed = true;
}

enum : u16 { DECREASE, INCREASE };

// A warpgroup gives registers back, or waits until so many are free.
inline After set_registers(Block& k, Warp& w, const Ins& in, u32 pc) {
    Warpgroup& g = group_of(k, w, pc);
    const u32 wanted = (u32)in.imm, now = w.registers;
    if (in.sub == INCREASE ? wanted < now : wanted > now)
        fault("registers", pc, FULL, format("setmaxnreg to %u registers a thread, which has %u", wanted, now));
    if ((u64)wanted * 128 > k.async->total)
        fault("registers", pc, FULL, format("setmaxnreg to %u registers for each thread of a warpgroup: the block has %llu", wanted,
            (unsigned long long)k.async->total));
    const s64 more = 32 * ((s64)wanted - now);
    if (more > k.async->pool) {
        w.state = WAITS;
        return AGAIN;
    }
    agree(k, w, g, pc, wanted);
    k.async->pool -= more, w.registers = wanted;
    advance(k, g, w);
    for (auto& v : k.warps)
        if (v.state == WAITS) v.state = RUNNABLE;
    return NEXT;
}

}  // namespace
