// The tokens of a row in descending order, as far as a draw needs them, without sorting the
// vocabulary.
//
// The list is kept as segments, ranges of logits with their count and their sum of weights. A walk
// down the list skips segments by their sums; one in which it ends is cut into eight, in one
// vectorised pass over the vocabulary, or once it is small, gathered and sorted. The first
// ranges are fine near the largest logit, so that mostly one gathering of some hundred tokens
// is all; flat distributions take two or three cuts more. Weights are e^(x - largest) in f32, sums
// of few are f32, of many f64, all in an order that the row alone determines.
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
  friend bool operator<(Candidate a, Candidate b) { return a.key < b.key; }
};

// One thread's memory: see sample_scratch_bytes.
struct SampleScratch {
  uint32_t* counts;       // [vocab], zero between calls
  float* logits;          // [vocab]
  float* weights;         // [vocab]
  Candidate* candidates;  // [vocab]

  SampleScratch(char* memory, int vocab) {
    const size_t padded = (static_cast<size_t>(vocab) + 63) / 64 * 64;
    counts = reinterpret_cast<uint32_t*>(memory);
    logits = reinterpret_cast<float*>(counts + padded);
    weights = logits + padded;
    candidates = reinterpret_cast<Candidate*>(weights + padded);
  }
};

class Candidates {
 public:
  Candidates(const SampleScratch& scratch, int vocab) : scratch_(scratch), vocab_(vocab) {}

  // Takes logits / temperature as the row's numbers; `top` is the largest logit. Returns the sum
  // of all weights.
  double scale(const float* logits, float top, float temperature) {
    const vf divisor = set1(temperature);
    top_ = first_lane(set1(top) / divisor + zero());
    const vf shift = set1(top_);
    // The scratch is padded: what lies past the vocabulary is written as -infinity.
    float* const x = scratch_.logits;
    float* const weights = scratch_.weights;
    Cut<kFirstParts> cut;
    for (int j = 0; j < kFirstParts; ++j) cut.lower[j] = top_ - kDepth[j];
    cut.run(vocab_, [&](int i, vf& v, vf& weight) {
      const int count = vocab_ - i;
      v = count >= kLanes ? load(logits + i)
                          : load_first(logits + i, count, -std::numeric_limits<float>::infinity());
      v = v / divisor + zero();  // -0 becomes +0: they are equal, so must their order be
      weight = exp(v - shift);
      store(x + i, v);
      store(weights + i, weight);
    });
    replace(0, 0, cut, std::numeric_limits<float>::infinity(), 0);
    return total(cut.sums[kFirstParts - 1]);
  }

  // Each of the following shortens the list from its end and returns the sum of what stays.
  // The first k tokens:
  double keep_count(int k) {
    Place place;
    while (place.segment < segment_count_) {
      if (place.count + segments_[place.segment].count < k) {
        skip(place);
      } else if (gathered(place.segment)) {
        for (int i = 0; place.count < k; ++i, ++place.count) place.sum += weight(place.segment, i);
        end_ = k;
        break;
      }
    }
    return place.sum;
  }

  // Those before which the weights sum to less than `mass`:
  double keep_mass(double mass) {
    Place place;
    while (place.segment < segment_count_ && place.count < end_) {
      const Segment& segment = segments_[place.segment];
      if (within_end(place) && place.sum + segment.sum < mass) {
        skip(place);
      } else if (gathered(place.segment)) {
        if (!walk(place, [&](float) { return place.sum >= mass && place.count > 0; })) return place.sum;
      }
    }
    return place.sum;
  }

  // Those with at least this weight, where the first has 1:
  double keep_weight(float least) {
    Place place;
    while (place.segment < segment_count_ && place.count < end_) {
      const Segment& segment = segments_[place.segment];
      // The range's lower end bounds its weights, but for the rounding of exp.
      if (within_end(place) && exp(segment.lower - top_) > least * 1.0001f) {
        skip(place);
      } else if (gathered(place.segment)) {
        if (!walk(place, [&](float w) { return w < least && place.count > 0; })) return place.sum;
      }
    }
    return place.sum;
  }

  // The first token at which the running sum exceeds `mass`; the last one if rounding leaves none.
  int pick(double mass) {
    Place place;
    while (place.segment < segment_count_ && place.count < end_) {
      const Segment& segment = segments_[place.segment];
      if (within_end(place) && place.sum + segment.sum <= mass) {
        skip(place);
      } else if (gathered(place.segment)) {
        const int stop = std::min(segment.count, end_ - place.count);
        for (int i = 0; i < stop; ++i) {
          place.sum += weight(place.segment, i);
          if (place.sum > mass) return token(place.segment, i);
        }
        place.count += stop;
        ++place.segment;
      }
    }
    const int last = place.segment - 1;
    place.count -= segments_[last].count;
    while (!gathered(last)) {
    }
    return token(last, std::min(segments_[last].count, end_ - place.count) - 1);
  }

 private:
  static constexpr int kParts = 8;
  static constexpr int kFirstParts = 4;
  static constexpr float kDepth[kFirstParts] = {4.0f, 8.0f, 16.0f, 87.0f};  // weights end at 87
  static constexpr int kGather = 768;  // a larger segment is cut
  static constexpr int kMostCuts = 10;  // then its logits are as good as equal
  static constexpr int kMostSegments = 512;

  struct Segment {
    float lower, upper;  // lower <= x < upper
    int count;
    int cuts;     // that led here
    double sum;   // of the weights
    int begin;    // its tokens in scratch.candidates, sorted; -1 if not gathered
  };
  // A position in the list, and what lies before it.
  struct Place {
    int segment = 0;
    int count = 0;
    double sum = 0.0;
  };

