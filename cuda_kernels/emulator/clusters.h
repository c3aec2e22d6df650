// Blocks of one cluster: their shared memory as others address it, their barrier, and what must be over when one of them ends.
//
// A shared address has its block in bits 24 to 31: 0 for the block that uses it, else the rank + 1. A block's own addresses are so
// the same in .shared::cta and .shared::cluster, as the ISA has it (that the one window lies in the other). Another block's memory may be
// used once the user knows that it has started (an epoch of one of its warps: a cluster barrier tells it), and as long as it has
// not ended. A block must not end before it knows that all such uses lie behind it.
#pragma once
#include "addresses.h"

namespace {

// What an agent's number is kept under, see async.h: | rank and address, warp.
enum AgentOf : u64 { COPIES = 0, STORES = 1ull << 40, PRODUCTS = 2ull << 40, INITS = 3ull << 40 };
constexpr u32 RANK_SHIFT = 24, OFFSET = (1u << RANK_SHIFT) - 1;

inline std::string name_of(const Block& k) { return format("block (%u,%u,%u)", k.ctaid[0], k.ctaid[1], k.ctaid[2]); }
inline u64 address_in(const Block& k, u32 rank, u64 a) { return (a & ~(u64)(0xffu << RANK_SHIFT)) | (rank == k.rank ? 0 : (u64)(rank + 1) << RANK_SHIFT); }
inline u32 rank_of(const Block& k, u64 a) { return (u32)a >> RANK_SHIFT ? ((u32)a >> RANK_SHIFT) - 1 : k.rank; }

// The block whose shared memory has this address; `uses`: the warp itself, now.
inline Block& owner(Block& k, const Warp& w, u64 at, u32 lanes, u32 pc, bool uses = true) {
    const u32 rank = rank_of(k, at);
    if (rank == k.rank) return k;
    Cluster& c = *k.cluster;
    if (rank >= c.blocks.size())
        fault("cluster", pc, lanes, format("shared address 0x%llx is of block %u of a cluster of %zu", (unsigned long long)at, rank, c.blocks.size()));
    Block& o = *c.blocks[rank];
    if (!o.live) fault("cluster", pc, lanes, format("it uses the shared memory of %s, which has ended", name_of(o).c_str()));
    bool started = false;
    for (auto& v : o.warps) started |= w.known[v.number] > 0;
    if (!started)
        fault("cluster", pc, lanes, format("it uses the shared memory of %s, and no cluster barrier shows that this block has started",
            name_of(o).c_str()));
    if (uses) o.uses[w.number] = w.epoch;
    return o;
}

// ---- the barrier

// When all threads that live have arrived, those who wait go on.
inline void settle(Cluster& c) {
    u32 arrived = 0;
    for (Block* b : c.blocks)
        for (auto& w : b->warps) {
            if (b->live && w.state != DONE && (w.alive & ~w.arrived)) return;
            arrived |= w.arrived;
        }
    if (!arrived) return;
    c.phase++;
    for (u32 v = 0; v < c.clocks; v++) {
        c.done_known[v] = std::max(c.done_known[v], v < c.warps ? std::max(c.known[v], 1u) : c.known[v]);  // epoch 1: it has started
        c.done_fenced[v] = std::max(c.done_fenced[v], c.fenced[v]);
        c.known[v] = c.fenced[v] = 0;
    }
    merge(c.done_fences, c.fences), c.fences.clear();
    for (Block* b : c.blocks) {
        b->progressed = true;
        for (auto& w : b->warps) {
            w.arrived = 0;
            if (w.state == WAITS) w.state = RUNNABLE;
        }
    }
}

// What a fence.acq_rel of these lanes lets relaxed arrivals hand on.
__attribute__((noinline)) void release(const Block& k, Warp& w, u32 m) {
    if (k.cluster->blocks.size() == 1) return;
    w.released.assign(w.known, w.known + k.cluster->numbers);
    w.released_fenced.assign(w.fenced, w.fenced + k.cluster->numbers);
    w.released[w.number] = w.alive & ~m ? w.synced - 1 : w.epoch;
    w.epoch = ++k.cluster->epochs;
}

constexpr u8 RELAXED = STRONG;  // an arrival

template <bool CHECK>
inline void arrive_cluster(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    Cluster& c = *k.cluster;
    if (m & w.unwaited) fault("cluster", pc, m & w.unwaited, "barrier.cluster.arrive for the second time, and no barrier.cluster.wait since the first");
    w.arrived |= m, w.unwaited |= m;
    if (!(in.flags & RELAXED)) {
        if (CHECK && k.run->many && c.blocks.size() > 1) fence(k, w, m);
        join(k, w, c.known, c.fenced);
    } else {
        for (u32 v = 0; v < w.released.size(); v++)
            c.known[v] = std::max(c.known[v], w.released[v]), c.fenced[v] = std::max(c.fenced[v], w.released_fenced[v]);
        for (auto& a : c.agents)
            if (a.first >> 40 == INITS >> 40) c.known[a.second] = std::max(c.known[a.second], w.known[a.second]);
    }
    if (CHECK && k.run->many && c.blocks.size() > 1) {
        u32& fences = c.fences[k.linear];
        fences = std::max(fences, k.fences);
        merge(c.fences, k.known);
    }
    w.epoch = ++c.epochs, w.repeats = w.idle = 0;
    settle(c);
}

inline After wait_cluster(Block& k, Warp& w, u32 m, u32 pc, u64& found) {
    Cluster& c = *k.cluster;
    if (m & ~w.unwaited) fault("cluster", pc, m & ~w.unwaited, "barrier.cluster.wait without barrier.cluster.arrive before it");
    if (m & w.arrived) {
        found = c.phase + 1;
        if (w.groups.empty()) w.state = WAITS;
        return w.groups.empty() ? AGAIN : POLLS;
    }
    w.unwaited &= ~m;
    learn(k, w, c.done_known, c.done_fenced);
    merge(k.known, c.done_fences);
    w.epoch = ++c.epochs, w.repeats = w.idle = 0;
    if (m == w.alive) w.sync(w.epoch);
    return NEXT;
}

// ---- the end of a block

inline void end_in_cluster(Block& k) {
    const Cluster& c = *k.cluster;
    for (u32 v = 0; c.blocks.size() > 1 && v < c.clocks; v++) {
        bool known = !k.uses[v];
        for (auto& w : k.warps) known |= w.known[v] >= k.uses[v];
        if (known) continue;
        const std::string who = Shadow{k, k.warps[0], 0}.name(v);
        fault("cluster", k.warps[k.last].pc, FULL, v < c.warps
            ? format("the block ends, and no cluster barrier orders that after a use of its shared memory by %s", who.c_str())
            : format("the block ends while %s that it sent to another block's shared memory may be on its way", who.c_str()));
    }
}

}  // namespace
