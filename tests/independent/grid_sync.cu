// Cooperative groups' barrier of a grid: its code is NVIDIA's; the kernel, which is wrong unless all that the grid has stored is seen
// behind each barrier, and main() are ours. The barrier's memory comes with the launch (cuda_programs.py, Device.image).
#include <cooperative_groups.h>

#include <cstdio>

__global__ void rounds(int* data, int count) {
    const auto grid = cooperative_groups::this_grid();
    const int n = gridDim.x * blockDim.x, i = blockIdx.x * blockDim.x + threadIdx.x;
    for (int r = 1; r <= count; r++) {
        data[r * n + i] = data[(r - 1) * n + (i + blockDim.x + 1) % n] + 1;  // what a thread of the next block left
        grid.sync();
    }
}

int main() {
    int count = 3, blocks = 5, threads = 64, n = blocks * threads, wrong = 0, *data;
    cudaMalloc((void**)&data, (count + 1) * n * sizeof(int));
    cudaMemset(data, 0, (count + 1) * n * sizeof(int));
    void* arguments[] = {&data, &count};
    const cudaError_t error = cudaLaunchCooperativeKernel((const void*)rounds, dim3(blocks), dim3(threads), arguments, 0, nullptr);
    int* last = (int*)malloc(n * sizeof(int));
    cudaMemcpy(last, data + count * n, n * sizeof(int), cudaMemcpyDeviceToHost);
    for (int i = 0; i < n; i++) wrong += last[i] != count;
    if (error || wrong) printf("Failed: error %d, %d values wrong\n", (int)error, wrong);
    else printf("Passed\n");
    return error || wrong;
}
