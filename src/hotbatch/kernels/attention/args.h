// Paged attention: the cache's layout, the step's work list, and the arguments of the kernels.
//
// Cache layout. Each layer has one allocation of [num_blocks][kv_heads][K part | V part], plus
// the scales of int8. A block holds `block_size` tokens, in groups of 16. Seen as 32-bit words
// that pack 1 (f32), 2 (bf16) or 4 (int8) numbers:
//   K part  [groups][head_dim / pack][16 tokens] words, a word packs neighbouring dims
//   V part  [groups][16 / pack][head_dim] words, a word packs neighbouring tokens
// One 64-byte load thus feeds a product of 16 keys (or 16 dims of V) with a broadcast word, and
// neither QK^T nor PV needs a reduction across lanes. int8 keeps one scale a token and head:
//   scales  [groups][2][16] f32, of K and of V; the bytes are unsigned, 128 means 0.
// A block is copied with one memcpy of kv_block_bytes a layer.
//
// Functions here have internal linkage on purpose: this header is compiled for several
// instruction sets, and the linker must not merge their copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "csrc/batch.h"

namespace hotbatch {

enum class KvDtype : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

struct KvLayout {
  KvDtype dtype = KvDtype::bf16;
  int kv_heads = 0;
  int head_dim = 0;     // a multiple of 16, at most 256
  int block_size = 16;  // tokens a block, a multiple of 16
};

// Numbers in a 32-bit word.
static inline int kv_pack(KvDtype dtype) {
  return dtype == KvDtype::f32 ? 1 : dtype == KvDtype::bf16 ? 2 : 4;
}
// Bytes of K alone (and of V alone) of one head in one block.
static inline size_t kv_part_bytes(const KvLayout& layout) {
  return static_cast<size_t>(layout.block_size) * layout.head_dim * 4 / kv_pack(layout.dtype);
}
static inline size_t kv_head_bytes(const KvLayout& layout) {
  const size_t scales = layout.dtype == KvDtype::int8 ? 2 * sizeof(float) * layout.block_size : 0;
  return 2 * kv_part_bytes(layout) + scales;
}
// Bytes of one block in one layer.
static inline size_t kv_block_bytes(const KvLayout& layout) {
  return kv_head_bytes(layout) * layout.kv_heads;
}
// Bytes of one row of queries as rotary/ writes them and attention/ reads them: per head the
// head_dim numbers in the cache's dtype, and for int8 their scale (f32) and sum (int32) in 16
// bytes more.
static inline size_t query_head_bytes(const KvLayout& layout) {
  const size_t numbers = static_cast<size_t>(layout.head_dim) * 4 / kv_pack(layout.dtype);
  return layout.dtype == KvDtype::int8 ? numbers + 16 : numbers;
}
static inline size_t query_row_bytes(const KvLayout& layout, int q_heads) {
  return query_head_bytes(layout) * q_heads;
}

// Keys are handled in chunks at fixed absolute positions. A chunk's contribution to a row is
// computed from a fresh state, and chunks are folded in ascending order, so that who computes
// which chunk, and together with what, changes no bit.
constexpr int kKeyChunk = 128;

// A row of an item. `slot` is where its partial results go, or -1: straight to the output.
struct AttentionRow {
  int32_t row = 0;
  int32_t slot = -1;
};

// One piece of work: some query rows against key chunks [chunk_begin, chunk_end) of the kv heads
// [head_begin, head_end). Its rows belong to one sequence, at ascending positions, or to
// several that share these chunks; `sequence` is the one whose block table is read.
//
// A row whose first chunk is not before `chunk_begin` folds its chunks into one partial (or the
// output); for any other row, chunk c becomes partial `slot + c - chunk_begin`.
struct AttentionItem {
  int32_t sequence = 0;
  int32_t rows_begin = 0;
  int32_t rows_count = 0;
  int32_t chunk_begin = 0;
  int32_t chunk_end = 0;
  int32_t head_begin = 0;
  int32_t head_end = 0;
};

// The partials [slot_begin, slot_begin + slot_count) of one row, in ascending key order.
struct AttentionMerge {
  int32_t row = 0;
  int32_t slot_begin = 0;
  int32_t slot_count = 0;
};

// A step's work for all layers with the same sliding window; made by AttentionPlanner
// (attention/plan.h), which owns the memory.
struct AttentionWork {
  const AttentionItem* items = nullptr;
  int item_count = 0;
  const AttentionRow* rows = nullptr;
  const AttentionMerge* merges = nullptr;
  int merge_count = 0;
  size_t partial_floats = 0;  // size of AttentionArgs::partials
};

// A partial holds [q_heads][head_dim] sums, then [q_heads] maxima, then [q_heads] weights.
static inline size_t attention_partial_floats(int q_heads, int head_dim) {
  return (static_cast<size_t>(q_heads) * (head_dim + 2) + 15) / 16 * 16;
}

struct AttentionArgs {
  const Batch* batch = nullptr;
  const AttentionWork* work = nullptr;
  KvLayout layout;
  int q_heads = 0;
  int window = 0;            // a query sees this many keys, itself included; 0: all before it
  float scale = 1.0f;        // of the scores, usually 1 / sqrt(head_dim)
  const void* q = nullptr;   // [N][query_row_bytes], from rotary_store_row
  const void* kv = nullptr;  // this layer's cache
  float* out = nullptr;      // [N, q_heads * head_dim]
  float* partials = nullptr;         // [work->partial_floats], 64-byte aligned
  void* scratch = nullptr;           // threads * scratch_stride bytes, 64-byte aligned
  size_t scratch_stride = 0;         // at least attention_scratch_bytes, a multiple of 64
};

// Queries (rows x heads of a group) that one item handles at most; no group may be larger.
constexpr int kTileQueries = 64;
// Queries whose products with keys and values are formed in registers together.
constexpr int kQueryBlock = 8;

// Bytes of scratch that one thread needs: the running state of a tile, and the scores, weights
// and weighted values of a block of queries against a chunk of keys.
static inline size_t attention_scratch_bytes(const KvLayout& layout, int /*q_heads*/) {
  const size_t state = size_t{kTileQueries} * (layout.head_dim + 2);
  const size_t block = size_t{kQueryBlock} * (2 * kKeyChunk + layout.head_dim);
  return (state + block) * sizeof(float);
}

}  // namespace hotbatch
