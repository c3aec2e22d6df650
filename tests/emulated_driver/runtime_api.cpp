// The runtime API, as far as CuPy's module cupy_backends.cuda.api.runtime calls it, which is linked with this library.
#include <driver_types.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "driver.h"

#define RUNTIME(name, ...) EXPORT int name(__VA_ARGS__)

namespace {
thread_local Status last = OK;
Status kept(Status r) {
    if (r && r != NOT_READY) last = r;
    return r;
}
// Runs a call under the lock, with the Python half there; CUDA's runtime starts with its first call, too.
template <class F>
Status call(F f) {
    Locked lock;
    start();
    return kept(settings.visible ? f() : NO_DEVICE);
}

void properties(const Device& d, cudaDeviceProp* p) {
    memset(p, 0, sizeof *p);
    const Facts& f = d.facts;
    strncpy(p->name, f.name, sizeof p->name - 1);
    p->totalGlobalMem = settings.memory_bytes;
    p->sharedMemPerBlock = attribute(d, 8);
    p->regsPerBlock = p->regsPerMultiprocessor = f.regs_per_sm;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    for (int i = 0; i < 3; i++) p->maxThreadsDim[i] = attribute(d, 2 + i), p->maxGridSize[i] = attribute(d, 5 + i);
    p->totalConstMem = 65536;
    p->major = f.cc / 10, p->minor = f.cc % 10;
    p->textureAlignment = 512;
    p->multiProcessorCount = f.sms;
    p->integrated = f.integrated;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
    p->memoryBusWidth = f.memory_bus_bits;
    p->l2CacheSize = f.l2_bytes;
    p->maxThreadsPerMultiProcessor = f.threads_per_sm;
    p->maxBlocksPerMultiProcessor = f.blocks_per_sm;
    p->pciBusID = attribute(d, 33);
    p->sharedMemPerMultiprocessor = f.smem_per_sm;
    p->sharedMemPerBlockOptin = f.smem_per_block;
    p->reservedSharedMemPerBlock = 1024;
}
}  // namespace

RUNTIME(cudaGetLastError) { return std::exchange(last, OK); }
RUNTIME(cudaDriverGetVersion, int* v) { return *v = 13000, OK; }
RUNTIME(cudaRuntimeGetVersion, int* v) { return *v = 13000, OK; }

// ---- devices
RUNTIME(cudaGetDevice, int* d) { return call([&] { return *d = current().index, OK; }); }
RUNTIME(cudaSetDevice, int d) { return call([&] { return set_current(d); }); }
RUNTIME(cudaGetDeviceCount, int* n) { return *n = 0, call([&] { return *n = settings.visible, OK; }); }
RUNTIME(cudaDeviceGetAttribute, int* v, int a, int i) {
    return call([&] { Device* d = device_at(i); return d ? (*v = attribute(*d, a), OK) : INVALID_DEVICE; });
}
RUNTIME(cudaGetDeviceProperties, cudaDeviceProp* p, int i) {
    return call([&] { Device* d = device_at(i); return d ? (properties(*d, p), OK) : INVALID_DEVICE; });
}
RUNTIME(cudaDeviceGetPCIBusId, char* s, int n, int i) {
    return call([&] {
        Device* d = device_at(i);
        return d ? (snprintf(s, n, "0000:%02X:00.0", attribute(*d, 33)), OK) : INVALID_DEVICE;
    });
}
RUNTIME(cudaDeviceGetByPCIBusId, int* out, const char* id) {
    return call([&] {
        unsigned domain = 0, bus = 0;
        sscanf(id, "%x:%x", &domain, &bus);
        for (auto& d : devices)
            if (d.index < settings.visible && attribute(d, 33) == static_cast<int>(bus)) return *out = d.index, OK;
        return INVALID_DEVICE;
    });
}
RUNTIME(cudaDeviceSynchronize) {
    return call([&] {
        if (Status r = refused_on_device(current(), "device synchronize")) return r;
        return drain(current());
    });
}
RUNTIME(cudaDeviceCanAccessPeer, int* v, int, int) { return *v = 0, OK; }
RUNTIME(cudaDeviceEnablePeerAccess, int, unsigned) { return kept(PEER_UNSUPPORTED); }
RUNTIME(cudaDeviceDisablePeerAccess, int) { return kept(PEER_UNSUPPORTED); }
RUNTIME(cudaDeviceGetLimit, size_t* v, int) { return *v = 0, OK; }
RUNTIME(cudaDeviceSetLimit, int, size_t) { return OK; }
RUNTIME(cudaProfilerStart) { return OK; }
RUNTIME(cudaProfilerStop) { return OK; }

