#include "csrc/prefault.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <sched.h>
#include <sys/mman.h>

namespace hotbatch {
namespace {

constexpr size_t kPiece = size_t{2} << 20;  // a huge page: what is zeroed in one go anyway
constexpr size_t kSmallPage = 4096;

void take_lowest_priority() {
#if defined(__linux__)
  sched_param parameters{};
  sched_setscheduler(0, SCHED_IDLE, &parameters);  // of this thread; a refusal does no harm
#endif
}

void make_present(uint8_t* begin, size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  uint8_t* page = begin - reinterpret_cast<uintptr_t>(begin) % kSmallPage;
  if (madvise(page, bytes + static_cast<size_t>(begin - page), MADV_POPULATE_WRITE) == 0) return;
#endif
  // A write that changes nothing, also if somebody else writes there at the same time.
  for (size_t at = 0; at < bytes; at += kSmallPage)
    __atomic_fetch_or(begin + at, uint8_t{0}, __ATOMIC_RELAXED);
}

}  // namespace

Prefault::~Prefault() {
  stopping_.store(true, std::memory_order_relaxed);
  for (auto& thread : threads_) thread.join();
}

void Prefault::start(std::vector<Range> ranges, int threads) {
  if (!threads_.empty()) return;
  size_t longest = 0;
  for (const Range& range : ranges) longest = std::max(longest, range.bytes);
  pieces_ = (longest + kPiece - 1) / kPiece;
  ranges_ = std::move(ranges);
  busy_ = static_cast<size_t>(std::max(threads, 1));
  for (size_t thread = busy_; thread > 0; --thread) threads_.emplace_back([this] { work(); });
}

bool Prefault::wait(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return finished_.wait_for(lock, std::chrono::duration<double>(seconds),
                            [this] { return busy_ == 0; });
}

void Prefault::work() {
  take_lowest_priority();
  // All ranges at the same pace: each layer's cache is filled from its beginning.
  while (!stopping_.load(std::memory_order_relaxed)) {
    const size_t index = next_.fetch_add(1, std::memory_order_relaxed);
    if (index >= pieces_ * ranges_.size()) break;
    const Range& range = ranges_[index % ranges_.size()];
    const size_t at = index / ranges_.size() * kPiece;
    if (at < range.bytes) make_present(range.begin + at, std::min(kPiece, range.bytes - at));
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (--busy_ == 0) finished_.notify_all();
}

}  // namespace hotbatch
