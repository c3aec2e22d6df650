// What the parts of the emulated CUDA driver share: devices, streams, memory, functions, and the lock around all of it.
//
// Device memory is host memory and kernels run in the project's PTX emulator (kernels.py). Work waits in its stream until
// something makes the host wait for it (late), or runs as it is queued (eager). cudaError_t and CUresult have the same
// numbers for everything that is returned here, so both are a Status.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

using Status = int;
using Address = uint64_t;

constexpr Status
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, DEINITIALIZED = 4, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, NO_BINARY = 209, PEER_UNSUPPORTED = 217, FILE_NOT_FOUND = 301, INVALID_HANDLE = 400,
    NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902, CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908, UNKNOWN = 999;
constexpr Status HANGS = -1;  // of a launch: it never ends

// ---- settings and facts, filled by kernels.py (settings.py has the same structures for ctypes)
struct Settings {
    int eager, trace, faults, devices, visible, management;  // management: whether NVML answers; visible: as many, the first, are not hidden by CUDA_VISIBLE_DEVICES
    uint64_t seed, memory_bytes;      // memory_bytes: what a device has
    double noise, drift_per_s;        // relative: standard deviation of a duration; growth in a second of device time
    double tail_share, tail_factor;   // so many launches take so much longer
    double throttle_from_us, throttle_to_us, throttle_every_us, throttle_factor;  // device time at which the clock is factor x its own
};
struct Facts {
    char name[128];
    int number, cc, sms, clock_mhz, memory_clock_khz, memory_bus_bits, l2_bytes, smem_per_block, smem_per_sm, threads_per_sm,
        blocks_per_sm, regs_per_sm, integrated;  // number: as the management library counts
};
extern Settings settings;

