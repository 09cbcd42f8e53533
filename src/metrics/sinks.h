// Where the rows of a run go. A sink gets each finished step once, in order, from the driver's
// thread. Files of a run that continues are appended to: a last line torn by a crash is cut off.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "metrics/record.h"

namespace tandem {

class Sink {
 public:
  virtual ~Sink() = default;

  // `step` is the rollout id; rows of one step may come apart (training, evaluation).
  virtual void write(std::int64_t step, const Row& row) = 0;
};

// One JSON object a line: "step", "time" (Unix seconds), then the row. On disk when write returns.
class JsonlSink : public Sink {
 public:
  explicit JsonlSink(const std::string& path);
  void write(std::int64_t step, const Row& row) override;

 private:
  AppendFile file_;
};

// TensorBoard's event file, scalars only, written by hand: TFRecord frames (length, masked CRC32C,
// data, masked CRC32C) around Event protobufs. One file a process in `folder`.
class TensorBoardSink : public Sink {
 public:
  // first_step > 0: a run that continues; what older files hold from that step on is void.
  explicit TensorBoardSink(const std::string& folder, std::int64_t first_step = 0);
  void write(std::int64_t step, const Row& row) override;

  const std::string& path() const { return file_.path(); }

 private:
  AppendFile file_;
};

// CRC32C (Castagnoli) of the bytes, and TFRecord's masking of it.
std::uint32_t crc32c(std::string_view bytes);
std::uint32_t masked_crc32c(std::string_view bytes);

// One part of the console's line: "reward 0.52".
struct Column {
  enum class Form { number, exact, seconds, count };

  std::string label;
  std::string metric;
  Form form = Form::number;  // exact: all digits that matter ("0" is 0, 1e-9 is not)
};

// A line a step on the console: the columns whose metric the row holds.
//   step  3/40  reward 0.42  length 3.1  gap 0  rollout 2.1 s  train 3.4 s  tokens/s 512
class ConsoleSink : public Sink {
 public:
  // `num_steps` 0: the total is not known. Empty columns: default_columns().
  explicit ConsoleSink(std::int64_t num_steps, std::vector<Column> columns = {});
  void write(std::int64_t step, const Row& row) override;

  // Reward, response length, gap, seconds of each phase, tokens/s under Miles's names.
  static std::vector<Column> default_columns();

 private:
  std::int64_t num_steps_;
  std::vector<Column> columns_;
};

// The line itself; empty if the row holds none of the columns.
std::string step_line(std::int64_t step, std::int64_t num_steps, const Row& row,
                      const std::vector<Column>& columns);

// The block at a run's end: evaluation before and after, sample answers, where everything is.
struct EvaluationSummary {
  struct Answer {
    std::string prompt;
    std::string response;
    std::string label;
    double reward = 0;
  };

  std::string name;   // of the evaluation set
  double before = 0;  // mean reward; NaN: not evaluated
  double after = 0;
  std::vector<Answer> answers;
  std::string run_folder;
};
std::string evaluation_block(const EvaluationSummary& summary);

}  // namespace tandem
