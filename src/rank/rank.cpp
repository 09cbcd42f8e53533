// One process of a run: a trainer shard, an engine or its part, or both, by its assignment. What it
// holds is put together in `open_*`, top to bottom; one compute thread then serves the queue.
#include "rank/rank.h"

#include <unistd.h>

#include <ATen/Parallel.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <memory>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/text.h"
#include "base/work_thread.h"
#include "checkpoint/weights.h"
#include "cluster/lifeline.h"
#include "cluster/placement.h"
#include "config/json.h"
#include "engine/plan_wire.h"
#include "engine/serve.h"
#include "rank/busy_clock.h"
#include "rank/compute_queue.h"
#include "rank/worker.h"
#include "trainer/serve.h"
#include "trainer/trainer.h"
#include "transfer/local_copy.h"
#include "transfer/serve.h"

namespace tandem {
namespace {

// One number for trainer and engine; 0: the model's own limit.
std::int64_t longest_sequence(const Config& config) {
  return config.rollout.rollout_max_context_len.value_or(0);
}

class RankProcess {
 public:
  RankProcess(const Config& config, const RankAssignment& assignment, const std::string& token)
      : config_(config),
        assignment_(assignment),
        role_(assignment.role()),
        element_(compute_element(config.model.dtype)),
        place_(compute_place(config.compute.device)),
        folder_(HfFolder::open(config.model.hf_checkpoint)),
        trainer_group_(Group::alone("trainer")),
        engine_group_(Group::alone("engine")),
        parameters_(make_arena_layout(folder_.config(), element_, 0, 1, place_).flat_elements),
        server_({.token = token}) {
    if (assignment.placement.ranks.size() > 1)
      store_.emplace(Store::connect(assignment.store_host,
                                    static_cast<std::uint16_t>(assignment.store_port),
                                    config.cluster.rank_start_timeout_seconds));
    if (role_.trains()) open_trainer();
    if (role_.serves()) open_engine();
    open_transfer();
    add_routes();
  }

  // Serves until the process ends: by its lifeline or a signal.
  [[noreturn]] void serve(int announce_fd) {
    server_.start();
    const std::int64_t weight_bytes = (trainer_arena_ ? trainer_arena_->layout().bytes : 0) +
                                      (layers_ ? layers_->arena().layout().bytes : 0) +
                                      (engine_arena_ ? engine_arena_->layout().bytes : 0) +
                                      (staging_ ? staging_->layout().bytes : 0);
    TD_LOG(info, "{}: {} parameters, weights {}, KV cache {}, port {}", config_.model.hf_checkpoint,
           parameters_, human_bytes(static_cast<double>(weight_bytes)),
           human_bytes(static_cast<double>(kv_bytes())), server_.port());
    announce_ready(announce_fd, Json{{"port", server_.port()},
                                     {"parameters", parameters_},
                                     {"weight_bytes", weight_bytes},
                                     {"kv_bytes", kv_bytes()}});
    if (follower_) follow();
    while (true) {
      const bool worked = queue_.run();
      const bool more = leader_ && engine_busy_.during([&] {
        return leader_->engine().run([this] { return queue_.waiting(); });
      });
      if (!worked && !more) queue_.wait(Deadline::after(1.0));
    }
  }

 private:
  const Placement& placement() const { return assignment_.placement; }
  // An engine of one rank beside its trainer reads the trainer's very weights.
  bool shares_arena() const { return role_.trains() && role_.serves() && may_share(role_); }
  bool may_share(const RankRole& engine) const {
    return engine.engine_width == 1 && !config_.transfer.update_weight_double_buffer;
  }
  std::int64_t kv_bytes() const {
    return leader_ ? leader_->kv_bytes() : follower_ ? follower_->kv_bytes() : 0;
  }
  std::int64_t kv_tokens() const { return config_.engine.kv_cache_tokens.value_or(65536); }
  GroupOptions group_options() const {
    return {.host = "127.0.0.1",
            .interface = {},
            .timeout_seconds = config_.cluster.control_timeout_seconds};
  }
  ArenaLayout engine_layout(const RankRole& role) const {
    return make_arena_layout(
        folder_.config(), element_, role.engine_rank, role.engine_width, place_,
        config_.compute.is_exact() ? ShardRule::exact : ShardRule::row_parallel);
  }
  Arena& engine_arena() { return engine_arena_ ? *engine_arena_ : *trainer_arena_; }

