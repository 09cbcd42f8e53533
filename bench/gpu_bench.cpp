// Speed on one GPU with random weights of the Qwen3-4B shape, so that no file is read: decoding
// through the engine, a training step on 2 × 4,096 tokens, the colocated weight update, and the one
// from a trainer's GPU to an engine's (also of the SmolLM2-135M shape). One JSON object a figure on
// standard output. bench/gpu.sh runs it beside the peers.
//
//   gpu_bench decode [BATCH...] | train | update | transfer     [--layers N] [--exact]
//   [--one-by-one]
#include <ATen/ATen.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/json.h"
#include "base/process.h"
#include "engine/engine.h"
#include "engine/runner.h"
#include "model/model.h"
#include "trainer/gradients.h"
#include "trainer/optimizer.h"
#include "trainer/packed_batch.h"
#include "transfer/local_copy.h"
#include "transfer/transfer.h"
#include "transfer/update.h"

namespace tandem {
namespace {

constexpr std::int64_t kPrompt = 128, kNew = 128;

ModelConfig qwen3_4b(std::int64_t layers) {
  const Json config{{"architectures", {"Qwen3ForCausalLM"}},
                    {"model_type", "qwen3"},
                    {"vocab_size", 151936},
                    {"hidden_size", 2560},
                    {"intermediate_size", 9728},
                    {"num_hidden_layers", layers},
                    {"num_attention_heads", 32},
                    {"num_key_value_heads", 8},
                    {"head_dim", 128},
                    {"max_position_embeddings", 8192},
                    {"rms_norm_eps", 1e-6},
                    {"attention_bias", false},
                    {"rope_theta", 1e6},
                    {"tie_word_embeddings", true},
                    {"hidden_act", "silu"},
                    {"torch_dtype", "bfloat16"},
                    {"eos_token_id", 151645}};
  return parse_model_config(config, "gpu_bench", nullptr, "gpu_bench");
}

ModelConfig smollm2() {
  const Json config{{"architectures", {"LlamaForCausalLM"}},
                    {"model_type", "llama"},
                    {"vocab_size", 49152},
                    {"hidden_size", 576},
                    {"intermediate_size", 1536},
                    {"num_hidden_layers", 30},
                    {"num_attention_heads", 9},
                    {"num_key_value_heads", 3},
                    {"max_position_embeddings", 8192},
                    {"rms_norm_eps", 1e-5},
                    {"rope_theta", 1e5},
                    {"tie_word_embeddings", true},
                    {"hidden_act", "silu"},
                    {"torch_dtype", "bfloat16"},
                    {"eos_token_id", 2}};
  return parse_model_config(config, "gpu_bench", nullptr, "gpu_bench");
}

void fill_random(Arena& arena) {
  at::manual_seed(1);
  const auto options =
      at::dtype(scalar_type(arena.layout().element)).device(device_of(Place::cuda));
  const ArenaLayout& layout = arena.layout();
  for (std::size_t i = 0; i < layout.storages.size(); ++i) {
    const ArenaStorage& s = layout.storages[i];
    auto t =
        at::from_blob(arena.storage_data(static_cast<std::int64_t>(i)), {s.rows, s.cols}, options);
    s.matrix ? t.normal_(0, 0.02) : t.fill_(1);
  }
}

std::vector<TokenId> random_tokens(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<TokenId> ids(n);
  for (TokenId& id : ids) id = static_cast<TokenId>(random() % 151936);
  return ids;
}

void print(const Json& figure) {
  std::puts(dump_json(figure).c_str());
  std::fflush(stdout);
}

void bench_decode(const ModelConfig& config, Arena& arena, const std::vector<std::int64_t>& batches,
                  bool one_by_one) {
  Model model(config, arena, nullptr, nullptr);
  std::int64_t most = 1;
  for (std::int64_t b : batches) most = std::max(most, b);
  const std::int64_t blocks = most * ((kPrompt + kNew) / kBlockTokens + 1);
  KvPool pool(model.attention_shape(), model.element(), config.num_layers, blocks, Place::cuda);
  Runner runner(model, pool);
  Mailbox mailbox;
  Engine engine(
      {.num_blocks = blocks,
       .max_running = most,
       .max_prefill_tokens = 32768,
       .context_length = config.max_position_embeddings,
       .vocab_size = config.vocab_size,
       .eos_token_ids = {},
       .vocabulary = {}},
      [&](const StepPlan& plan, std::span<SampledToken> sampled) { runner.run(plan, sampled); },
      mailbox,
      {.start = [&](const StepPlan& plan,
                    std::span<const std::int32_t> sources) { return runner.start(plan, sources); },
       .finish = [&](std::span<SampledToken> sampled) { runner.finish(sampled); }});
  for (const std::int64_t batch : batches) {
    for (int round = 0; round < 3; ++round) {
      const double start = monotonic_seconds();
      for (std::int64_t i = 0; i < batch; ++i) {
        GenerateRequest request;
        request.rid = std::to_string(i);
        request.prompt = random_tokens(kPrompt, static_cast<unsigned>(round * 1000 + i));
        request.first_sample_id = static_cast<std::uint64_t>(i);
        request.params.max_new_tokens = kNew;
        request.params.temperature = 1;
        request.params.ignore_eos = true;
        engine.add(std::move(request), {});
      }
      engine.step();  // all prompts and each sequence's first token
      const double prefilled = monotonic_seconds();
      // With `one_by_one` the host does nothing while the device works.
      while (one_by_one ? engine.step() : engine.run({})) {
      }
      const double end = monotonic_seconds(), seconds = end - start;
      const double decode_seconds = end - prefilled;
      const std::int64_t decode_tokens = batch * (kNew - 1);
      if (round == 0) continue;  // captures graphs
      print({{"part", "decode"},
             {"system", "tandem"},
             {"batch", batch},
             {"round", round},
             {"one_by_one", one_by_one},
             {"tokens_per_second", static_cast<double>(batch * kNew) / seconds},
             {"decode_tokens_per_second", static_cast<double>(decode_tokens) / decode_seconds},
             {"step_ms", 1e3 * decode_seconds * static_cast<double>(batch) /
                             static_cast<double>(decode_tokens)}});
    }
  }
}

void bench_train(const ModelConfig& config, Arena& arena) {
  Model model(config, arena, nullptr, nullptr);
  Group one = Group::alone("trainer");
  const std::int64_t elements = arena.layout().flat_elements;
  ShardedAdamW optimizer(elements, one, Place::cuda);
  GradientTree gradients(elements, Place::cuda);
  constexpr std::int64_t kSequences = 2, kLength = 4096;
  std::vector<Sample> samples(kSequences);
  std::vector<const Sample*> pointers;
  for (std::int64_t i = 0; i < kSequences; ++i) {
    Sample& s = samples[i];
    s.id = s.prompt_id = static_cast<std::uint64_t>(i);
    s.tokens = random_tokens(kLength + 1, static_cast<unsigned>(i));
    s.response_length = kLength;
    s.loss_mask.assign(kLength, 1);
    pointers.push_back(&s);
  }
  for (int round = 0; round < 8; ++round) {
    cuda_part().synchronize();
    const double start = monotonic_seconds();
    PackedBatch packed(pointers, true);
    KvPool pool(model.attention_shape(), model.element(), 1, packed.num_blocks(), Place::cuda);
    packed.context.pool = &pool;
    gradients.begin_batch(0);
    model.set_grads(gradients.begin_leaf());
    std::vector<TokenId> ids;
    for (const LossToken& t : packed.loss) ids.push_back(t.id);
    double forward = 0;
    {
      const auto hidden = model.forward(packed.tokens, packed.positions, packed.context);
      const auto log_probs = head_log_probs(hidden, ids, model.head(), 1.0f, false).log_probs;
      cuda_part().synchronize();
      forward = monotonic_seconds();
      (-log_probs.mean()).backward();
    }
    model.finish_grads();
    gradients.end_leaf();
    model.set_grads(nullptr);
    cuda_part().synchronize();
    const double backward = monotonic_seconds();
    const double norm = optimizer.step_and_publish(gradients.sums(), 1, {.lr = 1e-6f}, 1.0, arena);
    cuda_part().synchronize();
    const double end = monotonic_seconds();
    if (round < 3) continue;
    const double tokens = static_cast<double>(kSequences * kLength);
    // 6 operations a parameter and token, and the causal half of attention's products.
    const double flops =
        tokens * (6.0 * static_cast<double>(elements) +
                  6.0 * static_cast<double>(config.num_layers * config.q_rows() * kLength));
    print({{"part", "train"},
           {"system", "tandem"},
           {"round", round},
           {"tokens_per_second", tokens / (end - start)},
           {"forward_ms", 1e3 * (forward - start)},
           {"backward_ms", 1e3 * (backward - forward)},
           {"optimizer_ms", 1e3 * (end - backward)},
           {"tflops", flops / (end - start) / 1e12},
           {"grad_norm", norm}});
  }
}

void bench_update(Arena& arena) {
  TransferSetup setup;
  setup.source_layouts = setup.target_layouts = {arena.layout()};
  setup.source_process = setup.target_process = {0};
  setup.plan = make_transfer_plan({{&arena.layout(), 0, true}}, {{&arena.layout(), 0, true}});
  setup.source = setup.target = &arena;
  const auto transfer = make_colocate_transfer(setup);
  std::vector<RowsSum> sums(setup.plan.boxes.size());
  for (int round = 0; round < 3; ++round) {
    const double start = monotonic_seconds();
    const std::int64_t moved = transfer->move(sums);
    print({{"part", "update"},
           {"system", "tandem"},
           {"way", "one arena"},
           {"ms", 1e3 * (monotonic_seconds() - start)},
           {"moved_bytes", moved},
           {"total_bytes", setup.plan.total_bytes}});
  }
  // Double-buffered: the same transaction into an arena of the engine's own, compared bit for bit;
  // beside it copies of as many bytes, over the same arenas and over two tensors of torch's.
  Arena target(arena.layout());
  TransferSetup doubled = setup;
  doubled.plan = make_transfer_plan({{&arena.layout(), 0, false}}, {{&arena.layout(), 0, false}});
  doubled.target = &target;
  const auto copies = make_colocate_transfer(doubled);
  const std::int64_t bytes = arena.layout().bytes;
  const auto a = at::empty({bytes / 2}, at::dtype(at::kShort).device(device_of(Place::cuda)));
  const auto b = at::empty_like(a);
  a.random_();
  const auto timed = [](auto&& copy) {
    cuda_part().synchronize();
    const double start = monotonic_seconds();
    copy();
    cuda_part().synchronize();
    return 1e3 * (monotonic_seconds() - start);
  };
  for (int round = 0; round < 8; ++round) {
    std::vector<RowsSum> found(doubled.plan.boxes.size());
    std::int64_t moved = 0;
    const double ms = timed([&] { moved = copies->move(found); });
    print({{"part", "update"},
           {"system", "tandem"},
           {"way", "double-buffered, verified"},
           {"round", round},
           {"ms", ms},
           {"moved_bytes", moved},
           {"equal", found == std::vector<RowsSum>(found.size())}});
    const auto peer = [&](const char* system, auto&& copy) {
      print({{"part", "update"},
             {"system", system},
             {"round", round},
             {"ms", timed(copy)},
             {"bytes", bytes}});
    };
    peer("device copy of the same arenas",
         [&] { cuda_part().copy(target.memory().data(), arena.memory().data(), bytes); });
    peer("device copy", [&] { b.copy_(a); });
  }
}

// One update between two processes, of which 0 trains and 1 serves.
struct Mover {
  Mover(const ArenaLayout& layout, const std::string& way, int rank, Store& store, Arena& arena)
      : rank_(rank) {
    setup_.source_layouts = setup_.target_layouts = {layout};
    setup_.source_process = {0};
    setup_.target_process = {1};
    setup_.plan = make_transfer_plan({{&layout, 0, false}}, {{&layout, 1, false}});
    setup_.process = rank;
    setup_.num_processes = 2;
    setup_.store = &store;
    setup_.group.timeout_seconds = 60;
    setup_.shared_memory = way == "memory";
    (rank == 0 ? setup_.source : setup_.served) = &arena;
    if (rank == 1) setup_.target = &arena;
    server_ = announce_memory(store, rank, rank == 0 ? &arena.memory() : nullptr);
    std::optional<EngineSide> engine;
    if (rank == 1)
      engine = EngineSide{.version = [this] { return version_; },
                          .quiet = [] { return true; },
                          .overwrite = {},
                          .swap = [this](std::int64_t v) { version_ = v; }};
    update_ = std::make_unique<WeightUpdate>(
        setup_,
        make_link_transfer(setup_, way == "NCCL broadcast" ? LinkMode::broadcast : LinkMode::p2p),
        std::move(engine));
  }
  // Both ends' sums, as one text each.
  std::string run(MoveReport& report) {
    report = update_->move(next_);
    update_->swap(next_++);
    std::string sums;
    for (const BoxSum& s : rank_ == 0 ? report.sent : report.received)
      sums += fmt::format("{} {:08x}{:08x};", s.box, s.sum.a, s.sum.b);
    return sums;
  }

