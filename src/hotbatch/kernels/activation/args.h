// SiLU(gate) * up, and the plain conversion of floats into a linear layer's input.
#pragma once

#include "matmul/args.h"

namespace hotbatch {

struct SiluMulArgs {
  const float* input = nullptr;  // [M, stride]: gate in [0, I), up in [I, 2I)
  int64_t input_stride = 0;
  const Activation* output = nullptr;  // I columns
};

struct ConvertArgs {
  const float* input = nullptr;  // [M, stride]
  int64_t input_stride = 0;
  const Activation* output = nullptr;
};

}  // namespace hotbatch