  void open_trainer() {
    // Engines in other processes of this host read it from here.
    const bool shared =
        !placement().all_colocated() && config_.transfer.update_weight_shared_memory;
    trainer_arena_ =
        std::make_unique<Arena>(trainer_layout(folder_.config(), role_.trainer_rank), shared);
    load_arena(folder_, *trainer_arena_);
    if (placement().num_trainers > 1)
      trainer_group_ = Group::gloo(*store_, "trainer", role_.trainer_rank, placement().num_trainers,
                                   group_options());
    layers_ = open_layers("actor", folder_, *trainer_arena_, layers_group_);
    trainer_ =
        make_trainer({.train = config_.train,
                      .algorithm = config_.algorithm,
                      .optimizer = config_.optimizer,
                      .longest_sequence = longest_sequence(config_),
                      .temperature = config_.rollout.rollout_temperature,
                      .perturb = config_.debug.debug_perturb_kernel == Side::trainer},
                     {folder_, *trainer_arena_, layers_.get()}, open_reference(), trainer_group_);
  }

  // --fsdp-reshard-after-forward.
  bool shards_weights() const {
    return config_.train.fsdp_reshard_after_forward && placement().num_trainers > 1;
  }
  // What a trainer rank holds of a model's compute weights between uses.
  ArenaLayout trainer_layout(const ModelConfig& model, int trainer_rank) const {
    ArenaLayout whole = make_arena_layout(model, element_, 0, 1, place_);
    if (!shards_weights()) return whole;
    return make_shard_layout(whole, shard_ranges(whole, placement().num_trainers)[trainer_rank]);
  }
  // What gathers a role's layers, over a group of its own; null: the arena holds all of them.
  std::unique_ptr<LayerGather> open_layers(const std::string& role, const HfFolder& folder,
                                           const Arena& shard, Group& group) {
    if (!shards_weights()) return nullptr;
    group = Group::gloo(*store_, "layers/" + role, role_.trainer_rank, placement().num_trainers,
                        group_options());
    auto layers = std::make_unique<LayerGather>(
        make_arena_layout(folder.config(), element_, 0, 1, place_), shard, group);
    TD_LOG(info, "{}: weights are sharded: {} kept here, {} for layers in use", role,
           human_bytes(static_cast<double>(shard.layout().bytes)),
           human_bytes(static_cast<double>(layers->arena().layout().bytes)));
    return layers;
  }

  // The reference model's weights in an arena of their own, if a KL reads them.
  std::optional<RoleWeights> open_reference() {
    if (!config_.algorithm.uses_reference()) return std::nullopt;
    reference_folder_.emplace(HfFolder::open(config_.algorithm.ref_load));
    reference_ =
        std::make_unique<Arena>(trainer_layout(reference_folder_->config(), role_.trainer_rank));
    load_arena(*reference_folder_, *reference_);
    TD_LOG(info, "reference model: {}, weights {}", config_.algorithm.ref_load,
           human_bytes(static_cast<double>(reference_->layout().bytes)));
    reference_layers_ =
        open_layers("reference", *reference_folder_, *reference_, reference_layers_group_);
    return RoleWeights{*reference_folder_, *reference_, reference_layers_.get()};
  }

