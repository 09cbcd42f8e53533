// A colocated rank: trainer and engine over one arena, served by one compute thread.
#include "rank/rank.h"

#include <unistd.h>
#include <csignal>

#include <exception>

#include "base/check.h"
#include "base/log.h"
#include "base/text.h"
#include "cluster/lifeline.h"
#include "config/json.h"
#include "engine/serve.h"
#include "rank/compute_queue.h"
#include "rank/worker.h"
#include "trainer/serve.h"
#include "trainer/trainer.h"
#include "transfer/transfer.h"

namespace tandem {
namespace {

// Trainer and engine over one arena.
class ColocatedRank {
 public:
  ColocatedRank(const Config& config, const std::string& token)
      : config_(config),
        weights_(config.model.hf_checkpoint, compute_element(config.model.dtype),
                 compute_place(config.compute.device)),
        group_(Group::alone("trainer")),
        worker_(weights_.folder, weights_.arena, config.engine,
                config.engine.kv_cache_tokens.value_or(65536), [this] { queue_.wake(); }),
        trainer_(make_trainer({.train = config.train,
                               .algorithm = config.algorithm,
                               .optimizer = config.optimizer,
                               .temperature = config.rollout.rollout_temperature,
                               .perturb = config.debug.debug_perturb_kernel == Side::trainer},
                              weights_.folder, weights_.arena, group_)),
        transfer_(make_colocate_transfer(weights_.arena, weights_.arena, engine_side())),
        server_({.token = token}) {
    if (config.debug.debug_perturb_kernel == Side::engine) worker_.perturb();
    add_engine_routes(server_, worker_.mailbox(),
                      {.limits = worker_.limits(),
                       .model_path = config.model.hf_checkpoint,
                       .model_type = weights_.folder.config().family,
                       .architectures = {weights_.folder.config().architecture},
                       .version = TANDEM_VERSION,
                       .default_seed = static_cast<std::uint64_t>(config.algorithm.seed),
                       .text = {}});
    add_trainer_routes(
        server_, [this](std::function<void()> work) { queue_.post(std::move(work)); }, *trainer_,
        *transfer_);
  }

  // Serves until the process ends: by its lifeline or a signal.
  [[noreturn]] void serve(int announce_fd) {
    server_.start();
    const ArenaLayout& layout = weights_.arena.layout();
    TD_LOG(info, "{}: {} parameters, weights {}, KV cache {} ({} tokens), port {}",
           config_.model.hf_checkpoint, layout.flat_elements,
           human_bytes(static_cast<double>(layout.bytes)),
           human_bytes(static_cast<double>(worker_.kv_bytes())),
           worker_.limits().num_blocks * kBlockTokens, server_.port());
    announce_ready(announce_fd, Json{{"port", server_.port()},
                                     {"parameters", layout.flat_elements},
                                     {"weight_bytes", layout.bytes}});
    while (true) {
      const bool worked = queue_.run();
      const bool more = worker_.engine().step();
      if (!worked && !more) queue_.wait(Deadline::after(1.0));
    }
  }

 private:
  EngineSide engine_side() {
    return {.version = [this] { return worker_.engine().weight_version(); },
            .quiet =
                [this] {
                  const EngineStats s = worker_.engine().stats();
                  return s.running == 0 && (s.waiting == 0 || worker_.engine().paused());
                },
            .swap =
                [this](std::int64_t version) {
                  worker_.engine().flush_cache();
                  worker_.engine().set_weight_version(version);
                  worker_.publish();
                }};
  }

  Config config_;
  ComputeQueue queue_;
  Weights weights_;
  Group group_;
  EngineWorker worker_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<Transfer> transfer_;
  http::Server server_;
};

int descriptor(const std::vector<std::string>& arguments, std::string_view flag) {
  for (std::size_t i = 0; i + 1 < arguments.size(); ++i)
    if (arguments[i] == flag) return std::stoi(arguments[i + 1]);
  throw Error(
      fmt::format("tandem rank: {} is missing; this command is started by `tandem train`", flag));
}

}  // namespace

int run_rank(const std::vector<std::string>& arguments) {
  const int announce_fd = descriptor(arguments, "--announce-fd");
  lifeline_watch(descriptor(arguments, "--lifeline-fd"));
  const RankInput input = read_rank_input(STDIN_FILENO, Deadline::after(60));
  const auto config = from_json<Config>(parse_ordered_json(input.config, "config"), "config");
  start_log({.role = "rank 0", .level = config.logging.log_level});
  // Ctrl-C at a terminal reaches the whole process group; the driver decides when the rank ends.
  std::signal(SIGINT, SIG_IGN);
  TD_LOG(info, "{}", start_compute(config.compute));
  ColocatedRank rank(config, input.token);
  rank.serve(announce_fd);
}

}  // namespace tandem
