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
#include "base/log.h"
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

// "identity pid fd bytes socket" as announced; the socket gives device memory, "-": none.
struct Announced {
  std::string identity, socket;
  int pid = 0, fd = -1;
  std::int64_t bytes = 0;
};

Announced announced_by(Store& store, int process, double timeout_seconds) {
  const std::string text = store.get(key_of(process), timeout_seconds);
  char identity[256], socket[128];
  Announced a;
  const int found =
      std::sscanf(text.c_str(), "%255s %d %d %ld %127s", identity, &a.pid, &a.fd, &a.bytes, socket);
  TD_CHECK(found == 5,
           "weight transfer: rank {} announced '{}', identity, pid, fd, bytes and socket wanted",
           process, text);
  a.identity = identity;
  a.socket = socket;
  return a;
}

}  // namespace

std::unique_ptr<DescriptorServer> announce_memory(Store& store, int process, const Memory* memory) {
  std::unique_ptr<DescriptorServer> server;
  if (memory && memory->place() == Place::cuda) {
    std::int64_t bytes = 0;
    Fd descriptor(cuda_part().export_memory(memory->data(), &bytes));
    if (descriptor) server = std::make_unique<DescriptorServer>(std::move(descriptor), bytes);
  }
  store.set(key_of(process),
            fmt::format("{} {} {} {} {}", host_identity(), ::getpid(), memory ? memory->fd() : -1,
                        memory ? memory->bytes() : 0, server ? server->name() : "-"));
  return server;
}

PeerMemory::PeerMemory(Store& store, int process, Place place, double timeout_seconds)
    : place_(place) {
  const Announced a = announced_by(store, process, timeout_seconds);
  if (place == Place::cuda) {
    const TakenDescriptor taken = take_descriptor(a.socket, Deadline::after(timeout_seconds));
    if (taken.descriptor)
      data_ =
          static_cast<std::byte*>(cuda_part().import_memory(taken.descriptor.get(), taken.number));
    return;
  }
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
  if (!data_) return;
  if (place_ == Place::cuda)
    cuda_part().release(data_);
  else
    ::munmap(data_, bytes_);
}

LocalCopies::LocalCopies(const TransferSetup& setup) : setup_(setup) {
  const auto n = static_cast<std::size_t>(setup.num_processes);
  shares_.assign(n * n, 0);
  if (setup.store && setup.shared_memory) agree_on_peers();
  for (const TransferBox& box : setup.plan.boxes)
    if (setup.target_process[box.target_rank] == setup.process && !box.in_place && takes(box))
      boxes_.push_back(&box);
}

// Every process maps those that it takes boxes from, and tells the others what it has mapped, since
// both ends of a box must know which way it goes.
void LocalCopies::agree_on_peers() {
  const int n = setup_.num_processes, me = setup_.process;
  const double seconds = setup_.group.timeout_seconds;
  std::vector<Announced> announced;
  for (int p = 0; p < n; ++p) announced.push_back(announced_by(*setup_.store, p, seconds));
  std::string mapped(static_cast<std::size_t>(n), '-');
  for (const TransferBox& box : setup_.plan.boxes) {
    const int source = setup_.source_process[box.source_rank];
    const auto s = static_cast<std::size_t>(source);
    if (setup_.target_process[box.target_rank] != me || source == me || peers_.contains(source) ||
        announced[s].identity != announced[static_cast<std::size_t>(me)].identity)
      continue;
    const auto& peer =
        peers_.try_emplace(source, *setup_.store, source, setup_.target->place(), seconds)
            .first->second;
    if (peer.data())
      mapped[s] = '+';
    else
      TD_LOG(warn,
             "weight transfer: the GPU memory of rank {} cannot be mapped here; NCCL sends it",
             source);
  }
  const auto key = [](int process) { return fmt::format("transfer/mapped/{}", process); };
  setup_.store->set(key(me), mapped);
  for (int target = 0; target < n; ++target) {
    const std::string of_target = setup_.store->get(key(target), seconds);
    for (int source = 0; source < n; ++source)
      shares_[static_cast<std::size_t>(source * n + target)] =
          of_target.at(static_cast<std::size_t>(source)) == '+';
  }
}

bool LocalCopies::takes(const TransferBox& box) const {
  const int source = setup_.source_process[box.source_rank];
  const int target = setup_.target_process[box.target_rank];
  return source == target || shares_[source * setup_.num_processes + target];
}

// The rows of a box's source, in its columns.
RowsView LocalCopies::view_source(const TransferBox& b) const {
  const int source = setup_.source_process[b.source_rank];
  const void* data =
      source == setup_.process ? setup_.source->memory().data() : peers_.at(source).data();
  return view_entry(setup_.source_layouts[b.source_rank], data, b.source_entry)
      .columns(b.source_col, b.row_elements);
}

// Boxes of this GPU in one launch, which compares what the target then holds with what was read,
// bit for bit. That says more than two sums could, so a box's are 0 at both ends if nothing
// differs, and not equal otherwise. Others in one launch too, which adds up what the target then
// holds.
std::int64_t LocalCopies::copy_on_gpu(std::span<RowsSum> sums) {
  std::vector<BytesCopy> jobs;
  std::vector<WordsPiece> summed;
  std::vector<std::size_t> job_boxes, summed_boxes;
  std::int64_t total = 0;
  for (const TransferBox* b : boxes_) {
    const auto box = static_cast<std::size_t>(b - setup_.plan.boxes.data());
    const ArenaLayout& layout = setup_.target_layouts[b->target_rank];
    const RowsView from = view_source(*b);
    const RowsView to = view_entry(layout, setup_.target->memory().data(), b->target_entry);
    const auto target = device_stretch(to, b->target_row, b->rows);
    total += std::ssize(target);
    if (setup_.copies_on_gpu(*b)) {
      jobs.push_back(device_copy(from, b->source_row, b->rows, to, b->target_row));
      job_boxes.push_back(box);
    } else if (auto words =
                   device_words(from, b->source_row, b->rows,
                                layout.entries[b->target_entry].global_row + b->target_row);
               words && from.element == layout.element) {
      words->copy_to = const_cast<std::byte*>(target.data());
      summed.push_back(*words);
      summed_boxes.push_back(box);
    } else {
      sums[box] +=
          copy_rows(from, b->source_row, b->rows, *setup_.target, b->target_entry, b->target_row);
    }
  }
  std::vector<std::uint32_t> differ(jobs.size()), found(2 * summed.size());
  cuda_part().copy_and_compare(jobs.data(), std::ssize(jobs), differ.data());
  for (std::size_t i = 0; i < jobs.size(); ++i) sums[job_boxes[i]] += {differ[i], 0};
  cuda_part().sum_words(summed.data(), std::ssize(summed), found.data());
  for (std::size_t i = 0; i < summed.size(); ++i)
    sums[summed_boxes[i]] += {found[2 * i], found[2 * i + 1]};
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
      const RowsSum sum = copy_rows(view_source(b), b.source_row + shares[i].row, shares[i].rows,
                                    *setup_.target, b.target_entry, b.target_row + shares[i].row);
      const std::lock_guard lock(mutex);
      sums[static_cast<std::size_t>(shares[i].box - setup_.plan.boxes.data())] += sum;
    }
  });
  return bytes;
}

}  // namespace tandem
