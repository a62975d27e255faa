// The tokens of a row in descending order, as far as a draw needs them, without sorting the
// vocabulary.
//
// Tokens are gathered in brackets of logits: first those within 4 of the largest, then within 8,
// 16, ...; the walk nearly always ends in the first. A bracket with many tokens is dealt
// into segments, finer ranges of logits. Only the segment in which a walk ends is sorted; those
// before it count with their sums. Weights are e^(x - largest) in f32, sums are f64, all in an
// order that the row alone determines.
//
// Included inside namespace hotbatch::HB_ISA by sampling/cpu.h.

// body(vector, first index) over n numbers; past the end lanes are -infinity.
template <class Body>
inline void for_each_vector(const float* x, int n, const Body& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) body(load(x + i), i);
  if (i < n) body(load_first(x + i, n - i, -std::numeric_limits<float>::infinity()), i);
}

// A token, ordered by descending logit, then ascending id.
struct Candidate {
  uint64_t key;

  static Candidate of(float x, int id) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits ^= bits >> 31 ? 0u : 0x7fffffffu;  // ascending as x descends
    return {uint64_t{bits} << 32 | static_cast<uint32_t>(id)};
  }
  int id() const { return static_cast<int>(static_cast<uint32_t>(key)); }
  float logit() const {
    uint32_t bits = static_cast<uint32_t>(key >> 32);
    bits ^= bits >> 31 ? 0u : 0x7fffffffu;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  friend bool operator<(Candidate a, Candidate b) { return a.key < b.key; }
};

// One thread's memory: see sample_scratch_bytes.
struct SampleScratch {
  uint32_t* counts;       // [vocab], zero between calls
  float* logits;          // [vocab]
  float* weights;         // [vocab]
  Candidate* candidates;  // [vocab]
  Candidate* dealt;       // [vocab], room for dealing into segments

  SampleScratch(char* memory, int vocab) {
    const size_t padded = (static_cast<size_t>(vocab) + 63) / 64 * 64;
    counts = reinterpret_cast<uint32_t*>(memory);
    logits = reinterpret_cast<float*>(counts + padded);
    weights = logits + padded;
    candidates = reinterpret_cast<Candidate*>(weights + padded);
    dealt = candidates + padded;
  }
};

class Candidates {
 public:
  Candidates(const SampleScratch& scratch, int vocab) : scratch_(scratch), vocab_(vocab) {}

  // Takes logits / temperature as the row's numbers; `top` is the largest logit. Returns the sum
  // of all weights if asked for, else 0. Gathers the first bracket on the way.
  double scale(const float* logits, float top, float temperature, bool want_sum) {
    const vf divisor = set1(temperature);
    top_ = first_lane(set1(top) / divisor + zero());
    const vf shift = set1(top_);
    WideSum sum = wide_zero();
    begin_bracket();
    for_each_vector(logits, vocab_, [&](vf v, int i) {
      v = v / divisor + zero();  // -0 becomes +0: they are equal, so must their order be
      store_first(scratch_.logits + i, std::min(kLanes, vocab_ - i), v);
      if (want_sum) accumulate(sum, exp(v - shift));
      gather(v, i);
    });
    end_bracket();
    return want_sum ? total(sum) : 0.0;
  }

  // Each of the following shortens the list from its end and returns the sum of what stays.
  // The first k tokens:
  double keep_count(int k) {
    double before = 0.0;
    for (int s = 0; ready(s); ++s) {
      Segment& segment = segments_[s];
      if (segment.end < k) {
        before += segment.sum;
        continue;
      }
      sort(segment);
      end_ = k;
      return before + sum_of(segment.begin, k);
    }
    return before;
  }

  // Those before which the weights sum to less than `mass`:
  double keep_mass(double mass) {
    double before = 0.0;
    for (int s = 0; ready(s); ++s) {
      Segment& segment = segments_[s];
      if (segment.end <= end_ && before + segment.sum < mass) {
        before += segment.sum;
        continue;
      }
      sort(segment);
      for (int i = segment.begin; i < std::min(segment.end, end_); ++i) {
        if (before >= mass && i > 0) {
          end_ = i;
          return before;
        }
        before += static_cast<double>(scratch_.weights[i]);
      }
    }
    return before;
  }

  // Those with at least this weight, where the first has 1:
  double keep_weight(float least) {
    double before = 0.0;
    for (int s = 0; ready(s); ++s) {
      Segment& segment = segments_[s];
      const float* w = scratch_.weights;
      const bool whole = segment.end <= end_ && std::all_of(w + segment.begin, w + segment.end,
                                                            AtLeast{least});
      if (whole) {
        before += segment.sum;
        continue;
      }
      sort(segment);
      for (int i = segment.begin; i < std::min(segment.end, end_); ++i) {
        if (w[i] < least && i > 0) {
          end_ = i;
          return before;
        }
        before += static_cast<double>(w[i]);
      }
    }
    return before;
  }

