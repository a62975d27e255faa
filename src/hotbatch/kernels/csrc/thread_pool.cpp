#include "csrc/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hotbatch {
namespace {

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins a while (some tens of microseconds), then lets others have the core.
class Patience {
 public:
  void wait() {
    if (++spins_ < 1000) {
      relax();
    } else {
      sched_yield();
    }
  }

 private:
  int spins_ = 0;
};

}  // namespace

ThreadPool::ThreadPool(int threads)
    : runs_(new Run[static_cast<size_t>(threads > 1 ? threads : 1)]),
      done_(new Done[static_cast<size_t>(threads > 1 ? threads : 1)]) {
#if defined(__linux__)
  needs_all_cpus_ = sched_getaffinity(0, sizeof(cpus_), &cpus_) == 0 && threads > 1 &&
                    CPU_COUNT(&cpus_) == threads;
#endif
  for (int thread = 1; thread < threads; ++thread)
    workers_.emplace_back([this, thread] { work(thread); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_.store(true, std::memory_order_release);
    awake_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// Where there is a core for each thread and no more, nobody of a step moves: the caller stays
// where it is, and workers keep off its core. They are woken while the others may be busy for a
// moment, with the tokens of the last step, and Linux would rather put a worker behind the caller,
// and leave it there for the whole step.
void ThreadPool::spread() {
#if defined(__linux__)
  if (!needs_all_cpus_) return;
  const int cpu = sched_getcpu();
  if (cpu < 0 || !CPU_ISSET(static_cast<size_t>(cpu), &cpus_)) return;
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(static_cast<size_t>(cpu), &own);
  is_caller_bound_ = sched_getaffinity(0, sizeof(caller_cpus_), &caller_cpus_) == 0 &&
                     sched_setaffinity(0, sizeof(own), &own) == 0;
  if (cpu == caller_cpu_) return;
  caller_cpu_ = cpu;
  cpu_set_t others = cpus_;
  CPU_CLR(static_cast<size_t>(cpu), &others);
  for (auto& worker : workers_)
    pthread_setaffinity_np(worker.native_handle(), sizeof(others), &others);
#endif
}

// What the caller starts between steps may run anywhere again.
void ThreadPool::unbind() {
#if defined(__linux__)
  if (is_caller_bound_) sched_setaffinity(0, sizeof(caller_cpus_), &caller_cpus_);
  is_caller_bound_ = false;
#endif
}

void ThreadPool::begin() {
  if (workers_.empty()) return;
  spread();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
}

void ThreadPool::end() {
  if (workers_.empty()) return;
  unbind();
  std::lock_guard<std::mutex> lock(mutex_);
  awake_.store(false, std::memory_order_release);
}

bool ThreadPool::take_first(int thread, int* piece) {
  std::atomic<uint64_t>& word = runs_[static_cast<size_t>(thread)].word;
  uint64_t seen = word.load(std::memory_order_acquire);
  while (begin_of(seen) < end_of(seen)) {
    if (!word.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
    *piece = static_cast<int>(begin_of(seen));
    return true;
  }
  return false;
}

bool ThreadPool::take_last(int victim, int* piece) {
  std::atomic<uint64_t>& word = runs_[static_cast<size_t>(victim)].word;
  uint64_t seen = word.load(std::memory_order_acquire);
  while (begin_of(seen) < end_of(seen)) {
    if (!word.compare_exchange_weak(seen, seen - (kMask + 1), std::memory_order_acq_rel)) continue;
    *piece = static_cast<int>(end_of(seen)) - 1;
    return true;
  }
  return false;
}

// Does this thread's run, then what it finds of others', and then says how much that was.
void ThreadPool::take_all(int thread) {
  int piece = 0;
  uint64_t done = 0;
  const auto finish = [&](const Task& task) {
    task.function(task.body, piece, thread);
    ++done;
  };
  const auto run = [&](int of) -> const Task& { return runs_[static_cast<size_t>(of)].task; };
  while (take_first(thread, &piece)) finish(run(thread));
  for (int step = 1; step < size(); ++step) {
    const int victim = (thread + step) % size();
    while (take_last(victim, &piece)) finish(run(victim));
  }
  if (done == 0) return;
  std::atomic<uint64_t>& pieces = done_[static_cast<size_t>(thread)].pieces;
  pieces.store(pieces.load(std::memory_order_relaxed) + done, std::memory_order_release);
}

void ThreadPool::run(int pieces, const Task& task) {
  epoch_ = (epoch_ + 1) & ((uint64_t{1} << (64 - 2 * kBits)) - 1);
  for (int thread = size() - 1; thread >= 0; --thread) {
    Run& run = runs_[static_cast<size_t>(thread)];
    run.task = task;
    const auto begin = static_cast<uint64_t>(first_piece(pieces, thread));
    const auto end = static_cast<uint64_t>(first_piece(pieces, thread + 1));
    run.word.store((epoch_ << (2 * kBits)) | (end << kBits) | begin, std::memory_order_release);
  }
  all_pieces_ += static_cast<uint64_t>(pieces);
  take_all(0);
  const auto num_done = [this] {
    uint64_t sum = 0;
    for (int thread = 0; thread < size(); ++thread)
      sum += done_[static_cast<size_t>(thread)].pieces.load(std::memory_order_acquire);
    return sum;
  };
  Patience patience;
  while (num_done() != all_pieces_) patience.wait();
}

double ThreadPool::time_loop() {
  using namespace std::chrono;
  constexpr int kLoops = 4, kPatience = 100;  // pauses: some microseconds
  constexpr int kMissed = 1 << 16;
  const int others = size() - 1;
  std::atomic<int> arrived{0};
  std::atomic<int>* const count = &arrived;
  // The caller's piece waits for the others, or it would do theirs before they hear of them.
  const auto meet = [count, others](int piece, int) {
    if (piece > 0) {
      count->fetch_add(1, std::memory_order_release);
      return;
    }
    for (int i = 0; i < kPatience; ++i) {
      if (count->load(std::memory_order_acquire) == others) return;
      relax();
    }
    count->fetch_add(kMissed, std::memory_order_relaxed);
  };
  double best = 0.0;
  for (int i = 0; i < kLoops; ++i) {
    arrived.store(0, std::memory_order_relaxed);
    const auto start = steady_clock::now();
    parallel(others + 1, meet);
    const double seconds = duration<double>(steady_clock::now() - start).count();
    const bool all_came = arrived.load(std::memory_order_acquire) == others;
    if (all_came && (best == 0.0 || seconds < best)) best = seconds;
  }
  return best;
}

void ThreadPool::work(int thread) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "hotbatch-step");  // as `top -H` shows it
#endif
  const std::atomic<uint64_t>& own = runs_[static_cast<size_t>(thread)].word;
  uint64_t epoch = 0;  // before the first loop, which may already be there
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [this] { return awake_.load(std::memory_order_relaxed); });
      if (stopping_) return;
    }
    Patience patience;
    // A worker may sleep through end() and see the next begin(), or the destructor's.
    while (awake_.load(std::memory_order_acquire) &&
           !stopping_.load(std::memory_order_relaxed)) {
      const uint64_t latest = epoch_of(own.load(std::memory_order_acquire));
      if (latest == epoch) {
        patience.wait();
        continue;
      }
      epoch = latest;
      take_all(thread);
      patience = Patience();
    }
  }
}

}  // namespace hotbatch
