// A forward pass, recorded once and run every step.
//
// The model's definition is Python and runs a single time, at load: each operation it calls
// appends one entry here. A step then is one call without the interpreter: walk the entries,
// hand each out to the pool in small pieces. Operations up to `select` see all rows of the
// step; those after it see only the rows whose logits are wanted, a slice at a time, so that
// the logits of a long prompt need no more memory than those of one slice.
//
// Cost: with few rows one barrier an operation, about ten operations a layer; with many, two
// barriers a layer (see run_segment). Where threads are far apart, few is fewer.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention/plan.h"
#include "csrc/kernel_table.h"
#include "csrc/memory.h"
#include "csrc/prefault.h"
#include "csrc/thread_pool.h"

namespace hotbatch {

struct ProgramShape {
  int max_rows = 0;        // tokens of the largest step
  int max_logit_rows = 0;  // rows of a slice of logits
  int threads = 1;
};

// Seconds spent in each kind of operation since the start, when profiling is on.
struct OpProfile {
  std::string name;
  double seconds;
  int64_t calls;
};

class Program {
 public:
  Program(const ProgramShape& shape, const char* isa);

  // ---- recording; each returns an id or appends an operation ----
  // `gated`: the stacked rows are gate and up of an MLP, for gated_linear. `column_scales` [K] or
  // null: int8 only, input columns are multiplied by them.
  int add_weight(Precision precision, const std::vector<RawRows>& parts, const float* bias,
                 bool gated, const float* column_scales = nullptr);
  int add_vector(const float* values, int count);
  int add_table(const RawRows& table);
  void set_rotary(const float* cosines, const float* sines, int positions, int half_dim);
  void set_cache(const KvLayout& layout, int layers, int blocks);

  int embed(int table);
  // `row_scale`: int8 with one scale a row instead of one a group.
  int norm(int input, int vector, float eps, Precision format, bool row_scale);
  int convert(int input, Precision format, bool row_scale);
  int silu_mul(int input, Precision format);
  int linear(int activation, int weight, int residual);  // -1: none
  int gated_linear(int activation, int weight, Precision format);
  int rotary(int input, int layer, int q_norm, int k_norm, float eps, int query_heads);
  int attention(int input, int layer, int window);
  int select(int input);
  // Nothing later reads this buffer: the next of its shape takes its memory. Without this every
  // layer would have buffers of its own, and each write would miss every cache.
  void release(int buffer);
  void finish(int logits);

  // ---- trying out while recording: see program_trial.cpp ----
  // These tokens, as one prompt, go through whatever is recorded from here on.
  void set_trial(const int32_t* tokens, int count);
  int trial_rows() const { return trial_ ? trial_->batch.rows : 0; }
  // What a norm of this buffer with `weight` [cols] gives for them, f32 [tokens, cols].
  void try_norm(int input, const float* weight, float eps, float* out);
  // The mean square of each input column of stacked tensors, f32 [K]; of many rows, of a thousand.
  void column_squares(const std::vector<RawRows>& parts, float* means);

  // ---- running ----
  // Samples every logit row as `sampling` says; copies logits to `logits_out` [S, V] if given.
  // `sampling` has one row a logit row; its logits, vocabulary and scratch are filled in here.
  void run(const Batch& batch, const SampleArgs* sampling, float* logits_out);
  void copy_blocks(const int32_t* pairs, int count);
  // Makes the cache's memory present in idle time; see prefault.h.
  void prefault_cache();
  bool wait_for_cache(double seconds) { return prefault_.wait(seconds); }

  int width(int buffer) const { return buffers_.at(static_cast<size_t>(buffer)).cols; }
  int vocabulary() const;
  int threads() const { return pool_.size(); }
  // How long a loop of nothing took: steps note it themselves, tests as they like.
  void note_loop(double seconds);
  // Whether each thread takes some rows through all operations, or columns are shared out.
  bool shares_rows(int rows) const;
  const char* isa() const { return table_->name; }
  int64_t weight_bytes() const { return weight_bytes_; }
  int64_t cache_bytes() const { return cache_bytes_; }
  void set_profiling(bool on) { profiling_ = on; }
  std::vector<OpProfile> profile() const;

 private:
  enum class Kind { kEmbed, kNorm, kConvert, kSiluMul, kLinear, kGated, kRotary, kAttention, kSelect, kSample };
  static constexpr int kKinds = 10;

