// The gradient of a batch as a sum with a fixed shape: leaf by leaf, leaves in a binary tree. Only
// leaf order decides the bits, so a rank that owns some leaves computes the sums of the tree's
// nodes that lie whole within them, exactly as one rank would have; the other sums are made over
// ranks (trainer/optimizer.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "data/packing.h"
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
  // The sum of a node's leaves.
  struct Sum {
    TreeNode node;
    float* values;  // [elements]; may be changed, it is the tree's until the next batch
  };

  GradientTree(std::int64_t elements, Place place) : elements_(elements), place_(place) {}

  // The next leaf is number `first_leaf` of the batch.
  void begin_batch(std::int64_t first_leaf);
  // Where the next leaf's gradient is accumulated; its content is old, the weights' `fresh` marks
  // make the first write replace it.
  float* begin_leaf();
  void end_leaf();
  // Those of tree_nodes(first leaf, last leaf), in order.
  std::vector<Sum> sums() const;

 private:
  struct Part {
    TreeNode node;
    std::unique_ptr<FlatBuffer> buffer;
  };
  std::unique_ptr<FlatBuffer> take();

  std::int64_t elements_;
  Place place_;
  std::int64_t next_leaf_ = 0;
  std::unique_ptr<FlatBuffer> current_;
  std::vector<Part> parts_;  // sums so far, in order
  std::vector<std::unique_ptr<FlatBuffer>> spare_;
};

}  // namespace tandem
