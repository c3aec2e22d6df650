// Stands for NVIDIA's libcudart under programs compiled with `nvcc -cudart none`: as much as CUTLASS's examples, CUB and others call. Device memory is
// host memory; what concerns the device goes to Python (cuda_programs.py), which runs launches in the emulator. Everything is synchronous.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "../map_calls.h"

namespace {
struct Hooks {  // cuda_programs.py mirrors it
    uint64_t (*allocate)(uint64_t bytes);
    void (*release)(uint64_t address);
    void (*image)(const void* fat_binary);
    void (*kernel)(const void* host, const char* name);
    int (*launch)(const void* host, const uint32_t* sizes, void** arguments, uint64_t shared, int dependent);  // of grid, block, cluster
    int capability;  // 10 x major + minor
    int (*encode)(const MapCall* call, void* out);
} hooks;

struct Configuration {
    dim3 grid, block;
    size_t shared;
    void* stream;
};
std::vector<Configuration> pushed;
cudaError_t last = cudaSuccess;

cudaError_t kept(cudaError_t e) {
    if (e) last = e;
    return e;
}
constexpr int SMS = 4;
}  // namespace

CUresult encode_map(const MapCall& call, CUtensorMap* out) { return hooks.encode(&call, out) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }

extern "C" {
void set_hooks(const Hooks* given) { hooks = *given; }

// ---- what nvcc's generated code calls
void** __cudaRegisterFatBinary(void* wrapper) {  // magic, version, then the fat binary's address
    void** data;
    memcpy(&data, (char*)wrapper + 8, sizeof data);
    hooks.image(data);
    return data;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
    hooks.kernel(host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
    pushed.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    const Configuration c = pushed.back();
    pushed.pop_back();
    *grid = c.grid, *block = c.block, *shared = c.shared;
    memcpy(stream, &c.stream, sizeof c.stream);
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) { return memcpy(kernel, &host, sizeof host), cudaSuccess; }
static cudaError_t start(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, bool dependent, dim3 cluster = {0, 0, 0}) {
    const uint32_t sizes[9] = {grid.x, grid.y, grid.z, block.x, block.y, block.z, cluster.x, cluster.y, cluster.z};
    return kept(hooks.launch(host, sizes, arguments, shared, dependent) ? cudaErrorLaunchFailure : cudaSuccess);
}
cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
    return start(host, grid, block, arguments, shared, false);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* host, void** arguments) {
    bool dependent = false;
    dim3 cluster(0, 0, 0);  // as the kernel declares
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const cudaLaunchAttribute& a = c->attrs[i];
        const auto& blocks = a.val.clusterDim;
        if (a.id == cudaLaunchAttributeClusterDimension) {
            cluster = {blocks.x, blocks.y, blocks.z};
            continue;
        }
        if (a.id != cudaLaunchAttributeProgrammaticStreamSerialization) return kept(cudaErrorNotSupported);
        dependent |= a.val.programmaticStreamSerializationAllowed != 0;
    }
    return start(host, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes, dependent, cluster);
}
cudaError_t cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(host, grid, block, arguments, shared, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel((const void*)kernel, grid, block, arguments, shared, stream);
}

// ---- memory
cudaError_t cudaMalloc(void** out, size_t bytes) {
    *out = bytes ? (void*)hooks.allocate(bytes) : nullptr;
    return *out || !bytes ? cudaSuccess : kept(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* p) {
    if (p) hooks.release((uint64_t)p);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return memmove(to, from, bytes), cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind k, cudaStream_t) { return cudaMemcpy(to, from, n, k); }
cudaError_t cudaMemset(void* p, int value, size_t bytes) { return memset(p, value, bytes), cudaSuccess; }
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) { return cudaMemset(p, value, bytes); }

// ---- tensor maps
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    *function = !strcmp(name, "cuTensorMapEncodeTiled") ? (void*)cuTensorMapEncodeTiled : !strcmp(name, "cuTensorMapEncodeIm2col") ? (void*)cuTensorMapEncodeIm2col : nullptr;
    *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// ---- errors, the device, occupancy
cudaError_t cudaGetLastError() {
    const cudaError_t e = last;
    last = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorString(cudaError_t e) { return e ? "an error of the emulator, which has said which" : "no error"; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
    memset(a, 0, sizeof *a);
    a->ptxVersion = a->binaryVersion = hooks.capability, a->maxThreadsPerBlock = 1024;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulator");
    p->major = hooks.capability / 10, p->minor = hooks.capability % 10, p->multiProcessorCount = SMS, p->warpSize = 32, p->maxThreadsPerBlock = 1024;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 163 << 10, p->sharedMemPerMultiprocessor = 164 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 1 << 16, p->maxThreadsPerMultiProcessor = 2048, p->totalGlobalMem = 1ull << 33;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount: *value = SMS; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 163 << 10; break;
        case cudaDevAttrComputeCapabilityMajor: *value = hooks.capability / 10; break;
        case cudaDevAttrComputeCapabilityMinor: *value = hooks.capability % 10; break;
        case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
        case cudaDevAttrWarpSize: *value = 32; break;
        default: return kept(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) { return *blocks = 1, cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
    return *blocks = 1, cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) { return *clusters = 1, cudaSuccess; }

// ---- time, of which there is none
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { return *ms = 1, cudaSuccess; }
}
