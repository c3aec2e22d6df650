// Lanes that leave a loop one by one, and flags that each keeps from its own last round: the kernel is ours and plain, its branches,
// predicates and where lanes meet again are the compiler's. main() computes the same on the host.
#include <cstdio>
#include <vector>

__host__ __device__ inline int walk(unsigned v) {
    int steps = 0, highs = 0;
    bool high, third;
    do {
        high = v > 64, third = v % 3 == 0;
        highs += high;
        if (high && third) highs += 2;
        v = v & 1 ? 3 * v + 1 : v / 2;
        if (v == 40) break;
    } while (v != 1 && ++steps < 150);
    return steps + (highs << 10) + (high ? 1 << 22 : 0) + (third ? 1 << 23 : 0);
}

__global__ void walks(const unsigned* x, int* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = walk(x[i]);
}

int main() {
    const int n = 1000;
    std::vector<unsigned> x(n);
    std::vector<int> y(n);
    for (int i = 0; i < n; i++) x[i] = 3 + (i * 2654435761u >> 22);
    unsigned* in;
    int *out, wrong = 0;
    cudaMalloc((void**)&in, n * sizeof(int)), cudaMalloc((void**)&out, n * sizeof(int));
    cudaMemcpy(in, x.data(), n * sizeof(int), cudaMemcpyHostToDevice);
    walks<<<(n + 127) / 128, 128>>>(in, out, n);
    const cudaError_t error = cudaPeekAtLastError();
    cudaMemcpy(y.data(), out, n * sizeof(int), cudaMemcpyDeviceToHost);
    for (int i = 0; i < n; i++) wrong += y[i] != walk(x[i]);
    if (error || wrong) printf("Failed: error %d, %d values wrong\n", (int)error, wrong);
    else printf("Passed\n");
    return error || wrong;
}
