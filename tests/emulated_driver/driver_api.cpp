// The driver API, as far as CuPy, cuda-bindings and NVRTC call it.
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "../map_calls.h"
#include "driver.h"
#undef cuDevicePrimaryCtxRelease
#undef cuCtxCreate
#undef cuCtxDestroy
#undef cuGetProcAddress

#define DRIVER(name, ...) EXPORT CUresult name(__VA_ARGS__)

namespace {
CUresult result(Status r) { return static_cast<CUresult>(r); }

// The primary context of a device is known by the address of its token.
char tokens[64];
CUcontext context_of(const Device& d) { return reinterpret_cast<CUcontext>(tokens + d.index); }

CUresult load_file(CUmodule* m, const char* path) {
    FILE* file = fopen(path, "rb");
    if (!file) return result(refuse(FILE_NOT_FOUND, "no file %s", path));
    std::string data;
    char part[65536];
    for (size_t n; (n = fread(part, 1, sizeof part, file)) > 0;) data.append(part, n);
    fclose(file);
    return result(load_module(reinterpret_cast<Module**>(m), data.data(), data.size(), path));
}

// An ELF image ends with its section or its program headers, whichever come last.
uint64_t image_bytes(const char* image) {
    if (memcmp(image, "\x7f" "ELF", 4)) return strlen(image);
    auto number = [&](int at, int n) { uint64_t v = 0; return memcpy(&v, image + at, n), v; };
    return std::max(number(0x28, 8) + number(0x3a, 2) * number(0x3c, 2), number(0x20, 8) + number(0x36, 2) * number(0x38, 2));
}
}  // namespace