  struct Buffer {  // f32 [rows, cols]
    float* data;
    int cols;
    bool selected;
    bool is_free;
  };
  struct Op {
    Kind kind;
    int input = -1, output = -1, weight = -1, residual = -1, layer = -1;
    int q_norm = -1, k_norm = -1, window = 0;
    int width = 0;  // numbers that a row of it reads, for sizing pieces
    float eps = 0.0f;
  };

  struct WindowWork {  // the step's attention for layers with this window
    int window;
    AttentionPlanner planner;
    AttentionWork work;
  };

  struct Columns {  // a linear layer cut into pieces: groups of panels, for one chunk of rows
    int panels_per_piece = 1, groups = 0, row_chunks = 1;
    int pieces() const { return groups * row_chunks; }
    int first_panel(int piece) const { return piece % groups * panels_per_piece; }
  };

  struct Trial {
    std::vector<int32_t> tokens, positions, context, blocks, rows;  // the arrays of `batch`
    Batch batch;
    Arena memory;
    std::vector<uint8_t*> cache;  // all layers in one place: each is done before the next begins
    size_t done = 0;              // operations
  };

  int new_buffer(int cols, bool selected);
  int new_activation(Precision format, int cols, bool row_scale = false);
  void run_op(const Op& op, const Batch& batch, int rows, const int32_t* selection);
  void run_rows(const Op& op, const Batch& batch, int begin, int end, const int32_t* selection,
                int thread, FetchAhead* ahead);
  FetchAhead fetch_ahead(size_t begin, size_t end, int rows, int column_parts, int part,
                         int parts) const;
  FetchAhead* ahead_of(int thread) {
    FetchAhead& ahead = ahead_[static_cast<size_t>(thread)];
    return ahead.lines_per_step > 0 ? &ahead : nullptr;
  }
  void list_context_blocks(const Batch& batch);
  void run_segment(size_t begin, size_t end, const Batch& batch);
  Columns columns_of(const Op& op, int rows) const;
  const uint8_t* read_next(const Op& op, const Columns& columns, int piece, int thread) const;
  void run_linear(const Op& op, int rows);
  void run_gated(const Op& op, int rows);
  LinearArgs linear_args(const Op& op) const;
  GatedArgs gated_args(const Op& op, int thread) const;
  void run_attention(const Op& op, const Batch& batch);
  void look_how_far(int rows);
  void plan_attention(const Batch& batch);
  void run_logits(const Batch& batch, int first, int count, const SampleArgs* sampling);
  void check(const Batch& batch) const;
  template <class Body>
  void timed(Kind kind, const Body& body);
  void add_time(Kind kind, double seconds);

  ProgramShape shape_;
  const KernelTable* table_;
  ThreadPool pool_;
  Arena weights_memory_, buffers_memory_, cache_memory_;
  std::vector<PackedLinear> weights_;
  std::vector<float*> vectors_;
  std::vector<RawRows> tables_;
  std::vector<Buffer> buffers_;
  std::vector<Activation> activations_;
  std::vector<Op> ops_;
  size_t first_selected_ = 0;
  bool selecting_ = false;
  int logits_ = -1;

  const float* cosines_ = nullptr;
  const float* sines_ = nullptr;
  int rotary_positions_ = 0, rotary_dim_ = 0;
  KvLayout layout_;
  std::vector<uint8_t*> cache_;  // a layer each
  int cache_blocks_ = 0;
  int q_heads_ = 0;
  std::vector<WindowWork> windows_;
  std::vector<float> partials_;
  Prefault prefault_;  // behind the memory it touches, so that it ends first
  std::vector<int32_t> context_blocks_;
  std::vector<FetchAhead> ahead_;  // a thread each, while threads share the columns of a segment
  std::vector<uint8_t> block_seen_;
  uint8_t* attention_scratch_ = nullptr;
  uint8_t* sample_scratch_ = nullptr;
  float* gated_scratch_ = nullptr;
  size_t attention_stride_ = 0, sample_stride_ = 0;

  std::unique_ptr<Trial> trial_;  // until the program is finished

  double far_ = 0.0;  // share of recent steps in which threads were far apart
  int64_t weight_bytes_ = 0, cache_bytes_ = 0;
  bool profiling_ = false;
  double seconds_[kKinds] = {};
  int64_t calls_[kKinds] = {};
};

}  // namespace hotbatch
