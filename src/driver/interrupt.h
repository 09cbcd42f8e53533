// Ctrl-C and SIGTERM while a run goes on: the first asks the loop to end in order, the second ends
// the program at once, as if it had been killed (its ranks and helpers go with it). Handlers stand
// only while an object lives; before and after, a signal ends the program.
#pragma once

namespace tandem {

class Interrupts {
 public:
  Interrupts();
  ~Interrupts();
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  // Whether one has come; any thread.
  bool asked() const;
};

// Exit code of a run that was interrupted and ended in order: 128 + SIGINT, as shells count.
inline constexpr int kInterruptedExitCode = 130;

}  // namespace tandem
