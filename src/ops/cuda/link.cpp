// Links over NCCL, which comes with libtorch_cuda at run time. Its C interface has kept its form
// since version 2.17, so the few calls are declared here and no header package is needed to build.
// Each wait here looks for NCCL's own error and at the clock, and ends the communicator
// (ncclCommAbort) when either says so, since a peer that died leaves it useless. Messages have a
// stream of their own, so that what has arrived is added up while the rest is under way; their
// communicator does not block. One for gathers in the caller's stream does, because only then a
// call is in the stream when it returns; building it, where it waits for its peers, has a thread
// that is given up when they do not come.
#include "ops/cuda/link.h"

#include <chrono>
#include <climits>
#include <cstring>
#include <deque>
#include <future>
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
int ncclAllGather(const void* mine, void* all, std::size_t count, int type, ncclComm*,
                  cudaStream_t);
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
  cudaStream_t stream = nullptr;  // of messages
  cudaEvent_t before = nullptr;   // the caller's work that they follow
  struct Begun {
    std::int64_t number = 0;
    cudaEvent_t done = nullptr;
  };
  std::deque<Begun> begun;  // and not yet waited for
  std::int64_t count = 0;

  ~Link() {
    end();
    for (const Begun& b : begun) cudaEventDestroy(b.done);
    if (before) cudaEventDestroy(before);
    if (stream) cudaStreamDestroy(stream);
  }
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
    // A short wait is the common one, and sleeping costs more than it.
    for (int looks = 0; !done(); ++looks) {
      if (until.over())
        fail(call,
             "not done within " + std::to_string(until.seconds()) + " s; a peer has died or hangs");
      if (looks > 2000) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  // `state`: cudaErrorNotReady until the device has come so far.
  template <class State>
  void wait_for_device(const char* call, const Until& until, State&& state) {
    wait(call, until, [&] {
      const cudaError_t now = state();
      if (now == cudaErrorNotReady) {
        settled(call);  // or the peer's end shows here
        return false;
      }
      tandem::cuda::check(now, call);
      return true;
    });
  }
  // Puts what `enqueue` calls on the messages' stream, behind this thread's work so far.
  template <class Enqueue>
  std::int64_t begin(const char* call, double timeout_seconds, Enqueue&& enqueue) {
    const Until until(timeout_seconds);
    CHECK_CUDA(cudaEventRecord(before, tandem::cuda::stream()));
    CHECK_CUDA(cudaStreamWaitEvent(stream, before, 0));
    check(ncclGroupStart(), call);
    enqueue();
    check(ncclGroupEnd(), call);
    wait(call, until, [&] { return settled(call); });
    Begun b{++count, nullptr};
    CHECK_CUDA(cudaEventCreateWithFlags(&b.done, cudaEventDisableTiming));
    CHECK_CUDA(cudaEventRecord(b.done, stream));
    begun.push_back(b);
    return b.number;
  }
};

Link& opened(void* link) {
  auto& l = *static_cast<Link*>(link);
  if (!l.comm) throw std::runtime_error("NCCL: this link failed before and must be built anew");
  return l;
}

ncclConfig config_of(bool blocking) {
  return {
      sizeof(ncclConfig), 0xcafebeef, 21700, blocking ? 1 : 0, INT_MIN, INT_MIN, INT_MIN, nullptr};
}

// A communicator that blocks, with its connections made by a first gather.
ncclComm* build_blocking(int device, const ncclUniqueId& id, int rank, int size) {
  CHECK_CUDA(cudaSetDevice(device));
  const auto succeed = [](int result, const char* call) {
    if (result != kSuccess)
      throw std::runtime_error(std::string("NCCL: ") + call + ": " + ncclGetErrorString(result));
  };
  ncclConfig config = config_of(true);
  ncclComm* comm = nullptr;
  succeed(ncclCommInitRankConfig(&comm, size, id, rank, &config), "building the link");
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  void* memory = nullptr;
  constexpr std::size_t kBytesEach = 1024;
  CHECK_CUDA(cudaMalloc(&memory, kBytesEach * static_cast<std::size_t>(size + 1)));
  auto* all = static_cast<char*>(memory) + kBytesEach;
  succeed(ncclAllGather(memory, all, kBytesEach, kBytes, comm, stream), "a first gather");
  CHECK_CUDA(cudaStreamSynchronize(stream));
  CHECK_CUDA(cudaFree(memory));
  CHECK_CUDA(cudaStreamDestroy(stream));
  return comm;
}

}  // namespace

