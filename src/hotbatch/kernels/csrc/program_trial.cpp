// Trying out what is recorded: a few tokens go through a program while it is being recorded, each
// operation once, so that whoever records can see what a layer will get before its weights are
// packed. They have a cache of their own; buffers are the program's, as no step runs yet.
#include <algorithm>
#include <numeric>
#include <utility>

#include "csrc/program.h"

namespace hotbatch {
namespace {

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

}  // namespace

void Program::set_trial(const int32_t* tokens, int count) {
  require(count > 0 && count <= shape_.max_rows && count <= shape_.max_logit_rows,
          "too many tokens to try");
  require(count <= rotary_positions_, "tokens to try are outside the model's context");
  require(ops_.empty() && !cache_.empty(), "tokens to try come after the cache, before all else");
  auto trial = std::make_unique<Trial>();
  const int blocks = (count + layout_.block_size - 1) / layout_.block_size;
  trial->tokens.assign(tokens, tokens + count);
  trial->positions.resize(static_cast<size_t>(count));
  std::iota(trial->positions.begin(), trial->positions.end(), 0);
  trial->blocks.resize(static_cast<size_t>(blocks));
  std::iota(trial->blocks.begin(), trial->blocks.end(), 0);
  trial->rows = {0, count};
  trial->context = {count};
  Batch& batch = trial->batch;
  batch.rows = count;
  batch.sequences = 1;
  batch.token_ids = trial->tokens.data();
  batch.positions = trial->positions.data();
  batch.slots = trial->positions.data();
  batch.seq_starts = trial->rows.data();
  batch.context_lens = trial->context.data();
  batch.block_table = trial->blocks.data();
  batch.max_blocks = blocks;
  batch.logit_rows = trial->positions.data();
  batch.logit_count = count;
  uint8_t* memory = trial->memory.take(kv_block_bytes(layout_) * static_cast<size_t>(blocks));
  trial->cache.assign(cache_.size(), memory);
  trial_ = std::move(trial);
}

void Program::try_norm(int input, const float* weight, float eps, float* out) {
  require(trial_ != nullptr, "there are no tokens to try");
  Trial& trial = *trial_;
  const Batch& batch = trial.batch;
  for (int row = 0; trial.done == 0 && row < batch.rows; ++row)
    require(batch.token_ids[row] >= 0 && batch.token_ids[row] < tables_.at(0).rows,
            "a token to try is outside the vocabulary");
  const Awake awake(pool_);
  for (FetchAhead& ahead : ahead_) ahead = FetchAhead();
  plan_attention(batch);
  std::swap(cache_, trial.cache);
  for (; trial.done < ops_.size(); ++trial.done)
    run_op(ops_[trial.done], batch, batch.rows, batch.logit_rows);
  std::swap(cache_, trial.cache);

  const Buffer& in = buffers_.at(static_cast<size_t>(input));
  Activation act;
  act.precision = Precision::kF32;
  act.cols = act.stride = in.cols;
  act.data = out;
  const NormArgs args{in.data, round_up(in.cols, 16), weight, eps, &act};
  pool_.parallel(batch.rows, [&](int row, int) { table_->norm_rows(args, row, row + 1); });
}

void Program::column_squares(const std::vector<RawRows>& parts, float* means) {
  require(!parts.empty(), "a weight needs at least one tensor");
  const int cols = parts[0].cols;
  int rows = 0;
  for (const RawRows& part : parts) {
    require(part.cols == cols, "stacked tensors differ in their columns");
    rows += part.rows;
  }
  require(rows > 0 && cols <= kMaxInputs, "a weight is empty or has too many input columns");
  const PackArgs args{nullptr, parts.data(), static_cast<int>(parts.size())};
  // A thousand rows tell a column's mean square to a twentieth; a head has a hundred times as many.
  constexpr int kMostRows = 1024, kRowsOfPiece = 64;
  const int step = (rows + kMostRows - 1) / kMostRows, rows_per_piece = kRowsOfPiece * step;
  const int pieces = (rows + rows_per_piece - 1) / rows_per_piece;
  // A sum a piece, added up in order: who computes which one changes no bit.
  const auto width = static_cast<size_t>(round_up(cols, 16));
  std::vector<float> sums(width * static_cast<size_t>(pieces));
  const auto add_piece = [&](int piece) {
    table_->column_squares(args, piece * rows_per_piece,
                           std::min(rows, (piece + 1) * rows_per_piece), step,
                           sums.data() + width * static_cast<size_t>(piece));
  };
  const Awake awake(pool_);
  pool_.parallel(pieces, [&add_piece](int piece, int) { add_piece(piece); });
  std::vector<double> totals(static_cast<size_t>(cols));
  for (size_t piece = 0; piece < static_cast<size_t>(pieces); ++piece)
    for (size_t k = 0; k < totals.size(); ++k) totals[k] += double{sums[width * piece + k]};
  const int seen = (rows + step - 1) / step;
  for (size_t k = 0; k < totals.size(); ++k) means[k] = static_cast<float>(totals[k] / seen);
}

}  // namespace hotbatch
