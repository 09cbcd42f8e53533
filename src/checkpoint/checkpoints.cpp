// See checkpoints.h.
#include "checkpoint/checkpoints.h"

#include <stdio.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>

#include "base/check.h"
#include "base/text.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tandem-checkpoint-1";
constexpr const char* kPointer = "latest_checkpointed_iteration.txt";
constexpr std::string_view kNone = "none";  // in the pointer before the first checkpoint is whole
constexpr std::string_view kPrefix = "iter_";
constexpr std::string_view kPart = ".part";    // being written
constexpr std::string_view kGoing = ".going";  // being removed

// 9 of "iter_0000009".
std::optional<std::int64_t> id_of(std::string_view name) {
  if (!name.starts_with(kPrefix) || name.size() < kPrefix.size() + 7) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  if (digits.find_first_not_of("0123456789") != digits.npos) return std::nullopt;
  return parse_int(digits);
}

std::vector<std::string> names_in(const std::string& root) {
  std::vector<std::string> names;
  std::error_code error;
  for (auto it = fs::directory_iterator(root, error); !error && it != fs::directory_iterator();
       it.increment(error))
    names.push_back(it->path().filename().string());
  return names;
}

CheckpointState parse_state(const std::string& path) {
  TD_CHECK(file_exists(path), "{}: missing (the checkpoint is not whole)", path);
  const std::string text = read_file(path);
  TD_CHECK(!text.empty(), "{}: the file is empty", path);
  const Json json = parse_json(text, path);
  const auto format = require<std::string>(json, "format", path);
  TD_CHECK(format == kFormat, "{}: format '{}' found, '{}' wanted", path, format, kFormat);
  CheckpointState state{.rollout_id = require<std::int64_t>(json, "rollout_id", path),
                        .optimizer_steps = require<std::int64_t>(json, "optimizer_steps", path),
                        .files = {},
                        .run = require<Json>(json, "run", path)};
  for (const Json& file : require<Json>(json, "files", path))
    state.files.push_back(shard_file_from_json(file, path + ": files"));
  return state;
}

std::optional<std::int64_t> newest_whole(const std::string& root,
                                         std::optional<std::int64_t> not_this) {
  std::vector<std::int64_t> ids = checkpoint_ids(root);
  std::reverse(ids.begin(), ids.end());
  for (const std::int64_t id : ids)
    if (id != not_this &&
        checkpoint_faults(checkpoint_folder(root, id), Look::at_all_bytes).empty())
      return id;
  return std::nullopt;
}

}  // namespace

std::string checkpoint_folder(const std::string& root, std::int64_t rollout_id) {
  return fmt::format("{}/{}{:07}", root, kPrefix, rollout_id);
}

