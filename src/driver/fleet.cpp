// Starting ranks and making their clients.
#include "driver/fleet.h"

#include <algorithm>
#include <random>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/process.h"
#include "base/text.h"
#include "config/json.h"
#include "http/fan.h"

namespace tandem {
namespace {

// 128 random bits for the run's control calls.
std::string random_token() {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 4; ++i) token += fmt::format("{:08x}", device());
  return token;
}

std::string rank_input(const Config& config, const RankAssignment& assignment) {
  OrderedJson input;
  input["assignment"] = parse_ordered_json(dump_json(to_json(assignment)), "rank assignment");
  input["config"] = to_json(config);
  return dump_json_pretty(input);
}

// A rank sees the one GPU that is its own, which is then its first.
std::vector<std::pair<std::string, std::string>> environment_of(const Config& config, int rank) {
  if (config.compute.device != Device::cuda) return {};
  const auto gpus = visible_gpus();
  TD_CHECK(static_cast<std::size_t>(rank) < gpus.size(),
           "--device: rank {} wants a GPU of its own, {} are visible", rank, gpus.size());
  return {{"CUDA_VISIBLE_DEVICES", gpus[static_cast<std::size_t>(rank)]}};
}

}  // namespace

Fleet::Fleet(const Config& config, const Placement& placement)
    : placement_(placement),
      generation_(static_cast<std::size_t>(
          std::max<std::int64_t>(64, config.engine.max_running_requests))) {
  const bool alone = placement.ranks.size() == 1;
  if (!alone)
    store_.emplace(Store::serve("127.0.0.1", 0, config.cluster.rank_start_timeout_seconds));
  cluster_ = make_local_cluster(config.logging.run_dir);
  const std::string token = random_token();
  const double start = monotonic_seconds();
  for (const RankRole& role : placement.ranks)
    cluster_->start({.rank = role.rank,
                     .argv = {own_executable(), "rank"},
                     .env = environment_of(config, role.rank),
                     .token = token,
                     .config = rank_input(config, {.rank = role.rank,
                                                   .placement = placement,
                                                   .store_host = alone ? "" : store_->host(),
                                                   .store_port = alone ? 0 : store_->port()})});
  const auto handles =
      cluster_->wait_ready(Deadline::after(config.cluster.rank_start_timeout_seconds));
  std::vector<http::Address> addresses;
  for (const RankHandle& handle : handles) {
    addresses.push_back(handle.address);
    addresses.back().token = token;
    addresses.back().name = fmt::format("rank {}", handle.rank);
    TD_LOG(info, "rank {}: process {} on {}, port {}", handle.rank, handle.pid, handle.host,
           handle.address.port);
  }
  std::vector<http::Address> trainers;
  for (int rank : placement.trainer_ranks())
    trainers.push_back(addresses.at(static_cast<std::size_t>(rank)));
  for (const RankRole& role : placement.ranks)
    if (role.serves() && role.leads_engine())
      engines_.push_back(std::make_unique<EngineClient>(
          addresses.at(static_cast<std::size_t>(role.rank)), generation_));
  trainer_.emplace(std::move(trainers), fetcher_);
  for (const http::Address& address : addresses)
    usage_calls_.push_back({.address = address, .method = "GET", .path = "/usage"});
  update_.emplace(std::move(addresses), fetcher_);
  TD_LOG(info, "{} rank{} ready in {}:\n{}", handles.size(), handles.size() == 1 ? "" : "s",
         human_seconds(monotonic_seconds() - start), placement.describe());
}

Fleet::~Fleet() { stop(Deadline::after(10)); }

void Fleet::stop(Deadline deadline) { cluster_->stop(deadline); }

std::vector<EngineClient*> Fleet::engines() {
  std::vector<EngineClient*> out;
  for (auto& engine : engines_) out.push_back(engine.get());
  return out;
}

RankUsage Fleet::usage(Deadline deadline) {
  RankUsage usage;
  const auto bodies = http::call_all(fetcher_, usage_calls_, deadline);
  for (std::size_t r = 0; r < bodies.size(); ++r) {
    const std::string source = usage_calls_[r].address.where("/usage");
    const Json json = parse_json(bodies[r], source);
    usage.most.resident_bytes =
        std::max(usage.most.resident_bytes, require<std::int64_t>(json, "resident_bytes", source));
    usage.most.peak_bytes =
        std::max(usage.most.peak_bytes, require<std::int64_t>(json, "peak_bytes", source));
    if (placement_.ranks[r].trains())
      usage.trainer_busy.push_back(require<double>(json, "trainer_busy_seconds", source));
    if (placement_.ranks[r].serves())
      usage.engine_busy.push_back(require<double>(json, "engine_busy_seconds", source));
  }
  return usage;
}

UpdateTimes Fleet::update_weights(const UpdateCall& call, Deadline deadline) {
  const double start = monotonic_seconds();
  const auto pause = [&] {
    if (call.pause)
      for (auto& engine : engines_) engine->pause(*call.pause, deadline);
  };
  if (!call.moves_aside) pause();
  const double begun = monotonic_seconds();
  UpdateTimes times =
      update_->update(call.version, call.since_write, deadline,
                      call.pause && call.moves_aside ? pause : std::function<void()>());
  const double updated = monotonic_seconds();
  if (call.pause) {
    for (auto& engine : engines_) engine->resume(deadline);
    const double outside = begun - start + monotonic_seconds() - updated;
    times.pause_seconds += outside;
    times.seconds += outside;
  }
  if (call.check) update_->check(call.version, deadline);
  return times;
}

}  // namespace tandem
