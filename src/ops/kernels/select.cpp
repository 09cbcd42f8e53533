// Which kernel table this processor runs, and the one in use.
#include <atomic>
#include <stdexcept>
#include <string>

#include "ops/kernels/kernels.h"

namespace tandem {

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_avx512bf16;

namespace {

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

bool has_avx512bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

const Kernels* fastest() {
  if (has_avx512bf16()) return &kernels_avx512bf16;
  if (has_avx512()) return &kernels_avx512;
  return has_avx2() ? &kernels_avx2 : &kernels_portable;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels* kernels_by_name(std::string_view name) {
  if (name == "auto") return fastest();
  if (name == "portable") return &kernels_portable;
  if (name == "avx2" && has_avx2()) return &kernels_avx2;
  if (name == "avx512" && has_avx512()) return &kernels_avx512;
  if (name == "avx512bf16" && has_avx512bf16()) return &kernels_avx512bf16;
  return nullptr;
}

const Kernels& kernels() {
  const Kernels* table = in_use.load(std::memory_order_acquire);
  if (!table) {
    table = fastest();
    in_use.store(table, std::memory_order_release);
  }
  return *table;
}

void select_kernels(std::string_view name) {
  const Kernels* table = kernels_by_name(name);
  if (!table)
    throw std::invalid_argument("--cpu-kernels: '" + std::string(name) +
                                "' does not run on this processor; it runs auto, portable" +
                                (has_avx2() ? ", avx2" : "") + (has_avx512() ? ", avx512" : "") +
                                (has_avx512bf16() ? ", avx512bf16" : ""));
  in_use.store(table, std::memory_order_release);
}

}  // namespace tandem
