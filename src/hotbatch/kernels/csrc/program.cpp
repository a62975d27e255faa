#include "csrc/program.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace hotbatch {
namespace {

double now_seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

const KernelTable* require_isa(const char* isa) {
  const KernelTable* table = kernel_table(isa);
  if (!table) throw std::invalid_argument(std::string("this machine cannot run ") + isa);
  return table;
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// Work worth handing to another thread: about two microseconds of elementwise work.
constexpr int kElementsPerPiece = 4096;
// Rows of a linear piece: their activations stay in the second-level cache.
constexpr int kRowsPerPiece = 384;
// Pieces that a wide layer is cut into for each thread; fewer would not balance, more would
// cost more in handing out than they give.
constexpr int kPiecesPerThread = 16;

constexpr const char* kKindNames[] = {"embed",  "norm",      "convert", "silu_mul", "linear",
                                      "rotary", "attention", "select",  "sample"};

}  // namespace

Program::Program(const ProgramShape& shape, const char* isa)
    : shape_(shape), table_(require_isa(isa)), pool_(shape.threads) {
  require(shape.max_rows > 0 && shape.max_logit_rows > 0, "a program needs at least one row");
}

// ---- recording ----

int Program::add_weight(Precision precision, const std::vector<RawRows>& parts, const float* bias) {
  PackedLinear weight;
  weight.precision = precision;
  require(!parts.empty(), "a weight needs at least one tensor");
  weight.inputs = parts[0].cols;
  for (const RawRows& part : parts) {
    require(part.cols == weight.inputs, "stacked tensors differ in their columns");
    weight.outputs += part.rows;
  }
  require(weight.inputs <= kMaxInputs, "a weight has too many input columns");
  const int panels = weight.panels();
  const int64_t bytes = weight.bytes_per_panel() * panels;
  weight.data = weights_memory_.take(static_cast<size_t>(bytes));
  weight_bytes_ += bytes;
  const size_t padded = static_cast<size_t>(panels) * kPanel;
  if (precision == Precision::kInt8) {
    weight.scales = weights_memory_.take_array<float>(padded);
    weight_bytes_ += static_cast<int64_t>(padded * sizeof(float));
  }
  if (bias) {
    weight.bias = weights_memory_.take_array<float>(padded);
    std::copy(bias, bias + weight.outputs, weight.bias);
  }
  const PackArgs args{&weight, parts.data(), static_cast<int>(parts.size())};
  const Awake awake(pool_);
  pool_.parallel(panels, [&](int panel, int) { table_->pack_linear(args, panel); });
  weights_.push_back(weight);
  return static_cast<int>(weights_.size()) - 1;
}

int Program::add_vector(const float* values, int count) {
  // Padded with zeros to whole vectors.
  float* copy = weights_memory_.take_array<float>(static_cast<size_t>(round_up(count, 16)));
  std::copy(values, values + count, copy);
  vectors_.push_back(copy);
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::add_table(const RawRows& table) {
  tables_.push_back(table);
  return static_cast<int>(tables_.size()) - 1;
}

void Program::set_rotary(const float* cosines, const float* sines, int positions, int half_dim) {
  const size_t count = static_cast<size_t>(positions) * static_cast<size_t>(half_dim);
  float* copy = weights_memory_.take_array<float>(2 * count);
  std::copy(cosines, cosines + count, copy);
  std::copy(sines, sines + count, copy + count);
  cosines_ = copy;
  sines_ = copy + count;
  rotary_positions_ = positions;
  rotary_dim_ = 2 * half_dim;
}

void Program::set_cache(const KvLayout& layout, int layers, int blocks) {
  require(layout.head_dim % 16 == 0, "head_dim must be a multiple of 16");
  layout_ = layout;
  cache_blocks_ = blocks;
  const size_t bytes = kv_block_bytes(layout) * static_cast<size_t>(blocks);
  cache_.clear();
  for (int layer = 0; layer < layers; ++layer) cache_.push_back(cache_memory_.take(bytes));
  cache_bytes_ = static_cast<int64_t>(bytes) * layers;
}

int Program::new_buffer(int cols, bool selected) {
  const size_t rows = static_cast<size_t>(selected ? shape_.max_logit_rows : shape_.max_rows);
  float* data = buffers_memory_.take_array<float>(rows * static_cast<size_t>(round_up(cols, 16)));
  buffers_.push_back({data, cols, selected});
  return static_cast<int>(buffers_.size()) - 1;
}

// All activations of one kind share memory: each is read by the very next operation.
int Program::new_activation(Precision format, int cols, bool selected) {
  for (size_t i = 0; i < activations_.size(); ++i)
    if (activations_[i].precision == format && activations_[i].cols == cols)
      return static_cast<int>(i);
  (void)selected;
  Activation act;
  act.precision = format;
  act.cols = cols;
  act.stride = padded_inputs(format, cols);
  const size_t rows = static_cast<size_t>(std::max(shape_.max_rows, shape_.max_logit_rows));
  const size_t element = format == Precision::kF32 ? 4 : format == Precision::kBf16 ? 2 : 1;
  act.data = buffers_memory_.take(rows * static_cast<size_t>(act.stride) * element);
  if (format == Precision::kInt8 || format == Precision::kInt4) {
    act.groups = act.stride / group_size(format);
    const size_t count = rows * static_cast<size_t>(act.groups);
    act.scales = buffers_memory_.take_array<float>(count);
    if (format == Precision::kInt8) {
      act.offsets = buffers_memory_.take_array<int32_t>(count);
    } else {
      act.sums = buffers_memory_.take_array<float>(count);
    }
  }
  activations_.push_back(act);
  return static_cast<int>(activations_.size()) - 1;
}

int Program::embed(int table) {
  Op op{Kind::kEmbed};
  op.weight = table;
  op.output = new_buffer(tables_.at(static_cast<size_t>(table)).cols, false);
  ops_.push_back(op);
  return op.output;
}

int Program::norm(int input, int vector, float eps, Precision format) {
  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  Op op{Kind::kNorm};
  op.input = input;
  op.weight = vector;
  op.eps = eps;
  op.selected = in.selected;
  op.output = new_activation(format, in.cols, in.selected);
  ops_.push_back(op);
  return op.output;
}

int Program::convert(int input, Precision format) {
  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  Op op{Kind::kConvert};
  op.input = input;
  op.selected = in.selected;
  op.output = new_activation(format, in.cols, in.selected);
  ops_.push_back(op);
  return op.output;
}

int Program::silu_mul(int input, Precision format) {
  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  require(in.cols % 32 == 0, "gate and up must be multiples of 16 wide");
  Op op{Kind::kSiluMul};
  op.input = input;
  op.selected = in.selected;
  op.output = new_activation(format, in.cols / 2, in.selected);
  ops_.push_back(op);
  return op.output;
}

int Program::linear(int activation, int weight, int residual) {
  const PackedLinear& w = weights_.at(static_cast<size_t>(weight));
  const Activation& act = activations_.at(static_cast<size_t>(activation));
  require(act.cols == w.inputs && act.precision == w.precision,
          "a linear layer's input does not fit its weight");
  Op op{Kind::kLinear};
  op.input = activation;
  op.weight = weight;
  op.residual = residual;
  op.selected = selecting_;
  // A residual is updated in place: nothing reads the old stream afterwards.
  op.output = residual >= 0 ? residual : new_buffer(w.outputs, selecting_);
  ops_.push_back(op);
  return op.output;
}

int Program::rotary(int input, int layer, int q_norm, int k_norm, float eps, int query_heads) {
  require(layer < static_cast<int>(cache_.size()), "set_cache comes before rotary");
  Op op{Kind::kRotary};
  op.input = input;
  op.layer = layer;
  op.q_norm = q_norm;
  op.k_norm = k_norm;
  op.eps = eps;
  q_heads_ = query_heads;
  op.output = new_buffer(static_cast<int>(query_row_bytes(layout_, query_heads) / 4), false);
  ops_.push_back(op);
  return op.output;
}

int Program::attention(int input, int layer, int window) {
  Op op{Kind::kAttention};
  op.input = input;
  op.layer = layer;
  op.window = window;
  op.output = new_buffer(q_heads_ * layout_.head_dim, false);
  const auto same = [window](const WindowWork& w) { return w.window == window; };
  if (std::none_of(windows_.begin(), windows_.end(), same)) windows_.push_back({window, {}, {}});
  ops_.push_back(op);
  return op.output;
}

int Program::select(int input) {
  require(!selecting_, "a program selects rows once");
  first_selected_ = ops_.size();
  selecting_ = true;
  Op op{Kind::kSelect};
  op.input = input;
  op.selected = true;
  op.output = new_buffer(buffers_.at(static_cast<size_t>(input)).cols, true);
  ops_.push_back(op);
  return op.output;
}

void Program::finish(int logits) {
  require(selecting_, "a program must select the rows whose logits are wanted");
  logits_ = logits;
  const size_t threads = static_cast<size_t>(pool_.size());
  attention_stride_ = round_up(static_cast<int>(attention_scratch_bytes(layout_, q_heads_)), 64);
  attention_scratch_ = buffers_memory_.take(threads * attention_stride_);
  sample_stride_ = (sample_scratch_bytes(vocabulary()) + 63) / 64 * 64;
  sample_scratch_ = buffers_memory_.take(threads * sample_stride_);
}

int Program::vocabulary() const {
  return logits_ < 0 ? 0 : buffers_[static_cast<size_t>(logits_)].cols;
}

// ---- running ----

template <class Body>
void Program::timed(Kind kind, const Body& body) {
  if (!profiling_) {
    body();
    return;
  }
  const double start = now_seconds();
  body();
  seconds_[static_cast<int>(kind)] += now_seconds() - start;
  ++calls_[static_cast<int>(kind)];
}

template <class Body>
void Program::each_row(int rows, int elements_per_row, const Body& body) {
  const int rows_per_piece = std::max(1, kElementsPerPiece / std::max(1, elements_per_row));
  const int pieces = (rows + rows_per_piece - 1) / rows_per_piece;
  pool_.parallel(pieces, [&](int piece, int) {
    const int end = std::min(rows, (piece + 1) * rows_per_piece);
    for (int row = piece * rows_per_piece; row < end; ++row) body(row);
  });
}

void Program::run_linear(const Op& op, int rows) {
  const PackedLinear& weight = weights_[static_cast<size_t>(op.weight)];
  const Buffer& out = buffers_[static_cast<size_t>(op.output)];
  LinearArgs args;
  args.weight = &weight;
  args.input = &activations_[static_cast<size_t>(op.input)];
  args.output = out.data;
  args.output_stride = round_up(out.cols, 16);
  args.residual = op.residual >= 0 ? out.data : nullptr;

  const int panels = weight.panels();
  const int row_chunks = (rows + kRowsPerPiece - 1) / kRowsPerPiece;
  const int wanted = kPiecesPerThread * pool_.size();
  const int panels_per_piece =
      row_chunks > 1 ? 1 : std::max(1, std::min(8, panels / std::max(1, wanted)));
  const int groups = (panels + panels_per_piece - 1) / panels_per_piece;
  // Threads take neighbouring pieces, and layers lie in memory in the order they run in: past the
  // last panel of this one comes the next one's first.
  args.prefetch_distance =
      weight.bytes_per_panel() * (panels_per_piece > 1 ? 1 : pool_.size());
  pool_.parallel(groups * row_chunks, [&](int piece, int) {
    const int first = piece % groups * panels_per_piece;
    const int last = std::min(panels, first + panels_per_piece);
    const int row_begin = piece / groups * kRowsPerPiece;
    const int row_end = std::min(rows, row_begin + kRowsPerPiece);
    for (int panel = first; panel < last; ++panel)
      table_->linear(args, panel, row_begin, row_end);
  });
}

void Program::run_op(const Op& op, const Batch& batch, int rows, const int32_t* selection) {
  const auto buffer = [this](int id) -> const Buffer& { return buffers_[static_cast<size_t>(id)]; };
  const auto stride = [](const Buffer& b) { return int64_t{round_up(b.cols, 16)}; };
  const auto vector = [this](int id) -> const float* {
    return id < 0 ? nullptr : vectors_[static_cast<size_t>(id)];
  };
  switch (op.kind) {
    case Kind::kEmbed: {
      const RawRows& table = tables_[static_cast<size_t>(op.weight)];
      const Buffer& out = buffer(op.output);
      const EmbedArgs args{&table, batch.token_ids, out.data, stride(out)};
      each_row(rows, table.cols, [&](int row) { table_->embed_row(args, row); });
      break;
    }
    case Kind::kNorm: {
      const Buffer& in = buffer(op.input);
      const NormArgs args{in.data, stride(in), vector(op.weight), op.eps,
                          &activations_[static_cast<size_t>(op.output)]};
      each_row(rows, in.cols, [&](int row) { table_->norm_row(args, row); });
      break;
    }
    case Kind::kConvert: {
      const Buffer& in = buffer(op.input);
      const ConvertArgs args{in.data, stride(in), &activations_[static_cast<size_t>(op.output)]};
      each_row(rows, in.cols, [&](int row) { table_->convert_row(args, row); });
      break;
    }
    case Kind::kSiluMul: {
      const Buffer& in = buffer(op.input);
      const SiluMulArgs args{in.data, stride(in), &activations_[static_cast<size_t>(op.output)]};
      each_row(rows, 2 * in.cols, [&](int row) { table_->silu_mul_row(args, row); });
      break;
    }
    case Kind::kLinear:
      run_linear(op, rows);
      break;
    case Kind::kRotary: {
      const Buffer& in = buffer(op.input);
      const Buffer& out = buffer(op.output);
      RotaryArgs args;
      args.batch = &batch;
      args.qkv = in.data;
      args.q_heads = q_heads_;
      args.layout = layout_;
      args.q_norm = vector(op.q_norm);
      args.k_norm = vector(op.k_norm);
      args.eps = op.eps;
      args.cos = cosines_;
      args.sin = sines_;
      args.rotary_dim = rotary_dim_;
      args.q_out = out.data;
      args.kv = cache_[static_cast<size_t>(op.layer)];
      each_row(rows, in.cols, [&](int row) { table_->rotary_store_row(args, row); });
      break;
    }
    case Kind::kAttention:
      run_attention(op, batch);
      break;
    case Kind::kSelect: {
      const Buffer& in = buffer(op.input);
      const Buffer& out = buffer(op.output);
      for (int row = 0; row < rows; ++row)
        std::memcpy(out.data + row * stride(out), in.data + selection[row] * stride(in),
                    sizeof(float) * static_cast<size_t>(in.cols));
      break;
    }
    case Kind::kSample:  // not recorded: follows every slice of logits
      break;
  }
}

void Program::plan_attention(const Batch& batch) {
  size_t partials = 0;
  for (WindowWork& w : windows_) {
    w.work = w.planner.plan(batch, layout_, q_heads_, w.window, pool_.size());
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
  for (size_t i = 0; i < first_selected_; ++i)
    timed(ops_[i].kind, [&] { run_op(ops_[i], batch, batch.rows, nullptr); });
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
