// Which VEC channels of which pixel a thread owns: neighbouring threads own neighbouring channels where VEC is 8 and
// neighbouring pixels where it is 1, whole sectors either way.
#pragma once

struct Owned {
  int image, c, pixel;
};

// `groups`: channels of the padded tensor / VEC. False: the tensor has no place for this thread of 256.
__device__ __forceinline__ bool place_of_thread(int n, int groups, int pixels, Owned& at) {
  const long long id = static_cast<long long>(blockIdx.x) * 256 + threadIdx.x;
  if (id >= static_cast<long long>(n) * groups * pixels) return false;
  at.c = static_cast<int>(VEC == 8 ? id % groups : id / pixels % groups) * VEC;
  at.pixel = static_cast<int>(VEC == 8 ? id / groups % pixels : id % pixels);
  at.image = static_cast<int>(id / pixels / groups);
  return true;
}
