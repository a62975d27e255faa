#define HB_ISA avx512bf16
#define HB_ISA_NAME "avx512bf16"
#include "csrc/isa_tables.inc"
