// The names and sentences of errors, as both interfaces give them.
#include <map>

#include "driver.h"

struct ErrorText { const char *runtime, *driver, *words; };

const ErrorText& error_text(Status code) {
    static const std::map<Status, ErrorText> table = {
        {0, {"cudaSuccess", "CUDA_SUCCESS", "no error"}},
        {1, {"cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
        {2, {"cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
        {4, {"cudaErrorCudartUnloading", "CUDA_ERROR_DEINITIALIZED", "driver shutting down"}},
        {100, {"cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"}},
        {101, {"cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"}},
        {200, {"cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
        {201, {"cudaErrorDeviceUninitialized", "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
        {209, {"cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
        {217, {"cudaErrorPeerAccessUnsupported", "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"}},
        {301, {"cudaErrorFileNotFound", "CUDA_ERROR_FILE_NOT_FOUND", "file not found"}},
        {400, {"cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
        {500, {"cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
        {600, {"cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"}},
        {700, {"cudaErrorIllegalAddress", "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
        {701, {"cudaErrorLaunchOutOfResources", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
        {702, {"cudaErrorLaunchTimeout", "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"}},
        {712, {"cudaErrorHostMemoryAlreadyRegistered", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"}},
        {713, {"cudaErrorHostMemoryNotRegistered", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"}},
        {715, {"cudaErrorIllegalInstruction", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"}},
        {716, {"cudaErrorMisalignedAddress", "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"}},
        {719, {"cudaErrorLaunchFailure", "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"}},
        {801, {"cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"}},
        {900, {"cudaErrorStreamCaptureUnsupported", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"}},
        {901, {"cudaErrorStreamCaptureInvalidated", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"}},
        {902, {"cudaErrorStreamCaptureMerge", "CUDA_ERROR_STREAM_CAPTURE_MERGE", "operation would result in a merge of separate capture sequences"}},
        {904, {"cudaErrorStreamCaptureUnjoined", "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"}},
        {905, {"cudaErrorStreamCaptureIsolation", "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"}},
        {906, {"cudaErrorStreamCaptureImplicit", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"}},
        {907, {"cudaErrorCapturedEvent", "CUDA_ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream"}},
        {908, {"cudaErrorStreamCaptureWrongThread", "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture sequence from another thread"}},
        {999, {"cudaErrorUnknown", "CUDA_ERROR_UNKNOWN", "unknown error"}},
    };
    auto found = table.find(code);
    return found == table.end() ? table.at(999) : found->second;
}

EXPORT int cuGetErrorName(Status e, const char** s) { return *s = error_text(e).driver, 0; }
EXPORT int cuGetErrorString(Status e, const char** s) { return *s = error_text(e).words, 0; }
EXPORT const char* cudaGetErrorName(Status e) { return error_text(e).runtime; }
EXPORT const char* cudaGetErrorString(Status e) { return error_text(e).words; }