  // Counts and sums of the numbers from each of several bounds up.
  template <int kBounds>
  struct Cut {
    float lower[kBounds];  // descending
    int counts[kBounds] = {};
    WideSum sums[kBounds];

    // next(i, x, weight) yields the vectors at i, for i below n.
    template <class Next>
    void run(int n, const Next& next) {
      vf bounds[kBounds];
      vi members[kBounds];
      for (int j = 0; j < kBounds; ++j) {
        bounds[j] = set1(lower[j]);
        members[j] = izero();
        sums[j] = wide_zero();
      }
      for (int begin = 0; begin < n; begin += 16 * kLanes) {
        vf partial[kBounds];
        HB_UNROLL
        for (int j = 0; j < kBounds; ++j) partial[j] = zero();
        for (int i = begin; i < std::min(n, begin + 16 * kLanes); i += kLanes) {
          vf x, weight;
          next(i, x, weight);
          HB_UNROLL
          for (int j = 0; j < kBounds; ++j)
            add_where_greater_equal(partial[j], members[j], x, bounds[j], weight);
        }
        HB_UNROLL
        for (int j = 0; j < kBounds; ++j) accumulate(sums[j], partial[j]);
      }
      for (int j = 0; j < kBounds; ++j) counts[j] = sum(members[j]);
    }
  };

  bool within_end(const Place& place) const {
    return place.count + segments_[place.segment].count <= end_;
  }
  void skip(Place& place) const {
    place.count += segments_[place.segment].count;
    place.sum += segments_[place.segment].sum;
    ++place.segment;
  }
  int token(int s, int i) const { return scratch_.candidates[segments_[s].begin + i].id(); }
  float weight(int s, int i) const { return scratch_.weights[token(s, i)]; }

  // Goes through a gathered segment until cut(weight) says that a token falls away, which then is
  // the list's end. True if none does.
  template <class Falls>
  bool walk(Place& place, const Falls& falls) {
    const int stop = std::min(segments_[place.segment].count, end_ - place.count);
    for (int i = 0; i < stop; ++i) {
      const float w = weight(place.segment, i);
      if (falls(w)) {
        end_ = place.count;
        return false;
      }
      place.sum += static_cast<double>(w);
      ++place.count;
    }
    ++place.segment;
    return true;
  }

  // True if the segment's tokens are there, sorted. Else it has been cut: look again.
  bool gathered(int s) {
    Segment& segment = segments_[s];
    if (segment.begin >= 0) return true;
    if (segment.count > kGather && segment.cuts < kMostCuts && segment_count_ + kParts <= kMostSegments) {
      cut(s);
      return false;
    }
    segment.begin = gathered_;
    const vf lower = set1(segment.lower), upper = set1(segment.upper);
    for (int i = 0; i < vocab_; i += kLanes) {
      const vf v = load(scratch_.logits + i);
      uint32_t mask = mask_greater_equal(v, lower) & mask_greater(upper, v);
      for (; mask; mask &= mask - 1) {
        const int id = i + __builtin_ctz(mask);
        scratch_.candidates[gathered_++] = Candidate::of(scratch_.logits[id], id);
      }
    }
    std::sort(scratch_.candidates + segment.begin, scratch_.candidates + gathered_);
    return true;
  }

  void cut(int s) {
    const Segment old = segments_[s];
    Cut<kParts> parts;
    const float high = std::min(old.upper, top_), step = (high - old.lower) / kParts;
    for (int j = 0; j < kParts; ++j)
      parts.lower[j] = j + 1 < kParts ? high - step * static_cast<float>(j + 1) : old.lower;
    const vf upper = set1(old.upper);
    parts.run(vocab_, [&](int i, vf& v, vf& weight) {
      v = load(scratch_.logits + i);
      weight = load(scratch_.weights + i);
      // What lies above has no weight here; it is counted, though.
      weight = weight - where_greater_equal(v, upper, weight);
    });
    int above = 0;
    for (int i = 0; i < s; ++i) above += segments_[i].count;
    replace(s, 1, parts, old.upper, above);
  }

  // Puts the parts of a cut in place of `removed` segments at s; `above` tokens lie before them.
  template <int kBounds>
  void replace(int s, int removed, const Cut<kBounds>& parts, float upper, int above) {
    const int cuts = removed ? segments_[s].cuts + 1 : 0;
    Segment fresh[kBounds];
    int used = 0;
    double before = 0.0;
    for (int j = 0; j < kBounds; ++j) {
      const int count = parts.counts[j] - above;
      const double until = std::max(before, total(parts.sums[j]));
      if (count > 0) fresh[used++] = {parts.lower[j], upper, count, cuts, until - before, -1};
      above += count;
      before = until;
      upper = parts.lower[j];
    }
    std::memmove(segments_ + s + used, segments_ + s + removed,
                 sizeof(Segment) * static_cast<size_t>(segment_count_ - s - removed));
    std::memcpy(segments_ + s, fresh, sizeof(Segment) * static_cast<size_t>(used));
    segment_count_ += used - removed;
  }

  const SampleScratch& scratch_;
  const int vocab_;
  float top_ = 0.0f;   // largest number
  int end_ = 1 << 30;  // tokens that are kept
  int gathered_ = 0;   // tokens in scratch.candidates
  int segment_count_ = 0;
  Segment segments_[kMostSegments];
};
