// The interpreter of one warp, its lanes in groups that share a pc; the group with the lowest pc runs, and groups that
// meet merge. A block's warps take turns; every wait (barrier, quantum) leaves a warp that can be resumed.
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "barriers.h"

void fault(const char* check, u32 pc, u32 lanes, std::string detail) {
    Fault f;
    f.check = check, f.pc = pc, f.lanes = lanes, f.detail = std::move(detail);
    throw f;
}

std::string format(const char* f, ...) {
    char text[1024];
    va_list args;
    va_start(args, f);
    vsnprintf(text, sizeof text, f, args);
    va_end(args);
    return text;
}

namespace {

// ---- groups of lanes

// Run group i until it meets a group at a higher pc; when it is the lowest, that is any other group.
inline void take(Warp& w, size_t i) {
    w.pc = w.groups[i].pc, w.active = w.groups[i].mask;
    w.groups.erase(w.groups.begin() + i);
    w.watch = w.flying.empty() ? ~0u : 0;  // 0: every instruction is looked at
    if (w.watch) for (auto& g : w.groups)
        if (g.pc > w.pc && g.pc < w.watch) w.watch = g.pc;
}

// Continue with the lowest group that may run. False when no lane is left.
bool choose(Block& k, Warp& w) {
    for (size_t i = 0; i < w.groups.size(); i++)  // groups at one pc are one group
        for (size_t j = i + 1; j < w.groups.size();)
            if (w.groups[i].pc == w.groups[j].pc) {
                w.groups[i].mask |= w.groups[j].mask, w.groups[i].need |= w.groups[j].need;
                w.groups.erase(w.groups.begin() + j);
            } else j++;
    if (w.groups.empty()) return false;
    size_t best = w.groups.size();
    for (int attempt = 0; attempt < 2 && best == w.groups.size(); attempt++) {
        for (size_t i = 0; i < w.groups.size(); i++) {
            Group& g = w.groups[i];
            if (g.need & w.alive & ~g.mask) continue;
            if (best == w.groups.size() || g.pc < w.groups[best].pc) best = i;
        }
        if (attempt || best < w.groups.size()) break;
        // bar.warp.sync may be met at different places: when together all have come, let all go
        u32 together = 0, need = w.groups[0].need;
        bool same = true;
        for (auto& g : w.groups) same &= k.prog->ins[g.pc].kind == K_BAR_WARP && g.need == need, together |= g.mask;
        if (same && !(need & w.alive & ~together))
            for (auto& g : w.groups) g.pc++, g.need = 0;
    }
    if (best == w.groups.size()) {
        std::string text = "lanes of one warp wait at different places for each other:";
        for (auto& g : w.groups) text += format(" lanes 0x%08x at @pc%u@ (needs 0x%08x);", g.mask, g.pc, g.need & w.alive);
        fault("deadlock", w.groups[0].pc, w.groups[0].mask, text);
    }
    bool delay = k.launch->seed && w.groups.size() > 1 && (k.random() & 7) == 0;
    if (delay) {  // hardware need not reconverge where it could: now and then let another group go on first
        size_t other = (best + 1 + k.random() % (w.groups.size() - 1)) % w.groups.size();
        if (!(w.groups[other].need & w.alive & ~w.groups[other].mask)) best = other;
    }
    take(w, best);
    return true;
}

// All lanes of `need` that still live must execute this instruction together. If some are elsewhere, park these lanes.
inline bool together(Block& k, Warp& w, u32 m, u32 need) {
    if (!(need & w.alive & ~m)) return true;
    w.groups.push_back({w.pc, m, need});
    if (w.active & ~m) w.groups.push_back({w.pc + 1, w.active & ~m, 0});
    choose(k, w);
    return false;
}

// ---- collectives

// A collective with a member mask. Lanes that met here may name different masks (each is then a collective of its own).
bool members(Block& k, Warp& w, const Ins& in, u32 m, u32 pc) {
    const u32* mask = (const u32*)operand(k, w, in.o[5]);
    u32 named[LANES], all = 0;
    for (int i = 0; i < LANES; i++) {
        named[i] = mask[i];
        if (m >> i & 1) all |= named[i];
    }
    if (!together(k, w, m, all)) return false;
    for (u32 left = m; left;) {
        u32 need = named[__builtin_ctz(left)], part = 0;
        for (int i = 0; i < LANES; i++) part |= (u32)((left >> i & 1) && named[i] == need) << i;
        left &= ~part;
        if (part & ~need) fault("convergence", pc, part & ~need, format("a lane outside its member mask 0x%08x executes it", need));
        if (need & w.alive & ~part) fault("convergence", pc, part, format("the lanes of member mask 0x%08x name different masks", need));
        if (in.kind == K_SHFL) shuffle(k, w, in, part);
        else if (in.kind == K_VOTE) vote(k, w, in, part);
        else if (in.kind == K_MATCH) match(k, w, in, part);
        else if (in.kind == K_ELECT) elect(k, w, in, part);
        else reduce(k, w, in, part);
    }
    return true;
}

// ---- waiting for memory

inline void progress(Block& k, Warp& w) { w.repeats = w.idle = 0, k.progressed = true; }

// A strong read or an atomic has left memory as it was; `found` is a digest of lanes' addresses and values. True when the warp
// keeps finding the same and should give way. When then its registers too are what they were the last time, and memory has not
// changed since, it can only go round in this circle: `idle` counts that.
bool found_again(Block& k, Warp& w, u32 pc, u32 m, u64 found) {
    Spin* s = nullptr;
    for (Spin& e : w.spins)
        if (e.pc == pc && e.mask == m) s = &e;
    if (!s || s->found != found) {
        if (!s) s = &w.spins[w.spin_at++ & 3];
        *s = Spin{pc, m, found, 0};
        w.repeats = w.idle = 0;
        return false;
    }
    if (++w.repeats < SAME) return false;
    u64 registers = 1;
    for (u32 i = 0; i < k.prog->warp_bytes / 8; i++) registers = digest(registers, ((const u64*)w.regs)[i]);
    u64 now = k.run->progress;
    bool circle = w.seen == now && s->registers == registers;
    w.idle = circle ? w.idle + 1 : 0;
    w.seen = now, s->registers = registers, w.repeats = 0;
    w.since_switch = ~0u;  // other lanes of this warp first
    return k.spun = true;
}
}  // namespace

