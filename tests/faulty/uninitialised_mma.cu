// An mma reads an accumulator that nothing has written.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    unsigned a = __float_as_uint(x[threadIdx.x]);
    float d;
    asm volatile(
        "{.reg .f32 c, e, f, g;\n"
#ifdef FIXED
        "mov.f32 c, 0f00000000;\n"
#endif
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, e, f, g}, {%1, %1, %1, %1}, {%1, %1}, {c, c, c, c};}"
        : "=f"(d) : "r"(a));
    if (threadIdx.x < n) y[threadIdx.x] = d;
}
