// Sampling of one token a row of logits, and log-probabilities; all arrays are per row unless
// they say otherwise. A row's result depends on its own logits and parameters alone.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotbatch {

constexpr int kMaxLogprobs = 20;

enum SampleError : int32_t {
  kSampleOk = 0,
  kSampleNotFinite = 1,  // a logit is NaN or +infinity
  kSampleNothingLeft = 2,  // every token is banned
  kSampleBadTarget = 3,  // a target is outside the vocabulary
};

// Lists of varying length a row: row r owns entries starts[r] .. starts[r + 1] - 1. A null
// `starts` means that every row's list is empty.
struct SampleArgs {
  const float* logits = nullptr;  // [rows][stride], the first `vocab` of each row count
  int64_t stride = 0;
  int vocab = 0;
  int rows = 0;

  const float* temperature = nullptr;  // 0: greedy
  const float* top_p = nullptr;        // 1: off
  const int32_t* top_k = nullptr;      // <= 0: off
  const float* min_p = nullptr;        // 0: off
  const float* repetition_penalty = nullptr;  // 1: off
  const float* presence_penalty = nullptr;    // 0: off
  const float* frequency_penalty = nullptr;   // 0: off
  const uint64_t* seed = nullptr;
  const int32_t* position = nullptr;   // of the sampled token in its sequence
  // Log-probabilities wanted besides the chosen token's: 0 .. kMaxLogprobs; -1: none at all.
  const int32_t* num_logprobs = nullptr;
  // >= 0: nothing is sampled, this token is reported on instead (prompt log-probabilities).
  // Null: every row samples.
  const int32_t* target = nullptr;

  const int32_t* bias_starts = nullptr;  // logit_bias
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  const int32_t* banned_starts = nullptr;
  const int32_t* banned_ids = nullptr;
  const int32_t* history_starts = nullptr;  // prompt and output tokens, for the penalties
  const int32_t* history = nullptr;
  const int32_t* num_prompt = nullptr;  // how many of a row's history are its prompt

  int32_t* token = nullptr;
  float* logprob = nullptr;        // of `token`, from the raw logits; written if asked for
  int32_t* rank = nullptr;         // 1 + tokens with a larger raw logit; written if asked for
  int32_t* top_ids = nullptr;      // [rows][kMaxLogprobs], best first, -1 beyond num_logprobs
  float* top_logprobs = nullptr;   // [rows][kMaxLogprobs]
  int32_t* error = nullptr;        // SampleError; token is -1 where it is not kSampleOk

  // threads * scratch_stride bytes, 64-byte aligned. It must be zeroed once, after allocation:
  // token counts live there, and every call leaves them zero.
  void* scratch = nullptr;
  size_t scratch_stride = 0;  // at least sample_scratch_bytes(vocab), a multiple of 64
};

// Bytes of scratch that one thread needs. (Internal linkage: see attention/args.h.)
static inline size_t sample_scratch_bytes(int vocab) {
  const size_t padded = (static_cast<size_t>(vocab) + 63) / 64 * 64;
  return padded * (3 * sizeof(float) + sizeof(uint64_t));
}

}  // namespace hotbatch
