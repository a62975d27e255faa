// One row of the step: q and k heads are normalised (if the model does), rotated, and written
// where attention reads them. Included inside namespace hotbatch::HB_ISA; see csrc/isa_tables.inc.

// x / rms(x) * weight over one head.
inline void norm_head(float* x, int dim, const float* weight, float eps) {
  vf squares = zero();
  for (int i = 0; i < dim; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const vf factor = set1(1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps));
  for (int i = 0; i < dim; i += kLanes) store(x + i, load(x + i) * factor * load(weight + i));
}

// Turns dims i and i + half together, for i < half.
inline void rotate_head(float* x, int half, const float* cos, const float* sin) {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {  // whole vectors: masked stores forward slowly
    const vf c = load(cos + i), s = load(sin + i);
    const vf first = load(x + i), second = load(x + half + i);
    store(x + i, first * c - second * s);
    store(x + half + i, second * c + first * s);
  }
  for (; i < half; i += kLanes) {
    const int count = std::min(kLanes, half - i);  // 8 of them if half is not a multiple of 16
    const vf c = load_first(cos + i, count, 0.0f), s = load_first(sin + i, count, 0.0f);
    const vf first = load_first(x + i, count, 0.0f);
    const vf second = load_first(x + half + i, count, 0.0f);
    store_first(x + i, count, first * c - second * s);
    store_first(x + half + i, count, second * c + first * s);
  }
}

// Rounds to multiples of the returned scale, which makes the largest magnitude 127.
inline float quantize_head(const float* x, int dim, int8_t* out) {
  vf top = zero();
  for (int i = 0; i < dim; i += kLanes) top = max(top, abs(load(x + i)));
  const float peak = largest(top);
  const vf inverse = set1(peak > 0.0f ? 127.0f / peak : 0.0f);
  for (int i = 0; i < dim; i += kLanes) store_s8(out + i, round_to_int(load(x + i) * inverse));
  return peak / 127.0f;
}

// A query head in the form that attention multiplies with keys.
inline void store_query(const float* x, const KvLayout& layout, uint8_t* out) {
  const int dim = layout.head_dim;
  if (layout.dtype == KvDtype::f32) {
    std::memcpy(out, x, sizeof(float) * static_cast<size_t>(dim));
  } else if (layout.dtype == KvDtype::bf16) {
    for (int i = 0; i < dim; i += kLanes)
      store_bf16(reinterpret_cast<uint16_t*>(out) + i, load(x + i));
  } else {
    auto* numbers = reinterpret_cast<int8_t*>(out);
    const float scale = quantize_head(x, dim, numbers);
    int32_t total = 0;
    for (int i = 0; i < dim; ++i) total += numbers[i];
    std::memcpy(out + dim, &scale, 4);
    std::memcpy(out + dim + 4, &total, 4);
  }
}

// Spreads one token's numbers over words of a K part: word [dim / pack][token].
template <class T>
inline void scatter_key(const T* x, int dim, int token, uint8_t* part) {
  constexpr int pack = 4 / static_cast<int>(sizeof(T));
  for (int i = 0; i < dim / pack; ++i)
    std::memcpy(part + 4 * (16 * i + token), x + pack * i, 4);
}

// And over those of a V part: word [token / pack][dim], place token % pack within it. Only this
// token's own bytes are written: its neighbour's may be in another thread's hands.
template <class T>
inline void scatter_value(const T* x, int dim, int token, uint8_t* part) {
  constexpr int pack = 4 / static_cast<int>(sizeof(T));
  T* out = reinterpret_cast<T*>(part) + (token / pack) * dim * pack + token % pack;
  for (int i = 0; i < dim; ++i) out[pack * i] = x[i];
}

// Where one token of one head lives in a block.
struct KvPlace {
  uint8_t* k;       // K words of its group of 16 tokens
  uint8_t* v;       // V words of the group
  float* scales;    // [2][16] of the group, int8 only
  int token;        // within the group
};

