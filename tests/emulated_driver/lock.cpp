// The driver's lock beside Python's, the start of the Python half, and messages.
#include "driver.h"

#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

Settings settings{};
Python python{};

namespace {
std::mutex mutex_;
std::atomic<std::thread::id> owner{};
int depth = 0;
std::atomic<bool> stopped{false};

// The interpreter that this library is loaded into, by name: the library itself is linked with none.
template <class F>
F interpreter(const char* name) { return reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name)); }
auto holds_gil = interpreter<int (*)()>("PyGILState_Check");
auto let_go = interpreter<void* (*)()>("PyEval_SaveThread");
auto take_back = interpreter<void (*)(void*)>("PyEval_RestoreThread");

void print(const char* head, const char* format, va_list args) {
    char text[2048];
    vsnprintf(text, sizeof text, format, args);
    fprintf(stderr, "[emulated driver] %s%s\n", head, text);
}
}  // namespace

Locked::Locked() {
    if (owner == std::this_thread::get_id()) {
        depth++;
        return;
    }
    if (!mutex_.try_lock()) {
        bool python_thread = !stopped && holds_gil && holds_gil();
        void* state = python_thread ? let_go() : nullptr;
        mutex_.lock();
        owner = std::this_thread::get_id();
        depth = 1;
        if (python_thread) take_back(state);  // nobody who has Python's lock waits for this one
        return;
    }
    owner = std::this_thread::get_id();
    depth = 1;
}

Locked::~Locked() {
    if (--depth) return;
    owner = std::thread::id();
    mutex_.unlock();
}

void hang() {
    if (holds_gil && holds_gil()) let_go();
    depth = 0;
    owner = std::thread::id();
    mutex_.unlock();
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
}

bool ending() { return stopped; }

void say(const char* format, ...) {
    va_list args;
    va_start(args, format);
    print("", format, args);
    va_end(args);
}

void trace(const char* format, ...) {
    if (!settings.trace) return;
    va_list args;
    va_start(args, format);
    print("", format, args);
    va_end(args);
}

Status refuse(Status code, const char* format, ...) {
    char head[32];
    snprintf(head, sizeof head, "refused (%d): ", code);
    va_list args;
    va_start(args, format);
    print(head, format, args);
    va_end(args);
    return code;
}

void start() {
    static bool begun = false;
    if (begun) return;
    begun = true;
    auto ensure = interpreter<int (*)()>("PyGILState_Ensure");
    auto release = interpreter<void (*)(int)>("PyGILState_Release");
    auto run = interpreter<int (*)(const char*)>("PyRun_SimpleString");
    const char* root = getenv("EMULATED_DRIVER_ROOT");
    Dl_info info;
    if (!ensure || !run || !root || !dladdr(reinterpret_cast<void*>(start), &info)) {
        say("no Python in this process, or EMULATED_DRIVER_ROOT is not set: there is no device");
        return;
    }
    std::string code = std::string("import sys\nsys.path.append(r'''") + root + "''')\n"
        "import tests.emulated_driver.kernels as _half\n_half.register(r'''" + info.dli_fname + "''')\n"
        "sys.path.pop()\ndel _half\n";
    int state = ensure();
    if (run(code.c_str())) say("the Python half, tests/emulated_driver/kernels.py, did not load: there is no device");
    release(state);
}

// ---- called by kernels.py
EXPORT void emulated_driver_register(const Settings* s, const Facts* facts, const Python* functions) {
    settings = *s;
    python = *functions;
    devices.resize(s->devices);
    for (int i = 0; i < s->devices; i++) {
        Device& d = devices[i];
        d.index = i;
        d.facts = facts[i];
        d.random.seed(s->seed * 1000003 + i);
        d.legacy = std::make_shared<Stream>();
        d.legacy->device = &d;
    }
}

EXPORT void emulated_driver_stop() { stopped = true; }

// (address, bytes, 0) of all that a kernel on this device may touch, by address; returns how many there are.
EXPORT uint64_t emulated_driver_allocations(int device, uint64_t* out, uint64_t room) {
    uint64_t n = 0;
    for (auto& [address, a] : device_memory) {
        if (a.device && a.device->index != device) continue;
        if (n < room) out[3 * n] = address, out[3 * n + 1] = a.size, out[3 * n + 2] = 0;
        n++;
    }
    return n;
}
