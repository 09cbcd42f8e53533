// Putting folder, arena, model, pool and engine together.
#include "rank/worker.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>

#include <stdexcept>

#include "base/check.h"
#include "base/text.h"
#include "checkpoint/weights.h"
#include "engine/plan_wire.h"
#include "ops/place.h"

namespace tandem {
namespace {

EngineLimits limits_of(const ModelConfig& model, const EngineConfig& config, std::int64_t blocks) {
  return {.num_blocks = blocks,
          .block_tokens = kBlockTokens,
          .max_running = config.max_running_requests,
          .max_prefill_tokens = config.max_prefill_tokens,
          .context_length = model.max_position_embeddings,
          .vocab_size = model.vocab_size,
          .prefix_cache = config.prefix_cache,
          .eos_token_ids = model.eos_ids,
          .vocabulary = {}};
}

std::int64_t blocks_for(std::int64_t kv_tokens) {
  return (kv_tokens + kBlockTokens - 1) / kBlockTokens;
}

}  // namespace

std::string start_compute(const ComputeConfig& config) {
  const auto threads = static_cast<int>(config.threads_per_rank.value_or(1));
  at::set_num_threads(threads);
  at::set_num_interop_threads(1);
  const std::string name(config.cpu_kernels == CpuKernels::automatic ? "auto"
                                                                     : name_of(config.cpu_kernels));
  TD_CHECK(kernels_by_name(name),
           "--cpu-kernels: '{}' does not run on this processor; use auto, which takes {}", name,
           kernels_by_name("auto")->name);
  select_kernels(name);
  if (config.device == Device::cuda) {
    const CudaPart& part = load_cuda_part();
    part.set_exact(config.is_exact());
    at::globalContext().setDeterministicAlgorithms(config.deterministic_mode, false);
    // That would fill new tensors; every one here is written before it is read.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
    return fmt::format("compute: {} (GPU {}, {}){}", part.device_name, part.device,
                       human_bytes(static_cast<double>(part.device_bytes)),
                       config.is_exact()           ? ", exact"
                       : config.deterministic_mode ? ", deterministic"
                                                   : "");
  }
  return fmt::format("compute: {} kernels, {} thread{}{}", kernels().name, threads,
                     threads == 1 ? "" : "s", config.is_exact() ? "" : ", engines row-parallel");
}

Place compute_place(Device device) { return device == Device::cuda ? Place::cuda : Place::cpu; }

Element compute_element(ComputeDtype dtype) {
  return dtype == ComputeDtype::bfloat16 ? Element::bf16 : Element::f32;
}

Weights::Weights(const std::string& folder_path, Element element, Place place)
    : folder(HfFolder::open(folder_path)),
      arena(make_arena_layout(folder.config(), element, 0, 1, place)) {
  load_arena(folder, arena);
}

EngineWorker::EngineWorker(const HfFolder& folder, Arena& arena, const EngineConfig& config,
                           std::int64_t kv_tokens, std::function<void()> wake, EnginePeers peers,
                           std::shared_ptr<const Vocabulary> vocabulary)
    : arena_(arena),
      model_(folder.config(), arena, peers.group, nullptr, peers.link),
      pool_(model_.attention_shape(), model_.element(), folder.config().num_layers,
            blocks_for(kv_tokens), arena.place(), /*releasable=*/true),
      runner_(model_, pool_),
      mailbox_(std::move(wake)),
      limits_(limits_of(folder.config(), config, pool_.num_blocks())),
      published_(arena.version()) {
  limits_.vocabulary = std::move(vocabulary);
  AsyncRunner async;
  if (!peers.followers)
    async = {.start =
                 [this](const StepPlan& plan, std::span<const std::int32_t> sources) {
                   check_published();
                   pool_.retake();
                   return runner_.start(plan, sources);
                 },
             .finish = [this](std::span<SampledToken> sampled) { runner_.finish(sampled); }};
  engine_ = std::make_unique<Engine>(
      limits_,
      [this, peers](const StepPlan& plan, std::span<SampledToken> sampled) {
        check_published();
        pool_.retake();
        if (peers.followers)
          peers.followers->send(encode_plan(plan), Deadline::after(peers.timeout_seconds));
        runner_.run(plan, sampled);
      },
      mailbox_, std::move(async));
}

void EngineWorker::check_published() const {
  TD_CHECK(published_ != kNothing,
           "engine: no whole set of weights has arrived; an update must succeed before the next "
           "step");
  TD_CHECK(arena_.version() == published_,
           "engine: the weights were written (arena version {}) after the last update ({}); an "
           "update must publish them before the next step",
           arena_.version(), published_);
}

bool EngineWorker::release_kv() {
  if (pool_.released()) return true;
  const EngineStats now = engine_->stats();
  if (now.running > 0 || now.waiting > 0 || !engine_->flush_cache().ok) return false;
  pool_.release();
  return true;
}

void EngineWorker::publish() {
  model_.rebind();
  published_ = arena_.version();
}

EngineFollower::EngineFollower(const HfFolder& folder, Arena& arena, std::int64_t kv_tokens,
                               const EnginePeers& peers)
    : model_(folder.config(), arena, peers.group, nullptr, peers.link),
      pool_(model_.attention_shape(), model_.element(), folder.config().num_layers,
            blocks_for(kv_tokens), arena.place()),
      runner_(model_, pool_) {}

}  // namespace tandem
