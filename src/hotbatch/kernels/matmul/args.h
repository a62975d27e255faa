// Linear layers: y[M, N] = x[M, K] * W[N, K]^T (+ bias) (+ residual).
//
// Weights are packed once at load into panels of 32 output columns, in the order in which the
// inner loop reads them:
//   f32   [panel][K][32]                    floats
//   bf16  [panel][K/2][32][2]               bfloat16
//   int8  [panel][K/4][32][4]               w + 128 as unsigned bytes; one scale a column
//   int4  [panel][K/32] x 640 bytes         512 bytes of nibbles, then 32 scales d and 32
//         offsets m as float16: w = d*q + m, the grid of GGUF's Q4_1. Of the 8 k-quads of a
//         group, quad i lies in the low and quad i+4 in the high nibbles.
// Activations are quantised at run time to signed bytes, one scale a token and group of K:
// the integer sum inside a group is exact and groups add up in ascending order, so a row's
// result does not depend on the rows beside it. An int8 layer may also have one scale for all of
// K: no sum is rescaled on the way, and a tile has registers for twice the rows. A few large
// channels then cost several per cent of perplexity, unless they are scaled down and their weights
// up (executor/channel_scales.py).
#pragma once

#include <cstdint>

#include "csrc/raw_tensor.h"

namespace hotbatch {

enum class Precision { kF32, kBf16, kInt8, kInt4 };

constexpr int kPanel = 32;      // output columns of a panel
constexpr int kGroupInt8 = 64;  // activation group where weights are int8
constexpr int kGroupInt4 = 32;  // ... and int4, whose weights are grouped alike
constexpr int kInt4GroupBytes = 640;
constexpr int kMaxInputs = 1 << 15;  // K at most; a row is decoded on the stack when packing
// Sums over all of a row stay within 32 bits (those under way may wrap around and come back).
static_assert(int64_t{128} * 127 * kMaxInputs < INT32_MAX,
              "the integer sums of an int8 layer overflow");

static inline int group_size(Precision precision) {
  return precision == Precision::kInt4 ? kGroupInt4 : kGroupInt8;
}
static inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// Input columns after padding with zeros.
static inline int padded_inputs(Precision precision, int k) {
  switch (precision) {
    case Precision::kF32: return k;
    case Precision::kBf16: return round_up(k, 2);
    default: return round_up(k, group_size(precision));
  }
}

static inline int64_t panel_bytes(Precision precision, int k) {
  const int64_t padded = padded_inputs(precision, k);
  switch (precision) {
    case Precision::kF32: return padded * kPanel * 4;
    case Precision::kBf16: return padded * kPanel * 2;
    case Precision::kInt8: return padded * kPanel;
    case Precision::kInt4: return padded / kGroupInt4 * kInt4GroupBytes;
  }
  return 0;
}

// A tile of rows calls PanelPrefetch::step once for so many bytes of its panel (int4: once a
// group), and so often in all.
static inline int fetch_step_bytes(Precision precision) {
  return precision == Precision::kInt8 ? 512 : 1024;
}
static inline int fetch_steps(Precision precision, int k) {
  const int padded = padded_inputs(precision, k);
  switch (precision) {
    case Precision::kInt8: return padded / 16;
    case Precision::kInt4: return padded / 32;
    case Precision::kBf16: return padded / 16;
    default: return padded / 8;
  }
}

struct PackedLinear {
  Precision precision = Precision::kF32;
  int outputs = 0;  // N
  int inputs = 0;   // K
  uint8_t* data = nullptr;
  float* scales = nullptr;  // [N padded to 32], int8 only
  float* bias = nullptr;    // [N padded to 32] or null
  // Gate and up of an MLP, N/2 rows each, interleaved: a panel holds 16 columns of the gate and
  // the same 16 of up, so that SiLU(gate) * up needs no pass of its own.
  bool gated = false;

  // Which row of the stacked tensors is this packed column?
  int source_row(int column) const {
    if (!gated) return column;
    const int within = column % kPanel, half = kPanel / 2;
    return column / kPanel * half + (within < half ? within : outputs / 2 + within - half);
  }
  int panels() const { return (outputs + kPanel - 1) / kPanel; }
  int64_t bytes_per_panel() const { return panel_bytes(precision, inputs); }
  const uint8_t* panel(int index) const { return data + index * bytes_per_panel(); }
};

// The input of a linear layer in the form its precision wants. Row strides in elements.
struct Activation {
  Precision precision = Precision::kF32;
  int cols = 0;    // K
  int stride = 0;  // K padded
  int groups = 0;  // quantised only
  int group = 0;   // ... columns that share a scale
  void* data = nullptr;        // float, bfloat16 or int8, [M, stride]
  // A group's scales for all rows lie together, so that a tile finds those of its rows in one
  // cache line, and threads that quantise other groups or other rows write other lines.
  int64_t scale_stride = 0;    // from one group to the next: M padded
  float* scales = nullptr;     // [groups, scale_stride]
  int32_t* offsets = nullptr;  // int8: -128 * sum of the group's bytes, [groups, scale_stride]
  float* sums = nullptr;       // int4: scale * sum of the group's bytes, [groups, scale_stride]

  bool has_row_scale() const { return precision == Precision::kInt8 && group == stride; }
};

// Memory that the next operation will read, fetched in small steps while this one computes: the
// products leave the memory idle, attention leaves the arithmetic idle. It arrives in the second
// cache and, pushed out from there, stays in the third.
struct alignas(64) FetchAhead {
  const uint8_t* base = nullptr;
  int64_t block_bytes = 0;
  const int32_t* blocks = nullptr;      // not yet begun
  const int32_t* blocks_end = nullptr;
  const uint8_t* at = nullptr;          // within the block under way
  const uint8_t* end = nullptr;
  int lines_per_step = 0;

  // Goes on to the next block where this one is done. False: there is none.
  bool begin() {
    if (at + 64 < end) return true;
    if (blocks == blocks_end) return false;
    at = base + block_bytes * *blocks++;
    end = at + block_bytes;
    return true;
  }
};

struct LinearArgs {
  const PackedLinear* weight = nullptr;
  const Activation* input = nullptr;
  float* output = nullptr;
  int64_t output_stride = 0;
  const float* residual = nullptr;  // same stride as output; may be output itself
  // Fetched into the second cache while a panel is computed, as many bytes as this one has: the
  // panel that this thread will most likely get next. Null: nothing.
  const uint8_t* next_panel = nullptr;
  FetchAhead* ahead = nullptr;
};

// A gated linear layer followed by SiLU(gate) * up, written as the next layer's input.
constexpr int kGatedPanels = 4;  // together 64 columns of the result: whole activation groups
constexpr int kGatedRows = 48;   // rows whose floats are held at once

constexpr int kGatedFloats = kGatedRows * kGatedPanels * kPanel;

struct GatedArgs {
  LinearArgs linear;                   // output and residual are not used
  const Activation* output = nullptr;  // N/2 columns
  float* scratch = nullptr;            // [kGatedFloats]
  const uint8_t* next_group = nullptr; // fetched during the group's last panel
};

// Rows of one or several tensors, stacked, become one packed weight.
struct PackArgs {
  const PackedLinear* target = nullptr;
  const RawRows* parts = nullptr;
  int num_parts = 0;
  // [K] or null: each input column is multiplied by its own. Not where a file's 4-bit grid is kept.
  const float* column_scales = nullptr;
};

}  // namespace hotbatch
