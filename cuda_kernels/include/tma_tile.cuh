// Tiles of conv_dense_sm90.cu and conv_sparse24_sm90.cu (include/tma_gemm.cuh): which pixels and channels a block's are, and where
// stages, parts of tiles and barriers lie in shared memory.
#pragma once
#include "bulk.cuh"
#include "grouped.cuh"
#include "wgmma.cuh"

constexpr int M64 = TILE_M / 64, OWN = M64 / (PINGPONG ? 1 : TEAMS);  // 64 rows each: of a tile, of a warpgroup
constexpr int TILE_NT = TILE_N / 8, PARTS = TILE_N / BN;
constexpr u32 BOX_N = BOX_ROWS * BOX_COLS;  // of an image
constexpr int STAGE_PIXELS = TAPS > 1 ? BOX_IMAGES * (BOX_ROWS + TAPS - 1) * BOX_COLS : TILE_N;
constexpr int IMAGES = TAPS > 1 ? BOX_IMAGES : 1, IMAGE_NT = TILE_NT / IMAGES;  // products side by side, and their eights of pixels
constexpr int IMAGE_BYTES = STAGE_PIXELS / IMAGES * 128, TAP_BYTES = BOX_COLS * 128;  // from one to the next in a stage
constexpr int TILE_TEAMS = PINGPONG ? 1 : TEAMS;  // that store a tile
constexpr int OTHERS_TURN = 1 + TEAMS;            // the first barrier behind those of sync_threads
constexpr int CLUSTER_M = CLUSTER / CLUSTER_N;    // blocks that have the same pixels; CLUSTER_N: the same weights
constexpr int STORED = (PARTS + CLUSTER_K - 1) / CLUSTER_K;  // parts of 64 rows that a block stores

static_assert(BK == 64, "a pixel's row is 128 bytes, a pattern of the swizzle 8 of them");
static_assert(WGMMA && BM == 64 && THREADS == 128 && TILE_N % BN == 0, "a warpgroup stores 64 rows at a time");
static_assert(TILE_M % 64 == 0 && M64 % TILE_TEAMS == 0 && TEAMS <= 2 && (TEAMS > 1 || !PINGPONG), "whole products of 64 rows");
static_assert(TAPS == 1 || (TILE_N == BOX_IMAGES * BOX_N && BOX_COLS % 8 == 0), "taps begin where a pattern does");
static_assert(STAGE_PIXELS / CLUSTER_M % 8 == 0, "each block copies whole patterns");
static_assert(TAPS == 1 || CLUSTER_M == 1 || (IMAGES == 1 && (BOX_ROWS + TAPS - 1) % CLUSTER_M == 0), "and whole rows of a box");
static_assert(CLUSTER_K == 1 || (CLUSTER == 1 && SPLIT == 1 && !PINGPONG), "each block of the cluster has one share");
static_assert(!RES_AHEAD || (RES && SLOTS == OWN * STORED && !OUT_LINEAR && (!SPLIT || CLUSTER_K > 1)), "vectors of a tile that is sure to be stored");
static_assert(!OUT_TMA || (!OUT_LINEAR && !D2S && !RES_AHEAD && (!SPLIT || CLUSTER_K > 1)), "vectors of a tile that is sure to be stored");
static_assert(!IN_LINEAR && !PRO && !GATE && !NORM, "pixels go from memory to tensor cores as they are");

// The first of 64 channels, and the number of the columns' tile, of a share in this block.
struct Origin {
  int m64, column;
};
__device__ __forceinline__ Origin origin(const ConvParams& p, const Share& share) {
  constexpr int WIDE = TILE_M * CLUSTER_M;
  const int columns = (output_rows(p) + WIDE - 1) / WIDE, rank = CLUSTER > 1 ? cluster_rank() : 0;
  const int m = share.tile % columns * CLUSTER_M + rank / CLUSTER_N, n = share.tile / columns * CLUSTER_N + rank % CLUSTER_N;
  return {m * M64, n};
}

// Of a tile that is a box: its first pixel.
__device__ __forceinline__ FirstPixel corner(const ConvParams& p, int column) {
  const int wide = (p.q + BOX_COLS - 1) / BOX_COLS, many = (p.p + BOX_ROWS - 1) / BOX_ROWS * wide, rest = column % many;
  return {rest % wide * BOX_COLS, rest / wide * BOX_ROWS, column / many * BOX_IMAGES};
}
// Its pixel n.
// NVRTC 13.0 takes (2t + 1) % 32 / 8 for 2t + 1 where it knows that t < 4: an empty instruction hides that.
__device__ __forceinline__ FirstPixel pixel_of(const FirstPixel& corner, u32 n) {
  asm("" : "+r"(n));
  const int w = n % BOX_COLS, h = n % BOX_N / BOX_COLS, image = n / BOX_N;
  return {corner.w + w, corner.h + h, corner.n + image};
}
// Where the tile's pixel n lies in y.
__device__ __forceinline__ int tile_offset(const ConvParams& p, int column, const FirstPixel& corner, u32 n) {
  if (TAPS == 1) return output_offset(p, column * TILE_N + n);
  const FirstPixel at = pixel_of(corner, n);
  return at.h < p.p && at.w < p.q ? output_offset(p, (at.n * p.p + at.h) * p.q + at.w) : -1;
}

