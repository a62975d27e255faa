#include "csrc/thread_pool.h"

#include <sched.h>

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

ThreadPool::ThreadPool(int threads) {
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

void ThreadPool::begin() {
  if (workers_.empty()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awake_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
}

void ThreadPool::end() {
  if (workers_.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  awake_.store(false, std::memory_order_release);
}

bool ThreadPool::take_one(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  if ((ticket & kMask) >= ((ticket >> kBits) & kMask)) return false;
  ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
  const uint64_t piece = ticket & kMask;
  if (piece >= ((ticket >> kBits) & kMask)) return false;
  function_(context_, static_cast<int>(piece), thread);
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void ThreadPool::run(int pieces, Function function, const void* context) {
  function_ = function;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  epoch_ = (epoch_ + 1) & ((uint64_t{1} << (64 - 2 * kBits)) - 1);
  ticket_.store((epoch_ << (2 * kBits)) | (static_cast<uint64_t>(pieces) << kBits),
                std::memory_order_release);
  while (take_one(0)) {
  }
  Patience patience;
  while (done_.load(std::memory_order_acquire) < pieces) patience.wait();
}

void ThreadPool::work(int thread) {
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
      if (take_one(thread)) {
        patience = Patience();
      } else {
        patience.wait();
      }
    }
  }
}

}  // namespace hotbatch
