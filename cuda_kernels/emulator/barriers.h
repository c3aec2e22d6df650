// Barriers of a block's warps: bar and barrier.cta.
#pragma once
#include "collectives.h"

namespace {

constexpr u32 SAME = 32;  // equal reads or barriers in a row, and a warp or block is looked at

// All of a block's warps are at a barrier, for many times in a row without a change of memory. When all registers are then what
// they were the last time, the block can only go round in this circle, as one that waits for memory:
// `while (__syncthreads_and(seen != wanted)) if (threadIdx.x == 0) seen = load(flag);`.
void look_for_circle(Block& k) {
    const u64 now = k.run->progress, warps = k.warps.size();
    if (k.progressed || k.round_at != now) {
        k.round_at = now, k.rounds = k.circles = 0;
        return;
    }
    if (++k.rounds < SAME) return;
    u64 registers = 1;
    for (u64 i = 0; i < warps * k.prog->warp_bytes / 8; i++) registers = digest(registers, ((const u64*)k.regs)[i]);
    for (u64 i = 0; i < warps * LANES * k.prog->local_bytes; i++) registers = digest(registers, k.local[i]);
    for (auto& w : k.warps) registers = digest(registers, (u64)w.pc << 32 | w.alive);
    k.circles = k.registers == registers ? k.circles + 1 : 0, k.registers = registers;
    k.spun |= k.circles > 1;
}

void barrier_done(Block& k, Barrier& b) {
    if (!b.expected) look_for_circle(k);
    const u32 epoch = ++k.cluster->epochs;
    for (u32 m = b.waiting; m; m &= m - 1) {
        Warp& w = k.warps[__builtin_ctz(m)];
        w.state = RUNNABLE;
        w.sync(epoch);
        learn(k, w, b.joined, b.fenced);
        const Ins& in = k.prog->ins[w.barrier_pc];
        if (in.sub >= 2) {  // bar.red
            if (in.sub == 2) {
                u32* d = (u32*)operand(k, w, in.o[0]);
                for (int i = 0; i < LANES; i++) d[i] = b.popc;
            } else *pred(w, in.o[0]) = (in.sub == 3 ? b.all : b.any) ? FULL : 0;
        }
    }
    b.clear(k.cluster->numbers);
}

}  // namespace

// Barriers that count the whole block are met by the warps that still live.
void recount(Block& k) {
    u32 alive = 0;
    for (auto& w : k.warps) alive += w.state != DONE;
    for (auto& b : k.barriers)
        if (b.arrived && b.expected == 0 && (u32)__builtin_popcount(b.waiting) >= alive) barrier_done(k, b);
}

namespace {

enum BarKind { BAR_SYNC, BAR_ARRIVE, BAR_POPC, BAR_AND, BAR_OR };

// True when the warp must wait.
bool barrier(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    u32 id = ((u32*)operand(k, w, in.o[1]))[__builtin_ctz(m)];
    u32 count = in.o[2] >= 0 ? ((u32*)operand(k, w, in.o[2]))[__builtin_ctz(m)] : 0;
    if (id >= 16) fault("barrier", pc, m, format("barrier %u does not exist (0 to 15)", id));
    if (count % 32) fault("barrier", pc, m, format("thread count %u is not a multiple of 32", count));
    Barrier& b = k.barriers[id];
    if (b.arrived && b.expected != count)
        fault("barrier", pc, m, format("barrier %u is waited for with %u threads here and %u by another warp", id, count, b.expected));
    b.expected = count, b.arrived += 32;
    join(k, w, b.joined, b.fenced);
    if (in.sub >= BAR_POPC) {
        u32 p = *(u32*)operand(k, w, in.o[3]);
        if (in.flags & PRED_NOT) p = ~p;
        b.popc += __builtin_popcount(p & m), b.all &= (p & m) == m, b.any |= (p & m) != 0;
    }
    if (in.sub == BAR_ARRIVE) w.epoch = ++k.cluster->epochs;
    else w.state = AT_BARRIER, w.barrier = id, w.barrier_pc = pc, b.waiting |= 1u << w.index;
    if (count ? b.arrived >= count : false) {
        if (b.arrived > count) fault("barrier", pc, m, format("more than the %u threads it expects arrived at barrier %u", count, id));
        barrier_done(k, b);
    } else if (!count) recount(k);
    return w.state == AT_BARRIER;
}

}  // namespace
