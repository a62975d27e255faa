// How a row of floats becomes a linear layer's input: kept, rounded to bf16, or quantised to
// signed bytes with one scale a group. `value(k)` yields the 16 floats from column k on, zero
// past the last column.

template <class Value>
inline void quantise_group(const Activation& act, int row, int group, int size, Value value) {
  vf values[kGroupInt8 / kLanes];
  vf magnitude = zero(), probe = zero();
  const int vectors = size / kLanes;
  for (int i = 0; i < vectors; ++i) {
    const int k = group * size + i * kLanes;
    values[i] = k < act.cols ? value(k) : zero();
    magnitude = max(magnitude, abs(values[i]));
    probe = fma(values[i], zero(), probe);  // NaN if the value is not finite
  }
  const float top = largest(magnitude);
  // A subnormal maximum would overflow its inverse: treat the group as zero.
  const bool empty = !(top > 1e-30f);
  const vf inverse = set1(empty ? 0.0f : 127.0f / top);
  // A maximum loses NaN and bytes cannot hold it, so the scale carries it on: a broken row must
  // end in an error, not in a token that looks like any other.
  const float finite_scale = empty ? 0.0f : top / 127.0f;
  const float scale = any_nan(probe) ? std::numeric_limits<float>::quiet_NaN() : finite_scale;
  auto* out = static_cast<int8_t*>(act.data) + int64_t{row} * act.stride + group * size;
  vi total = izero();
  for (int i = 0; i < vectors; ++i) {
    const vi q = round_to_int(values[i] * inverse);
    total = total + q;
    store_s8(out + i * kLanes, q);
  }
  const int64_t at = group * act.scale_stride + row;
  act.scales[at] = scale;
  if (act.precision == Precision::kInt8) {
    act.offsets[at] = -128 * sum(total);
  } else {
    act.sums[at] = scale * static_cast<float>(sum(total));
  }
}

template <class Value>
inline void keep_columns(const Activation& act, int row, int first, int last, Value value) {
  if (act.precision == Precision::kF32) {
    float* out = static_cast<float*>(act.data) + int64_t{row} * act.stride;
    for (int k = first; k < last; k += kLanes) store_columns(out + k, act.cols - k, value(k));
    return;
  }
  uint16_t* out = static_cast<uint16_t*>(act.data) + int64_t{row} * act.stride;
  for (int k = first; k < last; k += kLanes) {
    alignas(32) uint16_t lanes[kLanes];
    store_bf16(lanes, value(k));
    std::memcpy(out + k, lanes, 2 * static_cast<size_t>(std::min(kLanes, act.stride - k)));
  }
}

// Asks for the lines that write_columns will write: another thread has read them, and a store
// that waits for its line holds up those behind it.
inline void prefetch_columns(const Activation& act, int row, int first, int last) {
  if (act.precision != Precision::kInt8 && act.precision != Precision::kInt4) return;
  const auto* out = static_cast<const int8_t*>(act.data) + int64_t{row} * act.stride;
  for (int k = first; k < last; k += 64) __builtin_prefetch(out + k, 1, 3);
}

// Columns [first, last) of a row: whole groups, or up to the end of the row.
template <class Value>
inline void write_columns(const Activation& act, int row, int first, int last, Value value) {
  if (act.precision == Precision::kF32 || act.precision == Precision::kBf16)
    return keep_columns(act, row, first, last, value);
  const int size = group_size(act.precision);
  for (int g = first / size; g * size < last; ++g) quantise_group(act, row, g, size, value);
}

template <class Value>
inline void write_activation(const Activation& act, int row, Value value) {
  write_columns(act, row, 0, act.cols, value);
}
