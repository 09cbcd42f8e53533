// The tree as a binary counter of buffers: level i holds the sum of 2^i leaves.
#include "trainer/gradients.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "ops/kernels/kernels.h"

namespace tandem {

FlatBuffer::FlatBuffer(std::int64_t elements) : size_(elements) {
  if (elements == 0) return;
  void* p = mmap(nullptr, static_cast<std::size_t>(elements) * 4, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TD_CHECK(p != MAP_FAILED, "trainer memory: {} bytes cannot be mapped: {}", elements * 4,
           std::strerror(errno));
  madvise(p, static_cast<std::size_t>(elements) * 4, MADV_HUGEPAGE);
  data_ = static_cast<float*>(p);
}

FlatBuffer::~FlatBuffer() {
  if (data_) munmap(data_, static_cast<std::size_t>(size_) * 4);
}

void GradientTree::begin_batch() {
  leaves_ = 0;
  for (auto& level : levels_)
    if (level) spare_.push_back(std::move(level));
  levels_.clear();
}

std::unique_ptr<FlatBuffer> GradientTree::take() {
  if (spare_.empty()) return std::make_unique<FlatBuffer>(elements_);
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
    kernels().add_f32(levels_[level]->data(), current_->data(), elements_);
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
