// See interrupt.h. A handler may do little: it sets a flag, writes a fixed line and ends, or
// restores the system's own action and raises the signal again.
#include "driver/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <iterator>

namespace tandem {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr char kLine[] = "interrupted: no step had begun\n";
// Lock-free: a handler may touch them.
std::atomic<bool> signal_came{false};
std::atomic<bool> in_order{false};

void on_signal(int number) {
  if (!in_order) {
    [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, kLine, sizeof kLine - 1);
    ::_exit(kInterruptedExitCode);
  }
  if (!signal_came.exchange(true)) return;
  ::signal(number, SIG_DFL);
  ::raise(number);
}

bool ignored(int number) {
  struct sigaction present {};
  return ::sigaction(number, nullptr, &present) == 0 && present.sa_handler == SIG_IGN;
}

}  // namespace

Interrupts::Interrupts() {
  signal_came = in_order = false;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // calls in progress go on; loops ask asked()
  for (const int number : kSignals)
    if (number != SIGHUP || !ignored(number)) ::sigaction(number, &action, nullptr);
}

Interrupts::~Interrupts() {
  for (const int number : kSignals)
    if (!ignored(number)) ::signal(number, SIG_DFL);
}

void Interrupts::end_in_order() { in_order = true; }

bool Interrupts::asked() const { return signal_came; }

}  // namespace tandem