// ---- messages on standard error
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void trace(const char* format, ...) __attribute__((format(printf, 1, 2)));
Status refuse(Status code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// ---- the lock: one for the whole driver. A thread that waits for it lets go of Python's lock, so whoever holds it may run
// Python. The same thread may take it again: garbage collection inside a kernel's launch frees device memory.
struct Locked {
    Locked();
    ~Locked();
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
};
[[noreturn]] void hang();  // lets go of the lock and never returns
bool ending();             // the interpreter ends: nothing is run any more
void start();              // imports kernels.py, once

struct Python {
    Status (*load)(int device, const char* image, uint64_t size, const char* path, uint64_t* handle);
    Status (*function)(uint64_t module, const char* name, uint64_t* handle, int* facts, int* params);
    Status (*called)(uint64_t function);  // whether the call itself is to fail
    Status (*launch)(int device, uint64_t function, const unsigned* dims, const void* params, uint64_t size, double* took);
    Status (*global)(uint64_t module, const char* name, uint64_t* address, uint64_t* size);
    Status (*encode)(const void* call, void* map);  // call: a MapCall
};
extern Python python;

// ---- devices and streams
struct Stream;
struct Capture;
using StreamPtr = std::shared_ptr<Stream>;

struct Device {
    int index;
    Facts facts;
    Status sticky = OK;  // the context is lost
    uint64_t used = 0;   // bytes allocated
    StreamPtr legacy;
    std::vector<StreamPtr> streams;  // all others with work or alive
    std::mt19937_64 random;
    double idle_from = 0;  // device time in microseconds up to which something ran
};
extern std::vector<Device> devices;
Device& current();
Device* device_at(int index);
Status set_current(int index);
int attribute(const Device& d, int number);
double lasts(Device& d, double us);  // with noise, drift, throttling and tails
double clock_mhz(const Device& d);
double spins(const Device& d, double clocks);  // microseconds that so many clocks last, throttled or not from moment to moment

struct Position { StreamPtr stream; uint64_t count; };  // the first `count` pieces of work of a stream
using Run = std::function<Status(Stream&, double& us)>;
struct Work {
    const char* what;
    Run run;
    std::vector<Position> after;  // what is over before it begins
};
struct Stream {
    Device* device;
    unsigned flags = 0;  // 1: does not wait for the legacy stream
    int priority = 0;
    bool alive = true, running = false;
    std::thread::id runner;
    std::deque<Work> queue;
    uint64_t submitted = 0, done = 0;
    double now = 0;  // microseconds of the device's clock
    std::vector<Position> waits;  // of events, for the next piece of work
    std::shared_ptr<Capture> capture;
    std::set<int> frontier;  // of the capture: the nodes that the next one depends on
};
StreamPtr find(void* handle);  // a stream of any device; null where it is none
StreamPtr new_stream(unsigned flags, int priority);
Status destroy(const StreamPtr& s);
Status submit(const StreamPtr& s, const char* what, Run run, std::vector<Position> after = {});
Status drain(Stream& s, uint64_t count);
Status drain(Device& d);
Status wait(const StreamPtr& s, const char* what);
Status query(const StreamPtr& s, uint64_t count);
bool running();  // whether this thread is inside a piece of work

// ---- events
struct Record {
    Position at;
    double us = -1;
    std::weak_ptr<Capture> capture;
    std::set<int> frontier;
    bool captured = false;
};
struct Event { unsigned flags; std::shared_ptr<Record> record; };
Event* new_event(unsigned flags);
Status destroy(Event* e);
Status record(Event* e, const StreamPtr& s);
Status wait_event(const StreamPtr& s, Event* e);
Status synchronize(Event* e);
Status query(Event* e);
Status elapsed(float* ms, Event* a, Event* b);

// ---- capture and graphs
enum { GLOBAL, THREAD_LOCAL, RELAXED };
struct Node { Work work; std::set<int> after; };
struct Graph { std::vector<Node> nodes; Position last{nullptr, 0}; };
struct Capture {
    std::unique_ptr<Graph> graph;
    StreamPtr origin;
    int mode;
    std::thread::id thread;
    Status broken = OK;
    std::vector<StreamPtr> members;
};
Status begin_capture(const StreamPtr& s, int mode);
Status end_capture(const StreamPtr& s, Graph** out);
Status capture_status(const StreamPtr& s, int* out);
void captured(const StreamPtr& s, const char* what, Run run);  // adds a node
Status join(const StreamPtr& s, const Record& r);              // s waits for an event recorded in a capture
Status replay(Graph* g, const StreamPtr& s);
Status refused_in_capture(const StreamPtr& s, const char* what);  // waits of the host, and the legacy stream
Status refused_on_device(Device& d, const char* what);            // waits for the whole device
Status refused_unsafe(const char* what);                          // allocation: by the modes of the captures under way

// ---- memory
enum { HOST_HOST, HOST_DEVICE, DEVICE_HOST, DEVICE_DEVICE, ANY };
struct Allocation { uint64_t size; char* room; Device* device; };
extern std::map<Address, Allocation> device_memory;
const Allocation* device_memory_at(Address a, uint64_t n);
bool pinned_at(Address a, uint64_t n);
Status allocate(Address* out, uint64_t n);
Status release(Address a);
void release_deferred();  // what was freed while a kernel ran
Status pin(void** out, uint64_t n);
Status unpin(void* p, bool ours);
Status register_host(void* p, uint64_t n);
Status copy(Address to, Address from, uint64_t n, int kind, const StreamPtr& s, bool async);
Status fill(Address to, int value, uint64_t n, const StreamPtr& s);

// ---- modules and launches
struct Module { uint64_t handle; int device; };
struct Function {
    uint64_t handle;
    int device, static_smem, regs, max_threads, threads_by_regs, dynamic_smem = 0, carveout = -1;  // percent; -1: the driver's choice
    std::vector<std::pair<int, int>> params;  // offset, bytes
};
struct Shape { unsigned grid[3], block[3], smem; };
Status load_module(Module** out, const char* image, uint64_t size, const char* path);
Status get_function(Function** out, const Module& m, const char* name);
Status set_dynamic_smem(Function& f, int bytes);
Status set_carveout(Function& f, int percent);
Status launch(Function* f, const Shape& shape, const StreamPtr& s, void** args, void** extra, const char* what);