void new_link_id(char* id) {
  ncclUniqueId made;
  const int result = ncclGetUniqueId(&made);
  if (result != kSuccess)
    throw std::runtime_error(std::string("NCCL: ncclGetUniqueId: ") + ncclGetErrorString(result));
  std::memcpy(id, made.internal, sizeof made.internal);
}

void* open_link(const char* id, int rank, int size, double timeout_seconds, bool in_stream) {
  ncclUniqueId told;
  std::memcpy(told.internal, id, sizeof told.internal);
  auto link = std::make_unique<Link>();
  link->rank = rank;
  link->size = size;
  const Until until(timeout_seconds);
  if (in_stream) {
    int device = 0;
    CHECK_CUDA(cudaGetDevice(&device));
    std::packaged_task<ncclComm*()> task([=] { return build_blocking(device, told, rank, size); });
    auto built = task.get_future();
    std::thread(std::move(task)).detach();
    if (built.wait_for(std::chrono::duration<double>(timeout_seconds)) != std::future_status::ready)
      link->fail("building the link", "not done within " + std::to_string(timeout_seconds) + " s");
    link->comm = built.get();
    return link.release();
  }
  ncclConfig config = config_of(false);
  CHECK_CUDA(cudaStreamCreateWithFlags(&link->stream, cudaStreamNonBlocking));
  CHECK_CUDA(cudaEventCreateWithFlags(&link->before, cudaEventDisableTiming));
  link->check(ncclCommInitRankConfig(&link->comm, size, told, rank, &config), "building the link");
  link->wait("building the link", until, [&] { return link->settled("building the link"); });
  return link.release();
}

void close_link(void* link) { delete static_cast<Link*>(link); }

std::int64_t link_exchange(void* link, const LinkPart* sends, std::int64_t num_sends,
                           const LinkPart* receives, std::int64_t num_receives,
                           double timeout_seconds) {
  Link& l = opened(link);
  return l.begin("exchange", timeout_seconds, [&] {
    for (std::int64_t i = 0; i < num_sends; ++i)
      l.check(ncclSend(sends[i].data, static_cast<std::size_t>(sends[i].bytes), kBytes,
                       sends[i].peer, l.comm, l.stream),
              "send");
    for (std::int64_t i = 0; i < num_receives; ++i)
      l.check(ncclRecv(receives[i].data, static_cast<std::size_t>(receives[i].bytes), kBytes,
                       receives[i].peer, l.comm, l.stream),
              "receive");
  });
}

std::int64_t link_broadcast(void* link, const LinkPart* parts, std::int64_t num_parts, int root,
                            double timeout_seconds) {
  Link& l = opened(link);
  return l.begin("broadcast", timeout_seconds, [&] {
    for (std::int64_t i = 0; i < num_parts; ++i)
      l.check(ncclBroadcast(parts[i].data, parts[i].data, static_cast<std::size_t>(parts[i].bytes),
                            kBytes, root, l.comm, l.stream),
              "broadcast");
  });
}

void link_wait(void* link, std::int64_t number, double timeout_seconds) {
  Link& l = opened(link);
  const Until until(timeout_seconds);
  while (!l.begun.empty() && l.begun.front().number <= number) {
    l.wait_for_device("message", until, [&] { return cudaEventQuery(l.begun.front().done); });
    CHECK_CUDA(cudaEventDestroy(l.begun.front().done));
    l.begun.pop_front();
  }
}

void link_all_gather(void* link, const void* mine, void* all, std::int64_t bytes) {
  Link& l = opened(link);
  l.check(ncclAllGather(mine, all, static_cast<std::size_t>(bytes), kBytes, l.comm, stream()),
          "gather");
}

void link_settle(void* link, double timeout_seconds) {
  opened(link).wait_for_device("gather", Until(timeout_seconds),
                               [] { return cudaStreamQuery(tandem::cuda::stream()); });
}

}  // namespace tandem::cuda
