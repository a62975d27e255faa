// Chooses an instruction set at run time.
#include <cstring>
#include <initializer_list>

#include "csrc/kernel_table.h"

namespace hotbatch {

namespace portable { extern const KernelTable table; }
#if defined(__x86_64__)
namespace avx2 { extern const KernelTable table; }
namespace avx512vnni { extern const KernelTable table; }
namespace avx512bf16 { extern const KernelTable table; }
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_avx512bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

}  // namespace

const KernelTable* kernel_table(const char* name) {
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx512bf16")) return has_avx512bf16() ? &avx512bf16::table : nullptr;
  if (!std::strcmp(name, "avx512vnni")) return has_avx512vnni() ? &avx512vnni::table : nullptr;
  if (!std::strcmp(name, "avx2")) return has_avx2() ? &avx2::table : nullptr;
#endif
  if (!std::strcmp(name, "portable")) return &portable::table;
  return nullptr;
}

const char* best_isa() {
  for (const char* name : {"avx512bf16", "avx512vnni", "avx2"})
    if (kernel_table(name)) return name;
  return "portable";
}

}  // namespace hotbatch
