// Checkpoints on disk: any number of ranks reads what any number wrote (case C58), damage is named,
// the pointer never moves to something that is not whole (C57, a process killed while it saves),
// and no other checkpoint than the one asked for is taken in silence (C56).
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/check.h"
#include "base/clock.h"
#include "checkpoint/checkpoints.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// One file of pieces of one vector.
ShardFile write_pieces(const std::string& folder, int rank, int size,
                       const std::vector<ShardPiece>& pieces, const std::vector<float>& values) {
  return write_shard(folder, rank, size, pieces,
                     [&](std::size_t piece, std::int64_t begin, std::span<float> out) {
                       const auto at = values.begin() + pieces[piece].offset + begin;
                       std::copy(at, at + static_cast<std::ptrdiff_t>(out.size()), out.begin());
                     });
}

class SavedTest : public ::testing::Test {
 public:  // the cases of a table spoil what a test has saved
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "saved-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  // A checkpoint of one tensor [elements] of `value`.
  void save(std::int64_t id, float value, std::size_t elements = 1000) {
    CheckpointWriter writer(root_, id);
    const std::vector<float> values(elements, value);
    const auto count = static_cast<std::int64_t>(elements);
    CheckpointState state{.rollout_id = id, .optimizer_steps = id + 1, .files = {}, .run = {}};
    state.run["note"] = "kept";
    state.files = {write_pieces(writer.folder(), 0, 1, {{"master.x", {count}, 0, count}}, values)};
    writer.commit(state);
  }
  std::string file(std::int64_t id, const std::string& name = "rank_00000_of_00001.safetensors") {
    return checkpoint_folder(root_, id) + "/" + name;
  }
  std::string pointer() const { return root_ + "/latest_checkpointed_iteration.txt"; }
  std::string find_error(std::optional<std::int64_t> step = {}) {
    try {
      find_checkpoint(root_, step);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  void write(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  std::string root_;
};

::testing::AssertionResult holds(const std::string& text,
                                 std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    if (text.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
  return ::testing::AssertionSuccess();
}

// Rows [2, 2, 2, 0] of six on four ranks, and cuts that lie inside rows, read in any other cut.
TEST_F(SavedTest, AnyNumberOfRanksReadsWhatAnyNumberWrote) {
  const std::vector<std::int64_t> shape{6, 3};
  std::vector<float> values(18);
  std::iota(values.begin(), values.end(), 1.0f);
  const std::vector<std::vector<std::int64_t>> cuts = {
      {0, 18}, {0, 9, 18}, {0, 6, 12, 18}, {0, 6, 12, 18, 18}, {0, 1, 2, 5, 7, 11, 13, 17, 18},
  };
  for (const auto& written : cuts) {
    const std::string folder = root_ + "/" + std::to_string(written.size());
    fs::create_directory(folder);
    std::vector<ShardFile> files;
    const int size = static_cast<int>(written.size()) - 1;
    for (int r = 0; r < size; ++r) {
      std::vector<ShardPiece> pieces;
      if (written[r] < written[r + 1])
        pieces.push_back({"w", shape, written[r], written[r + 1] - written[r]});
      files.push_back(write_pieces(folder, r, size, pieces, values));
      EXPECT_EQ(shard_fault(folder, files.back()), "");
    }
    const ShardReader reader(folder, files);
    EXPECT_TRUE(reader.damage().empty());
    for (const auto& read : cuts)
      for (std::size_t r = 0; r + 1 < read.size(); ++r) {
        std::vector<float> out(static_cast<std::size_t>(read[r + 1] - read[r]));
        reader.read("w", shape, read[r], out);
        for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], values[read[r] + i]);
      }
  }
}

TEST_F(SavedTest, WhatDoesNotFitTheModelIsRefused) {
  save(3, 1.0f);
  const CheckpointState state = read_checkpoint(checkpoint_folder(root_, 3));
  EXPECT_EQ(state.optimizer_steps, 4);
  EXPECT_EQ(state.run["note"], "kept");
  const ShardReader reader(checkpoint_folder(root_, 3), state.files);
  std::vector<float> out(4);
  const std::vector<std::int64_t> right{1000}, wrong{10, 100};
  reader.read("master.x", right, 996, out);
  EXPECT_THROW(reader.read("master.y", right, 0, out), Error);
  EXPECT_THROW(reader.read("master.x", wrong, 0, out), Error);
  EXPECT_THROW(reader.read("master.x", right, 998, out), Error);
}

TEST_F(SavedTest, ThePointerDecides) {
  EXPECT_EQ(find_checkpoint(root_, {}), std::nullopt);
  {
    const CheckpointWriter killed(root_, 1);
    EXPECT_EQ(read_file(pointer()), "none");
    EXPECT_EQ(find_checkpoint(root_, {}), std::nullopt);
  }
  save(1, 1.0f);
  save(3, 3.0f);
  EXPECT_EQ(find_checkpoint(root_, {}), 3);
  EXPECT_EQ(find_checkpoint(root_, 1), 1);
  EXPECT_EQ(read_file(pointer()), "3");
  write(pointer(), "1\n");
  EXPECT_EQ(find_checkpoint(root_, {}), 1);
  EXPECT_TRUE(holds(find_error(2), {"--ckpt-step", "iter_0000002", "no such folder",
                                    "iter_0000003: --ckpt-step 3"}));
}

// Each way to lose the newest: an error that names it, the newest whole one and the flag.
TEST_F(SavedTest, WhatIsNotWholeIsNamedWithTheWayToAnOlderOne) {
  struct Case {
    const char* name;
    void (*spoil)(SavedTest&);
    std::initializer_list<const char*> parts;
  };
  const Case cases[] = {
      {"no pointer",
       [](SavedTest& t) { fs::remove(t.pointer()); },
       {"latest_checkpointed_iteration.txt: missing", "--ckpt-step 5"}},
      {"pointer of letters",
       [](SavedTest& t) { t.write(t.pointer(), "abc"); },
       {"latest_checkpointed_iteration.txt: 'abc' found", "--ckpt-step 5"}},
      {"empty pointer",
       [](SavedTest& t) { t.write(t.pointer(), ""); },
       {"latest_checkpointed_iteration.txt: '' found", "--ckpt-step 5"}},
      {"no folder",
       [](SavedTest& t) { fs::remove_all(checkpoint_folder(t.root_, 5)); },
       {"iter_0000005: no such folder", "--ckpt-step 3"}},
      {"no state",
       [](SavedTest& t) { fs::remove(t.file(5, "state.json")); },
       {"iter_0000005/state.json: missing", "--ckpt-step 3"}},
      {"empty state",
       [](SavedTest& t) { t.write(t.file(5, "state.json"), ""); },
       {"iter_0000005/state.json: the file is empty", "--ckpt-step 3"}},
      {"state of another form",
       [](SavedTest& t) { t.write(t.file(5, "state.json"), "{}"); },
       {"iter_0000005/state.json", "format", "--ckpt-step 3"}},
      {"half a state",
       [](SavedTest& t) { fs::resize_file(t.file(5, "state.json"), 40); },
       {"iter_0000005/state.json", "JSON", "--ckpt-step 3"}},
      {"no tensors",
       [](SavedTest& t) { fs::remove(t.file(5)); },
       {"iter_0000005/rank_00000_of_00001.safetensors: missing", "--ckpt-step 3"}},
      {"empty tensors",
       [](SavedTest& t) { t.write(t.file(5), ""); },
       {"rank_00000_of_00001.safetensors: 0 bytes found", "empty", "--ckpt-step 3"}},
      {"half the tensors",
       [](SavedTest& t) { fs::resize_file(t.file(5), 2000); },
       {"rank_00000_of_00001.safetensors: 2000 bytes found", "--ckpt-step 3"}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    fs::remove_all(root_);
    save(3, 3.0f);
    save(5, 5.0f);
    c.spoil(*this);
    EXPECT_TRUE(holds(find_error(), c.parts));
    EXPECT_EQ(find_checkpoint(root_, 3), 3);  // with the flag, the older one
  }
}

TEST_F(SavedTest, AFlippedBitIsFoundWhereverItLies) {
  save(3, 3.0f);
  save(5, 5.0f);
  const auto size = static_cast<std::size_t>(fs::file_size(file(5)));
  const std::string good = read_file(file(5));
  for (const std::size_t at : {std::size_t{20}, size - 3000, size - 1}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    write(file(5), bad);
    const auto faults = checkpoint_faults(checkpoint_folder(root_, 5), Look::at_all_bytes);
    ASSERT_EQ(faults.size(), 1u) << at;
    EXPECT_TRUE(holds(faults[0], {"iter_0000005/rank_00000_of_00001.safetensors"}));
  }
  // The header is whole: only the rank that reads the bytes can see it.
  EXPECT_EQ(find_checkpoint(root_, {}), 5);
  const CheckpointState state = read_checkpoint(checkpoint_folder(root_, 5));
  const ShardReader reader(checkpoint_folder(root_, 5), state.files);
  const std::vector<std::int64_t> shape{1000};
  std::vector<float> out(1000);
  EXPECT_THROW(reader.read("master.x", shape, 0, out), Error);
  EXPECT_TRUE(holds(fallback_advice(root_, 5), {"iter_0000003: --ckpt-step 3"}));
  fs::remove_all(checkpoint_folder(root_, 3));
  EXPECT_TRUE(holds(fallback_advice(root_, 5), {"no other checkpoint", "is whole"}));
}

// The limit on file sizes stands in for a full disk: the same calls fail at the same places.
class FileLimit {
 public:
  explicit FileLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit now = before_;
    now.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &now);
  }
  ~FileLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_;
};

TEST_F(SavedTest, AFullDiskLeavesTheOlderCheckpointAndTheStepCanBeSavedLater) {
  save(1, 1.0f);
  {
    const FileLimit full(1000);
    EXPECT_THROW(save(2, 2.0f), Error);
  }
  EXPECT_FALSE(fs::exists(checkpoint_folder(root_, 2)));
  EXPECT_FALSE(fs::exists(checkpoint_folder(root_, 2) + ".part"));
  EXPECT_EQ(find_checkpoint(root_, {}), 1);
  save(2, 2.0f);
  EXPECT_EQ(find_checkpoint(root_, {}), 2);
  {
    // Room for the parts, none for the pointer.
    CheckpointWriter writer(root_, 3);
    const std::vector<float> values(10, 3.0f);
    const ShardFile part = write_pieces(writer.folder(), 0, 1, {{"master.x", {10}, 0, 10}}, values);
    fs::rename(pointer(), pointer() + ".kept");
    fs::create_directory(pointer());  // a name that nothing can be renamed to
    EXPECT_THROW(writer.commit({.rollout_id = 3, .optimizer_steps = 4, .files = {part}, .run = {}}),
                 Error);
    fs::remove(pointer());
    fs::rename(pointer() + ".kept", pointer());
  }
  EXPECT_EQ(find_checkpoint(root_, {}), 2);
  for (const auto& entry : fs::directory_iterator(root_))
    EXPECT_EQ(entry.path().string().find(".tmp"), std::string::npos) << entry.path();
  save(3, 3.0f);  // the step's folder is there already
  EXPECT_EQ(find_checkpoint(root_, {}), 3);
  EXPECT_TRUE(checkpoint_faults(checkpoint_folder(root_, 3), Look::at_all_bytes).empty());
}

// A small file system of our own under root_, in this process alone; false: not allowed here.
bool mount_small(const std::string& root) {
  const uid_t user = ::geteuid();
  if (user == 0 ? ::unshare(CLONE_NEWNS) != 0 : ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
    return false;
  if (user != 0) std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", root.c_str(), "tmpfs", 0, "size=8m,nr_inodes=1000") == 0;
}

enum class Scarce { inodes, pages };

// Room for `more` inodes or pages of 4 KiB beside what is there; less than 0: plenty.
void set_room(const std::string& root, Scarce scarce, std::int64_t more) {
  struct statvfs disk {};
  TD_CHECK(::statvfs(root.c_str(), &disk) == 0, "{}: statvfs", root);
  const auto inodes = static_cast<std::int64_t>(disk.f_files - disk.f_ffree);
  const auto bytes = static_cast<std::int64_t>((disk.f_blocks - disk.f_bfree) * disk.f_bsize);
  const bool few_inodes = more >= 0 && scarce == Scarce::inodes;
  const bool few_pages = more >= 0 && scarce == Scarce::pages;
  // A size of 0 would be no limit.
  const std::string options =
      fmt::format("size={},nr_inodes={}", few_pages ? bytes + more * 4096 : 8 << 20,
                  few_inodes ? inodes + more : 1000);
  TD_CHECK(::mount("none", root.c_str(), nullptr, MS_REMOUNT, options.c_str()) == 0, "{}: {}: {}",
           root, options, std::strerror(errno));
}

// Saves step 5 over step 3 with ever more room until it fits; "" if nothing was ever wrong.
std::string fault_of_full(SavedTest& test, const std::string& root, Scarce scarce) {
  constexpr std::size_t kElements = 20000;
  const auto look = [&](std::int64_t wanted) -> std::string {
    for (const auto& entry : fs::recursive_directory_iterator(root))
      for (const char* left : {".part", ".tmp", ".old"})
        if (entry.path().extension() == left) return entry.path().string() + " is left";
    if (find_checkpoint(root, {}) != wanted) return "the pointer has moved";
    const auto faults = checkpoint_faults(checkpoint_folder(root, wanted), Look::at_all_bytes);
    return faults.empty() ? "" : faults[0];
  };
  for (std::int64_t room = 0; room < 100; ++room) {
    fs::remove_all(checkpoint_folder(root, 5));
    test.save(3, 3.0f, kElements);
    set_room(root, scarce, room);
    bool fits = true;
    try {
      test.save(5, 5.0f, kElements);
    } catch (const Error&) {
      fits = false;
    }
    set_room(root, scarce, -1);
    std::string fault = look(fits ? 5 : 3);
    if (fault.empty() && !fits) {
      test.save(5, 5.0f, kElements);  // the same step, later
      fault = look(5);
    }
    if (!fault.empty()) return fmt::format("with room for {}: {}", room, fault);
    if (fits) return room > 2 ? "" : "it always fitted";
  }
  return "it never fitted";
}

TEST_F(SavedTest, AFullFileSystemAtAnyPointLeavesTheOlderCheckpoint) {
  constexpr int kNotAllowed = 77;
  const pid_t child = ::fork();
  if (child == 0) {
    if (!mount_small(root_)) ::_exit(kNotAllowed);
    int code = 0;
    for (const Scarce scarce : {Scarce::inodes, Scarce::pages}) {
      const std::string fault = fault_of_full(*this, root_, scarce);
      if (fault.empty()) continue;
      fmt::print(stderr, "{}: {}\n", scarce == Scarce::inodes ? "inodes" : "pages", fault);
      code = 1;
    }
    ::_exit(code);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == kNotAllowed)
    GTEST_SKIP() << "no file system can be mounted here (neither root nor user namespaces)";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// A process that saves without a pause is killed at moments that differ: the pointer always names
// a checkpoint whose every byte is right, and the numbers never go back.
TEST_F(SavedTest, AKilledProcessLeavesAWholeCheckpointUnderThePointer) {
  const double start = monotonic_seconds();
  save(0, 0.0f, 20000);
  const double one_save = monotonic_seconds() - start;
  std::int64_t last = 0;
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (std::int64_t id = last + 1;; ++id) {
        save(id, static_cast<float>(id), 20000);
        for (const std::int64_t old : checkpoints_to_remove(checkpoint_ids(root_), id, 2, {}))
          remove_checkpoint(root_, old);
      }
    }
    ::usleep(static_cast<useconds_t>(1e6 * one_save * (0.3 + 0.17 * round)));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto found = find_checkpoint(root_, {});
    ASSERT_TRUE(found.has_value());
    EXPECT_GE(*found, last);
    EXPECT_TRUE(checkpoint_faults(checkpoint_folder(root_, *found), Look::at_all_bytes).empty());
    last = *found;
  }
  EXPECT_GT(last, 0);
  save(last + 1, 0.0f);
  EXPECT_LE(checkpoint_ids(root_).size(), 4u);  // leftovers are gone: no .part, no .going
  for (const auto& entry : fs::directory_iterator(root_))
    EXPECT_TRUE(entry.path().extension() != ".part" && entry.path().extension() != ".going");
}

TEST(CheckpointsToRemove, NeverTheNewestNorALaterOne) {
  struct Case {
    std::vector<std::int64_t> ids;
    std::int64_t newest;
    std::optional<std::int64_t> keep_last, retain;
    std::vector<std::int64_t> going;
  };
  const Case cases[] =
      {
          {{1, 3, 5}, 5, {}, {}, {}},       {{1, 3, 5}, 5, 1, {}, {1, 3}},
          {{1, 3, 5}, 5, 2, {}, {1}},       {{1, 3, 5}, 5, 9, {}, {}},
          {{1, 3, 5}, 3, 1, {}, {1}},        // 5 is of another branch: not ours to remove
          {{1, 3, 5, 7}, 7, {}, 4, {1, 5}},  // steps 4 and 8 stay
          {{1, 3, 5, 7}, 7, 2, 4, {1}},     {{7}, 7, 1, {}, {}},
      };
  for (const Case& c : cases)
    EXPECT_EQ(checkpoints_to_remove(c.ids, c.newest, c.keep_last, c.retain), c.going);
}

}  // namespace
}  // namespace tandem
