// Keys and values of all layers in blocks of kBlockTokens positions; slot = block · 16 + offset.
// On the CPU a block of a layer holds K as [kv_head][head_dim][16] and V as
// [kv_head][16][padded head_dim], so that scores come 16 keys at a time; on a GPU both are
// [16][kv_head][head_dim]. A pool of one layer serves every layer of a training
// forward in turn, since there a layer's keys are written just before they are read.
//
// A releasable pool lies in memory that can be given back between rollouts and taken again at the
// same addresses, so that a captured graph stays right (ops/place.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/functions.h"
#include "ops/kernels/kernels.h"
#include "ops/place.h"

namespace tandem {

class KvPool {
 public:
  KvPool(const AttentionShape& shape, Element element, std::int64_t num_layers,
         std::int64_t num_blocks, Place place = Place::cpu, bool releasable = false);

  std::int64_t num_blocks() const { return num_blocks_; }
  // On a GPU one block more than num_blocks, for rows that pad a call.
  std::int32_t spare_block() const { return static_cast<std::int32_t>(num_blocks_); }
  std::int64_t num_layers() const { return num_layers_; }
  std::int64_t bytes() const;

  // K and V blocks of a layer; a pool of one layer gives that one for every index.
  void* k_blocks(std::int64_t layer);
  void* v_blocks(std::int64_t layer);
  // Of a releasable pool: its memory goes, with all keys and values, and comes back zero-filled.
  void release();
  void retake();
  bool released() const { return memory_ && memory_->given_back(); }
  // All layers: block `to` becomes a copy of block `from`.
  void copy_block(std::int32_t from, std::int32_t to);

 private:
  std::int64_t num_layers_, num_blocks_;
  std::optional<Memory> memory_;  // of a releasable pool
  at::Tensor k_, v_;              // uint8 [layers, blocks, bytes]
};

}  // namespace tandem