  void open_engine() {
    const int width = role_.engine_width;
    if (!shares_arena()) {
      const ArenaLayout layout = engine_layout(role_);
      engine_arena_ = std::make_unique<Arena>(layout);
      if (config_.transfer.update_weight_double_buffer) staging_ = std::make_unique<Arena>(layout);
    }
    EnginePeers peers;
    if (width > 1) {
      const std::string name = fmt::format("engine/{}", role_.engine);
      const auto limit = Deadline::after(config_.cluster.rank_start_timeout_seconds);
      engine_group_ = Group::gloo(*store_, name, role_.engine_rank, width, group_options());
      if (role_.leads_engine())
        fanout_ = std::make_unique<Fanout>(*store_, name, "127.0.0.1", width - 1, limit);
      else
        plans_ = std::make_unique<FanoutReader>(*store_, name, limit);
      if (place_ == Place::cuda) {
        std::vector<int> ranks;
        for (const RankRole& r : placement().ranks)
          if (r.engine == role_.engine) ranks.push_back(r.rank);
        engine_link_ =
            std::make_unique<Link>(*store_, name, ranks, assignment_.rank, LinkUse::in_stream,
                                   config_.cluster.control_timeout_seconds);
      }
      peers = {.group = &engine_group_, .link = engine_link_.get(), .followers = fanout_.get()};
    }
    if (role_.leads_engine())
      leader_ = std::make_unique<EngineWorker>(
          folder_, engine_arena(), config_.engine, kv_tokens(), [this] { queue_.wake(); }, peers,
          config_.rollout.rollout_stop.empty()
              ? nullptr
              : std::make_shared<Vocabulary>(Vocabulary::load(config_.model.hf_checkpoint)));
    else
      follower_ = std::make_unique<EngineFollower>(folder_, engine_arena(), kv_tokens(), peers);
    if (const std::int64_t longest = longest_sequence(config_); longest > 0) {
      if (leader_) leader_->set_longest_sequence(longest);
      if (follower_) follower_->set_longest_sequence(longest);
    }
    if (leader_ && engine_arena_) leader_->unpublish();
    if (config_.debug.debug_perturb_kernel == Side::engine) {
      if (leader_) leader_->perturb();
      if (follower_) follower_->perturb();
    }
  }

  // Every rank draws the whole plan; it is a pure function of placement and model.
  void open_transfer() {
    for (int rank : placement().trainer_ranks()) {
      const RankRole& role = placement().ranks[static_cast<std::size_t>(rank)];
      setup_.source_layouts.push_back(trainer_layout(folder_.config(), role.trainer_rank));
      setup_.source_process.push_back(rank);
    }
    for (int rank : placement().engine_ranks()) {
      const RankRole& role = placement().ranks[static_cast<std::size_t>(rank)];
      setup_.target_layouts.push_back(engine_layout(role));
      setup_.target_process.push_back(rank);
    }
    std::vector<TransferSide> sources, targets;
    for (std::size_t i = 0; i < setup_.source_process.size(); ++i)
      sources.push_back({&setup_.source_layouts[i], setup_.source_process[i], true});
    for (std::size_t i = 0; i < setup_.target_process.size(); ++i)
      targets.push_back(
          {&setup_.target_layouts[i], setup_.target_process[i],
           may_share(placement().ranks[static_cast<std::size_t>(setup_.target_process[i])])});
    setup_.plan = make_transfer_plan(sources, targets);
    setup_.process = assignment_.rank;
    setup_.num_processes = static_cast<int>(placement().ranks.size());
    setup_.source = trainer_arena_.get();
    setup_.served = role_.serves() ? &engine_arena() : nullptr;
    setup_.target = staging_ ? staging_.get() : role_.serves() ? &engine_arena() : nullptr;
    setup_.store = store_ ? &*store_ : nullptr;
    setup_.group = group_options();
    setup_.bucket_bytes = config_.transfer.update_weight_buffer_size;
    setup_.shared_memory = shares_memory();
    if (store_)
      weights_server_ = announce_memory(*store_, assignment_.rank,
                                        trainer_arena_ ? &trainer_arena_->memory() : nullptr);
    std::optional<EngineSide> side;
    if (role_.serves()) side = engine_side();
    auto way = make_way();
    if (assignment_.rank + 1 == setup_.num_processes)
      way = make_broken_transfer(setup_, std::move(way), config_.debug.debug_break_update);
    update_ = std::make_unique<WeightUpdate>(setup_, std::move(way), std::move(side));
    if (staging_ && !role_.trains() && place_ == Place::cpu) {
      move_thread_.emplace();
      move_thread_->post(
          [] { at::init_num_threads(); });  // a team as large as the compute thread's
    }
  }

