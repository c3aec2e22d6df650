// What an instruction, a warp, a block and a launch are. run.py and decode.py mirror Ins and Launch field by field.
#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "rows.h"

#define KINDS(X)                                                                                                          \
    X(ROW) X(TEST) X(PRED) X(BRA) X(BRX) X(EXIT) X(BAR) X(BAR_WARP) X(LD) X(ST) X(LD_PARAM) X(ATOM) X(CP_ASYNC)           \
    X(CP_COMMIT) X(CP_WAIT) X(LDMATRIX) X(MOVMATRIX) X(MMA) X(MMA_SP) X(SHFL) X(VOTE) X(MATCH) X(REDUX) X(ACTIVEMASK)     \
    X(NOP) X(FENCE) X(GRID_WAIT) X(TRAP) X(CLOCK) X(ISSPACEP) X(ELECT) X(MAPA) X(CLUSTER_ARRIVE) X(CLUSTER_WAIT)         \
    X(STMATRIX) X(MBARRIER) X(FENCE_PROXY) X(FENCE_INIT) X(SETMAXNREG) X(BULK) X(BULK_COMMIT) X(BULK_WAIT)                \
    X(WGMMA) X(WGMMA_FENCE) X(WGMMA_COMMIT) X(WGMMA_WAIT)
enum Kind : u16 {
#define X(k) K_##k,
    KINDS(X)
#undef X
};

// Constants are ordinary host memory: GLOBAL. CLUSTER: shared memory of any block of the cluster, see clusters.h.
enum Space : u8 { GENERIC, GLOBAL, SHARED, LOCAL, PARAM, CLUSTER };
constexpr u64 SHARED_WINDOW = 1ull << 60, LOCAL_WINDOW = 2ull << 60, PARAM_WINDOW = 3ull << 60, WINDOW_MASK = 7ull << 60;

enum Order : s32 { SYNC = 1, ACQUIRE = 2, RELEASE = 4 };  // SYNC: strong, at the device's scope
enum Flag : u8 { GUARD_NOT = 1, WIDE = 2, SIGNED = 4, NC = 8, ADDR64 = 16, STRONG = 32, PRED_NOT = 64, ASYNC_ALL = 128 };
constexpr u8 UNFENCED = NC, ALIGNED = ASYNC_ALL;  // of wgmma: a register it uses is not fenced; all 32 lanes execute it together

// Operands are byte offsets * 2 into the warp's registers, or with the low bit set into the program's constants.
struct Ins {
    void* fn;      // RowFn or TestFn; a table index until the program is loaded
    s64 imm;       // address offset, branch target, count
    s64 imm2;      // second address offset
    s32 guard;     // predicate operand, or -1
    u16 kind, sub;
    u8 flags, space, size, vec;  // size: bytes of one element
    s32 line;      // in the PTX text
    s32 o[20];
    s32 order;     // Order bits of an access to global memory
    s32 pad;
};
static_assert(sizeof(Ins) == 128, "decode.py builds this record");

constexpr u32 FULL = ~0u;  // all lanes
constexpr u32 UNWRITTEN = 0x7fb17fd3;  // what registers hold at first, with checks on: a NaN as a float and as two halves

struct Special {  // a special register and the row it is kept in
    u32 code;
    s32 offset;
};
enum SpecialCode : u32 { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z,
    LANEID, WARPID, NWARPID, SMID, NSMID, LANEMASK_EQ, LANEMASK_LE, LANEMASK_LT, LANEMASK_GE, LANEMASK_GT, DYNAMIC_SMEM, TOTAL_SMEM,
    CLUSTERID_X, CLUSTERID_Y, CLUSTERID_Z, NCLUSTERID_X, NCLUSTERID_Y, NCLUSTERID_Z, CLUSTER_CTAID_X, CLUSTER_CTAID_Y, CLUSTER_CTAID_Z,
    CLUSTER_NCTAID_X, CLUSTER_NCTAID_Y, CLUSTER_NCTAID_Z, CLUSTER_CTARANK, CLUSTER_NCTARANK };

