// The kernels compiled for avx2 (CMake sets the compiler flags by this file's name).
#define TD_ISA isa_avx2
#include "ops/kernels/table.h"

namespace tandem {

extern const Kernels kernels_avx2;
constinit const Kernels kernels_avx2 = TD_ISA::make_table("avx2");

}  // namespace tandem
