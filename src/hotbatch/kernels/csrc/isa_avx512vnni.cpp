#define HB_ISA avx512vnni
#define HB_ISA_NAME "avx512vnni"
#include "csrc/isa_tables.inc"
