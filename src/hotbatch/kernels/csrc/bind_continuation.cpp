// Texts that are guessed from, and guesses from them, for Python.
#include <nanobind/nanobind.h>

#include <nanobind/stl/pair.h>

#include <algorithm>

#include "continuation/text.h"

namespace nb = nanobind;

namespace hotbatch {
namespace {

constexpr double kLeast = 0.005, kMost = 0.99;

int32_t token_at(PyObject* list, Py_ssize_t index) {
  const long token = PyLong_AsLong(PyList_GET_ITEM(list, index));
  if (token == -1 && PyErr_Occurred()) throw nb::python_error();
  return static_cast<int32_t>(token);
}

void extend(RecentText& text, nb::list token_ids, Py_ssize_t start, Py_ssize_t end) {
  PyObject* list = token_ids.ptr();
  const Py_ssize_t stop = std::min(end, PyList_GET_SIZE(list));
  for (Py_ssize_t index = start; index < stop; ++index) text.append(token_at(list, index));
}

// See `propose` in core/speculation/continuing.py.
nb::object propose(const RecentText& own, const RecentText* answers, nb::list tokens,
                   std::pair<int, int> levels, std::pair<int, int> cells, nb::list rates,
                   double factor, double least, int most, nb::handle ends) {
  int32_t context[kLengths[kLevels - 1]];
  const Py_ssize_t size = PyList_GET_SIZE(tokens.ptr());
  const int length = static_cast<int>(std::min<Py_ssize_t>(size, kLengths[kLevels - 1]));
  for (int index = 0; index < length; ++index)
    context[index] = token_at(tokens.ptr(), size - length + index);
  const int32_t* end = context + length;
  const int lowest = std::min(levels.first, levels.second);
  const TextMatch in_own = own.find(end, length, lowest);
  TextMatch in_answers;
  if (answers) in_answers = answers->find(end, length, lowest);
  const int level = std::max(in_own.level, in_answers.level);
  const TextMatch* match = nullptr;
  if (in_own.level >= 0 && in_own.level == level && level >= levels.first) {
    match = &in_own;
  } else if (in_answers.level >= 0 && in_answers.level >= levels.second) {
    match = &in_answers;
  } else if (in_own.level >= 0 && in_own.level >= levels.first) {
    match = &in_own;
  }
  if (!match) return nb::make_tuple(level, nb::none());
  const int first_cell = match == &in_own ? cells.first : cells.second;
  nb::list guessed, guessed_cells, reach;
  Continuation continuation(*match);
  NextToken next;
  double reached = 1.0;
  for (int count = 0; count < most && continuation.next(&next); ++count) {
    const int cell = first_cell + next.level * kAgreements + next.agreement;
    if (cell >= PyList_GET_SIZE(rates.ptr())) throw nb::index_error();
    const double rate = PyFloat_AsDouble(PyList_GET_ITEM(rates.ptr(), cell));
    const double chance = factor <= 1.0 ? rate * factor : 1.0 - (1.0 - rate) / factor;
    reached *= std::min(std::max(chance, kLeast), kMost);
    const nb::int_ token(next.token);
    guessed.append(token);
    guessed_cells.append(cell);
    reach.append(reached);
    if (reached < least || PySet_Contains(ends.ptr(), token.ptr()) == 1) break;
  }
  if (nb::len(guessed) == 0) return nb::make_tuple(level, nb::none());
  return nb::make_tuple(level, nb::make_tuple(guessed, guessed_cells, reach));
}

}  // namespace

void bind_continuation(nb::module_& m) {
  nb::class_<RecentText>(m, "RecentText")
      .def(nb::init<int64_t>(), nb::arg("generation"))
      .def("__len__", &RecentText::size)
      .def("extend", &extend, nb::arg("token_ids"), nb::arg("start"), nb::arg("end"))
      .def("break_off", &RecentText::break_off);
  m.def("propose", &propose, nb::arg("own"), nb::arg("answers").none(), nb::arg("tokens"),
        nb::arg("levels"), nb::arg("cells"), nb::arg("rates"), nb::arg("factor"),
        nb::arg("least"), nb::arg("most"), nb::arg("ends"));
}

}  // namespace hotbatch
