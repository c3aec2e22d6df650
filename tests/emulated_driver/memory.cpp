// Device memory, pinned host memory, and copies, which the host waits for exactly where CUDA's documentation says that it does
// (CUDA Runtime API, "API synchronization behavior").
//
// Fresh and freed memory hold values that are NaN in FP16, so what reads them without right shows. Guard bytes lie around
// each allocation; kernels cannot reach them, the emulator sees to that, but host code can.
#include "driver.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

std::map<Address, Allocation> device_memory;

namespace {
constexpr uint64_t GUARD = 4096, MOST_POISONED = 512ull << 20, MOST_RETIRED = 256ull << 20;
constexpr int FRESH = 0x7E, FREED = 0xFE, GUARDED = 0xCB;
constexpr double PCIE_BYTES_PER_US = 50e3, COPY_US = 1.0;
struct Host { uint64_t size; bool ours; };
std::map<Address, Host> pinned;
std::deque<Allocation> retired;  // freed ones, kept for a while: what still reads them finds poison
uint64_t retired_bytes = 0;
std::vector<Address> deferred;

template <class Map>
typename Map::const_iterator at(const Map& map, Address a, uint64_t n) {
    auto i = map.upper_bound(a);
    if (i == map.begin()) return map.end();
    --i;
    bool inside = a < i->first + std::max<uint64_t>(i->second.size, 1) && n <= i->first + i->second.size - a;
    return inside ? i : map.end();
}

void poison(void* p, int value, uint64_t n) { memset(p, value, std::min(n, MOST_POISONED)); }

bool guards_whole(Address a, const Allocation& m) {
    auto intact = [](const char* p) { return std::all_of(p, p + GUARD, [](char c) { return c == static_cast<char>(GUARDED); }); };
    return intact(m.room) && intact(reinterpret_cast<char*>(a) + m.size);
}

Status take_away(Address a) {
    auto i = device_memory.find(a);
    if (i == device_memory.end()) return INVALID_VALUE;
    Allocation m = i->second;
    Device& d = *m.device;
    d.used -= m.size;
    device_memory.erase(i);
    Status status = OK;
    if (!guards_whole(a, m)) {
        d.sticky = status = ILLEGAL_ADDRESS;
        refuse(status, "bytes beside the allocation of %llu bytes at 0x%llx were overwritten by the host",
               static_cast<unsigned long long>(m.size), static_cast<unsigned long long>(a));
    }
    poison(reinterpret_cast<void*>(a), FREED, m.size);
    retired.push_back(m);
    for (retired_bytes += m.size; retired_bytes > MOST_RETIRED && !retired.empty(); retired.pop_front()) {
        retired_bytes -= retired.front().size;
        free(retired.front().room);
    }
    return status;
}
}  // namespace

const Allocation* device_memory_at(Address a, uint64_t n) {
    auto i = at(device_memory, a, n);
    return i == device_memory.end() ? nullptr : &i->second;
}
bool pinned_at(Address a, uint64_t n) { return at(pinned, a, n) != pinned.end(); }

Status allocate(Address* out, uint64_t n) {
    Device& d = current();
    if (d.sticky) return d.sticky;
    if (Status r = refused_unsafe("allocation")) return r;
    *out = 0;
    if (!n) return OK;
    if (n > settings.memory_bytes || d.used + n > settings.memory_bytes) return OUT_OF_MEMORY;
    uint64_t room = (n + 2 * GUARD + 511) / 512 * 512;
    auto p = static_cast<char*>(aligned_alloc(512, room));
    if (!p) return OUT_OF_MEMORY;
    memset(p, GUARDED, GUARD);
    poison(p + GUARD, FRESH, n);
    memset(p + GUARD + n, GUARDED, room - GUARD - n);
    *out = reinterpret_cast<Address>(p) + GUARD;
    device_memory[*out] = {n, p, &d};
    d.used += n;
    return OK;
}

Status release(Address a) {
    if (!a) return OK;
    auto i = device_memory.find(a);
    if (i == device_memory.end()) return refuse(INVALID_VALUE, "free of 0x%llx, which is no allocation", static_cast<unsigned long long>(a));
    if (Status r = refused_unsafe("free")) return r;
    Device& d = *i->second.device;
    if (running()) {  // Python collected garbage while a kernel of this thread runs
        deferred.push_back(a);
        return OK;
    }
    Status sticky = drain(d);  // cudaFree waits for the device
    Status own = take_away(a);
    return sticky ? sticky : own;
}

void release_deferred() {
    auto list = std::move(deferred);
    deferred.clear();
    for (Address a : list) release(a);
}

