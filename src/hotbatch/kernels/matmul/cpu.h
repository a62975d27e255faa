// Linear layers on the CPU; see args.h for layouts. Included once per instruction set.
//
// A tile is up to kTileRows rows by one panel of 32 columns, accumulators in registers. A row's
// result is the same in every tile shape: each output element is one chain of operations in
// ascending k, whatever stands beside it.

#if defined(__AVX512F__)
constexpr int kTileRows = 6;        // 12 integer + 12 float accumulators of 32 registers
constexpr int kTileRowsFloat = 12;  // 24 accumulators
#else
constexpr int kTileRows = 2;
constexpr int kTileRowsFloat = 3;
#endif

inline int tile_rows(Precision precision) {
  const bool floats = precision == Precision::kF32 || precision == Precision::kBf16;
  return floats ? kTileRowsFloat : kTileRows;
}

inline void store_columns(float* p, int count, vf value) {
  if (count >= kLanes) {
    store(p, value);
  } else if (count > 0) {
    alignas(64) float lanes[kLanes];
    store(lanes, value);
    std::memcpy(p, lanes, sizeof(float) * static_cast<size_t>(count));
  }
}

inline vf load_columns(const float* p, int count) {
  if (count >= kLanes) return load(p);
  alignas(64) float lanes[kLanes] = {};
  if (count > 0) std::memcpy(lanes, p, sizeof(float) * static_cast<size_t>(count));
  return load(lanes);
}

// Adds bias and residual, and writes one row's 32 columns.
inline void finish_row(const LinearArgs& args, int panel, int row, vf left, vf right) {
  const PackedLinear& weight = *args.weight;
  const int column = panel * kPanel;
  const int count = weight.outputs - column;
  if (weight.bias) {
    left = left + load(weight.bias + column);
    right = right + load(weight.bias + column + kLanes);
  }
  const int64_t at = row * args.output_stride + column;
  if (args.residual) {
    left = left + load_columns(args.residual + at, count);
    right = right + load_columns(args.residual + at + kLanes, count - kLanes);
  }
  store_columns(args.output + at, count, left);
  store_columns(args.output + at + kLanes, count - kLanes, right);
}

// The same for a tile, without the questions that a whole panel without bias answers once.
template <int R>
inline void finish_rows(const LinearArgs& args, int panel, int row, const vf (&sums)[R][2]) {
  if (args.weight->bias || args.weight->outputs < (panel + 1) * kPanel) {
    HB_UNROLL for (int r = 0; r < R; ++r)
      finish_row(args, panel, row + r, sums[r][0], sums[r][1]);
    return;
  }
  const int64_t stride = args.output_stride;
  const int64_t at = row * stride + panel * kPanel;
  float* out = args.output + at;
  if (!args.residual) {
    HB_UNROLL for (int r = 0; r < R; ++r) {
      store(out + r * stride, sums[r][0]);
      store(out + r * stride + kLanes, sums[r][1]);
    }
    return;
  }
  const float* residual = args.residual + at;
  HB_UNROLL for (int r = 0; r < R; ++r) {
    store(out + r * stride, sums[r][0] + load(residual + r * stride));
    store(out + r * stride + kLanes, sums[r][1] + load(residual + r * stride + kLanes));
  }
}

// Asks for the lines that finish_rows will write: a store that waits for its line holds up all
// stores behind it, and those of the next tile.
template <int R>
inline void prefetch_output(const LinearArgs& args, int panel, int row) {
  const float* out = args.output + row * args.output_stride + panel * kPanel;
  HB_UNROLL for (int r = 0; r < R; ++r) {
    __builtin_prefetch(out + r * args.output_stride, 1, 3);
    __builtin_prefetch(out + r * args.output_stride + kLanes, 1, 3);
  }
}

inline int four_bytes(const int8_t* p) {
  int value;
  std::memcpy(&value, p, 4);
  return value;
}

// Fetches the panel that comes next, a part of it in each tile of this one, so that weights
// arrive from memory while others are computed with.
struct PanelPrefetch {
  const uint8_t* next;  // null: nothing to fetch
  int lines_per_step;
  FetchAhead* ahead;

  // For fetch_step_bytes of this panel's weights: a few lines at a time, as a core with too many
  // on their way forgets what it is asked for.
  void step() {
    if (ahead) ahead->step();
    if (!next) return;
    for (int line = 0; line < lines_per_step; ++line) __builtin_prefetch(next + 64 * line, 0, 2);
    next += 64 * lines_per_step;
  }
};

