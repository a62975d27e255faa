// Zeroed, cache-line aligned memory for weights and buffers, taken in large chunks so that
// the kernel can back it with huge pages: streaming a model's weights is bound by memory and
// address translation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

#include <sys/mman.h>

namespace hotbatch {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() {
    for (const Chunk& chunk : chunks_) munmap(chunk.base, chunk.size);
  }

  // Pages are touched only when written to. Throws std::bad_alloc.
  uint8_t* take(size_t bytes) {
    bytes = (bytes + 63) & ~size_t{63};
    if (chunks_.empty() || chunks_.back().used + bytes > chunks_.back().size) grow(bytes);
    Chunk& chunk = chunks_.back();
    uint8_t* result = chunk.base + chunk.used;
    chunk.used += bytes;
    return result;
  }
  template <class T>
  T* take_array(size_t count) {
    return reinterpret_cast<T*>(take(count * sizeof(T)));
  }

 private:
  struct Chunk {
    uint8_t* base;
    size_t size, used;
  };
  static constexpr size_t kChunk = size_t{32} << 20;

  void grow(size_t bytes) {
    const size_t size = bytes > kChunk ? (bytes + 0xfff) & ~size_t{0xfff} : kChunk;
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(base, size, MADV_HUGEPAGE);
#endif
    chunks_.push_back({static_cast<uint8_t*>(base), size, 0});
  }

  std::vector<Chunk> chunks_;
};

}  // namespace hotbatch
