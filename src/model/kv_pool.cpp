// The pool as two byte tensors [layers, blocks, bytes of a block].
#include "model/kv_pool.h"

#include <ATen/ATen.h>

#include <cstring>

#include "base/check.h"

namespace tandem {

KvPool::KvPool(const AttentionShape& shape, Element element, std::int64_t num_layers,
               std::int64_t num_blocks, Place place, bool releasable)
    : num_layers_(num_layers), num_blocks_(num_blocks) {
  TD_CHECK(num_blocks > 0, "KV cache: {} blocks found, at least 1 wanted", num_blocks);
  const std::int64_t element_bytes = element == Element::f32 ? 4 : 2;
  const std::int64_t plain = shape.num_kv_heads * shape.head_dim * kBlockTokens;
  const std::int64_t k = place == Place::cpu ? shape.k_block_elements() : plain;
  const std::int64_t v = place == Place::cpu ? shape.v_block_elements() : plain;
  const auto bytes = at::dtype(at::kByte).device(device_of(place));
  const std::int64_t blocks = num_blocks + (place == Place::cpu ? 0 : 1);
  const std::int64_t k_bytes = k * element_bytes, v_bytes = v * element_bytes;
  if (!releasable) {
    k_ = at::empty({num_layers, blocks, k_bytes}, bytes);
    v_ = at::empty({num_layers, blocks, v_bytes}, bytes);
    return;
  }
  const std::int64_t k_all = round_up(num_layers * blocks * k_bytes, 256);
  memory_.emplace(place, k_all + num_layers * blocks * v_bytes, "KV cache");
  auto* base = static_cast<std::byte*>(memory_->data());
  k_ = at::from_blob(base, {num_layers, blocks, k_bytes}, bytes);
  v_ = at::from_blob(base + k_all, {num_layers, blocks, v_bytes}, bytes);
}

void KvPool::release() {
  TD_CHECK(memory_, "{}", "KV cache: this pool's memory cannot be given back");
  memory_->give_back();
}
void KvPool::retake() {
  if (memory_) memory_->take_again("KV cache");
}

std::int64_t KvPool::bytes() const { return k_.numel() + v_.numel(); }

void* KvPool::k_blocks(std::int64_t layer) {
  return k_.data_ptr<std::uint8_t>() + (num_layers_ == 1 ? 0 : layer) * k_.stride(0);
}

void* KvPool::v_blocks(std::int64_t layer) {
  return v_.data_ptr<std::uint8_t>() + (num_layers_ == 1 ? 0 : layer) * v_.stride(0);
}

void KvPool::copy_block(std::int32_t from, std::int32_t to) {
  for (auto* t : {&k_, &v_}) {
    if (t->is_cuda()) {
      t->select(1, to).copy_(t->select(1, from));
      continue;
    }
    auto* base = t->data_ptr<std::uint8_t>();
    for (std::int64_t l = 0; l < num_layers_; ++l)
      std::memcpy(base + l * t->stride(0) + to * t->stride(1),
                  base + l * t->stride(0) + from * t->stride(1), t->stride(1));
  }
}

}  // namespace tandem
