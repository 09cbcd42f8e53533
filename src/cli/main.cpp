// The program's entry: the first word names the command, the rest are its flags. The one place that
// turns an Error into a message and an exit code: 0 done, 1 failed, 2 a faulty command line. Output
// that did not reach its end is a failure too.
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include "base/check.h"
#include "base/file.h"
#include "base/text.h"
#include "cli/commands.h"

namespace {

constexpr const char* kUsage = R"(usage: tandem COMMAND [flags]

  train      improve a model by reinforcement learning
  generate   answer prompts with a model
  score      log-probabilities of texts
  serve      the rollout engine alone, over HTTP
  selftest   whether trainer and engine compute the same bits on a model
  inspect    what a run, rollout, checkpoint or model folder holds
  flags      all flags of `tandem train` (--markdown: the page docs/flags.md)
  version    what this program is

`tandem COMMAND --help` lists the command's flags.
)";

// Waiting threads of an OpenMP team spin some milliseconds before they sleep. Beside other programs
// that steals the very cores that the others of the team need: a tenfold loss, measured, on two
// busy cores. 2,000 turns cost nothing on quiet ones. libgomp reads this when it is loaded, so a
// command that computes in this process begins once more; ranks inherit it. What the user has set
// stays.
void limit_spinning(const std::vector<std::string>& words, char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") || std::getenv("OMP_WAIT_POLICY")) return;
  ::setenv("GOMP_SPINCOUNT", "2000", 1);
  if (words.size() > 1 && (words[1] == "--help" || words[1] == "-h"))
    return;  // nothing is computed
  for (const char* here : {"generate", "score", "serve", "selftest"})
    if (words.front() == here) ::execv("/proc/self/exe", argv);  // returns only if it cannot
}

int dispatch(const std::string& command, const std::vector<std::string>& words) {
  using namespace tandem;
  if (command == "train") return command_train(words);
  if (command == "generate") return command_generate(words);
  if (command == "score") return command_score(words);
  if (command == "serve") return command_serve(words);
  if (command == "selftest") return command_selftest(words);
  if (command == "inspect") return command_inspect(words);
  if (command == "flags") return command_flags(words);
  if (command == "rank") return command_rank(words);
  if (command == "version" || command == "--version") {
    fmt::print("tandem {}\n", TANDEM_VERSION);
    return 0;
  }
  const bool help = command == "help" || command == "--help" || command == "-h";
  if (!help) fmt::print(stderr, "tandem: no command is called '{}'\n\n", printable(command));
  fmt::print(help ? stdout : stderr, "{}", kUsage);
  return help ? 0 : 2;
}

// Brings to its end what is still in the buffer; what was lost before, on the way, counts too.
int finish_output(const std::string& command, int code) {
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  fmt::print(stderr, "tandem {}: standard output: {}\n", command,
             errno != 0 ? tandem::errno_text(errno) : "an earlier part could not be written");
  return code == 0 ? 1 : code;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) {
    fmt::print(stderr, "{}", kUsage);
    return 2;
  }
  limit_spinning(words, argv);
  try {
    return finish_output(words.front(), dispatch(words.front(), {words.begin() + 1, words.end()}));
  } catch (const tandem::UsageError& e) {
    fmt::print(stderr, "tandem {}: {}\n", words.front(), tandem::printable(e.what()));
    return 2;
  } catch (const std::exception& e) {
    const auto* of_system = dynamic_cast<const std::system_error*>(&e);  // of fmt, names no file
    if (of_system != nullptr && std::ferror(stdout) != 0)
      fmt::print(stderr, "tandem {}: standard output: {}\n", words.front(),
                 of_system->code().message());
    else
      fmt::print(stderr, "tandem {}: {}\n", words.front(), tandem::printable(e.what()));
    return 1;
  }
}
