// The kernels compiled for portable (CMake sets the compiler flags by this file's name).
#define TD_ISA isa_portable
#include "ops/kernels/table.h"

namespace tandem {

extern const Kernels kernels_portable;
constinit const Kernels kernels_portable = TD_ISA::make_table("portable");

}  // namespace tandem
