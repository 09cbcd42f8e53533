// Reductions, the row's forms, and the files the sinks write (read back by readers of their own).
#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <thread>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "base/text.h"
#include "metrics/progress.h"
#include "metrics/sinks.h"

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

const Declarations& declarations() {
  static const Declarations all({{"n", Reduction::sum},
                                 {"loss", Reduction::mean},
                                 {"time", Reduction::max},
                                 {"lr", Reduction::last},
                                 {"eval/*", Reduction::mean},
                                 {"eval/count/*", Reduction::sum},
                                 {"eval/*/least", Reduction::min}});
  return all;
}

class MetricsFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tandem-metrics-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string folder_;
};

TEST(MetricsRow, ReducesAsDeclared) {
  Row row(declarations());
  for (const double value : {1.0, 2.0, 6.0}) {
    row.add("n", value);
    row.add("loss", value, value);
    row.add("time", -value);
    row.add("lr", value);
    row.add("eval/aime", value);
    row.add("eval/count/aime", value);
    row.add("eval/aime/least", value);
  }
  EXPECT_EQ(row.value("n"), 9);
  EXPECT_EQ(row.value("loss"), 41.0 / 9);
  EXPECT_EQ(row.value("time"), -1);
  EXPECT_EQ(row.value("lr"), 6);
  EXPECT_EQ(row.value("eval/aime"), 3);
  EXPECT_EQ(row.value("eval/count/aime"), 9);
  EXPECT_EQ(row.value("eval/aime/least"), 1);
  EXPECT_TRUE(std::isnan(row.value("absent")));
}

TEST(MetricsRow, MergingRanksEqualsOneRank) {
  Row one(declarations()), a(declarations()), b(declarations());
  const std::vector<std::pair<double, double>> observations = {{1, 3}, {5, 1}, {2, 4}, {8, 0}};
  for (std::size_t i = 0; i < observations.size(); ++i) {
    Row& part = i % 2 ? a : b;
    for (Row* row : {&one, &part}) {
      for (const char* name : {"n", "loss", "time"}) {
        row->add(name, observations[i].first, observations[i].second);
      }
    }
  }
  Row merged = Row::from_wire(b.to_wire(), declarations(), "rank 1");
  merged.merge(a);
  EXPECT_EQ(merged.to_json(), one.to_json());
  EXPECT_EQ(merged.value("n"), 16);
  EXPECT_EQ(merged.value("loss"), 2);  // (3 + 5 + 8) / 8: the weight of 0 takes no part
  EXPECT_EQ(merged.value("time"), 8);
}

TEST(MetricsRow, ShowsNumbersThatAreNone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Row row(declarations());
  row.add("time", 1);
  row.add("time", nan);
  row.add("time", 2);
  row.add("n", std::numeric_limits<double>::infinity());
  row.add("loss", 1, 0);
  EXPECT_EQ(dump_json(row.to_json()), R"({"time":null,"n":null,"loss":null})");
  Row back = Row::from_wire(row.to_wire(), declarations(), "rank 0");
  EXPECT_TRUE(std::isnan(back.value("time")));
  EXPECT_EQ(back.value("n"), std::numeric_limits<double>::infinity());
  back.merge(row);
  EXPECT_TRUE(std::isnan(back.value("loss")));
}

TEST(MetricsRow, KeepsTheOrderOfInsertion) {
  Row row(declarations());
  row.add("time", 1);
  row.add("loss", 1);
  row.add("eval/b", 1);
  row.add("eval/a", 1);
  EXPECT_EQ(row.names(), (std::vector<std::string>{"time", "loss", "eval/b", "eval/a"}));
  EXPECT_EQ(dump_json(row.to_json()), R"({"time":1.0,"loss":1.0,"eval/b":1.0,"eval/a":1.0})");
}

