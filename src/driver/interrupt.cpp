// See interrupt.h. A handler may do little: it sets a flag, or restores the system's own action and
// raises the signal again.
#include "driver/interrupt.h"

#include <signal.h>

#include <atomic>
#include <iterator>

namespace tandem {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM};
std::atomic<bool> signal_came{false};  // lock-free: a handler may touch it

void on_signal(int number) {
  if (!signal_came.exchange(true)) return;
  ::signal(number, SIG_DFL);
  ::raise(number);
}

}  // namespace

Interrupts::Interrupts() {
  signal_came = false;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // calls in progress go on; loops ask asked()
  for (const int number : kSignals) ::sigaction(number, &action, nullptr);
}

Interrupts::~Interrupts() {
  for (const int number : kSignals) ::signal(number, SIG_DFL);
}

bool Interrupts::asked() const { return signal_came; }

}  // namespace tandem
