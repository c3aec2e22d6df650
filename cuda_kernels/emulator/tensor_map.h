// Tensor maps as cuda_kernels/tensor_maps.py encodes them, and where what a copy moves lies, in pieces of 16 bytes of shared memory.
#pragma once
#include "interp.h"

constexpr u64 TENSOR_MAP = 0x70616D726F736E74ull;
enum : u8 { TILED = 0, IM2COL = 1 };

struct TensorMap {
    u64 magic, address, stride[4];  // bytes, of dimensions 1 to 4
    u32 last[5];                    // size - 1
    u16 box[5];
    s16 lower[3], upper[3];
    u16 channels, pixels;
    u8 step[5], kind, rank, element, swizzle, nan_fill, type;  // element: bytes; swizzle: 16-byte units in a row of the pattern
    u8 pad[23];
    u32 row_bytes() const { return (kind == IM2COL ? channels : box[0]) * element; }
    u64 rows() const {
        if (kind == IM2COL) return pixels;
        u64 n = 1;
        for (u32 d = 1; d < rank; d++) n *= (box[d] + step[d] - 1) / step[d];
        return n;
    }
};
// Whether it was encoded: what has other numbers would lead astray here.
inline bool is_map(const TensorMap& t) {
    auto power = [](u32 x) { return x && x <= 8 && !(x & (x - 1)); };
    bool good = t.magic == TENSOR_MAP && t.kind <= IM2COL && t.rank >= 1 && t.rank <= 5 && power(t.element) && power(t.swizzle) &&
        t.channels <= 256 && t.pixels <= 1024;
    for (u32 d = 0; good && d < t.rank; d++) good = t.step[d] - 1u < 8 && (t.kind == IM2COL || t.box[d] - 1u < 256);
    return good;
}
static_assert(sizeof(TensorMap) == 128, "tensor_maps.py builds this record");

// A bulk copy, of one thread.
struct Copy {
    u32 pc, warp, lane, epoch, agent;
    u32 to, from;                        // ranks of the block it loads into, and of the one that sent it
    bool store, tensor, inside;          // inside: from the sender's shared memory
    bool values;                         // st.async: of registers, which are in `read`
    bool landed = false;                 // a load's bytes are in shared memory, a store's have been read from there
    bool written = false;                // a store's are in global memory
    bool source_free = false;            // of a store: its thread has waited for that
    u32 shared, bytes, barrier;          // barrier: where a load ends
    u32 group;                           // of a store: commits of its thread before it
    u64 global;                          // without a map
    TensorMap map;
    s32 at[5];                           // coordinates
    u32 offset[3];                       // of im2col
    std::vector<u8> read;                // of a store whose source is free again, and which has not written yet
};

namespace {

// use(shared address, global address, first, last): of 16 bytes those from first to before last lie inside the tensor.
template <class F>
inline void row_pieces(const Copy& c, u32 row, u64 global, bool inside, F use) {
    const TensorMap& t = c.map;
    const u32 bytes = t.row_bytes();
    auto clamp = [](s64 x) { return x < 0 ? 0 : x > 16 ? 16 : (u32)x; };
    for (u32 p = 0; p < bytes; p += 16) {
        const s64 before = (s64)c.at[0] * t.element + p;  // bytes of the tensor's row ahead of the piece
        const u32 first = clamp(-before), last = inside ? clamp(((s64)t.last[0] + 1) * t.element - before) : 0;
        const u32 at = c.shared + row * bytes + p;
        use(at ^ (at >> 7 & (t.swizzle - 1u)) << 4, global + (u64)before, first, last > first ? last : first);
    }
}

template <class F>
inline void tiled_pieces(const Copy& c, F use) {
    const TensorMap& t = c.map;
    for (u32 row = 0; row < t.rows(); row++) {
        u64 global = t.address;
        bool inside = true;
        u32 rest = row;
        for (u32 d = 1; d < t.rank; d++) {
            const u32 count = (t.box[d] + t.step[d] - 1) / t.step[d];
            const s64 x = (s64)c.at[d] + (s64)(rest % count) * t.step[d];
            rest /= count;
            inside &= x >= 0 && x <= (s64)t.last[d];
            global += (u64)x * t.stride[d - 1];
        }
        row_pieces(c, row, global, inside, use);
    }
}

// Pixels follow each other in the box of an image, W first, and go on in the next one.
template <class F>
inline void im2col_pieces(const Copy& c, F use) {
    const TensorMap& t = c.map;
    const u32 images = t.rank - 1u;
    s64 at[5];
    for (u32 d = 0; d < t.rank; d++) at[d] = c.at[d];
    for (u32 row = 0; row < t.pixels; row++) {
        u64 global = t.address + (u64)at[images] * t.stride[images - 1];
        bool inside = at[images] >= 0 && at[images] <= (s64)t.last[images];
        for (u32 d = 1; d < images; d++) {
            const s64 x = at[d] + c.offset[d - 1];
            inside &= x >= 0 && x <= (s64)t.last[d];
            global += (u64)x * t.stride[d - 1];
        }
        row_pieces(c, row, global, inside, use);
        u32 d = 1;
        for (; d < images; d++) {
            at[d] += t.step[d];
            if (at[d] <= (s64)t.last[d] + t.upper[d - 1]) break;
            at[d] = t.lower[d - 1];
        }
        if (d == images) at[images]++;
    }
}

template <class F>
inline void each_piece(const Copy& c, F use) {
    if (c.tensor) return c.map.kind == IM2COL ? im2col_pieces(c, use) : tiled_pieces(c, use);
    if (c.values) return use(c.shared, (u64)c.read.data(), 0u, c.bytes);
    for (u32 i = 0; i < c.bytes; i += 16) use(c.shared + i, c.global + i, 0u, 16u);
}

// Bytes of a piece in shared memory.
inline u32 piece_bytes(const Copy& c) { return c.values ? c.bytes : 16; }

// The bytes of a piece outside the tensor.
inline void fill_outside(const TensorMap& t, u8* piece, u32 first, u32 last) {
    static const u32 nans[4] = {0, 0x7fff, 0x7fffffff, 0};
    for (u32 i = 0; i < 16; i++) {
        if (i >= first && i < last) continue;
        const u32 within = i % t.element;
        const u64 nan = t.element == 8 ? 0x7fffffffffffffffull : nans[t.element / 2];
        piece[i] = t.nan_fill ? (u8)(nan >> (8 * within)) : 0;
    }
}

}  // namespace
