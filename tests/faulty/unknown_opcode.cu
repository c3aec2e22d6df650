// An opcode the emulator has no meaning for, on line 8.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
    int i = threadIdx.x;
    unsigned d;
#ifdef FIXED
    d = i + i;
#else
    asm volatile("vadd.u32.u32.u32 %0, %1, %1;" : "=r"(d) : "r"(i));
#endif
    y[i] = x[i] + d;
}
