// Paged attention for a ragged batch, one work item at a time (see args.h).
//
// A query meets a chunk of 128 keys in three passes over numbers that stay in the first cache:
// scores, softmax weights from a fresh maximum, weighted sum of values. The chunk's result is
// then folded into the row's running state ("online softmax", Milakov and Gimelshein 2018; split
// over keys as in flash decoding). Blocks of up to eight queries (heads of a group, rows of a
// tile) share each load of K and V. What is read next is asked for line by line in the order in
// which it lies in memory, a few kilobytes ahead (ReadAhead), so that a decode step streams the
// cache.
//
// Bit-exactness: each (query, key) score and each (query, dim) sum has its own accumulator with
// a fixed order inside the chunk; hidden keys get weight zero, and adding zeros is exact (the
// sign of a zero sum is settled at the end).
//
// Included inside namespace hotbatch::HB_ISA; see csrc/isa_tables.inc.

constexpr int kGroupKeys = 16;
constexpr int kChunkGroups = kKeyChunk / kGroupKeys;

#include "attention/cpu_formats.h"

// How many accumulators a loop keeps: as many as there are registers for.
#if defined(__AVX512F__)
constexpr int kScoreRows = 8, kScoreGroups = 2, kScoreGroupsFewRows = 4;
constexpr int kValueRows = 4;
#else
constexpr int kScoreRows = 4, kScoreGroups = 1, kScoreGroupsFewRows = 1;
constexpr int kValueRows = 4;
#endif

// Where the keys and values of a chunk lie for one kv head, a group of 16 tokens each. Groups
// beside the visible ones repeat the nearest, so that loops may overshoot.
struct ChunkView {
  const int32_t* k[kChunkGroups];
  const int32_t* v[kChunkGroups];
  const float* scales[kChunkGroups];  // [2][16], int8 only
  int first, end;                     // groups that any row of the tile sees
};

// A group's keys or its values are a piece: memory without a gap. So many pieces ahead of the
// reader the next one is asked for: 8 kilobytes of a bf16 cache with 64 dims. That is enough for
// the latency of memory and leaves the first cache room for what is in use.
constexpr int kPiecesAhead = 4;

// The pieces of a chunk in the order in which they are read, keys before values, and the first
// ones of what comes after it. Asking for them in this order, each from its beginning to its end,
// is worth a third of the bandwidth over asking in the order of use, which is four pieces at a
// time: the hardware then sees the stream, and goes ahead of it.
struct ReadAhead {
  const int32_t* pieces[2 * kChunkGroups + kPiecesAhead];
  int first, groups;

  ReadAhead(const ChunkView& view, const ChunkView* next)
      : first(view.first), groups(view.end - view.first) {
    int count = 0;
    for (int g = view.first; g < view.end; ++g) pieces[count++] = view.k[g];
    for (int g = view.first; g < view.end; ++g) pieces[count++] = view.v[g];
    const int32_t* last = pieces[count - 1];
    for (int i = 0; i < kPiecesAhead; ++i)
      pieces[count++] = next ? next->k[std::min(next->first + i, kChunkGroups - 1)] : last;
    // Loops may overshoot the visible groups, and ask for what lies behind them.
    for (; count < 2 * kChunkGroups + kPiecesAhead; ++count) pieces[count] = last;
  }
  const int32_t* after_keys(int group) const { return pieces[group - first + kPiecesAhead]; }
  const int32_t* after_values(int group) const {
    return pieces[group - first + groups + kPiecesAhead];
  }
};

// One item's fixed facts, and where its thread works.
struct QueryTile {
  const AttentionArgs& args;
  const AttentionItem& item;

  QueryTile(const AttentionArgs& args_in, const AttentionItem& item_in)
      : args(args_in), item(item_in) {}

  int group;                     // query heads a kv head
  int dim;
  int queries = 0;               // rows * group
  int key_begin = 1 << 30;       // union over the rows
  int key_end = 0;
  int32_t first[kTileQueries];   // per query: first visible key
  int32_t end[kTileQueries];     // and one past the last
  float* state;                  // [kTileQueries][dim], running weighted sums
  float* state_max;              // [kTileQueries], in units of log2
  float* state_weight;           // [kTileQueries]
  float* scores;                 // [kQueryBlock][kKeyChunk]
  int32_t* weights;              // [kQueryBlock][kKeyChunk] words at most
  float* sums;                   // [kQueryBlock][dim]
};