  // Whether engines read the trainer's weights from memory. Over NVLink an owner feeds several
  // readers one after the other, where a broadcast feeds them together.
  bool shares_memory() const {
    const auto& ranks = placement().ranks;
    const bool fans_out =
        place_ == Place::cuda &&
        config_.transfer.update_weight_transfer_mode == TransferMode::broadcast &&
        std::ssize(placement().engine_ranks()) > placement().num_trainers &&
        std::ranges::none_of(ranks, [](const RankRole& r) { return r.engine_width > 1; });
    return config_.transfer.update_weight_shared_memory && !fans_out;
  }

  std::unique_ptr<Transfer> make_way() {
    if (placement().all_colocated()) return make_colocate_transfer(setup_);
    if (place_ == Place::cuda)
      return make_link_transfer(setup_,
                                config_.transfer.update_weight_transfer_mode == TransferMode::p2p
                                    ? LinkMode::p2p
                                    : LinkMode::broadcast);
    switch (config_.transfer.update_weight_transfer_mode) {
      case TransferMode::p2p:
        return make_p2p_transfer(setup_);
      case TransferMode::broadcast:
        return make_broadcast_transfer(setup_);
      case TransferMode::disk:
      case TransferMode::disk_delta:
        break;
    }
    throw Error("--update-weight-transfer-mode: only broadcast and p2p are built");
  }

  EngineSide engine_side() {
    EngineSide side;
    if (leader_) {
      side.version = [this] { return leader_->engine().weight_version(); };
      side.tokens_sampled = [this] { return leader_->mailbox().stats().tokens_sampled; };
      side.quiet = [this] {
        const EngineStats s = leader_->engine().stats();
        return leader_->engine().paused() || (s.running == 0 && s.waiting == 0);
      };
    } else {
      side.version = [this] { return follower_version_; };
      side.quiet = [] { return true; };  // its leader answers for both
    }
    side.moves_aside = staging_ != nullptr;
    if (leader_ && engine_arena_ && !staging_) side.overwrite = [this] { leader_->unpublish(); };
    side.swap = [this](std::int64_t version) {
      if (staging_) engine_arena().swap_memory(*staging_);
      if (leader_) {
        leader_->engine().flush_cache();
        leader_->engine().set_weight_version(version);
        leader_->publish();
      } else {
        follower_->publish();
        follower_version_ = version;
      }
    };
    return side;
  }

  // --offload-rollout: while the trainer works the engine's KV cache is not there.
  void release_rollout() {
    if (!leader_ || !config_.cluster.offload_rollout.value_or(false) || leader_->kv_released())
      return;
    if (!leader_->release_kv())
      TD_LOG(warn, "{}", "--offload-rollout: samples hold the KV cache, so it stays this time");
  }

