// Ctrl-C, SIGTERM and SIGHUP. While a run starts there is nothing to keep: one of them ends the
// program at once with a line and kInterruptedExitCode, and its ranks and helpers go with it. Once
// steps run, the first asks the loop to end in order, and the second ends the program as if it had
// been killed. Handlers stand only while an object lives. A SIGHUP that is ignored from the start
// (nohup) stays so.
#pragma once

namespace tandem {

class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  // From here on a signal only asks.
  void end_in_order();
  // Whether one has come since; any thread.
  bool asked() const;
};

// Exit code of a run that was interrupted: 128 + SIGINT, as shells count.
inline constexpr int kInterruptedExitCode = 130;

}  // namespace tandem
