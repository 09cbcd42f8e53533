// The pool against real processes: every call comes back once, the guilty call is the one that
// fails, and nothing takes its neighbours with it.
#include "data/function_pool.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <map>

#include "base/check.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/text.h"

namespace tandem {
namespace {

constexpr const char* kFunctions = R"(
import asyncio, os, time

def act(args, sample):
    if sample.label == "crash":
        os._exit(7)
    if sample.label == "hang":
        time.sleep(600)
    if sample.label.startswith("block"):
        time.sleep(1.0)
        return float(sample.label[5:])
    if sample.label == "once" and not os.path.exists("crashed"):
        open("crashed", "w").close()
        os._exit(9)
    if sample.label == "raise":
        raise ValueError("not today")
    return float(sample.label)

async def act_async(args, sample):
    await asyncio.sleep(0.01)
    return act(args, sample)

async def wait_async(args, sample):
    await asyncio.sleep(float(sample.label))
    return float(sample.label)
)";

class Pool : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("tandem-pool-" + std::to_string(::getpid()) + "-" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directories(folder_);
    write_file_atomic((folder_ / "pool_functions.py").string(), kFunctions);
    outer_ = std::filesystem::current_path();
    std::filesystem::current_path(folder_);  // helpers find modules of the working folder
  }
  void TearDown() override {
    std::filesystem::current_path(outer_);
    std::filesystem::remove_all(folder_);
  }

  FunctionOptions options(const std::string& function, double timeout = 60) {
    PythonPlace place{std::string(TANDEM_SOURCE_DIR) + "/.venv/bin/python",
                      std::string(TANDEM_SOURCE_DIR) + "/python"};
    return {
        .name = "test pool",
        .load_json = fmt::format(R"({{"call":"load","kind":"reward","path":"pool_functions.{}",)"
                                 R"("timeout":{},"arguments":{{"reward_key":null}}}})",
                                 function, timeout),
        .num_processes = 2,
        .calls_per_process = 8,
        .call_timeout_seconds = timeout,
        .place = place,
        .log_path = (folder_ / "log").string()};
  }

  // Submits a call a label and waits for all: "3.5", or the error.
  std::vector<std::string> results(FunctionPool& pool, const std::vector<std::string>& labels) {
    for (std::size_t i = 0; i < labels.size(); ++i)
      pool.submit(i,
                  fmt::format(R"("samples":[{{"label":"{}","status":"completed"}}])", labels[i]));
    std::vector<std::string> out(labels.size());
    std::size_t count = 0;
    const Deadline deadline = Deadline::after(50);  // below the longest sleep of poll
    while (pool.num_open() > 0 && !deadline.expired())
      for (const FunctionResult& r : pool.poll(deadline)) {
        EXPECT_EQ(out[r.id], "") << "call " << r.id << " came back twice";
        out[r.id] = r.ok() ? fmt::format("{}", r.value.at(0).at("reward").get<double>()) : r.error;
        ++count;
      }
    EXPECT_EQ(count, labels.size());
    return out;
  }

  std::filesystem::path folder_, outer_;
};

TEST_F(Pool, ManyCallsComeBackOnce) {
  for (const char* function : {"act", "act_async"}) {
    FunctionPool pool(options(function));
    std::vector<std::string> labels;
    for (int i = 0; i < 40; ++i) labels.push_back(std::to_string(i));
    EXPECT_EQ(results(pool, labels), labels) << function;
    EXPECT_LE(pool.num_starts(), 2);
    EXPECT_EQ(results(pool, {"41"}), std::vector<std::string>{"41"});
  }
}

TEST_F(Pool, ACrashFailsItsOwnCallOnly) {
  for (const char* function : {"act", "act_async"}) {
    FunctionPool pool(options(function));
    const auto out = results(pool, {"1", "crash", "2", "raise", "3", "4"});
    EXPECT_EQ(out[0], "1");
    EXPECT_NE(out[1].find("exited with code 7"), std::string::npos) << out[1];
    EXPECT_EQ(out[2], "2");
    EXPECT_NE(out[3].find("ValueError: not today"), std::string::npos) << out[3];
    EXPECT_EQ(out[4], "3");
    EXPECT_EQ(out[5], "4");
  }
}

TEST_F(Pool, ACrashThatDoesNotComeAgainCostsNothing) {
  auto setup = options("act_async");
  setup.num_processes = 1;
  FunctionPool pool(setup);
  // The label is no number, so the second run raises: the call itself is what failed.
  const auto out = results(pool, {"1", "once", "2"});
  EXPECT_EQ(out[0], "1");
  EXPECT_NE(out[1].find("ValueError"), std::string::npos) << out[1];
  EXPECT_EQ(out[2], "2");
}

TEST_F(Pool, AHangEndsByItsDeadlineAlone) {
  FunctionPool pool(options("act", 3));
  const auto out = results(pool, {"1", "hang", "2", "3"});
  EXPECT_EQ(out[0], "1");
  EXPECT_EQ(out[1], "no result within 3 s");
  EXPECT_EQ(out[2], "2");
  EXPECT_EQ(out[3], "3");
}

// Eight calls of a second each, one after the other: none of them hung, whatever the time-out of one.
TEST_F(Pool, AsyncCallsThatBlockDoNotTimeEachOtherOut) {
  auto setup = options("act_async", 3);
  setup.num_processes = 1;
  FunctionPool pool(setup);
  std::vector<std::string> labels, wanted;
  for (int i = 0; i < 8; ++i) {
    labels.push_back("block" + std::to_string(i));
    wanted.push_back(std::to_string(i));
  }
  EXPECT_EQ(results(pool, labels), wanted);
  EXPECT_EQ(pool.num_starts(), 1);
}

TEST_F(Pool, AnAsyncCallHasItsTimeAlone) {
  auto setup = options("wait_async", 1);
  setup.num_processes = 1;
  FunctionPool pool(setup);
  const auto out = results(pool, {"0", "60", "0.1"});
  EXPECT_EQ(out[0], "0");
  EXPECT_EQ(out[1], "no result within 1 s");
  EXPECT_EQ(out[2], "0.1");
  EXPECT_EQ(pool.num_starts(), 1);
}

TEST_F(Pool, AFunctionThatIsNotThereIsSaidAtOnce) {
  FunctionPool pool(options("nothing"));
  try {
    pool.check();
    FAIL() << "a missing function was loaded";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("no function 'nothing'"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace tandem
