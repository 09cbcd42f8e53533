// The kernels compiled for avx512 (CMake sets the compiler flags by this file's name).
#define TD_ISA isa_avx512
#include "ops/kernels/table.h"

namespace tandem {

extern const Kernels kernels_avx512;
constinit const Kernels kernels_avx512 = TD_ISA::make_table("avx512");

}  // namespace tandem
