// What attention does differently for each format of the cache: see attention/args.h for the
// layouts. Each format has 32-bit words of kPack numbers, a product of such words that sums
// into 16 lanes, and a form of the softmax weights that multiplies with V's words.
//
// Included inside namespace hotbatch::HB_ISA by attention/cpu.h.

struct Query {
  const int32_t* words;
  float scale;    // int8 only
  int32_t total;  // sum of the numbers, int8 only
};

// A chunk's softmax statistics for one query.
struct ChunkResult {
  float max;     // largest score * scale * log2(e)
  float weight;  // sum of weights 2^(score * scale * log2(e) - max)
  // int8 only: the unit of the stored weights, and the sums of their upper and lower bits.
  float unit;
  int32_t high_total, low_total;
};

#if defined(__AVX512F__)
constexpr int kMostValueVectors = 4;
#else
constexpr int kMostValueVectors = 1;
#endif

struct KvF32 {
  static constexpr int kPack = 1;
  static constexpr bool kClearHidden = false;  // a word is a key: hidden ones are not visited
  static constexpr int kValueVectors = kMostValueVectors;
  using Words = vf;
  using ScoreSum = vf;
  using ValueSum = vf;

  static Query query(const uint8_t* q, int) {
    return {reinterpret_cast<const int32_t*>(q), 1.0f, 0};
  }
  static vf words(const int32_t* p) { return load(reinterpret_cast<const float*>(p)); }
  static vf words_kept(const int32_t* p, uint32_t) { return words(p); }

  static vf start_score(const Query&) { return zero(); }
  static vf add_score(vf sum, vf keys, int32_t word) {
    float q;
    __builtin_memcpy(&q, &word, 4);
    return fma(keys, set1(q), sum);
  }
  static vf score(vf sum, const Query&, const float*) { return sum; }

  static void store_weight(vf weight, const float*, float*, int32_t* weights, int group) {
    store(reinterpret_cast<float*>(weights) + 16 * group, weight);
  }
  static void finish_weights(const float*, int, int, int32_t*, ChunkResult&) {}
  static int32_t weight_word(const int32_t* weights, int w) { return weights[w]; }
  static vf start_value(const ChunkResult&) { return zero(); }
  static vf add_value(vf sum, vf values, int32_t word) { return add_score(sum, values, word); }
  static vf value(vf sum, const ChunkResult&) { return sum; }
};

struct KvBf16 {
  static constexpr int kPack = 2;
  static constexpr bool kClearHidden = true;
  static constexpr int kValueVectors = kMostValueVectors;
  using Words = vbytes;
  using ScoreSum = vf;
  using ValueSum = vf;

  static Query query(const uint8_t* q, int) {
    return {reinterpret_cast<const int32_t*>(q), 1.0f, 0};
  }
  static vbytes words(const int32_t* p) { return load_bytes(p); }
  static vbytes words_kept(const int32_t* p, uint32_t keep) {
    return and_words(load_bytes(p), keep);
  }

  static vf start_score(const Query&) { return zero(); }
  static vf add_score(vf sum, const vbytes& keys, int32_t word) { return dot2(sum, keys, word); }
  static vf score(vf sum, const Query&, const float*) { return sum; }

  // Weights are rounded for the product with V; their sum is taken before.
  static void store_weight(vf weight, const float*, float*, int32_t* weights, int group) {
    store_bf16_fast(reinterpret_cast<uint16_t*>(weights) + 16 * group, weight);
  }
  static void finish_weights(const float*, int, int, int32_t*, ChunkResult&) {}
  static int32_t weight_word(const int32_t* weights, int w) { return weights[w]; }
  static vf start_value(const ChunkResult&) { return zero(); }
  static vf add_value(vf sum, const vbytes& values, int32_t word) {
    return dot2(sum, values, word);
  }
  static vf value(vf sum, const ChunkResult&) { return sum; }
};

// Keys and values in 8 bits with a scale a token and head, queries in 8 bits with a scale a head.
// The weights, times the scales of V, become 14-bit integers in units of the chunk's
// largest: 7 bits would lose what lies beside a single strong key. Sums are exact integers.
struct KvInt8 {
  static constexpr int kPack = 4;
  static constexpr bool kClearHidden = false;  // weight 0 times any integer is 0
  static constexpr int kValueVectors = kMostValueVectors > 2 ? 2 : kMostValueVectors;
  static constexpr float kWeightLevels = 16383.0f;
  struct WeightWord { int32_t high, low; };
  struct ValueSum { vi high, low; };
  using Words = vbytes;
  using ScoreSum = vi;

  static Query query(const uint8_t* q, int dim) {
    Query out{reinterpret_cast<const int32_t*>(q), 0.0f, 0};
    std::memcpy(&out.scale, q + dim, 4);
    std::memcpy(&out.total, q + dim + 4, 4);
    return out;
  }
  static vbytes words(const int32_t* p) { return load_bytes(p); }
  static vbytes words_kept(const int32_t* p, uint32_t) { return load_bytes(p); }

  // K's bytes are unsigned, 128 above their value: what that adds is taken off at the start.
  static vi start_score(const Query& query) { return iset1(-128 * query.total); }
  static vi add_score(vi sum, const vbytes& keys, int32_t word) { return dot4(sum, keys, word); }
  static vf score(vi sum, const Query& query, const float* scales) {
    return to_float(sum) * (load(scales) * set1(query.scale));
  }

  // Hidden keys have weight 0, but the scale beside them may be anything.
  static void store_weight(vf weight, const float* scales, float* scores, int32_t*, int) {
    store(scores, where_nonzero(weight, weight * load(scales + 16)));
  }
  static void finish_weights(const float* scores, int group, int group_end, int32_t* weights,
                             ChunkResult& result) {
    vf top = zero();
    for (int g = group; g < group_end; ++g) top = max(top, load(scores + 16 * g));
    const float peak = largest(top);
    const vf inverse = set1(peak > 0.0f ? kWeightLevels / peak : 0.0f);
    auto* high = reinterpret_cast<int8_t*>(weights);
    auto* low = high + kKeyChunk;
    vi high_total = izero(), low_total = izero();
    for (int g = group; g < group_end; ++g) {
      const vi levels = round_to_int(load(scores + 16 * g) * inverse);
      const vi upper = shift_right(levels, 7), lower = and_int(levels, 127);
      store_s8(high + 16 * g, upper);
      store_s8(low + 16 * g, lower);
      high_total = high_total + upper;
      low_total = low_total + lower;
    }
    result.high_total = sum(high_total);
    result.low_total = sum(low_total);
    result.unit = peak / kWeightLevels;
  }
  static WeightWord weight_word(const int32_t* weights, int w) {
    return {weights[w], weights[w + kKeyChunk / kPack]};
  }
  // As with K, what the unsigned bytes add is taken off at the start. Both sums stay below 2^24.
  static ValueSum start_value(const ChunkResult& result) {
    return {iset1(-128 * result.high_total), iset1(-128 * result.low_total)};
  }
  static ValueSum add_value(ValueSum sum, const vbytes& values, WeightWord word) {
    return {dot4(sum.high, values, word.high), dot4(sum.low, values, word.low)};
  }
  static vf value(ValueSum sum, const ChunkResult& result) {
    return fma(to_float(sum.high), set1(128.0f), to_float(sum.low)) * set1(result.unit);
  }
};
