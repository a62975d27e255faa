#define HB_ISA avx2
#define HB_ISA_NAME "avx2"
#include "csrc/isa_tables.inc"