constexpr u32 MOST_BLOCKS = 8;  // of a cluster, on every device
// In the check of races, of a cluster's warps and asynchronous operations; a cluster of one block has FEW.
constexpr u32 FEW = 32, NUMBERS = 256;

struct Program {
    std::vector<Ins> ins;
    u8* consts = nullptr;  // 64-byte aligned
    std::vector<u32> tables;
    std::vector<Special> specials;
    u32 warp_bytes = 0, pred_bytes = 0, local_bytes = 0;
    u32 cell_shift = 2, global_shift = 4;  // log2 of the smallest access to shared, and to global memory
    bool has_nc = false, has_wait = false;  // ld.global.nc; griddepcontrol.wait
    bool asynchronous = false;              // it uses what async.h has
    u32 thread_registers = 0;               // the most that a thread may start with, for setmaxnreg; 0: not declared
    ~Program() { free(consts); }
};

struct Allocation {
    u64 address, size;
    u8* shadow;  // per byte: bit 7 read through .nc, bits 0-6 how often written; null when not needed
    u64 chunk;   // its first chunk of sector cells
    bool constant;  // no launch writes it
};

struct Launch {  // filled by run.py
    u32 grid[3], block[3];
    u32 smem_base, smem_end, static_end, dynamic_smem;  // shared addresses: first valid, one past the last
    const u8* params;
    u64 param_bytes;
    const u64* allocations;  // address, size, constant or not; sorted
    u64 n_allocations;
    const u64* tracked;      // addresses of allocations whose writes are counted
    u64 n_tracked;
    u64 seed;
    u32 checks, late, threads, resident;  // resident: blocks at a time, 0 for one per thread
    u32 any_shared_read, same_value;      // checks left out: reads of shared memory nobody wrote, races that change nothing
    u32 sum_bits;                         // of tensor cores' sums, see Sums in mma.h; 0: every sum is rounded
    u32 unfenced;                         // no check of fence.proxy.async
    u32 dependent;                        // it may begin before the launch ahead has ended
    u32 cluster[3];                       // blocks
    u32 low_ends, high_ends;              // approximate instructions that are as wrong as documented: see Ends in rows.h
};

struct Count {  // per instruction, filled with checks on
    u64 executed, bytes, sectors, ideal_sectors, wavefronts, min_wavefronts;
};

struct Fault {
    std::string check, detail;
    u32 pc = 0, lanes = 0;
    u32 block[3] = {0, 0, 0}, warp = 0;
    u64 linear = 0;
};

struct Group {  // lanes of a warp waiting at a pc; `need`: lanes that must be there before it may go on
    u32 pc, mask, need;
};

struct AsyncCopy {  // one warp-level cp.async not yet waited for
    u32 pc, mask, bytes;
    u32 dst[LANES], take[LANES], group[LANES];
    u64 src[LANES];
};

struct Spin {  // a read that found what it had found before: where, which lanes, what, and the registers when it last gave way
    u32 pc, mask;
    u64 found, registers;
};

enum WarpState : u8 { RUNNABLE, AT_BARRIER, WAITS, DONE };  // WAITS: for its warpgroup or for registers

