// Hopper's asynchronous instructions, apart from the interpreter's loop.
#include "bulk.h"
#include "wgmma.h"

// fence.mbarrier_init: the initialisations of this warp are seen by the asynchronous proxy, and by the cluster behind its barrier.
static void fence_init(Block& k, Warp& w) {
    u32 number = 0;
    if (k.cluster->blocks.size() > 1) {
        number = agent(k, INITS | w.number, "an mbarrier's initialisation");
        w.known[number] = w.epoch, w.epoch = ++k.cluster->epochs;
    }
    for (auto& b : k.async->barriers)
        if (b.second.by == w.number) b.second.visible = true, b.second.announced = number;
}

enum : u16 { MAP_ADDRESS, RANK_OF_ADDRESS };

// mapa and getctarank, of shared or of generic addresses.
static void map_address(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    const u32* block = (const u32*)operand(k, w, in.sub == MAP_ADDRESS ? in.o[2] : in.o[1]);
    u64 wide[LANES];
    u32 low[LANES];
    for (u32 i = 0; i < LANES; i++) {
        const u8* source = operand(k, w, in.o[1]);
        const u64 a = in.flags & WIDE ? ((const u64*)source)[i] : ((const u32*)source)[i];
        wide[i] = low[i] = 0;
        if (!(m >> i & 1)) continue;
        if ((in.flags & WIDE) && (a & WINDOW_MASK) != SHARED_WINDOW)
            fault("cluster", pc, 1u << i, format("generic address 0x%llx is not in shared memory", (unsigned long long)a));
        if (in.sub == MAP_ADDRESS && block[i] >= k.cluster->blocks.size())
            fault("cluster", pc, 1u << i, format("mapa to block %u of a cluster of %zu", block[i], k.cluster->blocks.size()));
        wide[i] = in.sub == MAP_ADDRESS ? address_in(k, block[i], a) : rank_of(k, a);
        low[i] = (u32)wide[i];
    }
    if (in.sub == MAP_ADDRESS && (in.flags & WIDE)) blend64(operand(k, w, in.o[0]), wide, m);
    else blend32(operand(k, w, in.o[0]), low, m);
}

template <bool CHECK>
After asynchronous(Block& k, Warp& w, const Ins& in, u32 m, u32 pc, u64& found) {
    if ((in.flags & ALIGNED) && m != FULL) fault("convergence", pc, m, format("it needs all 32 lanes, has 0x%08x", m));
    switch (in.kind) {
        case K_MBARRIER:
            if (in.sub >= M_TRY)
                for (u32 r = m; r; r &= r - 1) arrive_late<CHECK>(k, ((const u32*)operand(k, w, in.o[1]))[__builtin_ctz(r)]);
            return mbarrier<CHECK>(k, w, in, m, pc, found);
        case K_FENCE_PROXY:
            fence_proxies(k, w, m);
            for (auto& b : k.async->barriers) b.second.visible |= b.second.by == w.number && m >> b.second.lane & 1;
            return NEXT;
        case K_FENCE_INIT: fence_init(k, w); return NEXT;
        case K_MAPA: map_address(k, w, in, m, pc); return NEXT;
        case K_CLUSTER_ARRIVE: arrive_cluster<CHECK>(k, w, in, m, pc); return NEXT;
        case K_CLUSTER_WAIT: return wait_cluster(k, w, m, pc, found);
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
            agree(k, w, g, pc);
            advance(k, g, w);
            return NEXT;
        }
        case K_WGMMA_WAIT: return wait_products(k, w, in, pc);
        default: fault("internal", pc, m, format("instruction kind %u", in.kind));
    }
}

template After asynchronous<true>(Block&, Warp&, const Ins&, u32, u32, u64&);
template After asynchronous<false>(Block&, Warp&, const Ins&, u32, u32, u64&);

void recount_cluster(Block& k) { settle(*k.cluster); }

void begin_asynchronous(Block& k) {
    k.async = std::make_shared<Async>();
    k.async->total = (u64)k.warps.size() * LANES * k.prog->thread_registers;
    for (auto& w : k.warps) w.registers = k.prog->thread_registers;
}

// A block must not leave what it has begun.
void end_block(Block& k, bool check) {
    k.live = false;
    if (check) end_in_cluster(k);
    if (!k.prog->asynchronous) return;
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
