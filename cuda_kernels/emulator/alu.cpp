// The arithmetic instructions: one small function per (operation, type), each over all 32 lanes of its rows.
// They know nothing of masks: the interpreter lets them write a scratch row and blends where lanes are inactive.
// decode.py finds them by name in the table at the end.
#include <cfenv>

#include "rows.h"

thread_local Ends ends;

namespace {

template <class D, class A, class F>
inline void map1(void* d, const void* a, F f) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) Lane<D>::set(d, i, f(Lane<A>::get(a, i)));
}
template <class D, class A, class B, class F>
inline void map2(void* d, const void* a, const void* b, F f) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) Lane<D>::set(d, i, f(Lane<A>::get(a, i), Lane<B>::get(b, i)));
}
template <class D, class A, class B, class C, class F>
inline void map3(void* d, const void* a, const void* b, const void* c, F f) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) Lane<D>::set(d, i, f(Lane<A>::get(a, i), Lane<B>::get(b, i), Lane<C>::get(c, i)));
}
template <class A, class F>
inline u32 test2(const void* a, const void* b, F f) {
    u32 m = 0;
    for (int i = 0; i < LANES; i++) m |= (u32)(bool)f(Lane<A>::get(a, i), Lane<A>::get(b, i)) << i;
    return m;
}

// Directed roundings use the CPU's own rounding mode; the barriers keep the loop between the two switches.
template <class F>
inline void rounded(int mode, F loop) {
    int old = fegetround();
    fesetround(mode);
    asm volatile("" ::: "memory");
    loop();
    asm volatile("" ::: "memory");
    fesetround(old);
}

inline float clamp01(float x) { return x > 0 ? (x < 1 ? x : 1.f) : 0.f; }
inline float fmin_num(float a, float b) { return a != a ? b : b != b ? a : (a < b || (a == b && std::signbit(a))) ? a : b; }
inline float fmax_num(float a, float b) { return a != a ? b : b != b ? a : (a > b || (a == b && std::signbit(b))) ? a : b; }
inline float fmin_nan(float a, float b) { return (a != a || b != b) ? bits<float>(0x7fffffffu) : fmin_num(a, b); }
inline float fmax_nan(float a, float b) { return (a != a || b != b) ? bits<float>(0x7fffffffu) : fmax_num(a, b); }
inline float relu(float x) { return x > 0 ? x : 0.f; }  // NaN stays NaN in PTX's .relu; see relu_nan
inline float relu_nan(float x) { return x != x ? x : relu(x); }

