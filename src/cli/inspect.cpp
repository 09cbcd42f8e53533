// `tandem inspect PATH`: what a run's folder, a rollout file, a checkpoint or a model folder holds,
// and whether it is whole. It reads files only; what is damaged is an error that names it.
#include <algorithm>
#include <filesystem>
#include <map>

#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/hf_folder.h"
#include "cli/commands.h"
#include "data/batch.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// "steps:        3", the values under each other.
template <typename... Args>
void say(std::string_view label, fmt::format_string<Args...> text, Args&&... args) {
  fmt::print("{:<18}{}\n", label.empty() ? "" : fmt::format("{}:", label),
             fmt::format(text, std::forward<Args>(args)...));
}

std::string size_text(std::uint64_t bytes) { return human_bytes(static_cast<double>(bytes)); }

// ---- tensors

void inspect_tensors(const std::string& path, const SafetensorsHeader& header) {
  say("tensors", "{} in {}", header.entries.size(), size_text(fs::file_size(path)));
  std::map<std::string_view, std::int64_t> elements;
  for (const SafetensorsEntry& e : header.entries)
    elements[dtype_name(e.dtype)] += shape_elements(e.shape);
  for (const auto& [dtype, count] : elements) say("elements", "{} {}", count, dtype);
  for (const auto& [key, value] : header.metadata)
    say("metadata", "{} = {}", key, one_line(value, 60));
  for (const SafetensorsEntry& e : header.entries)
    fmt::print("  {:<60} {:<8} {}\n", e.name, dtype_name(e.dtype), shape_text(e.shape));
}

// ---- rollouts

void inspect_rollout(const std::string& path) {
  constexpr std::size_t kShownSamples = 3;
  const MappedFile file(path);
  const TrainBatch batch = decode_batch(file.bytes(), path);
  std::map<std::uint64_t, std::int64_t> groups;
  std::map<std::string_view, std::int64_t> states;
  std::map<std::int64_t, std::int64_t> versions;
  std::int64_t prompt = 0, response = 0, longest = 0, trained = 0, rewarded = 0, answered = 0;
  double reward = 0, least = INFINITY, most = -INFINITY;
  for (const Sample& s : batch.samples) {
    ++groups[s.prompt_id];
    ++states[sample_status_name(s.status)];
    for (const std::int64_t v : s.weight_versions) ++versions[v];
    prompt += s.prompt_length();
    response += s.response_length;
    longest = std::max(longest, s.response_length);
    trained += std::count(s.loss_mask.begin(), s.loss_mask.end(), std::uint8_t{1});
    if (s.status == SampleStatus::failed) continue;  // no reward, and a length that means nothing
    ++rewarded;
    answered += s.response_length;
    reward += s.reward;
    least = std::min(least, s.reward);
    most = std::max(most, s.reward);
  }
  const auto count = static_cast<double>(std::max<std::int64_t>(rewarded, 1));
  say("rollout", "{} samples of {} prompts", batch.samples.size(), groups.size());
  say("tokens", "{} of prompts, {} of answers (mean {:.1f}, longest {}), {} trained on", prompt,
      response, static_cast<double>(answered) / count, longest, trained);
  if (rewarded > 0)
    say("reward", "mean {:.4g}, least {:.4g}, most {:.4g}", reward / static_cast<double>(rewarded),
        least, most);
  for (const auto& [name, n] : states) say("status", "{} {}", n, name);
  for (const auto& [version, n] : versions) say("weight version", "{}: {} tokens", version, n);
  say("log-probabilities", "of the engine{}",
      batch.trainer_log_probs.empty() ? "" : " and of the trainer");
  for (std::size_t i = 0; i < std::min(kShownSamples, batch.samples.size()); ++i) {
    const Sample& s = batch.samples[i];
    fmt::print("\n  sample {}, prompt {}, {}\n", s.id, s.prompt_id,
               s.status == SampleStatus::failed
                   ? "failed: no reward, not trained on"
                   : fmt::format("reward {:.4g}, advantage {:.4g}", s.reward, batch.advantages[i]));
    fmt::print("    answer: {}\n    label:  {}\n", one_line(s.response, 300),
               one_line(s.label, 100));
  }
}

// ---- checkpoints