inline QueryTile open_tile(const AttentionArgs& args, const AttentionItem& item, int thread) {
  QueryTile tile{args, item};
  tile.group = args.q_heads / args.layout.kv_heads;
  tile.dim = args.layout.head_dim;
  const AttentionRow* rows = args.work->rows + item.rows_begin;
  for (int r = 0; r < item.rows_count; ++r) {
    const int end = args.batch->positions[rows[r].row] + 1;
    const int first = args.window > 0 ? std::max(0, end - args.window) : 0;
    tile.key_begin = std::min(tile.key_begin, first);
    tile.key_end = std::max(tile.key_end, end);
    for (int g = 0; g < tile.group; ++g, ++tile.queries) {
      tile.first[tile.queries] = first;
      tile.end[tile.queries] = end;
    }
  }
  tile.state = reinterpret_cast<float*>(static_cast<char*>(args.scratch) +
                                        args.scratch_stride * static_cast<size_t>(thread));
  tile.state_max = tile.state + kTileQueries * tile.dim;
  tile.state_weight = tile.state_max + kTileQueries;
  tile.scores = tile.state_weight + kTileQueries;
  tile.weights = reinterpret_cast<int32_t*>(tile.scores + kQueryBlock * kKeyChunk);
  tile.sums = tile.scores + 2 * kQueryBlock * kKeyChunk;
  return tile;
}

inline ChunkView view_chunk(const QueryTile& tile, int head, int chunk) {
  const KvLayout& layout = tile.args.layout;
  const Batch& batch = *tile.args.batch;
  const size_t block_bytes = kv_block_bytes(layout), head_bytes = kv_head_bytes(layout);
  const size_t part = kv_part_bytes(layout);
  const int block_groups = layout.block_size / kGroupKeys;
  const size_t group_bytes = part / static_cast<size_t>(block_groups);
  const int32_t* table =
      batch.block_table + static_cast<size_t>(tile.item.sequence) * batch.max_blocks;
  const int begin = std::max(tile.key_begin, chunk * kKeyChunk) / kGroupKeys;
  const int last = (std::min(tile.key_end, (chunk + 1) * kKeyChunk) - 1) / kGroupKeys;
  const auto* cache =
      static_cast<const uint8_t*>(tile.args.kv) + head_bytes * static_cast<size_t>(head);

  ChunkView view{};
  view.first = begin % kChunkGroups;
  view.end = last % kChunkGroups + 1;
  int block = begin / block_groups, within = begin % block_groups;
  for (int slot = begin % kChunkGroups, group = begin; slot < kChunkGroups; ++slot) {
    const uint8_t* base = cache + block_bytes * static_cast<size_t>(table[block]);
    const size_t offset = group_bytes * static_cast<size_t>(within);
    view.k[slot] = reinterpret_cast<const int32_t*>(base + offset);
    view.v[slot] = reinterpret_cast<const int32_t*>(base + part + offset);
    view.scales[slot] = reinterpret_cast<const float*>(base + 2 * part) + 2 * kGroupKeys * within;
    if (group == last) continue;
    ++group;
    if (++within == block_groups) within = 0, ++block;
  }
  for (int slot = begin % kChunkGroups - 1; slot >= 0; --slot) {
    view.k[slot] = view.k[slot + 1];
    view.v[slot] = view.v[slot + 1];
    view.scales[slot] = view.scales[slot + 1];
  }
  return view;
}

// Scores of kRows queries with kGroups groups of keys.
template <class Kv, int kRows, int kGroups>
inline void score_some(const Query* queries, const ChunkView& view, const ReadAhead& ahead,
                       int group, int words, float* scores) {
  typename Kv::ScoreSum sums[kRows][kGroups];
  HB_UNROLL
  for (int i = 0; i < kRows; ++i) {
    HB_UNROLL
    for (int g = 0; g < kGroups; ++g) sums[i][g] = Kv::start_score(queries[i]);
  }
  // As many lines are read as are asked for; `words` is a multiple of kGroups.
  for (int w = 0, piece = 0; piece < kGroups; ++piece) {
    const int32_t* next = ahead.after_keys(group + piece);
    for (const int stop = w + words / kGroups; w < stop; ++w, next += kGroupKeys * kGroups) {
      typename Kv::Words keys[kGroups];
      HB_UNROLL
      for (int g = 0; g < kGroups; ++g) {
        keys[g] = held(Kv::words(view.k[group + g] + kGroupKeys * w));
        prefetch(next + kGroupKeys * g);
      }
      HB_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int32_t word = queries[i].words[w];
        HB_UNROLL
        for (int g = 0; g < kGroups; ++g) sums[i][g] = Kv::add_score(sums[i][g], keys[g], word);
      }
    }
  }
  HB_UNROLL
  for (int i = 0; i < kRows; ++i) {
    HB_UNROLL
    for (int g = 0; g < kGroups; ++g)
      store(scores + i * kKeyChunk + kGroupKeys * (group + g),
            Kv::score(sums[i][g], queries[i], view.scales[group + g]));
  }
}

