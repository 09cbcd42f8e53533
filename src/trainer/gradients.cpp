// The tree as a binary counter of buffers: level i holds the sum of 2^i leaves.
#include "trainer/gradients.h"

#include "base/check.h"

namespace tandem {

void GradientTree::begin_batch() {
  leaves_ = 0;
  for (auto& level : levels_)
    if (level) spare_.push_back(std::move(level));
  levels_.clear();
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
  ++leaves_;
  std::size_t level = 0;
  // Earlier leaves come first in every addition.
  for (; level < levels_.size() && levels_[level]; ++level) {
    kernels(place_).add_f32(levels_[level]->data(), current_->data(), elements_);
    spare_.push_back(std::move(current_));
    current_ = std::move(levels_[level]);
  }
  if (level == levels_.size()) levels_.emplace_back();
  levels_[level] = std::move(current_);
}

float* GradientTree::total() {
  if (leaves_ == 0) return nullptr;
  TD_CHECK((leaves_ & (leaves_ - 1)) == 0, "gradient leaves: {} found, a power of two wanted",
           leaves_);
  return levels_.back()->data();
}

}  // namespace tandem
