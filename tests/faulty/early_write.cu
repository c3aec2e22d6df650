// Warp 1 overwrites what the launch ahead may still be reading.
extern "C" __global__ void kernel(const float* x, float* y, int n) {
#ifndef FIXED
    if (threadIdx.x < 32)
#endif
        asm volatile("griddepcontrol.wait;" ::: "memory");
    y[threadIdx.x] = 1.f;
}