 private:
  int rank_;
  TransferSetup setup_;
  std::unique_ptr<DescriptorServer> server_;
  std::unique_ptr<WeightUpdate> update_;
  std::int64_t version_ = 0, next_ = 1;
};

void bench_transfer_rank(int rank, std::uint16_t port, std::int64_t layers, bool same_gpu) {
  Store everyone = Store::connect("127.0.0.1", port, 60);
  Group both = Group::gloo(everyone, "bench", rank, 2);
  const ModelConfig large = qwen3_4b(layers), small = smollm2();
  struct Case {
    std::string model;
    const ModelConfig& config;
    Element element;
  };
  for (const Case& c : {Case{"Qwen3-4B, bf16", large, Element::bf16},
                        Case{"SmolLM2-135M, bf16", small, Element::bf16},
                        Case{"SmolLM2-135M, f32", small, Element::f32}})
    for (const std::string way : {"memory", "NCCL p2p", "NCCL broadcast"}) {
      if (same_gpu && way != "memory") continue;
      const ArenaLayout layout = make_arena_layout(c.config, c.element, 0, 1, Place::cuda);
      Arena arena(layout, true);
      if (rank == 0) fill_random(arena);
      cuda_part().synchronize();
      // Names in a store are used once.
      const std::string key = c.model + "/" + way;
      std::optional<Store> own;
      if (rank == 0) {
        own.emplace(Store::serve("127.0.0.1", 0, 60));
        everyone.set(key, std::to_string(own->port()));
      } else {
        own.emplace(Store::connect(
            "127.0.0.1", static_cast<std::uint16_t>(std::stoi(everyone.get(key, 60))), 60));
      }
      Store& store = *own;
      Mover mover(layout, way, rank, store, arena);
      std::vector<double> seconds;
      bool equal = true;
      for (int round = 0; round < 8; ++round) {
        both.barrier();
        const double start = monotonic_seconds();
        MoveReport report;
        const std::string sums = mover.run(report);
        both.barrier();
        const double end = monotonic_seconds();
        const auto ends = both.all_gather_text(sums);
        equal = equal && ends[0] == ends[1];
        if (round < 2) continue;  // connections, clocks
        seconds.push_back(end - start);
      }
      std::sort(seconds.begin(), seconds.end());
      if (rank == 1)
        print({{"part", "transfer"},
               {"system", "tandem"},
               {"model", c.model},
               {"way", way},
               {"same_gpu", same_gpu},
               {"ms", 1e3 * seconds[seconds.size() / 2]},
               {"least_ms", 1e3 * seconds.front()},
               {"gigabytes_per_second",
                static_cast<double>(layout.flat_elements * (c.element == Element::f32 ? 4 : 2)) /
                    seconds[seconds.size() / 2] / 1e9},
               {"verified_equal", equal}});
    }
}

// The two ranks are processes of their own, since each has one GPU.
int bench_transfer(const char* program, std::int64_t layers, bool same_gpu) {
  const auto gpus = visible_gpus();
  if (gpus.size() < 2 && !same_gpu) {
    print({{"part", "transfer"},
           {"system", "tandem"},
           {"not run", fmt::format("{} GPU", gpus.size())}});
    return 0;
  }
  const Store server = Store::serve("127.0.0.1", 0, 60);
  std::vector<pid_t> ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.push_back(::fork());
    if (ranks.back() != 0) continue;
    ::setenv("CUDA_VISIBLE_DEVICES", gpus[same_gpu ? 0 : static_cast<std::size_t>(r)].c_str(), 1);
    const std::string rank = std::to_string(r), port = std::to_string(server.port()),
                      count = std::to_string(layers);
    ::execl("/proc/self/exe", program, "transfer-rank", rank.c_str(), port.c_str(), "--layers",
            count.c_str(), same_gpu ? "--same-gpu" : static_cast<char*>(nullptr),
            static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int failed = 0;
  for (const pid_t pid : ranks) {
    int status = 0;
    ::waitpid(pid, &status, 0);
    failed += status != 0;
  }
  return failed;
}

}  // namespace
}  // namespace tandem

int main(int argc, char** argv) {
  using namespace tandem;
  std::int64_t layers = 36;
  bool exact = false, one_by_one = false, same_gpu = false;
  std::string part;
  std::vector<std::int64_t> batches;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--layers") == 0 && i + 1 < argc)
      layers = std::atoll(argv[++i]);
    else if (std::strcmp(argv[i], "--exact") == 0)
      exact = true;
    else if (std::strcmp(argv[i], "--one-by-one") == 0)
      one_by_one = true;
    else if (std::strcmp(argv[i], "--same-gpu") == 0)
      same_gpu = true;
    else if (part.empty())
      part = argv[i];
    else
      batches.push_back(std::atoll(argv[i]));
  }
  if (batches.empty()) batches = {1, 64, 256};
  if (part == "transfer") return bench_transfer(argv[0], layers, same_gpu);
  const CudaPart& cuda = load_cuda_part();
  if (part == "transfer-rank" && batches.size() == 2)
    return bench_transfer_rank(static_cast<int>(batches[0]), static_cast<std::uint16_t>(batches[1]),
                               layers, same_gpu),
           0;
  cuda.set_exact(exact);
  at::globalContext().setDeterministicAlgorithms(exact, false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  const ModelConfig config = qwen3_4b(layers);
  Arena arena(make_arena_layout(config, Element::bf16, 0, 1, Place::cuda));
  fill_random(arena);
  print({{"device", cuda.device_name},
         {"exact", exact},
         {"parameters", arena.layout().flat_elements}});
  if (part == "decode") return bench_decode(config, arena, batches, one_by_one), 0;
  if (part == "train") return bench_train(config, arena), 0;
  if (part == "update") return bench_update(arena), 0;
  std::fprintf(stderr,
               "usage: gpu_bench decode [BATCH...] | train | update | transfer [--layers N] "
               "[--exact] [--one-by-one] [--same-gpu]\n");
  return 2;
}
