// Not faulty: one output column per instruction, in the order in which test_emulator_alu.py lists its NumPy meanings.
#include <cuda_fp16.h>

#define R(text, ...) { unsigned d; asm volatile(text : "=r"(d) : __VA_ARGS__); out[k++ * n + i] = d; }
#define R2(text) R(text " %0, %1, %2;", "r"(a), "r"(b))
#define R1(text) R(text " %0, %1;", "r"(a))
#define R3(text) R(text " %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c))

extern "C" __global__ void alu32(const unsigned* x, const unsigned* y, const unsigned* z, unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, k = 0;
    if (i >= n) return;
    unsigned a = x[i], b = y[i], c = z[i];
    R2("add.s32") R2("sub.u32") R2("mul.lo.s32") R2("mul.hi.u32") R2("mul.hi.s32") R3("mad.lo.u32") R3("mad.hi.s32")
    R2("div.u32") R2("div.s32") R2("rem.u32") R2("rem.s32") R2("min.u32") R2("min.s32") R2("max.u32") R2("max.s32")
    R1("abs.s32") R1("neg.s32") R2("and.b32") R2("or.b32") R2("xor.b32") R1("not.b32") R2("shl.b32") R2("shr.u32") R2("shr.s32")
    R("shf.l.wrap.b32 %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c)) R("shf.r.wrap.b32 %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c))
    R("shf.r.clamp.b32 %0, %1, %2, %3;", "r"(a), "r"(b), "r"(c & 63)) R("lop3.b32 %0, %1, %2, %3, 0xE8;", "r"(a), "r"(b), "r"(c))
    R3("prmt.b32") R("bfe.u32 %0, %1, %2, %3;", "r"(a), "r"(b & 31), "r"(c & 31)) R("bfe.s32 %0, %1, %2, %3;", "r"(a), "r"(b & 31), "r"(c & 31))
    R("bfi.b32 %0, %1, %2, %3, %4;", "r"(a), "r"(b), "r"(b & 31), "r"(c & 31)) R1("bfind.u32") R1("popc.b32") R1("clz.b32") R1("brev.b32")
    R3("sad.s32") R2("mul24.lo.u32") R2("add.sat.s32") R3("dp4a.s32.s32")
    R("{.reg .pred p; setp.lt.s32 p, %1, %2; selp.b32 %0, %1, %3, p;}", "r"(a), "r"(b), "r"(c))
    R("{.reg .pred p, q; setp.gt.u32 q, %2, %3; setp.lt.and.u32 p, %1, %2, !q; selp.u32 %0, 1, 0, p;}", "r"(a), "r"(b), "r"(c))
    R("{.reg .pred p, q; setp.ge.s32 p|q, %1, %2; selp.u32 %0, 2, 3, q;}", "r"(a), "r"(b))
    R("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, lo};}", "r"(a))
    R("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.s32.s16 %0, h;}", "r"(a)) R("cvt.s32.s8 %0, %1;", "r"(a)) R("cvt.u8.u32 %0, %1;", "r"(a))
    R("{.reg .s32 t; set.le.u32.s32 t, %1, %2; mov.b32 %0, t;}", "r"(a), "r"(b))
    R("{.reg .u64 t; mul.wide.u32 t, %1, %2; shr.u64 t, t, 7; cvt.u32.u64 %0, t;}", "r"(a), "r"(b))
    R("{.reg .s64 t; mul.wide.s32 t, %1, %2; rem.s64 t, t, 1000003; cvt.u32.s64 %0, t;}", "r"(a), "r"(b))
    R("{.reg .b64 t; .reg .b32 u; mov.b64 t, {%1, %2}; brev.b64 t, t; mov.b64 {%0, u}, t;}", "r"(a), "r"(b))
}

#define F(text, ...) { float d; asm volatile(text : "=f"(d) : __VA_ARGS__); out[k++ * n + i] = __float_as_uint(d); }
#define F2(text) F(text " %0, %1, %2;", "f"(a), "f"(b))
#define F1(text) F(text " %0, %1;", "f"(a))

extern "C" __global__ void alu_float(const float* x, const float* y, const float* z, unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, k = 0;
    if (i >= n) return;
    float a = x[i], b = y[i], c = z[i];
    F2("add.f32") F2("sub.f32") F2("mul.f32") F2("div.rn.f32") F("fma.rn.f32 %0, %1, %2, %3;", "f"(a), "f"(b), "f"(c))
    F2("min.f32") F2("max.f32") F2("max.NaN.f32") F1("abs.f32") F1("neg.f32") F2("copysign.f32") F1("rcp.rn.f32") F1("sqrt.rn.f32")
    F2("add.ftz.f32") F2("mul.rz.f32") F2("mul.sat.f32")
    F1("cvt.rni.f32.f32") F1("cvt.rzi.f32.f32") F1("cvt.rmi.f32.f32") F1("cvt.rpi.f32.f32")
    F("{.reg .s32 t; cvt.rzi.s32.f32 t, %1; mov.b32 %0, t;}", "f"(a)) F("{.reg .u32 t; cvt.rni.u32.f32 t, %1; mov.b32 %0, t;}", "f"(a))
    F("{.reg .s32 t; mov.b32 t, %1; cvt.rn.f32.s32 %0, t;}", "f"(a)) F("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h;}", "f"(a))
    F("{.reg .b32 h; cvt.rn.f16x2.f32 h, %1, %2; mov.b32 %0, h;}", "f"(a), "f"(b)) F("{.reg .f64 t; cvt.f64.f32 t, %1; mul.f64 t, t, t; cvt.rn.f32.f64 %0, t;}", "f"(a))
    F("{.reg .pred p; setp.ltu.f32 p, %1, %2; selp.f32 %0, %1, %2, p;}", "f"(a), "f"(b)) F("{.reg .pred p; setp.ne.f32 p, %1, %2; selp.f32 %0, %1, %2, p;}", "f"(a), "f"(b))
    F("{.reg .b16 h; cvt.rn.bf16.f32 h, %1; mov.b32 %0, {h, h};}", "f"(a))
    F1("ex2.approx.f32") F1("lg2.approx.f32") F1("rsqrt.approx.f32") F1("sin.approx.f32") F1("cos.approx.f32") F1("tanh.approx.f32")
}

extern "C" __global__ void alu_half(const unsigned* x, const unsigned* y, const unsigned* z, unsigned* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, k = 0;
    if (i >= n) return;
    unsigned a = x[i], b = y[i], c = z[i];
    R2("add.f16x2") R2("sub.f16x2") R2("mul.f16x2") R3("fma.rn.f16x2") R2("min.f16x2") R2("max.f16x2") R1("abs.f16x2") R1("neg.f16x2")
    R3("fma.rn.relu.f16x2")
    R("{.reg .pred p, q; .reg .b32 t; setp.lt.f16x2 p|q, %1, %2; selp.u32 %0, 1, 0, p; selp.u32 t, 2, 0, q; or.b32 %0, %0, t;}", "r"(a), "r"(b))
    R("set.ge.f16x2.f16x2 %0, %1, %2;", "r"(a), "r"(b))
    R("{.reg .b16 h, g; mov.b32 {h, g}, %1; add.f16 h, h, g; mov.b32 %0, {h, h};}", "r"(a))
    R("{.reg .b16 h, g; mov.b32 {h, g}, %1; cvt.rni.s32.f16 %0, h;}", "r"(a)) R("{.reg .b16 h; cvt.rn.f16.s32 h, %1; mov.b32 %0, {h, h};}", "r"(a))
}
