// The C interface that run.py binds: load a program, start a launch on all host threads, wait, stop, collect.
#include <algorithm>
#include <chrono>

#include "sectors.h"

extern "C" {

// Names of row operations and instruction kinds, one per line, in table order.
int emu_names(char* out, int size) {
    std::string text;
    int n;
    const RowOp* ops = row_ops(&n);
#define X(kind) text += #kind "\n";
    KINDS(X)
#undef X
    text += "\n";
    for (int i = 0; i < n; i++) text += std::string(ops[i].name) + (ops[i].test ? " test\n" : " row\n");
    if ((int)text.size() < size) memcpy(out, text.c_str(), text.size() + 1);
    return (int)text.size() + 1;
}

void* emu_program(const Ins* ins, u64 n, const u8* consts, u64 const_bytes, const u32* tables, u64 n_tables, const Special* specials,
                  u64 n_specials, const u32* sizes) {
    auto* p = new Program;
    p->ins.assign(ins, ins + n);
    int count;
    const RowOp* ops = row_ops(&count);
    for (Ins& i : p->ins) {
        if (i.kind == K_ROW) i.fn = (void*)ops[(u64)i.fn].row;
        if (i.kind == K_TEST) i.fn = (void*)ops[(u64)i.fn].test;
        p->has_nc |= i.kind == K_LD && (i.flags & NC);
        p->has_wait |= i.kind == K_GRID_WAIT;
        p->asynchronous |= i.kind >= K_MBARRIER;
    }
    p->consts = (u8*)aligned_alloc(256, (const_bytes + 511) / 256 * 256);
    memcpy(p->consts, consts, const_bytes);
    p->tables.assign(tables, tables + n_tables);
    p->specials.assign(specials, specials + n_specials);
    p->warp_bytes = sizes[0], p->pred_bytes = sizes[1], p->local_bytes = sizes[2], p->cell_shift = sizes[3], p->global_shift = sizes[4];
    p->thread_registers = sizes[5];
    return p;
}
void emu_program_free(void* p) { delete (Program*)p; }

void* emu_launch(const void* program, const Launch* l) {
    auto* run = new Run;
    run->prog = (const Program*)program;
    run->launch = *l;
    run->params.assign(l->params, l->params + l->param_bytes);
    run->launch.params = run->params.data();
    run->launch.dependent |= run->prog->has_wait;
    for (u64 i = 0; i < l->n_allocations; i++) {
        Allocation a{l->allocations[3 * i], l->allocations[3 * i + 1], nullptr, run->chunks, l->allocations[3 * i + 2] != 0};
        run->chunks += (a.size + 32 * CHUNK - 1) / (32 * CHUNK);
        bool tracked = std::find(l->tracked, l->tracked + l->n_tracked, a.address) != l->tracked + l->n_tracked;
        if (l->checks && (tracked || run->prog->has_nc)) a.shadow = (u8*)calloc(a.size ? a.size : 1, 1);  // pages come when touched
        run->allocations.push_back(a);
    }
    const u64 blocks = (u64)l->grid[0] * l->grid[1] * l->grid[2], each = (u64)l->cluster[0] * l->cluster[1] * l->cluster[2];
    u64 threads = std::min<u64>(l->threads ? l->threads : std::max(1u, std::thread::hardware_concurrency()), blocks / each);
    const u64 clusters = l->resident ? std::min<u64>(l->resident, blocks) / each : threads;  // places for them
    threads = std::min(threads, clusters);
    run->many = blocks > 1, run->progress = 1;
    run->written = std::vector<std::atomic<std::atomic<u64>*>>(l->checks ? run->chunks : 0);
    run->stuck_at = std::vector<std::atomic<u64>>(threads);
    run->counts.resize(threads);
    for (u64 i = 0; i < clusters; i++) {
        auto* c = new Cluster;
        run->clusters.emplace_back(c);
        c->numbers = each > 1 ? NUMBERS : FEW;
        for (u32 rank = 0; rank < each; rank++) {
            run->places.emplace_back(new Block);
            Block* b = run->places.back().get();
            b->cluster = c, b->rank = rank, c->blocks.push_back(b);
        }
    }
    for (u64 i = 0; i < threads; i++) run->threads.emplace_back(work, std::ref(*run), (u32)i);
    return run;
}

// True when all threads have ended, waiting at most this long.
int emu_poll(void* h, int milliseconds) {
    auto* run = (Run*)h;
    std::unique_lock<std::mutex> hold(run->lock);
    return run->done.wait_for(hold, std::chrono::milliseconds(milliseconds), [&] { return run->finished == run->threads.size(); });
}
void emu_stop(void* h) { ((Run*)h)->stop = true; }

// Join; sums to totals[10] (instructions, mma, mma_sp, cp.async bytes, unique bytes as in sectors.h) and counts[instructions]; shadow bytes of tracked allocations to `shadows` (pointers, in tracked order).
// Returns 1 and fills the fault record when a check failed: numbers[8] and text "check\ndetail".
int emu_finish(void* h, u64* totals, Count* counts, u8** shadows, u64* numbers, char* text, int text_size) {
    auto* run = (Run*)h;
    for (auto& t : run->threads) t.join();
    for (auto& k : run->places)
        totals[0] += k->instructions, totals[1] += k->mma, totals[2] += k->mma_sp, totals[3] += k->async_bytes;
    for (auto& thread : run->counts)
        for (size_t i = 0; i < thread.size(); i++) {
            u64* d = (u64*)&counts[i];
            const u64* s = (const u64*)&thread[i];
            for (size_t j = 0; j < sizeof(Count) / 8; j++) d[j] += s[j];
        }
    if (run->launch.checks) unique_bytes(*run, totals + 4);
    for (u64 i = 0; i < run->launch.n_tracked; i++)
        for (auto& a : run->allocations)
            if (a.address == run->launch.tracked[i] && a.shadow) memcpy(shadows[i], a.shadow, a.size);
    bool faulted = run->faulted;
    if (faulted) {
        const Fault& f = run->fault;
        u64 v[8] = {f.pc, f.lanes, f.block[0], f.block[1], f.block[2], f.warp, f.linear, 0};
        memcpy(numbers, v, sizeof v);
        snprintf(text, text_size, "%s\n%s", f.check.c_str(), f.detail.c_str());
    }
    delete run;
    return faulted;
}
}