void inspect_checkpoint(const std::string& folder) {
  const CheckpointState state = read_checkpoint(folder);
  const ShardReader reader(folder, state.files);
  std::uint64_t bytes = 0;
  for (const ShardFile& file : state.files) bytes += file.bytes;
  std::int64_t parameters = 0, tensors = 0;
  for (const auto& [name, pieces] : reader.pieces())
    if (name.starts_with("master.")) {
      ++tensors;
      parameters += shape_elements(pieces.front().shape);
    }
  const bool optimizer = std::any_of(reader.pieces().begin(), reader.pieces().end(),
                                     [](const auto& p) { return p.first.starts_with("exp_avg."); });
  say("checkpoint", "rollout {} done (step {}), {} optimizer steps", state.rollout_id,
      state.rollout_id + 1, state.optimizer_steps);
  say("parameters", "{} in {} tensors, f32 master weights{}", parameters, tensors,
      optimizer ? " and both moments" : " without the optimizer's moments");
  say("files", "{} of {} rank{}, {}", state.files.size(), state.files.size(),
      state.files.size() == 1 ? "" : "s", size_text(bytes));
  if (const auto order = state.run.find("prompt_order"); order != state.run.end())
    say("prompts", "{}", dump_json(*order));
  if (const auto version = state.run.find("weight_version"); version != state.run.end())
    say("weight version", "{}", dump_json(*version));
  if (const auto config = state.run.find("config"); config != state.run.end())
    say("model", "{}", dump_json((*config)["model"]["hf_checkpoint"]));
  const auto damage = reader.damage();
  TD_CHECK(damage.empty(), "{}", fmt::join(damage, "\n"));
  say("whole", "yes: every byte is the one that was written");
}

// Every one under root, then the one to go on from. Error: if any is damaged.
void inspect_checkpoints(const std::string& root) {
  std::vector<std::int64_t> whole, damaged;
  for (const std::int64_t id : checkpoint_ids(root)) {
    const auto faults = checkpoint_faults(checkpoint_folder(root, id), Look::at_all_bytes);
    (faults.empty() ? whole : damaged).push_back(id);
    say(fmt::format("step {}", id + 1), "{}: {}", checkpoint_folder(root, id),
        faults.empty() ? "whole" : fmt::format("{}", fmt::join(faults, "; ")));
  }
  const auto newest = find_checkpoint(root, std::nullopt);
  if (newest && std::find(damaged.begin(), damaged.end(), *newest) != damaged.end())
    say("goes on from", "{}",
        whole.empty() ? "none: no checkpoint is whole"
                      : fmt::format("{}, the newest whole one, with --ckpt-step {}",
                                    checkpoint_folder(root, whole.back()), whole.back()));
  else
    say("goes on from", "{}", newest ? checkpoint_folder(root, *newest) : "nothing yet");
  TD_CHECK(damaged.empty(), "{}: {} of {} checkpoints are damaged", root, damaged.size(),
           damaged.size() + whole.size());
}

// ---- runs

std::vector<Json> read_rows(const std::string& path) {
  std::vector<Json> rows;
  const std::string text = file_exists(path) ? read_file(path) : "";
  std::size_t number = 0;
  for (const std::string_view line : split(trim(text), '\n'))
    if (++number; !line.empty())
      rows.push_back(parse_json(line, fmt::format("{}: line {}", path, number)));
  return rows;
}

std::string number_text(const Json& row, const char* key) {
  const auto value = row.find(key);
  return value == row.end() || !value->is_number() ? "-"
                                                   : fmt::format("{:.4g}", value->get<double>());
}

