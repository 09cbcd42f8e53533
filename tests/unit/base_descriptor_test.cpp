// Passing descriptors: the taker reads and writes the giver's file, as often as it asks; a giver
// that is gone gives nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <optional>

#include "base/descriptor_passing.h"

namespace tandem {
namespace {

TEST(DescriptorPassing, TakersShareTheFileAndLearnTheNumber) {
  Fd file(::memfd_create("descriptor-test", MFD_CLOEXEC));
  ASSERT_EQ(::pwrite(file.get(), "weights", 7, 0), 7);
  std::optional<DescriptorServer> server(std::in_place, std::move(file), 1234567890123);
  for (int i = 0; i < 3; ++i) {
    const TakenDescriptor taken = take_descriptor(server->name(), Deadline::after(5));
    ASSERT_TRUE(taken.descriptor);
    EXPECT_EQ(taken.number, 1234567890123);
    char text[8] = {};
    ASSERT_EQ(::pread(taken.descriptor.get(), text, 7, 0), 7);
    EXPECT_STREQ(text, i == 0 ? "weights" : "Weights");
    ASSERT_EQ(::pwrite(taken.descriptor.get(), "W", 1, 0), 1);
  }
  const std::string name = server->name();
  server.reset();
  EXPECT_FALSE(take_descriptor(name, Deadline::after(1)).descriptor);
  EXPECT_FALSE(take_descriptor("-", Deadline::after(1)).descriptor);
}

}  // namespace
}  // namespace tandem
