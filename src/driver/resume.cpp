// See resume.h.
#include "driver/resume.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <span>

#include "base/check.h"
#include "base/xxh3.h"
#include "config/json.h"
#include "config/validate.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// --load itself, or the folder of checkpoints of the run that it names.
std::string root_of(const std::string& load) {
  const std::string inside = load + "/checkpoints";
  return checkpoint_ids(load).empty() && fs::is_directory(inside) ? inside : load;
}

}  // namespace

Json to_json(const RunState& state) {
  return {{"weight_version", state.weight_version},
          {"prompt_order", state.prompt_order},
          {"skipped_steps", state.skipped_steps},
          {"prompts_xxh3", state.prompts_xxh3},
          {"run_dir", state.run_dir},
          {"config", state.config}};
}

RunState run_state_from_json(const Json& json, std::string_view where) {
  return {.weight_version = require<std::int64_t>(json, "weight_version", where),
          .prompt_order = require<Json>(json, "prompt_order", where),
          .skipped_steps = require<std::int64_t>(json, "skipped_steps", where),
          .prompts_xxh3 = require<std::string>(json, "prompts_xxh3", where),
          .run_dir = require<std::string>(json, "run_dir", where),
          .config = require<Json>(json, "config", where)};
}

std::optional<Resume> find_resume(const Config& config) {
  const CheckpointConfig& c = config.checkpoint;
  if (c.load.empty()) return std::nullopt;
  const std::string root = root_of(c.load);
  const auto id = find_checkpoint(root, c.ckpt_step);
  TD_CHECK(id || loads_where_it_saves(config),
           "--load: {} holds no checkpoint (no iter_… folder); give a folder that --save has "
           "filled, or leave --load out",
           c.load);
  if (!id) return std::nullopt;
  const std::string folder = fs::absolute(checkpoint_folder(root, *id)).string();
  Resume resume{.root = root, .folder = folder, .checkpoint = read_checkpoint(folder), .run = {}};
  resume.run = run_state_from_json(resume.checkpoint.run, folder + "/state.json: run");
  return resume;
}

void check_save_folder(const Config& config, const std::optional<Resume>& resume) {
  const std::string& save = config.checkpoint.save;
  if (save.empty()) return;
  const bool continues = !config.checkpoint.finetune &&
                         (resume ? same_path(resume->root, save) : loads_where_it_saves(config));
  const auto ids = checkpoint_ids(save);
  TD_CHECK(continues || ids.empty(),
           "--save: {} holds checkpoints of another run ({}); continue it with --load {}, or name "
           "another folder",
           save, checkpoint_folder("", ids.back()).substr(1), save);
}

std::string prompts_xxh3(const std::vector<Prompt>& prompts) {
  Xxh3 sum;
  for (const Prompt& p : prompts) {
    sum.add(std::as_bytes(std::span<const TokenId>(p.ids)));
    sum.add(std::as_bytes(std::span<const char>(p.label)));
    sum.add(std::as_bytes(std::span<const char>("\n", 1)));
  }
  return sum.hex();
}

std::string saved_run_dir(const Resume& resume) {
  const fs::path folder = fs::path(resume.root) / resume.run.run_dir;
  return fs::exists(folder / "metrics.jsonl") ? folder.lexically_normal().string() : "";
}

std::vector<std::string> config_changes(const Json& saved, const Config& config) {
  // Where things lie, what is shown and how the run continues are not the run itself.
  constexpr std::array<std::string_view, 3> kSkipped = {"checkpoint", "logging", "debug"};
  std::vector<std::string> lines;
  const Json now = to_json(config);
  for (const auto& [section, values] : now.items()) {
    if (std::find(kSkipped.begin(), kSkipped.end(), section) != kSkipped.end()) continue;
    for (const auto& [key, value] : values.items()) {
      const auto before = saved.find(section);
      const Json old =
          before != saved.end() && before->is_object() ? before->value(key, Json()) : Json();
      if (old != value)
        lines.push_back(
            fmt::format("{}.{} was {}, is {}", section, key, dump_json(old), dump_json(value)));
    }
  }
  return lines;
}

}  // namespace tandem
