// Blocks: how one starts, whose turn it is, and when none can go on.
//
// A host thread owns some places for blocks and gives turns to their warps. A block that only waits for memory gives way to the
// others of its thread. When in all places every warp waits so, and memory has not changed since, no later turn can differ: the
// blocks deadlock - on each other, or on a block for which there is no place.
#include <algorithm>
#include <chrono>

#include "interp.h"

namespace {
void special_registers(Block& k, Warp& w) {
    const Launch& l = *k.launch;
    for (const Special& s : k.prog->specials) {
        u32* row = (u32*)(w.regs + s.offset);
        for (u32 i = 0; i < LANES; i++) {
            u32 t = w.index * LANES + i, v = 0;
            switch (s.code) {
                case TID_X: v = t % l.block[0]; break;
                case TID_Y: v = t / l.block[0] % l.block[1]; break;
                case TID_Z: v = t / (l.block[0] * l.block[1]); break;
                case NTID_X: case NTID_Y: case NTID_Z: v = l.block[s.code - NTID_X]; break;
                case CTAID_X: case CTAID_Y: case CTAID_Z: v = k.ctaid[s.code - CTAID_X]; break;
                case NCTAID_X: case NCTAID_Y: case NCTAID_Z: v = l.grid[s.code - NCTAID_X]; break;
                case LANEID: v = i; break;
                case WARPID: v = w.index; break;
                case NWARPID: v = (u32)k.warps.size(); break;
                case SMID: v = 0; break;
                case NSMID: v = 1; break;
                case LANEMASK_EQ: v = 1u << i; break;
                case LANEMASK_LT: v = (1u << i) - 1; break;
                case LANEMASK_LE: v = ((1u << i) - 1) | 1u << i; break;
                case LANEMASK_GE: v = ~((1u << i) - 1); break;
                case LANEMASK_GT: v = ~((1u << i) - 1) & ~(1u << i); break;
                case DYNAMIC_SMEM: v = l.dynamic_smem; break;
                case TOTAL_SMEM: v = l.smem_end - l.smem_base; break;
                case CLUSTERID_X: case CLUSTERID_Y: case CLUSTERID_Z: v = k.ctaid[s.code - CLUSTERID_X] / l.cluster[s.code - CLUSTERID_X]; break;
                case NCLUSTERID_X: case NCLUSTERID_Y: case NCLUSTERID_Z: v = l.grid[s.code - NCLUSTERID_X] / l.cluster[s.code - NCLUSTERID_X]; break;
                case CLUSTER_CTAID_X: case CLUSTER_CTAID_Y: case CLUSTER_CTAID_Z:
                    v = k.ctaid[s.code - CLUSTER_CTAID_X] % l.cluster[s.code - CLUSTER_CTAID_X];
                    break;
                case CLUSTER_NCTAID_X: case CLUSTER_NCTAID_Y: case CLUSTER_NCTAID_Z: v = l.cluster[s.code - CLUSTER_NCTAID_X]; break;
                case CLUSTER_CTARANK: v = k.rank; break;
                case CLUSTER_NCTARANK: v = (u32)k.cluster->blocks.size(); break;
            }
            row[i] = v;
        }
    }
}

std::string where_warps_are(Block& k) {
    std::string text;
    for (auto& w : k.warps) {
        if (w.state == DONE) text += format(" warp %u: exited;", w.index);
        else if (w.state == AT_BARRIER)
            text += format(" warp %u: at barrier %u, @pc%u@, %u of %s threads there;", w.index, w.barrier, w.barrier_pc,
                k.barriers[w.barrier].arrived, k.barriers[w.barrier].expected ? format("%u", k.barriers[w.barrier].expected).c_str() : "all");
        else if (w.state == WAITS && k.prog->ins[w.pc].kind == K_CLUSTER_WAIT) text += format(" warp %u: at @pc%u@, for the cluster;", w.index, w.pc);
        else if (w.state == WAITS)
            text += format(" warp %u: at @pc%u@, for the other warps of its warpgroup or for registers;", w.index, w.pc);
        else text += format(" warp %u: at @pc%u@;", w.index, w.pc);
    }
    return text;
}

// Also of a cluster's other blocks, of which one may have ended.
std::string where_blocks_are(Block& k) {
    std::string text;
    for (Block* b : k.cluster->blocks)
        text += format(" block (%u,%u,%u):", b->ctaid[0], b->ctaid[1], b->ctaid[2]) + (b->live ? where_warps_are(*b) : " ended;");
    return text;
}

template <bool CHECK>
void start(Block& k) {
    const Launch& l = *k.launch;
    Cluster& c = *k.cluster;
    const u64 linear = k.linear;
    u32 threads = l.block[0] * l.block[1] * l.block[2], n = (threads + 31) / 32;
    k.warps.resize(n);
    for (auto& b : k.barriers) b.clear(c.numbers);
    std::fill(k.knowledge.begin(), k.knowledge.end(), 0), std::fill_n(k.uses, c.numbers, 0);
    const u32 epoch = ++c.epochs, first = k.rank * (c.warps / (u32)c.blocks.size());
    k.sectors.block++;
    k.fences = 0, k.known.clear(), k.observed.clear();
    k.round_at = ~0ull, k.rounds = k.circles = 0;
    if (CHECK) {
        std::fill(k.lines.begin(), k.lines.end(), Cell{});
        k.more_readers.clear(), k.free_readers = ~0u;
        memset(k.smem + l.smem_base, 0xff, l.smem_end - l.smem_base);
        std::fill_n((u32*)k.regs, (size_t)n * k.prog->warp_bytes / 4, UNWRITTEN);
    }
    for (u32 i = 0; i < n; i++) {
        Warp& w = k.warps[i];
        auto groups = std::move(w.groups);
        auto async = std::move(w.async);
        w = Warp();
        w.groups = std::move(groups), w.async = std::move(async);
        w.groups.clear(), w.async.clear();
        w.index = i, w.regs = k.regs + (size_t)i * k.prog->warp_bytes;
        w.alive = w.active = threads - i * 32 >= 32 ? FULL : (1u << (threads - i * 32)) - 1;
        w.known = &k.knowledge[2 * i * c.numbers], w.fenced = w.known + c.numbers;
        w.number = first + i, w.sync(epoch);
        w.known[w.number] = ~0u;  // always ordered after itself
        if (c.clocks == 1) w.min_known = ~0u;
        memset(w.regs, 0, k.prog->pred_bytes);
        special_registers(k, w);
    }
    k.rng = l.seed ? (l.seed * 0x9e3779b97f4a7c15ull) ^ (linear + 1) * 0xd1342543de82ef95ull : 1;
    if (!k.rng) k.rng = 1;
    k.last = n - 1, k.live = true;
    if (k.prog->asynchronous) begin_asynchronous(k);
}

// The i-th cluster's blocks.
template <bool CHECK>
void start(Cluster& c, u64 i) {
    const Launch& l = *c.blocks[0]->launch;
    const u32 blocks = (u32)c.blocks.size(), n = (l.block[0] * l.block[1] * l.block[2] + 31) / 32;
    c.warps = c.clocks = n, c.epochs = 1, c.phase = 0;
    if (blocks > 1) {  // a block's numbers are of one bank
        u32 each = 1;
        while (each < n) each *= 2;
        c.warps = c.clocks = each * blocks;
    }
    c.agents.clear(), c.fences.clear(), c.done_fences.clear();
    for (u32* clock : {c.known, c.fenced, c.done_known, c.done_fenced}) std::fill_n(clock, c.numbers, 0);
    const u64 x = l.grid[0] / l.cluster[0], y = l.grid[1] / l.cluster[1];
    const u64 at[3] = {i % x * l.cluster[0], i / x % y * l.cluster[1], i / (x * y) * l.cluster[2]};
    for (u32 r = 0; r < blocks; r++) {
        Block& k = *c.blocks[r];
        k.ctaid[0] = (u32)at[0] + r % l.cluster[0];
        k.ctaid[1] = (u32)at[1] + r / l.cluster[0] % l.cluster[1];
        k.ctaid[2] = (u32)at[2] + r / (l.cluster[0] * l.cluster[1]);
        k.linear = (u32)(k.ctaid[0] + (u64)l.grid[0] * (k.ctaid[1] + (u64)l.grid[1] * k.ctaid[2]));
        start<CHECK>(k);
    }
}

[[noreturn]] void fault_in(const Block& k, Fault f) {
    memcpy(f.block, k.ctaid, sizeof f.block);
    f.warp = k.last, f.linear = k.linear;
    throw f;
}

// A block none of whose warps can run waits for the others of its cluster, or lanes have ended unnoticed.
bool others_run(Block& k) {
    recount_cluster(k);
    for (Block* b : k.cluster->blocks)
        for (auto& w : b->warps)
            if (w.state == RUNNABLE && b->live) return k.spun = true;
    return false;
}

// One warp's turn; the block is no longer live when its last warp has ended.
template <bool CHECK>
void turn(Block& k) {
    const u64 seed = k.launch->seed;
    u32 n = (u32)k.warps.size(), pick = n, runnable = 0;
    for (auto& w : k.warps) runnable += w.state == RUNNABLE;
    try {
        if (!runnable && others_run(k)) return;
        if (!runnable) {
            k.last = 0;
            while (k.warps[k.last].state == DONE) k.last++;
            const Warp& w = k.warps[k.last];
            fault("deadlock", w.state == AT_BARRIER ? w.barrier_pc : w.pc, w.active, k.cluster->blocks.size() == 1
                ? "no warp of the block can run:" + where_warps_are(k) : "no warp of the cluster can run:" + where_blocks_are(k));
        }
        if (seed) {
            u32 nth = (u32)(k.random() % runnable);
            for (pick = 0;; pick++)
                if (k.warps[pick].state == RUNNABLE && nth-- == 0) break;
        } else {
            for (u32 i = 1; i <= n && pick == n; i++)
                if (k.warps[(k.last + i) % n].state == RUNNABLE) pick = (k.last + i) % n;
        }
        k.last = pick;
        run_warp<CHECK>(k, k.warps[pick], seed ? 1 + (k.random() & (k.random() & 1 ? 15 : 255)) : 1u << 18);
        if (k.warps[pick].state != DONE) return;
        recount(k), recount_cluster(k);
        for (auto& w : k.warps)
            if (w.state != DONE) return;
        end_block(k, CHECK);
    } catch (Fault& f) {
        fault_in(k, f);
    }
}

// ---- deadlock

constexpr u64 ENDED = ~0ull;

bool stuck(const Block& k, u64 progress) {
    bool waits = false;
    if (k.round_at == progress && k.circles > 1) return true;
    for (auto& w : k.warps) {
        if (w.state != RUNNABLE) continue;
        if (w.seen != progress || w.idle <= 2 * (w.groups.size() + 1)) return false;
        waits = true;
    }
    return waits || k.cluster->blocks.size() > 1;  // where no warp can run it waits for another block
}

// All of this thread's blocks are stuck. A deadlock when the other threads' are too, at the same state of memory.
void nobody_here_can_run(Run& run, u32 thread, const std::vector<Block*>& mine, u64 progress) {
    run.stuck_at[thread] = progress;
    for (auto& at : run.stuck_at)
        if (at != progress && at != ENDED) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
            return;
        }
    if (run.progress != progress || run.stop) return;  // a thread whose block met a fault has ended too: that is what to report
    const Launch& l = run.launch;
    u64 blocks = (u64)l.grid[0] * l.grid[1] * l.grid[2];
    std::string text = format("every resident block waits for memory that none of them will change (places for blocks: %zu, started: %llu "
        "of %llu):", run.places.size(), (unsigned long long)std::min(blocks, run.next_cluster.load() * mine[0]->cluster->blocks.size()), (unsigned long long)blocks);
    for (size_t i = 0; i < mine.size() && i < 4; i += mine[i]->cluster->blocks.size()) text += where_blocks_are(*mine[i]);
    Block& k = **std::find_if(mine.begin(), mine.end(), [](Block* b) {
        return std::any_of(b->warps.begin(), b->warps.end(), [](const Warp& w) { return w.state == RUNNABLE; });
    });
    k.last = 0;
    while (k.warps[k.last].state != RUNNABLE) k.last++;
    Fault f;
    f.check = "deadlock", f.detail = text, f.pc = k.warps[k.last].pc, f.lanes = k.warps[k.last].active;
    fault_in(k, f);
}

