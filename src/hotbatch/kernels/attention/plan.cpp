// How a step's attention is cut into items.
//
// 1. Tiles: consecutive rows of a sequence, so many that their queries (rows x heads of a group)
//    make good use of each key that is read, and no more than a small share of the step.
// 2. Shared prefixes: sequences that begin with the same blocks form a tree; a stretch of it with
//    two or more members becomes tiles that hold rows of all of them, read once.
// 3. A tile's kv heads are items of their own; its chunk range is cut where a thread would have
//    too few of them otherwise.
// 4. Rows whose chunks ended up in several items get slots for partial results and a merge. These
//    are dear where threads run on two chips, as each reads what the other has written: a part of
//    a prompt of 24 tokens took half as long again.
#include "attention/plan.h"

#include <algorithm>
#include <numeric>

namespace hotbatch {

namespace {

// Cost of a key for one kv head, in units of one query's products with it: reading it from
// memory weighs about as much as a dozen of these.
constexpr double kReadCost = 12.0;
constexpr int kItemsPerThread = 4;      // as far as cutting rows gets
constexpr int kLeastItemsPerThread = 3;  // otherwise
// A cut costs partial results and a second pass: not for less than this many chunks.
constexpr int kLeastChunks = 2;
// Sequences with more new queries than this make good use of keys by themselves.
constexpr int kMostSharedQueries = kTileQueries / 2;

struct RowRange {
  int first_key, end_key;
  int first_chunk() const { return first_key / kKeyChunk; }
  int end_chunk() const { return (end_key - 1) / kKeyChunk + 1; }
};

struct Tile {
  int sequence;
  int rows_begin, rows_count;  // in a list of batch rows
  int chunk_begin, chunk_end;
  double cost;  // of all chunks, one kv head
};

class Cutter {
 public:
  Cutter(const Batch& batch, const KvLayout& layout, int q_heads, int window)
      : batch_(batch), layout_(layout), group_(q_heads / layout.kv_heads), window_(window),
        shared_chunks_(static_cast<size_t>(batch.sequences), 0) {}

  void share_prefixes();
  void cut_sequences(int threads);

  RowRange range(int row) const {
    const int end = batch_.positions[row] + 1;
    return {window_ > 0 ? std::max(0, end - window_) : 0, end};
  }

  std::vector<int> rows;  // of all tiles
  std::vector<Tile> tiles;

 private:
  void add_tile(int sequence, int rows_begin, int chunk_begin, int chunk_end);
  void share(std::vector<int> members, int chunk);
  void share_stretch(const std::vector<int>& members, int chunk_begin, int chunk_end);
  int shareable_chunks(int sequence) const;
  int compare_chunk(int a, int b, int chunk) const;
  int tile_rows(int sequence, double target) const;
  int first_chunk(int sequence, int row) const {
    return std::max(range(row).first_chunk(), shared_chunks_[static_cast<size_t>(sequence)]);
  }
  int rows_of(int sequence) const {
    return batch_.seq_starts[sequence + 1] - batch_.seq_starts[sequence];
  }

