// A register is a row: 32 lanes of 32 bits (also for 8- and 16-bit values, zero-extended) or 32 lanes of 64 bits.
// Conversions here are branch-free integer code, so that loops over a row vectorise on any CPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s8 = int8_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;
using f32 = float;
using f64 = double;

constexpr int LANES = 32;

template <class To, class From>
inline To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bit casts keep the size");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

inline float h2f(u32 h) {
    u32 e = (h & 0x7c00) >> 10;
    u32 m = (h & 0x7fff) << 13;
    float normal = bits<float>(m + (112u << 23));
    float small = bits<float>(m + (113u << 23)) - bits<float>(113u << 23);
    u32 special = m + (224u << 23);
    u32 r = e == 0 ? bits<u32>(small) : bits<u32>(normal);
    r = e == 31 ? special : r;
    return bits<float>(r | (h & 0x8000) << 16);
}

// Round to nearest even; overflow to infinity; NaN to the canonical 0x7fff, as the hardware does.
inline u32 f2h(float f) {
    u32 x = bits<u32>(f), sign = (x >> 16) & 0x8000, a = x & 0x7fffffff;
    u32 normal = (a + 0xfff + ((a >> 13) & 1) - (112u << 23)) >> 13;
    u32 small = bits<u32>(bits<float>(a) + 0.5f) - bits<u32>(0.5f);  // the adder rounds at 2^-24
    u32 r = a < (113u << 23) ? small : normal;
    r = a >= 0x477ff000u ? 0x7c00u : r;  // 65520 and above
    return a > 0x7f800000u ? 0x7fffu : (r | sign);
}

// Round toward zero: what is finite stays finite.
inline u32 f2h_rz(float f) {
    u32 x = bits<u32>(f), sign = (x >> 16) & 0x8000, a = x & 0x7fffffff;
    u32 normal = (a - (112u << 23)) >> 13;
    u32 small = (u32)(s32)(bits<float>(a < (113u << 23) ? a : 0) * 16777216.f);
    u32 r = a < (113u << 23) ? small : normal;
    r = a >= 0x47800000u ? (a == 0x7f800000u ? 0x7c00u : 0x7bffu) : r;
    return a > 0x7f800000u ? 0x7fffu : (r | sign);
}

// Exact-to-odd float of a*b + c: a second rounding to half can then not go wrong (24 >= 11 + 2 bits).
inline float fma_odd(float a, float b, float c) {
    float p = a * b, s = p + c;  // p is exact for halves
    float bb = s - p, err = (p - (s - bb)) + (c - bb);
    u32 x = bits<u32>(s);
    bool fix = err != 0 && (x & 1) == 0 && (x & 0x7f800000u) != 0x7f800000u;
    u32 step = (err > 0) == (s > 0) ? 1u : ~0u;
    return bits<float>(x + (fix ? step : 0u));
}

inline float d2f_odd(double d) {
    float f = (float)d;
    u32 x = bits<u32>(f);
    double back = f;
    bool fix = back != d && (x & 1) == 0 && std::isfinite(f);
    u32 step = (d > back) == (f > 0) ? 1u : ~0u;
    return bits<float>(x + (fix ? step : 0u));
}
inline u32 d2h(double d) { return f2h(d2f_odd(d)); }

inline float bf2f(u32 b) { return bits<float>((b & 0xffff) << 16); }
inline u32 f2bf(float f) {
    u32 x = bits<u32>(f);
    u32 r = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
    return (x & 0x7fffffff) > 0x7f800000u ? 0x7fffu : r;
}

inline float ftz(float f) {
    u32 x = bits<u32>(f);
    return bits<float>((x & 0x7f800000u) == 0 ? x & 0x80000000u : x);
}

// How a lane of type T lives in a row.
template <class T>
struct Lane {
    static T get(const void* row, int i) { return (T) static_cast<const u32*>(row)[i]; }
    static void set(void* row, int i, T v) { static_cast<u32*>(row)[i] = (typename std::conditional<sizeof(T) == 1, u8,
        typename std::conditional<sizeof(T) == 2, u16, u32>::type>::type) v; }
};
template <class T>
struct Wide {
    static T get(const void* row, int i) { return static_cast<const T*>(row)[i]; }
    static void set(void* row, int i, T v) { static_cast<T*>(row)[i] = v; }
};
template <> struct Lane<f32> : Wide<f32> {};
template <> struct Lane<u64> : Wide<u64> {};
template <> struct Lane<s64> : Wide<s64> {};
template <> struct Lane<f64> : Wide<f64> {};
struct half {};   // 16 bits, computed in float
struct bhalf {};  // bfloat16, likewise
template <>
struct Lane<half> {
    static float get(const void* row, int i) { return h2f(static_cast<const u32*>(row)[i]); }
    static void set(void* row, int i, float v) { static_cast<u32*>(row)[i] = f2h(v); }
};
template <>
struct Lane<bhalf> {
    static float get(const void* row, int i) { return bf2f(static_cast<const u32*>(row)[i]); }
    static void set(void* row, int i, float v) { static_cast<u32*>(row)[i] = f2bf(v); }
};

using RowFn = void (*)(void* d, const void* a, const void* b, const void* c, const void* e);
using TestFn = u32 (*)(const void* a, const void* b);  // returns the lanes for which it holds

struct RowOp {
    const char* name;
    RowFn row;    // one of the two is set
    TestFn test;
};
const RowOp* row_ops(int* count);

// A launch's low_ends and high_ends, bits numbered as run.py's APPROXIMATE: each of its host threads sets them.
struct Ends {
    u32 low = 0, high = 0;
};
extern thread_local Ends ends;