template <class Kv, int kRows>
inline void score_rows(const Query* queries, const ChunkView& view, const ReadAhead& ahead,
                       int group, int group_end, int words, float* scores) {
  constexpr int kGroups = kRows > 4 ? kScoreGroups : kScoreGroupsFewRows;
  constexpr int kFewGroups = kGroups > 2 ? 2 : kGroups;
  for (; group_end - group > kFewGroups && group + kGroups <= kChunkGroups; group += kGroups)
    score_some<Kv, kRows, kGroups>(queries, view, ahead, group, words, scores);
  for (; group < group_end; group += kFewGroups)
    score_some<Kv, kRows, kFewGroups>(queries, view, ahead,
                                      std::min(group, kChunkGroups - kFewGroups), words, scores);
}

// Scores of `rows` <= kQueryBlock queries with the groups [group, group_end) of a chunk. May
// also write the scores of groups beside them, which nobody reads.
template <class Kv>
inline void score_block(int rows, const Query* queries, const ChunkView& view,
                        const ReadAhead& ahead, int group, int group_end, int words,
                        float* scores) {
  for (int row = 0; row < rows; row += kScoreRows) {
    const Query* q = queries + row;
    float* s = scores + row * kKeyChunk;
    switch (std::min(rows - row, kScoreRows)) {
      case 1: score_rows<Kv, 1>(q, view, ahead, group, group_end, words, s); break;
      case 2: score_rows<Kv, 2>(q, view, ahead, group, group_end, words, s); break;
      case 3: score_rows<Kv, 3>(q, view, ahead, group, group_end, words, s); break;
      case 4: score_rows<Kv, 4>(q, view, ahead, group, group_end, words, s); break;
#if defined(__AVX512F__)
      case 5: score_rows<Kv, 5>(q, view, ahead, group, group_end, words, s); break;
      case 6: score_rows<Kv, 6>(q, view, ahead, group, group_end, words, s); break;
      case 7: score_rows<Kv, 7>(q, view, ahead, group, group_end, words, s); break;
      default: score_rows<Kv, 8>(q, view, ahead, group, group_end, words, s); break;
#endif
    }
  }
}

// The largest score of groups [group, group_end), of which keys [first, end) of the chunk are
// visible; the others are overwritten with a number far below.
inline float hide_and_find_max(float* scores, int group, int group_end, int first, int end) {
  const vf hidden = set1(-3.0e38f);
  vf top = hidden;
  for (int g = group; g < group_end; ++g) {
    float* lanes = scores + kGroupKeys * g;
    vf s = load(lanes);
    const int begin = first - kGroupKeys * g, stop = end - kGroupKeys * g;
    if (begin > 0 || stop < kGroupKeys) {
      s = first_lanes(std::max(0, std::min(stop, kGroupKeys)), s, hidden);
      s = first_lanes(std::max(0, std::min(begin, kGroupKeys)), hidden, s);
      store(lanes, s);
    }
    top = max(top, s);
  }
  return largest(top);
}

// Turns scores into weights as Kv stores them; result.max is set.
template <class Kv>
inline void weigh_row(float* scores, int group, int group_end, float scale, const ChunkView& view,
                      int32_t* weights, ChunkResult& result) {
  const vf factor = set1(scale), shift = set1(-result.max);
  vf total = zero();
  for (int g = group; g < group_end; ++g) {
    const vf weight = exp2(fma(load(scores + kGroupKeys * g), factor, shift));
    total = total + weight;
    Kv::store_weight(weight, view.scales[g], scores + kGroupKeys * g, weights, g);
  }
  result.weight = sum(total);
  Kv::finish_weights(scores, group, group_end, weights, result);
}

