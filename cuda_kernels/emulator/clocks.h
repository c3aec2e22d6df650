// Order between a cluster's warps, its asynchronous operations, and the two proxies through which they reach shared memory.
//
// Whatever accesses shared memory has a number and epochs: warps first, then `agents`, the asynchronous operations: the copies
// that end at one mbarrier, the bulk stores of one warp, the products of one warpgroup. A warp knows up to which epoch of every
// number it is ordered after (known), and up to which epoch of every warp a fence.proxy.async lies between that warp's writes and
// now (fenced). Barriers of both kinds hand on both. An asynchronous operation is ordered after what its issuer knows, and sees
// only what is fenced (PTX ISA, "Async proxy", "proxy-preserved base causality order").
#pragma once
#include "interp.h"

namespace {

// What a warp knows goes into a barrier, at which the lanes in m arrive. Others are not ordered ahead of that by having run ahead:
// where they have accessed shared memory, only what lies before all lanes last met at a barrier counts.
inline void join(const Block& k, const Warp& w, u32* known, u32* fenced, u32 m = ~0u) {
    const u32 own = w.touched & ~m ? w.synced - 1 : w.epoch;
    for (u32 v = 0, n = k.cluster->clocks; v < n; v++) {
        u32 epoch = v == w.number ? own : w.known[v];
        known[v] = epoch > known[v] ? epoch : known[v];
        fenced[v] = w.fenced[v] > fenced[v] ? w.fenced[v] : fenced[v];
    }
}

// And out of it. Nobody forgets, so what all others are known up to is what the least is.
inline void learn(const Block& k, Warp& w, const u32* known, const u32* fenced) {
    u32 least = ~0u;
    for (u32 v = 0, n = k.cluster->clocks; v < n; v++) {
        if (known[v] > w.known[v]) w.known[v] = known[v];
        if (fenced[v] > w.fenced[v]) w.fenced[v] = fenced[v];
        if (v != w.number && w.known[v] < least) least = w.known[v];
    }
    w.min_known = least;
}

// fence.proxy.async by the lanes in m: it covers what this warp knows of others, and its own accesses; where some lanes alone
// execute it, of their own warp only what lies before all lanes last met at a barrier.
inline void fence_proxies(Block& k, Warp& w, u32 m) {
    for (u32 v = 0, n = k.cluster->clocks; v < n; v++) {
        u32 upto = v != w.number ? w.known[v] : w.alive & ~m ? w.synced - 1 : w.epoch;
        if (upto > w.fenced[v]) w.fenced[v] = upto;
    }
    w.epoch = ++k.cluster->epochs;
}

}  // namespace
