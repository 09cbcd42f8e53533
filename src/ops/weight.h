// What an operation needs to know of a weight: where the compute copy lies in the arena, and where
// its gradient goes. Weights are never autograd leaves: an operation's backward writes the gradient
// into `grad` itself and checks that the arena still holds the version its forward read.
#pragma once

#include <cstdint>

#include "base/check.h"
#include "ops/kernels/kernels.h"

namespace tandem {

struct WeightView {
  const char* name = "";       // storage name, for messages
  const void* data = nullptr;  // as the place stores matrices; vectors: row-major
  Element element = Element::f32;
  Place place = Place::cpu;               // of data and grad
  std::int64_t rows = 0, cols = 0;        // [rows, cols] of a matrix, [1, cols] of a vector
  std::int64_t whole_rows = 0;            // of the matrix that these are rows of; 0: all there are
  float* grad = nullptr;                  // row-major f32 [rows, cols]; null: frozen
  mutable bool fresh = false;             // the next gradient replaces what `grad` holds
  const std::int64_t* version = nullptr;  // of the arena; null: never changes
};

inline std::int64_t version_of(const WeightView& w) { return w.version ? *w.version : 0; }

inline void check_version(const WeightView& w, std::int64_t at_forward) {
  TD_CHECK(version_of(w) == at_forward,
           "weight {}: the arena went from version {} to {} between forward and backward; finish "
           "the backward pass before the optimizer step",
           w.name, at_forward, version_of(w));
}

}  // namespace tandem
