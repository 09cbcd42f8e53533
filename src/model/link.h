// A link between the GPUs of some of a run's processes (NCCL; ops/cuda/part.h), found through the
// store as a Group is: tensor-parallel ranks gather over one, weights go over others. Members call
// the same operations in the same order; a wait that is too long ends with an error.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/store.h"
#include "ops/place.h"

namespace tandem {

// in_stream: for gather, whose work stands in the thread's stream; messages: for the others.
enum class LinkUse { messages, in_stream };

class Link {
 public:
  // `name` is fresh in the store; `members` ascend and hold `process`.
  Link(Store& store, const std::string& name, std::vector<int> members, int process, LinkUse use,
       double timeout_seconds);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  int rank_of(int process) const;

  // Messages under way; `peer` of a part is a rank of the link. Returns a number to wait for.
  std::int64_t exchange(const std::vector<LinkPart>& sends, const std::vector<LinkPart>& receives);
  std::int64_t broadcast(const std::vector<LinkPart>& parts, int root);
  void wait(std::int64_t number);

  // all = what every rank calls `mine`, in the order of ranks.
  void gather(const void* mine, void* all, std::int64_t bytes);
  // Until the stream, gathers included, has done its work.
  void settle();

 private:
  std::vector<int> members_;
  double timeout_seconds_;
  void* link_ = nullptr;
};

}  // namespace tandem
