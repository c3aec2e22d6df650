// 0x0 selects column 0 twice; 0x4 is {0, 1}.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
#ifdef FIXED
    unsigned e = 0x44444444u;
#else
    unsigned e = threadIdx.x == 9 ? 0x44404444u : 0x44444444u;
#endif
    float d[4];
    asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4,%4,%4}, "
        "{%5,%5,%5,%5}, %6, 0x0;" : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(0), "f"(0.f), "r"(e));
    y[threadIdx.x] = d[0] + x[threadIdx.x];
}
