// The trainer's calls; the long one is watched while it runs.
#include "trainer/client.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/json.h"
#include "http/fan.h"

namespace tandem {
namespace {

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

// The first rank's result with each duration the longest of any rank.
TrainResult slowest(const std::vector<TrainResult>& results) {
  TrainResult out = results.front();
  for (const TrainResult& r : results) {
    out.forward_backward_seconds =
        std::max(out.forward_backward_seconds, r.forward_backward_seconds);
    out.gather_wait_seconds = std::max(out.gather_wait_seconds, r.gather_wait_seconds);
    out.optimizer_seconds = std::max(out.optimizer_seconds, r.optimizer_seconds);
    out.log_probs_seconds = std::max(out.log_probs_seconds, r.log_probs_seconds);
    out.reference_seconds = std::max(out.reference_seconds, r.reference_seconds);
  }
  return out;
}

}  // namespace

std::vector<http::Call> TrainerClient::calls(const std::string& path, const std::string& body,
                                             const std::string& content_type) const {
  std::vector<http::Call> out;
  for (const http::Address& rank : ranks_)
    out.push_back({.address = rank, .path = path, .body = body, .content_type = content_type});
  return out;
}

Json TrainerClient::answer(const std::string& path, const std::string& body, Deadline deadline) {
  const auto bodies = http::call_all(fetcher_, calls(path, body, "application/json"), deadline);
  return parse_json(bodies.front(), ranks_.front().where(path));
}

TrainResult TrainerClient::train(
    const TrainBatch& batch, std::int64_t total_steps, Deadline deadline,
    const std::function<void(std::int64_t done, std::int64_t total)>& on_progress) {
  const std::string path = "/trainer/train?total_steps=" + std::to_string(total_steps);
  const std::string progress_source = leader_.address().where("/trainer/progress");
  const auto bodies = http::call_all(
      fetcher_, calls(path, encode_batch(batch), "application/octet-stream"), deadline, [&] {
        const http::Result r =
            leader_.try_call("GET", "/trainer/progress", "", "", deadline.within(5));
        if (!r.ok()) return;  // the long call's own fault says what is wrong
        const Json json = parse_json(r.response.body, progress_source);
        on_progress(require<std::int64_t>(json, "done", progress_source),
                    require<std::int64_t>(json, "total", progress_source));
      });
  std::vector<TrainResult> results;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    const std::string url = ranks_[i].where("/trainer/train");
    results.push_back(train_result_from_json(parse_json(bodies[i], url), url));
    for (std::size_t s = 0; s < results[i].steps.size(); ++s)
      TD_CHECK(same_bits(results[i].steps[s].grad_norm, results[0].steps[s].grad_norm),
               "{}: gradient norm {} at optimizer step {}, {} at {}; the ranks' weights no longer "
               "agree",
               url, results[i].steps[s].grad_norm, s, results[0].steps[s].grad_norm,
               ranks_.front().name);
  }
  return slowest(results);
}

void TrainerClient::update_reference(Deadline deadline) {
  answer("/trainer/update_reference", "{}", deadline);
}

SavedParts TrainerClient::save(const std::string& folder, bool optimizer, Deadline deadline) {
  const std::string path = "/trainer/save";
  const std::string body =
      dump_json(Json{{"folder", folder}, {"optimizer", optimizer}, {"reference", true}});
  const auto bodies = http::call_all(fetcher_, calls(path, body, "application/json"), deadline);
  SavedParts parts;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    const std::string url = ranks_[i].where(path);
    const Json json = parse_json(bodies[i], url);
    parts.files.push_back(shard_file_from_json(require<Json>(json, "file", url), url));
    parts.optimizer_steps = require<std::int64_t>(json, "optimizer_steps", url);
  }
  return parts;
}

void TrainerClient::load(const std::string& folder, bool optimizer, bool reference,
                         Deadline deadline) {
  const Json body{{"folder", folder}, {"optimizer", optimizer}, {"reference", reference}};
  answer("/trainer/load", dump_json(body), deadline);
  answer("/trainer/publish", "{}", deadline);
}

void TrainerClient::save_hf(const std::string& folder, Deadline deadline) {
  answer("/trainer/save_hf", Json{{"folder", folder}}.dump(), deadline);
}

}  // namespace tandem
