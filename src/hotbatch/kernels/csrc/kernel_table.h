// The entry points of one instruction set. isa_*.cpp fill one table each; isa.cpp chooses.
#pragma once

#include "activation/args.h"
#include "attention/args.h"
#include "ceiling/args.h"
#include "csrc/batch.h"
#include "embedding/args.h"
#include "matmul/args.h"
#include "norm/args.h"
#include "rotary/args.h"
#include "sampling/args.h"

namespace hotbatch {

struct KernelTable {
  const char* name;
  // matmul/
  void (*linear)(const LinearArgs&, int panel, int row_begin, int row_end);
  void (*pack_linear)(const PackArgs&, int panel);
  void (*column_squares)(const PackArgs&, int begin, int end, int step, float* sums);
  // norm/, activation/: the rows [begin, end); embedding/: one row
  void (*norm_rows)(const NormArgs&, int begin, int end);
  void (*silu_mul_rows)(const SiluMulArgs&, int begin, int end);
  void (*gated_linear)(const GatedArgs&, int first_panel, int row_begin, int row_end);
  void (*convert_rows)(const ConvertArgs&, int begin, int end);
  void (*embed_row)(const EmbedArgs&, int row);
  // rotary/: one row of the step: q/k norm, rotation, write of k and v into the cache
  void (*rotary_store_row)(const RotaryArgs&, int row);
  // attention/: one item of the step's work list, then one row's merge of its key chunks
  void (*attention_item)(const AttentionArgs&, int item, int thread);
  void (*attention_merge)(const AttentionArgs&, int merge);
  // sampling/: one row of logits
  void (*sample_row)(const SampleArgs&, int row, int thread);
  // ceiling/: the machine's best, on one thread
  float (*ceiling_compute)(CeilingKind, int rounds);
  int64_t (*ceiling_round_products)(CeilingKind);
  int (*ceiling_read)(const CeilingRead&);
};

// Tables by name ("avx512bf16", "avx512vnni", "avx2", "portable"), or null if this machine
// cannot run it. best_isa() is the fastest that it can.
const KernelTable* kernel_table(const char* name);
const char* best_isa();

}  // namespace hotbatch
