// Single operations over numpy arrays, for tests and benchmarks: the instruction set, the number
// of threads and the cache are arguments, where Program keeps its own.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention/plan.h"
#include "csrc/arrays.h"
#include "csrc/kernel_table.h"
#include "csrc/memory.h"
#include "csrc/thread_pool.h"

namespace hotbatch {

// A cache layout from what Python calls it by. Throws std::invalid_argument, which names what
// is out of range.
KvLayout layout_of(const std::string& dtype, int kv_heads, int head_dim, int block_size) {
  KvLayout layout;
  if (dtype == "f32") {
    layout.dtype = KvDtype::f32;
  } else if (dtype == "bf16") {
    layout.dtype = KvDtype::bf16;
  } else if (dtype == "int8") {
    layout.dtype = KvDtype::int8;
  } else {
    throw std::invalid_argument("no such cache dtype: " + dtype);
  }
  require(kv_heads > 0, "kv_heads must be positive");
  require(head_dim > 0 && head_dim <= 256 && head_dim % 16 == 0,
          "head_dim must be a multiple of 16 up to 256");
  require(block_size > 0 && block_size % 16 == 0, "block_size must be a multiple of 16");
  layout.kv_heads = kv_heads;
  layout.head_dim = head_dim;
  layout.block_size = block_size;
  return layout;
}

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

const KernelTable& table_of(const std::string& isa) {
  const KernelTable* table = kernel_table(isa.c_str());
  if (!table) throw std::invalid_argument("this machine cannot run instruction set " + isa);
  return *table;
}

// An array that Python owns from here on.
template <class T>
struct NewArray {
  NewArray(size_t rows, size_t cols) : rows(rows), cols(cols), data(new T[rows * cols]()) {}
  nb::object to_python() {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(raw, {rows, cols}, owner));
  }
  size_t rows, cols;
  std::unique_ptr<T[]> data;
};

// Runs body(piece, thread) on a pool of its own.
template <class Body>
void on_pool(int threads, int pieces, const Body& body) {
  require(threads >= 1, "threads must be at least 1");
  ThreadPool pool(threads);
  pool.begin();
  pool.parallel(pieces, body);
  pool.end();
}

nb::object rotary_store(const std::string& isa, int threads, const KvLayout& layout, int q_heads,
                        Matrix<float> qkv, Vector<int32_t> positions, Vector<int32_t> slots,
                        Matrix<float> cos, Matrix<float> sin, Bytes kv,
                        std::optional<Vector<float>> q_norm, std::optional<Vector<float>> k_norm,
                        float eps) {
  const KernelTable& table = table_of(isa);
  const size_t rows = qkv.shape(0), dim = static_cast<size_t>(layout.head_dim);
  require(qkv.shape(1) == dim * static_cast<size_t>(q_heads + 2 * layout.kv_heads),
          "qkv must have (q_heads + 2 * kv_heads) * head_dim columns");
  require(positions.shape(0) == rows && slots.shape(0) == rows, "one position and slot a row");
  require(2 * cos.shape(1) <= dim && sin.shape(1) == cos.shape(1) && sin.shape(0) == cos.shape(0),
          "cos and sin must be [positions, rotary_dim / 2]");
  require(!q_norm || q_norm->shape(0) == dim, "q_norm must have head_dim entries");
  require(!k_norm || k_norm->shape(0) == dim, "k_norm must have head_dim entries");
  for (size_t row = 0; row < rows; ++row) {
    require(positions.data()[row] >= 0 &&
                static_cast<size_t>(positions.data()[row]) < cos.shape(0),
            "a position is outside the tables");
    require(slots.data()[row] >= 0 &&
                static_cast<size_t>(slots.data()[row] / layout.block_size + 1) *
                        kv_block_bytes(layout) <= kv.shape(0),
            "a slot is outside the cache");
  }
  Batch batch;
  batch.rows = static_cast<int>(rows);
  batch.positions = positions.data();
  batch.slots = slots.data();
  NewArray<uint8_t> q(rows, query_row_bytes(layout, q_heads));
  RotaryArgs args;
  args.batch = &batch;
  args.qkv = qkv.data();
  args.q_heads = q_heads;
  args.layout = layout;
  args.q_norm = q_norm ? q_norm->data() : nullptr;
  args.k_norm = k_norm ? k_norm->data() : nullptr;
  args.eps = eps;
  args.cos = cos.data();
  args.sin = sin.data();
  args.rotary_dim = static_cast<int>(2 * cos.shape(1));
  args.q_out = q.data.get();
  args.kv = kv.data();
  {
    nb::gil_scoped_release release;
    on_pool(threads, batch.rows, [&](int row, int) { table.rotary_store_row(args, row); });
  }
  return q.to_python();
}

