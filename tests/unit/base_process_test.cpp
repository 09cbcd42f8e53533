// Files, framed pipes and child processes against the real system.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/pipe.h"
#include "base/process.h"
#include "base/text.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class TemporaryFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tandem-base-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  std::size_t num_files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  std::string folder_;
};

std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

// Whether a process runs: a zombie does not.
bool runs(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/stat", pid));
  std::string text((std::istreambuf_iterator<char>(status)), {});
  const std::size_t bracket = text.rfind(')');
  return bracket != std::string::npos && bracket + 2 < text.size() && text[bracket + 2] != 'Z';
}

bool gone_within(pid_t pid, double seconds) {
  for (const Deadline deadline = Deadline::after(seconds); !deadline.expired();) {
    if (!runs(pid)) return true;
    ::usleep(5000);
  }
  return false;
}

class BaseFile : public TemporaryFolder {};

TEST_F(BaseFile, AtomicWriteReplacesTheWhole) {
  write_file_atomic(path("a"), "long old content");
  write_file_atomic(path("a"), "new");
  EXPECT_EQ(read_file(path("a")), "new");
  EXPECT_EQ(num_files(), 1u);
}

TEST_F(BaseFile, FailedAtomicWriteLeavesTheOldFileAndNoOther) {
  write_file_atomic(path("a"), "old");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{1 << 16, before.rlim_max};
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  const std::string text =
      error_of([&] { write_file_atomic(path("a"), std::string(1 << 20, 'x')); });
  setrlimit(RLIMIT_FSIZE, &before);
  ::signal(SIGXFSZ, handler);
  EXPECT_NE(text.find(path("a") + ": cannot write: File too large"), std::string::npos) << text;
  EXPECT_EQ(read_file(path("a")), "old");
  EXPECT_EQ(num_files(), 1u);
}

TEST_F(BaseFile, AtomicWriteOverAFolderOrIntoNoneFails) {
  fs::create_directory(path("d"));
  EXPECT_NE(error_of([&] { write_file_atomic(path("d"), "x"); }).find("cannot replace"),
            std::string::npos);
  EXPECT_EQ(num_files(), 1u);
  EXPECT_NE(error_of([&] { write_file_atomic(path("none/a"), "x"); }).find("No such file"),
            std::string::npos);
}

TEST_F(BaseFile, AtomicFileWithoutCommitLeavesNothing) {
  { AtomicFile(path("a")).write("half"); }
  EXPECT_EQ(num_files(), 0u);
}

TEST_F(BaseFile, MapsAppendsAndReadsTails) {
  AppendFile file(path("log"));
  file.append("one\ntwo\n");
  file.append("three\n");
  const MappedFile mapped(path("log"));
  EXPECT_EQ(mapped.text(), "one\ntwo\nthree\n");
  EXPECT_EQ(read_last_lines(path("log"), 2), "two\nthree\n");
  EXPECT_EQ(read_last_lines(path("none"), 2), "");
  write_file_atomic(path("empty"), "");
  EXPECT_EQ(MappedFile(path("empty")).bytes().size(), 0u);
  EXPECT_NE(error_of([&] { MappedFile{path("none")}; }).find("No such file"), std::string::npos);
  EXPECT_NE(error_of([&] { read_file(folder_); }).find("directory"), std::string::npos);
  EXPECT_FALSE(read_file("/proc/self/status").empty());
}

TEST_F(BaseFile, LogLinesCarryTheRoleAndBareLinesDoNot) {
  start_log({.role = "rank 3", .level = LogLevel::info, .console_fd = -1, .file = path("log")});
  TD_LOG(info, "answer {}", 42);
  TD_LOG(debug, "not shown");
  console_line("step 1");
  start_log({});
  const std::string text = read_file(path("log"));
  EXPECT_NE(text.find(" I rank 3: answer 42\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\nstep 1\n"), std::string::npos) << text;
  EXPECT_EQ(text.find("not shown"), std::string::npos);
}

struct PipePair {
  explicit PipePair(std::size_t max_frame = 1 << 20)
      : there(make_pipe()),
        back(make_pipe()),
        a(std::move(back.read), std::move(there.write), "peer b", max_frame),
        b(std::move(there.read), std::move(back.write), "peer a", max_frame) {}
  PipeEnds there, back;
  FramedPipe a, b;
};

