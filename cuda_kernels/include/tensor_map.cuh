// A tensor map, 128 bytes that the host's driver encodes (cuda_kernels/tensor_maps.py): where a tensor lies, and which boxes of it
// bulk copies take (PTX ISA 5.5.8).
#pragma once

struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};
