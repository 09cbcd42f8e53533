// Passing an open file descriptor to other processes of the same user on this host, which is how
// they come to memory that has no name. One thread answers each process that connects with the
// descriptor and a number, until the object goes.
#pragma once

#include <cstdint>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/file.h"

namespace tandem {

class DescriptorServer {
 public:
  // Error if no socket can be had.
  DescriptorServer(Fd descriptor, std::int64_t number);
  ~DescriptorServer();
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;
  // Under which take_descriptor finds it.
  const std::string& name() const { return name_; }

 private:
  void serve() const;

  Fd descriptor_, listener_, stop_read_, stop_write_;
  std::int64_t number_;
  std::string name_;
  std::thread thread_;
};

struct TakenDescriptor {
  Fd descriptor;
  std::int64_t number = 0;
};
// No descriptor if nobody answers within the deadline, or not with one.
TakenDescriptor take_descriptor(const std::string& name, Deadline deadline);

}  // namespace tandem
