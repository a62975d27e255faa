// The ragged batch of one step, as every kernel sees it. All arrays are int32 and belong to the
// caller for the length of the step.
#pragma once

#include <cstdint>

namespace hotbatch {

struct Batch {
  int rows = 0;       // tokens of the step, N
  int sequences = 0;  // B
  const int32_t* token_ids = nullptr;     // [N]
  const int32_t* positions = nullptr;     // [N]
  const int32_t* slots = nullptr;         // [N], block id * block size + offset
  const int32_t* seq_starts = nullptr;    // [B + 1], first row of each sequence
  const int32_t* context_lens = nullptr;  // [B], keys of each sequence, this step's included
  const int32_t* block_table = nullptr;   // [B, max_blocks]
  int max_blocks = 0;
  const int32_t* logit_rows = nullptr;  // [S], rows whose logits are wanted
  int logit_count = 0;
};

}  // namespace hotbatch
