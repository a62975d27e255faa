// Python's view of the native kernels. Arrays come as numpy; the interpreter lock is released
// while a step runs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "csrc/arrays.h"
#include "csrc/program.h"

namespace hotbatch {

void bind_kernels(nb::module_& m);
void bind_ceiling(nb::module_& m);
void bind_continuation(nb::module_& m);
KvLayout layout_of(const std::string& dtype, int kv_heads, int head_dim, int block_size);

namespace {

RawType raw_type(const std::string& name) {
  if (name == "F32") return RawType::kF32;
  if (name == "F16") return RawType::kF16;
  if (name == "BF16") return RawType::kBF16;
  if (name == "Q8_0") return RawType::kQ8_0;
  if (name == "Q4_0") return RawType::kQ4_0;
  if (name == "Q4_1") return RawType::kQ4_1;
  throw std::invalid_argument("no native decoding of " + name);
}

Precision precision_of(const std::string& name) {
  if (name == "f32") return Precision::kF32;
  if (name == "bf16") return Precision::kBf16;
  if (name == "int8") return Precision::kInt8;
  if (name == "int4") return Precision::kInt4;
  throw std::invalid_argument("no such precision: " + name);
}

// Rows to sample, as Python packs them: one array a type, so that a step crosses the border
// between the languages few times. Holds references to its arrays.
struct SampleBatch {
  SampleArgs args;
  Matrix<float> floats;
  Matrix<int32_t> ints;
  Vector<uint64_t> seeds;
  std::vector<Vector<int32_t>> lists;  // bias, banned, history: starts and ids
  std::optional<Vector<float>> bias_values;
  MutableMatrix<int32_t> out_ints;
  MutableMatrix<float> out_floats;

