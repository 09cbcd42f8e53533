// See file.h.
#include "base/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/check.h"
#include "base/text.h"

namespace tandem {
namespace {

[[noreturn]] void fail(const std::string& path, const char* what, int error) {
  throw Error(fmt::format("{}: cannot {}: {}", path, what, errno_text(error)));
}

Fd open_file(const std::string& path, int flags, const char* what) {
  Fd fd(::open(path.c_str(), flags | O_CLOEXEC, 0644));
  if (!fd) fail(path, what, errno);
  return fd;
}

void write_all(int fd, std::string_view content, const std::string& path) {
  while (!content.empty()) {
    const ssize_t n = ::write(fd, content.data(), std::min<std::size_t>(content.size(), 1 << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, "write", errno);
    content.remove_prefix(static_cast<std::size_t>(n));
  }
}

std::size_t file_bytes(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) fail(path, "read its size", errno);
  if (S_ISDIR(status.st_mode)) fail(path, "read", EISDIR);
  return static_cast<std::size_t>(status.st_size);
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

void Fd::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

PipeEnds make_pipe() {
  int ends[2];
  TD_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "cannot make a pipe: {}; raise 'ulimit -n'",
           errno_text(errno));
  return {Fd(ends[0]), Fd(ends[1])};
}

std::string errno_text(int error) { return std::generic_category().message(error); }

std::string read_file(const std::string& path) {
  const Fd fd = open_file(path, O_RDONLY, "open for reading");
  std::string content;
  // The size is a hint only: files under /proc say 0, a growing file says too little.
  content.resize(file_bytes(fd.get(), path) + 1);
  std::size_t size = 0;
  for (;;) {
    const ssize_t n = ::read(fd.get(), content.data() + size, content.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path, "read", errno);
    if (n == 0) break;
    size += static_cast<std::size_t>(n);
    if (size == content.size()) content.resize(size * 2);
  }
  content.resize(size);
  return content;
}

std::string read_last_lines(const std::string& path, std::size_t count) {
  constexpr off_t kTailBytes = 64 << 10;
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return {};
  const off_t end = ::lseek(fd.get(), 0, SEEK_END);
  const off_t begin = std::max<off_t>(0, end - kTailBytes);
  std::string tail(static_cast<std::size_t>(std::max<off_t>(0, end - begin)), '\0');
  const ssize_t n = ::pread(fd.get(), tail.data(), tail.size(), begin);
  tail.resize(static_cast<std::size_t>(std::max<ssize_t>(0, n)));
  return std::string(last_lines(tail, count));
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  static std::atomic<unsigned> counter{0};
  temporary_ = fmt::format("{}.{}.{}.tmp", path_, ::getpid(), counter++);
  fd_ = Fd(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!fd_) fail(path_, "create a file beside it", errno);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view part) { write_all(fd_.get(), part, path_); }

void AtomicFile::write(std::span<const std::byte> part) {
  write(std::string_view(reinterpret_cast<const char*>(part.data()), part.size()));
}

void AtomicFile::commit() {
  if (::fsync(fd_.get()) != 0) fail(path_, "bring to disk", errno);
  fd_.close();
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail(path_, "replace", errno);
  temporary_.clear();
  sync_folder(folder_of(path_));
}

void write_file_atomic(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

AppendFile::AppendFile(std::string path)
    : path_(std::move(path)),
      fd_(open_file(path_, O_WRONLY | O_CREAT | O_APPEND, "open for appending")) {}

void AppendFile::append(std::string_view content) {
  write_all(fd_.get(), content, path_);
  // A pipe or a terminal has nothing to bring to disk (EINVAL).
  if (::fsync(fd_.get()) != 0 && errno != EINVAL) fail(path_, "bring to disk", errno);
}

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const Fd fd = open_file(path, O_RDONLY, "open for reading");
  size_ = file_bytes(fd.get(), path);
  if (size_ == 0) return;  // mmap refuses a length of 0
  void* address = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) fail(path, "map into memory", errno);
  data_ = static_cast<const std::byte*>(address);
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

bool file_exists(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

void create_folders(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail(path, "create the folder", error.value());
}

std::string why_not_writable(const std::string& folder) {
  std::string name = folder + "/.tandem-XXXXXX";
  const Fd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd) return errno_text(errno);
  ::unlink(name.c_str());
  return "";
}

void sync_folder(const std::string& path) {
  const Fd fd = open_file(path, O_RDONLY | O_DIRECTORY, "open the folder");
  // Some network file systems cannot sync folders (EINVAL) and order names by themselves.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) fail(path, "bring the folder to disk", errno);
}

void remove_tree(const std::string& path) {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

void replace_folder(const std::string& temporary, const std::string& target) {
  if (!file_exists(target)) {
    TD_CHECK(::rename(temporary.c_str(), target.c_str()) == 0, "{}: cannot rename {}: {}", target,
             temporary, errno_text(errno));
  } else if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) !=
             0) {
    // A file system without exchange: the name is absent for the moment between two renames.
    TD_CHECK(errno == EINVAL || errno == ENOSYS, "{}: cannot exchange with {}: {}", target,
             temporary, errno_text(errno));
    const std::string old = target + ".old";
    remove_tree(old);
    TD_CHECK(::rename(target.c_str(), old.c_str()) == 0 &&
                 ::rename(temporary.c_str(), target.c_str()) == 0,
             "{}: cannot replace it by {}: {}", target, temporary, errno_text(errno));
    remove_tree(old);
  }
  sync_folder(folder_of(target));
  remove_tree(temporary);
}

FolderLock::FolderLock(const std::string& folder, const std::string& flag)
    : fd_(open_file(folder + "/.lock", O_RDWR | O_CREAT, "open its lock")) {
  if (::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0) return;
  TD_CHECK(errno != EWOULDBLOCK,
           "{}: another run works in {}; wait for its end, or name another folder", flag, folder);
}

}  // namespace tandem
