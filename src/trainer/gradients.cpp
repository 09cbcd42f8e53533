// The tree as a stack of sums: a leaf is put on it, and while the two on top are siblings they
// become one.
#include "trainer/gradients.h"

namespace tandem {

void GradientTree::begin_batch(std::int64_t first_leaf) {
  next_leaf_ = first_leaf;
  for (Part& part : parts_) spare_.push_back(std::move(part.buffer));
  parts_.clear();
}

std::unique_ptr<FlatBuffer> GradientTree::take() {
  if (spare_.empty()) return std::make_unique<FlatBuffer>(elements_, place_);
  auto buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

float* GradientTree::begin_leaf() {
  current_ = take();
  return current_->data();
}

void GradientTree::end_leaf() {
  parts_.push_back({{0, next_leaf_++}, std::move(current_)});
  while (parts_.size() > 1) {
    Part &right = parts_.back(), &left = parts_[parts_.size() - 2];
    if (!are_siblings(left.node, right.node)) break;
    kernels(place_).add_f32(left.buffer->data(), right.buffer->data(), elements_);
    left.node = {left.node.level + 1, left.node.index / 2};
    spare_.push_back(std::move(right.buffer));
    parts_.pop_back();
  }
}

std::vector<GradientTree::Sum> GradientTree::sums() const {
  std::vector<Sum> out;
  for (const Part& part : parts_) out.push_back({part.node, part.buffer->data()});
  return out;
}

}  // namespace tandem
