// Everything of torch's c10d that Tandem uses, and the one place where its exceptions become ours.
// Included by comm's own .cpp files only. Of gloo nothing is named here but what ProcessGroupGloo's
// own interface carries: Debian's gloo headers are older than the gloo inside the torch wheel, so
// they serve for compiling alone, and a test looks for gloo symbols that would slip into td_comm.
#pragma once

#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"

namespace tandem {

// Runs a c10d call; what it throws becomes an Error "<what>: <first line of c10d's text>".
template <typename Call>
auto call_c10d(const std::string& what, Call&& call) {
  try {
    return call();
  } catch (const std::exception& error) {
    const std::string_view text = error.what();
    throw Error(fmt::format("{}: {}", what, text.substr(0, text.find('\n'))));
  }
}

// c10's own pointer inside a std::shared_ptr, so that headers need only a forward declaration.
template <typename T>
std::shared_ptr<T> share(c10::intrusive_ptr<T> pointer) {
  T* raw = pointer.get();
  return std::shared_ptr<T>(raw, [held = std::move(pointer)](T*) mutable { held.reset(); });
}

template <typename T>
c10::intrusive_ptr<T> unshare(const std::shared_ptr<T>& pointer) {
  return c10::intrusive_ptr<T>::reclaim_copy(pointer.get());
}

// c10d also writes what it throws, with stack traces, to standard error. The Error carries the text
// to whoever can act on it, so only what ends the process is still written. Called before c10d is
// used.
inline void quiet_c10d_log() { FLAGS_caffe2_log_level = 3; }

inline std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(
      std::max<std::int64_t>(1, static_cast<std::int64_t>(seconds * 1e3)));
}

}  // namespace tandem
