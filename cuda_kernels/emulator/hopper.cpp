// Hopper's asynchronous instructions, apart from the interpreter's loop.
#include "bulk.h"
#include "wgmma.h"

template <bool CHECK>
After asynchronous(Block& k, Warp& w, const Ins& in, u32 m, u32 pc, u64& found) {
    if ((in.flags & ALIGNED) && m != FULL) fault("convergence", pc, m, format("it needs all 32 lanes, has 0x%08x", m));
    switch (in.kind) {
        case K_MBARRIER:
            if (in.sub >= M_TRY)
                for (u32 r = m; r; r &= r - 1) arrive_late<CHECK>(k, ((const u32*)operand(k, w, in.o[1]))[__builtin_ctz(r)]);
            return mbarrier<CHECK>(k, w, in, m, pc, found);
        case K_FENCE_PROXY: fence_proxies(k, w, m); return NEXT;
        case K_FENCE_INIT:
            for (auto& b : k.async->barriers) b.second.visible |= b.second.by == w.index;
            return NEXT;
        case K_MAPA: {  // in a cluster of one block
            const u32* block = (const u32*)operand(k, w, in.o[2]);
            for (u32 r = m; r; r &= r - 1)
                if (block[__builtin_ctz(r)])
                    fault("cluster", pc, r & -r, format("mapa to block %u: clusters of several blocks are not executed", block[__builtin_ctz(r)]));
            blend32(operand(k, w, in.o[0]), operand(k, w, in.o[1]), m);
            return NEXT;
        }
        case K_BULK:
            bulk<CHECK>(k, w, in, m, pc);
            w.repeats = w.idle = 0, k.progressed = true;
            return NEXT;
        case K_BULK_COMMIT:
            for (u32 i = 0; i < LANES; i++) w.copy_groups[i] += m >> i & 1;
            return NEXT;
        case K_BULK_WAIT:
            wait_stores(k, w, in, m);
            w.repeats = w.idle = 0, k.progressed = true;
            return NEXT;
        case K_SETMAXNREG: return set_registers(k, w, in, pc);
        case K_WGMMA: issue<CHECK>(k, w, in, pc); return NEXT;
        case K_WGMMA_COMMIT: w.commits++; [[fallthrough]];  // and a step, as a fence is
        case K_WGMMA_FENCE: {
            Warpgroup& g = group_of(k, w, pc);
            agree(w, g, pc);
            advance(k, g, w);
            return NEXT;
        }
        case K_WGMMA_WAIT: return wait_products(k, w, in, pc);
        default: fault("internal", pc, m, format("instruction kind %u", in.kind));
    }
}

template After asynchronous<true>(Block&, Warp&, const Ins&, u32, u32, u64&);
template After asynchronous<false>(Block&, Warp&, const Ins&, u32, u32, u64&);

void begin_asynchronous(Block& k) {
    k.async = std::make_shared<Async>();
    k.async->total = (u64)k.warps.size() * LANES * k.prog->thread_registers;
    for (auto& w : k.warps) w.registers = k.prog->thread_registers;
}

// A block must not leave what it has begun.
void end_asynchronous(Block& k) {
    end_bulk(k);
    for (auto& g : k.async->groups)
        for (auto& s : g.steps) {
            if (s.warps != 15)
                fault("warpgroup", s.pc, FULL, "the warps of a warpgroup disagree: some ended without executing it");
            if (s.product) fault("pending", s.pc, FULL, "the block ends while a wgmma is in flight: no wgmma.wait_group covers it");
        }
    for (auto& entry : k.async->barriers) {
        const MBarrier& b = entry.second;
        if (b.flying || b.bytes || !b.awaited)
            fault("pending", b.pc, 1, format("the block ends and nobody has waited for copies to the mbarrier at shared address 0x%x: "
                "transaction count %lld, %u bytes on their way", entry.first, (long long)b.bytes, b.flying));
    }
}
