// Plans a step's attention once for all layers: which query rows meet which keys, in pieces
// that a pool can hand out dynamically.
#pragma once

#include <vector>

#include "attention/args.h"

namespace hotbatch {

class AttentionPlanner {
 public:
  // Rows of a sequence must be at consecutive ascending positions. The result is valid until the
  // next call. `threads` and `stays` only decide how work is cut and shared out, never any result.
  // With `stays` an item falls to the thread whose even share of the step's rows its own begin in:
  // where threads take their rows through all other operations, each has written most of what it
  // then reads, and reads what it writes. On two chips the way between them is dear.
  AttentionWork plan(const Batch& batch, const KvLayout& layout, int q_heads, int window,
                     int threads, bool stays);

 private:
  AttentionWork finish(const Batch& batch, const KvLayout& layout, int q_heads, int window,
                       int owners);

  std::vector<AttentionItem> items_, sorted_;
  std::vector<float> costs_;
  std::vector<int> order_;
  std::vector<AttentionRow> rows_;
  std::vector<AttentionMerge> merges_;
};

}  // namespace hotbatch