// Weighted sums over keys [first, end) of the chunk for kVectors * 16 dims of kRows queries.
template <class Kv, int kRows, int kVectors>
inline void sum_values_some(const int32_t* weights, const ChunkView& view, const ReadAhead& ahead,
                            int first, int end, int dim, int dim0, const ChunkResult* results,
                            float* sums) {
  constexpr int kGroupWords = kGroupKeys / Kv::kPack;
  typename Kv::ValueSum acc[kRows][kVectors];
  HB_UNROLL
  for (int i = 0; i < kRows; ++i) {
    HB_UNROLL
    for (int n = 0; n < kVectors; ++n) acc[i][n] = Kv::start_value(results[i]);
  }
  const auto step = [&](const int32_t* v, int w, auto load_words) {
    typename Kv::Words values[kVectors];
    HB_UNROLL
    for (int n = 0; n < kVectors; ++n) values[n] = held(load_words(v + kLanes * n));
    HB_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const auto word = Kv::weight_word(weights + i * kKeyChunk, w);
      HB_UNROLL
      for (int n = 0; n < kVectors; ++n) acc[i][n] = Kv::add_value(acc[i][n], values[n], word);
    }
  };
  // Where a word holds a visible key beside one that is not, the latter's value may be
  // anything, NaN included: it is cleared.
  const auto edge = [&](int w, uint32_t keep) {
    const int32_t* v = view.v[w / kGroupWords] + w % kGroupWords * dim + dim0;
    step(v, w, [keep](const int32_t* p) { return Kv::words_kept(p, keep); });
  };
  int w = first / Kv::kPack;
  const int full_end = Kv::kClearHidden ? end / Kv::kPack : (end + Kv::kPack - 1) / Kv::kPack;
  if (Kv::kClearHidden && first % Kv::kPack) {
    edge(w, w == full_end ? 0u : 0xffff0000u);  // 0: cannot be, as first < end
    ++w;
  }
  while (w < full_end) {
    const int group = w / kGroupWords, stop = std::min(full_end, (group + 1) * kGroupWords);
    const int32_t* v = view.v[group] + w % kGroupWords * dim + dim0;
    const int32_t* next = ahead.after_values(group) + w % kGroupWords * dim + dim0;
    for (; w < stop; ++w, v += dim, next += dim) {
      HB_UNROLL
      for (int n = 0; n < kVectors; ++n) prefetch(next + kLanes * n);
      step(v, w, [](const int32_t* p) { return Kv::words(p); });
    }
  }
  if (Kv::kClearHidden && end % Kv::kPack) edge(w, 0x0000ffffu);
  HB_UNROLL
  for (int i = 0; i < kRows; ++i) {
    HB_UNROLL
    for (int n = 0; n < kVectors; ++n)
      store(sums + i * dim + dim0 + kLanes * n, Kv::value(acc[i][n], results[i]));
  }
}

// The same for all dims.
template <class Kv, int kRows>
inline void sum_values_rows(const int32_t* weights, const ChunkView& view, const ReadAhead& ahead,
                            int first, int end, int dim, const ChunkResult* results, float* sums) {
  constexpr int kWide = Kv::kValueVectors;
  int d = 0;
  for (; d + kLanes * kWide <= dim; d += kLanes * kWide)
    sum_values_some<Kv, kRows, kWide>(weights, view, ahead, first, end, dim, d, results, sums);
  if constexpr (kWide > 2) {
    for (; d + kLanes * 2 <= dim; d += kLanes * 2)
      sum_values_some<Kv, kRows, 2>(weights, view, ahead, first, end, dim, d, results, sums);
  }
  if constexpr (kWide > 1) {
    if (d < dim)
      sum_values_some<Kv, kRows, 1>(weights, view, ahead, first, end, dim, d, results, sums);
  }
}

template <class Kv>
inline void sum_values_block(int rows, const int32_t* weights, const ChunkView& view,
                             const ReadAhead& ahead, int first, int end, int dim,
                             const ChunkResult* results, float* sums) {
  for (int row = 0; row < rows; row += kValueRows) {
    const int32_t* w = weights + row * kKeyChunk;
    const ChunkResult* r = results + row;
    float* out = sums + row * dim;
    switch (std::min(rows - row, kValueRows)) {
      case 1: sum_values_rows<Kv, 1>(w, view, ahead, first, end, dim, r, out); break;
      case 2: sum_values_rows<Kv, 2>(w, view, ahead, first, end, dim, r, out); break;
      case 3: sum_values_rows<Kv, 3>(w, view, ahead, first, end, dim, r, out); break;
      default: sum_values_rows<Kv, 4>(w, view, ahead, first, end, dim, r, out); break;
    }
  }
}

