// See batch.h.
#include "data/batch.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "base/safetensors.h"
#include "base/text.h"

namespace tandem {
namespace {

constexpr std::string_view kFormat = "tandem-batch-1";

constexpr std::array<std::pair<SampleStatus, std::string_view>, 5> kStatusNames = {
    {{SampleStatus::pending, "pending"},
     {SampleStatus::completed, "completed"},
     {SampleStatus::truncated, "truncated"},
     {SampleStatus::aborted, "aborted"},
     {SampleStatus::failed, "failed"}}};

constexpr std::array<std::pair<FinishReason, std::string_view>, 4> kFinishNames = {
    {{FinishReason::none, "none"},
     {FinishReason::stop, "stop"},
     {FinishReason::length, "length"},
     {FinishReason::abort, "abort"}}};

template <class Names, class Value>
std::string_view name_of(const Names& names, Value value) {
  for (const auto& [known, name] : names) {
    if (known == value) return name;
  }
  return "?";
}

template <class Names>
auto value_of(const Names& names, const std::string& name, const std::string& where) {
  for (const auto& [value, known] : names) {
    if (known == name) return value;
  }
  throw Error(fmt::format("{}: unknown word '{}'", where, name));
}

template <class T>
constexpr Dtype dtype_of() {
  if constexpr (std::is_same_v<T, float>)
    return Dtype::f32;
  else if constexpr (std::is_same_v<T, double>)
    return Dtype::f64;
  else if constexpr (std::is_same_v<T, std::int32_t>)
    return Dtype::i32;
  else if constexpr (std::is_same_v<T, std::int64_t>)
    return Dtype::i64;
  else if constexpr (std::is_same_v<T, std::uint64_t>)
    return Dtype::u64;
  else {
    static_assert(std::is_same_v<T, std::uint8_t>);
    return Dtype::u8;
  }
}

template <class T>
void append(std::vector<T>& all, const std::vector<T>& part) {
  all.insert(all.end(), part.begin(), part.end());
}

// Every field of a batch as one flat vector: what is written, and what was read.
struct Columns {
  std::vector<std::uint64_t> ids, prompt_ids;
  std::vector<std::int64_t> total_lengths, response_lengths, weight_versions;
  std::vector<double> rewards;
  std::vector<float> advantages, log_probs, trainer_log_probs;
  std::vector<TokenId> tokens;
  std::vector<std::uint8_t> loss_mask;