DRIVER(cuInit, unsigned) {
    Locked lock;
    start();
    return !settings.visible ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
// NVRTC asks for undocumented tables, and does without where there are none.
DRIVER(cuGetExportTable, const void** table, const CUuuid*) { return *table = nullptr, CUDA_ERROR_NOT_FOUND; }
DRIVER(cuDriverGetVersion, int* v) { return *v = 13000, CUDA_SUCCESS; }
// ---- devices and contexts
DRIVER(cuDeviceGetCount, int* n) {
    Locked lock;
    start();
    return *n = settings.visible, CUDA_SUCCESS;
}
DRIVER(cuDeviceGet, CUdevice* d, int i) {
    Locked lock;
    return *d = i, device_at(i) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER(cuDeviceGetAttribute, int* v, CUdevice_attribute a, CUdevice i) {
    Locked lock;
    Device* d = device_at(i);
    if (!d) return CUDA_ERROR_INVALID_DEVICE;
    return *v = attribute(*d, a), CUDA_SUCCESS;
}
DRIVER(cuDeviceGetName, char* s, int n, CUdevice i) {
    Locked lock;
    Device* d = device_at(i);
    if (!d) return CUDA_ERROR_INVALID_DEVICE;
    return snprintf(s, n, "%s", d->facts.name), CUDA_SUCCESS;
}
DRIVER(cuDevicePrimaryCtxRetain, CUcontext* c, CUdevice i) {
    Locked lock;
    Device* d = device_at(i);
    if (!d) return CUDA_ERROR_INVALID_DEVICE;
    return *c = context_of(*d), CUDA_SUCCESS;
}
DRIVER(cuDevicePrimaryCtxRelease_v2, CUdevice) { return CUDA_SUCCESS; }
DRIVER(cuCtxGetCurrent, CUcontext* c) {
    Locked lock;
    return *c = context_of(current()), CUDA_SUCCESS;
}
DRIVER(cuCtxSetCurrent, CUcontext c) {
    Locked lock;
    if (!c) return CUDA_SUCCESS;
    return set_current(static_cast<int>(reinterpret_cast<char*>(c) - tokens)) ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
DRIVER(cuCtxCreate_v2, CUcontext* c, unsigned, CUdevice i) { return cuDevicePrimaryCtxRetain(c, i); }
DRIVER(cuCtxDestroy_v2, CUcontext) { return CUDA_SUCCESS; }
DRIVER(cuCtxGetDevice, CUdevice* d) {
    Locked lock;
    return *d = current().index, CUDA_SUCCESS;
}
DRIVER(cuStreamGetCtx, CUstream h, CUcontext* c) {
    Locked lock;
    StreamPtr s = find(h);
    if (!s) return CUDA_ERROR_INVALID_HANDLE;
    return *c = context_of(*s->device), CUDA_SUCCESS;
}

// ---- modules and functions
DRIVER(cuLinkCreate_v2, unsigned, CUjit_option*, void**, CUlinkState*) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER(cuLinkAddData_v2, CUlinkState, CUjitInputType, void*, size_t, const char*, unsigned, CUjit_option*, void**) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER(cuLinkAddFile_v2, CUlinkState, CUjitInputType, const char*, unsigned, CUjit_option*, void**) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER(cuLinkComplete, CUlinkState, void**, size_t*) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER(cuLinkDestroy, CUlinkState) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER(cuModuleLoadData, CUmodule* m, const void* image) {
    Locked lock;
    start();
    auto data = static_cast<const char*>(image);
    return result(load_module(reinterpret_cast<Module**>(m), data, image_bytes(data), ""));
}
DRIVER(cuModuleLoad, CUmodule* m, const char* path) {
    Locked lock;
    start();
    return load_file(m, path);
}
DRIVER(cuModuleUnload, CUmodule m) {
    Locked lock;
    delete reinterpret_cast<Module*>(m);
    return CUDA_SUCCESS;
}
DRIVER(cuModuleGetFunction, CUfunction* f, CUmodule m, const char* name) {
    Locked lock;
    return result(get_function(reinterpret_cast<Function**>(f), *reinterpret_cast<Module*>(m), name));
}
DRIVER(cuModuleGetGlobal_v2, CUdeviceptr* p, size_t* n, CUmodule m, const char* name) {
    Locked lock;
    uint64_t address = 0, size = 0;
    Status r = python.global(reinterpret_cast<Module*>(m)->handle, name, &address, &size);
    if (p) *p = address;
    if (n) *n = size;
    return result(r);
}
DRIVER(cuFuncGetParamInfo, CUfunction h, size_t index, size_t* offset, size_t* size) {
    Locked lock;
    auto& params = reinterpret_cast<Function*>(h)->params;
    if (index >= params.size()) return CUDA_ERROR_INVALID_VALUE;
    *offset = params[index].first;
    if (size) *size = params[index].second;
    return CUDA_SUCCESS;
}
DRIVER(cuFuncGetAttribute, int* v, CUfunction_attribute a, CUfunction h) {
    Locked lock;
    auto f = reinterpret_cast<Function*>(h);
    switch (a) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *v = std::min(f->max_threads, f->threads_by_regs); break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *v = f->static_smem; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *v = f->regs; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *v = f->dynamic_smem; break;
        case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: *v = f->carveout; break;
        default: *v = 0;
    }
    return CUDA_SUCCESS;
}
DRIVER(cuFuncSetAttribute, CUfunction h, CUfunction_attribute a, int v) {
    Locked lock;
    auto& f = *reinterpret_cast<Function*>(h);
    if (a == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return result(set_carveout(f, v));
    if (a != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return result(refuse(NOT_SUPPORTED, "function attribute %d", a));
    return result(set_dynamic_smem(f, v));
}
DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* n, CUfunction h, int threads, size_t smem) {
    Locked lock;
    auto f = reinterpret_cast<Function*>(h);
    const Facts& d = devices[f->device].facts;
    int by_regs = d.regs_per_sm / std::max(1, (f->regs + 7) / 8 * 8 * threads);
    int by_smem = d.smem_per_sm / static_cast<int>(smem + f->static_smem + 1024);
    *n = std::min({d.blocks_per_sm, d.threads_per_sm / std::max(1, threads), by_regs, by_smem});
    return CUDA_SUCCESS;
}
DRIVER(cuOccupancyMaxPotentialBlockSize, int* grid, int* block, CUfunction h, CUoccupancyB2DSize, size_t, int) {
    Locked lock;
    auto f = reinterpret_cast<Function*>(h);
    *block = std::min({256, f->max_threads, f->threads_by_regs});
    *grid = devices[f->device].facts.sms;
    return CUDA_SUCCESS;
}

// ---- launches
DRIVER(cuLaunchKernel, CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned smem,
       CUstream s, void** args, void** extra) {
    Locked lock;
    return result(launch(reinterpret_cast<Function*>(f), {{gx, gy, gz}, {bx, by, bz}, smem}, find(s), args, extra, "kernel"));
}
DRIVER(cuLaunchCooperativeKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void**) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
DRIVER(cuLaunchKernelEx, const CUlaunchConfig* c, CUfunction f, void** args, void** extra) {
    Locked lock;
    StreamPtr s = find(c->hStream);
    for (unsigned i = 0; i < c->numAttrs; i++) {
        auto& a = c->attrs[i];
        if (a.id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) return result(refuse(NOT_SUPPORTED, "launch attribute %d", a.id));
        if (s && s->device->facts.cc < 90) return result(refuse(NOT_SUPPORTED, "programmatic dependent launch below sm_90"));
    }
    Shape shape{{c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ}, c->sharedMemBytes};
    return result(launch(reinterpret_cast<Function*>(f), shape, s, args, extra, "dependent kernel"));
}

// ---- tensor maps
CUresult encode_map(const MapCall& call, CUtensorMap* out) {
    Locked lock;
    start();
    if (reinterpret_cast<uint64_t>(out) % 64) return result(refuse(INVALID_VALUE, "tensor map at %p: expected a multiple of 64", out));
    if (current().facts.cc < 90) return result(refuse(NOT_SUPPORTED, "tensor maps below sm_90"));
    return result(python.encode(&call, out));
}

// cuda-bindings asks for every function by its name without a version.
DRIVER(cuGetProcAddress_v2, const char* name, void** p, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
    static void* self = [] {
        Dl_info info;
        dladdr(reinterpret_cast<void*>(cuInit), &info);
        return dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_NOW);
    }();
    std::string plain(name);
    *p = plain.empty() ? nullptr : dlsym(self, (plain + "_v2").c_str());
    if (!*p && !plain.empty()) *p = dlsym(self, name);
    if (status) *status = *p ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *p ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
