// Token embedding: a row of the table as it lies in the model file, decoded to floats.
#pragma once

#include "csrc/raw_tensor.h"

namespace hotbatch {

struct EmbedArgs {
  const RawRows* table = nullptr;     // [vocabulary, hidden]
  const int32_t* token_ids = nullptr;  // [M]
  float* output = nullptr;            // [M, stride]
  int64_t output_stride = 0;
};

}  // namespace hotbatch