// A register that a wgmma in flight reads or writes must not be touched by others; they look themselves.
__attribute__((noinline)) void not_in_flight(const Warp& w, const Ins& in) {
    u32 m = in.guard < 0 ? FULL : *pred(w, in.guard) ^ (in.flags & GUARD_NOT ? FULL : 0);
    if (in.kind >= K_WGMMA || !(m & w.active)) return;
    for (s32 o : in.o)
        if (o >= 0 && !(o & 1) && w.flying[o >> 8])
            fault("wgmma", w.pc, w.active, w.flying[o >> 8] == 1
                ? "accesses a register that a wgmma in flight reads: no wgmma.wait_group has covered it"
                : "accesses a sum of a wgmma in flight: no wgmma.wait_group has covered it");
}

template <bool CHECK>
void run_warp(Block& k, Warp& w, u64 quantum) {
    const Ins* const code = k.prog->ins.data();
    u64 left = quantum;
    auto at = [&](s32 o) { return operand(k, w, o); };
    u32 counted = 0;  // where the last instruction was counted
    auto parked = [&] {  // its lanes wait for others, and have not executed it
        if (CHECK) k.counts[counted].executed--;
    };
    auto met = [&](u32 m, u32 need) {
        if (together(k, w, m, need)) return true;
        parked();
        return false;
    };
    while (left) {
        if (w.pc >= w.watch) {
            if (w.flying.empty() || !w.groups.empty()) {
                w.groups.push_back({w.pc, w.active, 0});
                choose(k, w);
            }
            if (!w.flying.empty()) not_in_flight(w, code[w.pc]);
        }
        const u32 pc = w.pc;
        const Ins& in = code[pc];
        u32 m = w.active;
        left--;
        if (in.guard >= 0) {
            u32 p = *pred(w, in.guard);
            m &= in.flags & GUARD_NOT ? ~p : p;
            if (!m) {
                w.pc++;
                continue;
            }
        }
        if (CHECK) k.counts[pc].executed++, counted = pc;
        switch (in.kind) {
            case K_ROW: {
                u8* d = at(in.o[0]);
                RowFn f = (RowFn)in.fn;
                if (m == FULL) {
                    f(d, at(in.o[1]), at(in.o[2]), at(in.o[3]), at(in.o[4]));
                } else {
                    f(k.scratch[0], at(in.o[1]), at(in.o[2]), at(in.o[3]), at(in.o[4]));
                    in.flags & WIDE ? blend64(d, k.scratch[0], m) : blend32(d, k.scratch[0], m);
                }
                break;
            }
            case K_TEST: {
                u32 r = ((TestFn)in.fn)(at(in.o[1]), at(in.o[2])), q = ~r;
                if (in.sub) {
                    u32 p = *(u32*)at(in.o[3]);
                    if (in.flags & PRED_NOT) p = ~p;
                    if (in.sub == 1) r &= p, q &= p;
                    else if (in.sub == 2) r |= p, q |= p;
                    else r ^= p, q ^= p;
                }
                u32* d = pred(w, in.o[0]);
                if (in.o[0] >= 0) *d = (*d & ~m) | (r & m);
                if (in.o[4] >= 0) {
                    u32* e = pred(w, in.o[4]);
                    *e = (*e & ~m) | (q & m);
                }
                break;
            }
            case K_PRED: predicate(k, w, in, m); break;
            case K_BRA: {
                u32 target = (u32)in.imm, rest = w.active & ~m;
                if (rest) {
                    w.groups.push_back({target, m, 0});
                    w.groups.push_back({pc + 1, rest, 0});
                    choose(k, w);
                } else w.pc = target;
                continue;
            }
            case K_BRX: {
                const u32* index = (const u32*)at(in.o[1]);
                if (w.active & ~m) w.groups.push_back({pc + 1, w.active & ~m, 0});
                for (int i = 0; i < LANES; i++) {
                    if (!(m >> i & 1)) continue;
                    if (index[i] >= in.imm2) fault("branch", pc, 1u << i, format("brx.idx index %u, table of %d", index[i], (int)in.imm2));
                    w.groups.push_back({k.prog->tables[in.imm + index[i]], 1u << i, 0});
                }
                choose(k, w);
                continue;
            }
            case K_EXIT: {
                w.alive &= ~m;
                progress(k, w);
                if (w.active & ~m) w.groups.push_back({pc + 1, w.active & ~m, 0});
                if (!choose(k, w)) {
                    w.state = DONE;
                    goto out;
                }
                continue;
            }
            case K_BAR:
                if (!met(m, FULL)) continue;
                w.pc = pc + 1;
                w.idle = 0;  // whoever waited for it goes on; memory has not changed
                if (barrier(k, w, in, m, pc)) goto out;
                continue;
            case K_BAR_WARP: {
                u32 need = ((u32*)at(in.o[1]))[__builtin_ctz(m)];
                if (!met(m, need)) continue;
                if (CHECK && !(w.alive & ~need)) w.sync(++k.cluster->epochs);  // all lanes' stores lie before what any of them does now
                break;
            }
            case K_LD: {
                if (!(in.flags & STRONG)) {
                    load_store<CHECK>(k, w, in, m, pc);
                    break;
                }
                u64 found = 0;
                load_store<CHECK>(k, w, in, m, pc, &found);
                if (!found_again(k, w, pc, m, found)) break;
                w.pc++;
                goto out;
            }
            case K_ST:
                load_store<CHECK>(k, w, in, m, pc);
                if (in.space != LOCAL) progress(k, w);
                break;
            case K_LD_PARAM: load_param(k, w, in, m); break;
            case K_ATOM: {
                u64 found = atomic<CHECK>(k, w, in, m, pc);
                if (!found) progress(k, w);
                else if (found_again(k, w, pc, m, found)) {
                    w.pc++;
                    goto out;
                }
                break;
            }
            case K_CP_ASYNC:
                cp_async<CHECK>(k, w, in, m, pc);
                progress(k, w);
                break;
            case K_FENCE:
                if (CHECK && !in.sub) fence(k, w, m);
                release(k, w, m);
                break;
            case K_GRID_WAIT: w.waited |= m; break;
            case K_CP_COMMIT:
                for (int i = 0; i < LANES; i++) w.committed[i] += m >> i & 1;
                break;
            case K_CP_WAIT:
                if (!w.async.empty()) cp_wait<CHECK>(k, w, m, in.imm, in.flags & ASYNC_ALL, pc);
                break;
            case K_LDMATRIX:
            case K_STMATRIX:
                if (!met(m, FULL)) continue;
                if (m != FULL) fault("convergence", pc, m, format("ldmatrix or stmatrix needs all 32 lanes, has 0x%08x", m));
                ldmatrix<CHECK>(k, w, in, pc);
                if (in.kind == K_STMATRIX) progress(k, w);
                break;
            case K_MOVMATRIX:
                if (!met(m, FULL)) continue;
                if (m != FULL) fault("convergence", pc, m, format("movmatrix needs all 32 lanes, has 0x%08x", m));
                movmatrix(k, w, in);
                break;
            case K_MMA:
            case K_MMA_SP:
                if (!met(m, FULL)) continue;
                if (m != FULL) fault("convergence", pc, m, format("mma needs all 32 lanes, has 0x%08x", m));
                tensor<CHECK>(k, w, in, pc);
                break;
            case K_SHFL:
            case K_VOTE:
            case K_MATCH:
            case K_REDUX:
            case K_ELECT:
                if (members(k, w, in, m, pc)) break;
                parked();
                continue;
            case K_ACTIVEMASK: broadcast(k, w, in.o[0], m, m); break;
            case K_NOP: break;
            case K_TRAP: fault("trap", pc, m, "the kernel executed trap");
            case K_CLOCK: {
                u64 r[LANES], now = in.sub ? (u64)time(nullptr) * 1000000000ull : k.instructions + (quantum - left);
                for (u64& x : r) x = now;
                if (in.flags & WIDE) blend64(at(in.o[0]), r, m);
                else broadcast(k, w, in.o[0], (u32)now, m);
                break;
            }
            case K_ISSPACEP: {
                u64 a[LANES];
                addresses(k, w, in.o[1], 0, true, m, a);
                u32 r = 0;
                for (int i = 0; i < LANES; i++) r |= (u32)is_in(a[i], in.sub) << i;
                u32* d = pred(w, in.o[0]);
                *d = (*d & ~m) | (r & m);
                break;
            }
            default: {
                if ((in.flags & ALIGNED) && !met(m, FULL)) continue;
                u64 found = 0;
                After then = asynchronous<CHECK>(k, w, in, m, pc, found);
                if (then == NEXT) break;
                if (then == FAILED || then == POLLS) found_again(k, w, pc, m, found);
                if (then == FAILED) w.pc++;
                else parked();
                goto out;
            }
        }
        w.pc++;
    }
out:
    k.instructions += quantum - left;
    w.since_switch += quantum - left;
    if (w.state == RUNNABLE && !w.groups.empty() && w.since_switch > (1u << 20)) {
        // Lanes spinning at a low pc must not starve the lanes they wait for: let another group run for a while.
        w.since_switch = 0;
        for (size_t i = 0; i < w.groups.size(); i++) {
            if (w.groups[i].need & w.alive & ~w.groups[i].mask) continue;
            w.groups.push_back({w.pc, w.active, 0});
            take(w, i);
            break;
        }
    }
}

template void run_warp<true>(Block&, Warp&, u64);
template void run_warp<false>(Block&, Warp&, u64);