// A step's batch and work list, as attention needs them.
class AttentionStep {
 public:
  AttentionStep(const KvLayout& layout, int q_heads, int window, int plan_threads,
                Vector<int32_t> positions, Vector<int32_t> seq_starts, Matrix<int32_t> block_table,
                bool stays)
      : layout_(layout), q_heads_(q_heads), window_(window), positions_(positions),
        seq_starts_(seq_starts), block_table_(block_table) {
    require(q_heads > 0 && q_heads % layout.kv_heads == 0, "kv_heads must divide q_heads");
    require(q_heads / layout.kv_heads <= kTileQueries, "too many query heads a kv head");
    require(seq_starts.shape(0) == block_table.shape(0) + 1, "seq_starts and block_table differ");
    batch_.rows = static_cast<int>(positions.shape(0));
    batch_.sequences = static_cast<int>(block_table.shape(0));
    batch_.positions = positions_.data();
    batch_.seq_starts = seq_starts_.data();
    batch_.block_table = block_table_.data();
    batch_.max_blocks = static_cast<int>(block_table.shape(1));
    require(batch_.seq_starts[batch_.sequences] == batch_.rows, "seq_starts do not cover the rows");
    for (int row = 0; row < batch_.rows; ++row)
      require(batch_.positions[row] < batch_.max_blocks * layout.block_size,
              "a position is outside its block table");
    work_ = planner_.plan(batch_, layout_, q_heads_, window_, plan_threads, stays);
  }

  // With `layers`, kv holds as many caches one after another, and repeats go through them, so
  // that a benchmark meets keys as cold as a model does.
  nb::object run(const std::string& isa, int threads, Matrix<uint8_t> q, Bytes kv, float scale,
                 int repeats, int layers) const {
    const KernelTable& table = table_of(isa);
    require(layers >= 1 && kv.shape(0) % static_cast<size_t>(layers) == 0,
            "kv must divide into the layers");
    const size_t layer_bytes = kv.shape(0) / static_cast<size_t>(layers);
    require(q.shape(0) == static_cast<size_t>(batch_.rows) &&
                q.shape(1) == query_row_bytes(layout_, q_heads_),
            "q must be what rotary_store returned");
    const int32_t* ids = batch_.block_table;
    const size_t blocks = layer_bytes / kv_block_bytes(layout_);
    for (int i = 0; i < batch_.sequences * batch_.max_blocks; ++i)
      require(ids[i] >= 0 && static_cast<size_t>(ids[i]) < blocks, "a block id is outside the cache");
    NewArray<float> out(q.shape(0), static_cast<size_t>(q_heads_ * layout_.head_dim));
    Arena arena;
    AttentionArgs args;
    args.batch = &batch_;
    args.work = &work_;
    args.layout = layout_;
    args.q_heads = q_heads_;
    args.window = window_;
    args.scale = scale;
    args.q = q.data();
    args.out = out.data.get();
    args.partials = arena.take_array<float>(work_.partial_floats + 16);
    args.scratch_stride = (attention_scratch_bytes(layout_, q_heads_) + 63) / 64 * 64;
    args.scratch = arena.take(args.scratch_stride * static_cast<size_t>(threads));
    {
      nb::gil_scoped_release release;
      require(threads >= 1, "threads must be at least 1");
      ThreadPool pool(threads);
      pool.begin();
      for (int i = 0; i < repeats; ++i) {
        args.kv = kv.data() + layer_bytes * static_cast<size_t>(i % layers);
        pool.parallel(work_.item_count,
                      [&](int item, int thread) { table.attention_item(args, item, thread); });
        pool.parallel(work_.merge_count, [&](int merge, int) { table.attention_merge(args, merge); });
      }
      pool.end();
    }
    return out.to_python();
  }

  // Per item: rows, first and last chunk, first and last kv head.
  std::vector<std::tuple<std::vector<int>, int, int, int, int>> items() const {
    std::vector<std::tuple<std::vector<int>, int, int, int, int>> all;
    for (int i = 0; i < work_.item_count; ++i) {
      const AttentionItem& item = work_.items[i];
      std::vector<int> rows;
      for (int r = 0; r < item.rows_count; ++r) rows.push_back(work_.rows[item.rows_begin + r].row);
      all.emplace_back(rows, item.chunk_begin, item.chunk_end, item.head_begin, item.head_end);
    }
    return all;
  }
  int merges() const { return work_.merge_count; }

