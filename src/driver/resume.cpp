// See resume.h.
#include "driver/resume.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <span>

#include "base/check.h"
#include "base/file.h"
#include "base/xxh3.h"
#include "config/json.h"
#include "config/validate.h"
#include "data/batch.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAheadFile = "rollout_ahead.safetensors";

// --load itself, or the folder of checkpoints of the run that it names.
std::string root_of(const std::string& load) {
  const std::string inside = load + "/checkpoints";
  return checkpoint_ids(load).empty() && fs::is_directory(inside) ? inside : load;
}

// The members of an object of numbers.
template <class T>
std::map<std::string, T> numbers_of(const Json& json, const std::string& where) {
  std::map<std::string, T> out;
  for (const auto& [key, value] : json.items()) out[key] = read_value<T>(value, where);
  return out;
}

}  // namespace

Json to_json(const RunState& state) {
  return {{"weight_version", state.weight_version},
          {"prompt_order", state.prompt_order},
          {"skipped_steps", state.skipped_steps},
          {"prompts_xxh3", state.prompts_xxh3},
          {"run_dir", state.run_dir},
          {"config", state.config},
          {"ahead", state.ahead}};
}

RunState run_state_from_json(const Json& json, std::string_view where) {
  return {.weight_version = require<std::int64_t>(json, "weight_version", where),
          .prompt_order = require<Json>(json, "prompt_order", where),
          .skipped_steps = require<std::int64_t>(json, "skipped_steps", where),
          .prompts_xxh3 = require<std::string>(json, "prompts_xxh3", where),
          .run_dir = require<std::string>(json, "run_dir", where),
          .config = require<Json>(json, "config", where),
          .ahead = optional_key<Json>(json, "ahead", where, Json())};
}

Json save_ahead(const std::string& folder, const DrawnGroups& rollout) {
  const TrainBatch batch{.samples = rollout.samples,
                         .advantages = std::vector<float>(rollout.samples.size()),
                         .trainer_log_probs = {}};
  const std::string bytes = encode_batch(batch);
  write_file_atomic(folder + "/" + kAheadFile, bytes);
  Json parts = Json::array();
  for (const Sample& s : rollout.samples) parts.push_back(s.reward_parts);
  return {{"xxh3", xxh3_hex(std::as_bytes(std::span(bytes)))},
          {"reward_parts", parts},
          {"dropped", rollout.dropped},
          {"num_drawn", rollout.num_drawn},
          {"seconds", rollout.seconds}};
}

DrawnGroups load_ahead(const std::string& folder, const Json& ahead) {
  const std::string path = folder + "/" + kAheadFile, where = folder + "/state.json: ahead";
  const MappedFile file(path);
  const auto sum = require<std::string>(ahead, "xxh3", where);
  TD_CHECK(xxh3_hex(file.bytes()) == sum, "{}: checksum {}, {} was written; the file is damaged",
           path, xxh3_hex(file.bytes()), sum);
  DrawnGroups rollout{
      .samples = decode_batch(file.bytes(), path).samples,
      .dropped = numbers_of<std::int64_t>(require<Json>(ahead, "dropped", where), where),
      .num_drawn = require<std::int64_t>(ahead, "num_drawn", where),
      .seconds = require<double>(ahead, "seconds", where)};
  const auto parts = require<std::vector<Json>>(ahead, "reward_parts", where);
  TD_CHECK(parts.size() == rollout.samples.size(), "{}: reward_parts of {} samples, {} hold {}",
           where, parts.size(), path, rollout.samples.size());
  for (std::size_t i = 0; i < parts.size(); ++i)
    rollout.samples[i].reward_parts = numbers_of<double>(parts[i], where);
  return rollout;
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