// ---- a host thread

bool next_cluster(Run& run, u64& i) {
    const Launch& l = run.launch;
    u64 clusters = (u64)l.grid[0] * l.grid[1] * l.grid[2] / (l.cluster[0] * l.cluster[1] * l.cluster[2]);
    i = run.next_cluster.fetch_add(1, std::memory_order_relaxed);
    if (i >= clusters) return false;
    if (l.seed) {  // a permutation of the clusters: an affine map by a number coprime to their count
        u64 step = l.seed * 2654435761u % clusters;
        while (std::__gcd(step, clusters) != 1) step++;
        i = (u64)(((unsigned __int128)i * step + l.seed) % clusters);
    }
    return true;
}

u8* aligned_bytes(size_t n, int fill) {
    u8* p = (u8*)aligned_alloc(256, (n + 511) / 256 * 256);
    memset(p, fill, n);
    return p;
}

void furnish(Run& run, Block& k, u32 thread) {
    const Launch& l = run.launch;
    u32 warps = (l.block[0] * l.block[1] * l.block[2] + 31) / 32;
    k.run = &run, k.prog = run.prog, k.launch = &run.launch, k.consts = run.prog->consts;
    k.regs = aligned_bytes((size_t)warps * run.prog->warp_bytes, 0);
    k.smem = aligned_bytes(l.smem_end, 0xff);
    k.knowledge.resize((size_t)2 * warps * k.cluster->numbers);
    k.local = aligned_bytes((size_t)warps * LANES * run.prog->local_bytes, 0xff);
    if (!l.checks) return;
    k.lines.resize(l.smem_end / 16 + 1), k.cells.resize(k.lines.size() << (4 - run.prog->cell_shift));
    k.first_of_line.resize(k.lines.size()), k.first_of_cell.resize(k.cells.size());
    k.sectors.chunks.resize(run.chunks);
    run.counts[thread].resize(run.prog->ins.size()), k.counts = run.counts[thread].data();
}

