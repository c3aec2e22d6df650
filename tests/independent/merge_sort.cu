// CUB's merge sort: a chain of launches that, on Hopper, may begin before the one ahead has ended (programmatic dependent launch). Its
// kernels, their waits and how they are launched are NVIDIA's; the input, the check and main() are ours.
#include <algorithm>
#include <cstdio>
#include <vector>

#include <cub/device/device_merge_sort.cuh>

struct Less {
    __device__ bool operator()(int a, int b) const { return a < b; }
};

int main(int argc, char** argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 9000;
    std::vector<int> x(n), y(n);
    for (int i = 0; i < n; i++) x[i] = (int)(i * 2654435761u) >> 8;
    int* data;
    void* room = nullptr;
    size_t bytes = 0;
    cudaMalloc((void**)&data, n * sizeof(int));
    cudaMemcpy(data, x.data(), n * sizeof(int), cudaMemcpyHostToDevice);
    cudaError_t error = cub::DeviceMergeSort::SortKeys(nullptr, bytes, data, n, Less());
    cudaMalloc(&room, bytes);
    if (!error) error = cub::DeviceMergeSort::SortKeys(room, bytes, data, n, Less());
    cudaMemcpy(y.data(), data, n * sizeof(int), cudaMemcpyDeviceToHost);
    std::sort(x.begin(), x.end());
    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += x[i] != y[i];
    if (error || wrong) printf("Failed: error %d, %d values wrong\n", (int)error, wrong);
    else printf("Passed\n");
    return error || wrong;
}
