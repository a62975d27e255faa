// Recording a program, and packing its weights; program_run.cpp runs it.
#include "csrc/program.h"

#include <algorithm>

namespace hotbatch {
namespace {

const KernelTable* require_isa(const char* isa) {
  const KernelTable* table = kernel_table(isa);
  if (!table) throw std::invalid_argument(std::string("this machine cannot run ") + isa);
  return table;
}

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace

Program::Program(const ProgramShape& shape, const char* isa)
    : shape_(shape),
      table_(require_isa(isa)),
      pool_(shape.threads),
      ahead_(static_cast<size_t>(pool_.size())) {
  require(shape.max_rows > 0 && shape.max_logit_rows > 0, "a program needs at least one row");
  gated_scratch_ =
      buffers_memory_.take_array<float>(static_cast<size_t>(pool_.size()) * kGatedFloats);
}

// ---- recording ----

int Program::add_weight(Precision precision, const std::vector<RawRows>& parts, const float* bias,
                        bool gated, const float* column_scales) {
  PackedLinear weight;
  weight.precision = precision;
  require(!parts.empty(), "a weight needs at least one tensor");
  weight.inputs = parts[0].cols;
  for (const RawRows& part : parts) {
    require(part.cols == weight.inputs, "stacked tensors differ in their columns");
    weight.outputs += part.rows;
  }
  weight.gated = gated;
  require(!gated || weight.outputs % kPanel == 0, "gate and up must be multiples of 16 wide");
  require(weight.inputs <= kMaxInputs, "a weight has too many input columns");
  require(!column_scales || precision == Precision::kInt8, "only int8 columns are scaled");
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
    for (int column = 0; column < weight.outputs; ++column)
      weight.bias[column] = bias[weight.source_row(column)];
  }
  const PackArgs args{&weight, parts.data(), static_cast<int>(parts.size()), column_scales};
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

void Program::prefault_cache() {
  const size_t bytes = kv_block_bytes(layout_) * static_cast<size_t>(cache_blocks_);
  std::vector<Prefault::Range> ranges;
  for (uint8_t* layer : cache_) ranges.push_back({layer, bytes});
  prefault_.start(std::move(ranges), pool_.size());
}

int Program::new_buffer(int cols, bool selected) {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& buffer = buffers_[i];
    if (buffer.is_free && buffer.cols == cols && buffer.selected == selected) {
      buffer.is_free = false;
      return static_cast<int>(i);
    }
  }
  const size_t rows = static_cast<size_t>(selected ? shape_.max_logit_rows : shape_.max_rows);
  float* data = buffers_memory_.take_array<float>(rows * static_cast<size_t>(round_up(cols, 16)));
  buffers_.push_back({data, cols, selected, false});
  return static_cast<int>(buffers_.size()) - 1;
}

void Program::release(int buffer) { buffers_.at(static_cast<size_t>(buffer)).is_free = true; }

// All activations of one kind share memory: each is read by the very next operation.
int Program::new_activation(Precision format, int cols, bool row_scale) {
  const int group = row_scale && format == Precision::kInt8 ? padded_inputs(format, cols)
                                                            : group_size(format);
  for (size_t i = 0; i < activations_.size(); ++i)
    if (activations_[i].precision == format && activations_[i].cols == cols &&
        activations_[i].group == group)
      return static_cast<int>(i);
  Activation act;
  act.precision = format;
  act.cols = cols;
  act.group = group;
  act.stride = padded_inputs(format, cols);
  const size_t rows = static_cast<size_t>(std::max(shape_.max_rows, shape_.max_logit_rows));
  const size_t element = format == Precision::kF32 ? 4 : format == Precision::kBf16 ? 2 : 1;
  act.data = buffers_memory_.take(rows * static_cast<size_t>(act.stride) * element);
  if (format == Precision::kInt8 || format == Precision::kInt4) {
    act.groups = act.stride / group;
    // Not a multiple of a page: the groups of a row would share one set of the first cache.
    act.scale_stride = round_up(static_cast<int>(rows), 16) + 16;
    const size_t count = static_cast<size_t>(act.groups * act.scale_stride);
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
  op.width = tables_.at(static_cast<size_t>(table)).cols;
  op.output = new_buffer(op.width, false);
  ops_.push_back(op);
  return op.output;
}

int Program::norm(int input, int vector, float eps, Precision format, bool row_scale) {
  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  Op op{Kind::kNorm};
  op.input = input;
  op.weight = vector;
  op.eps = eps;
  op.width = in.cols;
  op.output = new_activation(format, in.cols, row_scale);
  ops_.push_back(op);
  return op.output;
}

int Program::convert(int input, Precision format, bool row_scale) {
  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  Op op{Kind::kConvert};
  op.input = input;
  op.width = in.cols;
  op.output = new_activation(format, in.cols, row_scale);
  ops_.push_back(op);
  return op.output;
}

int Program::silu_mul(int input, Precision format) {
  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  require(in.cols % 32 == 0, "gate and up must be multiples of 16 wide");
  Op op{Kind::kSiluMul};
  op.input = input;
  op.width = in.cols;
  op.output = new_activation(format, in.cols / 2);
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
  // A residual is updated in place: nothing reads the old stream afterwards.
  op.output = residual >= 0 ? residual : new_buffer(w.outputs, selecting_);
  ops_.push_back(op);
  return op.output;
}

int Program::gated_linear(int activation, int weight, Precision format) {
  const PackedLinear& w = weights_.at(static_cast<size_t>(weight));
  const Activation& act = activations_.at(static_cast<size_t>(activation));
  require(w.gated, "the weight was not packed for a gated layer");
  require(act.cols == w.inputs && act.precision == w.precision,
          "a linear layer's input does not fit its weight");
  Op op{Kind::kGated};
  op.input = activation;
  op.weight = weight;
  op.output = new_activation(format, w.outputs / 2);
  require(op.output != activation, "a gated layer cannot write over its own input");
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
  op.width = buffers_.at(static_cast<size_t>(input)).cols;
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
  if (!attention_scratch_) {
    attention_stride_ = round_up(static_cast<int>(attention_scratch_bytes(layout_, q_heads_)), 64);
    attention_scratch_ =
        buffers_memory_.take(static_cast<size_t>(pool_.size()) * attention_stride_);
  }
  ops_.push_back(op);
  return op.output;
}

int Program::select(int input) {
  require(!selecting_, "a program selects rows once");
  first_selected_ = ops_.size();
  selecting_ = true;
  Op op{Kind::kSelect};
  op.input = input;
  op.width = buffers_.at(static_cast<size_t>(input)).cols;
  op.output = new_buffer(op.width, true);
  ops_.push_back(op);
  return op.output;
}

void Program::finish(int logits) {
  require(selecting_, "a program must select the rows whose logits are wanted");
  logits_ = logits;
  trial_.reset();
  sample_stride_ = (sample_scratch_bytes(vocabulary()) + 63) / 64 * 64;
  sample_scratch_ = buffers_memory_.take(static_cast<size_t>(pool_.size()) * sample_stride_);
}

int Program::vocabulary() const {
  return logits_ < 0 ? 0 : buffers_[static_cast<size_t>(logits_)].cols;
}

}  // namespace hotbatch