  const Batch& batch_;
  const KvLayout& layout_;
  const int group_;
  const int window_;
  std::vector<int> shared_chunks_;  // per sequence: leading chunks that shared tiles cover
};

// Adds the rows from `rows_begin` on as one tile.
void Cutter::add_tile(int sequence, int rows_begin, int chunk_begin, int chunk_end) {
  const int count = static_cast<int>(rows.size()) - rows_begin;
  int first = 1 << 30, end = 0;
  for (int i = rows_begin; i < rows_begin + count; ++i) {
    first = std::min(first, range(rows[static_cast<size_t>(i)]).first_key);
    end = std::max(end, range(rows[static_cast<size_t>(i)]).end_key);
  }
  const int keys = std::min(end, chunk_end * kKeyChunk) - std::max(first, chunk_begin * kKeyChunk);
  tiles.push_back({sequence, rows_begin, count, chunk_begin, chunk_end,
                   keys * (kReadCost + count * group_)});
}

// Leading chunks that all rows of the sequence see whole.
int Cutter::shareable_chunks(int sequence) const {
  const int first_row = batch_.seq_starts[sequence], last_row = batch_.seq_starts[sequence + 1] - 1;
  if (last_row < first_row || rows_of(sequence) * group_ > kMostSharedQueries) return 0;
  if (range(last_row).first_key > 0) return 0;
  return (batch_.positions[first_row] + 1) / kKeyChunk;
}

// Orders two sequences by the block ids under a chunk.
int Cutter::compare_chunk(int a, int b, int chunk) const {
  const int begin = chunk * kKeyChunk / layout_.block_size;
  const int end = ((chunk + 1) * kKeyChunk - 1) / layout_.block_size + 1;
  const int32_t* x = batch_.block_table + static_cast<size_t>(a) * batch_.max_blocks;
  const int32_t* y = batch_.block_table + static_cast<size_t>(b) * batch_.max_blocks;
  for (int i = begin; i < end; ++i)
    if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
  return 0;
}

void Cutter::share_prefixes() {
  std::vector<int> members;
  for (int sequence = 0; sequence < batch_.sequences; ++sequence)
    if (shareable_chunks(sequence) > 0) members.push_back(sequence);
  if (members.size() > 1) share(std::move(members), 0);
}

// Members share all chunks before `chunk`: finds who shares this one, and how far.
void Cutter::share(std::vector<int> members, int chunk) {
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return compare_chunk(a, b, chunk) < 0; });
  for (size_t begin = 0, end; begin < members.size(); begin = end) {
    end = begin + 1;
    while (end < members.size() && compare_chunk(members[begin], members[end], chunk) == 0) ++end;
    if (end - begin < 2) continue;
    std::vector<int> same(members.begin() + static_cast<std::ptrdiff_t>(begin),
                          members.begin() + static_cast<std::ptrdiff_t>(end));
    const auto all_share = [&](int next) {
      return std::all_of(same.begin(), same.end(), [&](int member) {
        return next < shareable_chunks(member) && compare_chunk(same[0], member, next) == 0;
      });
    };
    int stop = chunk + 1;
    while (all_share(stop)) ++stop;
    share_stretch(same, chunk, stop);
    same.erase(std::remove_if(same.begin(), same.end(),
                              [&](int member) { return shareable_chunks(member) <= stop; }),
               same.end());
    if (same.size() > 1) share(std::move(same), stop);
  }
}

void Cutter::share_stretch(const std::vector<int>& members, int chunk_begin, int chunk_end) {
  int rows_begin = static_cast<int>(rows.size());
  for (int member : members) {
    const int queries = (static_cast<int>(rows.size()) - rows_begin + rows_of(member)) * group_;
    if (queries > kTileQueries) {
      add_tile(members[0], rows_begin, chunk_begin, chunk_end);
      rows_begin = static_cast<int>(rows.size());
    }
    for (int row = batch_.seq_starts[member]; row < batch_.seq_starts[member + 1]; ++row)
      rows.push_back(row);
    shared_chunks_[static_cast<size_t>(member)] = chunk_end;
  }
  add_tile(members[0], rows_begin, chunk_begin, chunk_end);
}

// Rows of a tile of this sequence, so that none costs more than `target` for one kv head if that
// can be without queries that have a block of the kernel's to themselves.
int Cutter::tile_rows(int sequence, double target) const {
  const int most = std::max(1, kTileQueries / group_);
  const int whole = std::max(1, kQueryBlock / std::gcd(kQueryBlock, group_));  // blocks, no rest
  const int last = batch_.seq_starts[sequence + 1] - 1;
  const int chunks = range(last).end_chunk() - first_chunk(sequence, last);
  const double queries = target / (std::max(1, chunks) * kKeyChunk) - kReadCost;
  const int fitting = static_cast<int>(queries / group_) / whole * whole;
  const int rows = std::min(most, std::max(whole, fitting));
  const int tiles = (rows_of(sequence) + rows - 1) / rows;
  const int even = (rows_of(sequence) + tiles - 1) / tiles;  // no small one at the end
  const int rounded = (even + whole - 1) / whole * whole;
  return rounded <= rows ? rounded : even;
}

