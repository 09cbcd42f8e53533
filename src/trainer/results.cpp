// One list of fields serves both directions of the wire.
#include "trainer/results.h"

#include <limits>

namespace tandem {
namespace {

// One list of fields for both directions.
template <class M, class V>
void walk_step(M& m, V&& visit) {
  visit("means", m.means);
  visit("rollout_abs_diff_max", m.rollout_abs_diff_max);
  visit("rollout_abs_diff", m.rollout_abs_diff);
  visit("grad_norm", m.grad_norm);
  visit("lr", m.lr);
  visit("skipped", m.skipped);
  visit("num_samples", m.num_samples);
  visit("loss_tokens", m.loss_tokens);
  visit("forward_tokens", m.forward_tokens);
  visit("micro_batches", m.micro_batches);
  visit("on_policy_samples", m.on_policy_samples);
}

template <class R, class V>
void walk_result(R& r, V&& visit) {
  visit("rollout_means", r.rollout_means);
  visit("forward_backward_seconds", r.forward_backward_seconds);
  visit("optimizer_seconds", r.optimizer_seconds);
  visit("log_probs_seconds", r.log_probs_seconds);
  visit("reference_seconds", r.reference_seconds);
  visit("gather_wait_seconds", r.gather_wait_seconds);
}

// JSON has no NaN: null stands for every number that is not finite.
void read(const Json& json, const char* key, double& value, std::string_view source) {
  const auto found = json.find(key);
  value = found != json.end() && found->is_null() ? std::numeric_limits<double>::quiet_NaN()
                                                  : require<double>(json, key, source);
}
void read(const Json& json, const char* key, std::map<std::string, double, std::less<>>& values,
          std::string_view source) {
  const auto object = require<Json>(json, key, source);
  for (const auto& item : object.items())
    read(object, item.key().c_str(), values[item.key()], source);
}
template <class T>
void read(const Json& json, const char* key, T& value, std::string_view source) {
  value = require<T>(json, key, source);
}

}  // namespace

double StepMetrics::mean(std::string_view name) const {
  const auto found = means.find(name);
  return found == means.end() ? std::numeric_limits<double>::quiet_NaN() : found->second;
}

Json to_json(const TrainResult& result) {
  Json json = Json::object();
  walk_result(result, [&](const char* key, const auto& value) { json[key] = value; });
  json["steps"] = Json::array();
  for (const StepMetrics& m : result.steps) {
    Json step = Json::object();
    walk_step(m, [&](const char* key, const auto& value) { step[key] = value; });
    json["steps"].push_back(std::move(step));
  }
  return json;
}

TrainResult train_result_from_json(const Json& json, std::string_view source) {
  TrainResult result;
  walk_result(result, [&](const char* key, auto& value) { read(json, key, value, source); });
  for (const Json& step : require<Json>(json, "steps", source)) {
    StepMetrics m;
    walk_step(m, [&](const char* key, auto& value) { read(step, key, value, source); });
    result.steps.push_back(m);
  }
  return result;
}

}  // namespace tandem
