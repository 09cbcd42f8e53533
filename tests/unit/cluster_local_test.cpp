// Real processes: shell scripts in the part of ranks, and a forked process that watches a lifeline.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "base/check.h"
#include "base/file.h"
#include "base/pipe.h"
#include "base/process.h"
#include "base/text.h"
#include "cluster/cluster.h"
#include "cluster/lifeline.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

bool runs(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/stat", pid));
  const std::string text((std::istreambuf_iterator<char>(status)), {});
  const std::size_t bracket = text.rfind(')');
  return bracket != std::string::npos && bracket + 2 < text.size() && text[bracket + 2] != 'Z';
}

bool gone_within(pid_t pid, double seconds) {
  for (const Deadline deadline = Deadline::after(seconds); !deadline.expired(); ::usleep(5000)) {
    if (!runs(pid)) return true;
  }
  return false;
}

class LocalCluster : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tandem-cluster-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    cluster_ = make_local_cluster(folder_);
  }
  void TearDown() override {
    cluster_.reset();
    fs::remove_all(folder_);
  }

  // `script` sees --announce-fd 3 --lifeline-fd 4 as its arguments.
  RankHandle start(int rank, const std::string& script) {
    return cluster_->start({.rank = rank,
                            .argv = {"sh", "-c", script, "rank"},
                            .token = "secret",
                            .config = "{\"lr\": 1}\n"});
  }

  std::string folder_;
  std::unique_ptr<Cluster> cluster_;
};

constexpr const char* kServe =
    "echo \"args $*\"; read token; read config; echo \"$token $config\";"
    "echo 'ready {\"port\": 1234, \"device\": \"cpu\"}' >&3; exec 3>&-; ";

TEST_F(LocalCluster, RankGetsItsInputAndAnnouncesItself) {
  start(0, std::string(kServe) + "read gone <&4; echo 'lifeline ended'");
  const auto ready = cluster_->wait_ready(Deadline::after(20));
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].address.url("/x"), "http://127.0.0.1:1234/x");
  EXPECT_EQ(ready[0].address.token, "secret");
  EXPECT_EQ(ready[0].announcement.at("device"), "cpu");
  EXPECT_EQ(read_file(folder_ + "/logs/rank_0.log"),
            "args --announce-fd 3 --lifeline-fd 4\nsecret {\"lr\": 1}\n");
  EXPECT_TRUE(cluster_->deaths(Deadline::after(0.05)).empty());
  cluster_->stop(Deadline::after(20));
  EXPECT_FALSE(runs(ready[0].pid));
  // It went by its lifeline, not by a signal.
  EXPECT_EQ(read_last_lines(folder_ + "/logs/rank_0.log", 1), "lifeline ended\n");
}

TEST_F(LocalCluster, DeathIsSeenOnceWithItsLastLines) {
  const RankHandle handle =
      start(0, std::string("echo 'arena: out of memory'; ") + kServe + "sleep 300");
  cluster_->wait_ready(Deadline::after(20));
  ASSERT_EQ(::kill(handle.pid, SIGKILL), 0);
  const auto deaths = cluster_->deaths(Deadline::after(20));
  ASSERT_EQ(deaths.size(), 1u);
  EXPECT_EQ(deaths[0].exit.signal, SIGKILL);
  EXPECT_TRUE(deaths[0].text.starts_with(
      fmt::format("rank 0 (pid {} on localhost): killed by signal 9 (Killed)", handle.pid)))
      << deaths[0].text;
  EXPECT_NE(deaths[0].text.find("\n  | arena: out of memory\n"), std::string::npos)
      << deaths[0].text;
  EXPECT_TRUE(cluster_->deaths(Deadline::after(0)).empty());
}

TEST_F(LocalCluster, WaitReadyEndsAtTheFirstDeath) {
  start(0, "sleep 300");
  start(1, "echo 'model folder: no config.json' >&2; exit 2");
  const Deadline deadline = Deadline::after(60);
  const std::string text = error_of([&] { cluster_->wait_ready(deadline); });
  EXPECT_FALSE(deadline.expired());
  EXPECT_NE(text.find("rank 1 (pid "), std::string::npos) << text;
  EXPECT_NE(text.find("exited with code 2"), std::string::npos) << text;
  EXPECT_NE(text.find("| model folder: no config.json"), std::string::npos) << text;
}

TEST_F(LocalCluster, WaitReadyNamesWhoIsMissing) {
  start(0, std::string(kServe) + "sleep 300");
  start(1, "sleep 300");
  const std::string text = error_of([&] { cluster_->wait_ready(Deadline::after(1)); });
  EXPECT_TRUE(text.starts_with("rank 1 (pid ")) << text;
  EXPECT_NE(text.find("not ready within 1.0 s"), std::string::npos) << text;
}