TEST(FramedPipe, CarriesFramesOfAllSizes) {
  PipePair pair(8 << 20);
  const std::string big(5 << 20, 'x');  // more than a pipe holds
  std::thread writer([&] {
    for (const std::string& text : {std::string("one"), std::string(), big}) {
      EXPECT_EQ(pair.a.write(text, Deadline::after(20)), PipeState::ok);
    }
  });
  for (const std::string& text : {std::string("one"), std::string(), big}) {
    const Frame frame = pair.b.read(Deadline::after(20));
    ASSERT_TRUE(frame.ok());
    EXPECT_EQ(frame.payload, text);
  }
  writer.join();
}

TEST(FramedPipe, TimeOutKeepsWhatCame) {
  PipeEnds ends = make_pipe();
  FramedPipe pipe(std::move(ends.read), Fd(), "slow helper");
  write_bytes(ends.write.get(), std::string_view("\5\0\0\0he", 6), Deadline::after(1));
  const Frame first = pipe.read(Deadline::after(0.05));
  EXPECT_EQ(first.state, PipeState::timed_out);
  EXPECT_EQ(pipe.describe(first.state), "slow helper: no answer within 50 ms");
  write_bytes(ends.write.get(), "llo", Deadline::after(1));
  EXPECT_EQ(pipe.read(Deadline::after(5)).payload, "hello");
}

TEST(FramedPipe, TellsEndFromTimeOutAndNamesThePeer) {
  PipeEnds ends = make_pipe();
  FramedPipe pipe(std::move(ends.read), Fd(), "helper (pid 7)");
  write_bytes(ends.write.get(), std::string_view("\5\0\0\0he", 6), Deadline::after(1));
  ends.write.close();
  const Frame frame = pipe.read(Deadline::after(5));
  EXPECT_EQ(frame.state, PipeState::closed);
  EXPECT_EQ(pipe.describe(frame.state),
            "helper (pid 7): closed its pipe in the middle of a frame (6 of 9 bytes)");
}

TEST(FramedPipe, WriterSeesAClosedReaderWithoutASignal) {
  PipeEnds ends = make_pipe();
  FramedPipe pipe(Fd(), std::move(ends.write), "helper");
  ends.read.close();
  EXPECT_EQ(pipe.write("x", Deadline::after(1)), PipeState::closed);
}

TEST(FramedPipe, WriterTimesOutOnAReaderThatSleeps) {
  PipeEnds ends = make_pipe();
  FramedPipe pipe(Fd(), std::move(ends.write), "helper");
  EXPECT_EQ(pipe.write(std::string(1 << 20, 'x'), Deadline::after(0.05)), PipeState::timed_out);
  EXPECT_EQ(pipe.write("y", Deadline::after(1)), PipeState::closed);  // half a frame is out
}

TEST(FramedPipe, RefusesALengthThatIsNone) {
  PipeEnds ends = make_pipe();
  FramedPipe pipe(std::move(ends.read), Fd(), "reward helper", 1 << 20);
  write_bytes(ends.write.get(), "print('debug')\n", Deadline::after(1));
  const std::string text = error_of([&] { pipe.read(Deadline::after(1)); });
  EXPECT_NE(text.find("reward helper"), std::string::npos);
  EXPECT_NE(text.find("did it print on its standard output?"), std::string::npos) << text;
}

TEST(Process, PipesEnvironmentAndExitCode) {
  SpawnOptions options;
  options.argv = {"sh", "-c", "read line; echo \"$line $EXTRA\"; exit 3"};
  options.env = {{"EXTRA", "more"}};
  options.in = options.out = Stream::pipe;
  Process process = Process::spawn(options);
  write_bytes(process.in().get(), "hello\n", Deadline::after(5));
  std::string line;
  EXPECT_EQ(read_line(process.out().get(), line, 100, Deadline::after(10)), PipeState::ok);
  EXPECT_EQ(line, "hello more");
  const auto exit = process.wait(Deadline::after(10));
  ASSERT_TRUE(exit.has_value());
  EXPECT_EQ(exit->describe(), "exited with code 3");
}

TEST(Process, SpawnReportsAProgramThatCannotStart) {
  EXPECT_NE(error_of([] {
              Process::spawn({.argv = {"/no/such/program"}});
            }).find("/no/such/program: cannot start: No such file"),
            std::string::npos);
  EXPECT_NE(error_of([] { Process::spawn({.argv = {"no-such-program-at-all"}}); }).find("in PATH"),
            std::string::npos);
  EXPECT_NE(error_of([] {
              Process::spawn({.argv = {"true"}, .folder = "/no/such"});
            }).find("/no/such: cannot start true in this folder"),
            std::string::npos);
}