struct Warp {
    u8* regs = nullptr;
    u32 index = 0, number = 0;  // in its block; in the check of races
    u32 pc = 0, active = 0, alive = 0;
    u32 waited = 0;   // lanes that have passed griddepcontrol.wait
    u32 watch = ~0u;  // lowest pc above this one at which other lanes are: there groups merge
    std::vector<Group> groups;
    WarpState state = RUNNABLE;
    u32 barrier = 0, barrier_pc = 0;
    u64 since_switch = 0;
    // waiting for memory to change: equal reads in a row, and how often it gave way since with nothing changed at all
    Spin spins[4] = {};
    u32 spin_at = 0, repeats = 0, idle = 0;
    u64 seen = ~0ull;  // Run::progress when it last gave way
    std::vector<AsyncCopy> async;
    u32 committed[LANES] = {};
    // race detection: this warp's epoch, and up to which epoch of every other warp it is ordered after
    u32 epoch = 0, min_known = 0;
    u32* known = nullptr;
    // the same for what the asynchronous proxy may read, see clocks.h; since when all lanes were together, and who accessed memory since
    u32 *fenced = nullptr, synced = 0, touched = 0;
    void sync(u32 now) { epoch = synced = now, touched = 0; }
    // Lanes that have arrived at the cluster's barrier in its phase, or have not waited since; a fence for relaxed arrivals.
    u32 arrived = 0, unwaited = 0;
    std::vector<u32> released, released_fenced;
    // Hopper, see async.h: registers per thread, steps taken with the warpgroup, groups of wgmma and of bulk copies
    u32 registers = 0, commits = 0, copy_groups[LANES] = {};
    u64 steps = 0;
    std::vector<u8> flying;  // per row of registers what a wgmma in flight has it for; empty when none is
};

struct Barrier {
    u32 expected = 0, arrived = 0;  // threads
    u32 waiting = 0;                // warps, as a mask
    u32 popc = 0, all = 1, any = 0;
    u32 joined[NUMBERS], fenced[NUMBERS];
    void clear(u32 numbers) {
        expected = arrived = waiting = popc = any = 0, all = 1;
        memset(joined, 0, numbers * 4), memset(fenced, 0, numbers * 4);
    }
};

struct Cell {  // shadow of 16 bytes of shared memory, or of one element (1, 2 or 4 bytes: the smallest access in the program)
    u32 write_epoch, read_epoch, readers;
    u8 writer, flags, lane, bank;  // bank: of the readers' numbers, 32 in each
};
enum CellFlag : u8 { VALID = 1, PENDING = 2, ATOMIC = 4, MORE_READERS = 8, SPLIT = 16, OBJECT = 32 };  // OBJECT: of an mbarrier

struct Readers {  // of a cell, as a mask of numbers in a bank, in an epoch before its last; `next`: more of the cell, see shadow.h
    u32 mask, epoch, next, bank;
};

struct Sectors {  // what sectors.h knows of the sectors this worker's blocks touched
    std::vector<std::unique_ptr<u32[]>> chunks;
    u64 first = 0, count = 0, chunk = 0;  // the allocation met last: its sectors and first chunk
    u32 block = 0;
    u64 touched = 0, loaded = 0, stored = 0;  // sectors, summed over blocks
};

struct Run;
struct Async;  // async.h

struct FenceBy {  // a fence: lanes of a warp, its epoch, and up to which epoch of every other warp it is ordered after
    u32 warp, mask, epoch;
    u32 known[32];  // of the same block
};

using Fences = std::unordered_map<u32, u32>;  // block -> how many of its fences are known to have happened

struct Block;

// Blocks that start together and share a host thread, or one alone.
struct Cluster {
    std::vector<Block*> blocks;  // by rank
    u32 numbers = FEW;           // that the check of races has room for
    u32 warps = 0;               // numbers before the first agent's; a block's begin at rank * warps / blocks
    u32 epochs = 0, clocks = 0;  // clocks: warps, and what else has an epoch (clocks.h)
    const char* actors[NUMBERS] = {};   // names of the latter
    std::unordered_map<u64, u32> agents;  // by what they stand for, see async.h
    // The cluster's barrier: what arrived in this phase and in the one before.
    u64 phase = 0;
    u32 known[NUMBERS], fenced[NUMBERS], done_known[NUMBERS], done_fenced[NUMBERS];
    Fences fences, done_fences;
};