  // The first token at which the running sum exceeds `mass`; the last one if rounding leaves none.
  int pick(double mass) {
    double before = 0.0;
    int last = -1;
    for (int s = 0; ready(s); ++s) {
      Segment& segment = segments_[s];
      if (segment.end <= end_ && before + segment.sum <= mass) {
        before += segment.sum;
        last = s;
        continue;
      }
      sort(segment);
      last = s;
      for (int i = segment.begin; i < std::min(segment.end, end_); ++i) {
        before += static_cast<double>(scratch_.weights[i]);
        if (before > mass) return scratch_.candidates[i].id();
      }
    }
    sort(segments_[last]);
    return scratch_.candidates[std::min(segments_[last].end, end_) - 1].id();
  }

 private:
  struct Segment {
    int begin, end;  // in candidates and weights
    double sum;      // of the weights
    bool sorted;
  };
  struct AtLeast {
    float least;
    bool operator()(float w) const { return w >= least; }
  };
  static constexpr int kBrackets = 5;
  static constexpr float kDepth[kBrackets] = {4.0f, 8.0f, 16.0f, 32.0f, 87.0f};
  static constexpr int kDeal = 512;       // candidates of a bracket that is not dealt further
  static constexpr int kBuckets = 256;
  static constexpr int kLeastSegment = 128;

  // True if segment s exists within the kept part: looks further down as needed.
  bool ready(int s) {
    while (s >= segment_count_ && bracket_ < kBrackets && count_ < end_) {
      begin_bracket();
      for_each_vector(scratch_.logits, vocab_, [&](vf v, int i) { gather(v, i); });
      end_bracket();
    }
    return s < segment_count_ && segments_[s].begin < end_;
  }

  void begin_bracket() {
    bracket_begin_ = count_;
    upper_ = bracket_ == 0 ? std::numeric_limits<float>::infinity() : lower_;
    lower_ = top_ - kDepth[bracket_++];
  }

  void gather(vf v, int i) {
    uint32_t mask = mask_greater_equal(v, set1(lower_)) & ~mask_greater_equal(v, set1(upper_));
    if (mask == 0) return;
    alignas(64) float lanes[kLanes];
    store(lanes, v);
    for (; mask; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      scratch_.candidates[count_++] = Candidate::of(lanes[lane], i + lane);
    }
  }

  // Cuts what was gathered into segments. Buckets are ranges of logits of equal width, and a
  // segment is one or more of them.
  void end_bracket() {
    const int begin = bracket_begin_, n = count_ - begin;
    if (n == 0) return;
    if (n <= kDeal) {
      add_segment(begin, count_);
      return;
    }
    Candidate* all = scratch_.candidates + begin;
    float high = all[0].logit(), low = high;
    for (int i = 1; i < n; ++i) {
      high = std::max(high, all[i].logit());
      low = std::min(low, all[i].logit());
    }
    const float per_bucket = high > low ? (kBuckets - 1) / (high - low) : 0.0f;
    const auto bucket_of = [&](Candidate c) {
      return std::min(kBuckets - 1, static_cast<int>((high - c.logit()) * per_bucket));
    };
    int starts[kBuckets + 1] = {};
    for (int i = 0; i < n; ++i) ++starts[bucket_of(all[i]) + 1];
    for (int b = 0; b < kBuckets; ++b) starts[b + 1] += starts[b];
    int place[kBuckets];
    std::memcpy(place, starts, sizeof place);
    for (int i = 0; i < n; ++i) scratch_.dealt[place[bucket_of(all[i])]++] = all[i];
    std::memcpy(all, scratch_.dealt, sizeof(Candidate) * static_cast<size_t>(n));
    int segment = 0;
    for (int b = 1; b <= kBuckets; ++b) {
      if (starts[b] - segment < kLeastSegment && b < kBuckets) continue;
      if (starts[b] > segment) add_segment(begin + segment, begin + starts[b]);
      segment = starts[b];
    }
  }

  void add_segment(int begin, int end) {
    segments_[segment_count_++] = {begin, end, 0.0, false};
    weigh(begin, end);
    segments_[segment_count_ - 1].sum = sum_of(begin, end);
  }

  void weigh(int begin, int end) {
    for (int i = begin; i < end; ++i) scratch_.weights[i] = scratch_.candidates[i].logit();
    const vf shift = set1(top_);
    for (int i = begin; i < end; i += kLanes) {
      const int count = std::min(kLanes, end - i);
      store_first(scratch_.weights + i, count, exp(load_first(scratch_.weights + i, count, 0.0f) - shift));
    }
  }

  double sum_of(int begin, int end) const {
    double sum = 0.0;
    for (int i = begin; i < end; ++i) sum += static_cast<double>(scratch_.weights[i]);
    return sum;
  }

  void sort(Segment& segment) {
    if (segment.sorted) return;
    segment.sorted = true;
    std::sort(scratch_.candidates + segment.begin, scratch_.candidates + segment.end);
    weigh(segment.begin, segment.end);
  }

  const SampleScratch& scratch_;
  const int vocab_;
  float top_ = 0.0f;             // largest number
  int end_ = 1 << 30;            // tokens that are kept
  int count_ = 0;                // gathered so far
  int bracket_ = 0;              // the next one
  int bracket_begin_ = 0;
  float lower_ = 0.0f, upper_ = 0.0f;  // the current bracket holds lower <= x < upper
  int segment_count_ = 0;
  Segment segments_[kBrackets * (kBuckets + 1)];
};
