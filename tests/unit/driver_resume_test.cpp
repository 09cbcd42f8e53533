// What a run that continues does with what it finds: records cut back byte for byte, the right
// folder taken, the differences of the config named.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/file.h"
#include "config/json.h"
#include "config/validate.h"
#include "driver/records.h"
#include "driver/resume.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class ResumeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "resume-XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + name).parent_path());
    std::ofstream(root_ + "/" + name, std::ios::binary) << text;
  }
  void save(const std::string& root, std::int64_t id) {
    CheckpointWriter writer(root, id);
    const RunState run{.weight_version = id + 2,
                       .prompt_order = {{"num_drawn", 4}},
                       .skipped_steps = 2,
                       .prompts_xxh3 = "0",
                       .run_dir = "..",
                       .config = to_json(Config{})};
    writer.commit({.rollout_id = id, .optimizer_steps = id + 1, .files = {}, .run = to_json(run)});
  }
  std::string error_of(const Config& config) {
    try {
      find_resume(config);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }

  std::string root_;
};

// A rollout ahead of its step comes back with everything that its step reads.
TEST_F(ResumeTest, ARolloutAheadIsKeptWhole) {
  DrawnGroups rollout{.samples = {}, .dropped = {{"zero_std", 2}}, .num_drawn = 3, .seconds = 1.5};
  for (std::uint64_t i = 0; i < 2; ++i) {
    Sample s;
    s.id = i;
    s.tokens = {1, 2, 3};
    s.response_length = 2;
    s.log_probs = {-0.5f, -1.25f};
    s.loss_mask = {1, 0};
    s.weight_versions = {3, 4};
    s.reward = 0.1;
    s.response = "a b";
    s.status = SampleStatus::completed;
    s.finish = FinishReason::stop;
    s.reward_parts = {{"format", 0.3}};
    rollout.samples.push_back(s);
  }
  const Json kept = parse_json(dump_json(save_ahead(root_, rollout)), "ahead");
  const DrawnGroups back = load_ahead(root_, kept);
  EXPECT_EQ(back.num_drawn, 3);
  EXPECT_EQ(back.seconds, 1.5);
  EXPECT_EQ(back.dropped, rollout.dropped);
  ASSERT_EQ(back.samples.size(), 2u);
  EXPECT_EQ(back.samples[1].tokens, rollout.samples[1].tokens);
  EXPECT_EQ(back.samples[1].log_probs, rollout.samples[1].log_probs);
  EXPECT_EQ(back.samples[1].loss_mask, rollout.samples[1].loss_mask);
  EXPECT_EQ(back.samples[1].weight_versions, rollout.samples[1].weight_versions);
  EXPECT_EQ(back.samples[1].reward, 0.1);
  EXPECT_EQ(back.samples[1].reward_parts, rollout.samples[1].reward_parts);
  const std::string path = root_ + "/rollout_ahead.safetensors";
  std::string bytes = read_file(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write("rollout_ahead.safetensors", bytes);
  EXPECT_THROW(load_ahead(root_, kept), Error);
}

const char* const kRows[] = {
    "{\"step\":-1,\"time\":1.5,\"eval/addition\":0.25,\"eval/addition/response_len/mean\":3}\n",
    "{\"step\":0,\"perf/step_time\":0.1,\"train/loss\":1e-07}\n",
    "{\"step\":1,\"perf/step_time\":0.1,\"train/loss\":null}\n",
    "{\"step\":1,\"eval/addition\":0.5}\n",
    "{\"step\":2,\"perf/step_time\":0.1}\n",
};

TEST_F(ResumeTest, RecordsAreCutBackToTheStep) {
  std::string all;
  for (const char* row : kRows) all += row;
  struct Case {
    std::int64_t last;
    std::size_t kept;
    std::int64_t removed, steps;
    bool step, evaluation;
  };
  for (const Case& c : {Case{2, 5, 0, 3, true, false}, Case{1, 4, 1, 2, true, true},
                        Case{0, 2, 3, 1, true, false}, Case{kBeforeAll, 0, 5, 0, false, false}}) {
    write("metrics.jsonl", all + "{\"step\":2,\"torn");
    for (int i = 0; i < 4; ++i) write(fmt::format("rollouts/rollout_{:07d}.safetensors", i), "x");
    const Records records = cut_records(root_, c.last);
    std::string kept;
    for (std::size_t i = 0; i < c.kept; ++i) kept += kRows[i];
    EXPECT_EQ(read_file(root_ + "/metrics.jsonl"), kept);
    EXPECT_EQ(records.removed_rows, c.removed);
    EXPECT_EQ(records.num_steps, c.steps);
    EXPECT_EQ(records.has_step, c.step);
    EXPECT_EQ(records.has_evaluation, c.evaluation);
    EXPECT_EQ(records.first.count("addition"), c.last == kBeforeAll ? 0u : 1u);
    for (int i = 0; i < 4; ++i)
      EXPECT_EQ(fs::exists(fmt::format("{}/rollouts/rollout_{:07d}.safetensors", root_, i)),
                i <= c.last);
  }
  EXPECT_EQ(cut_records(root_ + "/nowhere", 3).removed_rows, 0);
  write("metrics.jsonl", std::string(kRows[0]) + "not json\n");
  EXPECT_THROW(cut_records(root_, 3), Error);
}

TEST_F(ResumeTest, TheFolderToContinueFrom) {
  Config config;
  EXPECT_FALSE(find_resume(config).has_value());
  config.checkpoint.load = root_ + "/run";
  EXPECT_NE(error_of(config).find("holds no checkpoint"), std::string::npos);
  // The folder that --save fills: the beginning, in each of its spellings.
  config.checkpoint.save = root_ + "/run/";
  EXPECT_FALSE(find_resume(config).has_value());
  config.checkpoint.save.clear();
  config.checkpoint.save_interval = 2;
  config.logging.run_dir = root_ + "/x/../run";
  EXPECT_FALSE(find_resume(config).has_value());

  save(root_ + "/run/checkpoints", 5);
  save(root_ + "/run/checkpoints", 7);
  for (const char* load : {"/run", "/run/checkpoints"}) {
    config.checkpoint.load = root_ + load;
    const auto resume = find_resume(config);
    ASSERT_TRUE(resume.has_value());
    EXPECT_EQ(resume->rollout_id(), 7);
    EXPECT_EQ(resume->run.weight_version, 9);
    EXPECT_EQ(saved_run_dir(*resume), "");  // no metrics there
    write("run/metrics.jsonl", "");
    EXPECT_TRUE(same_path(saved_run_dir(*resume), root_ + "/run"));
    fs::remove(root_ + "/run/metrics.jsonl");
  }
  config.checkpoint.ckpt_step = 5;
  EXPECT_EQ(find_resume(config)->rollout_id(), 5);
}

TEST_F(ResumeTest, CheckpointsOfAnotherRunAreNotMixedIn) {
  save(root_ + "/old", 3);
  Config config;
  config.checkpoint.save = root_ + "/old";
  EXPECT_THROW(check_save_folder(config, find_resume(config)), Error);
  config.checkpoint.load = root_ + "/old";
  check_save_folder(config, find_resume(config));
  config.checkpoint.finetune = true;
  EXPECT_THROW(check_save_folder(config, find_resume(config)), Error);
  config.checkpoint.save = root_ + "/new";
  check_save_folder(config, find_resume(config));
}

TEST(ConfigChanges, NamesWhatIsNotThePlaceOfFiles) {
  Config before, now;
  now.optimizer.lr = 0.5;
  now.logging.run_dir = "elsewhere";
  now.checkpoint.save_interval = 3;
  EXPECT_EQ(config_changes(to_json(before), now),
            (std::vector<std::string>{"optimizer.lr was 1e-06, is 0.5"}));
}

TEST(PromptsXxh3, SeesIdsLabelsAndOrder) {
  const Prompt a{.row = 0, .text = "a", .label = "1", .metadata_json = "", .ids = {1, 2}};
  const Prompt b{.row = 1, .text = "b", .label = "2", .metadata_json = "", .ids = {1, 2}};
  EXPECT_EQ(prompts_xxh3({a, b}), prompts_xxh3({a, b}));
  EXPECT_NE(prompts_xxh3({a, b}), prompts_xxh3({b, a}));
  EXPECT_NE(prompts_xxh3({a}), prompts_xxh3({a, a}));
}

TEST(FillRolloutId, AsPythonFormatsIt) {
  EXPECT_EQ(fill_rollout_id("a/{rollout_id}.x", 7), "a/7.x");
  EXPECT_EQ(fill_rollout_id("a/r_{rollout_id:07d}.x", 7), "a/r_0000007.x");
  EXPECT_EQ(fill_rollout_id("a/b", 7), "a/b");
  for (const char* bad : {"{rollout_id", "{rollout_id:x}", "{rollout_id:7d}", "{step}"})
    EXPECT_EQ(fill_rollout_id(bad, 7), bad);
}

}  // namespace
}  // namespace tandem
