// The gradient of a batch as a sum with a fixed shape: leaf by leaf, leaves in a binary tree. Only
// leaf order decides the bits, so a rank that owns a whole subtree of leaves computes exactly what
// one rank would have computed for that subtree.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ops/place.h"

namespace tandem {

// Zero-filled f32 memory of a place. `data` is for that place's kernels; the host reads and writes
// through read and write.
class FlatBuffer {
 public:
  FlatBuffer(std::int64_t elements, Place place)
      : memory_(place, elements * 4, "trainer memory"), size_(elements) {}
  float* data() const { return static_cast<float*>(memory_.data()); }
  std::int64_t size() const { return size_; }
  Place place() const { return memory_.place(); }

  // Elements [begin, begin + values.size()) to and from the host.
  void read(std::int64_t begin, std::span<float> values) const {
    read_memory(place(), values.data(), data() + begin,
                static_cast<std::int64_t>(values.size_bytes()));
  }
  void write(std::int64_t begin, std::span<const float> values) {
    write_memory(place(), data() + begin, values.data(),
                 static_cast<std::int64_t>(values.size_bytes()));
  }

 private:
  Memory memory_;
  std::int64_t size_ = 0;
};

class GradientTree {
 public:
  GradientTree(std::int64_t elements, Place place) : elements_(elements), place_(place) {}

  void begin_batch();
  // Where the next leaf's gradient is accumulated; its content is old, the weights' `fresh` marks
  // make the first write replace it.
  float* begin_leaf();
  void end_leaf();
  // The sum of all leaves; their number must have been a power of two. Null if there was none.
  float* total();

 private:
  std::unique_ptr<FlatBuffer> take();

  std::int64_t elements_;
  Place place_;
  std::int64_t leaves_ = 0;
  std::unique_ptr<FlatBuffer> current_;
  std::vector<std::unique_ptr<FlatBuffer>> levels_;  // [i]: sum of 2^i leaves, or null
  std::vector<std::unique_ptr<FlatBuffer>> spare_;
};

}  // namespace tandem
