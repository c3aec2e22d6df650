// cuTensorMapEncodeTiled and cuTensorMapEncodeIm2col as cuda.h declares them: their arguments in one record (map_calls.py mirrors it) go to
// `encode_map`, which the one source that includes this defines.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <cstdint>

struct MapCall {
    uint32_t im2col, type, rank, interleave, swizzle, l2, fill, channels, pixels;
    uint64_t address, dims[5], strides[4];
    int32_t box[5], steps[5], lower[3], upper[3];
};
CUresult encode_map(const MapCall& call, CUtensorMap* out);

#define EXPORTED extern "C" __attribute__((visibility("default")))
static MapCall common(CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* steps,
                      CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
    MapCall m{0, type, rank, interleave, swizzle, l2, fill, 0, 0, reinterpret_cast<uint64_t>(address)};
    const uint32_t d = rank <= 5 ? rank : 0;
    std::copy_n(dims, d, m.dims), std::copy_n(steps, d, m.steps), std::copy_n(strides, d ? d - 1 : 0, m.strides);
    return m;
}
EXPORTED CUresult cuTensorMapEncodeTiled(
    CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims, const cuuint64_t* strides,
    const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
    CUtensorMapFloatOOBfill fill) {
    MapCall m = common(type, rank, address, dims, strides, steps, interleave, swizzle, l2, fill);
    std::copy_n(box, rank <= 5 ? rank : 0, m.box);
    return encode_map(m, out);
}
EXPORTED CUresult cuTensorMapEncodeIm2col(
    CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* dims, const cuuint64_t* strides,
    const int* lower, const int* upper, cuuint32_t channels, cuuint32_t pixels, const cuuint32_t* steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
    MapCall m = common(type, rank, address, dims, strides, steps, interleave, swizzle, l2, fill);
    m.im2col = 1, m.channels = channels, m.pixels = pixels;
    const uint32_t d = rank >= 3 && rank <= 5 ? rank - 2 : 0;
    std::copy_n(lower, d, m.lower), std::copy_n(upper, d, m.upper);
    return encode_map(m, out);
}
