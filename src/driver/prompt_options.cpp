// See prompt_options.h.
#include "driver/prompt_options.h"

namespace tandem {

PromptFileOptions train_prompt_options(const Config& config, std::int64_t vocab_size) {
  const DataConfig& d = config.data;
  return {.path = d.prompt_data,
          .input_key = d.input_key,
          .label_key = d.label_key,
          .metadata_key = d.metadata_key,
          .tool_key = d.tool_key,
          .apply_chat_template = d.apply_chat_template,
          .apply_chat_template_kwargs = d.apply_chat_template_kwargs,
          .max_prompt_tokens = config.rollout.rollout_max_prompt_len.value_or(0),
          .vocab_size = vocab_size,
          .skip_bad_rows = d.skip_bad_rows};
}

PromptFileOptions evaluation_prompt_options(const Config& config, const std::string& path,
                                            std::int64_t vocab_size) {
  const EvaluateConfig& e = config.evaluate;
  PromptFileOptions options = train_prompt_options(config, vocab_size);
  options.path = path;
  if (!e.eval_input_key.empty()) options.input_key = e.eval_input_key;
  if (!e.eval_label_key.empty()) options.label_key = e.eval_label_key;
  options.max_prompt_tokens = e.eval_max_prompt_len.value_or(options.max_prompt_tokens);
  return options;
}

}  // namespace tandem
