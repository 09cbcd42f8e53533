// Group over c10d's Gloo backend. Operations wrap the caller's memory in tensors without copying
// and wait for the work: Gloo gives each of its own waits the operation's limit and then fails the
// work, so no buffer is still in use when an error is thrown.
#include "comm/group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "comm/c10d.h"

namespace tandem {
namespace {

// c10d's flight recorder writes into a map without a lock, so groups on different threads of a
// process break it. It is off before the first group is built; nothing here reads it.
[[maybe_unused]] const bool kRecorderIsOff = ::setenv("TORCH_FR_BUFFER_SIZE", "0", 1) == 0;

at::Tensor byte_tensor(const std::byte* data, std::size_t size) {
  // c10d takes inputs as mutable tensors too; it only reads them.
  return at::from_blob(const_cast<std::byte*>(data), {static_cast<std::int64_t>(size)}, at::kByte);
}

}  // namespace

Group Group::alone(std::string name) { return Group(std::move(name), 0, 1, 0.0, nullptr); }

Group Group::gloo(const Store& store, std::string name, int rank, int size,
                  const GroupOptions& options) {
  TD_CHECK(size >= 1 && rank >= 0 && rank < size, "group '{}': rank {} of size {}", name, rank,
           size);
  if (size == 1) return alone(std::move(name));
  const std::string what =
      fmt::format("group '{}', rank {} of {}: building within {:.1f} s through the store at {}",
                  name, rank, size, options.timeout_seconds, store.address());
  std::shared_ptr<c10d::Backend> backend = call_c10d(what, [&] {
    auto gloo = c10d::ProcessGroupGloo::Options::create(milliseconds_of(options.timeout_seconds));
    gloo->threads = 1;  // operations of a group are sequential anyway
    gloo->devices.push_back(
        options.interface.empty()
            ? c10d::ProcessGroupGloo::createDeviceForHostname(options.host)
            : c10d::ProcessGroupGloo::createDeviceForInterface(options.interface));
    // A store connection of its own: c10d's timeouts on it do not touch the caller's.
    auto prefixed =
        c10::make_intrusive<c10d::PrefixStore>("group/" + name, unshare(store.c10d())->clone());
    prefixed->setTimeout(milliseconds_of(options.timeout_seconds));
    return share(c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, rank, size, gloo)));
  });
  return Group(std::move(name), rank, size, options.timeout_seconds, std::move(backend));
}

std::string Group::describe(std::string_view operation) const {
  return fmt::format("{} in group '{}', rank {} of {}, limit {:.1f} s", operation, name_, rank_,
                     size_, timeout_seconds_);
}

// start(timeout) → the c10d work; waits for it. The group remembers a failure before it is thrown.
template <typename Start>
void Group::run(std::string_view operation, Start&& start) {
  TD_CHECK(failure_.empty(), "{}: the group failed before and must be built anew ({})",
           describe(operation), failure_);
  failure_ = "an earlier operation did not finish";
  call_c10d(describe(operation), [&] { start(milliseconds_of(timeout_seconds_))->wait(); });
  failure_.clear();
}

void Group::barrier() {
  if (size_ == 1) return;
  run("barrier", [&](std::chrono::milliseconds timeout) {
    c10d::BarrierOptions options;
    options.timeout = timeout;
    return backend_->barrier(options);
  });
}

void Group::broadcast(std::span<std::byte> bytes, int root) {
  TD_CHECK(root >= 0 && root < size_, "{}: root {}", describe("broadcast"), root);
  if (size_ == 1 || bytes.empty()) return;
  run("broadcast", [&](std::chrono::milliseconds timeout) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout;
    std::vector<at::Tensor> tensors = {byte_tensor(bytes.data(), bytes.size())};
    return backend_->broadcast(tensors, options);
  });
}

