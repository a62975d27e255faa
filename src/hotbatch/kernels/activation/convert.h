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

#if defined(__AVX512F__)

// The same, bit for bit, for one int8 group of up to sixteen rows: their maxima and sums are found
// together, and so is what follows from them. `value(r, k)` is of row `row + r`.
template <class Value>
inline void quantise_rows(const Activation& act, int row, int count, int group, Value value) {
  constexpr int kVectors = kGroupInt8 / kLanes;
  alignas(64) float values[16][kGroupInt8];
  // Magnitudes are compared as integers, among which infinity and NaN are the largest.
  const __m512i magnitude_bits = _mm512_set1_epi32(0x7fffffff);
  __m512 tops[16];
  for (int r = 0; r < count; ++r) {
    __m512i top = _mm512_setzero_si512();
    HB_UNROLL for (int i = 0; i < kVectors; ++i) {
      const int k = group * kGroupInt8 + i * kLanes;
      const vf x = k < act.cols ? value(r, k) : zero();
      store(values[r] + i * kLanes, x);
      top = _mm512_max_epi32(top, _mm512_and_si512(_mm512_castps_si512(x.v), magnitude_bits));
    }
    tops[r] = _mm512_castsi512_ps(top);
  }
  for (int r = count; r < 16; ++r) tops[r] = _mm512_setzero_ps();
  const __m512 top = reduce_rows(tops, [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  });
  const __mmask16 filled = _mm512_cmp_ps_mask(top, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
  const __m512 levels = _mm512_set1_ps(127.0f);
  alignas(64) float inverses[16];
  store(inverses, {_mm512_maskz_div_ps(filled, levels, top)});
  const __mmask16 broken =
      _mm512_cmpge_epi32_mask(_mm512_castps_si512(top), _mm512_set1_epi32(0x7f800000));
  const __m512 scales =
      _mm512_mask_mov_ps(_mm512_maskz_div_ps(filled, top, levels), broken,
                         _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
  auto* out = static_cast<int8_t*>(act.data) + int64_t{row} * act.stride + group * kGroupInt8;
  __m512 totals[16];
  for (int r = 0; r < count; ++r, out += act.stride) {
    const vf inverse = set1(inverses[r]);
    vi q[kVectors];
    HB_UNROLL for (int i = 0; i < kVectors; ++i)
      q[i] = round_to_int(load(values[r] + i * kLanes) * inverse);
    totals[r] = _mm512_castsi512_ps(store_s8(out, q[0], q[1], q[2], q[3]).v);
  }
  for (int r = count; r < 16; ++r) totals[r] = _mm512_setzero_ps();
  const __m512i total = _mm512_castps_si512(reduce_rows(totals, [](__m512 a, __m512 b) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
  }));
  const __m512i offsets = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(total, 7));
  const int64_t at = group * act.scale_stride + row;
  const auto these = static_cast<__mmask16>((1u << count) - 1);
  _mm512_mask_storeu_ps(act.scales + at, these, scales);
  _mm512_mask_storeu_epi32(act.offsets + at, these, offsets);
}

#endif

// A whole row with one scale. `value` is asked twice for each number: nothing need hold them.
template <class Value>
inline void quantise_row(const Activation& act, int row, Value value) {
  vf magnitude = zero(), probe = zero();
  for (int k = 0; k < act.cols; k += kLanes) {
    const vf x = value(k);
    magnitude = max(magnitude, abs(x));
    probe = fma(x, zero(), probe);
  }
  const float top = largest(magnitude);
  const bool empty = !(top > 1e-30f);
  const vf inverse = set1(empty ? 0.0f : 127.0f / top);
  const float finite_scale = empty ? 0.0f : top / 127.0f;
  auto* out = static_cast<int8_t*>(act.data) + int64_t{row} * act.stride;
  vi total = izero();
  for (int k = 0; k < act.stride; k += kLanes) {
    const vi q = k < act.cols ? round_to_int(value(k) * inverse) : izero();
    total = total + q;
    store_s8(out + k, q);
  }
  act.scales[row] = any_nan(probe) ? std::numeric_limits<float>::quiet_NaN() : finite_scale;
  act.offsets[row] = -128 * sum(total);
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

// The same for the rows [begin, end); `value(row, k)`.
template <class Value>
inline void write_rows(const Activation& act, int begin, int end, int first, int last,
                       Value value) {
  if (act.has_row_scale()) {
    for (int row = begin; row < end; ++row)
      quantise_row(act, row, [&](int k) { return value(row, k); });
    return;
  }
#if defined(__AVX512F__)
  // Of a few rows the joint work would be mostly for nobody.
  constexpr int kLeastRows = 4;
  for (; act.precision == Precision::kInt8 && end - begin >= kLeastRows; begin += 16) {
    const int row = begin, count = std::min(16, end - begin);
    for (int g = first / kGroupInt8; g * kGroupInt8 < last; ++g)
      quantise_rows(act, row, count, g, [&](int r, int k) { return value(row + r, k); });
  }
#endif
  for (int row = begin; row < end; ++row)
    write_columns(act, row, first, last, [&](int k) { return value(row, k); });
}