void inspect_run(const std::string& folder) {
  const Json config = read_json_file(folder + "/config.json");
  const std::string where = folder + "/config.json";
  const Json model = require<Json>(config, "model", where),
             data = require<Json>(config, "data", where);
  say("run", "{}", folder);
  say("model", "{} in {}", dump_json(model["hf_checkpoint"]), dump_json(model["dtype"]));
  say("prompts", "{}", dump_json(data["prompt_data"]));
  std::vector<Json> steps, evaluations;
  for (const Json& row : read_rows(folder + "/metrics.jsonl"))
    (row.contains("perf/step_time") ? steps : evaluations).push_back(row);
  say("steps", "{} of {}", steps.size(), dump_json(data["num_rollout"]));
  for (const char* key :
       {"rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm",
        "train/train_rollout_logprob_abs_diff_max", "perf/step_time"})
    if (!steps.empty())
      say("", "{:<44} first {:>10}  last {:>10}", key, number_text(steps.front(), key),
          number_text(steps.back(), key));
  if (!evaluations.empty())
    for (const auto& [key, value] : evaluations.front().items())
      if (key.starts_with("eval/") && key.find('/', 5) == key.npos)
        say("", "{:<44} first {:>10}  last {:>10}", key,
            number_text(evaluations.front(), key.c_str()),
            number_text(evaluations.back(), key.c_str()));
  std::error_code none;
  const auto rollouts = std::distance(fs::directory_iterator(folder + "/rollouts", none), {});
  say("rollouts", "{} files", rollouts);
  const std::string inside = folder + "/checkpoints";
  const Json saves = config.value("checkpoint", Json::object());
  const std::string root = fs::is_directory(inside) ? inside : saves.value("save", std::string());
  if (!root.empty()) inspect_checkpoints(root);
}

void inspect_model(const std::string& path) {
  const HfFolder folder = HfFolder::open(path);
  const ModelConfig& c = folder.config();
  std::int64_t parameters = 0;
  std::map<std::string_view, std::int64_t> dtypes;
  for (const std::string& name : folder.names()) {
    const HfTensor& tensor = folder.tensor(name);
    parameters += shape_elements(tensor.shape);
    ++dtypes[dtype_name(tensor.dtype)];
  }
  say("model", "{} ({})", c.architecture, c.family);
  say("parameters", "{} in {} tensors, {}", parameters, folder.names().size(),
      size_text(folder.total_bytes()));
  for (const auto& [dtype, count] : dtypes) say("dtype", "{}: {} tensors", dtype, count);
  say("shape", "{} layers, hidden {}, {} heads of {}, {} key-value heads, mlp {}, vocabulary {}",
      c.num_layers, c.hidden_size, c.num_heads, c.head_dim, c.num_kv_heads, c.intermediate_size,
      c.vocab_size);
  say("context", "{} tokens", c.max_position_embeddings);
  say("head", "{}", c.tie_word_embeddings ? "tied to the embedding" : "of its own");
  say("eos ids", "{}", fmt::join(c.eos_ids, ", "));
  for (const std::string& notice : folder.notices()) say("notice", "{}", notice);
}

void inspect(const std::string& path) {
  TD_CHECK(file_exists(path), "{}: no such file or folder", path);
  if (!fs::is_directory(path)) {
    const MappedFile file(path);
    const SafetensorsHeader header = parse_safetensors(file.bytes(), path);
    const auto format = header.metadata.find("format");
    if (format != header.metadata.end() && format->second.starts_with("tandem-batch"))
      return inspect_rollout(path);
    return inspect_tensors(path, header);
  }
  if (file_exists(path + "/state.json")) return inspect_checkpoint(path);
  if (!checkpoint_ids(path).empty()) return inspect_checkpoints(path);
  TD_CHECK(file_exists(path + "/config.json"),
           "{}: neither a run's folder, a model folder (config.json) nor a folder of checkpoints "
           "(iter_…)",
           path);
  const Json config = read_json_file(path + "/config.json");
  if (config.is_object() && config.contains("rollout") && config.contains("optimizer"))
    return inspect_run(path);
  inspect_model(path);
}

}  // namespace

int command_inspect(const std::vector<std::string>& words) {
  constexpr const char* kUsage =
      "usage: tandem inspect PATH\n\nPATH: a run's folder, a file of its rollouts/, a checkpoint "
      "or a folder of them,\na model folder, any safetensors file.\n";
  if (words.size() == 1 && (words[0] == "--help" || words[0] == "-h")) {
    fmt::print("{}", kUsage);
    return 0;
  }
  if (words.size() != 1 || words[0].starts_with("--"))
    throw UsageError(fmt::format("one path wanted, {} words found\n{}", words.size(), kUsage));
  inspect(fs::path(words[0]).lexically_normal().string());
  return 0;
}

}  // namespace tandem
