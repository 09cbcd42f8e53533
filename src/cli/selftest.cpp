// `tandem selftest`: one line for each way in which the engine or the trainer ran the same tokens,
// with how many were compared and how many differ in a bit. Exit code 1 if any does.
#include "rank/selftest.h"
#include "base/clock.h"
#include "base/log.h"
#include "cli/usage.h"
#include "config/resolve.h"
#include "rank/worker.h"

namespace tandem {

int command_selftest(const std::vector<std::string>& words) {
  SelftestConfig config;
  const auto parsed =
      read_flags(words, config, "usage: tandem selftest --hf-checkpoint DIR [flags]\n");
  if (!parsed) return 0;
  resolve(config, this_host());
  start_log({});
  for (const auto& note : parsed->notes) TD_LOG(info, "{}", note);
  TD_LOG(info, "{}", start_compute(config.compute));
  Weights weights(config.model.hf_checkpoint, compute_element(config.model.dtype),
                  compute_place(config.compute.device));
  const double start = monotonic_seconds();
  std::int64_t tokens = 0, differ = 0;
  fmt::print("| way | tokens compared | differ | |\n| --- | --- | --- | --- |\n");
  run_selftest(weights.folder, weights.arena,
               {.tokens = config.tokens,
                .new_tokens = config.max_new_tokens,
                .seed = static_cast<std::uint64_t>(config.seed)},
               [&](const SelftestRow& row) {
                 tokens += row.tokens;
                 differ += row.differ;
                 fmt::print("| {} | {} | {} | {} |\n", row.way, row.tokens, row.differ, row.note);
                 std::fflush(stdout);
               });
  fmt::print("| all | {} | {} | {:.0f} s |\n", tokens, differ, monotonic_seconds() - start);
  return differ == 0 ? 0 : 1;
}

}  // namespace tandem
