// Samples one row of logits, by the rules of reference.py: adjust, then greedy or a draw from the
// tokens in descending order. Included inside namespace hotbatch::HB_ISA; see csrc/isa_tables.inc.
//
// Cost: a greedy row is one pass over the vocabulary. Sampling is three (largest logit; weights
// and their sums; tokens where the draw falls), then some hundred tokens to sort: see candidates.h.

#include "sampling/candidates.h"

// First word of Philox4x32-10 (Salmon et al. 2011) for counter (position, 0, 0, 0), as a
// number in (0, 1).
inline double philox_uniform(uint64_t seed, uint32_t position) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * c0, right = uint64_t{0xCD9E8D57} * c2;
    const uint32_t next0 = static_cast<uint32_t>(right >> 32) ^ c1 ^ key0;
    const uint32_t next2 = static_cast<uint32_t>(left >> 32) ^ c3 ^ key1;
    c1 = static_cast<uint32_t>(right);
    c3 = static_cast<uint32_t>(left);
    c0 = next0;
    c2 = next2;
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return (c0 + 0.5) * 0x1p-32;
}

struct Peak {
  float value;
  int index;  // the lowest among equals; -1 if all are -infinity
  bool nan;   // some entry is NaN: value and index mean nothing
};

// The largest of n numbers, in one pass.
inline Peak find_peak(const float* x, int n) {
  constexpr int kStretch = 8 * kLanes;
  Peak peak{-std::numeric_limits<float>::infinity(), -1, false};
  uint32_t nan = 0;
  int stretch = -1;  // where the best so far was first seen
  const auto offer = [&](vf top, int begin) {
    if (mask_greater(top, set1(peak.value)) == 0) return;
    peak.value = largest(top);
    stretch = begin;
  };
  int i = 0;
  for (; i + kStretch <= n; i += kStretch) {
    vf tops[4];
    HB_UNROLL
    for (int j = 0; j < 4; ++j) {
      const vf a = load(x + i + 2 * j * kLanes), b = load(x + i + (2 * j + 1) * kLanes);
      nan |= mask_unordered(a, b);
      tops[j] = max(a, b);
    }
    offer(max(max(tops[0], tops[1]), max(tops[2], tops[3])), i);
  }
  for (; i < n; i += kLanes) {
    const vf a = load_first(x + i, std::min(kLanes, n - i), -std::numeric_limits<float>::infinity());
    nan |= mask_unordered(a, a);
    offer(a, i);
  }
  peak.nan = nan != 0;
  if (peak.nan || stretch < 0) return peak;
  for (peak.index = stretch; x[peak.index] != peak.value; ++peak.index) {
  }
  return peak;
}

// log of the sum of e^(x - top).
inline double log_sum(const float* x, int n, float top) {
  WideSum sum = wide_zero();
  const vf shift = set1(top);
  for_each_vector(x, n, [&](vf v, int) { accumulate(sum, exp(v - shift)); });
  return std::log(total(sum));
}

// 1 + the number of entries that come before x[index] in descending order, ids ascending.
inline int rank_of(const float* x, int n, int index) {
  const vf value = set1(x[index]);
  int ahead = 0;
  for_each_vector(x, n, [&](vf v, int i) {
    uint32_t mask = mask_greater(v, value);
    if (i <= index) {
      const uint32_t before = i + kLanes <= index ? 0xffffu : (1u << (index - i)) - 1;
      mask |= mask_equal(v, value) & before;
    }
    ahead += __builtin_popcount(mask);
  });
  return ahead + 1;
}

// Ids of the `count` largest, best first.
inline void find_top(const float* x, int n, int count, int32_t* ids) {
  float values[kMaxLogprobs];
  int found = 0;
  vf least = set1(-std::numeric_limits<float>::infinity());
  for_each_vector(x, n, [&](vf v, int i) {
    uint32_t mask = found < count ? (n - i < kLanes ? (1u << (n - i)) - 1 : 0xffffu)
                                  : mask_greater(v, least);
    for (; mask; mask &= mask - 1) {
      const int id = i + __builtin_ctz(mask);
      int place = found;
      if (found == count) {
        if (!(x[id] > values[count - 1])) continue;
        --place;
      } else {
        ++found;
      }
      for (; place > 0 && x[id] > values[place - 1]; --place) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = x[id];
      ids[place] = id;
      if (found == count) least = set1(values[count - 1]);
    }
  });
}

// A row's own slice of one of the lists in SampleArgs.
struct RowList {
  int begin = 0, end = 0;
  RowList(const int32_t* starts, int row) {
    if (starts) begin = starts[row], end = starts[row + 1];
  }
  bool empty() const { return begin == end; }
};

inline bool has_penalties(const SampleArgs& args, int row) {
  return args.repetition_penalty[row] != 1.0f || args.presence_penalty[row] != 0.0f ||
         args.frequency_penalty[row] != 0.0f;
}