template <class T> inline T shl(T a, u32 n) { return n >= sizeof(T) * 8 ? (T)0 : (T)(a << n); }
template <class T> inline T shr(T a, u32 n) {
    constexpr u32 top = sizeof(T) * 8 - 1;
    if (std::is_signed<T>::value) return (T)(a >> (n > top ? top : n));
    return n > top ? (T)0 : (T)(a >> n);
}
template <class T> inline T div_int(T a, T b) {
    if (b == 0) return (T)~(T)0;
    if (std::is_signed<T>::value && b == (T)-1) return (T)(0 - (typename std::make_unsigned<T>::type)a);
    return a / b;
}
template <class T> inline T rem_int(T a, T b) {
    if (b == 0) return (T)~(T)0;  // the ISA leaves it open; an H200 gives this for u32, the others are taken to be alike
    if (std::is_signed<T>::value && b == (T)-1) return 0;
    return a % b;
}
inline u32 bfind_u(u64 a, int width) { return a ? 63 - __builtin_clzll(a) : (u32)~0u + 0 * width; }
inline u32 brev32(u32 x) {
    x = (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    return __builtin_bswap32(x);
}
template <class T> inline T bfe(T a, u32 pos, u32 len) {
    using U = typename std::make_unsigned<T>::type;
    constexpr u32 w = sizeof(T) * 8;
    pos &= 255, len &= 255;
    if (len == 0) return 0;
    u32 sign_at = pos + len - 1 < w - 1 ? pos + len - 1 : w - 1;
    bool negative = std::is_signed<T>::value && ((U)a >> sign_at & 1);
    U x = pos >= w ? 0 : (U)a >> pos;
    if (pos >= w) return negative ? (T)~(U)0 : 0;
    u32 kept = len < w - pos ? len : w - pos;
    U mask = kept >= w ? ~(U)0 : (((U)1 << kept) - 1);
    return (T)((x & mask) | (negative ? ~mask : 0));
}
template <class T> inline T bfi(T a, T b, u32 pos, u32 len) {
    constexpr u32 w = sizeof(T) * 8;
    pos &= 255, len &= 255;
    if (pos >= w || len == 0) return b;
    if (len > w - pos) len = w - pos;
    T mask = (len >= w ? ~(T)0 : (((T)1 << len) - 1)) << pos;
    return (b & ~mask) | ((a << pos) & mask);
}
inline u32 prmt(u32 a, u32 b, u32 sel) {
    u64 v = a | (u64)b << 32;
    u32 r = 0;
    for (int i = 0; i < 4; i++) {
        u32 s = sel >> 4 * i, byte = (u32)(v >> 8 * (s & 7)) & 0xff;
        if (s & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << 8 * i;
    }
    return r;
}
inline u32 prmt_mode(int mode, u32 a, u32 b, u32 s) {
    s &= 3;
    static const u32 table[6][4] = {{0x3210, 0x4321, 0x5432, 0x6543}, {0x5670, 0x6701, 0x7012, 0x0123},
                                    {0x0000, 0x1111, 0x2222, 0x3333}, {0x3210, 0x3211, 0x3222, 0x3333},
                                    {0x0000, 0x1110, 0x2210, 0x3210}, {0x1010, 0x3232, 0x1010, 0x3232}};
    return prmt(a, b, table[mode][s]);
}

// Float to integer saturates; NaN becomes 0 (64-bit results: the top bit).
template <class I, class F> inline I to_int(F x) {
    if (x != x) return sizeof(I) == 8 ? (I)((u64)1 << 63) : (I)0;
    constexpr bool sg = std::is_signed<I>::value;
    const F lo = sg ? -(F)std::ldexp(1.0, sizeof(I) * 8 - 1) : (F)0;
    const F hi = (F)std::ldexp(1.0, sizeof(I) * 8 - (sg ? 1 : 0));
    if (x <= lo) return sg ? (I)((u64)1 << (sizeof(I) * 8 - 1)) : (I)0;
    if (x >= hi) return sg ? (I)(((u64)1 << (sizeof(I) * 8 - 1)) - 1) : (I) ~(u64)0;
    return (I)x;
}

template <class F> inline void half2_map(void* d, const void* a, const void* b, const void* c, F f) {
    u32* D = (u32*)d;
    const u32 *A = (const u32*)a, *B = (const u32*)b, *C = (const u32*)c;
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) {
        u32 lo = f2h(f(h2f(A[i] & 0xffff), h2f(B[i] & 0xffff), h2f(C[i] & 0xffff)));
        u32 hi = f2h(f(h2f(A[i] >> 16), h2f(B[i] >> 16), h2f(C[i] >> 16)));
        D[i] = lo | hi << 16;
    }
}
template <class F> inline void bhalf2_map(void* d, const void* a, const void* b, const void* c, F f) {
    u32* D = (u32*)d;
    const u32 *A = (const u32*)a, *B = (const u32*)b, *C = (const u32*)c;
#pragma GCC ivdep
    for (int i = 0; i < LANES; i++) {
        u32 lo = f2bf(f(bf2f(A[i]), bf2f(B[i]), bf2f(C[i])));
        u32 hi = f2bf(f(bf2f(A[i] >> 16), bf2f(B[i] >> 16), bf2f(C[i] >> 16)));
        D[i] = lo | hi << 16;
    }
}

// Documented errors of approximate instructions (PTX ISA 9.7.3), from the correctly rounded result: units in the last place, a
// share of the result, or, of results up to 1, an absolute error; larger ones then have it as their share (lg2), and sin and cos
// hold it for operands within 2 pi.
struct Error {
    double ulps, relative, absolute;
};
constexpr Error ulps(double n) { return {n, 0, 0}; }
constexpr Error relative(double share) { return {0, share, 0}; }
constexpr Error absolute(double e) { return {0, e, e}; }

inline float moved(float y, int way, Error e) {
    if (!std::isfinite(y)) return y;
    if (e.absolute && std::fabs(y) <= 1) return (float)(y + way * e.absolute);
    if (y == 0) return y;
    const double ulp = std::ldexp(1.0, std::max(std::ilogb(y), -126) - 23);
    return (float)(y + way * (e.ulps + std::floor(e.relative * std::fabs(y) / ulp)) * ulp);
}

// The results of approximate instruction `which`, as near as can be or at the end of the error that the launch asks for.
inline void to_end(int which, Error e, float* d) {
    const int way = (int)(ends.high >> which & 1) - (int)(ends.low >> which & 1);
    for (int i = 0; way && i < LANES; i++) d[i] = moved(d[i], way, e);
}

// div.approx is x * (1 / y), of which 1 / y is 0 from 2^126 on.
inline float quotient(float x, float y) { return std::fabs(y) > 0x1p126f ? x * std::copysign(0.f, y) : x / y; }

#define ARGS void *d, const void *a, const void *b, const void *c, const void *e
#define UNUSED (void)d, (void)a, (void)b, (void)c, (void)e
#define ROW(NAME, ...) {NAME, [](ARGS) { UNUSED; __VA_ARGS__; }, nullptr}
#define M1(NAME, D, A, EXPR) ROW(NAME, map1<D, A>(d, a, [](auto x) { return EXPR; }))
#define M2(NAME, D, A, B, EXPR) ROW(NAME, map2<D, A, B>(d, a, b, [](auto x, auto y) { return EXPR; }))
#define M3(NAME, D, A, B, C, EXPR) ROW(NAME, map3<D, A, B, C>(d, a, b, c, [](auto x, auto y, auto z) { return EXPR; }))

// All loops that libm keeps scalar, or that fit no macro, are written out.
#define EACH for (int i = 0; i < LANES; i++)
#define U32(p) ((const u32*)(p))[i]
#define U64(p) ((const u64*)(p))[i]

// f32: plain, and with subnormals flushed before and after; saturated forms of what may saturate.
#define F1(NAME, EXPR) \
    M1(NAME ".f32", f32, f32, EXPR), M1(NAME ".ftz.f32", f32, f32, ftz([](float x) { return EXPR; }(ftz(x))))
#define F2(NAME, EXPR) \
    M2(NAME ".f32", f32, f32, f32, EXPR), \
    M2(NAME ".ftz.f32", f32, f32, f32, ftz([](float x, float y) { return EXPR; }(ftz(x), ftz(y))))
#define F3(NAME, EXPR) \
    M3(NAME ".f32", f32, f32, f32, f32, EXPR), \
    M3(NAME ".ftz.f32", f32, f32, f32, f32, ftz([](float x, float y, float z) { return EXPR; }(ftz(x), ftz(y), ftz(z))))
#define APPROXIMATE(NAME, WHICH, ERROR, EXPR) \
    ROW(NAME ".f32", map2<f32, f32, f32>(d, a, b, [](float x, float y) { return (void)y, EXPR; }); to_end(WHICH, ERROR, (f32*)d)), \
    ROW(NAME ".ftz.f32", map2<f32, f32, f32>(d, a, b, [](float u, float v) { float x = ftz(u), y = ftz(v); return (void)y, EXPR; }); \
        to_end(WHICH, ERROR, (f32*)d); map1<f32, f32>(d, d, [](float x) { return ftz(x); }))
#define DIRECTED(NAME, MODE) \
    ROW("add." NAME ".f32", rounded(MODE, [&] { map2<f32, f32, f32>(d, a, b, [](float x, float y) { return x + y; }); })), \
    ROW("sub." NAME ".f32", rounded(MODE, [&] { map2<f32, f32, f32>(d, a, b, [](float x, float y) { return x - y; }); })), \
    ROW("mul." NAME ".f32", rounded(MODE, [&] { map2<f32, f32, f32>(d, a, b, [](float x, float y) { return x * y; }); })), \
    ROW("div." NAME ".f32", rounded(MODE, [&] { map2<f32, f32, f32>(d, a, b, [](float x, float y) { return x / y; }); })), \
    ROW("rcp." NAME ".f32", rounded(MODE, [&] { map1<f32, f32>(d, a, [](float x) { return 1.f / x; }); })), \
    ROW("sqrt." NAME ".f32", rounded(MODE, [&] { map1<f32, f32>(d, a, [](float x) { return std::sqrt(x); }); })), \
    ROW("fma." NAME ".f32", rounded(MODE, [&] { map3<f32, f32, f32, f32>(d, a, b, c, [](float x, float y, float z) { \
        return std::fma(x, y, z); }); })), \
    ROW("add." NAME ".f64", rounded(MODE, [&] { map2<f64, f64, f64>(d, a, b, [](double x, double y) { return x + y; }); })), \
    ROW("mul." NAME ".f64", rounded(MODE, [&] { map2<f64, f64, f64>(d, a, b, [](double x, double y) { return x * y; }); })), \
    ROW("fma." NAME ".f64", rounded(MODE, [&] { map3<f64, f64, f64, f64>(d, a, b, c, [](double x, double y, double z) { \
        return std::fma(x, y, z); }); })), \
    ROW("cvt." NAME ".f32.f64", rounded(MODE, [&] { map1<f32, f64>(d, a, [](double x) { return (float)x; }); })), \
    ROW("cvt." NAME ".f32.s32", rounded(MODE, [&] { map1<f32, s32>(d, a, [](s32 x) { return (float)x; }); })), \
    ROW("cvt." NAME ".f32.u32", rounded(MODE, [&] { map1<f32, u32>(d, a, [](u32 x) { return (float)x; }); })), \
    ROW("cvt." NAME ".f32.s64", rounded(MODE, [&] { map1<f32, s64>(d, a, [](s64 x) { return (float)x; }); })), \
    ROW("cvt." NAME ".f32.u64", rounded(MODE, [&] { map1<f32, u64>(d, a, [](u64 x) { return (float)x; }); }))

// Integers.
#define INT_COMMON(T, U) \
    M2("add." #T, T, T, T, (U)((U)x + (U)y)), M2("sub." #T, T, T, T, (U)((U)x - (U)y)), \
    M2("mul.lo." #T, T, T, T, (U)((u64)x * (u64)y)), M3("mad.lo." #T, T, T, T, T, (U)((u64)x * (u64)y + (u64)z)), \
    M2("shl." #T, T, T, u32, shl<U>(x, y)), M1("not." #T, T, T, (U) ~x), M1("cnot." #T, T, T, (U)(x == 0)), \
    M2("and." #T, T, T, T, (U)(x & y)), M2("or." #T, T, T, T, (U)(x | y)), M2("xor." #T, T, T, T, (U)(x ^ y))
#define INT_SIGNED(T) \
    M2("div." #T, T, T, T, div_int<T>(x, y)), M2("rem." #T, T, T, T, rem_int<T>(x, y)), \
    M2("min." #T, T, T, T, x < y ? x : y), M2("max." #T, T, T, T, x > y ? x : y), M2("shr." #T, T, T, u32, shr<T>(x, y))
#define INT_NEG(T, U) M1("neg." #T, T, T, (U)(0 - (U)x)), M1("abs." #T, T, T, (U)(x < 0 ? 0 - (U)x : (U)x))
#define MUL_HI(T, W) \
    M2("mul.hi." #T, T, T, T, (T)((W)x * (W)y >> (sizeof(T) * 8))), \
    M3("mad.hi." #T, T, T, T, T, (T)((T)((W)x * (W)y >> (sizeof(T) * 8)) + z)), \
    M3("sad." #T, T, T, T, T, (T)(z + (x < y ? y - x : x - y)))
#define MUL_WIDE(T, W) \
    M2("mul.wide." #T, W, T, T, (W)x * (W)y), M3("mad.wide." #T, W, T, T, W, (W)((u64)((W)x * (W)y) + (u64)z))

// Widening and narrowing: ext.<type kept>.<register bits written>.<register bits read>
#define EXT(T) \
    M1("ext." #T ".16.32", u16, u32, (u16)(T)x), M1("ext." #T ".32.32", u32, u32, (u32)(T)x), \
    M1("ext." #T ".64.32", u64, u32, (u64)(s64)(T)x), M1("ext." #T ".16.64", u16, u64, (u16)(T)x), \
    M1("ext." #T ".32.64", u32, u64, (u32)(T)x), M1("ext." #T ".64.64", u64, u64, (u64)(s64)(T)x)

#define INT_SAT(T, LO, HI, S) M1("cvt.sat." #T "." #S, T, S, (T)(x < (S)LO ? (S)LO : x > (S)HI ? (S)HI : x))

#define FROM_INT(I) \
    M1("cvt.rn.f32." #I, f32, I, (float)x), M1("cvt.rn.f64." #I, f64, I, (double)x), \
    ROW("cvt.rn.f16." #I, EACH((u32*)d)[i] = d2h((double)Lane<I>::get(a, i))), \
    ROW("cvt.rn.bf16." #I, EACH((u32*)d)[i] = f2bf(d2f_odd((double)Lane<I>::get(a, i))))
#define TO_INT_FROM(I, SRC, TAG) \
    M1("cvt.rni." #I TAG, I, SRC, (to_int<I>(std::rint(x)))), M1("cvt.rzi." #I TAG, I, SRC, (to_int<I>(std::trunc(x)))), \
    M1("cvt.rmi." #I TAG, I, SRC, (to_int<I>(std::floor(x)))), M1("cvt.rpi." #I TAG, I, SRC, (to_int<I>(std::ceil(x))))
#define TO_INT(I) TO_INT_FROM(I, f32, ".f32"), TO_INT_FROM(I, f64, ".f64"), TO_INT_FROM(I, half, ".f16")
#define INTEGRAL(D, TAG) \
    M1("cvt.rni." TAG "." TAG, D, D, std::rint(x)), M1("cvt.rzi." TAG "." TAG, D, D, std::trunc(x)), \
    M1("cvt.rmi." TAG "." TAG, D, D, std::floor(x)), M1("cvt.rpi." TAG "." TAG, D, D, std::ceil(x))

// Halves: single, and packed in pairs. Two roundings (to float, then to half) equal one for + - * by the width of float.
#define HALF(NAME, FTAG, EXPR) \
    ROW(NAME ".f16" FTAG, map3<half, half, half, half>(d, a, b, c, [](float x, float y, float z) { (void)y, (void)z; return EXPR; })), \
    ROW(NAME ".f16x2" FTAG, half2_map(d, a, b, c, [](float x, float y, float z) { (void)y, (void)z; return EXPR; })), \
    ROW(NAME ".bf16" FTAG, map3<bhalf, bhalf, bhalf, bhalf>(d, a, b, c, [](float x, float y, float z) { (void)y, (void)z; return EXPR; })), \
    ROW(NAME ".bf16x2" FTAG, bhalf2_map(d, a, b, c, [](float x, float y, float z) { (void)y, (void)z; return EXPR; }))
inline float fma_bf(float x, float y, float z) { return d2f_odd((double)x * y + z); }
#define HALF_FMA(NAME, WRAP) \
    ROW(NAME ".f16", map3<half, half, half, half>(d, a, b, c, [](float x, float y, float z) { return WRAP(fma_odd(x, y, z)); })), \
    ROW(NAME ".f16x2", half2_map(d, a, b, c, [](float x, float y, float z) { return WRAP(fma_odd(x, y, z)); })), \
    ROW(NAME ".bf16", map3<bhalf, bhalf, bhalf, bhalf>(d, a, b, c, [](float x, float y, float z) { return WRAP(fma_bf(x, y, z)); })), \
    ROW(NAME ".bf16x2", bhalf2_map(d, a, b, c, [](float x, float y, float z) { return WRAP(fma_bf(x, y, z)); }))

// Comparisons: a predicate mask. The unordered forms hold when either is NaN.
#define TEST(NAME, T, EXPR) {NAME, nullptr, [](const void* a, const void* b) -> u32 { \
    return test2<T>(a, b, [](auto x, auto y) { return EXPR; }); }}
#define TEST_INT(T) \
    TEST("setp.eq." #T, T, x == y), TEST("setp.ne." #T, T, x != y), TEST("setp.lt." #T, T, x < y), \
    TEST("setp.le." #T, T, x <= y), TEST("setp.gt." #T, T, x > y), TEST("setp.ge." #T, T, x >= y)
#define TEST_FLOAT(T, N) \
    TEST("setp.eq." N, T, x == y), TEST("setp.ne." N, T, (x < y || x > y)), TEST("setp.lt." N, T, x < y), \
    TEST("setp.le." N, T, x <= y), TEST("setp.gt." N, T, x > y), TEST("setp.ge." N, T, x >= y), \
    TEST("setp.equ." N, T, !(x < y || x > y)), TEST("setp.neu." N, T, !(x == y)), TEST("setp.ltu." N, T, !(x >= y)), \
    TEST("setp.leu." N, T, !(x > y)), TEST("setp.gtu." N, T, !(x <= y)), TEST("setp.geu." N, T, !(x < y)), \
    TEST("setp.num." N, T, (x == x && y == y)), TEST("setp.nan." N, T, (x != x || y != y))
// The upper halves of a pair, for setp.f16x2's second predicate and for set.f16x2.
struct upper {};
struct bupper {};
}  // namespace
template <> struct Lane<upper> { static float get(const void* r, int i) { return h2f(((const u32*)r)[i] >> 16); } };
template <> struct Lane<bupper> { static float get(const void* r, int i) { return bf2f(((const u32*)r)[i] >> 16); } };
namespace {

const RowOp TABLE[] = {
    ROW("mov.b32", memcpy(d, a, 128)), ROW("mov.b64", memcpy(d, a, 256)),
    ROW("selp.b32", EACH((u32*)d)[i] = (*(const u32*)c >> i & 1) ? U32(a) : U32(b)),
    ROW("selp.b64", EACH((u64*)d)[i] = (*(const u32*)c >> i & 1) ? U64(a) : U64(b)),
    ROW("slct.b32.s32", EACH((u32*)d)[i] = ((const s32*)c)[i] >= 0 ? U32(a) : U32(b)),
    ROW("slct.b64.s32", EACH((u64*)d)[i] = ((const s32*)c)[i] >= 0 ? U64(a) : U64(b)),
    ROW("slct.b32.f32", EACH((u32*)d)[i] = ((const f32*)c)[i] >= 0 ? U32(a) : U32(b)),
    ROW("slct.b64.f32", EACH((u64*)d)[i] = ((const f32*)c)[i] >= 0 ? U64(a) : U64(b)),
    // packing and unpacking
    ROW("pack.16", EACH((u32*)d)[i] = (U32(a) & 0xffff) | U32(b) << 16),
    ROW("pack.32", EACH((u64*)d)[i] = U32(a) | (u64)U32(b) << 32),
    ROW("pack.8", EACH((u32*)d)[i] = (U32(a) & 255) | (U32(b) & 255) << 8),
    ROW("part16.32", EACH((u32*)d)[i] = U32(a) >> U32(b) & 0xffff),
    ROW("part8.32", EACH((u32*)d)[i] = U32(a) >> U32(b) & 0xff),
    ROW("part16.64", EACH((u32*)d)[i] = (u32)(U64(a) >> U32(b)) & 0xffff),
    ROW("part32.64", EACH((u32*)d)[i] = (u32)(U64(a) >> U32(b))),
    // integers
    INT_COMMON(u16, u16), INT_COMMON(u32, u32), INT_COMMON(u64, u64),
    INT_SIGNED(u16), INT_SIGNED(s16), INT_SIGNED(u32), INT_SIGNED(s32), INT_SIGNED(u64), INT_SIGNED(s64),
    INT_NEG(s16, u16), INT_NEG(s32, u32), INT_NEG(s64, u64),
    MUL_HI(u16, u32), MUL_HI(s16, s32), MUL_HI(u32, u64), MUL_HI(s32, s64), MUL_HI(u64, unsigned __int128), MUL_HI(s64, __int128),
    MUL_WIDE(u16, u32), MUL_WIDE(s16, s32), MUL_WIDE(u32, u64), MUL_WIDE(s32, s64),
    M2("mul24.lo.u32", u32, u32, u32, (x & 0xffffff) * (y & 0xffffff)),
    M2("mul24.lo.s32", s32, s32, s32, (s32)((u32)((s32)((u32)x << 8) >> 8) * (u32)((s32)((u32)y << 8) >> 8))),
    M2("add.sat.s32", s32, s32, s32, (s32)((s64)x + y > INT32_MAX ? INT32_MAX : (s64)x + y < INT32_MIN ? INT32_MIN : (s64)x + y)),
    M2("sub.sat.s32", s32, s32, s32, (s32)((s64)x - y > INT32_MAX ? INT32_MAX : (s64)x - y < INT32_MIN ? INT32_MIN : (s64)x - y)),
    M2("add.u16x2", u32, u32, u32, ((x + y) & 0xffff) | (((x >> 16) + (y >> 16)) << 16)),
    M2("min.u16x2", u32, u32, u32, ((x & 0xffff) < (y & 0xffff) ? x & 0xffff : y & 0xffff) | ((x >> 16) < (y >> 16) ? x >> 16 : y >> 16) << 16),
    M2("max.u16x2", u32, u32, u32, ((x & 0xffff) > (y & 0xffff) ? x & 0xffff : y & 0xffff) | ((x >> 16) > (y >> 16) ? x >> 16 : y >> 16) << 16),
    M2("min.s16x2", u32, u32, u32, ((s16)x < (s16)y ? x & 0xffff : y & 0xffff) | ((s16)(x >> 16) < (s16)(y >> 16) ? x >> 16 : y >> 16) << 16),
    M2("max.s16x2", u32, u32, u32, ((s16)x > (s16)y ? x & 0xffff : y & 0xffff) | ((s16)(x >> 16) > (s16)(y >> 16) ? x >> 16 : y >> 16) << 16),
    M1("popc.b32", u32, u32, (u32)__builtin_popcount(x)), M1("popc.b64", u32, u64, (u32)__builtin_popcountll(x)),
    M1("clz.b32", u32, u32, (u32)(x ? __builtin_clz(x) : 32)), M1("clz.b64", u32, u64, (u32)(x ? __builtin_clzll(x) : 64)),
    M1("brev.b32", u32, u32, brev32(x)), M1("brev.b64", u64, u64, (u64)brev32((u32)x) << 32 | brev32((u32)(x >> 32))),
    M1("bfind.u32", u32, u32, bfind_u(x, 32)), M1("bfind.u64", u32, u64, bfind_u(x, 64)),
    M1("bfind.s32", u32, s32, bfind_u((u32)(x < 0 ? ~x : x), 32)), M1("bfind.s64", u32, s64, bfind_u((u64)(x < 0 ? ~x : x), 64)),
    M1("bfind.shiftamt.u32", u32, u32, x ? 31 - bfind_u(x, 32) : ~0u), M1("bfind.shiftamt.u64", u32, u64, x ? 63 - bfind_u(x, 64) : ~0u),
    M1("bfind.shiftamt.s32", u32, s32, (x < 0 ? ~x : x) ? 31 - bfind_u((u32)(x < 0 ? ~x : x), 32) : ~0u),
    M1("bfind.shiftamt.s64", u32, s64, (x < 0 ? ~x : x) ? 63 - bfind_u((u64)(x < 0 ? ~x : x), 64) : ~0u),
    M3("bfe.u32", u32, u32, u32, u32, bfe<u32>(x, y, z)), M3("bfe.s32", s32, s32, u32, u32, bfe<s32>(x, y, z)),
    M3("bfe.u64", u64, u64, u32, u32, bfe<u64>(x, y, z)), M3("bfe.s64", s64, s64, u32, u32, bfe<s64>(x, y, z)),
    ROW("bfi.b32", EACH((u32*)d)[i] = bfi<u32>(U32(a), U32(b), U32(c), U32(e))),
    ROW("bfi.b64", EACH((u64*)d)[i] = bfi<u64>(U64(a), U64(b), U32(c), U32(e))),
    M3("prmt.b32", u32, u32, u32, u32, prmt(x, y, z)), M3("prmt.f4e.b32", u32, u32, u32, u32, prmt_mode(0, x, y, z)),
    M3("prmt.b4e.b32", u32, u32, u32, u32, prmt_mode(1, x, y, z)), M3("prmt.rc8.b32", u32, u32, u32, u32, prmt_mode(2, x, y, z)),
    M3("prmt.ecl.b32", u32, u32, u32, u32, prmt_mode(3, x, y, z)), M3("prmt.ecr.b32", u32, u32, u32, u32, prmt_mode(4, x, y, z)),
    M3("prmt.rc16.b32", u32, u32, u32, u32, prmt_mode(5, x, y, z)),
    M3("shf.l.wrap.b32", u32, u32, u32, u32, (u32)((((u64)y << 32 | x) << (z & 31)) >> 32)),
    M3("shf.r.wrap.b32", u32, u32, u32, u32, (u32)(((u64)y << 32 | x) >> (z & 31))),
    M3("shf.l.clamp.b32", u32, u32, u32, u32, (u32)((((u64)y << 32 | x) << (z < 32 ? z : 32)) >> 32)),
    M3("shf.r.clamp.b32", u32, u32, u32, u32, (u32)(((u64)y << 32 | x) >> (z < 32 ? z : 32))),
    ROW("lop3.b32", u32 lut = *(const u32*)e; EACH { u32 x = U32(a), y = U32(b), z = U32(c), r = 0;
        for (int k = 0; k < 8; k++) r |= (lut >> k & 1 ? ~0u : 0u) & (k & 4 ? x : ~x) & (k & 2 ? y : ~y) & (k & 1 ? z : ~z);
        ((u32*)d)[i] = r; }),
    ROW("dp4a.s32.s32", EACH { s32 s = (s32)U32(c); for (int k = 0; k < 4; k++) s += (s32)(s8)(U32(a) >> 8 * k) * (s8)(U32(b) >> 8 * k); ((u32*)d)[i] = s; }),
    ROW("dp4a.u32.u32", EACH { u32 s = U32(c); for (int k = 0; k < 4; k++) s += (u32)(u8)(U32(a) >> 8 * k) * (u8)(U32(b) >> 8 * k); ((u32*)d)[i] = s; }),
    M2("bmsk.clamp.b32", u32, u32, u32, x >= 32 ? 0u : (y >= 32 ? ~0u : (1u << y) - 1) << x),
    EXT(u8), EXT(s8), EXT(u16), EXT(s16), EXT(u32), EXT(s32), EXT(u64), EXT(s64),
    INT_SAT(u8, 0, 255, s32), INT_SAT(s8, -128, 127, s32), INT_SAT(u16, 0, 65535, s32), INT_SAT(s16, -32768, 32767, s32),
    INT_SAT(u8, 0, 255, s16), INT_SAT(s8, -128, 127, s16), INT_SAT(u8, 0, 255, u32), INT_SAT(u16, 0, 65535, u32),
    INT_SAT(s32, INT32_MIN, INT32_MAX, s64), INT_SAT(u32, 0, INT32_MAX, s32),
    // conversions between integers and floats
    FROM_INT(u8), FROM_INT(s8), FROM_INT(u16), FROM_INT(s16), FROM_INT(u32), FROM_INT(s32), FROM_INT(u64), FROM_INT(s64),
    TO_INT(u8), TO_INT(s8), TO_INT(u16), TO_INT(s16), TO_INT(u32), TO_INT(s32), TO_INT(u64), TO_INT(s64),
    INTEGRAL(f32, "f32"), INTEGRAL(f64, "f64"), INTEGRAL(half, "f16"),
    M1("cvt.f32.f16", f32, half, x), M1("cvt.f64.f16", f64, half, (double)x), M1("cvt.rn.f16.f32", half, f32, x),
    M1("cvt.rn.sat.f16.f32", half, f32, clamp01(x)), M1("cvt.rn.relu.f16.f32", half, f32, relu_nan(x)),
    ROW("cvt.rz.f16.f32", EACH((u32*)d)[i] = f2h_rz(((const f32*)a)[i])), ROW("cvt.rn.f16.f64", EACH((u32*)d)[i] = d2h(((const f64*)a)[i])),
    M1("cvt.f32.bf16", f32, bhalf, x), M1("cvt.rn.bf16.f32", bhalf, f32, x), M1("cvt.rn.relu.bf16.f32", bhalf, f32, relu_nan(x)),
    ROW("cvt.rz.bf16.f32", EACH((u32*)d)[i] = U32(a) >> 16),
    M1("cvt.f64.f32", f64, f32, (double)x), M1("cvt.rn.f32.f64", f32, f64, (float)x),
    M1("cvt.sat.f32.f32", f32, f32, clamp01(x)), M1("cvt.ftz.f32.f32", f32, f32, ftz(x)), M1("cvt.sat.f16.f16", half, half, clamp01(x)),
    ROW("cvt.rn.f16x2.f32", EACH((u32*)d)[i] = f2h(((const f32*)a)[i]) << 16 | f2h(((const f32*)b)[i])),
    ROW("cvt.rz.f16x2.f32", EACH((u32*)d)[i] = f2h_rz(((const f32*)a)[i]) << 16 | f2h_rz(((const f32*)b)[i])),
    ROW("cvt.rn.relu.f16x2.f32", EACH((u32*)d)[i] = f2h(relu_nan(((const f32*)a)[i])) << 16 | f2h(relu_nan(((const f32*)b)[i]))),
    ROW("cvt.rn.bf16x2.f32", EACH((u32*)d)[i] = f2bf(((const f32*)a)[i]) << 16 | f2bf(((const f32*)b)[i])),
    ROW("cvt.rn.relu.bf16x2.f32", EACH((u32*)d)[i] = f2bf(relu_nan(((const f32*)a)[i])) << 16 | f2bf(relu_nan(((const f32*)b)[i]))),
    // f32
    F2("add", x + y), F2("sub", x - y), F2("mul", x * y), F3("fma", std::fma(x, y, z)), F2("div", x / y),
    F2("add.sat", clamp01(x + y)), F2("sub.sat", clamp01(x - y)), F2("mul.sat", clamp01(x * y)), F3("fma.sat", clamp01(std::fma(x, y, z))),
    F2("min", fmin_num(x, y)), F2("max", fmax_num(x, y)), F2("min.NaN", fmin_nan(x, y)), F2("max.NaN", fmax_nan(x, y)),
    F1("rcp", 1.f / x), F1("sqrt", std::sqrt(x)),
    // approximate ones: each with its documented error, in the order of run.py's APPROXIMATE
    APPROXIMATE("rcp.approx", 0, ulps(1), 1.f / x), APPROXIMATE("div.approx", 1, ulps(2), quotient(x, y)),
    APPROXIMATE("div.full", 1, ulps(2), x / y), APPROXIMATE("sqrt.approx", 2, relative(0x1p-23), std::sqrt(x)),
    APPROXIMATE("rsqrt.approx", 3, relative(0x1.125fp-23), 1.f / std::sqrt(x)),                          // 2^-22.9
    APPROXIMATE("sin.approx", 4, absolute(0x1.6a09p-21), std::sin(x)), APPROXIMATE("cos.approx", 5, absolute(0x1.6a09p-21), std::cos(x)),
    APPROXIMATE("ex2.approx", 6, ulps(2), std::exp2(x)), APPROXIMATE("lg2.approx", 7, absolute(0x1p-22), std::log2(x)),
    APPROXIMATE("tanh.approx", 8, relative(0x1p-11), std::tanh(x)),
    F1("neg", bits<float>(bits<u32>(x) ^ 0x80000000u)), F1("abs", bits<float>(bits<u32>(x) & 0x7fffffffu)),
    M2("copysign.f32", u32, u32, u32, (x & 0x80000000u) | (y & 0x7fffffffu)),
    DIRECTED("rz", FE_TOWARDZERO), DIRECTED("rm", FE_DOWNWARD), DIRECTED("rp", FE_UPWARD),
    // f64
    M2("add.f64", f64, f64, f64, x + y), M2("sub.f64", f64, f64, f64, x - y), M2("mul.f64", f64, f64, f64, x * y),
    M2("div.f64", f64, f64, f64, x / y), M3("fma.f64", f64, f64, f64, f64, std::fma(x, y, z)), M1("sqrt.f64", f64, f64, std::sqrt(x)),
    M1("rcp.f64", f64, f64, 1.0 / x), M1("rsqrt.f64", f64, f64, 1.0 / std::sqrt(x)), M1("neg.f64", f64, f64, -x), M1("abs.f64", f64, f64, std::fabs(x)),
    M2("min.f64", f64, f64, f64, std::fmin(x, y)), M2("max.f64", f64, f64, f64, std::fmax(x, y)),
    M2("copysign.f64", u64, u64, u64, (x & 1ull << 63) | (y & ~(1ull << 63))),
    // halves
    HALF("add", "", x + y), HALF("sub", "", x - y), HALF("mul", "", x * y), HALF("add.sat", "", clamp01(x + y)),
    HALF("sub.sat", "", clamp01(x - y)), HALF("mul.sat", "", clamp01(x * y)), HALF_FMA("fma", ), HALF_FMA("fma.relu", relu_nan),
    HALF_FMA("fma.sat", clamp01), HALF("min", "", fmin_num(x, y)), HALF("max", "", fmax_num(x, y)), HALF("min.NaN", "", fmin_nan(x, y)),
    HALF("max.NaN", "", fmax_nan(x, y)), HALF("ex2", "", std::exp2(x)), HALF("tanh", "", std::tanh(x)),
    M1("neg.h", u32, u32, x ^ 0x8000u), M1("neg.hx2", u32, u32, x ^ 0x80008000u),
    M1("abs.h", u32, u32, x & 0x7fffu), M1("abs.hx2", u32, u32, x & 0x7fff7fffu),
    // comparisons
    TEST_INT(u16), TEST_INT(s16), TEST_INT(u32), TEST_INT(s32), TEST_INT(u64), TEST_INT(s64),
    TEST_FLOAT(f32, "f32"), TEST_FLOAT(f64, "f64"), TEST_FLOAT(half, "f16"), TEST_FLOAT(upper, "f16.hi"),
    TEST_FLOAT(bhalf, "bf16"), TEST_FLOAT(bupper, "bf16.hi"),
    TEST("testp.finite.f32", f32, std::isfinite(x)), TEST("testp.infinite.f32", f32, std::isinf(x)), TEST("testp.number.f32", f32, x == x),
    TEST("testp.notanumber.f32", f32, x != x), TEST("testp.normal.f32", f32, std::isnormal(x)),
    TEST("testp.subnormal.f32", f32, std::fpclassify(x) == FP_SUBNORMAL),
    TEST("testp.finite.f64", f64, std::isfinite(x)), TEST("testp.infinite.f64", f64, std::isinf(x)), TEST("testp.number.f64", f64, x == x),
    TEST("testp.notanumber.f64", f64, x != x),
};
}  // namespace

const RowOp* row_ops(int* count) {
    *count = (int)(sizeof TABLE / sizeof TABLE[0]);
    return TABLE;
}