// A place for one resident block: its working set, reused by the next block in the same place, and counters.
struct Block {
    Run* run = nullptr;
    const Program* prog = nullptr;
    const Launch* launch = nullptr;
    u8* consts = nullptr;
    u8* regs = nullptr;
    u8* smem = nullptr;  // smem[address]
    u8* local = nullptr;
    Cluster* cluster = nullptr;
    u32 rank = 0;
    u32 ctaid[3] = {0, 0, 0}, linear = 0, last = 0;  // last: the warp that ran last
    bool live = false, progressed = false, spun = false;
    // Going round from barrier to barrier: Run::progress and a digest of all registers when it was complete last, how often it
    // was so with the same progress, and how often then with the same digest.
    u64 round_at = ~0ull, registers = 0;
    u32 rounds = 0, circles = 0;
    std::vector<Warp> warps;
    Barrier barriers[16];
    std::vector<u32> knowledge;  // known and fenced of all warps
    u32 uses[NUMBERS];  // epochs that it must know of before it ends: see clusters.h
    std::shared_ptr<Async> async;
    std::vector<Cell> lines, cells;  // see shadow.h
    std::vector<Readers> more_readers;
    std::vector<u32> first_of_line, first_of_cell;  // of more_readers, where a line or cell has any
    u32 free_readers = ~0u;
    u32 fences = 0;           // see order.h
    Fences known, observed;
    Count* counts = nullptr;  // of the host thread
    u64 instructions = 0, mma = 0, mma_sp = 0, async_bytes = 0, rng = 0;
    Sectors sectors;
    u64 recent[4][2] = {};  // allocations hit last: [start, end)
    u32 recent_at = 0;
    alignas(64) u8 scratch[4][LANES * 8];

    Block() = default;
    Block(const Block&) = delete;
    ~Block() { free(regs), free(smem), free(local); }

    u64 random() {
        rng ^= rng << 13, rng ^= rng >> 7, rng ^= rng << 17;
        return rng;
    }
};

struct Run {
    const Program* prog;
    Launch launch;
    std::vector<u8> params;
    std::vector<Allocation> allocations;
    u64 chunks = 0;  // of sector cells, over all allocations
    bool many = false;  // blocks
    std::vector<std::unique_ptr<Block>> places;
    std::vector<std::unique_ptr<Cluster>> clusters;  // of neighbouring places
    std::vector<std::vector<Count>> counts;  // per host thread
    std::vector<std::thread> threads;
    // Any change of memory adds to `progress` before the thread that made it looks for a deadlock. A thread none of whose warps
    // can go on until that number changes writes it here.
    std::atomic<u64> progress{0};
    std::vector<std::atomic<u64>> stuck_at;
    std::atomic<u64> next_cluster{0};
    std::atomic<bool> stop{false};
    std::mutex lock;
    std::condition_variable done;
    u32 finished = 0;
    // What order.h knows: per chunk of sectors who wrote each byte last, and what was published at which address.
    std::vector<std::atomic<std::atomic<u64>*>> written;
    std::mutex order_lock;
    std::unordered_map<u64, Fences> published;
    std::unordered_map<u32, std::vector<FenceBy>> fences;  // of each block
    bool faulted = false;
    Fault fault;
    ~Run() {
        for (auto& a : allocations) free(a.shadow);
        for (auto& c : written) free((void*)c.load());
    }
};

// Run until the warp waits, gives way, ends, or has executed `quantum` instructions.
template <bool CHECK>
void run_warp(Block& k, Warp& w, u64 quantum);
void recount(Block& k);           // a warp has ended: barriers for the whole block may be complete
void recount_cluster(Block& k);   // and the cluster's
void end_block(Block& k, bool check);  // its last warp has
void work(Run& run, u32 thread);  // a host thread's life

// Execute an instruction of Hopper's asynchronous kind. FAILED: a wait that found nothing (`found` says where), AGAIN: the warp is
// not runnable and executes it once more, POLLS: it is, for its other lanes, and does so.
enum After : u32 { NEXT, FAILED, AGAIN, POLLS };
template <bool CHECK>
After asynchronous(Block& k, Warp& w, const Ins& in, u32 m, u32 pc, u64& found);
void begin_asynchronous(Block& k);  // a block starts

[[noreturn]] void fault(const char* check, u32 pc, u32 lanes, std::string detail);
std::string format(const char* f, ...) __attribute__((format(printf, 1, 2)));
