// The program's log and the console it shares with the progress display.
//
// A process calls start_log once with its role ("driver", "rank 0"); before that, messages go to
// standard error without a role. Lines go to the console and, if asked, to a file, and are flushed
// at once: a process that is killed loses nothing. On a terminal one *status line* may stand below
// the log; every line written erases it first and draws it again, so bar and log never mix.
// Thread-safe. Commands whose result is standard output leave console_fd at 2.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace tandem {

enum class LogLevel { debug, info, warn, error };

struct LogOptions {
  std::string role = {};            // in front of each line; empty: none
  LogLevel level = LogLevel::info;  // least level written
  int console_fd = 2;               // -1: no console
  std::string file = {};            // appended to; empty: none
};

// Throws Error if the file cannot be opened. May be called again: the new options replace the old.
void start_log(const LogOptions& options);

bool log_enabled(LogLevel level);
void write_log(LogLevel level, std::string_view message);

// A line for people, without time and role: step rows, tables. Goes to console and file.
void console_line(std::string_view line);

// Replaces the status line (empty: removes it). Does nothing where the console is no terminal.
void console_status(std::string_view line);

bool console_is_terminal();

}  // namespace tandem

// TD_LOG(info, "step {} took {}", step, seconds); arguments are formatted only if the level is on.
#define TD_LOG(level, ...)                                                        \
  do {                                                                            \
    if (::tandem::log_enabled(::tandem::LogLevel::level)) {                       \
      ::tandem::write_log(::tandem::LogLevel::level, ::fmt::format(__VA_ARGS__)); \
    }                                                                             \
  } while (0)
