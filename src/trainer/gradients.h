// The gradient of a batch as a sum with a fixed shape: leaf by leaf, leaves in a binary tree. Only
// leaf order decides the bits, so a rank that owns a whole subtree of leaves computes exactly what
// one rank would have computed for that subtree.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tandem {

// Zero-filled f32 memory of its own pages, given back whole.
class FlatBuffer {
 public:
  explicit FlatBuffer(std::int64_t elements);
  ~FlatBuffer();
  FlatBuffer(const FlatBuffer&) = delete;
  FlatBuffer& operator=(const FlatBuffer&) = delete;
  float* data() const { return data_; }
  std::int64_t size() const { return size_; }
  std::span<float> span() const { return {data_, static_cast<std::size_t>(size_)}; }

 private:
  float* data_ = nullptr;
  std::int64_t size_ = 0;
};

class GradientTree {
 public:
  explicit GradientTree(std::int64_t elements) : elements_(elements) {}

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
  std::int64_t leaves_ = 0;
  std::unique_ptr<FlatBuffer> current_;
  std::vector<std::unique_ptr<FlatBuffer>> levels_;  // [i]: sum of 2^i leaves, or null
  std::vector<std::unique_ptr<FlatBuffer>> spare_;
};

}  // namespace tandem
