// What every per-instruction-set translation unit includes before opening its namespace.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/kernel_table.h"

#define HB_UNROLL _Pragma("GCC unroll 16")
// For what must not become a call: numbers passed through memory then stay in registers.
#define HB_INLINE __attribute__((always_inline)) inline
