// RMS norm (Zhang & Sennrich, arXiv 1910.07467), written straight into the form that the next
// linear layer reads.
#pragma once

#include "matmul/args.h"

namespace hotbatch {

struct NormArgs {
  const float* input = nullptr;  // [M, stride]
  int64_t input_stride = 0;
  const float* weight = nullptr;  // [K]
  float eps = 1e-5f;
  const Activation* output = nullptr;
};

}  // namespace hotbatch
