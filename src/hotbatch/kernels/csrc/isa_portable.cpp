#define HB_ISA portable
#define HB_ISA_NAME "portable"
#include "csrc/isa_tables.inc"
