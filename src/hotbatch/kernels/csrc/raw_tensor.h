// Rows of a weight matrix as they lie in a model file, and how to read one as floats.
//
// Block formats are those of GGUF (ggml): 32 weights a block along the input dimension.
//
// Free functions have internal linkage on purpose: this header is compiled for several
// instruction sets, and the linker must not merge their copies.
#pragma once

#include <cstdint>
#include <cstring>

namespace hotbatch {

enum class RawType { kF32, kF16, kBF16, kQ8_0, kQ4_0, kQ4_1 };

constexpr int kRawBlock = 32;  // weights in a Q8_0, Q4_0 or Q4_1 block

struct RawRows {
  RawType type = RawType::kF32;
  const uint8_t* data = nullptr;
  int rows = 0;
  int cols = 0;

  int64_t row_bytes() const {
    switch (type) {
      case RawType::kF32: return int64_t{4} * cols;
      case RawType::kF16:
      case RawType::kBF16: return int64_t{2} * cols;
      case RawType::kQ8_0: return int64_t{34} * (cols / kRawBlock);
      case RawType::kQ4_0: return int64_t{18} * (cols / kRawBlock);
      case RawType::kQ4_1: return int64_t{20} * (cols / kRawBlock);
    }
    return 0;
  }
  const uint8_t* row(int index) const { return data + row_bytes() * index; }
};

static inline float f16_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 0x1f;
  const uint32_t mantissa = h & 0x3ff;
  uint32_t bits;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  if (exponent == 31) {
    bits = sign | 0x7f800000 | (mantissa << 13);
  } else {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline float bf16_to_float(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t read_u16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}

// Writes `cols` floats.
static inline void decode_row(const RawRows& raw, int index, float* out) {
  const uint8_t* p = raw.row(index);
  const int blocks = raw.cols / kRawBlock;
  switch (raw.type) {
    case RawType::kF32:
      std::memcpy(out, p, sizeof(float) * static_cast<size_t>(raw.cols));
      break;
    case RawType::kF16:
      for (int i = 0; i < raw.cols; ++i) out[i] = f16_to_float(read_u16(p + 2 * i));
      break;
    case RawType::kBF16:
      for (int i = 0; i < raw.cols; ++i) out[i] = bf16_to_float(read_u16(p + 2 * i));
      break;
    case RawType::kQ8_0:
      for (int b = 0; b < blocks; ++b, p += 34, out += kRawBlock) {
        const float scale = f16_to_float(read_u16(p));
        const auto* q = reinterpret_cast<const int8_t*>(p + 2);
        for (int i = 0; i < kRawBlock; ++i) out[i] = scale * static_cast<float>(q[i]);
      }
      break;
    case RawType::kQ4_0:
      for (int b = 0; b < blocks; ++b, p += 18, out += kRawBlock) {
        const float scale = f16_to_float(read_u16(p));
        for (int i = 0; i < 16; ++i) {
          out[i] = scale * static_cast<float>((p[2 + i] & 0x0f) - 8);
          out[i + 16] = scale * static_cast<float>((p[2 + i] >> 4) - 8);
        }
      }
      break;
    case RawType::kQ4_1:
      for (int b = 0; b < blocks; ++b, p += 20, out += kRawBlock) {
        const float scale = f16_to_float(read_u16(p));
        const float low = f16_to_float(read_u16(p + 2));
        for (int i = 0; i < 16; ++i) {
          out[i] = scale * static_cast<float>(p[4 + i] & 0x0f) + low;
          out[i + 16] = scale * static_cast<float>(p[4 + i] >> 4) + low;
        }
      }
      break;
  }
}

}  // namespace hotbatch