// Applies the penalties to x. `counts` [vocab] is all zero before and after.
inline void penalize(const SampleArgs& args, int row, float* x, uint32_t* counts) {
  const RowList history(args.history_starts, row);
  constexpr uint32_t kSeen = 1u << 31;  // the other bits count occurrences in the output
  const auto each_token = [&](auto body) {
    for (int i = history.begin; i < history.end; ++i) {
      const int32_t token = args.history[i];
      if (token >= 0 && token < args.vocab) body(token, i - history.begin >= args.num_prompt[row]);
    }
  };
  each_token([&](int32_t token, bool output) {
    counts[token] = (counts[token] + (output ? 1u : 0u)) | kSeen;
  });
  const float repetition = args.repetition_penalty[row];
  each_token([&](int32_t token, bool) {
    const uint32_t count = counts[token];
    if (count == 0) return;  // done before
    counts[token] = 0;
    float value = x[token];
    if (repetition != 1.0f) value = value > 0.0f ? value / repetition : value * repetition;
    if (count != kSeen) {
      value -= args.frequency_penalty[row] * static_cast<float>(count & ~kSeen);
      value -= args.presence_penalty[row];
    }
    x[token] = value;
  });
}

// The row's logits after biases, bans and penalties: a copy in scratch if there are any.
inline const float* adjusted_logits(const SampleArgs& args, int row, const float* logits,
                                    const SampleScratch& scratch) {
  const RowList bias(args.bias_starts, row), banned(args.banned_starts, row);
  const bool penalties = has_penalties(args, row);
  if (bias.empty() && banned.empty() && !penalties) return logits;
  float* x = scratch.logits;
  std::memcpy(x, logits, sizeof(float) * static_cast<size_t>(args.vocab));
  const auto in_vocab = [&](int32_t id) { return id >= 0 && id < args.vocab; };
  for (int i = bias.begin; i < bias.end; ++i)
    if (in_vocab(args.bias_ids[i])) x[args.bias_ids[i]] += args.bias_values[i];
  for (int i = banned.begin; i < banned.end; ++i)
    if (in_vocab(args.banned_ids[i]))
      x[args.banned_ids[i]] = -std::numeric_limits<float>::infinity();
  if (penalties) penalize(args, row, x, scratch.counts);
  return x;
}

// Divides by the temperature and draws. `logits` may be scratch.logits.
inline int draw(const SampleArgs& args, int row, const float* logits, float top,
                const SampleScratch& scratch) {
  const float temperature = args.temperature[row], top_p = args.top_p[row], min_p = args.min_p[row];
  const int top_k = args.top_k[row];
  const double u = philox_uniform(args.seed[row], static_cast<uint32_t>(args.position[row]));
  Candidates candidates(scratch, args.vocab);
  double mass = candidates.scale(logits, top, temperature);
  if (top_k > 0 && top_k < args.vocab) mass = candidates.keep_count(top_k);
  if (top_p < 1.0f) mass = candidates.keep_mass(static_cast<double>(top_p) * mass);
  if (min_p > 0.0f) mass = candidates.keep_weight(min_p);
  return candidates.pick(u * mass);
}

// The token of the row, or -1 and an error.
inline int choose(const SampleArgs& args, int row, const float* logits,
                  const SampleScratch& scratch) {
  const float* x = adjusted_logits(args, row, logits, scratch);
  const Peak peak = find_peak(x, args.vocab);
  if (peak.nan || peak.value == std::numeric_limits<float>::infinity()) {
    args.error[row] = kSampleNotFinite;
    return -1;
  }
  if (peak.index < 0) {
    args.error[row] = kSampleNothingLeft;
    return -1;
  }
  // A temperature so small that the quotient overflows is as good as 0.
  const bool greedy =
      args.temperature[row] == 0.0f || !std::isfinite(peak.value / args.temperature[row]);
  if (greedy) return peak.index;
  return draw(args, row, x, peak.value, scratch);
}

// Log-probabilities of the chosen token and of the likeliest, under the logits as they are.
inline void report_logprobs(const SampleArgs& args, int row, const float* logits, int token) {
  const int count = std::min(args.num_logprobs[row], args.vocab);
  const Peak peak = find_peak(logits, args.vocab);
  if (peak.nan || !std::isfinite(peak.value)) {
    args.error[row] = kSampleNotFinite;
    args.token[row] = -1;
    return;
  }
  const double normaliser =
      static_cast<double>(peak.value) + log_sum(logits, args.vocab, peak.value);
  args.logprob[row] = static_cast<float>(static_cast<double>(logits[token]) - normaliser);
  args.rank[row] = rank_of(logits, args.vocab, token);
  int32_t* ids = args.top_ids + int64_t{row} * kMaxLogprobs;
  float* logprobs = args.top_logprobs + int64_t{row} * kMaxLogprobs;
  for (int i = 0; i < kMaxLogprobs; ++i) ids[i] = -1, logprobs[i] = 0.0f;
  if (count <= 0) return;
  find_top(logits, args.vocab, count, ids);
  for (int i = 0; i < count; ++i)
    logprobs[i] = static_cast<float>(static_cast<double>(logits[ids[i]]) - normaliser);
}

inline void sample_row(const SampleArgs& args, int row, int thread) {
  const float* logits = args.logits + args.stride * row;
  const SampleScratch scratch(static_cast<char*>(args.scratch) +
                                  args.scratch_stride * static_cast<size_t>(thread),
                              args.vocab);
  args.error[row] = kSampleOk;
  const int target = args.target ? args.target[row] : -1;
  if (target >= args.vocab) {
    args.error[row] = kSampleBadTarget;
    args.token[row] = -1;
    return;
  }
  const int token = target >= 0 ? target : choose(args, row, logits, scratch);
  args.token[row] = token;
  if (token >= 0 && args.num_logprobs && args.num_logprobs[row] >= 0)
    report_logprobs(args, row, logits, token);
}
