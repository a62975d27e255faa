// Arrays as Python hands them over, and how the arrays of a sampling call become SampleArgs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <vector>

#include "sampling/args.h"

namespace hotbatch {

namespace nb = nanobind;

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using MutableVector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using MutableMatrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

inline void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

// The inputs of sampling `rows` rows; logits, outputs and scratch are left to the caller.
//
// floats [6, rows]: temperature, top_p, min_p, repetition, presence and frequency penalty.
// ints [5, rows]: top_k, position, number of logprobs, target, prompt length.
// lists: starts [rows + 1] (or empty: no row has any) and ids of biases, bans and histories.
// Throws std::invalid_argument where shapes do not fit. The arrays must outlive the result.
inline SampleArgs sample_inputs(size_t rows, const Matrix<float>& floats,
                                const Matrix<int32_t>& ints, const Vector<uint64_t>& seeds,
                                const std::vector<Vector<int32_t>>& lists,
                                const float* bias_values, size_t bias_count) {
  require(floats.shape(0) == 6 && floats.shape(1) == rows, "floats must be [6, rows]");
  require(ints.shape(0) == 5 && ints.shape(1) == rows, "ints must be [5, rows]");
  require(seeds.shape(0) == rows, "one seed a row");
  require(lists.size() == 6, "lists must hold starts and ids of biases, bans and histories");
  for (size_t list = 0; list < 6; list += 2) {
    const auto& starts = lists[list];
    require(starts.shape(0) == 0 || starts.shape(0) == rows + 1, "list starts must be [rows + 1]");
    if (starts.shape(0) == 0) continue;
    const auto end = static_cast<size_t>(starts.data()[rows]);
    require(end <= lists[list + 1].shape(0), "a list is too short");
    require(list > 0 || end <= bias_count, "there are fewer bias values than ids");
  }
  SampleArgs args;
  args.rows = static_cast<int>(rows);
  const float* f = floats.data();
  args.temperature = f;
  args.top_p = f + rows;
  args.min_p = f + 2 * rows;
  args.repetition_penalty = f + 3 * rows;
  args.presence_penalty = f + 4 * rows;
  args.frequency_penalty = f + 5 * rows;
  const int32_t* i = ints.data();
  args.top_k = i;
  args.position = i + rows;
  args.num_logprobs = i + 2 * rows;
  args.target = i + 3 * rows;
  args.num_prompt = i + 4 * rows;
  args.seed = seeds.data();
  const auto starts = [&](size_t list) {
    return lists[list].shape(0) ? lists[list].data() : nullptr;
  };
  args.bias_starts = starts(0);
  args.bias_ids = lists[1].data();
  args.bias_values = bias_values;
  args.banned_starts = starts(2);
  args.banned_ids = lists[3].data();
  args.history_starts = starts(4);
  args.history = lists[5].data();
  return args;
}

}  // namespace hotbatch
