// The trainer's calls; the long one is watched while it runs.
#include "trainer/client.h"

#include <chrono>
#include <future>
#include <memory>

#include "base/check.h"
#include "base/json.h"

namespace tandem {

Json TrainerClient::answer(const std::string& path, std::string body, Deadline deadline) {
  return parse_json(client_.call(path, std::move(body), deadline), client_.address().url(path));
}

TrainResult TrainerClient::train(
    const TrainBatch& batch, std::int64_t total_steps, Deadline deadline,
    const std::function<void(std::int64_t done, std::int64_t total)>& on_progress) {
  const http::Call call{.address = client_.address(),
                        .path = "/trainer/train?total_steps=" + std::to_string(total_steps),
                        .body = encode_batch(batch),
                        .content_type = "application/octet-stream"};
  auto promise = std::make_shared<std::promise<http::Result>>();
  auto answered = promise->get_future();
  fetcher_.start(call, deadline, [promise](http::Result r) { promise->set_value(std::move(r)); });
  const std::string progress_source = client_.address().url("/trainer/progress");
  while (answered.wait_for(std::chrono::milliseconds(200)) != std::future_status::ready) {
    const http::Result r = client_.try_call("GET", "/trainer/progress", "", "", deadline.within(5));
    if (!r.ok()) continue;  // the long call's own fault says what is wrong
    const Json json = parse_json(r.response.body, progress_source);
    on_progress(require<std::int64_t>(json, "done", progress_source),
                require<std::int64_t>(json, "total", progress_source));
  }
  const http::Result result = answered.get();
  TD_CHECK(result.ok(), "{}", http::describe(call, result));
  const std::string url = client_.address().url("/trainer/train");
  return train_result_from_json(parse_json(result.response.body, url), url);
}

UpdateTimes TrainerClient::update_weights(std::int64_t version, Deadline deadline) {
  const std::string path = "/trainer/update_weights";
  const Json json = answer(path, Json{{"weight_version", version}}.dump(), deadline);
  const std::string source = client_.address().url(path);
  return {.seconds = require<double>(json, "seconds", source),
          .announce_seconds = require<double>(json, "announce_seconds", source),
          .move_seconds = require<double>(json, "move_seconds", source),
          .verify_seconds = require<double>(json, "verify_seconds", source),
          .swap_seconds = require<double>(json, "swap_seconds", source),
          .total_bytes = require<std::int64_t>(json, "total_bytes", source),
          .moved_bytes = require<std::int64_t>(json, "moved_bytes", source)};
}

void TrainerClient::save_hf(const std::string& folder, Deadline deadline) {
  answer("/trainer/save_hf", Json{{"folder", folder}}.dump(), deadline);
}

}  // namespace tandem
