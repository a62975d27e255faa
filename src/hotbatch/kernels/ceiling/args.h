// What the machine can do at best, measured with code that does nothing else: the ceiling that
// kernels and steps are held against (Williams et al. 2009, "Roofline").
#pragma once

#include <cstddef>
#include <cstdint>

namespace hotbatch {

enum class CeilingKind { kInt8, kBf16, kF32 };

// Multiply-adds of one call of ceiling_compute with `rounds`.
constexpr int kCeilingChains = 12;
constexpr int kCeilingUnroll = 16;

struct CeilingRead {
  const uint8_t* data = nullptr;  // a multiple of 1024 bytes
  size_t bytes = 0;
};

}  // namespace hotbatch
