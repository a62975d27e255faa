// Running a recorded program: see program.h.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "csrc/program.h"

namespace hotbatch {
namespace {

double now_seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Work worth handing to another thread: a microsecond of elementwise work, as much as it may take
// until the other hears of it.
constexpr int kElementsPerPiece = 3072;
// Rows of a linear piece: their activations stay in the second cache.
constexpr int kRowsPerPiece = 384;
// With fewer rows a thread, reading all weights on every thread costs more than the barriers do:
// see run_segment.
constexpr int kMinRowsPerThread = 48;
// The same where threads are far apart, so that whatever one has written costs the others more:
// see benchmarks/step/shared_work.py.
constexpr int kMinRowsPerFarThread = 24;
// A loop of nothing takes two threads 0.15 microseconds on one chip and 0.75 on two.
constexpr double kFarLoop = 0.2e-6;   // for each thread
constexpr double kFarMemory = 0.9;    // of what steps have shown, what is left after one more
// What a row is between attention and attention, in all its forms, is some 12 kilobytes in a
// small model: so many stay in the second cache.
constexpr int kMaxRowsPerChunk = 96;
// Pieces that a wide layer is cut into for each thread; fewer would not balance, more would
// cost more in handing out than they give.
constexpr int kPiecesPerThread = 16;
// Keys and values of a layer that are fetched ahead of its attention: what a third cache holds
// beside the weights that pass through it.
constexpr size_t kFetchAheadBytes = size_t{8} << 20;
// With fewer rows a step's products themselves wait for memory, which then has nothing to spare.
constexpr int kLeastRowsToFetchAhead = 24;

// Rows of an input that are fetched before they are needed: with more, what one thread has to
// fetch is little beside what it computes.
constexpr int kMostRowsToPrefetch = 64;

constexpr const char* kKindNames[] = {"embed",  "norm",      "convert", "silu_mul", "linear",
                                      "gated",  "rotary", "attention", "select",  "sample"};

}  // namespace

template <class Body>
void Program::timed(Kind kind, const Body& body) {
  if (!profiling_) {
    body();
    return;
  }
  const double start = now_seconds();
  body();
  add_time(kind, now_seconds() - start);
}

void Program::add_time(Kind kind, double seconds) {
  seconds_[static_cast<int>(kind)] += seconds;
  ++calls_[static_cast<int>(kind)];
}

// Rows [begin, end) of an operation that looks at no other rows, on this thread.
void Program::run_rows(const Op& op, const Batch& batch, int begin, int end,
                       const int32_t* selection, int thread, FetchAhead* ahead) {
  const auto buffer = [this](int id) -> const Buffer& { return buffers_[static_cast<size_t>(id)]; };
  const auto stride = [](const Buffer& b) { return int64_t{round_up(b.cols, 16)}; };
  const auto vector = [this](int id) -> const float* {
    return id < 0 ? nullptr : vectors_[static_cast<size_t>(id)];
  };
  switch (op.kind) {
    case Kind::kEmbed: {
      const Buffer& out = buffer(op.output);
      const EmbedArgs args{&tables_[static_cast<size_t>(op.weight)], batch.token_ids, out.data,
                           stride(out)};
      for (int row = begin; row < end; ++row) table_->embed_row(args, row);
      break;
    }
    case Kind::kNorm: {
      const Buffer& in = buffer(op.input);
      const NormArgs args{in.data, stride(in), vector(op.weight), op.eps,
                          &activations_[static_cast<size_t>(op.output)]};
      table_->norm_rows(args, begin, end);
      break;
    }
    case Kind::kConvert: {
      const Buffer& in = buffer(op.input);
      const ConvertArgs args{in.data, stride(in), &activations_[static_cast<size_t>(op.output)]};
      table_->convert_rows(args, begin, end);
      break;
    }
    case Kind::kSiluMul: {
      const Buffer& in = buffer(op.input);
      const SiluMulArgs args{in.data, stride(in), &activations_[static_cast<size_t>(op.output)]};
      table_->silu_mul_rows(args, begin, end);
      break;
    }
    case Kind::kLinear: {
      LinearArgs args = linear_args(op);
      args.ahead = ahead;
      for (int panel = 0; panel < args.weight->panels(); ++panel) {
        args.next_panel = args.weight->panel(panel + 1);
        table_->linear(args, panel, begin, end);
      }
      break;
    }
    case Kind::kGated: {
      GatedArgs args = gated_args(op, thread);
      args.linear.ahead = ahead;
      for (int panel = 0; panel < args.linear.weight->panels(); panel += kGatedPanels) {
        args.next_group = args.linear.weight->panel(panel + kGatedPanels);
        table_->gated_linear(args, panel, begin, end);
      }
      break;
    }
    case Kind::kRotary: {
      RotaryArgs args;
      args.batch = &batch;
      args.qkv = buffer(op.input).data;
      args.q_heads = q_heads_;
      args.layout = layout_;
      args.q_norm = vector(op.q_norm);
      args.k_norm = vector(op.k_norm);
      args.eps = op.eps;
      args.cos = cosines_;
      args.sin = sines_;
      args.rotary_dim = rotary_dim_;
      args.q_out = buffer(op.output).data;
      args.kv = cache_[static_cast<size_t>(op.layer)];
      for (int row = begin; row < end; ++row) table_->rotary_store_row(args, row);
      break;
    }
    case Kind::kSelect: {
      const Buffer& in = buffer(op.input);
      const Buffer& out = buffer(op.output);
      for (int row = begin; row < end; ++row)
        std::memcpy(out.data + row * stride(out), in.data + selection[row] * stride(in),
                    sizeof(float) * static_cast<size_t>(in.cols));
      break;
    }
    case Kind::kAttention:  // looks at other rows
    case Kind::kSample:     // not recorded: follows every slice of logits
      break;
  }
}

LinearArgs Program::linear_args(const Op& op) const {
  const Buffer& out = buffers_[static_cast<size_t>(op.output)];
  LinearArgs args;
  args.weight = &weights_[static_cast<size_t>(op.weight)];
  args.input = &activations_[static_cast<size_t>(op.input)];
  args.output = out.data;
  args.output_stride = round_up(out.cols, 16);
  args.residual = op.residual >= 0 ? out.data : nullptr;
  return args;
}

Program::Columns Program::columns_of(const Op& op, int rows) const {
  const PackedLinear& weight = weights_[static_cast<size_t>(op.weight)];
  Columns columns;
  columns.row_chunks = (rows + kRowsPerPiece - 1) / kRowsPerPiece;
  const int wanted = kPiecesPerThread * pool_.size();
  columns.panels_per_piece = op.kind == Kind::kGated ? kGatedPanels
                             : columns.row_chunks > 1
                                 ? 1
                                 : std::max(1, std::min(8, weight.panels() / std::max(1, wanted)));
  columns.groups = (weight.panels() + columns.panels_per_piece - 1) / columns.panels_per_piece;
  return columns;
}

// What `thread` reads after `piece` of this operation: the following piece, or the beginning of
// its run in the linear layer that comes next, whose weights do not wait for this one's result.
// Null for a piece taken from another's run.
const uint8_t* Program::read_next(const Op& op, const Columns& columns, int piece, int thread) const {
  const int first = pool_.first_piece(columns.pieces(), thread);
  const int end = pool_.first_piece(columns.pieces(), thread + 1);
  if (piece < first || piece >= end) return nullptr;
  if (piece + 1 < end)
    return weights_[static_cast<size_t>(op.weight)].panel(columns.first_panel(piece + 1));
  const Op* next = &op + 1;
  const Op* const none = ops_.data() + ops_.size();
  while (next != none && next->kind != Kind::kLinear && next->kind != Kind::kGated) ++next;
  if (next == none) return nullptr;
  const Columns after = columns_of(*next, 1);
  return weights_[static_cast<size_t>(next->weight)].panel(
      after.first_panel(pool_.first_piece(after.pieces(), thread)));
}

namespace {

// Asks for a layer's input before the first piece that reads it. Other threads have written parts
// of it: fetched one by one as they are needed, their lines would cost the latency between two
// cores a dozen times a tile.
void prefetch_input(const Activation& input, int rows) {
  const size_t element = input.precision == Precision::kF32    ? 4
                         : input.precision == Precision::kBf16 ? 2
                                                               : 1;
  const size_t bytes = static_cast<size_t>(std::min(rows, kMostRowsToPrefetch)) *
                       static_cast<size_t>(input.stride) * element;
  const auto* data = static_cast<const uint8_t*>(input.data);
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(data + at, 0, 2);
}

}  // namespace

// A linear layer with its columns shared out among the threads.
void Program::run_linear(const Op& op, int rows) {
  const LinearArgs common = linear_args(op);
  const Columns columns = columns_of(op, rows);
  pool_.parallel(columns.pieces(), [&](int piece, int thread) {
    LinearArgs args = common;
    args.ahead = ahead_of(thread);
    if (piece == pool_.first_piece(columns.pieces(), thread)) prefetch_input(*args.input, rows);
    const int first = columns.first_panel(piece);
    const int last = std::min(args.weight->panels(), first + columns.panels_per_piece);
    const int row_begin = piece / columns.groups * kRowsPerPiece;
    const int row_end = std::min(rows, row_begin + kRowsPerPiece);
    for (int panel = first; panel < last; ++panel) {
      args.next_panel = panel + 1 < last ? args.weight->panel(panel + 1)
                                         : read_next(op, columns, piece, thread);
      table_->linear(args, panel, row_begin, row_end);
    }
  });
}

GatedArgs Program::gated_args(const Op& op, int thread) const {
  GatedArgs args;
  args.linear.weight = &weights_[static_cast<size_t>(op.weight)];
  args.linear.input = &activations_[static_cast<size_t>(op.input)];
  args.output = &activations_[static_cast<size_t>(op.output)];
  args.scratch = gated_scratch_ + static_cast<size_t>(thread) * kGatedFloats;
  return args;
}

// The same for a gated layer, in groups of panels.
void Program::run_gated(const Op& op, int rows) {
  const Columns columns = columns_of(op, rows);
  pool_.parallel(columns.pieces(), [&](int piece, int thread) {
    GatedArgs args = gated_args(op, thread);
    args.linear.ahead = ahead_of(thread);
    if (piece == pool_.first_piece(columns.pieces(), thread))
      prefetch_input(*args.linear.input, rows);
    args.next_group = read_next(op, columns, piece, thread);
    const int row_begin = piece / columns.groups * kRowsPerPiece;
    table_->gated_linear(args, columns.first_panel(piece), row_begin,
                         std::min(rows, row_begin + kRowsPerPiece));
  });
}

// One operation on all threads.
void Program::run_op(const Op& op, const Batch& batch, int rows, const int32_t* selection) {
  if (op.kind == Kind::kLinear) return run_linear(op, rows);
  if (op.kind == Kind::kGated) return run_gated(op, rows);
  if (op.kind == Kind::kAttention) return run_attention(op, batch);
  const int rows_per_piece = std::max(1, kElementsPerPiece / std::max(1, op.width));
  const int pieces = (rows + rows_per_piece - 1) / rows_per_piece;
  pool_.parallel(pieces, [&](int piece, int thread) {
    run_rows(op, batch, piece * rows_per_piece, std::min(rows, (piece + 1) * rows_per_piece),
             selection, thread, nullptr);
  });
}

bool Program::shares_rows(int rows) const {
  return rows >= (far_ > 0.5 ? kMinRowsPerFarThread : kMinRowsPerThread) * pool_.size();
}

void Program::note_loop(double seconds) {
  if (seconds <= 0.0) return;
  far_ = kFarMemory * far_ + (1.0 - kFarMemory) * (seconds > kFarLoop * pool_.size());
}

// Where threads run is the host's affair, and may change within minutes. So whoever could gain
// from knowing looks again.
void Program::look_how_far(int rows) {
  const int threads = pool_.size();
  if (threads > 1 && rows >= kMinRowsPerFarThread * threads && rows < kMinRowsPerThread * threads)
    note_loop(pool_.time_loop());
}

// The operations [begin, end), none of which looks at other rows. With rows enough for every
// thread each takes some through all of them: no barriers between, and what one operation writes
// the next finds in this core's cache. The price is that every thread reads all the weights,
// which so many rows hide. With few rows the columns of each operation are shared out instead.
void Program::run_segment(size_t begin, size_t end, const Batch& batch) {
  const int rows = batch.rows, threads = pool_.size();
  if (!shares_rows(rows)) {
    for (int thread = 0; thread < threads; ++thread)
      ahead_[static_cast<size_t>(thread)] = fetch_ahead(begin, end, rows, threads, thread, threads);
    for (size_t i = begin; i < end; ++i)
      timed(ops_[i].kind, [&] { run_op(ops_[i], batch, rows, nullptr); });
    return;
  }
  const int rounds = (rows + kMaxRowsPerChunk * threads - 1) / (kMaxRowsPerChunk * threads);
  const int chunks = rounds * threads;
  pool_.parallel(chunks, [&](int chunk, int thread) {
    const int row_begin = static_cast<int>(int64_t{rows} * chunk / chunks);
    const int row_end = static_cast<int>(int64_t{rows} * (chunk + 1) / chunks);
    FetchAhead ahead = fetch_ahead(begin, end, row_end - row_begin, 1, chunk, chunks);
    for (size_t i = begin; i < end; ++i) {
      const double start = profiling_ ? now_seconds() : 0.0;
      run_rows(ops_[i], batch, row_begin, row_end, nullptr, thread,
               ahead.lines_per_step ? &ahead : nullptr);
      // The first thread's time stands for all: they do the same.
      if (profiling_ && thread == 0) add_time(ops_[i].kind, now_seconds() - start);
    }
  });
}

// Share `part` of `parts` in fetching what the attention after `end` will read, spread over the
// linear layers of the segment, of which one thread computes `rows` rows and 1/`column_parts` of
// the columns.
FetchAhead Program::fetch_ahead(size_t begin, size_t end, int rows, int column_parts, int part,
                                int parts) const {
  FetchAhead ahead;
  const int64_t count = static_cast<int64_t>(context_blocks_.size());
  if (end >= ops_.size() || ops_[end].kind != Kind::kAttention || count == 0) return ahead;
  int64_t steps = 0;
  for (size_t i = begin; i < end; ++i) {
    if (ops_[i].kind != Kind::kLinear && ops_[i].kind != Kind::kGated) continue;
    const PackedLinear& weight = weights_[static_cast<size_t>(ops_[i].weight)];
    const bool row_scale = activations_[static_cast<size_t>(ops_[i].input)].has_row_scale();
    const int tiles = row_scale ? (rows + 11) / 12 : (rows + 5) / 6;
    steps += int64_t{weight.panels()} * fetch_steps(weight.precision, weight.inputs) * tiles;
  }
  steps /= column_parts;
  ahead.base = cache_[static_cast<size_t>(ops_[end].layer)];
  ahead.block_bytes = static_cast<int64_t>(kv_block_bytes(layout_));
  ahead.blocks = context_blocks_.data() + count * part / parts;
  ahead.blocks_end = context_blocks_.data() + count * (part + 1) / parts;
  const int64_t lines = (ahead.blocks_end - ahead.blocks) * ((ahead.block_bytes + 63) / 64);
  ahead.lines_per_step = steps > 0 ? static_cast<int>((lines + steps - 1) / steps) : 0;
  return ahead;
}

// The blocks that attention finds filled in this step, each once; as many as the third cache may hold.
void Program::list_context_blocks(const Batch& batch) {
  context_blocks_.clear();
  if (batch.rows < kLeastRowsToFetchAhead) return;
  const size_t most = kFetchAheadBytes / kv_block_bytes(layout_);
  block_seen_.assign(static_cast<size_t>(cache_blocks_), 0);
  for (int s = 0; s < batch.sequences; ++s) {
    const int32_t* table = batch.block_table + int64_t{s} * batch.max_blocks;
    // What this step writes itself is in the caches when attention reads it.
    const int rows = batch.seq_starts[s + 1] - batch.seq_starts[s];
    const int before = rows > 0 ? batch.positions[batch.seq_starts[s]] : batch.context_lens[s];
    const int blocks = (before + layout_.block_size - 1) / layout_.block_size;
    for (int b = 0; b < blocks && context_blocks_.size() < most; ++b) {
      uint8_t& seen = block_seen_[static_cast<size_t>(table[b])];
      if (!seen) context_blocks_.push_back(table[b]);
      seen = 1;
    }
  }
}

void Program::plan_attention(const Batch& batch) {
  size_t partials = 0;
  for (WindowWork& w : windows_) {
    w.work = w.planner.plan(batch, layout_, q_heads_, w.window, pool_.size(),
                            shares_rows(batch.rows));
    partials = std::max(partials, w.work.partial_floats);
  }
  if (partials + 16 > partials_.size()) partials_.resize(partials + 16);
}

void Program::run_attention(const Op& op, const Batch& batch) {
  const auto found = std::find_if(windows_.begin(), windows_.end(), [&](const WindowWork& w) {
    return w.window == op.window;
  });
  const auto misaligned = reinterpret_cast<uintptr_t>(partials_.data()) % 64;
  AttentionArgs args;
  args.batch = &batch;
  args.work = &found->work;
  args.layout = layout_;
  args.q_heads = q_heads_;
  args.window = op.window;
  args.scale = 1.0f / std::sqrt(static_cast<float>(layout_.head_dim));
  args.q = buffers_[static_cast<size_t>(op.input)].data;
  args.kv = cache_[static_cast<size_t>(op.layer)];
  args.out = buffers_[static_cast<size_t>(op.output)].data;
  args.partials = partials_.data() + (misaligned ? (64 - misaligned) / sizeof(float) : 0);
  args.scratch = attention_scratch_;
  args.scratch_stride = attention_stride_;
  pool_.parallel(found->work.item_count,
                 [&](int item, int thread) { table_->attention_item(args, item, thread); });
  if (found->work.merge_count > 0)
    pool_.parallel(found->work.merge_count,
                   [&](int merge, int) { table_->attention_merge(args, merge); });
}

namespace {

template <class T>
const T* from_row(const T* array, int row, int64_t width = 1) {
  return array ? array + row * width : nullptr;
}
template <class T>
T* from_row(T* array, int row, int64_t width = 1) {
  return array ? array + row * width : nullptr;
}

// The arguments for rows from `first` on. Lists keep their absolute starts.
SampleArgs sample_slice(SampleArgs args, int first, int count) {
  args.rows = count;
  args.temperature = from_row(args.temperature, first);
  args.top_p = from_row(args.top_p, first);
  args.top_k = from_row(args.top_k, first);
  args.min_p = from_row(args.min_p, first);
  args.repetition_penalty = from_row(args.repetition_penalty, first);
  args.presence_penalty = from_row(args.presence_penalty, first);
  args.frequency_penalty = from_row(args.frequency_penalty, first);
  args.seed = from_row(args.seed, first);
  args.position = from_row(args.position, first);
  args.num_logprobs = from_row(args.num_logprobs, first);
  args.target = from_row(args.target, first);
  args.bias_starts = from_row(args.bias_starts, first);
  args.banned_starts = from_row(args.banned_starts, first);
  args.history_starts = from_row(args.history_starts, first);
  args.num_prompt = from_row(args.num_prompt, first);
  args.token = from_row(args.token, first);
  args.logprob = from_row(args.logprob, first);
  args.rank = from_row(args.rank, first);
  args.top_ids = from_row(args.top_ids, first, kMaxLogprobs);
  args.top_logprobs = from_row(args.top_logprobs, first, kMaxLogprobs);
  args.error = from_row(args.error, first);
  return args;
}

}  // namespace

void Program::run_logits(const Batch& batch, int first, int count, const SampleArgs* sampling) {
  for (FetchAhead& ahead : ahead_) ahead = FetchAhead();
  for (size_t i = first_selected_; i < ops_.size(); ++i)
    timed(ops_[i].kind, [&] { run_op(ops_[i], batch, count, batch.logit_rows + first); });
  if (!sampling) return;
  const Buffer& logits = buffers_[static_cast<size_t>(logits_)];
  SampleArgs args = sample_slice(*sampling, first, count);
  args.logits = logits.data;
  args.stride = round_up(logits.cols, 16);
  args.vocab = logits.cols;
  args.scratch = sample_scratch_;
  args.scratch_stride = sample_stride_;
  timed(Kind::kSample, [&] {
    pool_.parallel(count, [&](int row, int thread) { table_->sample_row(args, row, thread); });
  });
}

// A plan that does not fit is our bug, but must not corrupt memory.
void Program::check(const Batch& batch) const {
  require(logits_ >= 0, "the program is not finished");
  require(batch.rows > 0 && batch.rows <= shape_.max_rows, "the step has too many rows");
  require(batch.seq_starts[0] == 0 && batch.seq_starts[batch.sequences] == batch.rows,
          "seq_starts do not cover the step's rows");
  const int vocabulary = tables_.empty() ? 0 : tables_[0].rows;
  for (int row = 0; row < batch.rows; ++row) {
    require(batch.token_ids[row] >= 0 && batch.token_ids[row] < vocabulary,
            "a token id is outside the vocabulary");
    require(batch.positions[row] >= 0 && batch.positions[row] < rotary_positions_,
            "a position is outside the model's context");
    require(batch.slots[row] >= 0 && batch.slots[row] / layout_.block_size < cache_blocks_,
            "a slot is outside the cache");
  }
  for (int s = 0; s < batch.sequences; ++s) {
    const int blocks = (batch.context_lens[s] + layout_.block_size - 1) / layout_.block_size;
    require(blocks <= batch.max_blocks, "a block table is too short");
    for (int b = 0; b < blocks; ++b) {
      const int32_t id = batch.block_table[int64_t{s} * batch.max_blocks + b];
      require(id >= 0 && id < cache_blocks_, "a block id is outside the cache");
    }
  }
  for (int i = 0; i < batch.logit_count; ++i)
    require(batch.logit_rows[i] >= 0 && batch.logit_rows[i] < batch.rows,
            "a logit row is outside the step");
}

void Program::run(const Batch& batch, const SampleArgs* sampling, float* logits_out) {
  check(batch);
  require(!sampling || sampling->rows == batch.logit_count, "sampling needs one row a logit row");
  const Awake awake(pool_);
  plan_attention(batch);
  list_context_blocks(batch);
  for (size_t begin = 0; begin < first_selected_;) {
    size_t end = begin;
    while (end < first_selected_ && ops_[end].kind != Kind::kAttention) ++end;
    run_segment(begin, end, batch);
    if (end < first_selected_)
      timed(Kind::kAttention, [&] { run_attention(ops_[end], batch); });
    begin = end + 1;
  }
  look_how_far(batch.rows);
  for (int first = 0; first < batch.logit_count; first += shape_.max_logit_rows) {
    const int count = std::min(shape_.max_logit_rows, batch.logit_count - first);
    run_logits(batch, first, count, sampling);
    if (!logits_out) continue;
    const Buffer& logits = buffers_[static_cast<size_t>(logits_)];
    for (int row = 0; row < count; ++row)
      std::memcpy(logits_out + int64_t{first + row} * logits.cols,
                  logits.data + int64_t{row} * round_up(logits.cols, 16),
                  sizeof(float) * static_cast<size_t>(logits.cols));
  }
}

void Program::copy_blocks(const int32_t* pairs, int count) {
  const size_t bytes = kv_block_bytes(layout_);
  for (int i = 0; i < count; ++i) {
    const int32_t source = pairs[2 * i], target = pairs[2 * i + 1];
    require(source >= 0 && source < cache_blocks_ && target >= 0 && target < cache_blocks_,
            "a block id is outside the cache");
    for (uint8_t* layer : cache_)
      std::memcpy(layer + bytes * static_cast<size_t>(target),
                  layer + bytes * static_cast<size_t>(source), bytes);
  }
}

std::vector<OpProfile> Program::profile() const {
  std::vector<OpProfile> rows;
  for (int kind = 0; kind < kKinds; ++kind)
    rows.push_back({kKindNames[kind], seconds_[kind], calls_[kind]});
  return rows;
}

}  // namespace hotbatch
