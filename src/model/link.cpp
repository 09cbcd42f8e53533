// The store's part of building a link, and its calls.
#include "model/link.h"

#include <algorithm>

#include "base/check.h"

namespace tandem {

Link::Link(Store& store, const std::string& name, std::vector<int> members, int process,
           LinkUse use, double timeout_seconds)
    : members_(std::move(members)), timeout_seconds_(timeout_seconds) {
  const std::string key = "link/" + name;
  std::string id(static_cast<std::size_t>(kLinkIdBytes), '\0');
  if (process == members_.front()) {
    cuda_part().new_link_id(id.data());
    store.set(key, id);
  } else {
    id = store.get(key, timeout_seconds);
  }
  TD_CHECK(static_cast<std::int64_t>(id.size()) == kLinkIdBytes,
           "link '{}' between GPUs: an id of {} bytes found, {} wanted", name, id.size(),
           kLinkIdBytes);
  link_ = cuda_part().open_link(id.data(), rank_of(process), size(), timeout_seconds,
                                use == LinkUse::in_stream);
}

Link::~Link() { cuda_part().close_link(link_); }

int Link::rank_of(int process) const {
  return static_cast<int>(std::ranges::find(members_, process) - members_.begin());
}

std::int64_t Link::exchange(const std::vector<LinkPart>& sends,
                            const std::vector<LinkPart>& receives) {
  return cuda_part().link_exchange(link_, sends.data(), std::ssize(sends), receives.data(),
                                   std::ssize(receives), timeout_seconds_);
}

std::int64_t Link::broadcast(const std::vector<LinkPart>& parts, int root) {
  return cuda_part().link_broadcast(link_, parts.data(), std::ssize(parts), root, timeout_seconds_);
}

void Link::wait(std::int64_t number) { cuda_part().link_wait(link_, number, timeout_seconds_); }

void Link::gather(const void* mine, void* all, std::int64_t bytes) {
  cuda_part().link_all_gather(link_, mine, all, bytes);
}

void Link::settle() { cuda_part().link_settle(link_, timeout_seconds_); }

}  // namespace tandem