  void add_routes() {
    const auto post = [this](std::function<void()> work) { queue_.post(std::move(work)); };
    if (leader_)
      add_engine_routes(server_, leader_->mailbox(),
                        {.limits = leader_->limits(),
                         .model_path = config_.model.hf_checkpoint,
                         .model_type = folder_.config().family,
                         .architectures = {folder_.config().architecture},
                         .version = TANDEM_VERSION,
                         .default_seed = static_cast<std::uint64_t>(config_.algorithm.seed),
                         .text = {}});
    if (trainer_)
      add_trainer_routes(
          server_,
          [this](std::function<void()> work) {
            queue_.post([this, work = std::move(work)] { trainer_busy_.during(work); });
          },
          *trainer_, [this] { release_rollout(); });
    // The peak is since the last call: so the caller's phases have peaks of their own.
    server_.route("GET", "/usage", [this](http::Request, http::Respond respond) {
      const ProcessMemory memory = process_memory();
      reset_peak_memory();
      respond({.status = 200,
               .body = dump_json(Json{{"resident_bytes", memory.resident_bytes},
                                      {"peak_bytes", memory.peak_bytes},
                                      {"trainer_busy_seconds", trainer_busy_.seconds()},
                                      {"engine_busy_seconds", engine_busy_.seconds()}})});
    });
    add_weight_routes(
        server_,
        {.post = post,
         .post_move =
             move_thread_
                 ? [this](std::function<void()> work) { move_thread_->post(std::move(work)); }
                 : std::function<void(std::function<void()>)>(post),
         .last_write =
             [this] { return trainer_ ? trainer_->progress.last_write.exchange(0.0) : 0.0; },
         .gather = [this] { return gather_masters(); },
         // A trainer does it in its step, where no engine waits for it.
         .after_swap = role_.trains() ? std::function<void()>() : return_free_memory},
        *update_);
  }

  std::vector<float> gather_masters() {
    if (!trainer_) return {};
    std::vector<float> flat(static_cast<std::size_t>(trainer_arena_->layout().flat_elements));
    trainer_->gather(flat);
    return flat;
  }

  // Plans of the leader, read on a thread of their own, run on this one. A leader that is gone ends
  // this rank; the driver says why.
  void follow() {
    std::thread([this] {
      for (;;) {
        const Frame frame = plans_->read(Deadline::after(3600));
        if (frame.state == PipeState::timed_out) continue;
        if (!frame.ok()) {
          TD_LOG(error, "{}", plans_->describe(frame.state));
          ::_exit(1);
        }
        queue_.post([this, bytes = frame.payload] {
          decode_plan(bytes, plan_);
          engine_busy_.during([this] { follower_->run(plan_); });
        });
      }
    }).detach();
  }

  Config config_;
  RankAssignment assignment_;
  RankRole role_;
  Element element_;
  Place place_;
  ComputeQueue queue_;
  HfFolder folder_;
  std::optional<Store> store_;
  std::unique_ptr<Arena> trainer_arena_, engine_arena_, staging_;
  Group trainer_group_, engine_group_;
  std::optional<HfFolder> reference_folder_;
  std::unique_ptr<Arena> reference_;  // null: no KL
  Group layers_group_ = Group::alone("layers"), reference_layers_group_ = Group::alone("layers");
  std::unique_ptr<LayerGather> layers_, reference_layers_;  // null: arenas hold all layers
  std::int64_t parameters_ = 0;
  std::unique_ptr<Link> engine_link_;  // of an engine over several GPUs
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<Fanout> fanout_;
  std::unique_ptr<FanoutReader> plans_;
  std::unique_ptr<EngineWorker> leader_;
  std::unique_ptr<EngineFollower> follower_;
  StepPlan plan_;  // a follower's
  std::int64_t follower_version_ = 0;
  BusyClock trainer_busy_, engine_busy_;
  std::unique_ptr<DescriptorServer> weights_server_;
  TransferSetup setup_;
  std::unique_ptr<WeightUpdate> update_;
  std::optional<WorkThread> move_thread_;  // empty: moves take turns with the other work
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
  const auto told = parse_ordered_json(input.config, "rank input");
  const auto config =
      tandem::from_json<Config>(require<OrderedJson>(told, "config", "rank input"), "config");
  const RankAssignment assignment = assignment_from_json(
      parse_json(require<OrderedJson>(told, "assignment", "rank input").dump(), "rank assignment"));
  start_log({.role = fmt::format("rank {}", assignment.rank), .level = config.logging.log_level});
  // Ctrl-C at a terminal reaches the whole process group; the driver decides when the rank ends.
  std::signal(SIGINT, SIG_IGN);
  keep_free_memory();
  TD_LOG(info, "{}", start_compute(config.compute));
  RankProcess rank(config, assignment, input.token);
  rank.serve(announce_fd);
}

}  // namespace tandem
