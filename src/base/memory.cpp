// See memory.h. Everything is read from /proc and /sys; what cannot be read counts as not known.
#include "base/memory.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>

#include "base/file.h"
#include "base/text.h"

namespace tandem {
namespace {

std::string small_file(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char buffer[8192];
  const ssize_t n = fd ? ::read(fd.get(), buffer, sizeof buffer) : -1;
  return n > 0 ? std::string(buffer, static_cast<std::size_t>(n)) : std::string();
}

// "VmRSS:	    1234 kB" -> bytes.
std::optional<std::int64_t> kilobytes_line(std::string_view text, std::string_view name) {
  for (const std::string_view line : split(text, '\n')) {
    if (!line.starts_with(name) || line.size() <= name.size() || line[name.size()] != ':') continue;
    std::string_view value = trim(line.substr(name.size() + 1));
    if (value.ends_with(" kB")) value.remove_suffix(3);
    if (const auto number = parse_int(trim(value))) return *number * 1024;
  }
  return std::nullopt;
}

}  // namespace

ProcessMemory process_memory(pid_t pid) {
  const std::string text =
      small_file(pid > 0 ? fmt::format("/proc/{}/status", pid) : "/proc/self/status");
  return {.resident_bytes = kilobytes_line(text, "VmRSS").value_or(0),
          .peak_bytes = kilobytes_line(text, "VmHWM").value_or(0)};
}

void reset_peak_memory() {
  const Fd fd(::open("/proc/self/clear_refs", O_WRONLY | O_CLOEXEC));
  if (!fd) return;
  const ssize_t ignored = ::write(fd.get(), "5", 1);
  static_cast<void>(ignored);
}

void keep_free_memory() {
#ifdef __GLIBC__
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  ::mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
#endif
}

void return_free_memory() {
#ifdef __GLIBC__
  ::malloc_trim(0);
#endif
}

std::int64_t available_memory_bytes() {
  std::int64_t available = kilobytes_line(small_file("/proc/meminfo"), "MemAvailable").value_or(0);
  const auto limit = parse_int(trim(small_file("/sys/fs/cgroup/memory.max")));
  const auto used = parse_int(trim(small_file("/sys/fs/cgroup/memory.current")));
  if (limit && used) available = std::min(available, std::max<std::int64_t>(0, *limit - *used));
  return available;
}

}  // namespace tandem
