// Three warpgroups of 168 registers a thread: one gives back what two take. FAULT names what is wrong; 0: nothing.
template <int N>
__device__ void take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ void leave() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

extern "C" __global__ __launch_bounds__(384) void kernel(float* y) {
    const unsigned t = threadIdx.x, group = t / 128;
    if (group == 0) {
        if (FAULT == 1 && t / 32 == 2) leave<48>();
        else if (FAULT == 2) leave<176>();
        else if (FAULT != 3 || t / 32 != 1) leave<40>();
    } else if (FAULT == 4) take<240>();
    else if (FAULT == 5) take<160>();
    else take<232>();
    y[t] = t;
}