TEST(MetricsRow, RefusesWhatIsNotDeclared) {
  Row row(declarations());
  EXPECT_NE(error_of([&] { row.add("los", 1); }).find("metric 'los' is not declared"),
            std::string::npos);
  EXPECT_NE(error_of([] { Row::from_wire("[[\"x\",1,1]]", declarations(), "rank 2"); }),
            "(no error)");
  EXPECT_NE(error_of([] { Row::from_wire("{}", declarations(), "rank 2"); }).find("rank 2"),
            std::string::npos);
  Declarations twice({{"n", Reduction::sum}});
  EXPECT_NE(error_of([&] { twice.declare({"n", Reduction::max}); }), "(no error)");
}

TEST_F(MetricsFile, JsonLinesAppendAndDropATornLine) {
  const std::string path = folder_ + "/metrics.jsonl";
  Row row(declarations());
  row.add("loss", 0.5);
  JsonlSink(path).write(0, row);
  write_file_atomic(path, read_file(path) + "{\"step\":1,\"lo");
  JsonlSink(path).write(1, row);
  const std::string content = read_file(path);
  const auto lines = split(trim(content), '\n');
  ASSERT_EQ(lines.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    const Json json = parse_json(lines[i], path);
    EXPECT_EQ(json.at("step"), i);
    EXPECT_EQ(json.at("loss"), 0.5);
    EXPECT_GT(json.at("time"), 1.7e9);
  }
}

TEST(TensorBoard, Crc32cGivesTheKnownAnswers) {
  // RFC 3720, appendix B.4.
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
}

// A reader of the event file: bit-by-bit CRC, frames, then protobuf fields.
struct EventReader {
  static std::uint32_t slow_masked_crc(std::string_view bytes) {
    std::uint32_t crc = ~0u;
    for (const char c : bytes) {
      crc ^= static_cast<unsigned char>(c);
      for (int i = 0; i < 8; ++i) crc = crc & 1 ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
    }
    crc = ~crc;
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u;
  }

  template <class T>
  static T little(std::string_view bytes) {
    T value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      value |= static_cast<T>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    }
    return value;
  }

  static std::vector<std::string> records(std::string_view file) {
    std::vector<std::string> found;
    while (!file.empty()) {
      const auto length = little<std::uint64_t>(file);
      EXPECT_EQ(little<std::uint32_t>(file.substr(8)), slow_masked_crc(file.substr(0, 8)));
      const std::string_view data = file.substr(12, length);
      EXPECT_EQ(little<std::uint32_t>(file.substr(12 + length)), slow_masked_crc(data));
      found.emplace_back(data);
      file.remove_prefix(16 + length);
    }
    return found;
  }

  struct Field {
    std::uint64_t number, value;
    std::string bytes;
  };
  static std::vector<Field> fields(std::string_view text) {
    std::vector<Field> found;
    std::size_t at = 0;
    const auto varint = [&] {
      std::uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = static_cast<unsigned char>(text.at(at++));
        value |= std::uint64_t{byte & 0x7Fu} << shift;
        if (!(byte & 0x80)) return value;
      }
    };
    while (at < text.size()) {
      const std::uint64_t key = varint();
      Field field{key >> 3, 0, {}};
      switch (key & 7) {
        case 0:
          field.value = varint();
          break;
        case 1:
          field.value = little<std::uint64_t>(text.substr(at));
          at += 8;
          break;
        case 5:
          field.value = little<std::uint32_t>(text.substr(at));
          at += 4;
          break;
        case 2: {
          const std::uint64_t size = varint();
          field.bytes = text.substr(at, size);
          at += size;
          break;
        }
        default:
          ADD_FAILURE() << "wire type " << (key & 7);
          return found;
      }
      found.push_back(field);
    }
    return found;
  }
};

