// Tensors and constants that may be repeated along some axes: a stride of 0 repeats.
#pragma once
#include "tensor.cuh"

// Of an element. Where no one takes pixels apart, all of them are the columns of one row.
struct Place {
  int image, channel, row, column;
};

struct Spread {
  int n, block, row, column;  // strides in elements
  int log2v, mask;            // of vectors of channels; log2v 31 where channels are repeated
  __device__ __forceinline__ long long at(const Place& p) const {
    return static_cast<long long>(p.image) * n + static_cast<long long>(p.channel >> log2v) * block +
           static_cast<long long>(p.row) * row + static_cast<long long>(p.column) * column + (p.channel & mask);
  }
};

struct Source {
  const void* at;
  Spread spread;
};
