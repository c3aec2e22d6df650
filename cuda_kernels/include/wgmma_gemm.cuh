// The main loop of conv_dense_sm90.cu and conv_sparse24_sm90.cu: that of implicit_gemm.cuh for products of Hopper's warpgroups,
// which tensor cores read from shared memory while the warps go on. Loaders, stages, shares of K and epilogue are the same.
#pragma once
#include "implicit_gemm.cuh"
#include "wgmma.cuh"

static_assert(BK == 64, "a pixel's row is 128 bytes, a pattern of the swizzle 8 of them");
static_assert(WARPS_N == 1 && WARPS_M % 4 == 0, "the four warps of a warpgroup multiply the same pixels");
static_assert(!IN_LINEAR && !PRO && !GATE && !NORM, "pixels go from memory to tensor cores as they are");
static_assert(STAGES >= 3, "a stage that is filled, one that is read, and one that the last products in flight still read");

// A Product as implicit_gemm.cuh has it, but that its products are asynchronous:
//   fetch(stage, step)          loads a step's weights, and metadata, into one of two sets of registers, in turn
//   multiply(pixels, step, acc) issues that step's products as a group; pixels: where the stage has them
//
//   turn t      step 0             step 1           ..   last step                A step's products are in flight while
//   tensor      t, 0               t, 1                  t, last                  those before them are waited for and
//   waited for  t - 1, last        t, 0                  t, last - 1              the next weights take their registers.
//   fetch       t, 1               t, 2                  barrier; t + 1, 0
//   copies      t + STAGES - 2     into the stage of turn t - 2: every warp has waited for its products before the barrier
template <class Product>
__device__ __forceinline__ void convolve_with_wgmma(const ConvParams& all) {
  using In = Stage<Product>;
  constexpr int A_TILE = Product::A_TILE, E_PAIR = Product::E_PAIR, E_BYTES = Product::E_BYTES, STEPS = Product::STEPS;
  constexpr int AHEAD = STAGES - 2, LAST_STAGE = (STAGES - 1) * In::BYTES;
  static_assert(STEPS % 2 == 0, "a stage's first step has the same registers in every turn");
  static_assert(In::B_AT % 1024 == 0 && In::BYTES % 1024 == 0 && !In::EARLY, "pixels begin where a pattern of the swizzle does");
  extern __shared__ __align__(1024) char patterns[];
  const u32 smem = smem_u32(patterns);
  const ConvParams& p = of_group<A_TILE, E_PAIR>(all);
  const int m_tiles = (output_rows(p) + BM - 1) / BM;
  const long long a_stride = static_cast<long long>(p.k_tiles) * A_TILE, e_stride = static_cast<long long>(p.k_tiles) * E_PAIR;
  release_next_launch();

  for (Share share = first_share(p); share.count; share = next_share(p, share)) {
    const int m0 = share.tile % m_tiles * BM, pixel0 = share.tile / m_tiles * BN;
    WeightLoader<A_TILE> weights;
    weights.init(reinterpret_cast<const char*>(p.w) + m0 / 16 * a_stride + share.first * A_TILE, a_stride, p.m16 - m0 / 16);
    WeightLoader<E_PAIR ? E_PAIR : 16, 32> metadata;
    if (E_BYTES)
      metadata.init(reinterpret_cast<const char*>(p.meta) + m0 / 32 * e_stride + share.first * E_PAIR, e_stride,
                    (p.m16 + 1) / 2 - m0 / 32);
    Pixels pixels;
    pixels.init(p, pixel0, share.first);
    Product product;
    float acc[MT][NT][4] = {};

    auto load_weights = [&](u32 to, bool wanted) {
      weights.load(to, wanted);
      if (E_BYTES) metadata.load(to + In::E_AT, wanted);
    };
    auto behind = [](u32 stage) { return stage == LAST_STAGE ? 0 : stage + In::BYTES; };
    auto wait_for_stage = [&] {
      cp_async_wait<AHEAD - 1>();
      fence_proxy_async();
      __syncthreads();
    };

    // Weights first, for they depend on no other launch. `read`, `write`: bytes from the lowest stage.
    for (int stage = 0; stage < AHEAD; ++stage) load_weights(smem + stage * In::BYTES, stage < share.count);
    wait_for_previous_launch();
    for (int stage = 0; stage < AHEAD; ++stage) {
      pixels.load(p, smem + stage * In::BYTES + In::B_AT, stage < share.count);
      cp_async_commit();
    }
    u32 read = 0, write = AHEAD * In::BYTES;
    wait_for_stage();
    product.fetch(smem, 0);
    keep_apart(acc);
    for (int tile = 0; tile < share.count; ++tile) {
      const u32 here = smem + read, to = smem + write;
      write = behind(write);
      read = behind(read);
      const u32 next = tile + 1 < share.count ? smem + read : here;  // after the last turn nobody multiplies what is fetched
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        product.multiply(here + In::B_AT, step, acc);
        if (step == 0) {
          load_weights(to, tile + AHEAD < share.count);
          pixels.load(p, to + In::B_AT, tile + AHEAD < share.count);
          cp_async_commit();
        }
        wgmma_wait<1>();
        if (step == STEPS - 1) wait_for_stage();
        product.fetch(step < STEPS - 1 ? here : next, (step + 1) % STEPS);
      }
    }
    wgmma_wait<0>();
    keep_apart(acc);
    if (sum_splits(p, share, acc, smem))
      epilogue(p, acc, smem, smem + STAGING_BYTES, m0, [&](int n) { return output_offset(p, pixel0 + n); });
  }
}