// ---- memory
RUNTIME(cudaMalloc, Address* p, size_t n) { return call([&] { return allocate(p, n); }); }
RUNTIME(cudaFree, Address p) { return call([&] { return release(p); }); }
RUNTIME(cudaHostAlloc, void** p, size_t n, unsigned) { return call([&] { return pin(p, n); }); }
RUNTIME(cudaFreeHost, void* p) { return call([&] { return unpin(p, true); }); }
RUNTIME(cudaHostRegister, void* p, size_t n, unsigned) { return call([&] { return register_host(p, n); }); }
RUNTIME(cudaHostUnregister, void* p) { return call([&] { return unpin(p, false); }); }
RUNTIME(cudaMemGetInfo, size_t* free, size_t* total) {
    return call([&] { return *total = settings.memory_bytes, *free = settings.memory_bytes - current().used, current().sticky; });
}
RUNTIME(cudaMemcpy, Address to, Address from, size_t n, int kind) {
    return call([&] { return copy(to, from, n, kind, current().legacy, false); });
}
RUNTIME(cudaMemcpyAsync, Address to, Address from, size_t n, int kind, void* s) {
    return call([&] { return copy(to, from, n, kind, find(s), true); });
}
RUNTIME(cudaMemcpyPeer, Address to, int, Address from, int, size_t n) {
    return call([&] { return copy(to, from, n, DEVICE_DEVICE, current().legacy, false); });
}
RUNTIME(cudaMemcpyPeerAsync, Address to, int, Address from, int, size_t n, void* s) {
    return call([&] { return copy(to, from, n, DEVICE_DEVICE, find(s), true); });
}
RUNTIME(cudaMemset, Address to, int v, size_t n) { return call([&] { return fill(to, v, n, current().legacy); }); }
RUNTIME(cudaMemsetAsync, Address to, int v, size_t n, void* s) { return call([&] { return fill(to, v, n, find(s)); }); }
RUNTIME(cudaPointerGetAttributes, cudaPointerAttributes* a, Address p) {
    return call([&] {
        memset(a, 0, sizeof *a);
        a->device = current().index;
        if (auto m = device_memory_at(p, 0)) {
            a->type = cudaMemoryTypeDevice;
            a->device = m->device->index;
            a->devicePointer = reinterpret_cast<void*>(p);
        } else if (pinned_at(p, 0)) {
            a->type = cudaMemoryTypeHost;
            a->hostPointer = a->devicePointer = reinterpret_cast<void*>(p);
        }
        return OK;
    });
}

// ---- streams
static Status create(void** out, unsigned flags, int priority) {
    return call([&] { return *out = new_stream(flags, priority).get(), current().sticky; });
}
RUNTIME(cudaStreamCreate, void** s) { return create(s, 0, 0); }
RUNTIME(cudaStreamCreateWithFlags, void** s, unsigned flags) { return create(s, flags, 0); }
RUNTIME(cudaStreamCreateWithPriority, void** s, unsigned flags, int priority) { return create(s, flags, priority); }
RUNTIME(cudaStreamDestroy, void* h) { return call([&] { return destroy(find(h)); }); }
RUNTIME(cudaStreamGetFlags, void* h, unsigned* flags) {
    return call([&] { auto s = find(h); return s ? (*flags = s->flags, OK) : INVALID_HANDLE; });
}
RUNTIME(cudaStreamGetPriority, void* h, int* priority) {
    return call([&] { auto s = find(h); return s ? (*priority = s->priority, OK) : INVALID_HANDLE; });
}
RUNTIME(cudaStreamSynchronize, void* h) { return call([&] { return wait(find(h), "stream synchronize"); }); }
RUNTIME(cudaStreamQuery, void* h) {
    return call([&] {
        auto s = find(h);
        if (!s) return INVALID_HANDLE;
        if (Status r = refused_in_capture(s, "stream query")) return r;
        return query(s, s->submitted);
    });
}
RUNTIME(cudaStreamWaitEvent, void* h, Event* e, unsigned) { return call([&] { return wait_event(find(h), e); }); }
RUNTIME(cudaLaunchHostFunc, void* h, void (*function)(void*), void* data) {
    return call([&] { return submit(find(h), "host function", [=](Stream&, double&) { return function(data), OK; }); });
}
RUNTIME(cudaStreamAddCallback, void* h, void (*function)(void*, int, void*), void* data, unsigned) {
    return call([&] { return submit(find(h), "stream callback", [=](Stream& s, double&) { return function(h, s.device->sticky, data), OK; }); });
}

