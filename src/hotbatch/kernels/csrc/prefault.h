// Makes memory present before it is needed.
//
// A page that is written to for the first time is zeroed then and there: with huge pages, and
// a cache that lies in as many places as the model has layers, the step that happens to open
// the next page in each of them takes a tenth of a second longer. A thread of its own does this
// beforehand, at the lowest priority there is, so that it takes nothing but idle time.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace hotbatch {

class Prefault {
 public:
  Prefault() = default;
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;
  ~Prefault();  // ends within milliseconds, finished or not

  struct Range {
    uint8_t* begin;
    size_t bytes;
  };
  // Starts on these; may be called once. Contents stay as they are, whoever writes meanwhile.
  void start(std::vector<Range> ranges);
  bool is_finished() const { return finished_.load(std::memory_order_acquire); }

 private:
  void work();

  std::vector<Range> ranges_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

}  // namespace hotbatch