void Group::all_gather(std::span<const std::byte> mine, std::span<std::byte> out) {
  TD_CHECK(out.size() == mine.size() * static_cast<std::size_t>(size_),
           "{}: {} bytes from each rank do not fill {}", describe("all_gather"), mine.size(),
           out.size());
  if (mine.empty()) return;
  if (size_ == 1) {
    std::memmove(out.data(), mine.data(), mine.size());
    return;
  }
  run("all_gather", [&](std::chrono::milliseconds timeout) {
    c10d::AllgatherOptions options;
    options.timeout = timeout;
    at::Tensor input = byte_tensor(mine.data(), mine.size());
    at::Tensor output = byte_tensor(out.data(), out.size());
    return backend_->_allgather_base(output, input, options);
  });
}

void Group::exchange(std::span<const Send> sends, std::span<const Receive> receives) {
  TD_CHECK(failure_.empty(), "{}: the group failed before and must be built anew ({})",
           describe("exchange"), failure_);
  for (const Send& s : sends)
    TD_CHECK(s.to >= 0 && s.to < size_ && s.to != rank_, "{}: to rank {}", describe("send"), s.to);
  for (const Receive& r : receives)
    TD_CHECK(r.from >= 0 && r.from < size_ && r.from != rank_, "{}: from rank {}",
             describe("receive"), r.from);
  std::vector<c10::intrusive_ptr<c10d::Work>> works;
  std::vector<std::vector<at::Tensor>> tensors;
  call_c10d(describe("exchange"), [&] {
    // Gloo tells messages between two ranks apart by tag: the running number of the pair's parts.
    sent_.resize(static_cast<std::size_t>(size_));
    received_.resize(static_cast<std::size_t>(size_));
    for (const Receive& r : receives) {
      const int tag = received_[static_cast<std::size_t>(r.from)]++;
      if (r.bytes.empty()) continue;
      tensors.push_back({byte_tensor(r.bytes.data(), r.bytes.size())});
      works.push_back(backend_->recv(tensors.back(), r.from, tag));
    }
    for (const Send& s : sends) {
      const int tag = sent_[static_cast<std::size_t>(s.to)]++;
      if (s.bytes.empty()) continue;
      tensors.push_back({byte_tensor(s.bytes.data(), s.bytes.size())});
      works.push_back(backend_->send(tensors.back(), s.to, tag));
    }
  });
  failure_ = "an earlier exchange did not finish";
  call_c10d(describe("exchange"), [&] {
    for (auto& work : works) work->wait(milliseconds_of(timeout_seconds_));
  });
  failure_.clear();
}

std::vector<std::string> Group::all_gather_text(std::string_view mine) {
  const std::uint64_t length = mine.size();
  std::vector<std::uint64_t> lengths(static_cast<std::size_t>(size_));
  all_gather(std::as_bytes(std::span(&length, 1)), std::as_writable_bytes(std::span(lengths)));
  const std::size_t longest = *std::max_element(lengths.begin(), lengths.end());
  std::string padded(mine);
  padded.resize(longest);
  std::string all(longest * lengths.size(), '\0');
  all_gather(std::as_bytes(std::span(padded)), std::as_writable_bytes(std::span(all)));
  std::vector<std::string> out;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    out.push_back(all.substr(i * longest, lengths[i]));
  return out;
}

template <typename T>
void Group::reduce(std::span<T> values) {
  if (size_ == 1 || values.empty()) return;
  run("all_reduce", [&](std::chrono::milliseconds timeout) {
    c10d::AllreduceOptions options;
    options.timeout = timeout;
    std::vector<at::Tensor> tensors = {at::from_blob(values.data(),
                                                     {static_cast<std::int64_t>(values.size())},
                                                     c10::CppTypeToScalarType<T>::value)};
    return backend_->allreduce(tensors, options);
  });
}

void Group::all_reduce_sum(std::span<float> values) { reduce(values); }
void Group::all_reduce_sum(std::span<double> values) { reduce(values); }
void Group::all_reduce_sum(std::span<std::int64_t> values) { reduce(values); }

}  // namespace tandem