template <bool CHECK>
void run_blocks(Run& run, u32 thread) {
    const u64 seed = run.launch.seed;
    std::vector<Block*> mine;  // with a live block
    u64 next, turns = 0;
    for (size_t i = thread; i < run.clusters.size(); i += run.counts.size()) {
        if (!next_cluster(run, next)) break;
        Cluster& c = *run.clusters[i];
        for (Block* b : c.blocks) furnish(run, *b, thread);
        start<CHECK>(c, next);
        mine.insert(mine.end(), c.blocks.begin(), c.blocks.end());
    }
    for (size_t at = 0; !mine.empty() && !run.stop.load(std::memory_order_relaxed);) {
        Block& k = *mine[at];
        turn<CHECK>(k);
        if (k.progressed) k.progressed = false, run.progress++;
        bool give_way = seed ? (k.random() & 3) == 0 : (++turns & 255) == 0;
        if (!k.live) {
            auto& blocks = k.cluster->blocks;
            mine.erase(mine.begin() + (long)at);
            if (std::none_of(blocks.begin(), blocks.end(), [](Block* b) { return b->live; }) && next_cluster(run, next)) {
                start<CHECK>(*k.cluster, next);
                mine.insert(mine.begin() + (long)at, blocks.begin(), blocks.end());
            } else give_way = true;
        } else if (k.spun) {
            k.spun = false;
            u64 progress = run.progress;
            if (stuck(k, progress)) {
                give_way = true;
                if (std::all_of(mine.begin(), mine.end(), [&](Block* b) { return stuck(*b, progress); }))
                    nobody_here_can_run(run, thread, mine, progress);
            }
        }
        if (give_way && mine.size() > 1) at = seed ? k.random() % mine.size() : (at + 1) % mine.size();
        else if (at >= mine.size()) at = 0;
    }
}
}  // namespace

void work(Run& run, u32 thread) {
    ends = {run.launch.low_ends, run.launch.high_ends};
    try {
        run.launch.checks ? run_blocks<true>(run, thread) : run_blocks<false>(run, thread);
    } catch (Fault& f) {
        std::lock_guard<std::mutex> hold(run.lock);
        if (!run.faulted || f.linear < run.fault.linear) run.fault = f;
        run.faulted = true;
        run.stop = true;
    }
    run.stuck_at[thread] = ENDED;
    std::lock_guard<std::mutex> hold(run.lock);
    run.finished++;
    run.done.notify_all();
}
