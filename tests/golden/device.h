// Where the golden tests compute: on the CPU, or with TANDEM_TEST_DEVICE=cuda in the environment on
// a GPU.
#pragma once

#include <cstdlib>
#include <string>

#include "ops/place.h"

namespace tandem {

inline Place tested_place() {
  static const Place place = [] {
    const char* device = std::getenv("TANDEM_TEST_DEVICE");
    if (!device || std::string(device) != "cuda") return Place::cpu;
    load_cuda_part();
    return Place::cuda;
  }();
  return place;
}

// While it lives a GPU computes in exact mode, as the CPU always does.
class ExactMode {
 public:
  ExactMode() { set(true); }
  ~ExactMode() { set(false); }
  ExactMode(const ExactMode&) = delete;
  ExactMode& operator=(const ExactMode&) = delete;

 private:
  static void set(bool exact) {
    if (tested_place() == Place::cuda) cuda_part().set_exact(exact);
  }
};

}  // namespace tandem