template <int R>
void tile_int8(const LinearArgs& args, int panel, int row, PanelPrefetch ahead) {
  const PackedLinear& weight = *args.weight;
  const Activation& input = *args.input;
  const uint8_t* w = weight.data + panel * weight.bytes_per_panel();
  const int8_t* x = static_cast<const int8_t*>(input.data) + int64_t{row} * input.stride;
  const float* scales = input.scales + row;
  const int32_t* offsets = input.offsets + row;
  const int64_t stride = input.stride;
  const int groups = input.groups;
  prefetch_output<R>(args, panel, row);
  vf total[R][2];
  HB_UNROLL for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = zero();
  for (int g = 0; g < groups; ++g) {
    vi acc[R][2];
    HB_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = iset1(offsets[r]);
    HB_UNROLL for (int quad = 0; quad < kGroupInt8 / 4; ++quad) {
      if (quad % 4 == 0) ahead.step();
      const vbytes left = load_bytes(w + quad * 128);
      const vbytes right = load_bytes(w + quad * 128 + 64);
      HB_UNROLL for (int r = 0; r < R; ++r) {
        const int four = four_bytes(x + r * stride + quad * 4);
        acc[r][0] = dot4(acc[r][0], left, four);
        acc[r][1] = dot4(acc[r][1], right, four);
      }
    }
    HB_UNROLL for (int r = 0; r < R; ++r) {
      const vf scale = set1(scales[r]);
      total[r][0] = fma(to_float(acc[r][0]), scale, total[r][0]);
      total[r][1] = fma(to_float(acc[r][1]), scale, total[r][1]);
    }
    w += kGroupInt8 * kPanel;
    x += kGroupInt8;
    scales += input.scale_stride;
    offsets += input.scale_stride;
  }
  const vf left_scale = load(weight.scales + panel * kPanel);
  const vf right_scale = load(weight.scales + panel * kPanel + kLanes);
  HB_UNROLL for (int r = 0; r < R; ++r) {
    total[r][0] = total[r][0] * left_scale;
    total[r][1] = total[r][1] * right_scale;
  }
  finish_rows<R>(args, panel, row, total);
}

