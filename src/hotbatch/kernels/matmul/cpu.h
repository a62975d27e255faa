// Linear layers on the CPU; see args.h for layouts. Included once per instruction set.
//
// A tile is up to kTileRows rows by one panel of 32 columns, accumulators in registers. A row's
// result is the same in every tile shape: each output element is one chain of operations in
// ascending k, whatever stands beside it.

#if defined(__AVX512F__)
constexpr int kTileRows = 6;           // 12 integer + 12 float accumulators of 32 registers
constexpr int kTileRowsRowScale = 12;  // 24 integer accumulators
constexpr int kTileRowsFloat = 12;     // 24 accumulators
#else
constexpr int kTileRows = 2;
constexpr int kTileRowsRowScale = 2;
constexpr int kTileRowsFloat = 3;
#endif

inline int tile_rows(Precision precision, bool row_scale) {
  if (row_scale) return kTileRowsRowScale;
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

// A tile whose columns have a bias, or are not all there. Out of line, and on a copy: the sums of
// all other tiles then stay in registers.
template <int R>
__attribute__((noinline)) void finish_rows_checked(const LinearArgs& args, int panel, int row,
                                                   const vf (&sums)[R][2]) {
  HB_UNROLL for (int r = 0; r < R; ++r) finish_row(args, panel, row + r, sums[r][0], sums[r][1]);
}

// The same for a tile, without the questions that a whole panel without bias answers once.
template <int R>
HB_INLINE void finish_rows(const LinearArgs& args, int panel, int row, const vf (&sums)[R][2]) {
  if (args.weight->bias || args.weight->outputs < (panel + 1) * kPanel) {
    vf copy[R][2];
    HB_UNROLL for (int r = 0; r < R; ++r) copy[r][0] = sums[r][0], copy[r][1] = sums[r][1];
    finish_rows_checked<R>(args, panel, row, copy);
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
HB_INLINE void prefetch_output(const LinearArgs& args, int panel, int row) {
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

// Lines that are asked for a few at a time while a tile computes: a core with too many on their way
// forgets what it is asked for. Nothing to fetch is a stream that stands still.
struct FetchStream {
  const uint8_t* at;
  int64_t bytes_per_step;  // may be 0
  int lines_per_step;      // at least 1

  // To the second cache, or with kLocality 3 to the first.
  template <int kLocality = 2>
  HB_INLINE void step() {
    __builtin_prefetch(at, 0, kLocality);
    for (int line = 1; line < lines_per_step; ++line)
      __builtin_prefetch(at + 64 * line, 0, kLocality);
    at += bytes_per_step;
  }
};

// What one tile fetches for later, so that it arrives from memory while this one computes: a part
// of the panel that comes next, and of the keys and values that the next attention will read.
struct TileFetch {
  FetchStream panel;
  FetchStream cache;
  const uint8_t* cache_end;

  // For fetch_step_bytes of this panel's weights.
  HB_INLINE void step() {
    panel.step();
    cache.step();
    cache.at = std::min(cache.at, cache_end);
  }
};

// The same for the tiles of a panel, one after the other.
class PanelFetch {
 public:
  static constexpr int kMostNearTiles = 2;
  static constexpr int kNearSteps = 4;  // quads to fetch_step_bytes

  PanelFetch(const LinearArgs& args, const uint8_t* next, int tiles)
      : here_(args.input->data), next_(next), ahead_(args.ahead) {
    const Precision precision = args.weight->precision;
    const int64_t bytes = args.weight->bytes_per_panel(), step = fetch_step_bytes(precision);
    is_near_ = precision == Precision::kInt8 && next && !ahead_ && tiles <= kMostNearTiles;
    lines_ = static_cast<int>((step / 64 + tiles - 1) / tiles);
    end_ = next ? next + bytes : nullptr;
    tile_bytes_ = bytes / step * lines_ * 64;
  }

  // Memory is what so few tiles wait for: then lines go straight to the first cache, and are asked
  // for evenly, as many after each quad of a tile's weights.
  bool is_near() const { return is_near_; }
  FetchStream near_tile() {
    const int lines = lines_ / kNearSteps;
    const FetchStream stream{next_, 64 * lines, lines};
    next_ += tile_bytes_;
    return stream;
  }
  bool has_cache() const { return ahead_ != nullptr; }

  // For the next tile.
  TileFetch tile() {
    const auto* here = static_cast<const uint8_t*>(here_);
    TileFetch fetch{{here, 0, 1}, {here, 0, 1}, here};
    if (next_ < end_) {
      fetch.panel = {next_, 64 * lines_, lines_};
      next_ += tile_bytes_;
    }
    if (ahead_ && ahead_->begin()) {
      const int64_t bytes = 64 * ahead_->lines_per_step;
      fetch.cache = {ahead_->at, bytes, ahead_->lines_per_step};
      fetch.cache_end = ahead_->end - 64;
    }
    return fetch;
  }
  // After it, with how far it came.
  void keep(const TileFetch& fetch) {
    if (fetch.cache.bytes_per_step > 0) ahead_->at = fetch.cache.at;
  }

 private:
  const void* here_;
  const uint8_t* next_;
  const uint8_t* end_;
  int64_t tile_bytes_;
  FetchAhead* ahead_;
  int lines_;
  bool is_near_;
};

template <int R>
HB_INLINE void begin_int8(vi (&acc)[R][2], const int32_t* offsets) {
  HB_UNROLL for (int r = 0; r < R; ++r) {
    acc[r][0] = held(iset1(offsets[r]));
    acc[r][1] = held(iset1(offsets[r]));
  }
}

// Adds 64 inputs' products of R rows by a panel. `step` is called before every kStepQuads quads.
template <int R, int kStepQuads, class Step>
HB_INLINE void add_int8(vi (&acc)[R][2], const uint8_t* w, const int8_t* x, int64_t stride,
                        Step step) {
  HB_UNROLL for (int quad = 0; quad < kGroupInt8 / 4; ++quad) {
    if (quad % kStepQuads == 0) step();
    const vbytes left = held(load_bytes(w + quad * 128));
    const vbytes right = held(load_bytes(w + quad * 128 + 64));
    HB_UNROLL for (int r = 0; r < R; ++r) {
      const int four = four_bytes(x + r * stride + quad * 4);
      acc[r][0] = dot4(acc[r][0], left, four);
      acc[r][1] = dot4(acc[r][1], right, four);
    }
  }
}

// The same for all inputs of R rows. Rows go by a pointer for three, and the loop is of four quads:
// so pointers stay in registers, and the instructions in their cache.
template <int R, int kStepQuads, class Step>
HB_INLINE void add_row_int8(vi (&acc)[R][2], const uint8_t* w, const int8_t* x, int64_t stride,
                            Step step) {
  constexpr int kThrees = (R + 2) / 3, kQuads = 4;
  const int8_t* rows[kThrees];
  HB_UNROLL for (int i = 0; i < kThrees; ++i) rows[i] = x + 3 * i * stride;
  const uint8_t* const end = w + kPanel * stride;
  for (; w < end; w += 4 * kQuads * kPanel) {
    HB_UNROLL for (int quad = 0; quad < kQuads; ++quad) {
      if (quad % kStepQuads == 0) step();
      const vbytes left = held(load_bytes(w + quad * 128));
      const vbytes right = held(load_bytes(w + quad * 128 + 64));
      HB_UNROLL for (int r = 0; r < R; ++r) {
        const int four = four_bytes(rows[r / 3] + r % 3 * stride + quad * 4);
        acc[r][0] = dot4(acc[r][0], left, four);
        acc[r][1] = dot4(acc[r][1], right, four);
      }
    }
    HB_UNROLL for (int i = 0; i < kThrees; ++i) rows[i] = held(rows[i] + 4 * kQuads);
  }
}

enum class TileFetches { kPanel, kNearPanel, kPanelAndCache };

// `count` tiles of R rows, one below the other.
template <int R, bool kRowScale, TileFetches kFetches>
void tiles_int8_fetching(const LinearArgs& args, int panel, int row, int count,
                         PanelFetch& fetch) {
  constexpr bool kNear = kFetches == TileFetches::kNearPanel;
  constexpr bool kCache = kFetches == TileFetches::kPanelAndCache;
  const PackedLinear& weight = *args.weight;
  const Activation& input = *args.input;
  const int64_t stride = input.stride, scale_stride = input.scale_stride;
  const uint8_t* const panel_begin =
      weight.data + panel * panel_bytes(Precision::kInt8, weight.inputs);
  const float* column_scales = weight.scales + panel * kPanel;
  for (int tile = 0; tile < count; ++tile, row += R) {
    const uint8_t* w = panel_begin;
    const int8_t* x = static_cast<const int8_t*>(input.data) + int64_t{row} * stride;
    const float* scales = input.scales + row;
    const int32_t* offsets = input.offsets + row;
    TileFetch ahead = kNear ? TileFetch{fetch.near_tile(), {}, nullptr} : fetch.tile();
    const auto step = [&] {
      if constexpr (kNear) {
        ahead.panel.template step<3>();
      } else if constexpr (kCache) {
        ahead.step();
      } else {
        ahead.panel.step();
      }
    };
    prefetch_output<R>(args, panel, row);
    constexpr int kStepQuads = kNear ? 1 : PanelFetch::kNearSteps;
    vf total[R][2];
    if constexpr (kRowScale) {
      vi acc[R][2];
      begin_int8<R>(acc, offsets);
      add_row_int8<R, kStepQuads>(acc, w, x, stride, step);
      HB_UNROLL for (int r = 0; r < R; ++r) {
        const vf scale = set1(scales[r]);
        total[r][0] = to_float(acc[r][0]) * scale;
        total[r][1] = to_float(acc[r][1]) * scale;
      }
    } else {
      HB_UNROLL for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = zero();
      for (int g = 0; g < input.groups; ++g) {
        vi acc[R][2];
        begin_int8<R>(acc, offsets);
        add_int8<R, kStepQuads>(acc, w, x, stride, step);
        HB_UNROLL for (int r = 0; r < R; ++r) {
          const vf scale = set1(scales[r]);
          total[r][0] = fma(to_float(acc[r][0]), scale, total[r][0]);
          total[r][1] = fma(to_float(acc[r][1]), scale, total[r][1]);
        }
        w += kGroupInt8 * kPanel;
        x += kGroupInt8;
        scales += scale_stride;
        offsets += scale_stride;
      }
    }
    const vf left_scale = load(column_scales), right_scale = load(column_scales + kLanes);
    HB_UNROLL for (int r = 0; r < R; ++r) {
      total[r][0] = total[r][0] * left_scale;
      total[r][1] = total[r][1] * right_scale;
    }
    finish_rows<R>(args, panel, row, total);
    if constexpr (kCache) fetch.keep(ahead);
  }
}

template <int R, bool kRowScale>
void tiles_int8(const LinearArgs& args, int panel, int row, int count, PanelFetch& fetch) {
  if (fetch.is_near()) {
    tiles_int8_fetching<R, kRowScale, TileFetches::kNearPanel>(args, panel, row, count, fetch);
  } else if (fetch.has_cache()) {
    tiles_int8_fetching<R, kRowScale, TileFetches::kPanelAndCache>(args, panel, row, count, fetch);
  } else {
    tiles_int8_fetching<R, kRowScale, TileFetches::kPanel>(args, panel, row, count, fetch);
  }
}

template <int R>
HB_INLINE void tile_int4(const LinearArgs& args, int panel, int row, TileFetch& ahead) {
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
HB_INLINE void tile_bf16(const LinearArgs& args, int panel, int row, TileFetch& ahead) {
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
HB_INLINE void tile_f32(const LinearArgs& args, int panel, int row, TileFetch& ahead) {
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

#define HB_TILES(name)                                                                        \
  template <int R>                                                                            \
  void tiles_##name(const LinearArgs& args, int panel, int row, int count, PanelFetch& fetch) { \
    for (int tile = 0; tile < count; ++tile, row += R) {                                      \
      TileFetch ahead = fetch.tile();                                                         \
      tile_##name<R>(args, panel, row, ahead);                                                \
      fetch.keep(ahead);                                                                      \
    }                                                                                         \
  }
HB_TILES(int4)
HB_TILES(bf16)
HB_TILES(f32)
#undef HB_TILES

using Tiles = void (*)(const LinearArgs&, int panel, int row, int count, PanelFetch&);

inline Tiles choose_tiles(Precision precision, bool row_scale, int rows) {
#if defined(__AVX512F__)
  static constexpr Tiles int8[] = {tiles_int8<1, false>, tiles_int8<2, false>,
                                   tiles_int8<3, false>, tiles_int8<4, false>,
                                   tiles_int8<5, false>, tiles_int8<6, false>};
  static constexpr Tiles int8_row_scale[] = {
      tiles_int8<1, true>, tiles_int8<2, true>,  tiles_int8<3, true>,  tiles_int8<4, true>,
      tiles_int8<5, true>, tiles_int8<6, true>,  tiles_int8<7, true>,  tiles_int8<8, true>,
      tiles_int8<9, true>, tiles_int8<10, true>, tiles_int8<11, true>, tiles_int8<12, true>};
  static constexpr Tiles int4[] = {tiles_int4<1>, tiles_int4<2>, tiles_int4<3>,
                                  tiles_int4<4>, tiles_int4<5>, tiles_int4<6>};
  static constexpr Tiles bf16[] = {
      tiles_bf16<1>, tiles_bf16<2>, tiles_bf16<3>, tiles_bf16<4>,  tiles_bf16<5>,  tiles_bf16<6>,
      tiles_bf16<7>, tiles_bf16<8>, tiles_bf16<9>, tiles_bf16<10>, tiles_bf16<11>, tiles_bf16<12>};
  static constexpr Tiles f32[] = {
      tiles_f32<1>, tiles_f32<2>, tiles_f32<3>, tiles_f32<4>,  tiles_f32<5>,  tiles_f32<6>,
      tiles_f32<7>, tiles_f32<8>, tiles_f32<9>, tiles_f32<10>, tiles_f32<11>, tiles_f32<12>};
#else
  static constexpr Tiles int8[] = {tiles_int8<1, false>, tiles_int8<2, false>};
  static constexpr Tiles int8_row_scale[] = {tiles_int8<1, true>, tiles_int8<2, true>};
  static constexpr Tiles int4[] = {tiles_int4<1>, tiles_int4<2>};
  static constexpr Tiles bf16[] = {tiles_bf16<1>, tiles_bf16<2>, tiles_bf16<3>};
  static constexpr Tiles f32[] = {tiles_f32<1>, tiles_f32<2>, tiles_f32<3>};
#endif
  switch (precision) {
    case Precision::kInt8: return row_scale ? int8_row_scale[rows - 1] : int8[rows - 1];
    case Precision::kInt4: return int4[rows - 1];
    case Precision::kBf16: return bf16[rows - 1];
    default: return f32[rows - 1];
  }
}

// Rows with which int8 weights are read as a plain stream. With two, fetched evenly, a step takes a
// seventh less.
constexpr int kStreamingRows = 1;

// One panel of columns for the rows [row_begin, row_end). Tiles are made about equally high:
// 8 rows go as 4 + 4, not as 6 + 2.
inline void linear(const LinearArgs& args, int panel, int row_begin, int row_end) {
  const Precision precision = args.weight->precision;
  const bool row_scale = args.input->has_row_scale();
  const int highest = tile_rows(precision, row_scale);
  const int rows = row_end - row_begin;
  const int tiles = (rows + highest - 1) / highest;
  // One row of int8 uses weights as fast as they come, in order: fetching the rest of a run is
  // better left to the hardware, which cannot know only what follows the run.
  const bool streams = precision == Precision::kInt8 && rows <= kStreamingRows &&
                       args.next_panel == args.weight->panel(panel + 1);
  PanelFetch fetch(args, streams ? nullptr : args.next_panel, tiles);
  const int low = rows / tiles, higher = rows % tiles;
  const int rest = row_begin + higher * (low + 1);
  if (higher > 0)
    choose_tiles(precision, row_scale, low + 1)(args, panel, row_begin, higher, fetch);
  choose_tiles(precision, row_scale, low)(args, panel, rest, tiles - higher, fetch);
}
