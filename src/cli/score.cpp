// `tandem score`: the log-probability of every next token of given texts, through the trainer's
// packed forward or the engine's paged one, and with --gradients the loss and the gradient norm of
// each parameter. One JSON object a line on standard output.
#include "trainer/score.h"

#include <cmath>

#include "base/json.h"
#include "base/log.h"
#include "cli/texts.h"
#include "cli/usage.h"
#include "config/resolve.h"
#include "rank/worker.h"

namespace tandem {

int command_score(const std::vector<std::string>& words) {
  ScoreConfig config;
  const auto parsed = read_flags(
      words, config, "usage: tandem score --hf-checkpoint DIR --input FILE.jsonl [flags]\n");
  if (!parsed) return 0;
  resolve(config, this_host());
  start_log({});
  for (const auto& note : parsed->notes) TD_LOG(info, "{}", note);
  TD_LOG(info, "{}", start_compute(config.compute));
  TokenizerProcess tokenizer({.folder = config.model.hf_checkpoint});
  const auto rows = read_token_rows(config.input, tokenizer);
  Weights weights(config.model.hf_checkpoint, compute_element(config.model.dtype),
                  compute_place(config.compute.device));
  const std::int64_t limit = weights.folder.config().max_position_embeddings;
  for (std::size_t i = 0; i < rows.size(); ++i)
    TD_CHECK(rows[i].ids.size() >= 2 && static_cast<std::int64_t>(rows[i].ids.size()) <= limit,
             "{}: row {} has {} tokens, 2 to {} wanted", config.input, i + 1, rows[i].ids.size(),
             limit);
  Scorer scorer(weights.folder.config(), weights.arena, config.gradients);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const TokenRow& row = rows[i];
    const Score score = config.through == Side::engine ? scorer.through_engine(row.ids)
                                                       : scorer.through_trainer(row.ids);
    for (std::size_t t = 0; t < score.log_probs.size(); ++t)
      TD_CHECK(std::isfinite(score.log_probs[t]),
               "{}: row {}: the log-probability of token {} is {}, since the model's logits are "
               "not finite; look at the weights in {}",
               config.input, i + 1, t + 2, score.log_probs[t], config.model.hf_checkpoint);
    OrderedJson json{{"input_ids", row.ids}, {"logprobs", score.log_probs}};
    if (config.gradients) {
      json["loss"] = score.loss;
      json["gradient_norms"] = score.gradient_norms;
    }
    fmt::print("{}\n", dump_json(json));
  }
  return 0;
}

}  // namespace tandem
