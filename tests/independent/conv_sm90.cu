// CUTLASS's convolution for Hopper: pixels by im2col tensor maps, filters by tiled ones, warp-specialised. The host compares with loops.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cute/tensor.hpp>
#include <cutlass/kernel_hardware_info.hpp>
#include <cutlass/conv/collective/collective_builder.hpp>
#include <cutlass/conv/convolution.h>
#include <cutlass/conv/device/conv_universal_adapter.hpp>
#include <cutlass/conv/kernel/conv_universal.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>

using namespace cute;
using Value = cutlass::half_t;

template <int DIMS> struct LayoutOf;
template <> struct LayoutOf<1> { using type = cutlass::layout::TensorNWC; };
template <> struct LayoutOf<2> { using type = cutlass::layout::TensorNHWC; };
template <> struct LayoutOf<3> { using type = cutlass::layout::TensorNDHWC; };

template <int DIMS>
struct Problem {  // sizes, padding in front and behind, strides and dilations: D, H, W
    int n, c, k, size[3], filter[3], front[3], behind[3], stride[3], dilation[3];
    int out(int d) const { return (size[d] + front[d] + behind[d] - dilation[d] * (filter[d] - 1) - 1) / stride[d] + 1; }
};

int pick(int lo, int hi) { return lo + rand() % (hi - lo + 1); }

template <class T>
T* on_device(std::vector<T> const& x) {
    T* p;
    cudaMalloc(&p, x.size() * sizeof(T));
    cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice);
    return p;
}

// Which of the last DIMS of (D, H, W) a dimension is.
template <int DIMS, class F>
std::vector<float> reference(Problem<DIMS> const& p, F x, std::vector<float> const& w) {
    std::vector<float> y;
    for (int n = 0; n < p.n; n++)
        for (int i = 0; i < p.out(0); i++)
            for (int j = 0; j < p.out(1); j++)
                for (int l = 0; l < p.out(2); l++)
                    for (int k = 0; k < p.k; k++) {
                        float sum = 0;
                        for (int t = 0; t < p.filter[0] * p.filter[1] * p.filter[2]; t++) {
                            const int r[3] = {t / p.filter[2] / p.filter[1], t / p.filter[2] % p.filter[1], t % p.filter[2]};
                            const int o[3] = {i, j, l};
                            int at[3];
                            bool inside = true;
                            for (int d = 0; d < 3; d++) {
                                at[d] = o[d] * p.stride[d] - p.front[d] + r[d] * p.dilation[d];
                                inside &= at[d] >= 0 && at[d] < p.size[d];
                            }
                            for (int c = 0; inside && c < p.c; c++)
                                sum += x(n, at[0], at[1], at[2], c) * w[(k * p.filter[0] * p.filter[1] * p.filter[2] + t) * p.c + c];
                        }
                        y.push_back(sum);
                    }
    return y;
}

template <int DIMS, class Tile, class Schedule>
struct Kernel {
    using Layout = typename LayoutOf<DIMS>::type;
    using Cluster = Shape<_1, _1, _1>;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
        Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, float, Layout, 4, float, Layout, 4,
        cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
    using Mainloop = typename cutlass::conv::collective::CollectiveBuilder<cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
        cutlass::conv::Operator::kFprop, Value, Layout, 8, Value, Layout, 8, float, Tile, Cluster,
        cutlass::conv::collective::StageCount<3>, Schedule>::CollectiveOp;
    using ProblemShape = cutlass::conv::ConvProblemShape<cutlass::conv::Operator::kFprop, DIMS>;
    using Conv = cutlass::conv::device::ConvUniversalAdapter<cutlass::conv::kernel::ConvUniversal<ProblemShape, Mainloop, Epilogue>>;
};

int failures = 0, cases = 0;

template <int DIMS, class Tile, class Schedule = cutlass::conv::collective::KernelScheduleAuto>
void run(char const* name, Problem<DIMS> p) {
    using K = Kernel<DIMS, Tile, Schedule>;
    using Conv = typename K::Conv;
    const int pixels = p.size[0] * p.size[1] * p.size[2], taps = p.filter[0] * p.filter[1] * p.filter[2];
    std::vector<Value> x(p.n * pixels * p.c), w(p.k * taps * p.c);
    std::vector<float> fx(x.size()), fw(w.size());
    for (size_t i = 0; i < x.size(); i++) x[i] = Value(fx[i] = pick(-4, 4));
    for (size_t i = 0; i < w.size(); i++) w[i] = Value(fw[i] = pick(-4, 4));
    const std::vector<float> want = reference(p, [&](int n, int d, int h, int l, int c) {
        return fx[(((n * p.size[0] + d) * p.size[1] + h) * p.size[2] + l) * p.c + c]; }, fw);

    typename K::ProblemShape::TensorExtent act, flt;
    typename K::ProblemShape::SpatialExtent front, behind, stride, dilation;
    act[0] = p.n, act[DIMS + 1] = p.c, flt[0] = p.k, flt[DIMS + 1] = p.c;
    for (int d = 0; d < DIMS; d++) {
        const int at = 3 - DIMS + d;
        act[d + 1] = p.size[at], flt[d + 1] = p.filter[at];
        front[d] = p.front[at], behind[d] = p.behind[at], stride[d] = p.stride[at], dilation[d] = p.dilation[at];
    }
    typename K::ProblemShape shape(cutlass::conv::Mode::kCrossCorrelation, act, flt, front, behind, stride, dilation, 1);
    float* y = on_device(std::vector<float>(want.size(), 99));
    typename K::Epilogue::StrideD out{};
    for_each(make_seq<DIMS + 1>{}, [&](auto i) { get<0, i>(out) = shape.stride_C[DIMS - i]; });
    typename Conv::Arguments arguments{};
    arguments.problem_shape = shape;
    arguments.mainloop = {on_device(x), on_device(w)};
    arguments.epilogue = {{1.0f, 0.0f}, y, out, y, out};
    Conv conv;
    const bool can = Conv::can_implement(arguments) == cutlass::Status::kSuccess;
    void* workspace;
    cudaMalloc(&workspace, Conv::get_workspace_size(arguments) + 16);
    const bool ran = can && conv.run(arguments, workspace) == cutlass::Status::kSuccess;
    std::vector<float> got(want.size());
    cudaMemcpy(got.data(), y, got.size() * 4, cudaMemcpyDeviceToHost);
    int wrong = 0;
    for (size_t i = 0; i < want.size(); i++) wrong += got[i] != want[i];
    cases++, failures += wrong || !ran;
    printf("%s: %s, %d of %d wrong%s\n", wrong || !ran ? "Failed" : "ok", name, wrong, (int)want.size(), can ? "" : " (refused)");
    fflush(stdout);
}