  // visit("name", column) for all that are always there.
  template <class Self, class Visit>
  static void for_each(Self& self, const Visit& visit) {
    visit("ids", self.ids);
    visit("prompt_ids", self.prompt_ids);
    visit("total_lengths", self.total_lengths);
    visit("response_lengths", self.response_lengths);
    visit("rewards", self.rewards);
    visit("advantages", self.advantages);
    visit("tokens", self.tokens);
    visit("log_probs", self.log_probs);
    visit("loss_mask", self.loss_mask);
    visit("weight_versions", self.weight_versions);
  }
};

Columns make_columns(const TrainBatch& batch) {
  Columns columns;
  columns.advantages = batch.advantages;
  for (const Sample& sample : batch.samples) {
    columns.ids.push_back(sample.id);
    columns.prompt_ids.push_back(sample.prompt_id);
    columns.total_lengths.push_back(static_cast<std::int64_t>(sample.tokens.size()));
    columns.response_lengths.push_back(sample.response_length);
    columns.rewards.push_back(sample.reward);
    append(columns.tokens, sample.tokens);
    append(columns.log_probs, sample.log_probs);
    append(columns.loss_mask, sample.loss_mask);
    append(columns.weight_versions, sample.weight_versions);
  }
  for (const auto& part : batch.trainer_log_probs) append(columns.trainer_log_probs, part);
  return columns;
}

std::string texts_json(const TrainBatch& batch) {
  Json texts = Json::array();
  for (const Sample& sample : batch.samples) {
    texts.push_back({{"response", sample.response},
                     {"label", sample.label},
                     {"status", sample_status_name(sample.status)},
                     {"finish", finish_reason_name(sample.finish)}});
    if (!sample.error.empty()) texts.back()["error"] = sample.error;
  }
  return dump_json(texts);
}

template <class T>
TensorView view_of(const char* name, const std::vector<T>& column) {
  return {name, dtype_of<T>(), {static_cast<std::int64_t>(column.size())}, bytes_of(column)};
}

// Reads the column `name` of any length.
template <class T>
std::vector<T> read_column(const SafetensorsHeader& header, std::span<const std::byte> body,
                           const char* name, std::string_view source) {
  const SafetensorsEntry* entry = header.find(name);
  TD_CHECK(entry, "{}: tensor '{}' is missing: not a whole training batch", source, name);
  TD_CHECK(entry->dtype == dtype_of<T>() && entry->shape.size() == 1,
           "{}: tensor '{}' is {} {}, wanted {} with one dimension", source, name,
           dtype_name(entry->dtype), shape_text(entry->shape), dtype_name(dtype_of<T>()));
  std::vector<T> column(static_cast<std::size_t>(entry->shape[0]));
  const std::span<const std::byte> bytes = header.bytes(body, *entry);
  if (!bytes.empty()) std::memcpy(column.data(), bytes.data(), bytes.size());
  return column;
}

// Hands out a flat column piece by piece.
template <class T>
std::vector<T> take(const std::vector<T>& column, std::size_t& at, std::int64_t count) {
  const auto begin = column.begin() + static_cast<std::ptrdiff_t>(at);
  at += static_cast<std::size_t>(count);
  return {begin, begin + static_cast<std::ptrdiff_t>(count)};
}

// Lengths are not negative, agree with each other and with the flat columns.
void check_columns(const Columns& columns, std::size_t num_texts, std::string_view source) {
  const std::size_t n = columns.ids.size();
  for (const auto& [name, size] :
       {std::pair("prompt_ids", columns.prompt_ids.size()),
        std::pair("total_lengths", columns.total_lengths.size()),
        std::pair("response_lengths", columns.response_lengths.size()),
        std::pair("rewards", columns.rewards.size()),
        std::pair("advantages", columns.advantages.size()), std::pair("samples", num_texts)}) {
    TD_CHECK(size == n, "{}: '{}' has {} values for {} samples", source, name, size, n);
  }
  std::uint64_t total = 0, response = 0;
  for (std::size_t i = 0; i < n; ++i) {
    TD_CHECK(
        columns.response_lengths[i] >= 0 && columns.response_lengths[i] <= columns.total_lengths[i],
        "{}: sample {}: response length {} in {} tokens", source, columns.ids[i],
        columns.response_lengths[i], columns.total_lengths[i]);
    total += static_cast<std::uint64_t>(columns.total_lengths[i]);
    response += static_cast<std::uint64_t>(columns.response_lengths[i]);
  }
  for (const auto& [name, size, wanted] :
       {std::tuple("tokens", columns.tokens.size(), total),
        std::tuple("log_probs", columns.log_probs.size(), response),
        std::tuple("loss_mask", columns.loss_mask.size(), response),
        std::tuple("weight_versions", columns.weight_versions.size(), response)}) {
    TD_CHECK(size == wanted, "{}: '{}' has {} values, the lengths add up to {}", source, name, size,
             wanted);
  }
}

}  // namespace

std::string_view sample_status_name(SampleStatus status) { return name_of(kStatusNames, status); }
std::string_view finish_reason_name(FinishReason finish) { return name_of(kFinishNames, finish); }

void check_sample(const Sample& sample) {
  const auto response = static_cast<std::size_t>(sample.response_length);
  TD_CHECK(sample.response_length >= 0 && response <= sample.tokens.size(),
           "sample {}: response length {} in {} tokens", sample.id, sample.response_length,
           sample.tokens.size());
  for (const auto& [name, size] : {std::pair("log_probs", sample.log_probs.size()),
                                   std::pair("loss_mask", sample.loss_mask.size()),
                                   std::pair("weight_versions", sample.weight_versions.size())}) {
    TD_CHECK(size == response, "sample {}: {} {} for {} response tokens", sample.id, size, name,
             response);
  }
}

void check_batch(const TrainBatch& batch) {
  const std::size_t n = batch.samples.size();
  TD_CHECK(batch.advantages.size() == n, "training batch: {} advantages for {} samples",
           batch.advantages.size(), n);
  TD_CHECK(batch.trainer_log_probs.empty() || batch.trainer_log_probs.size() == n,
           "training batch: trainer log-probabilities of {} samples, the batch has {}",
           batch.trainer_log_probs.size(), n);
  for (std::size_t i = 0; i < n; ++i) {
    const Sample& sample = batch.samples[i];
    check_sample(sample);
    if (batch.trainer_log_probs.empty()) continue;
    const std::size_t size = batch.trainer_log_probs[i].size();
    TD_CHECK(size == sample.log_probs.size(),
             "sample {}: {} trainer log-probabilities for {} response tokens", sample.id, size,
             sample.response_length);
  }
}

std::string encode_batch(const TrainBatch& batch) {
  check_batch(batch);
  const Columns columns = make_columns(batch);
  std::vector<TensorView> tensors;
  Columns::for_each(columns, [&](const char* name, const auto& column) {
    tensors.push_back(view_of(name, column));
  });
  if (!batch.trainer_log_probs.empty()) {
    tensors.push_back(view_of("trainer_log_probs", columns.trainer_log_probs));
  }
  SafetensorsMetadata metadata{{"format", std::string(kFormat)}, {"samples", texts_json(batch)}};
  if (batch.trainer_version > 0)
    metadata["trainer_version"] = std::to_string(batch.trainer_version);
  return encode_safetensors(tensors, metadata);
}

TrainBatch decode_batch(std::span<const std::byte> body, std::string_view source) {
  const SafetensorsHeader header = parse_safetensors(body, source);
  const auto format = header.metadata.find("format");
  TD_CHECK(format != header.metadata.end() && format->second == kFormat,
           "{}: its format is '{}', wanted '{}'", source,
           format == header.metadata.end() ? "" : format->second, kFormat);
  const auto texts_entry = header.metadata.find("samples");
  TD_CHECK(texts_entry != header.metadata.end(), "{}: metadata 'samples' is missing", source);
  const std::string where = fmt::format("{}: metadata 'samples'", source);
  const auto texts = read_value<std::vector<Json>>(parse_json(texts_entry->second, where), where);

  Columns columns;
  Columns::for_each(columns, [&](const char* name, auto& column) {
    using T = typename std::decay_t<decltype(column)>::value_type;
    column = read_column<T>(header, body, name, source);
  });
  check_columns(columns, texts.size(), source);

  TrainBatch batch;
  if (const auto version = header.metadata.find("trainer_version");
      version != header.metadata.end()) {
    const auto number = parse_int(version->second);
    TD_CHECK(number, "{}: trainer_version '{}' is no number", source, version->second);
    batch.trainer_version = *number;
  }
  batch.advantages = columns.advantages;
  const bool has_trainer = header.find("trainer_log_probs") != nullptr;
  if (has_trainer) {
    columns.trainer_log_probs = read_column<float>(header, body, "trainer_log_probs", source);
    TD_CHECK(columns.trainer_log_probs.size() == columns.log_probs.size(),
             "{}: 'trainer_log_probs' has {} values, 'log_probs' {}", source,
             columns.trainer_log_probs.size(), columns.log_probs.size());
  }
  std::size_t token_at = 0, log_prob_at = 0, mask_at = 0, version_at = 0, trainer_at = 0;
  for (std::size_t i = 0; i < columns.ids.size(); ++i) {
    const std::int64_t response = columns.response_lengths[i];
    Sample sample;
    sample.id = columns.ids[i];
    sample.prompt_id = columns.prompt_ids[i];
    sample.tokens = take(columns.tokens, token_at, columns.total_lengths[i]);
    sample.response_length = response;
    sample.log_probs = take(columns.log_probs, log_prob_at, response);
    sample.loss_mask = take(columns.loss_mask, mask_at, response);
    sample.weight_versions = take(columns.weight_versions, version_at, response);
    if (has_trainer) {
      batch.trainer_log_probs.push_back(take(columns.trainer_log_probs, trainer_at, response));
    }
    sample.reward = columns.rewards[i];
    sample.response = require<std::string>(texts[i], "response", where);
    sample.label = require<std::string>(texts[i], "label", where);
    sample.error = optional_key<std::string>(texts[i], "error", where, "");
    sample.status = value_of(kStatusNames, require<std::string>(texts[i], "status", where), where);
    sample.finish = value_of(kFinishNames, require<std::string>(texts[i], "finish", where), where);
    batch.samples.push_back(std::move(sample));
  }
  return batch;
}

}  // namespace tandem
