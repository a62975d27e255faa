// Plans a step's attention once for all layers: which query rows meet which keys, in pieces
// that a pool can hand out dynamically.
#pragma once

#include <vector>

#include "attention/args.h"

namespace hotbatch {

class AttentionPlanner {
 public:
  // Rows of a sequence must be at consecutive ascending positions. The result is valid until the
  // next call. `threads` only decides how finely work is cut, never any result.
  AttentionWork plan(const Batch& batch, const KvLayout& layout, int q_heads, int window,
                     int threads);

 private:
  AttentionWork finish(const Batch& batch, const KvLayout& layout, int q_heads, int window);

  std::vector<AttentionItem> items_, sorted_;
  std::vector<float> costs_;
  std::vector<int> order_;
  std::vector<AttentionRow> rows_;
  std::vector<AttentionMerge> merges_;
};

}  // namespace hotbatch