// What no shared tile covers, a sequence at a time.
void Cutter::cut_sequences(int threads) {
  double total = 0.0;
  for (const Tile& tile : tiles) total += tile.cost;
  for (int sequence = 0; sequence < batch_.sequences; ++sequence) {
    if (rows_of(sequence) == 0) continue;
    const int last = batch_.seq_starts[sequence + 1] - 1;
    const int keys = (range(last).end_chunk() - first_chunk(sequence, last)) * kKeyChunk;
    total += keys * (kReadCost + rows_of(sequence) * group_);
  }
  const double target =
      threads > 1 ? total * layout_.kv_heads / (threads * kItemsPerThread) : total;
  for (int sequence = 0; sequence < batch_.sequences; ++sequence) {
    const int end = batch_.seq_starts[sequence + 1];
    if (rows_of(sequence) == 0) continue;
    const int count = tile_rows(sequence, target);
    for (int row = batch_.seq_starts[sequence]; row < end; row += count) {
      const int last = std::min(end, row + count) - 1;
      const int chunk_begin = first_chunk(sequence, row);
      const int chunk_end = range(last).end_chunk();
      if (chunk_begin >= chunk_end) continue;
      const int rows_begin = static_cast<int>(rows.size());
      for (int r = row; r <= last; ++r)
        if (range(r).end_chunk() > chunk_begin) rows.push_back(r);
      add_tile(sequence, rows_begin, chunk_begin, chunk_end);
    }
  }
}

}  // namespace

AttentionWork AttentionPlanner::plan(const Batch& batch, const KvLayout& layout, int q_heads,
                                     int window, int threads, bool stays) {
  Cutter cutter(batch, layout, q_heads, window);
  cutter.share_prefixes();
  cutter.cut_sequences(threads);
  const int heads = layout.kv_heads;
  double total = 0.0;
  for (const Tile& tile : cutter.tiles) total += tile.cost * heads;
  const double small = total / (threads * kItemsPerThread);
  const double target = threads > 1 ? total / (threads * kLeastItemsPerThread) : total;

  items_.clear();
  rows_.clear();
  merges_.clear();
  costs_.clear();
  for (const Tile& tile : cutter.tiles) {
    const int chunks = tile.chunk_end - tile.chunk_begin;
    const double wanted = target > 0.0 ? tile.cost / target : 1.0;
    const int parts = std::max(1, std::min(static_cast<int>(wanted + 0.5), chunks / kLeastChunks));
    const int together = static_cast<int>(small / std::max(tile.cost, 1e-9));  // heads to an item
    const int heads_each = parts > 1 ? 1 : std::max(1, std::min(heads, together));
    for (int part = 0; part < parts; ++part) {
      const int chunk_begin = tile.chunk_begin + chunks * part / parts;
      const int chunk_end = tile.chunk_begin + chunks * (part + 1) / parts;
      const int rows_begin = static_cast<int>(rows_.size());
      for (int i = tile.rows_begin; i < tile.rows_begin + tile.rows_count; ++i) {
        const int row = cutter.rows[static_cast<size_t>(i)];
        const RowRange range = cutter.range(row);
        if (range.first_chunk() < chunk_end && range.end_chunk() > chunk_begin)
          rows_.push_back({row, -1});
      }
      const int rows_count = static_cast<int>(rows_.size()) - rows_begin;
      if (rows_count == 0) continue;
      for (int head = 0; head < heads; head += heads_each) {
        const int head_end = std::min(heads, head + heads_each);
        items_.push_back(
            {tile.sequence, rows_begin, rows_count, chunk_begin, chunk_end, head, head_end});
        costs_.push_back(static_cast<float>(tile.cost / parts * (head_end - head)));
      }
    }
  }
  return finish(batch, layout, q_heads, window, stays ? threads : 1);
}

