// The program's entry: the first word names the command, the rest are its flags. The one place that
// turns an Error into a message and an exit code: 0 done, 1 failed, 2 a faulty command line.
#include <exception>
#include <string>
#include <vector>

#include <fmt/format.h>
#include "base/check.h"
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
  if (!help) fmt::print(stderr, "tandem: no command is called '{}'\n\n", command);
  fmt::print(help ? stdout : stderr, "{}", kUsage);
  return help ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty()) {
    fmt::print(stderr, "{}", kUsage);
    return 2;
  }
  try {
    return dispatch(words.front(), {words.begin() + 1, words.end()});
  } catch (const tandem::UsageError& e) {
    fmt::print(stderr, "tandem {}: {}\n", words.front(), e.what());
    return 2;
  } catch (const std::exception& e) {
    fmt::print(stderr, "tandem {}: {}\n", words.front(), e.what());
    return 1;
  }
}