std::vector<std::int64_t> checkpoint_ids(const std::string& root) {
  std::vector<std::int64_t> ids;
  for (const std::string& name : names_in(root))
    if (const auto id = id_of(name); id && fs::is_directory(root + "/" + name)) ids.push_back(*id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

CheckpointState read_checkpoint(const std::string& folder) {
  TD_CHECK(fs::is_directory(folder), "{}: no such folder", folder);
  CheckpointState state = parse_state(folder + "/state.json");
  const auto number = id_of(fs::path(folder).filename().string());
  TD_CHECK(!number || *number == state.rollout_id, "{}/state.json: rollout_id {} found, {} wanted",
           folder, state.rollout_id, *number);
  std::vector<std::string> faults;
  for (const ShardFile& file : state.files)
    if (std::string fault = shard_fault(folder, file); !fault.empty())
      faults.push_back(std::move(fault));
  TD_CHECK(faults.empty(), "{}", fmt::join(faults, "\n"));
  return state;
}

std::vector<std::string> checkpoint_faults(const std::string& folder, Look look) {
  try {
    const CheckpointState state = read_checkpoint(folder);
    if (look == Look::at_headers) return {};
    return ShardReader(folder, state.files).damage();
  } catch (const Error& e) {
    return {e.what()};
  }
}

std::string fallback_advice(const std::string& root, std::optional<std::int64_t> not_this) {
  const auto whole = newest_whole(root, not_this);
  return whole
             ? fmt::format("; the newest whole checkpoint is {}: --ckpt-step {} continues from it",
                           checkpoint_folder(root, *whole), *whole)
             : fmt::format("; no {} checkpoint under {} is whole", not_this ? "other" : "", root);
}

std::optional<std::int64_t> find_checkpoint(const std::string& root,
                                            std::optional<std::int64_t> step) {
  const std::string pointer = root + "/" + kPointer;
  std::string named_by = "--ckpt-step";
  if (!step) {
    const auto ids = checkpoint_ids(root);
    if (!file_exists(pointer)) {
      if (ids.empty()) return std::nullopt;
      throw Error(fmt::format("{}: missing, but {} holds {} checkpoint{}{}", pointer, root,
                              ids.size(), ids.size() == 1 ? "" : "s",
                              fallback_advice(root, std::nullopt)));
    }
    const std::string text(trim(read_file(pointer)));
    if (text == kNone) return std::nullopt;
    step = parse_int(text);
    TD_CHECK(step && *step >= 0, "{}: '{}' found, the number of a checkpoint wanted{}", pointer,
             one_line(text, 40), fallback_advice(root, std::nullopt));
    named_by = pointer;
  }
  const std::string folder = checkpoint_folder(root, *step);
  const auto faults = checkpoint_faults(folder, Look::at_headers);
  TD_CHECK(faults.empty(), "{}: names {}, which cannot be used: {}{}", named_by, folder,
           fmt::join(faults, "; "), fallback_advice(root, step));
  return step;
}

CheckpointWriter::CheckpointWriter(std::string root, std::int64_t rollout_id)
    : root_(std::move(root)),
      rollout_id_(rollout_id),
      temporary_(checkpoint_folder(root_, rollout_id) + std::string(kPart)) {
  create_folders(root_);
  // Else a crash between the first checkpoint's name and its pointer would look like a lost
  // pointer.
  const std::string pointer = root_ + "/" + kPointer;
  if (!file_exists(pointer) && checkpoint_ids(root_).empty()) write_file_atomic(pointer, kNone);
  for (const std::string& name : names_in(root_))
    for (const std::string_view ending : {kPart, kGoing})
      if (name.ends_with(ending) && id_of(name.substr(0, name.size() - ending.size())))
        remove_tree(root_ + "/" + name);
  create_folders(temporary_);
}

CheckpointWriter::~CheckpointWriter() { remove_tree(temporary_); }

void CheckpointWriter::commit(const CheckpointState& state) {
  OrderedJson json{{"format", kFormat},
                   {"rollout_id", state.rollout_id},
                   {"optimizer_steps", state.optimizer_steps},
                   {"files", OrderedJson::array()},
                   {"run", OrderedJson(state.run)}};
  for (const ShardFile& file : state.files) json["files"].push_back(OrderedJson(to_json(file)));
  write_file_atomic(temporary_ + "/state.json", dump_json_pretty(json));
  sync_folder(temporary_);
  replace_folder(temporary_, checkpoint_folder(root_, rollout_id_));
  write_file_atomic(root_ + "/" + kPointer, std::to_string(rollout_id_));
}

std::vector<std::int64_t> checkpoints_to_remove(const std::vector<std::int64_t>& ids,
                                                std::int64_t newest,
                                                std::optional<std::int64_t> keep_last,
                                                std::optional<std::int64_t> retain_interval) {
  if (!keep_last && !retain_interval) return {};
  std::vector<std::int64_t> older;
  std::copy_if(ids.begin(), ids.end(), std::back_inserter(older),
               [&](std::int64_t id) { return id < newest; });
  std::sort(older.begin(), older.end());
  const auto kept = static_cast<std::size_t>(keep_last.value_or(1) - 1);
  older.resize(older.size() - std::min(older.size(), kept));
  if (retain_interval)
    std::erase_if(older, [&](std::int64_t id) { return (id + 1) % *retain_interval == 0; });
  return older;
}

void remove_checkpoint(const std::string& root, std::int64_t rollout_id) {
  const std::string folder = checkpoint_folder(root, rollout_id);
  const std::string going = folder + std::string(kGoing);
  TD_CHECK(::rename(folder.c_str(), going.c_str()) == 0, "{}: cannot rename it to {}: {}", folder,
           going, errno_text(errno));
  remove_tree(going);
}

}  // namespace tandem
