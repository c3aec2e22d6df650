// The management library, as far as pynvml is asked by this project: clocks and power follow the device's virtual clock.
#include <cstdio>
#include <cstring>

#include "driver.h"

#define NVML(name, ...) EXPORT int name(__VA_ARGS__)

namespace {
enum { NVML_SUCCESS = 0, NVML_INVALID_ARGUMENT = 2, NVML_NOT_FOUND = 6, NVML_LIBRARY_NOT_FOUND = 12 };
struct MemoryInfo { unsigned long long total, free, used; };

template <class F>
int with(void* handle, F f) {
    Locked lock;
    start();
    for (auto& d : devices)
        if (&d == handle) return f(d), NVML_SUCCESS;
    return NVML_INVALID_ARGUMENT;
}
// This library knows nothing of CUDA_VISIBLE_DEVICES.
int by_number(int number, void** out) {
    Locked lock;
    start();
    for (auto& d : devices)
        if (d.facts.number == number) return *out = &d, NVML_SUCCESS;
    return NVML_INVALID_ARGUMENT;
}
}  // namespace

// On a Jetson the library is missing, which pynvml reports by the same number.
static int init() {
    Locked lock;
    start();
    return settings.management ? NVML_SUCCESS : NVML_LIBRARY_NOT_FOUND;
}
NVML(nvmlInitWithFlags, unsigned) { return init(); }
NVML(nvmlInit_v2) { return init(); }
NVML(nvmlShutdown) { return NVML_SUCCESS; }
EXPORT const char* nvmlErrorString(int code) { return code ? "Invalid Argument" : "Success"; }
NVML(nvmlSystemGetDriverVersion, char* s, unsigned n) { return snprintf(s, n, "580.00.emulated"), NVML_SUCCESS; }
NVML(nvmlSystemGetCudaDriverVersion_v2, int* v) { return *v = 13000, NVML_SUCCESS; }
NVML(nvmlDeviceGetCount_v2, unsigned* n) {
    Locked lock;
    start();
    return *n = static_cast<unsigned>(devices.size()), NVML_SUCCESS;
}
NVML(nvmlDeviceGetHandleByIndex_v2, unsigned i, void** out) { return by_number(static_cast<int>(i), out); }
NVML(nvmlDeviceGetHandleByPciBusId_v2, const char* id, void** out) {
    Locked lock;
    start();
    unsigned domain = 0, bus = 0;
    sscanf(id, "%x:%x", &domain, &bus);
    for (auto& d : devices)
        if (attribute(d, 33) == static_cast<int>(bus)) return by_number(d.facts.number, out);
    return NVML_NOT_FOUND;
}
NVML(nvmlDeviceGetName, void* h, char* s, unsigned n) { return with(h, [&](Device& d) { snprintf(s, n, "%s", d.facts.name); }); }
NVML(nvmlDeviceGetClockInfo, void* h, int, unsigned* v) { return with(h, [&](Device& d) { *v = static_cast<unsigned>(clock_mhz(d)); }); }
NVML(nvmlDeviceGetMaxClockInfo, void* h, int, unsigned* v) { return with(h, [&](Device& d) { *v = d.facts.clock_mhz; }); }
NVML(nvmlDeviceGetPowerUsage, void* h, unsigned* mw) {
    return with(h, [&](Device& d) { *mw = clock_mhz(d) < d.facts.clock_mhz ? 700000 : 350000; });
}
NVML(nvmlDeviceGetEnforcedPowerLimit, void* h, unsigned* mw) { return with(h, [&](Device&) { *mw = 700000; }); }
NVML(nvmlDeviceGetTemperature, void* h, int, unsigned* v) { return with(h, [&](Device&) { *v = 45; }); }
NVML(nvmlDeviceGetCurrentClocksThrottleReasons, void* h, unsigned long long* v) {
    return with(h, [&](Device& d) { *v = clock_mhz(d) < d.facts.clock_mhz ? 4 : 0; });  // the software power cap
}
NVML(nvmlDeviceGetMemoryInfo, void* h, MemoryInfo* m) {
    return with(h, [&](Device& d) { *m = {settings.memory_bytes, settings.memory_bytes - d.used, d.used}; });
}