TEST_F(MetricsFile, TensorBoardEventsReadBack) {
  TensorBoardSink sink(folder_ + "/tensorboard");
  Row row(declarations());
  row.add("loss", 0.25);
  row.add("n", 300);
  sink.write(1000, row);
  EXPECT_NE(sink.path().find("/events.out.tfevents."), std::string::npos);
  const auto records = EventReader::records(read_file(sink.path()));
  ASSERT_EQ(records.size(), 2u);

  const auto version = EventReader::fields(records[0]);
  ASSERT_EQ(version.size(), 2u);
  EXPECT_EQ(version[1].number, 3u);
  EXPECT_EQ(version[1].bytes, "brain.Event:2");

  const auto event = EventReader::fields(records[1]);
  ASSERT_EQ(event.size(), 3u);
  EXPECT_GT(std::bit_cast<double>(event[0].value), 1.7e9);
  EXPECT_EQ(event[1].number, 2u);
  EXPECT_EQ(event[1].value, 1000u);
  EXPECT_EQ(event[2].number, 5u);
  std::vector<std::pair<std::string, float>> scalars;
  for (const auto& value : EventReader::fields(event[2].bytes)) {
    const auto parts = EventReader::fields(value.bytes);
    ASSERT_EQ(parts.size(), 2u);
    scalars.emplace_back(parts[0].bytes,
                         std::bit_cast<float>(static_cast<std::uint32_t>(parts[1].value)));
  }
  EXPECT_EQ(scalars, (std::vector<std::pair<std::string, float>>{{"loss", 0.25f}, {"n", 300.f}}));
}

TEST(Console, StepLineShowsWhatTheRowHolds) {
  const Declarations names(
      {{"rollout/*", Reduction::mean}, {"train/*", Reduction::mean}, {"perf/*", Reduction::max}});
  Row row(names);
  row.add("rollout/raw_reward", 0.4375);
  row.add("train/train_rollout_logprob_abs_diff", 0);
  row.add("perf/rollout_time", 2.14);
  EXPECT_EQ(step_line(2, 40, row, ConsoleSink::default_columns()),
            "step  3/40  reward 0.438  gap 0  rollout 2.1 s");
  row.add("train/train_rollout_logprob_abs_diff", 2e-9);
  EXPECT_NE(step_line(2, 0, row, ConsoleSink::default_columns()).find("gap 1.00e-09"),
            std::string::npos);
  EXPECT_EQ(step_line(2, 40, Row(names), ConsoleSink::default_columns()), "");
}

TEST(Console, EvaluationBlockHoldsTheAnswers) {
  const std::string block = evaluation_block({.name = "addition",
                                              .before = 0.1,
                                              .after = 0.8,
                                              .answers = {{"What is\n2 + 3?", "5", "5", 1.0}},
                                              .run_folder = "runs/x"});
  EXPECT_NE(block.find("evaluation 'addition': mean reward 0.100 before, 0.800 after"),
            std::string::npos)
      << block;
  EXPECT_NE(block.find("prompt:   What is 2 + 3?"), std::string::npos);
  EXPECT_TRUE(block.ends_with("run folder: runs/x"));
}

TEST(ProgressLine, ShowsBarCountAndTimeLeft) {
  EXPECT_EQ(Progress::line("rollout", 32, 64, "samples", 4, true),
            "rollout  [############------------]  32/64 samples  4.0 s, about 4.0 s left");
  EXPECT_EQ(Progress::line("train", 0, 0, "", 0.2, true), "train      200 ms");
  EXPECT_EQ(Progress::line("rollout", 9, 8, "samples", 2, false), "rollout: 9/8 samples  2.0 s");
}

TEST_F(MetricsFile, ProgressOffATerminalWritesFewPlainLines) {
  start_log({.console_fd = -1, .file = folder_ + "/log"});
  Progress quiet(1000), chatty(0);
  for (Progress* progress : {&quiet, &chatty}) {
    progress->begin(progress == &quiet ? "quiet" : "chatty", 400, "samples");
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([progress] {
        for (int k = 0; k < 100; ++k) progress->advance();
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_GT(progress->end(), 0);
    progress->advance();  // late: ignored
    EXPECT_EQ(progress->end(), 0);
  }
  start_log({});
  const std::string text = read_file(folder_ + "/log");
  EXPECT_EQ(text.find("quiet"), std::string::npos);
  EXPECT_NE(text.find("chatty: 400/400 samples"), std::string::npos);
  EXPECT_EQ(text.find("401/"), std::string::npos);
}

}  // namespace
}  // namespace tandem