Status pin(void** out, uint64_t n) {
    if (Status r = refused_unsafe("allocation of pinned memory")) return r;
    *out = n ? aligned_alloc(4096, (n + 4095) / 4096 * 4096) : nullptr;
    if (n && !*out) return OUT_OF_MEMORY;
    if (n) {
        poison(*out, FRESH, n);
        pinned[reinterpret_cast<Address>(*out)] = {n, true};
    }
    return OK;
}

Status register_host(void* p, uint64_t n) {
    if (!p || !n) return INVALID_VALUE;
    if (pinned_at(reinterpret_cast<Address>(p), 1)) return 712;  // already registered
    pinned[reinterpret_cast<Address>(p)] = {n, false};
    return OK;
}

Status unpin(void* p, bool ours) {
    if (!p) return OK;
    auto i = pinned.find(reinterpret_cast<Address>(p));
    if (i == pinned.end() || i->second.ours != ours) return refuse(ours ? INVALID_VALUE : 713, "%p is no pinned memory", p);
    if (Status r = refused_unsafe("free of pinned memory")) return r;
    Status sticky = OK;
    for (auto& d : devices)
        if (Status r = drain(d)) sticky = r;
    if (ours) {
        poison(p, FREED, i->second.size);
        free(p);
    }
    pinned.erase(i);
    return sticky;
}

// Whether an address range of a copy is where its kind says; 0 bytes are copied anywhere.
static bool agrees(bool on_device, bool says_device) { return on_device == says_device; }

Status copy(Address to, Address from, uint64_t n, int kind, const StreamPtr& s, bool async) {
    if (!s) return refuse(INVALID_HANDLE, "copy: no such stream");
    if (!n) return s->device->sticky;
    bool to_device = device_memory_at(to, n), from_device = device_memory_at(from, n);
    if (kind == ANY) kind = to_device ? (from_device ? DEVICE_DEVICE : HOST_DEVICE) : (from_device ? DEVICE_HOST : HOST_HOST);
    bool says_to = kind == HOST_DEVICE || kind == DEVICE_DEVICE, says_from = kind == DEVICE_HOST || kind == DEVICE_DEVICE;
    if (kind < 0 || kind > ANY || !agrees(to_device, says_to) || !agrees(from_device, says_from))
        return refuse(INVALID_VALUE, "copy of %llu bytes 0x%llx -> 0x%llx of kind %d: destination is %sdevice memory, source is %s",
                      static_cast<unsigned long long>(n), static_cast<unsigned long long>(from),
                      static_cast<unsigned long long>(to), kind, to_device ? "" : "no ", from_device ? "" : "none");
    const char* name = kind == HOST_DEVICE ? "copy to device" : kind == DEVICE_HOST ? "copy to host" : kind == HOST_HOST ? "copy on host" : "copy on device";
    bool in_pinned = (says_to || pinned_at(to, n)) && (says_from || pinned_at(from, n));
    double us = COPY_US + static_cast<double>(n) / PCIE_BYTES_PER_US * (kind == DEVICE_DEVICE ? 0.05 : 1);
    auto run = [=](Stream& on, double& t) { return t = lasts(*on.device, us), memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), n), OK; };
    if (s->capture && async) return submit(s, name, run);
    if (!async)
        if (Status r = refused_unsafe("synchronous copy")) return r;
    if (kind == HOST_DEVICE && !in_pinned) {
        // Staged before the call returns, which waits for the stream if it is synchronous; not for the bytes to arrive.
        if (!async)
            if (Status r = wait(s, name)) return r;
        auto source = reinterpret_cast<const char*>(from);
        auto staged = std::make_shared<std::vector<char>>(source, source + n);
        return submit(s, name, [=](Stream& on, double& t) { return t = lasts(*on.device, us), memcpy(reinterpret_cast<void*>(to), staged->data(), n), OK; });
    }
    if (Status r = submit(s, name, run)) return r;
    if (kind == DEVICE_DEVICE || (async && in_pinned)) return OK;  // the host does not wait
    return drain(*s, s->submitted);
}

Status fill(Address to, int value, uint64_t n, const StreamPtr& s) {
    if (!s) return refuse(INVALID_HANDLE, "memset: no such stream");
    if (!n) return s->device->sticky;
    if (!device_memory_at(to, n) && !pinned_at(to, n))
        return refuse(INVALID_VALUE, "memset of %llu bytes at 0x%llx, which is no device memory", static_cast<unsigned long long>(n), static_cast<unsigned long long>(to));
    return submit(s, "memset", [=](Stream& on, double& t) { return t = lasts(*on.device, COPY_US), memset(reinterpret_cast<void*>(to), value, n), OK; });
}