// Adds a later chunk's result to a running state. The only place where chunks meet, so that
// it makes no difference who computed them.
inline void fold(float* sums, float& top, float& weight, const float* more, float more_top,
                 float more_weight, int dim) {
  const float peak = top > more_top ? top : more_top;
  const vf old_factor = exp2(set1(top - peak)), new_factor = exp2(set1(more_top - peak));
  for (int d = 0; d < dim; d += kLanes)
    store(sums + d, fma(load(more + d), new_factor, load(sums + d) * old_factor));
  weight = first_lane(fma(set1(more_weight), new_factor, set1(weight) * old_factor));
  top = peak;
}

inline void write_output(const float* sums, float weight, int dim, float* out) {
  const vf inverse = set1(1.0f / weight);
  // Adding +0 turns -0 into +0: which of them a sum of hidden keys left is then forgotten.
  for (int d = 0; d < dim; d += kLanes) store(out + d, fma(load(sums + d), inverse, zero()));
}

// The place of one query head's part in a partial result.
struct PartialRef {
  float* sums;
  float* top;
  float* weight;
};

inline PartialRef partial_ref(const AttentionArgs& args, int slot, int q_head) {
  const int dim = args.layout.head_dim;
  float* base = args.partials +
                attention_partial_floats(args.q_heads, dim) * static_cast<size_t>(slot);
  float* tops = base + args.q_heads * dim;
  return {base + q_head * dim, tops + q_head, tops + args.q_heads + q_head};
}

// What one query does with its result for `chunk`: see AttentionItem.
inline void take_result(QueryTile& tile, int head, int chunk, int query, const ChunkResult& result,
                        const float* sums) {
  const AttentionArgs& args = tile.args;
  const int dim = tile.dim, first_chunk = tile.first[query] / kKeyChunk;
  const size_t bytes = sizeof(float) * static_cast<size_t>(dim);
  if (first_chunk < tile.item.chunk_begin) {
    const AttentionRow& row = args.work->rows[tile.item.rows_begin + query / tile.group];
    const PartialRef out = partial_ref(args, row.slot + chunk - tile.item.chunk_begin,
                                       head * tile.group + query % tile.group);
    std::memcpy(out.sums, sums, bytes);
    *out.top = result.max;
    *out.weight = result.weight;
  } else if (chunk == first_chunk) {
    std::memcpy(tile.state + query * dim, sums, bytes);
    tile.state_max[query] = result.max;
    tile.state_weight[query] = result.weight;
  } else {
    fold(tile.state + query * dim, tile.state_max[query], tile.state_weight[query], sums,
         result.max, result.weight, dim);
  }
}

// Queries [begin, begin + rows) of the tile against one chunk.
template <class Kv>
inline void attend_block(QueryTile& tile, int head, int chunk, const Query* queries, int begin,
                         int rows, const ChunkView& view, const ReadAhead& ahead) {
  const int base = chunk * kKeyChunk, dim = tile.dim;
  int32_t first[kQueryBlock], end[kQueryBlock];
  int block_first = kKeyChunk, block_end = 0;
  for (int i = 0; i < rows; ++i) {
    first[i] = std::max(0, tile.first[begin + i] - base);
    end[i] = std::min(kKeyChunk, tile.end[begin + i] - base);
    block_first = std::min(block_first, first[i]);
    block_end = std::max(block_end, end[i]);
  }
  const int group = block_first / kGroupKeys;
  const int group_end = (block_end + kGroupKeys - 1) / kGroupKeys;
  score_block<Kv>(rows, queries + begin, view, ahead, group, group_end, dim / Kv::kPack, tile.scores);

  const float scale = tile.args.scale * 1.44269504088896341f;
  ChunkResult results[kQueryBlock];
  for (int i = 0; i < rows; ++i)
    results[i].max = scale * hide_and_find_max(tile.scores + i * kKeyChunk, group, group_end,
                                               first[i], end[i]);
  for (int i = 0; i < rows; ++i)
    weigh_row<Kv>(tile.scores + i * kKeyChunk, group, group_end, scale, view,
                  tile.weights + i * kKeyChunk, results[i]);
  sum_values_block<Kv>(rows, tile.weights, view, ahead, block_first, block_end, dim, results,
                       tile.sums);
  for (int i = 0; i < rows; ++i)
    take_result(tile, head, chunk, begin + i, results[i], tile.sums + i * dim);
}