// ---- events
RUNTIME(cudaEventCreate, Event** e) { return call([&] { return *e = new_event(0), OK; }); }
RUNTIME(cudaEventCreateWithFlags, Event** e, unsigned flags) { return call([&] { return *e = new_event(flags), OK; }); }
RUNTIME(cudaEventDestroy, Event* e) { return call([&] { return destroy(e); }); }
RUNTIME(cudaEventRecord, Event* e, void* h) { return call([&] { return record(e, find(h)); }); }
RUNTIME(cudaEventSynchronize, Event* e) { return call([&] { return synchronize(e); }); }
RUNTIME(cudaEventQuery, Event* e) { return call([&] { return query(e); }); }
RUNTIME(cudaEventElapsedTime, float* ms, Event* a, Event* b) { return call([&] { return elapsed(ms, a, b); }); }

// ---- graphs
RUNTIME(cudaStreamBeginCapture, void* h, int mode) { return call([&] { return begin_capture(find(h), mode); }); }
RUNTIME(cudaStreamEndCapture, void* h, Graph** g) { return call([&] { return end_capture(find(h), g); }); }
RUNTIME(cudaStreamIsCapturing, void* h, int* v) { return call([&] { return capture_status(find(h), v); }); }
RUNTIME(cudaGraphInstantiate, Graph** out, Graph* g, unsigned long long) { return call([&] { return *out = new Graph{g->nodes, {nullptr, 0}}, OK; }); }
RUNTIME(cudaGraphLaunch, Graph* g, void* h) { return call([&] { return replay(g, find(h)); }); }
RUNTIME(cudaGraphUpload, Graph*, void* h) { return call([&] { return find(h) ? OK : INVALID_HANDLE; }); }
RUNTIME(cudaGraphDestroy, Graph* g) { return call([&] { delete g; return OK; }); }
RUNTIME(cudaGraphExecDestroy, Graph* g) { return call([&] { delete g; return OK; }); }

// ---- what neither this project nor the CuPy that it calls needs
#define REFUSED(name) RUNTIME(name) { return kept(refuse(NOT_SUPPORTED, #name " is not emulated")); }
REFUSED(cudaCreateSurfaceObject) REFUSED(cudaCreateTextureObject) REFUSED(cudaDestroySurfaceObject)
REFUSED(cudaDestroyTextureObject) REFUSED(cudaDeviceGetDefaultMemPool) REFUSED(cudaDeviceGetMemPool)
REFUSED(cudaDeviceSetMemPool) REFUSED(cudaFreeArray) REFUSED(cudaFreeAsync) REFUSED(cudaGetChannelDesc)
REFUSED(cudaGetTextureObjectResourceDesc) REFUSED(cudaGetTextureObjectTextureDesc) REFUSED(cudaGraphDebugDotPrint)
REFUSED(cudaIpcCloseMemHandle) REFUSED(cudaIpcGetEventHandle) REFUSED(cudaIpcGetMemHandle) REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaIpcOpenMemHandle) REFUSED(cudaMalloc3DArray) REFUSED(cudaMallocArray) REFUSED(cudaMallocAsync)
REFUSED(cudaMallocFromPoolAsync) REFUSED(cudaMallocManaged) REFUSED(cudaMemAdvise) REFUSED(cudaMemPoolCreate)
REFUSED(cudaMemPoolDestroy) REFUSED(cudaMemPoolGetAttribute) REFUSED(cudaMemPoolSetAttribute) REFUSED(cudaMemPoolTrimTo)
REFUSED(cudaMemPrefetchAsync) REFUSED(cudaMemcpy2D) REFUSED(cudaMemcpy2DAsync) REFUSED(cudaMemcpy2DFromArray)
REFUSED(cudaMemcpy2DFromArrayAsync) REFUSED(cudaMemcpy2DToArray) REFUSED(cudaMemcpy2DToArrayAsync) REFUSED(cudaMemcpy3D)
REFUSED(cudaMemcpy3DAsync)