TEST(Process, ChildInheritsOnlyWhatIsNamed) {
  const PipeEnds leaked = make_pipe();
  const int open_on_exec = ::dup(leaked.write.get());  // without close-on-exec
  PipeEnds given = make_pipe();
  SpawnOptions options;
  options.argv = {"sh", "-c", "ls /proc/self/fd | tr '\\n' ' '; echo x >&7"};
  options.out = Stream::pipe;
  options.pass_fds = {{given.write.get(), 7}};
  Process process = Process::spawn(options);
  std::string line;
  EXPECT_EQ(read_line(given.read.get(), line, 10, Deadline::after(10)), PipeState::ok);
  ASSERT_TRUE(process.wait(Deadline::after(10)).has_value());
  char buffer[200] = {};
  ASSERT_GT(::read(process.out().get(), buffer, sizeof buffer - 1), 0);
  ::close(open_on_exec);
  EXPECT_EQ(trim(buffer), "0 1 2 3 7");  // 3 is ls reading the folder
}

TEST(Process, TerminateKillsTheGroupWithItsStubbornChildren) {
  SpawnOptions options;
  options.argv = {"sh", "-c", "trap '' TERM; sleep 300 & echo $!; wait; sleep 300"};
  options.out = Stream::pipe;
  Process process = Process::spawn(options);
  std::string line;
  ASSERT_EQ(read_line(process.out().get(), line, 100, Deadline::after(10)), PipeState::ok);
  const pid_t grandchild = static_cast<pid_t>(*parse_int(line));
  EXPECT_TRUE(runs(grandchild));
  EXPECT_FALSE(process.try_wait().has_value());
  EXPECT_EQ(process.terminate(0.2).describe(), "killed by signal 9 (Killed)");
  EXPECT_TRUE(gone_within(grandchild, 10));
}

TEST(Process, TerminateLetsAWillingChildEnd) {
  SpawnOptions options;
  options.argv = {"sh", "-c", "trap 'exit 5' TERM; echo up; while :; do sleep 0.05; done"};
  options.out = Stream::pipe;
  Process process = Process::spawn(options);
  std::string line;
  ASSERT_EQ(read_line(process.out().get(), line, 100, Deadline::after(10)), PipeState::ok);
  EXPECT_EQ(process.terminate(20).describe(), "exited with code 5");
}

TEST(Process, DestructorEndsTheChildAndItsOrphans) {
  pid_t child = 0, grandchild = 0;
  {
    SpawnOptions options;
    options.argv = {"sh", "-c", "sleep 300 & echo $!; wait"};
    options.out = Stream::pipe;
    const Process started = Process::spawn({.argv = {"true"}});
    Process process = Process::spawn(options);
    child = process.pid();
    std::string line;
    ASSERT_EQ(read_line(process.out().get(), line, 100, Deadline::after(10)), PipeState::ok);
    grandchild = static_cast<pid_t>(*parse_int(line));
  }
  EXPECT_FALSE(runs(child));
  EXPECT_TRUE(gone_within(grandchild, 10));
}

TEST(Process, OrphansOfALeaderThatEndedAreKilled) {
  SpawnOptions options;
  options.argv = {"sh", "-c", "sleep 300 & echo $!"};
  options.out = Stream::pipe;
  Process process = Process::spawn(options);
  std::string line;
  ASSERT_EQ(read_line(process.out().get(), line, 100, Deadline::after(10)), PipeState::ok);
  const auto exit = process.wait(Deadline::after(10));
  ASSERT_TRUE(exit.has_value());
  EXPECT_TRUE(exit->ok());
  EXPECT_TRUE(gone_within(static_cast<pid_t>(*parse_int(line)), 10));
}

TEST_F(BaseFile, ChildOutputGoesToTheLog) {
  SpawnOptions options;
  options.argv = {"sh", "-c", "echo out; echo err >&2; kill -SEGV $$"};
  options.out = options.err = Stream::log;
  options.log_path = path("child.log");
  Process process = Process::spawn(options);
  EXPECT_EQ(process.wait(Deadline::after(10))->describe(),
            "killed by signal 11 (Segmentation fault)");
  EXPECT_EQ(read_file(path("child.log")), "out\nerr\n");
}

TEST(Deadline, SharesOneBudget) {
  const Deadline whole = Deadline::after(100);
  EXPECT_NEAR(whole.within(1).remaining(), 1, 0.5);
  EXPECT_NEAR(whole.within(1000).remaining(), 100, 0.5);
  EXPECT_TRUE(Deadline::after(0).expired());
  EXPECT_EQ(Deadline::after(-1).poll_milliseconds(), 0);
  EXPECT_GE(Deadline::after(0.0005).poll_milliseconds(), 1);
}

}  // namespace
}  // namespace tandem