template <int R>
void tile_int4(const LinearArgs& args, int panel, int row, PanelPrefetch ahead) {
  const PackedLinear& weight = *args.weight;
  const Activation& input = *args.input;
  const uint8_t* w = weight.data + panel * weight.bytes_per_panel();
  const int8_t* x = static_cast<const int8_t*>(input.data) + int64_t{row} * input.stride;
  const float* scales = input.scales + row;
  const float* sums = input.sums + row;
  const int64_t stride = input.stride;
  const int groups = input.groups;
  prefetch_output<R>(args, panel, row);
  vf total[R][2];
  HB_UNROLL for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = zero();
  for (int g = 0; g < groups; ++g) {
    vi acc[R][2];
    HB_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = izero();
    ahead.step();  // a group is only 640 bytes: fetches run ahead of the panel
    HB_UNROLL for (int quad = 0; quad < 4; ++quad) {
      const vbytes left = load_bytes(w + quad * 128);
      const vbytes right = load_bytes(w + quad * 128 + 64);
      const vbytes left_low = low_nibbles(left), right_low = low_nibbles(right);
      HB_UNROLL for (int r = 0; r < R; ++r) {
        const int four = four_bytes(x + r * stride + quad * 4);
        acc[r][0] = dot4(acc[r][0], left_low, four);
        acc[r][1] = dot4(acc[r][1], right_low, four);
      }
      const vbytes left_high = high_nibbles(left), right_high = high_nibbles(right);
      HB_UNROLL for (int r = 0; r < R; ++r) {
        const int four = four_bytes(x + r * stride + quad * 4 + 16);
        acc[r][0] = dot4(acc[r][0], left_high, four);
        acc[r][1] = dot4(acc[r][1], right_high, four);
      }
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(w + 512);
    const vf left_d = load_f16(halves), right_d = load_f16(halves + 16);
    const vf left_m = load_f16(halves + 32), right_m = load_f16(halves + 48);
    HB_UNROLL for (int r = 0; r < R; ++r) {
      const vf scale = set1(scales[r]);
      const vf offset = set1(sums[r]);
      total[r][0] = fma(to_float(acc[r][0]) * scale, left_d, fma(offset, left_m, total[r][0]));
      total[r][1] = fma(to_float(acc[r][1]) * scale, right_d, fma(offset, right_m, total[r][1]));
    }
    w += kInt4GroupBytes;
    x += kGroupInt4;
    scales += input.scale_stride;
    sums += input.scale_stride;
  }
  finish_rows<R>(args, panel, row, total);
}

template <int R>
void tile_bf16(const LinearArgs& args, int panel, int row, PanelPrefetch ahead) {
  const PackedLinear& weight = *args.weight;
  const Activation& input = *args.input;
  const uint8_t* w = weight.data + panel * weight.bytes_per_panel();
  const auto* x = reinterpret_cast<const int8_t*>(static_cast<const uint16_t*>(input.data) +
                                                  int64_t{row} * input.stride);
  const int64_t stride = int64_t{2} * input.stride;
  prefetch_output<R>(args, panel, row);
  vf acc[R][2];
  HB_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  const int pairs = input.stride / 2;
  for (int pair = 0; pair < pairs; ++pair, w += 128, x += 4) {
    if (pair % 8 == 0) ahead.step();
    const vbytes left = load_bytes(w), right = load_bytes(w + 64);
    HB_UNROLL for (int r = 0; r < R; ++r) {
      const int two = four_bytes(x + r * stride);
      acc[r][0] = dot2(acc[r][0], left, two);
      acc[r][1] = dot2(acc[r][1], right, two);
    }
  }
  finish_rows<R>(args, panel, row, acc);
}

template <int R>
void tile_f32(const LinearArgs& args, int panel, int row, PanelPrefetch ahead) {
  const PackedLinear& weight = *args.weight;
  const Activation& input = *args.input;
  const auto* w = reinterpret_cast<const float*>(weight.data + panel * weight.bytes_per_panel());
  const float* x = static_cast<const float*>(input.data) + int64_t{row} * input.stride;
  const int64_t stride = input.stride;
  prefetch_output<R>(args, panel, row);
  vf acc[R][2];
  HB_UNROLL for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  for (int k = 0; k < input.cols; ++k, w += kPanel) {
    if (k % 8 == 0) ahead.step();
    const vf left = load(w), right = load(w + kLanes);
    HB_UNROLL for (int r = 0; r < R; ++r) {
      const vf value = set1(x[r * stride + k]);
      acc[r][0] = fma(value, left, acc[r][0]);
      acc[r][1] = fma(value, right, acc[r][1]);
    }
  }
  finish_rows<R>(args, panel, row, acc);
}

using Tile = void (*)(const LinearArgs&, int panel, int row, PanelPrefetch);

inline Tile choose_tile(Precision precision, int rows) {
#if defined(__AVX512F__)
  static constexpr Tile int8[] = {tile_int8<1>, tile_int8<2>, tile_int8<3>, tile_int8<4>,
                                  tile_int8<5>, tile_int8<6>};
  static constexpr Tile int4[] = {tile_int4<1>, tile_int4<2>, tile_int4<3>,
                                  tile_int4<4>, tile_int4<5>, tile_int4<6>};
  static constexpr Tile bf16[] = {
      tile_bf16<1>, tile_bf16<2>, tile_bf16<3>, tile_bf16<4>,  tile_bf16<5>,  tile_bf16<6>,
      tile_bf16<7>, tile_bf16<8>, tile_bf16<9>, tile_bf16<10>, tile_bf16<11>, tile_bf16<12>};
  static constexpr Tile f32[] = {
      tile_f32<1>, tile_f32<2>, tile_f32<3>, tile_f32<4>,  tile_f32<5>,  tile_f32<6>,
      tile_f32<7>, tile_f32<8>, tile_f32<9>, tile_f32<10>, tile_f32<11>, tile_f32<12>};
#else
  static constexpr Tile int8[] = {tile_int8<1>, tile_int8<2>};
  static constexpr Tile int4[] = {tile_int4<1>, tile_int4<2>};
  static constexpr Tile bf16[] = {tile_bf16<1>, tile_bf16<2>, tile_bf16<3>};
  static constexpr Tile f32[] = {tile_f32<1>, tile_f32<2>, tile_f32<3>};
#endif
  switch (precision) {
    case Precision::kInt8: return int8[rows - 1];
    case Precision::kInt4: return int4[rows - 1];
    case Precision::kBf16: return bf16[rows - 1];
    default: return f32[rows - 1];
  }
}

// Rows with which int8 weights are read as a plain stream.
constexpr int kStreamingRows = 2;

// One panel of columns for the rows [row_begin, row_end). Tiles are made about equally high:
// 8 rows go as 4 + 4, not as 6 + 2.
inline void linear(const LinearArgs& args, int panel, int row_begin, int row_end) {
  const Precision precision = args.weight->precision;
  const int highest = tile_rows(precision);
  const int rows = row_end - row_begin;
  const int tiles = (rows + highest - 1) / highest;
  const int64_t bytes = args.weight->bytes_per_panel();
  // A few rows of int8 use weights as fast as they come, in order: fetching the rest of a run is
  // better left to the hardware, which cannot know only what follows the run.
  const bool streams = precision == Precision::kInt8 && rows <= kStreamingRows &&
                       args.next_panel == args.weight->panel(panel + 1);
  const uint8_t* next = streams ? nullptr : args.next_panel;
  const int64_t step_bytes = fetch_step_bytes(precision);
  const int lines = static_cast<int>((step_bytes / 64 + tiles - 1) / tiles);
  int row = row_begin;
  for (int tile = 0; tile < tiles; ++tile) {
    const int height = rows / tiles + (tile < rows % tiles ? 1 : 0);
    const int64_t part = bytes / step_bytes * lines * 64 * tile;
    const bool wanted = next && part < bytes;
    choose_tile(precision, height)(args, panel, row,
                                   {wanted ? next + part : nullptr, lines, args.ahead});
    row += height;
  }
}

// ---- packing, once at load ----

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
    const RawRows* part = nullptr;
    int index = 0;
    if (panel * kPanel + column < t.outputs) find_raw_row(args, t.source_row(panel * kPanel + column), &part, &index);
    if (!part) continue;
    const bool q4 = part->type == RawType::kQ4_0 || part->type == RawType::kQ4_1;
    if (t.precision == Precision::kInt4 && q4) {
      pack_column_int4_blocks(t, data, column, *part, index);
      continue;
    }
    decode_row(*part, index, row);
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