 private:
  KvLayout layout_;
  int q_heads_, window_;
  Vector<int32_t> positions_, seq_starts_;
  Matrix<int32_t> block_table_;
  Batch batch_;
  AttentionPlanner planner_;
  AttentionWork work_;
};

// token, error, rank [S]; logprob [S]; top ids and top log-probabilities [S, kMaxLogprobs].
nb::tuple sample(const std::string& isa, int threads, Matrix<float> logits, Matrix<float> floats,
                 Matrix<int32_t> ints, Vector<uint64_t> seeds,
                 const std::vector<Vector<int32_t>>& lists, Vector<float> bias_values) {
  const KernelTable& table = table_of(isa);
  const size_t rows = logits.shape(0);
  SampleArgs args =
      sample_inputs(rows, floats, ints, seeds, lists, bias_values.data(), bias_values.shape(0));
  args.logits = logits.data();
  args.vocab = static_cast<int>(logits.shape(1));
  args.stride = args.vocab;
  NewArray<int32_t> chosen(3, rows), top_ids(rows, kMaxLogprobs);
  NewArray<float> logprob(1, rows), top_logprobs(rows, kMaxLogprobs);
  args.token = chosen.data.get();
  args.error = chosen.data.get() + rows;
  args.rank = chosen.data.get() + 2 * rows;
  args.logprob = logprob.data.get();
  args.top_ids = top_ids.data.get();
  args.top_logprobs = top_logprobs.data.get();
  Arena arena;
  args.scratch_stride = (sample_scratch_bytes(args.vocab) + 63) / 64 * 64;
  args.scratch = arena.take(args.scratch_stride * static_cast<size_t>(threads));
  {
    nb::gil_scoped_release release;
    on_pool(threads, args.rows, [&](int row, int thread) { table.sample_row(args, row, thread); });
  }
  return nb::make_tuple(chosen.to_python(), logprob.to_python(), top_ids.to_python(),
                        top_logprobs.to_python());
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.attr("KEY_CHUNK") = kKeyChunk;
  nb::class_<KvLayout>(m, "KvLayout", "Format of the paged cache: dtype f32, bf16 or int8.")
      .def("__init__",
           [](KvLayout* self, const std::string& dtype, int kv_heads, int head_dim, int block_size) {
             new (self) KvLayout(layout_of(dtype, kv_heads, head_dim, block_size));
           },
           nb::arg("dtype"), nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("block_size") = 16)
      .def_prop_ro("block_bytes", [](const KvLayout& self) { return kv_block_bytes(self); },
                   "Bytes of one block in one layer.");
  m.def("rotary_store", &rotary_store, nb::arg("isa"), nb::arg("threads"), nb::arg("layout"),
        nb::arg("q_heads"), nb::arg("qkv"), nb::arg("positions"), nb::arg("slots"), nb::arg("cos"),
        nb::arg("sin"), nb::arg("kv"), nb::arg("q_norm").none() = nb::none(),
        nb::arg("k_norm").none() = nb::none(), nb::arg("eps") = 1e-6f,
        "Rotates q and k of qkv [N, ...], writes k and v into the cache `kv` (bytes), returns q "
        "[N, bytes] as AttentionStep.run takes it.");
  nb::class_<AttentionStep>(m, "AttentionStep", "The attention of one step, planned once.")
      .def(nb::init<const KvLayout&, int, int, int, Vector<int32_t>, Vector<int32_t>, Matrix<int32_t>,
                    bool>(),
           nb::arg("layout"), nb::arg("q_heads"), nb::arg("window"), nb::arg("plan_threads"),
           nb::arg("positions"), nb::arg("seq_starts"), nb::arg("block_table"),
           nb::arg("stays") = false)
      .def("run", &AttentionStep::run, nb::arg("isa"), nb::arg("threads"), nb::arg("q"),
           nb::arg("kv"), nb::arg("scale"), nb::arg("repeats") = 1,
           nb::arg("layers") = 1, "Returns f32 [N, q_heads * head_dim].")
      .def_prop_ro("items", &AttentionStep::items,
                   "Per item: rows, first and end chunk, first and end kv head.")
      .def_prop_ro("merges", &AttentionStep::merges, "Rows that meet keys in several items.");
  m.def("sample", &sample, nb::arg("isa"), nb::arg("threads"), nb::arg("logits"), nb::arg("floats"),
        nb::arg("ints"), nb::arg("seeds"), nb::arg("lists"), nb::arg("bias_values"),
        "Samples rows of logits [S, V]; floats, ints, seeds and lists as in SampleBatch. Returns i32 "
        "[3, S] (token, error, rank), f32 [1, S] (log-probability), and the top ids and "
        "log-probabilities [S, MAX_LOGPROBS].");
}

}  // namespace hotbatch
