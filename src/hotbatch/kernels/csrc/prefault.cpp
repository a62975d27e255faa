#include "csrc/prefault.h"

#include <algorithm>
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
  if (thread_.joinable()) thread_.join();
}

void Prefault::start(std::vector<Range> ranges) {
  if (thread_.joinable()) return;
  ranges_ = std::move(ranges);
  thread_ = std::thread([this] { work(); });
}

void Prefault::work() {
  take_lowest_priority();
  // All ranges at the same pace: each layer's cache is filled from its beginning.
  size_t longest = 0;
  for (const Range& range : ranges_) longest = std::max(longest, range.bytes);
  for (size_t at = 0; at < longest; at += kPiece) {
    for (const Range& range : ranges_) {
      if (stopping_.load(std::memory_order_relaxed)) return;
      if (at < range.bytes) make_present(range.begin + at, std::min(kPiece, range.bytes - at));
    }
  }
  finished_.store(true, std::memory_order_release);
}

}  // namespace hotbatch