inline KvPlace kv_place(const KvLayout& layout, void* kv, int slot, int head) {
  const int block = slot / layout.block_size, offset = slot % layout.block_size;
  const int group = offset / 16;
  const size_t part = kv_part_bytes(layout);
  const size_t group_bytes = part / static_cast<size_t>(layout.block_size / 16);
  uint8_t* base = static_cast<uint8_t*>(kv) + kv_block_bytes(layout) * static_cast<size_t>(block) +
                  kv_head_bytes(layout) * static_cast<size_t>(head);
  return {base + group_bytes * static_cast<size_t>(group),
          base + part + group_bytes * static_cast<size_t>(group),
          reinterpret_cast<float*>(base + 2 * part) + 32 * group, offset % 16};
}

inline void store_key_value(const float* k, const float* v, const KvLayout& layout,
                            const KvPlace& place) {
  const int dim = layout.head_dim;
  if (layout.dtype == KvDtype::f32) {
    scatter_key(k, dim, place.token, place.k);
    scatter_value(v, dim, place.token, place.v);
    return;
  }
  if (layout.dtype == KvDtype::bf16) {
    uint16_t numbers[256];
    for (int i = 0; i < dim; i += kLanes) store_bf16(numbers + i, load(k + i));
    scatter_key(numbers, dim, place.token, place.k);
    for (int i = 0; i < dim; i += kLanes) store_bf16(numbers + i, load(v + i));
    scatter_value(numbers, dim, place.token, place.v);
    return;
  }
  int8_t numbers[256];
  uint8_t bytes[256];
  const auto to_unsigned = [&] {
    for (int i = 0; i < dim; ++i) bytes[i] = static_cast<uint8_t>(numbers[i] + 128);
  };
  place.scales[place.token] = quantize_head(k, dim, numbers);
  to_unsigned();
  scatter_key(bytes, dim, place.token, place.k);
  place.scales[16 + place.token] = quantize_head(v, dim, numbers);
  to_unsigned();
  scatter_value(bytes, dim, place.token, place.v);
}

// Asks for the lines that a token's keys and values will be written to. K spreads over a line a
// word, and for a decoding sequence they come from memory: the queries are turned meanwhile.
inline void prefetch_place(const KvLayout& layout, const KvPlace& place) {
  const int words = layout.head_dim / kv_pack(layout.dtype);
  for (int i = 0; i < words; ++i) __builtin_prefetch(place.k + 64 * i, 1, 3);
  const uint8_t* v = place.v + 4 * layout.head_dim * (place.token / kv_pack(layout.dtype));
  for (int byte = 0; byte < 4 * layout.head_dim; byte += 64) __builtin_prefetch(v + byte, 1, 3);
}

inline void rotary_store_row(const RotaryArgs& args, int row) {
  const KvLayout& layout = args.layout;
  const int dim = layout.head_dim;
  const int slot = args.batch->slots[row];
  // Within a chunk the row before has just written to the same lines.
  if (row == 0 || slot % 16 == 0 || args.batch->slots[row - 1] != slot - 1) {
    for (int head = 0; head < layout.kv_heads; ++head)
      prefetch_place(layout, kv_place(layout, args.kv, slot, head));
  }
  const int half = (args.rotary_dim ? args.rotary_dim : dim) / 2;
  const size_t position = static_cast<size_t>(args.batch->positions[row]);
  const float* cos = args.cos + position * static_cast<size_t>(half);
  const float* sin = args.sin + position * static_cast<size_t>(half);
  const float* qkv =
      args.qkv + static_cast<size_t>(row) * dim * (args.q_heads + 2 * layout.kv_heads);
  alignas(64) float x[256];

  const auto turned = [&](int head, const float* norm) {
    std::memcpy(x, qkv + head * dim, sizeof(float) * static_cast<size_t>(dim));
    if (norm) norm_head(x, dim, norm, args.eps);
    rotate_head(x, half, cos, sin);
    return x;
  };
  auto* q_out = static_cast<uint8_t*>(args.q_out) +
                static_cast<size_t>(row) * query_row_bytes(layout, args.q_heads);
  for (int head = 0; head < args.q_heads; ++head)
    store_query(turned(head, args.q_norm), layout, q_out + query_head_bytes(layout) * head);
  for (int head = 0; head < layout.kv_heads; ++head) {
    const float* k = turned(args.q_heads + head, args.k_norm);
    const float* v = qkv + (args.q_heads + layout.kv_heads + head) * dim;
    store_key_value(k, v, layout, kv_place(layout, args.kv, slot, head));
  }
}
