// Modules, functions and launches: what the driver refuses before a kernel runs.
#include "driver.h"

#include <algorithm>
#include <cstring>

Status load_module(Module** out, const char* image, uint64_t size, const char* path) {
    Device& d = current();
    if (d.sticky) return d.sticky;
    if (!python.load) return UNKNOWN;
    uint64_t handle = 0;
    if (Status r = python.load(d.index, image, size, path, &handle)) return r;
    *out = new Module{handle, d.index};
    return OK;
}

Status get_function(Function** out, const Module& m, const char* name) {
    int facts[3], params[1 + 2 * 256];  // facts: static shared memory, registers, threads per block (0: any)
    uint64_t handle = 0;
    if (Status r = python.function(m.handle, name, &handle, facts, params)) return r;
    // Registers are given out by the warp, in units of 256.
    int warps = devices[m.device].facts.regs_per_sm / ((facts[1] + 7) / 8 * 256);
    auto f = new Function{handle, m.device, facts[0], facts[1], facts[2] ? facts[2] : 1024, std::min(1024, 32 * warps), 0, -1, {}};
    for (int i = 0; i < params[0]; i++) f->params.push_back({params[1 + 2 * i], params[2 + 2 * i]});
    *out = f;
    return OK;
}

static int smem_allowed(const Function& f) { return std::max(49152 - f.static_smem, f.dynamic_smem); }

Status set_dynamic_smem(Function& f, int bytes) {
    int most = devices[f.device].facts.smem_per_block;
    if (bytes < 0 || bytes + f.static_smem > most)
        return refuse(INVALID_VALUE, "%d bytes of dynamic shared memory beside %d static ones: the device has %d", bytes, f.static_smem, most);
    f.dynamic_smem = bytes;
    return OK;
}

Status set_carveout(Function& f, int percent) {
    if (percent < -1 || percent > 100) return refuse(INVALID_VALUE, "%d %% of L1 as shared memory: expected -1 to 100", percent);
    f.carveout = percent;
    return OK;
}

static Status check(const Function& f, const Shape& shape, const Stream& s, const char* what) {
    const unsigned *g = shape.grid, *b = shape.block;
    uint64_t threads = static_cast<uint64_t>(b[0]) * b[1] * b[2];
    bool fits = threads > 0 && threads <= 1024 && b[2] <= 64 && g[0] && g[1] && g[2] && g[0] <= 2147483647u && g[1] <= 65535 && g[2] <= 65535;
    if (!fits || threads > static_cast<uint64_t>(f.max_threads))
        return refuse(INVALID_VALUE, "%s: grid (%u,%u,%u), block (%u,%u,%u)", what, g[0], g[1], g[2], b[0], b[1], b[2]);
    if (s.device->index != f.device) return refuse(INVALID_HANDLE, "%s: the function and the stream are of two devices", what);
    if (&current() != s.device) return refuse(INVALID_HANDLE, "%s: the stream is not the current device's", what);
    if (static_cast<int64_t>(shape.smem) > smem_allowed(f))
        return refuse(INVALID_VALUE, "%s: %u bytes of dynamic shared memory, at most %d are allowed for this function", what, shape.smem, smem_allowed(f));
    if (threads > static_cast<uint64_t>(f.threads_by_regs))
        return refuse(OUT_OF_RESOURCES, "%s: %d registers for each of %llu threads, an SM has %d", what, f.regs, static_cast<unsigned long long>(threads), s.device->facts.regs_per_sm);
    return OK;
}

Status launch(Function* f, const Shape& shape, const StreamPtr& s, void** args, void** extra, const char* what) {
    if (!f || (!args && !f->params.empty()) || extra) return refuse(INVALID_VALUE, "%s: no function or no arguments", what);
    if (!s) return refuse(INVALID_HANDLE, "%s: no such stream", what);
    if (s->device->sticky) return s->device->sticky;
    if (Status r = check(*f, shape, *s, what)) return r;
    if (settings.faults)
        if (Status r = python.called(f->handle)) return refuse(r, "%s: asked for by the settings", what);
    uint64_t size = 0;
    for (auto& [offset, bytes] : f->params) size = std::max<uint64_t>(size, offset + bytes);
    auto params = std::make_shared<std::vector<char>>(size);
    for (size_t i = 0; i < f->params.size(); i++) memcpy(params->data() + f->params[i].first, args[i], f->params[i].second);
    std::vector<unsigned> dims(shape.grid, shape.grid + 3);
    dims.insert(dims.end(), shape.block, shape.block + 3);
    dims.push_back(shape.smem);
    uint64_t handle = f->handle;
    return submit(s, what, [=](Stream& on, double& us) {
        double took[2] = {0, 0};  // microseconds, and SM clocks that it spins beside: they measure the clock, so without noise
        Status r = python.launch(on.device->index, handle, dims.data(), params->data(), params->size(), took);
        us = lasts(*on.device, took[0]) + spins(*on.device, took[1]);
        return r;
    });
}
