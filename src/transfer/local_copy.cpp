// Mapping peers and copying boxes on all threads.
#include "transfer/local_copy.h"

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/file.h"
#include "transfer/pieces.h"

namespace tandem {
namespace {

std::string key_of(int process) { return fmt::format("transfer/memory/{}", process); }

// One host and one view of its processes: what /proc/PID/fd needs.
std::string host_identity() {
  char link[64] = {};
  if (::readlink("/proc/self/ns/pid", link, sizeof link - 1) < 0) link[0] = '\0';
  std::string boot = read_file("/proc/sys/kernel/random/boot_id");
  while (!boot.empty() && boot.back() == '\n') boot.pop_back();
  return boot + link;
}

// "identity pid fd bytes" as announced.
struct Announced {
  std::string identity;
  int pid = 0, fd = -1;
  std::int64_t bytes = 0;
};

Announced announced_by(Store& store, int process, double timeout_seconds) {
  const std::string text = store.get(key_of(process), timeout_seconds);
  char identity[256];
  Announced a;
  const int found = std::sscanf(text.c_str(), "%255s %d %d %ld", identity, &a.pid, &a.fd, &a.bytes);
  TD_CHECK(found == 4,
           "weight transfer: rank {} announced '{}', identity, pid, fd and bytes wanted", process,
           text);
  a.identity = identity;
  return a;
}

}  // namespace

void announce_memory(Store& store, int process, const Memory* memory) {
  store.set(key_of(process), fmt::format("{} {} {} {}", host_identity(), ::getpid(),
                                         memory ? memory->fd() : -1, memory ? memory->bytes() : 0));
}

bool on_one_host(Store& store, int a, int b, double timeout_seconds) {
  return announced_by(store, a, timeout_seconds).identity ==
         announced_by(store, b, timeout_seconds).identity;
}

PeerMemory::PeerMemory(Store& store, int process, double timeout_seconds) {
  const Announced a = announced_by(store, process, timeout_seconds);
  const std::string path = fmt::format("/proc/{}/fd/{}", a.pid, a.fd);
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TD_CHECK(fd,
           "weight transfer: the memory of rank {} ({}) cannot be opened: {}; "
           "--no-update-weight-shared-memory sends the weights over sockets",
           process, path, errno_text(errno));
  bytes_ = static_cast<std::size_t>(a.bytes);
  void* p = ::mmap(nullptr, bytes_, PROT_READ, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  TD_CHECK(p != MAP_FAILED, "weight transfer: the memory of rank {} ({}) cannot be mapped: {}",
           process, path, errno_text(errno));
  data_ = static_cast<std::byte*>(p);
}

PeerMemory::~PeerMemory() {
  if (data_) ::munmap(data_, bytes_);
}

LocalCopies::LocalCopies(const TransferSetup& setup) : setup_(setup) {
  const int n = setup.num_processes;
  shares_.assign(static_cast<std::size_t>(n * n), 0);
  const double seconds = setup.group.timeout_seconds;
  if (setup.store && setup.shared_memory) {
    std::vector<std::string> identity;
    for (int p = 0; p < n; ++p) identity.push_back(announced_by(*setup.store, p, seconds).identity);
    for (int a = 0; a < n; ++a)
      for (int b = 0; b < n; ++b) shares_[a * n + b] = identity[a] == identity[b];
  }
  for (const TransferBox& box : setup.plan.boxes) {
    if (setup.target_process[box.target_rank] != setup.process || box.in_place || !takes(box))
      continue;
    boxes_.push_back(&box);
    const int source = setup.source_process[box.source_rank];
    if (source != setup.process && !peers_.contains(source))
      peers_.try_emplace(source, *setup.store, source, seconds);
  }
}

bool LocalCopies::takes(const TransferBox& box) const {
  const int source = setup_.source_process[box.source_rank];
  const int target = setup_.target_process[box.target_rank];
  return source == target || shares_[source * setup_.num_processes + target];
}

// All boxes in one launch, which compares what the target then holds with what was read, bit for
// bit. That says more than two sums could, so a box's are 0 at both ends if nothing differs, and
// not equal otherwise.
std::int64_t LocalCopies::copy_on_gpu(std::span<RowsSum> sums) {
  std::vector<BytesCopy> jobs;
  std::int64_t total = 0;
  for (const TransferBox* b : boxes_) {
    const RowsView from = view_entry(setup_.source_layouts[b->source_rank],
                                     setup_.source->memory().data(), b->source_entry);
    const RowsView to = view_entry(setup_.target_layouts[b->target_rank],
                                   setup_.target->memory().data(), b->target_entry);
    const auto bytes = device_stretch(from, b->source_row, b->rows);
    const auto target = device_stretch(to, b->target_row, b->rows);
    jobs.push_back({.from = bytes.data(),
                    .to = const_cast<std::byte*>(target.data()),
                    .bytes = static_cast<std::int64_t>(bytes.size())});
    total += static_cast<std::int64_t>(bytes.size());
  }
  std::vector<std::uint32_t> differ(jobs.size());
  cuda_part().copy_and_compare(jobs.data(), static_cast<std::int64_t>(jobs.size()), differ.data());
  for (std::size_t i = 0; i < boxes_.size(); ++i)
    sums[static_cast<std::size_t>(boxes_[i] - setup_.plan.boxes.data())] += {differ[i], 0};
  return total;
}

std::int64_t LocalCopies::copy(std::span<RowsSum> sums) {
  if (boxes_.empty()) return 0;
  if (setup_.target->place() == Place::cuda) return copy_on_gpu(sums);
  // Bytes of a share: small enough to be added up from the cache that its copy left it in, where
  // that is not one pass.
  constexpr std::int64_t kShare = 1 << 17;
  struct Share {
    const TransferBox* box;
    std::int64_t row, rows;
  };
  std::vector<Share> shares;
  std::int64_t bytes = 0;
  for (const TransferBox* b : boxes_) {
    const std::int64_t row_bytes =
        b->row_elements * (setup_.target->layout().element == Element::f32 ? 4 : 2);
    const std::int64_t step =
        std::max(kPanel, kShare / std::max<std::int64_t>(row_bytes, 1) / kPanel * kPanel);
    for (std::int64_t row = 0; row < b->rows; row += step)
      shares.push_back({b, row, std::min(step, b->rows - row)});
    bytes += b->rows * row_bytes;
  }
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  at::parallel_for(0, at::get_num_threads(), 1, [&](std::int64_t, std::int64_t) {
    for (std::size_t i = next++; i < shares.size(); i = next++) {
      const TransferBox& b = *shares[i].box;
      const int source = setup_.source_process[b.source_rank];
      const void* data =
          source == setup_.process ? setup_.source->memory().data() : peers_.at(source).data();
      const RowsSum sum =
          copy_rows(view_entry(setup_.source_layouts[b.source_rank], data, b.source_entry)
                        .columns(b.source_col, b.row_elements),
                    b.source_row + shares[i].row, shares[i].rows, *setup_.target, b.target_entry,
                    b.target_row + shares[i].row);
      const std::lock_guard lock(mutex);
      sums[static_cast<std::size_t>(shares[i].box - setup_.plan.boxes.data())] += sum;
    }
  });
  return bytes;
}

}  // namespace tandem