TEST_F(LocalCluster, RefusesAnAnnouncementThatIsNone) {
  start(0, "echo 'hello' >&3; sleep 300");
  EXPECT_NE(error_of([&] {
              cluster_->wait_ready(Deadline::after(20));
            }).find("announced 'hello', wanted 'ready {…}'"),
            std::string::npos);
}

TEST_F(LocalCluster, StopEndsTheStubborn) {
  const RankHandle stubborn =
      start(0, std::string("trap '' TERM; ") + kServe + "sleep 300; sleep 300");
  cluster_->wait_ready(Deadline::after(20));
  cluster_->stop(Deadline::after(0.1));
  EXPECT_FALSE(runs(stubborn.pid));
}

TEST_F(LocalCluster, NothingIsLeftWhenTheClusterGoes) {
  const RankHandle handle = start(0, std::string(kServe) + "sleep 300");
  cluster_->wait_ready(Deadline::after(20));
  cluster_.reset();
  EXPECT_FALSE(runs(handle.pid));
}

TEST_F(LocalCluster, AProgramThatCannotStartIsAnError) {
  EXPECT_NE(error_of([&] {
              cluster_->start({.argv = {"/no/such/tandem", "rank"}});
            }).find("/no/such/tandem: cannot start"),
            std::string::npos);
}

// The driver's end closes: the rank goes, and with it a child in a group of its own and one in
// ours.
TEST(Lifeline, EndTakesTheProcessAndItsChildren) {
  PipeEnds lifeline = make_pipe();
  PipeEnds report = make_pipe();
  const pid_t rank = ::fork();
  ASSERT_GE(rank, 0);
  if (rank == 0) {
    lifeline.write.close();
    // die_with_parent off: it is the lifeline that has to end them.
    SpawnOptions options;
    options.argv = {"sleep", "300"};
    options.die_with_parent = false;
    const Process own_group = Process::spawn(options);
    const pid_t same_group = ::fork();
    if (same_group == 0) {
      ::execlp("sleep", "sleep", "300", nullptr);
      ::_exit(1);
    }
    lifeline_watch(lifeline.read.get());
    write_bytes(report.write.get(), fmt::format("{} {}\n", own_group.pid(), same_group),
                Deadline::after(10));
    ::sleep(100);
    ::_exit(0);
  }
  lifeline.read.close();
  report.write.close();
  std::string line;
  ASSERT_EQ(read_line(report.read.get(), line, 100, Deadline::after(20)), PipeState::ok);
  const auto pids = split(line, ' ');
  ASSERT_EQ(pids.size(), 2u);
  std::vector<pid_t> children;
  for (const auto text : pids) children.push_back(static_cast<pid_t>(*parse_int(text)));
  for (const pid_t child : children) EXPECT_TRUE(runs(child));

  lifeline.write.close();
  EXPECT_TRUE(gone_within(rank, 10));
  int status = 0;
  ASSERT_EQ(::waitpid(rank, &status, 0), rank);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), kLifelineExitCode);
  for (const pid_t child : children) EXPECT_TRUE(gone_within(child, 10));
}

TEST(RankInputText, IsTokenThenConfigToTheEnd) {
  PipeEnds ends = make_pipe();
  write_bytes(ends.write.get(), "secret\n{\n  \"lr\": 1\n}\n", Deadline::after(1));
  EXPECT_NE(error_of([&] {
              read_rank_input(ends.read.get(), Deadline::after(0.05));
            }).find("waiting for the driver to send the config"),
            std::string::npos);
  write_bytes(ends.write.get(), "secret\nconfig\nmore", Deadline::after(1));
  ends.write.close();
  const RankInput input = read_rank_input(ends.read.get(), Deadline::after(5));
  EXPECT_EQ(input.token, "secret");
  EXPECT_EQ(input.config, "config\nmore");
  PipeEnds empty = make_pipe();
  empty.write.close();
  EXPECT_NE(error_of([&] {
              read_rank_input(empty.read.get(), Deadline::after(5));
            }).find("started by the driver"),
            std::string::npos);
}

TEST(Announcement, IsOneLine) {
  PipeEnds ends = make_pipe();
  announce_ready(ends.write.release(), Json{{"port", 5}});
  std::string line;
  EXPECT_EQ(read_line(ends.read.get(), line, 100, Deadline::after(5)), PipeState::ok);
  EXPECT_EQ(line, "ready {\"port\":5}");
  EXPECT_EQ(read_line(ends.read.get(), line, 100, Deadline::after(5)), PipeState::closed);
}

}  // namespace
}  // namespace tandem
