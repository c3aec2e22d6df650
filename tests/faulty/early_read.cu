// Reads what the launch ahead may still be writing.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
#ifdef FIXED
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    float v = *(const volatile float*)(x + threadIdx.x);
    asm volatile("griddepcontrol.wait;" ::: "memory");
    y[threadIdx.x] = v;
}
