// Half of the lanes store a register that nothing has written.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    int i = threadIdx.x;
    float v;
#ifdef FIXED
    asm volatile("{.reg .pred p; .reg .f32 t; setp.lt.s32 p, %1, 40; mov.f32 t, 0f00000000; @p mov.f32 t, %2; mov.f32 %0, t;}" : "=f"(v) : "r"(i), "f"(x[i]));
#else
    asm volatile("{.reg .pred p; .reg .f32 t; setp.lt.s32 p, %1, 40; @p mov.f32 t, %2; mov.f32 %0, t;}" : "=f"(v) : "r"(i), "f"(x[i]));
#endif
    if (i < n) y[i] = v;
}
