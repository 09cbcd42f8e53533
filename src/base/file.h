// Files: an owned descriptor, whole-file reading, atomic writing, appending with fsync, read-only
// mapping. Every error begins with the path and ends with the system's text.
//
// Atomic writing: a temporary name in the same folder, fsync, rename, fsync of the folder. A reader
// (or a crash at any moment) sees the old content or the new, never a part.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace tandem {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void close();

 private:
  int fd_ = -1;
};

// Both ends of a pipe(2), closed on exec.
struct PipeEnds {
  Fd read;
  Fd write;
};
PipeEnds make_pipe();

std::string read_file(const std::string& path);

// The last `count` lines, reading at most the last 64 KiB; empty if the file cannot be read.
std::string read_last_lines(const std::string& path, std::size_t count);

// Replaces or creates the file; on an error the old file is untouched and no temporary is left.
void write_file_atomic(const std::string& path, std::string_view content);

// The same in two steps, for content that is written in parts: write to path(), then commit().
// Without commit() the temporary is removed.
class AtomicFile {
 public:
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  ~AtomicFile();

  void write(std::string_view part);
  void write(std::span<const std::byte> part);
  void commit();

 private:
  std::string path_;
  std::string temporary_;
  Fd fd_;
};

// Opened for appending, created if absent; append() returns after the bytes are on disk.
class AppendFile {
 public:
  explicit AppendFile(std::string path);
  void append(std::string_view content);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Fd fd_;
};

// A whole file mapped read-only. The view lives as long as the object; moving keeps addresses.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  MappedFile(MappedFile&& other) noexcept
      : path_(std::move(other.path_)),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

bool file_exists(const std::string& path);

// Creates the folder and its parents; no error if it exists.
void create_folders(const std::string& path);

// Why no file can be made in the folder; empty if one can, and it leaves nothing there. Asking for
// permissions is not enough: root has them all, also in /proc.
std::string why_not_writable(const std::string& folder);

// fsync of a folder: makes the names in it durable.
void sync_folder(const std::string& path);

// Gives the folder `temporary` the name `target` in one step; a folder that stood there is
// exchanged with it and removed, so that a crash at any moment leaves a whole folder under the
// name.
void replace_folder(const std::string& temporary, const std::string& target);

// Removes a file or a folder with all in it; what cannot be removed stays.
void remove_tree(const std::string& path);

// A folder that one process at a time works in: an advisory lock on <folder>/.lock, given back by
// the system however the process ends. Throws Error naming `flag` and the folder if another process
// holds it. A file system without locks grants it.
class FolderLock {
 public:
  FolderLock(const std::string& folder, const std::string& flag);

 private:
  Fd fd_;
};

// "<errno text>", thread-safe.
std::string errno_text(int error);

}  // namespace tandem
