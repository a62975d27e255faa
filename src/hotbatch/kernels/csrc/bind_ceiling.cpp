// Measuring the machine's ceiling from Python: compute and memory bandwidth, by threads.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "csrc/kernel_table.h"
#include "csrc/memory.h"
#include "csrc/thread_pool.h"

namespace nb = nanobind;

namespace hotbatch {
namespace {

double now_seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

const KernelTable& table_of(const std::string& isa) {
  const KernelTable* table = kernel_table(isa.c_str());
  if (!table) throw std::invalid_argument("this machine cannot run " + isa);
  return *table;
}

// Best seconds of `repeats` runs of body(piece) over all pieces.
template <class Body>
double best_seconds(int threads, int pieces, int repeats, const Body& body) {
  ThreadPool pool(threads);
  std::atomic<int64_t> sink{0};
  double best = 1e30;
  const Awake awake(pool);
  for (int repeat = 0; repeat <= repeats; ++repeat) {
    const double start = now_seconds();
    pool.parallel(pieces, [&](int piece, int) { sink += static_cast<int64_t>(body(piece)); });
    const double seconds = now_seconds() - start;
    if (repeat > 0) best = std::min(best, seconds);  // the first run warms up
  }
  return best;
}

double measure_compute(const std::string& precision, int threads, const std::string& isa,
                       int repeats) {
  const KernelTable& table = table_of(isa);
  CeilingKind kind = CeilingKind::kInt8;
  if (precision == "bf16") {
    kind = CeilingKind::kBf16;
  } else if (precision == "f32") {
    kind = CeilingKind::kF32;
  } else if (precision != "int8") {
    throw std::invalid_argument("no such precision: " + precision);
  }
  const int pieces = 16 * threads, rounds = 500;
  const double seconds = best_seconds(threads, pieces, repeats, [&](int) {
    return table.ceiling_compute(kind, rounds);
  });
  return 2.0 * static_cast<double>(table.ceiling_round_products(kind)) * rounds * pieces / seconds;
}

double measure_read_bandwidth(int megabytes, int threads, const std::string& isa, int repeats) {
  const KernelTable& table = table_of(isa);
  if (megabytes < 1 || megabytes > 4096)
    throw std::invalid_argument("megabytes must be between 1 and 4096");
  Arena arena;
  const size_t piece_bytes = size_t{256} << 10;
  const int pieces = megabytes * 4;
  const size_t bytes = piece_bytes * static_cast<size_t>(pieces);
  uint8_t* data = arena.take(bytes + 8192);  // prefetches run past the end
  std::memset(data, 1, bytes + 8192);
  const double seconds = best_seconds(threads, pieces, repeats, [&](int piece) {
    return table.ceiling_read({data + piece_bytes * static_cast<size_t>(piece), piece_bytes});
  });
  return static_cast<double>(bytes) / seconds;
}

double measure_loop(int threads, int repeats) {
  if (repeats < 1) throw std::invalid_argument("repeats must be at least 1");
  ThreadPool pool(threads);
  const Awake awake(pool);
  for (int i = 0; i < 100; ++i) pool.time_loop();  // the workers wake up
  double sum = 0.0;
  for (int count = 0; count < repeats;) {
    const double seconds = pool.time_loop();
    if (seconds > 0.0) {
      sum += seconds;
      ++count;
    } else {
      std::this_thread::yield();  // a worker's core is busy
    }
  }
  return sum / repeats;
}

}  // namespace

void bind_ceiling(nb::module_& m) {
  m.def("measure_compute", &measure_compute, nb::arg("precision"), nb::arg("threads"),
        nb::arg("isa"), nb::arg("repeats") = 5, nb::call_guard<nb::gil_scoped_release>(),
        "Operations per second (a multiply-add is two) at int8, bf16 or f32, best of `repeats`.");
  m.def("measure_read_bandwidth", &measure_read_bandwidth, nb::arg("megabytes"),
        nb::arg("threads"), nb::arg("isa"), nb::arg("repeats") = 5,
        nb::call_guard<nb::gil_scoped_release>(),
        "Bytes per second read from an array of `megabytes`, best of `repeats`.");
  m.def("measure_loop", &measure_loop, nb::arg("threads"), nb::arg("repeats") = 5000,
        nb::call_guard<nb::gil_scoped_release>(),
        "Seconds from handing a loop to all threads until each has done a piece of nothing: the mean "
        "of the best of every four.");
}

}  // namespace hotbatch