// Gives slots to rows in several items, and orders items from big to small, one owner's after
// another's: the first thread of a pool begins with the first of them, the last with the last.
AttentionWork AttentionPlanner::finish(const Batch& batch, const KvLayout& layout, int q_heads,
                                       int window, int owners) {
  // One list of rows belongs to the items of all heads: it is visited with its first head.
  std::vector<int> lists;
  for (int i = 0; i < static_cast<int>(items_.size()); ++i)
    if (items_[static_cast<size_t>(i)].head_begin == 0) lists.push_back(i);
  std::stable_sort(lists.begin(), lists.end(), [&](int a, int b) {
    return items_[static_cast<size_t>(a)].chunk_begin < items_[static_cast<size_t>(b)].chunk_begin;
  });
  const auto first_chunk = [&](int row) {
    const int end = batch.positions[row] + 1;
    return window > 0 ? std::max(0, end - window) / kKeyChunk : 0;
  };
  // Partial results that an item yields for a row.
  const auto slots = [&](const AttentionItem& item, int row) {
    if (first_chunk(row) >= item.chunk_begin) return 1;
    return std::min(item.chunk_end, batch.positions[row] / kKeyChunk + 1) - item.chunk_begin;
  };
  std::vector<int> items_of(static_cast<size_t>(batch.rows), 0);
  std::vector<int> slots_of(static_cast<size_t>(batch.rows), 0);
  for (int list : lists) {
    const AttentionItem& item = items_[static_cast<size_t>(list)];
    for (int i = item.rows_begin; i < item.rows_begin + item.rows_count; ++i) {
      const size_t row = static_cast<size_t>(rows_[static_cast<size_t>(i)].row);
      items_of[row] += 1;
      slots_of[row] += slots(item, static_cast<int>(row));
    }
  }
  int next_slot = 0;
  std::vector<int> slot_of(static_cast<size_t>(batch.rows), 0);
  for (int row = 0; row < batch.rows; ++row) {
    const size_t r = static_cast<size_t>(row);
    if (items_of[r] < 2) continue;
    merges_.push_back({row, next_slot, slots_of[r]});
    slot_of[r] = next_slot;
    next_slot += slots_of[r];
  }
  for (int list : lists) {
    const AttentionItem& item = items_[static_cast<size_t>(list)];
    for (int i = item.rows_begin; i < item.rows_begin + item.rows_count; ++i) {
      AttentionRow& entry = rows_[static_cast<size_t>(i)];
      const size_t row = static_cast<size_t>(entry.row);
      if (items_of[row] < 2) continue;
      entry.slot = slot_of[row];
      slot_of[row] += slots(item, entry.row);
    }
  }
  order_.resize(items_.size());
  std::iota(order_.begin(), order_.end(), 0);
  const auto owner = [&](int item) {
    const int first = items_[static_cast<size_t>(item)].rows_begin;
    return int64_t{rows_[static_cast<size_t>(first)].row} * owners / batch.rows;
  };
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) {
    if (owner(a) != owner(b)) return owner(a) < owner(b);
    return costs_[static_cast<size_t>(a)] > costs_[static_cast<size_t>(b)];
  });
  sorted_.clear();
  for (int i : order_) sorted_.push_back(items_[static_cast<size_t>(i)]);

  AttentionWork work;
  work.items = sorted_.data();
  work.item_count = static_cast<int>(sorted_.size());
  work.rows = rows_.data();
  work.merges = merges_.data();
  work.merge_count = static_cast<int>(merges_.size());
  work.partial_floats =
      attention_partial_floats(q_heads, layout.head_dim) * static_cast<size_t>(next_slot);
  return work;
}

}  // namespace hotbatch
