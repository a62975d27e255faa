// Makes memory present before it is needed.
//
// A page that is written to for the first time is zeroed then and there: with huge pages, and
// a cache that lies in as many places as the model has layers, the step that happens to open
// the next page in each of them takes a tenth of a second longer. Threads of its own do this
// beforehand, at the lowest priority there is, so that they take nothing but idle time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
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
  void start(std::vector<Range> ranges, int threads);
  // Returns whether all is present, after so many seconds at most.
  bool wait(double seconds);

 private:
  void work();

  std::vector<Range> ranges_;
  size_t pieces_ = 0;             // of the longest range
  std::atomic<size_t> next_{0};   // place and range of it, in the order of the places
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable finished_;
  size_t busy_ = 0;  // threads
  std::vector<std::thread> threads_;
};

}  // namespace hotbatch
