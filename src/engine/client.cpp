// The driver's side of an engine's HTTP face.
#include "engine/client.h"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <thread>

#include "base/check.h"
#include "engine/wire.h"

namespace tandem {
namespace {

// Fixed width, so that no group's name is the beginning of another's.
std::string group_rid(std::uint64_t prompt_id, bool evaluation) {
  return fmt::format("{}-{:020}", evaluation ? "eval" : "train", prompt_id);
}

SampleStatus status_of(FinishReason finish) {
  switch (finish) {
    case FinishReason::stop:
      return SampleStatus::completed;
    case FinishReason::length:
      return SampleStatus::truncated;
    case FinishReason::abort:
      return SampleStatus::aborted;
    case FinishReason::none:
      break;
  }
  return SampleStatus::failed;
}

Sample make_sample(const PromptGroup& group, std::size_t i, SampleResult result) {
  Sample sample;
  sample.id = group.first_sample_id + i;
  sample.prompt_id = group.prompt_id;
  sample.tokens.reserve(group.prompt.size() + result.output_ids.size());
  sample.tokens = group.prompt;
  sample.tokens.insert(sample.tokens.end(), result.output_ids.begin(), result.output_ids.end());
  sample.response_length = static_cast<std::int64_t>(result.output_ids.size());
  sample.loss_mask.assign(result.output_ids.size(), 1);
  sample.log_probs = std::move(result.log_probs);
  sample.weight_versions = std::move(result.versions);
  sample.finish = result.finish;
  sample.cached_tokens = result.cached_tokens;
  sample.status = status_of(result.finish);
  return sample;
}

// The edge to another process: whatever its answer holds, the group ends in a value.
GroupResult read_group(const PromptGroup& group, const http::Call& call,
                       const http::Result& result) {
  GroupResult read;
  read.prompt_id = group.prompt_id;
  if (!result.ok()) {
    read.error = http::describe(call, result);
    return read;
  }
  const std::string source = call.address.where(call.path);
  try {
    std::vector<SampleResult> answers =
        parse_generate_answer(parse_json(result.response.body, source), group.n, source);
    for (std::size_t i = 0; i < answers.size(); ++i) {
      read.samples.push_back(make_sample(group, i, std::move(answers[i])));
    }
  } catch (const Error& error) {
    read.samples.clear();
    read.error = error.what();
  }
  return read;
}

const char* name_of(PauseMode mode) {
  switch (mode) {
    case PauseMode::abort:
      return "abort";
    case PauseMode::retract:
      return "retract";
    case PauseMode::in_place:
      break;
  }
  return "in_place";
}

}  // namespace

void EngineClient::generate(const PromptGroup& group, Deadline deadline,
                            std::function<void(GroupResult)> on_finish) {
  GenerateRequest request;
  request.rid = group_rid(group.prompt_id, group.params.evaluation);
  request.prompt = group.prompt;
  request.n = group.n;
  request.first_sample_id = group.first_sample_id;
  request.params = group.params;
  http::Call call = {
      .address = address(), .path = "/generate", .body = dump_json(generate_body(request))};
  const http::Call named = {.address = call.address, .path = call.path};
  fetcher_.start(std::move(call), deadline,
                 [group, named, on_finish = std::move(on_finish)](const http::Result& result) {
                   on_finish(read_group(group, named, result));
                 });
}

void EngineClient::pause(PauseMode mode, Deadline deadline) {
  control_.call("/pause_generation", dump_json(Json{{"mode", name_of(mode)}}), deadline);
}

void EngineClient::resume(Deadline deadline) {
  control_.call("/continue_generation", "{}", deadline);
}

void EngineClient::flush_cache(Deadline deadline) { control_.fetch("/flush_cache", deadline); }

void EngineClient::abort_all(Deadline deadline) {
  control_.call("/abort_request", R"({"abort_all":true})", deadline);
}

void EngineClient::abort(std::uint64_t prompt_id, bool evaluation, Deadline deadline) {
  control_.call("/abort_request", dump_json(Json{{"rid", group_rid(prompt_id, evaluation)}}),
                deadline);
}

std::int64_t EngineClient::weight_version(Deadline deadline) {
  const std::string path = "/get_weight_version";
  const std::string source = address().where(path);
  const Json answer = parse_json(control_.fetch(path, deadline), source);
  return parse_weight_version(require<std::string>(answer, "weight_version", source), source);
}

bool EngineClient::healthy(Deadline deadline) {
  return control_.try_call("GET", "/health", "", "application/json", deadline).ok();
}

bool EngineClient::generates(Deadline deadline) {
  return control_.try_call("GET", "/health_generate", "", "application/json", deadline).ok();
}

void EngineClient::wait_healthy(Deadline deadline) {
  while (!healthy(deadline.within(5.0))) {
    TD_CHECK(!deadline.expired(), "{}: the engine did not answer within {}; see its log",
             address().where("/health"), deadline.describe());
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

}  // namespace tandem
