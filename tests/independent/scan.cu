// CUB's scan: blocks look back at what those before them have left, by decoupled look-back (NVR-2016-002): its kernels, their order
// among blocks included, are NVIDIA's; the input, the check and main() are ours. Values that are no number are published in two
// steps, which fences have to keep in order: the value, a fence, its status; the status, a fence, the value.
#include <cstdio>
#include <vector>

#include <cub/device/device_scan.cuh>

struct Two {
    int sum, alternating;
};
struct Add {
    __host__ __device__ Two operator()(const Two& a, const Two& b) const { return {a.sum + b.sum, a.alternating + b.alternating}; }
};

int main(int argc, char** argv) {
    const int n = argc > 1 ? atoi(argv[1]) : 20000;
    std::vector<Two> x(n), y(n);
    for (int i = 0; i < n; i++) x[i].sum = (i * 2654435761u) >> 20, x[i].alternating = i % 2 ? -i : i;
    Two *in, *out;
    void* room = nullptr;
    size_t bytes = 0;
    cudaMalloc((void**)&in, n * sizeof(Two)), cudaMalloc((void**)&out, n * sizeof(Two));
    cudaMemcpy(in, x.data(), n * sizeof(Two), cudaMemcpyHostToDevice);
    cudaError_t error = cub::DeviceScan::InclusiveScan(nullptr, bytes, in, out, Add(), n);
    cudaMalloc(&room, bytes);
    if (!error) error = cub::DeviceScan::InclusiveScan(room, bytes, in, out, Add(), n);
    cudaMemcpy(y.data(), out, n * sizeof(Two), cudaMemcpyDeviceToHost);
    Two total{0, 0};
    int wrong = 0;
    for (int i = 0; i < n; i++) {
        total = Add()(total, x[i]);
        wrong += y[i].sum != total.sum || y[i].alternating != total.alternating;
    }
    if (error || wrong) printf("Failed: error %d, %d sums wrong\n", (int)error, wrong);
    else printf("Passed\n");
    return error || wrong;
}
