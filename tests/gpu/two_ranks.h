// For tests of what happens between two ranks on GPUs: the test runs in this process as rank 0 and
// once more in a second process as rank 1, which has the other GPU, or the same one where there is
// one only. They meet in a store.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/check.h"
#include "comm/store.h"
#include "gpu/gpu.h"

namespace tandem {

inline constexpr double kTwoRanksSeconds = 60;
inline constexpr const char* kTestStorePort = "TANDEM_TEST_STORE_PORT";
inline constexpr const char* kTestRanksApart = "TANDEM_TEST_RANKS_APART";

// Whether each rank has a GPU of its own, as NCCL wants it.
inline bool ranks_apart() { return std::getenv(kTestRanksApart) || num_gpus() > 1; }

// body(rank, store).
template <class Body>
void on_two_ranks(Body&& body) {
  if (const char* port = std::getenv(kTestStorePort)) {
    Store store =
        Store::connect("127.0.0.1", static_cast<std::uint16_t>(std::atoi(port)), kTwoRanksSeconds);
    body(1, store);
    return;
  }
  Store store = Store::serve("127.0.0.1", 0, kTwoRanksSeconds);
  const auto* test = testing::UnitTest::GetInstance()->current_test_info();
  const auto gpus = visible_gpus();
  SpawnOptions options{
      .argv = {own_executable(),
               fmt::format("--gtest_filter={}.{}", test->test_suite_name(), test->name())},
      .env = {{"CUDA_VISIBLE_DEVICES", gpus.back()},
              {kTestStorePort, std::to_string(store.port())}}};
  if (gpus.size() > 1) options.env.emplace_back(kTestRanksApart, "1");
  Process other = Process::spawn(options);
  body(0, store);
  const auto exit = other.wait(Deadline::after(kTwoRanksSeconds));
  ASSERT_TRUE(exit.has_value()) << "rank 1 did not end";
  EXPECT_TRUE(exit->ok()) << "rank 1: " << exit->describe();
}

}  // namespace tandem

#define TD_NEED_TWO_GPUS() \
  TD_NEED_GPU();           \
  if (!ranks_apart()) GTEST_SKIP() << "not run: 1 GPU"