// Any problem: sizes of 1 to 14, up to 5 taps, stride and dilation to 4.
Problem<2> drawn() {
    for (;;) {
        Problem<2> p{pick(1, 3), 8 * pick(1, 9), 4 * pick(1, 20), {1, 1, 1}, {1, 1, 1}, {}, {}, {1, 1, 1}, {1, 1, 1}};
        for (int d = 1; d < 3; d++) {
            p.size[d] = pick(1, 14), p.filter[d] = pick(1, 5), p.front[d] = pick(0, 4), p.behind[d] = pick(0, 4);
            p.stride[d] = pick(1, 4), p.dilation[d] = pick(1, 4);
        }
        if (p.size[1] + p.front[1] + p.behind[1] > p.dilation[1] * (p.filter[1] - 1) &&
            p.size[2] + p.front[2] + p.behind[2] > p.dilation[2] * (p.filter[2] - 1))
            return p;
    }
}

int main(int argc, char** argv) {  // [problems to draw, seed]
    using Wide = Shape<_64, _64, Shape<_64>>;
    if (argc > 2) {
        srand(atoi(argv[2]));
        for (int i = 0; i < atoi(argv[1]); i++) {
            const Problem<2> p = drawn();
            char name[200];
            snprintf(name, sizeof name, "n %d c %d k %d, %dx%d by %dx%d, padding %d %d %d %d, stride %d %d, dilation %d %d", p.n, p.c, p.k,
                p.size[1], p.size[2], p.filter[1], p.filter[2], p.front[1], p.behind[1], p.front[2], p.behind[2], p.stride[1],
                p.stride[2], p.dilation[1], p.dilation[2]);
            run<2, Wide>(name, p);
        }
        printf("%s: %d of %d\n", failures ? "Failed" : "Passed", cases - failures, cases);
        return failures > 0;
    }
    using Half = Shape<_128, _64, Shape<_32>>;
    using Plane = Problem<2>;
    run<2, Wide>("3x3", Plane{2, 64, 64, {1, 7, 6}, {1, 3, 3}, {0, 1, 1}, {0, 1, 1}, {1, 1, 1}, {1, 1, 1}});
    run<2, Wide>("remainders", Plane{3, 72, 40, {1, 5, 9}, {1, 3, 3}, {0, 1, 1}, {0, 1, 1}, {1, 1, 1}, {1, 1, 1}});
    run<2, Wide>("strides", Plane{2, 64, 64, {1, 11, 13}, {1, 3, 3}, {0, 1, 1}, {0, 1, 1}, {1, 2, 2}, {1, 1, 1}});
    run<2, Wide>("strides of 3 and 2, uneven padding", Plane{2, 24, 64, {1, 9, 12}, {1, 3, 2}, {0, 0, 2}, {0, 1, 0}, {1, 3, 2}, {1, 1, 1}});
    run<2, Wide>("dilation", Plane{1, 64, 64, {1, 12, 11}, {1, 3, 3}, {0, 2, 3}, {0, 2, 3}, {1, 1, 1}, {1, 2, 3}});
    run<2, Wide>("1x1", Plane{3, 128, 72, {1, 6, 5}, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}});
    run<2, Wide>("5x7, no padding", Plane{2, 16, 64, {1, 9, 12}, {1, 5, 7}, {0, 0, 0}, {0, 0, 0}, {1, 1, 1}, {1, 1, 1}});
    run<2, Half>("32 channels a step", Plane{2, 40, 64, {1, 9, 8}, {1, 3, 3}, {0, 1, 1}, {0, 1, 1}, {1, 1, 2}, {1, 1, 1}});
    run<1, Wide>("one dimension", Problem<1>{3, 64, 64, {1, 1, 50}, {1, 1, 5}, {0, 0, 2}, {0, 0, 1}, {1, 1, 2}, {1, 1, 1}});
    run<3, Wide>("three dimensions", Problem<3>{2, 64, 64, {4, 5, 3}, {3, 2, 3}, {1, 0, 1}, {0, 1, 1}, {1, 2, 1}, {1, 1, 1}});
    printf("%s: %d of %d\n", failures ? "Failed" : "Passed", cases - failures, cases);
    return failures;
}
