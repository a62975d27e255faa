// A pool for many tiny parallel loops in a row: one step of a model has some three hundred.
//
// The calling thread takes part. Every thread begins with a run of neighbouring pieces of its
// own, so that it reads memory in order and knows what it will read next; whoever is done takes
// pieces from the far end of another's run (work stealing, Blumofe and Leiserson 1999). A loop
// is over when all pieces are done, not when all threads have arrived: a thread whose core is
// busy with something else (an HTTP request, another process) simply does fewer. Between steps
// the workers sleep; within a step they spin, then yield.
//
// Two cores of a virtual machine may be as far apart as two chips: a cache line then takes some
// 300 nanoseconds from one to the other, and a loop as long as ten of them. So all that a worker
// needs in order to begin lies in the line that it waits for, and it tells the caller what it has
// done once, when it finds nothing more to do.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include <sched.h>

namespace hotbatch {

class ThreadPool {
 public:
  // `threads` counts the caller, so 1 means no workers.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return static_cast<int>(workers_.size()) + 1; }

  // Workers are awake between begin() and end(); calls nest no deeper than one.
  void begin();
  void end();

  // The first piece of a thread's own run.
  int first_piece(int pieces, int thread) const {
    return static_cast<int>(int64_t{pieces} * thread / size());
  }

  // Runs body(piece, thread) for every piece in [0, pieces); thread is in [0, size()).
  // Only valid between begin() and end(). `body` must not throw. Each thread gets a copy of it,
  // which should hold values and not refer to the caller's stack where that can be had.
  template <class Body>
  void parallel(int pieces, const Body& body) {
    if (pieces <= 0) return;
    if (pieces == 1 || workers_.empty()) {
      for (int piece = 0; piece < pieces; ++piece) body(piece, 0);
      return;
    }
    static_assert(std::is_trivially_copyable_v<Body> && sizeof(Body) <= sizeof(Task::body) &&
                  alignof(Body) <= alignof(void*));
    Task task;
    task.function = [](const void* context, int piece, int thread) {
      (*static_cast<const Body*>(context))(piece, thread);
    };
    std::memcpy(task.body, &body, sizeof(Body));
    run(pieces, task);
  }

  // Seconds until a loop of nothing has reached every thread and is over: how far apart their
  // cores are. 0 if some thread did not come, as its core is busy. The best of a few loops, so
  // some microseconds; workers must have had a loop since begin().
  double time_loop();

 private:
  struct Task {
    void (*function)(const void*, int, int);
    alignas(void*) unsigned char body[48];
  };
  void run(int pieces, const Task& task);
  void work(int thread);
  void spread();
  void unbind();
  void take_all(int thread);
  bool take_first(int thread, int* piece);
  bool take_last(int victim, int* piece);

  // What is left of a thread's run, with the loop it belongs to, in one word: a thread that
  // comes late can tell from it alone that nothing is left. The task is read only by holders of
  // a valid piece, during which the caller cannot move on.
  static constexpr int kBits = 20;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  struct alignas(64) Run {
    std::atomic<uint64_t> word{0};  // epoch, end, begin
    Task task;                      // the same for all
  };
  static_assert(sizeof(Run) == 64);
  struct alignas(64) Done {
    std::atomic<uint64_t> pieces{0};  // of all loops so far, written by its thread only
  };
  static uint64_t begin_of(uint64_t word) { return word & kMask; }
  static uint64_t end_of(uint64_t word) { return (word >> kBits) & kMask; }
  static uint64_t epoch_of(uint64_t word) { return word >> (2 * kBits); }

  std::unique_ptr<Run[]> runs_;  // [size()]
  std::unique_ptr<Done[]> done_;  // [size()]
  uint64_t epoch_ = 0;
  uint64_t all_pieces_ = 0;  // of all loops so far

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> awake_{false};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
#if defined(__linux__)
  cpu_set_t cpus_ = {};          // that this process may use
  bool needs_all_cpus_ = false;  // there is one for each thread
  int caller_cpu_ = -1;          // that workers keep off
  cpu_set_t caller_cpus_ = {};   // that the caller may use between steps
  bool is_caller_bound_ = false;
#endif
};

// Keeps a pool's workers awake for a scope.
class Awake {
 public:
  explicit Awake(ThreadPool& pool) : pool_(pool) { pool_.begin(); }
  ~Awake() { pool_.end(); }
  Awake(const Awake&) = delete;
  Awake& operator=(const Awake&) = delete;

 private:
  ThreadPool& pool_;
};

}  // namespace hotbatch