// Of the block's group.
__device__ __forceinline__ int first_channel(const ConvParams& p) {
#if GROUPED
  return blockIdx.y * p.x_group;
#else
  return 0;
#endif
}

// The share behind one in this block.
__device__ __forceinline__ Share after(const ConvParams& p, const Share& share) {
  if (CLUSTER_K > 1) return {share.tile, share.first, 0};
  return next_share(p, share);
}

// The stages in shared memory; a turn is a stage that the block has come to, counted over all its tiles. A kernel's Product has
//   A_BYTES, E_BYTES   of 64 rows of weights and 64 channels of a tap, and of their metadata
//   ARRIVING           of A_BYTES, those that are copied to shared memory
//   RESIDENT           what goes to registers instead is loaded once, for all tiles
//   begin(p, m64, share)                      begins to load what goes to registers
//   multiply(ring, turn, first, count, acc)   adds the products of `count` stages from `turn` on, and leaves all but the last;
//                                             `first`: of the tile's 64 rows, where the warpgroup's begin
// Behind all stages: of each warpgroup the parts of the tile that it stores, and, where threads do, a table of where pixels lie;
// barriers, of stages and, OUT_TMA, of slots: a warpgroup's `number`-th part has slot(team, number).
template <class Product>
struct Ring {
  static constexpr int B_AT = M64 * TAPS * Product::ARRIVING, BYTES = B_AT + STAGE_PIXELS * 128;
  static constexpr int STAGING_AT = STAGES * BYTES, TABLE_AT = STAGING_AT + TEAMS * SLOTS * STAGING_BYTES;
  static constexpr int FULL_AT = TABLE_AT + (OUT_TMA ? 0 : TEAMS * ROW_TABLE_BYTES), EMPTY_AT = FULL_AT + STAGES * 8;
  static constexpr int READY_AT = EMPTY_AT + STAGES * 8, STAGED_AT = READY_AT + TEAMS * SLOTS * 8;
  static constexpr int WARPS_READING = 4 * TILE_TEAMS * CLUSTER;  // which leave a stage
  static_assert(B_AT % 1024 == 0, "pixels begin at a pattern of the swizzle");
  static_assert(CLUSTER_K == 1 || TILE_M * TILE_N * 4 <= STAGING_AT, "all of a tile's sums fit over the stages");
  u32 smem;

  __device__ __forceinline__ u32 stage(u32 turn) const { return smem + turn % STAGES * BYTES; }
  __device__ __forceinline__ u32 full(u32 turn) const { return smem + FULL_AT + turn % STAGES * 8; }
  __device__ __forceinline__ u32 empty(u32 turn) const { return smem + EMPTY_AT + turn % STAGES * 8; }
  __device__ __forceinline__ void wait_until_full(u32 turn) const { mbarrier_wait(full(turn), turn / STAGES % 2); }
  __device__ __forceinline__ void wait_until_empty(u32 turn) const { mbarrier_wait(empty(turn), turn / STAGES % 2 ^ 1); }
  __device__ __forceinline__ u32 index(int team, u32 number) const { return team * SLOTS + number % SLOTS; }
  __device__ __forceinline__ u32 slot(int team, u32 number) const { return smem + STAGING_AT + index(team, number) * STAGING_BYTES; }
  __device__ __forceinline__ u32 ready(int team, u32 number) const { return smem + READY_AT + index(team, number) * 8; }
  __device__ __forceinline__ u32 staged(int team, u32 number) const { return smem + STAGED_AT + index(team, number) * 8; }
  __device__ __forceinline__ void init() const {
    for (int slot = 0; OUT_TMA && slot < TEAMS * SLOTS; ++slot) {
      mbarrier_init(smem + READY_AT + slot * 8, 1);
      mbarrier_init(smem + STAGED_AT + slot * 8, THREADS / 32);
    }
    for (u32 turn = 0; turn < STAGES; ++turn) {
      mbarrier_init(full(turn), 1);
      mbarrier_init(empty(turn), WARPS_READING);
    }
    fence_mbarrier_init();
  }
  // A warp has read the stage: a lane tells each block whose copies come there.
  __device__ __forceinline__ void leave(u32 turn) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    if (CLUSTER == 1 && lane == 0) mbarrier_arrive(empty(turn));
    if (CLUSTER > 1 && lane < CLUSTER) mbarrier_arrive_at(empty(turn), lane);
  }
};

// A product's sums: those of an image's pixels.
__device__ __forceinline__ float (&sums_of(float (&acc)[TILE_NT][4], int image))[IMAGE_NT][4] {
  return *reinterpret_cast<float(*)[IMAGE_NT][4]>(&acc[image * IMAGE_NT]);
}

// Whether this block stores that part of the tile's 64 rows from m0 on.
__device__ __forceinline__ bool is_stored(const ConvParams& p, const Origin& tile, int m0, int part, int rank) {
  const bool none = TAPS == 1 && tile.column * TILE_N + part * BN >= p.n * p.p * p.q;
  return m0 < output_rows(p) && !none && part % CLUSTER_K == rank * (CLUSTER_K > 1);
}