  SampleBatch(Matrix<float> floats_in, Matrix<int32_t> ints_in, Vector<uint64_t> seeds_in,
              std::vector<Vector<int32_t>> lists_in, std::optional<Vector<float>> bias_values_in,
              MutableMatrix<int32_t> out_ints_in, MutableMatrix<float> out_floats_in)
      : floats(floats_in), ints(ints_in), seeds(seeds_in), lists(std::move(lists_in)),
        bias_values(bias_values_in), out_ints(out_ints_in), out_floats(out_floats_in) {
    const size_t rows = seeds.shape(0);
    require(out_ints.shape(0) == 3 + kMaxLogprobs && out_ints.shape(1) == rows &&
                out_floats.shape(0) == 1 + kMaxLogprobs && out_floats.shape(1) == rows,
            "the outputs of a SampleBatch have wrong shapes");
    args = sample_inputs(rows, floats, ints, seeds, lists,
                         bias_values ? bias_values->data() : nullptr,
                         bias_values ? bias_values->shape(0) : 0);
    int32_t* oi = out_ints.data();
    args.token = oi;
    args.rank = oi + rows;
    args.error = oi + 2 * rows;
    args.top_ids = oi + 3 * rows;  // [rows][kMaxLogprobs]
    args.logprob = out_floats.data();
    args.top_logprobs = out_floats.data() + rows;
  }
};

// A tensor of a model file: (type, bytes [rows, bytes a row], columns).
using RawTuple = std::tuple<std::string, Matrix<uint8_t>, int>;

RawRows raw_rows(const RawTuple& tuple) {
  const auto& [type, bytes, cols] = tuple;
  RawRows rows{raw_type(type), bytes.data(), static_cast<int>(bytes.shape(0)), cols};
  if (rows.row_bytes() != static_cast<int64_t>(bytes.shape(1)))
    throw std::invalid_argument("rows of " + type + " do not have " + std::to_string(cols) +
                                " columns");
  return rows;
}

std::vector<RawRows> stacked(const std::vector<RawTuple>& parts) {
  std::vector<RawRows> rows;
  for (const RawTuple& part : parts) rows.push_back(raw_rows(part));
  return rows;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Native CPU kernels of hotbatch.";
  m.def("best_isa", [] { return std::string(best_isa()); },
        "The fastest instruction set that this machine can run.");
  m.def("has_isa", [](const std::string& name) { return kernel_table(name.c_str()) != nullptr; });

  m.attr("MAX_LOGPROBS") = kMaxLogprobs;
  m.attr("INT8_GROUP") = kGroupInt8;

  nb::class_<SampleBatch>(m, "SampleBatch", R"(Rows to sample in a step, S of them.

floats f32 [6, S]: temperature, top_p, min_p, repetition, presence and frequency penalty.
ints i32 [5, S]: top_k, position, number of logprobs (-1: none), target (-1: sample), prompt length.
seeds u64 [S]. lists: starts [S + 1] (or empty: no row has any) and ids of logit biases, banned
tokens and histories, i32. out_ints i32 [3 + MAX_LOGPROBS, S] receives token, rank, error, and
then, from row 3 on in C order, top ids [S, MAX_LOGPROBS]; out_floats f32 [1 + MAX_LOGPROBS, S]
likewise the log-probability and the top log-probabilities.)")
      .def(nb::init<Matrix<float>, Matrix<int32_t>, Vector<uint64_t>,
                    std::vector<Vector<int32_t>>, std::optional<Vector<float>>,
                    MutableMatrix<int32_t>, MutableMatrix<float>>(),
           nb::arg("floats"), nb::arg("ints"), nb::arg("seeds"), nb::arg("lists"),
           nb::arg("bias_values").none(), nb::arg("out_ints"), nb::arg("out_floats"));

  nb::class_<Program>(m, "Program", "A forward pass, recorded once and run every step.")
      .def("__init__",
           [](Program* self, int max_rows, int max_logit_rows, int threads, const std::string& isa) {
             new (self) Program({max_rows, max_logit_rows, threads}, isa.c_str());
           },
           nb::arg("max_rows"), nb::arg("max_logit_rows"), nb::arg("threads"), nb::arg("isa"))
      .def("add_weight",
           [](Program& self, const std::string& precision, const std::vector<RawTuple>& parts,
              std::optional<Vector<float>> bias, bool gated,
              std::optional<Vector<float>> column_scales) {
             const std::vector<RawRows> rows = stacked(parts);
             require(!column_scales || (!rows.empty() && static_cast<int>(column_scales->shape(0)) ==
                                                             rows[0].cols),
                     "one scale a column");
             nb::gil_scoped_release release;
             return self.add_weight(precision_of(precision), rows, bias ? bias->data() : nullptr,
                                    gated, column_scales ? column_scales->data() : nullptr);
           },
           nb::arg("precision"), nb::arg("parts"), nb::arg("bias").none(), nb::arg("gated") = false,
           nb::arg("column_scales").none() = nb::none())
      .def("add_vector",
           [](Program& self, Vector<float> values) {
             return self.add_vector(values.data(), static_cast<int>(values.shape(0)));
           })
      .def("add_table",
           [](Program& self, const RawTuple& table) { return self.add_table(raw_rows(table)); },
           nb::keep_alive<1, 2>(),
           "The caller keeps the bytes alive as long as the program.")
      .def("set_rotary",
           [](Program& self, Matrix<float> cosines, Matrix<float> sines) {
             self.set_rotary(cosines.data(), sines.data(), static_cast<int>(cosines.shape(0)),
                             static_cast<int>(cosines.shape(1)));
           },
           "Tables [positions, head_dim / 2].")
      .def("set_cache",
           [](Program& self, const std::string& dtype, int block_size, int kv_heads, int head_dim,
              int layers, int blocks) {
             self.set_cache(layout_of(dtype, kv_heads, head_dim, block_size), layers,
                            blocks);
           },
           nb::arg("dtype"), nb::arg("block_size"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("layers"), nb::arg("blocks"))
      .def("embed", &Program::embed)
      .def(
          "norm",
          [](Program& self, int input, int vector, float eps, const std::string& format,
             bool row_scale) {
            return self.norm(input, vector, eps, precision_of(format), row_scale);
          },
          nb::arg("input"), nb::arg("vector"), nb::arg("eps"), nb::arg("format"),
          nb::arg("row_scale") = false)
      .def(
          "convert",
          [](Program& self, int input, const std::string& format, bool row_scale) {
            return self.convert(input, precision_of(format), row_scale);
          },
          nb::arg("input"), nb::arg("format"), nb::arg("row_scale") = false)
      .def("silu_mul", [](Program& self, int input, const std::string& format) {
        return self.silu_mul(input, precision_of(format));
      })
      .def("linear", &Program::linear)
      .def("gated_linear",
           [](Program& self, int activation, int weight, const std::string& format) {
             return self.gated_linear(activation, weight, precision_of(format));
           })
      .def("rotary", &Program::rotary)
      .def("attention", &Program::attention)
      .def("select", &Program::select)
      .def("release", &Program::release, "Nothing later reads this buffer.")
      .def("finish", &Program::finish)
      .def("set_trial",
           [](Program& self, Vector<int32_t> tokens) {
             self.set_trial(tokens.data(), static_cast<int>(tokens.shape(0)));
           },
           "One prompt that goes through what is recorded from here on.")
      .def("try_norm",
           [](Program& self, int input, Vector<float> weight, float eps, MutableMatrix<float> out) {
             const int width = self.width(input);
             require(static_cast<int>(weight.shape(0)) == width &&
                         static_cast<int>(out.shape(0)) == self.trial_rows() &&
                         static_cast<int>(out.shape(1)) == width,
                     "the arrays of try_norm have wrong shapes");
             nb::gil_scoped_release release;
             self.try_norm(input, weight.data(), eps, out.data());
           },
           "`out`, f32 [tokens, K], receives what a norm of this buffer gives for the tokens tried.")
      .def("column_squares",
           [](Program& self, const std::vector<RawTuple>& parts, MutableVector<float> out) {
             const std::vector<RawRows> rows = stacked(parts);
             require(!rows.empty() && static_cast<int>(out.shape(0)) == rows[0].cols,
                     "one number a column");
             nb::gil_scoped_release release;
             self.column_squares(rows, out.data());
           },
           "`out`, f32 [K], receives the mean square of each input column of stacked tensors; of "
           "many rows, of a thousand spread evenly.")
      .def("width", &Program::width, "Numbers in a row of this buffer.")
      .def("copy_blocks",
           [](Program& self, Matrix<int32_t> pairs) {
             nb::gil_scoped_release release;
             self.copy_blocks(pairs.data(), static_cast<int>(pairs.shape(0)));
           })
      .def("prefault_cache", &Program::prefault_cache)
      .def("wait_for_cache", &Program::wait_for_cache, nb::call_guard<nb::gil_scoped_release>(),
           "Whether all of it is present, after so many seconds at most.")
      .def("run",
           [](Program& self, Vector<int32_t> token_ids, Vector<int32_t> positions,
              Vector<int32_t> slots, Vector<int32_t> seq_starts, Vector<int32_t> context_lens,
              Matrix<int32_t> block_table, Vector<int32_t> logit_rows, SampleBatch* sampling,
              std::optional<MutableMatrix<float>> logits) {
             Batch batch;
             batch.rows = static_cast<int>(token_ids.shape(0));
             batch.sequences = static_cast<int>(context_lens.shape(0));
             batch.token_ids = token_ids.data();
             batch.positions = positions.data();
             batch.slots = slots.data();
             batch.seq_starts = seq_starts.data();
             batch.context_lens = context_lens.data();
             batch.block_table = block_table.data();
             batch.max_blocks = static_cast<int>(block_table.shape(1));
             batch.logit_rows = logit_rows.data();
             batch.logit_count = static_cast<int>(logit_rows.shape(0));
             nb::gil_scoped_release release;
             self.run(batch, sampling ? &sampling->args : nullptr,
                      logits ? logits->data() : nullptr);
           },
           nb::arg("token_ids"), nb::arg("positions"), nb::arg("slots"), nb::arg("seq_starts"),
           nb::arg("context_lens"), nb::arg("block_table"), nb::arg("logit_rows"),
           nb::arg("sampling").none(), nb::arg("logits").none(),
           "One step. `logits`, if given, is f32 [S, vocabulary] and receives the raw logits.")
      .def("set_profiling", &Program::set_profiling)
      .def("profile",
           [](const Program& self) {
             std::vector<std::tuple<std::string, double, int64_t>> rows;
             for (const auto& op : self.profile()) rows.emplace_back(op.name, op.seconds, op.calls);
             return rows;
           },
           "Seconds and calls by kind of operation since profiling was switched on.")
      .def_prop_ro("vocabulary", &Program::vocabulary)
      .def_prop_ro("threads", &Program::threads)
      .def("note_loop", &Program::note_loop, "How long a loop of nothing took; steps look themselves.")
      .def("shares_rows", &Program::shares_rows,
           "Whether each thread takes some of so many rows, rather than some columns of all.")
      .def_prop_ro("isa", [](const Program& self) { return std::string(self.isa()); })
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("cache_bytes", &Program::cache_bytes);

  bind_kernels(m);
  bind_ceiling(m);
  bind_continuation(m);
}

}  // namespace hotbatch
