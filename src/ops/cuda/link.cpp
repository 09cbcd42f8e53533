// Links over NCCL, which comes with libtorch_cuda at run time. Its C interface has kept its form
// since version 2.17, so the few calls are declared here and no header package is needed to build.
// A communicator does not block: each wait here looks for NCCL's own error and at the clock, and
// ends the communicator (ncclCommAbort) when either says so, since a peer that died leaves it
// useless.
#include "ops/cuda/link.h"

#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <thread>

#include "ops/cuda/device.h"

extern "C" {
struct ncclComm;
struct ncclUniqueId {
  char internal[tandem::kLinkIdBytes];
};
// As of 2.17; NCCL goes by its size and version. INT_MIN: NCCL's own choice.
struct ncclConfig {
  std::size_t size;
  unsigned magic, version;
  int blocking, cluster_size, min_blocks, max_blocks;
  const char* network;
};
const char* ncclGetErrorString(int result);
const char* ncclGetLastError(ncclComm* comm);
int ncclGetUniqueId(ncclUniqueId* id);
int ncclCommInitRankConfig(ncclComm** comm, int size, ncclUniqueId id, int rank, ncclConfig*);
int ncclCommGetAsyncError(ncclComm* comm, int* result);
int ncclCommAbort(ncclComm* comm);
int ncclGroupStart();
int ncclGroupEnd();
int ncclSend(const void* data, std::size_t count, int type, int peer, ncclComm*, cudaStream_t);
int ncclRecv(void* data, std::size_t count, int type, int peer, ncclComm*, cudaStream_t);
int ncclBroadcast(const void* from, void* to, std::size_t count, int type, int root, ncclComm*,
                  cudaStream_t);
}

namespace tandem::cuda {
namespace {

constexpr int kSuccess = 0, kInProgress = 7;
constexpr int kBytes = 1;  // ncclUint8

class Until {
 public:
  explicit Until(double seconds)
      : seconds_(seconds),
        end_(std::chrono::steady_clock::now() +
             std::chrono::microseconds(static_cast<std::int64_t>(seconds * 1e6))) {}
  bool over() const { return std::chrono::steady_clock::now() > end_; }
  double seconds() const { return seconds_; }

 private:
  double seconds_;
  std::chrono::steady_clock::time_point end_;
};

struct Link {
  ncclComm* comm = nullptr;
  int rank = 0, size = 0;

  ~Link() { end(); }
  // Abort frees what destroy would; nothing is under way between two calls.
  void end() {
    if (comm) ncclCommAbort(comm);
    comm = nullptr;
  }
  [[noreturn]] void fail(const char* call, const std::string& why) {
    end();
    throw std::runtime_error("NCCL: " + std::string(call) + ", rank " + std::to_string(rank) +
                             " of " + std::to_string(size) + ": " + why);
  }
  void check(int result, const char* call) {
    if (result == kSuccess || result == kInProgress) return;
    const std::string why = ncclGetErrorString(result), more = ncclGetLastError(comm);
    fail(call, more.empty() ? why : why + " (" + more + ")");
  }
  // Whether NCCL's own threads have done what they were asked for.
  bool settled(const char* call) {
    int state = kSuccess;
    check(ncclCommGetAsyncError(comm, &state), call);
    check(state, call);
    return state == kSuccess;
  }
  template <class Done>
  void wait(const char* call, const Until& until, Done&& done) {
    while (!done()) {
      if (until.over())
        fail(call,
             "not done within " + std::to_string(until.seconds()) + " s; a peer has died or hangs");
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  // What has been put on the stream, to its end.
  void finish(const char* call, const Until& until) {
    wait(call, until, [&] { return settled(call); });
    wait(call, until, [&] {
      const cudaError_t state = cudaStreamQuery(stream());
      if (state == cudaErrorNotReady) {
        settled(call);  // or the peer's end shows here
        return false;
      }
      tandem::cuda::check(state, call);
      return true;
    });
  }
};

Link& opened(void* link) {
  auto& l = *static_cast<Link*>(link);
  if (!l.comm) throw std::runtime_error("NCCL: this link failed before and must be built anew");
  return l;
}

}  // namespace

void new_link_id(char* id) {
  ncclUniqueId made;
  const int result = ncclGetUniqueId(&made);
  if (result != kSuccess)
    throw std::runtime_error(std::string("NCCL: ncclGetUniqueId: ") + ncclGetErrorString(result));
  std::memcpy(id, made.internal, sizeof made.internal);
}

void* open_link(const char* id, int rank, int size, double timeout_seconds) {
  ncclUniqueId told;
  std::memcpy(told.internal, id, sizeof told.internal);
  ncclConfig config{sizeof(ncclConfig), 0xcafebeef, 21700, 0, INT_MIN, INT_MIN, INT_MIN, nullptr};
  auto link = std::make_unique<Link>();
  link->rank = rank;
  link->size = size;
  const Until until(timeout_seconds);
  link->check(ncclCommInitRankConfig(&link->comm, size, told, rank, &config), "building the link");
  link->wait("building the link", until, [&] { return link->settled("building the link"); });
  return link.release();
}

void close_link(void* link) { delete static_cast<Link*>(link); }

void link_exchange(void* link, const LinkPart* sends, std::int64_t num_sends,
                   const LinkPart* receives, std::int64_t num_receives, double timeout_seconds) {
  Link& l = opened(link);
  const Until until(timeout_seconds);
  l.check(ncclGroupStart(), "exchange");
  for (std::int64_t i = 0; i < num_sends; ++i)
    l.check(ncclSend(sends[i].data, static_cast<std::size_t>(sends[i].bytes), kBytes, sends[i].peer,
                     l.comm, stream()),
            "send");
  for (std::int64_t i = 0; i < num_receives; ++i)
    l.check(ncclRecv(receives[i].data, static_cast<std::size_t>(receives[i].bytes), kBytes,
                     receives[i].peer, l.comm, stream()),
            "receive");
  l.check(ncclGroupEnd(), "exchange");
  l.finish("exchange", until);
}

void link_broadcast(void* link, const LinkPart* parts, std::int64_t num_parts, int root,
                    double timeout_seconds) {
  Link& l = opened(link);
  const Until until(timeout_seconds);
  l.check(ncclGroupStart(), "broadcast");
  for (std::int64_t i = 0; i < num_parts; ++i)
    l.check(ncclBroadcast(parts[i].data, parts[i].data, static_cast<std::size_t>(parts[i].bytes),
                          kBytes, root, l.comm, stream()),
            "broadcast");
  l.check(ncclGroupEnd(), "broadcast");
  l.finish("broadcast", until);
}

}  // namespace tandem::cuda
