// Packing weights into panels, once at load; see args.h for layouts. Included once per instruction
// set.

inline void find_raw_row(const PackArgs& args, int index, const RawRows** part, int* row) {
  for (int p = 0; p < args.num_parts; ++p) {
    if (index < args.parts[p].rows) {
      *part = &args.parts[p];
      *row = index;
      return;
    }
    index -= args.parts[p].rows;
  }
  *part = nullptr;
}

inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline uint16_t float_to_f16(float value) {
  // Through the exponent only where it is cheap to be exact: scales and offsets are few.
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7bff);  // largest finite
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  uint32_t m = bits & 0x7fffffff;
  m += 0xfff + ((m >> 13) & 1);
  return static_cast<uint16_t>(sign | ((m >> 13) - (112 << 10)));
}

inline void pack_column_f32(const PackedLinear& t, uint8_t* panel, int column, const float* row) {
  auto* out = reinterpret_cast<float*>(panel);
  for (int k = 0; k < t.inputs; ++k) out[k * kPanel + column] = row[k];
}

inline void pack_column_bf16(const PackedLinear& t, uint8_t* panel, int column, const float* row) {
  auto* out = reinterpret_cast<uint16_t*>(panel);
  for (int k = 0; k < t.inputs; ++k)
    out[(k / 2 * kPanel + column) * 2 + k % 2] = float_to_bf16(row[k]);
}

inline float pack_column_int8(const PackedLinear& t, uint8_t* panel, int column, const float* row) {
  float largest_weight = 0.0f;
  for (int k = 0; k < t.inputs; ++k) largest_weight = std::max(largest_weight, std::fabs(row[k]));
  const float inverse = largest_weight > 0.0f ? 127.0f / largest_weight : 0.0f;
  for (int k = 0; k < t.inputs; ++k) {
    const int q = static_cast<int>(std::nearbyint(row[k] * inverse));
    panel[(k / 4 * kPanel + column) * 4 + k % 4] = static_cast<uint8_t>(q + 128);
  }
  return largest_weight / 127.0f;
}

// Where nibble (group, column, k in the group) lies, and whether in the upper half.
inline void put_nibble(uint8_t* group, int column, int k, int q) {
  const int quad = k / 4;
  uint8_t& byte = group[(quad % 4) * 128 + column * 4 + k % 4];
  byte = static_cast<uint8_t>(quad < 4 ? (byte & 0xf0) | q : (byte & 0x0f) | (q << 4));
}

inline void put_int4_scales(uint8_t* group, int column, uint16_t d, uint16_t m) {
  std::memcpy(group + 512 + 2 * column, &d, 2);
  std::memcpy(group + 576 + 2 * column, &m, 2);
}

// Keeps the grid of a Q4_1 or Q4_0 row exactly.
inline void pack_column_int4_blocks(const PackedLinear& t, uint8_t* panel, int column,
                                    const RawRows& raw, int row) {
  const bool offsets = raw.type == RawType::kQ4_1;
  const uint8_t* p = raw.row(row);
  for (int g = 0; g < t.inputs / kGroupInt4; ++g, panel += kInt4GroupBytes) {
    const uint16_t d = read_u16(p);
    const uint16_t m = offsets ? read_u16(p + 2) : float_to_f16(-8.0f * f16_to_float(d));
    put_int4_scales(panel, column, d, m);
    p += offsets ? 4 : 2;
    for (int i = 0; i < 16; ++i) {
      put_nibble(panel, column, i, p[i] & 0x0f);
      put_nibble(panel, column, i + 16, p[i] >> 4);
    }
    p += 16;
  }
}

inline void pack_column_int4(const PackedLinear& t, uint8_t* panel, int column, const float* row) {
  for (int first = 0; first < t.inputs; first += kGroupInt4, panel += kInt4GroupBytes) {
    const int count = std::min(kGroupInt4, t.inputs - first);
    const float low = *std::min_element(row + first, row + first + count);
    const float high = *std::max_element(row + first, row + first + count);
    const uint16_t d = float_to_f16((high - low) / 15.0f), m = float_to_f16(low);
    put_int4_scales(panel, column, d, m);
    const float step = f16_to_float(d), base = f16_to_float(m);
    for (int k = 0; k < count; ++k) {
      const float q = step > 0.0f ? std::nearbyint((row[first + k] - base) / step) : 0.0f;
      put_nibble(panel, column, k, static_cast<int>(std::min(15.0f, std::max(0.0f, q))));
    }
  }
}

// Packs the 32 columns of one panel. The target's memory is zero (int8: padding columns and
// inputs hold 0 as an unsigned byte, that is -128, which meets only zero activations or is
// never stored).
inline void pack_linear(const PackArgs& args, int panel) {
  const PackedLinear& t = *args.target;
  uint8_t* data = t.data + panel * t.bytes_per_panel();
  float row[kMaxInputs];
  for (int column = 0; column < kPanel; ++column) {
    if (panel * kPanel + column >= t.outputs) break;
    const RawRows* part = nullptr;
    int index = 0;
    find_raw_row(args, t.source_row(panel * kPanel + column), &part, &index);
    const bool q4 = part->type == RawType::kQ4_0 || part->type == RawType::kQ4_1;
    if (t.precision == Precision::kInt4 && q4) {
      pack_column_int4_blocks(t, data, column, *part, index);
      continue;
    }
    decode_row(*part, index, row);
    if (args.column_scales)
      for (int k = 0; k < t.inputs; ++k) row[k] *= args.column_scales[k];
    switch (t.precision) {
      case Precision::kF32: pack_column_f32(t, data, column, row); break;
      case Precision::kBf16: pack_column_bf16(t, data, column, row); break;
      case Precision::kInt4: pack_column_int4(t, data, column, row); break;
      case Precision::kInt8:
        t.scales[panel * kPanel + column] = pack_column_int8(t, data, column, row);
        break;
    }
  }
}

// Adds the squares of every `step`th of the stacked rows [begin, end) to `sums` [K], a sum for each
// input column.
inline void column_squares(const PackArgs& args, int begin, int end, int step, float* sums) {
  float row[kMaxInputs];
  for (int i = begin; i < end; i += step) {
    const RawRows* part = nullptr;
    int index = 0;
    find_raw_row(args, i, &part, &index);
    decode_row(*part, index, row);
    for (int k = 0; k < part->cols; ++k) sums[k] += row[k] * row[k];
  }
}
