// See log.h. Two spdlog loggers share the sinks: "log" with time, level and role, "line" bare.
#include "base/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/file.h"
#include "base/text.h"

namespace tandem {
namespace {

constexpr const char* kBareLogger = "line";

// Messages of the bare logger alone, all others by a pattern; nothing in them that a terminal obeys.
class LineFormatter : public spdlog::formatter {
 public:
  explicit LineFormatter(std::string pattern) : pattern_(pattern), inner_(std::move(pattern)) {}

  void format(const spdlog::details::log_msg& message, spdlog::memory_buf_t& out) override {
    const std::string text = printable({message.payload.data(), message.payload.size()});
    if (message.logger_name == kBareLogger) {
      out.append(text.data(), text.data() + text.size());
      out.push_back('\n');
      return;
    }
    spdlog::details::log_msg shown = message;
    shown.payload = text;
    inner_.format(shown, out);
  }

  std::unique_ptr<spdlog::formatter> clone() const override {
    return std::make_unique<LineFormatter>(pattern_);
  }

 private:
  std::string pattern_;
  spdlog::pattern_formatter inner_;
};

class ConsoleOutput : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit ConsoleOutput(int fd) : fd_(fd), terminal_(fd >= 0 && isatty(fd) == 1) {}

  bool terminal() const { return terminal_; }

  void set_status(std::string_view status) {
    if (!terminal_) return;
    const std::lock_guard lock(mutex_);
    if (status == status_) return;
    status_ = status;
    put(kErase + status_);
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    const std::string_view text(line.data(), line.size());
    put(status_.empty() ? std::string(text) : fmt::format("{}{}{}", kErase, text, status_));
  }
  void flush_() override {}

 private:
  void put(std::string_view text) {
    while (!text.empty()) {
      const ssize_t n = ::write(fd_, text.data(), text.size());
      if (n <= 0) return;  // a console that is gone is no reason to end the run
      text.remove_prefix(static_cast<std::size_t>(n));
    }
  }

  inline static const std::string kErase = "\r\x1b[K";
  int fd_;
  bool terminal_;
  std::string status_;
};

// What the loggers are made of, replaced as a whole by start_log.
struct Outputs {
  std::shared_ptr<ConsoleOutput> console;
  std::shared_ptr<spdlog::logger> log;
  std::shared_ptr<spdlog::logger> bare;
};

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::debug:
      return spdlog::level::debug;
    case LogLevel::info:
      return spdlog::level::info;
    case LogLevel::warn:
      return spdlog::level::warn;
    case LogLevel::error:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

Outputs make_outputs(const LogOptions& options) {
  std::string escaped;
  for (const char c : options.role) escaped += c == '%' ? std::string("%%") : std::string(1, c);
  const std::string tail = escaped.empty() ? "%v" : escaped + ": %v";
  Outputs outputs;
  std::vector<spdlog::sink_ptr> sinks;
  if (options.console_fd >= 0) {
    outputs.console = std::make_shared<ConsoleOutput>(options.console_fd);
    outputs.console->set_formatter(std::make_unique<LineFormatter>("%T %L " + tail));
    sinks.push_back(outputs.console);
  }
  if (!options.file.empty()) {
    AppendFile(options.file);  // opens it once for our own error text
    auto file = std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file);
    file->set_formatter(std::make_unique<LineFormatter>("%Y-%m-%d %T.%e %L " + tail));
    sinks.push_back(file);
  }
  outputs.log = std::make_shared<spdlog::logger>("log", sinks.begin(), sinks.end());
  outputs.bare = std::make_shared<spdlog::logger>(kBareLogger, sinks.begin(), sinks.end());
  for (const auto& logger : {outputs.log, outputs.bare}) {
    logger->flush_on(spdlog::level::trace);
    logger->set_level(spdlog_level(options.level));
  }
  outputs.bare->set_level(spdlog::level::trace);
  return outputs;
}

struct Shared {
  std::mutex mutex;
  std::shared_ptr<const Outputs> outputs;
  std::atomic<LogLevel> level{LogLevel::info};
};

// Never destroyed: threads and destructors may log until the process ends.
Shared& shared() {
  static Shared& instance =
      *new Shared{{}, std::make_shared<const Outputs>(make_outputs(LogOptions{})), LogLevel::info};
  return instance;
}

std::shared_ptr<const Outputs> current() {
  const std::lock_guard lock(shared().mutex);
  return shared().outputs;
}

}  // namespace

void start_log(const LogOptions& options) {
  auto outputs = std::make_shared<const Outputs>(make_outputs(options));
  const std::lock_guard lock(shared().mutex);
  shared().outputs = std::move(outputs);
  shared().level = options.level;
}

bool log_enabled(LogLevel level) { return level >= shared().level.load(); }

void write_log(LogLevel level, std::string_view message) {
  current()->log->log(spdlog_level(level), message);
}

void console_line(std::string_view line) { current()->bare->log(spdlog::level::info, line); }

void console_status(std::string_view line) {
  if (const auto outputs = current(); outputs->console) outputs->console->set_status(line);
}

bool console_is_terminal() {
  const auto outputs = current();
  return outputs->console && outputs->console->terminal();
}

}  // namespace tandem