// All queries that see keys of `chunk`; those that do are neighbours.
template <class Kv>
inline void attend_chunk(QueryTile& tile, int head, int chunk, const Query* queries,
                         const ChunkView& view, const ReadAhead& ahead) {
  const int base = chunk * kKeyChunk;
  const auto sees = [&](int query) {
    return tile.end[query] > base && tile.first[query] < base + kKeyChunk;
  };
  int begin = 0, end = tile.queries;
  while (begin < end && !sees(begin)) ++begin;
  while (end > begin && !sees(end - 1)) --end;
  for (; begin < end; begin += kQueryBlock)
    attend_block<Kv>(tile, head, chunk, queries, begin, std::min(kQueryBlock, end - begin), view,
                     ahead);
}

inline void finish_head(QueryTile& tile, int head) {
  const AttentionArgs& args = tile.args;
  for (int query = 0; query < tile.queries; ++query) {
    const AttentionRow& row = args.work->rows[tile.item.rows_begin + query / tile.group];
    const int first_chunk = tile.first[query] / kKeyChunk;
    if (first_chunk < tile.item.chunk_begin || first_chunk >= tile.item.chunk_end) continue;
    const int q_head = head * tile.group + query % tile.group, dim = tile.dim;
    const float* sums = tile.state + query * dim;
    if (row.slot < 0) {
      write_output(sums, tile.state_weight[query], dim,
                   args.out + (static_cast<size_t>(row.row) * args.q_heads + q_head) * dim);
      continue;
    }
    const PartialRef out = partial_ref(args, row.slot, q_head);
    std::memcpy(out.sums, sums, sizeof(float) * static_cast<size_t>(dim));
    *out.top = tile.state_max[query];
    *out.weight = tile.state_weight[query];
  }
}

template <class Kv>
inline void attend_item(const AttentionArgs& args, const AttentionItem& item, int thread) {
  QueryTile tile = open_tile(args, item, thread);
  const size_t row_bytes = query_row_bytes(args.layout, args.q_heads);
  const size_t head_bytes = query_head_bytes(args.layout);
  const AttentionRow* rows = args.work->rows + item.rows_begin;
  Query queries[kTileQueries];
  ChunkView view = view_chunk(tile, item.head_begin, item.chunk_begin);
  for (int head = item.head_begin; head < item.head_end; ++head) {
    for (int r = 0, query = 0; r < item.rows_count; ++r) {
      const auto* q = static_cast<const uint8_t*>(args.q) +
                      row_bytes * static_cast<size_t>(rows[r].row) +
                      head_bytes * static_cast<size_t>(head * tile.group);
      for (int g = 0; g < tile.group; ++g, ++query)
        queries[query] = Kv::query(q + head_bytes * g, tile.dim);
    }
    for (int chunk = item.chunk_begin; chunk < item.chunk_end; ++chunk) {
      ChunkView next = view;
      const bool last = chunk + 1 == item.chunk_end;
      if (!last) {
        next = view_chunk(tile, head, chunk + 1);
      } else if (head + 1 < item.head_end) {
        next = view_chunk(tile, head + 1, item.chunk_begin);
      }
      const bool more = !last || head + 1 < item.head_end;
      attend_chunk<Kv>(tile, head, chunk, queries, view, ReadAhead(view, more ? &next : nullptr));
      view = next;
    }
    finish_head(tile, head);
  }
}

inline void attention_item(const AttentionArgs& args, int item, int thread) {
  const AttentionItem& work = args.work->items[item];
  switch (args.layout.dtype) {
    case KvDtype::f32: attend_item<KvF32>(args, work, thread); break;
    case KvDtype::bf16: attend_item<KvBf16>(args, work, thread); break;
    case KvDtype::int8: attend_item<KvInt8>(args, work, thread); break;
  }
}

// Folds the partial results of one row, all heads, and writes its output.
inline void attention_merge(const AttentionArgs& args, int merge) {
  const AttentionMerge& work = args.work->merges[merge];
  const int dim = args.layout.head_dim;
  for (int head = 0; head < args.q_heads; ++head) {
    const PartialRef state = partial_ref(args, work.slot_begin, head);
    for (int slot = 1; slot < work.slot_count; ++slot) {
      const PartialRef more = partial_ref(args, work.slot_begin + slot, head);
      fold(state.sums, *state.top, *state.weight, more.sums, *more.top, *more.weight, dim);
    }
    write_output(state.sums, *state.weight, dim,
                 args.out + (static_cast<size_t>(work.row) * args.q_heads + head) * dim);
  }
}
