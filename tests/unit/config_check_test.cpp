// Faults over several flags, derived values, JSON and the page docs/flags.md.
#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "base/file.h"
#include "config/docs.h"
#include "config/json.h"
#include "config/miles_flags.h"
#include "config/parse.h"
#include "config/resolve.h"

namespace tandem {
namespace {

// A config that passes validate().
Config good_config() {
  Config config;
  config.cluster.colocate = true;
  config.model.hf_checkpoint = "models/smollm2/";
  config.data.prompt_data = "train.jsonl";
  config.data.label_key = "label";
  config.data.num_rollout = 40;
  config.rollout.rollout_batch_size = 8;
  config.rollout.n_samples_per_prompt = 8;
  config.rollout.rollout_max_response_len = 16;
  config.reward.rm_type = "last-number";
  return config;
}

const Host kHost{.num_cpus = 2, .bf16_instructions = true, .time = "20260131-235959"};

TEST(Validate, AcceptsAGoodConfig) { EXPECT_TRUE(validate(good_config()).empty()); }

TEST(Validate, EachFaultNamesFlagValueAndRemedy) {
  struct Case {
    void (*spoil)(Config&);
    std::vector<const char*> parts;
  };
  const Case cases[] = {
      {[](Config& c) { c.model.hf_checkpoint.clear(); }, {"--hf-checkpoint: not given"}},
      {[](Config& c) { c.data.prompt_data.clear(); }, {"--prompt-data: not given"}},
      {[](Config& c) { c.data.num_rollout.reset(); }, {"--num-rollout", "--num-epoch"}},
      {[](Config& c) { c.cluster.colocate = false; },
       {"--rollout-num-gpus: not given", "--colocate"}},
      {[](Config& c) {
         c.cluster.rollout_num_gpus = 3;
         c.cluster.rollout_num_gpus_per_engine = 2;
       },
       {"--rollout-num-gpus-per-engine: found 2", "3 engine ranks"}},
      {[](Config& c) {
         c.cluster.colocate = false;
         c.cluster.rollout_num_gpus = 4;
         c.cluster.rollout_num_gpus_of_engines = {2, 1};
       },
       {"--rollout-num-gpus-of-engines: found 2 1, together 3", "--rollout-num-gpus (4)"}},
      {[](Config& c) {
         c.cluster.colocate = false;
         c.cluster.rollout_num_gpus_of_engines = {2, 0};
       },
       {"--rollout-num-gpus-of-engines: found 2 0"}},
      {[](Config& c) { c.train.fsdp_reshard_after_forward = true; },
       {"--fsdp-reshard-after-forward: found with --colocate", "leave it out"}},
      {[](Config& c) { c.cluster.actor_num_gpus_per_node = 16; },
       {"--gradient-leaves: found 8", "16 trainer ranks"}},
      {[](Config& c) { c.transfer.update_weight_transfer_mode = TransferMode::p2p; },
       {"--update-weight-transfer-mode: found p2p", "the copy is in place"}},
      {[](Config& c) { c.data.label_key.clear(); }, {"--label-key: not given", "last-number"}},
      {[](Config& c) { c.reward.rm_type.clear(); }, {"--rm-type: not given"}},
      {[](Config& c) { c.rollout.rollout_batch_size.reset(); },
       {"--rollout-batch-size: not given"}},
      {[](Config& c) { c.rollout.rollout_temperature = 0; }, {"--rollout-temperature: found 0"}},
      {[](Config& c) { c.rollout.n_samples_per_prompt = 1; }, {"--n-samples-per-prompt: found 1"}},
      {[](Config& c) { c.rollout.rollout_max_response_len.reset(); },
       {"--rollout-max-response-len: not given"}},
      {[](Config& c) { c.rollout.rollout_max_context_len = 16; },
       {"--rollout-max-response-len: found 16", "15"}},
      {[](Config& c) {
         c.rollout.rollout_max_context_len = 64;
         c.rollout.rollout_max_prompt_len = 64;
       },
       {"--rollout-max-prompt-len: found 64", "63"}},
      {[](Config& c) { c.engine.kv_cache_tokens = 16; }, {"--kv-cache-tokens: found 16", "17"}},
      {[](Config& c) { c.algorithm.eps_clip_high = 0.1; }, {"--eps-clip-high: found 0.1", "0.2"}},
      {[](Config& c) { c.algorithm.kl_coef = 0.1; },
       {"--kl-coef: found 0.1", "grpo", "--use-kl-loss"}},
      {[](Config& c) { c.algorithm.kl_loss_coef = 0.1; },
       {"--kl-loss-coef: found 0.1", "--use-kl-loss"}},
      {[](Config& c) {
         c.algorithm.use_kl_loss = true;
         c.algorithm.advantage_estimator = AdvantageEstimator::reinforce_plus_plus;
         c.algorithm.normalize_advantages = true;
         c.algorithm.kl_loss_coef = c.algorithm.kl_coef = 0.1;
       },
       {"--kl-coef: found 0.1 with kl_loss_coef 0.1"}},
      {[](Config& c) { c.algorithm.use_unbiased_kl = true; },
       {"--use-unbiased-kl", "--use-kl-loss"}},
      {[](Config& c) { c.algorithm.ref_update_interval = 5; }, {"--ref-update-interval: found 5"}},
      {[](Config& c) {
         c.algorithm.advantage_estimator = AdvantageEstimator::reinforce_plus_plus_baseline;
       },
       {"reinforce_plus_plus_baseline", "--normalize-advantages"}},
      {[](Config& c) { c.debug.save_debug_rollout_data = "kept.safetensors"; },
       {"--save-debug-rollout-data: found 'kept.safetensors'", "{rollout_id}"}},
      {[](Config& c) { c.algorithm.gamma = 0.9; }, {"--gamma: found 0.9", "grpo"}},
      {[](Config& c) { c.rollout.async_steps = 1; },
       {"--async-steps: found 1 with --colocate", "ranks of their own"}},
      {[](Config& c) {
         c.cluster.colocate = false;
         c.cluster.rollout_num_gpus = 1;
         c.rollout.async_steps = 1;
         c.algorithm.use_tis = false;
       },
       {"--no-use-tis", "--use-rollout-logprobs"}},
      {[](Config& c) { c.transfer.update_weights_in_flight = true; },
       {"--update-weights-in-flight", "--async-steps 1"}},
      {[](Config& c) {
         c.cluster.colocate = false;
         c.cluster.rollout_num_gpus = 1;
         c.rollout.async_steps = 1;
         c.transfer.update_weights_in_flight = true;
         c.transfer.pause_generation_mode = PauseGeneration::abort;
         c.rollout.custom_generate_function_path = "mine.generate";
       },
       {"--pause-generation-mode: found abort with --custom-generate-function-path", "retract"}},
      {[](Config& c) { c.transfer.update_weights_interval = 2; },
       {"--update-weights-interval: found 2 with --colocate"}},
      {[](Config& c) {
         c.cluster.colocate = false;
         c.cluster.rollout_num_gpus = 1;
         c.transfer.update_weights_interval = 2;
         c.checkpoint.save_interval = 5;
       },
       {"--save-interval: found 5", "multiple of 2"}},
      {[](Config& c) {
         c.cluster.colocate = false;
         c.cluster.rollout_num_gpus = 1;
         c.transfer.update_weights_interval = 2;
         c.evaluate.eval_interval = 3;
         c.evaluate.eval_prompt_data = {"a", "b"};
       },
       {"--eval-interval: found 3", "multiple of 2"}},
      {[](Config& c) {
         c.algorithm.use_rollout_logprobs = true;
         c.algorithm.use_tis = true;
       },
       {"--use-rollout-logprobs", "--use-tis"}},
      {[](Config& c) { c.algorithm.tis_clip_low = 3; }, {"--tis-clip-low: found 3", "2"}},
      {[](Config& c) {
         c.algorithm.use_rs = true;
         c.algorithm.rs_lower_bound = 3;
       },
       {"--rs-lower-bound: found 3", "2"}},
      {[](Config& c) {
         c.train.calculate_per_token_loss = true;
         c.train.constant_loss_length = 100;
       },
       {"--constant-loss-length: found 100"}},
      {[](Config& c) {
         c.optimizer.lr_warmup_iters = 5;
         c.optimizer.lr_warmup_fraction = 0.1;
       },
       {"--lr-warmup-fraction: found 0.1"}},
      {[](Config& c) { c.optimizer.lr_decay_style = LrDecayStyle::wsd; },
       {"--lr-wsd-decay-iters: not given"}},
      {[](Config& c) { c.optimizer.lr_wsd_decay_iters = 5; }, {"--lr-wsd-decay-iters: found 5"}},
      {[](Config& c) { c.optimizer.min_lr = 1; }, {"--min-lr: found 1", "1e-06"}},
      {[](Config& c) {
         c.optimizer.lr_warmup_iters = 5;
         c.optimizer.lr_decay_iters = 5;
       },
       {"--lr-decay-iters: found 5"}},
      {[](Config& c) { c.train.recompute_granularity = "full"; },
       {"--recompute-granularity: full needs --recompute-method"}},
      {[](Config& c) { c.train.recompute_method = "block"; },
       {"--recompute-method: only --recompute-granularity full"}},
      {[](Config& c) { c.train.gradient_leaves = 6; }, {"--gradient-leaves: found 6", "8"}},
      {[](Config& c) { c.evaluate.eval_interval = 5; }, {"--eval-interval: found 5"}},
      {[](Config& c) {
         c.evaluate.eval_prompt_data = {"a", "b", "c"};
       },
       {"found 3 words"}},
      {[](Config& c) {
         c.evaluate.eval_prompt_data = {"a", "b", "a", "d"};
       },
       {"'a' twice"}},
      {[](Config& c) { c.logging.run_name = "a/b"; }, {"--run-name: found 'a/b'"}},
      {[](Config& c) { c.checkpoint.save_hf = "out/{step}"; }, {"--save-hf: found 'out/{step}'"}},
  };
  for (const Case& c : cases) {
    Config config = good_config();
    c.spoil(config);
    const auto faults = validate(config);
    ASSERT_EQ(faults.size(), 1u) << c.parts[0] << (faults.empty() ? "" : "\n" + faults.back());
    for (const char* part : c.parts) {
      EXPECT_NE(faults[0].find(part), std::string::npos) << part << " is not in: " << faults[0];
    }
  }
}

TEST(Validate, BatchArithmetic) {
  struct Case {
    std::int64_t prompts, n, batch, steps;  // batch, steps: 0 = not given
    std::vector<const char*> parts;         // of the fault; empty: none
  };
  const Case cases[] = {
      {8, 8, 0, 0, {}},
      {8, 8, 64, 0, {}},
      {8, 8, 32, 2, {}},
      {8, 8, 0, 4, {}},
      {16, 8, 256, 0, {"found 256", "128 samples", "16 x", "8)", "at most 128"}},
      {7, 8, 16, 0, {"found 16", "56 samples", "3 steps and 8 samples left over", "divisor of 56"}},
      {7, 8, 0, 3, {"--num-steps-per-rollout: found 3", "56 samples", "divisor of 56"}},
      {8, 8, 64, 2, {"found 64 with num_steps_per_rollout 2", "64 x 2 = 128", "64 samples"}},
  };
  for (const Case& c : cases) {
    Config config = good_config();
    config.rollout.rollout_batch_size = c.prompts;
    config.rollout.n_samples_per_prompt = c.n;
    if (c.batch > 0) config.train.global_batch_size = c.batch;
    if (c.steps > 0) config.train.num_steps_per_rollout = c.steps;
    const auto faults = validate(config);
    ASSERT_EQ(faults.size(), c.parts.empty() ? 0u : 1u) << c.prompts << " x " << c.n;
    for (const char* part : c.parts) {
      EXPECT_NE(faults[0].find(part), std::string::npos) << part << " is not in: " << faults[0];
    }
    if (!faults.empty()) continue;
    resolve(config, kHost);
    EXPECT_EQ(*config.train.global_batch_size * *config.train.num_steps_per_rollout,
              c.prompts * c.n);
  }
}

TEST(Resolve, TakesAGpuWhereThereIsOne) {
  Host host = kHost;
  Config config = good_config();
  config.compute.device = Device::cuda;
  EXPECT_THROW(resolve(config, host), Error);
  host.cuda = true;
  host.bf16_instructions = false;
  config = good_config();
  resolve(config, host);
  EXPECT_EQ(config.compute.device, Device::cuda);
  EXPECT_EQ(config.model.dtype, ComputeDtype::bfloat16);
  EXPECT_EQ(config.train.gradient_leaves, 1);
  config = good_config();
  config.compute.device = Device::cpu;
  resolve(config, host);
  EXPECT_EQ(config.model.dtype, ComputeDtype::float32);
  EXPECT_EQ(config.train.gradient_leaves, 8);
}

TEST(Resolve, CorrectsForOlderWeightsWhereTheScheduleMakesThem) {
  const auto resolved = [](std::int64_t ahead, bool engines_ratio, std::optional<bool> given) {
    Config config = good_config();
    config.cluster.colocate = false;
    config.cluster.rollout_num_gpus = 1;
    config.rollout.async_steps = ahead;
    config.algorithm.use_rollout_logprobs = engines_ratio;
    config.algorithm.use_tis = given;
    resolve(config, kHost);
    return config.algorithm.use_tis.value();
  };
  EXPECT_FALSE(resolved(0, false, {}));
  EXPECT_TRUE(resolved(1, false, {}));
  EXPECT_FALSE(resolved(1, true, {}));
  EXPECT_FALSE(resolved(1, true, false));
  EXPECT_TRUE(resolved(0, false, true));
}

TEST(Resolve, FillsAndLogsDerivedValues) {
  Config config = good_config();
  config.evaluate.eval_prompt_data = {"add", "eval.jsonl"};
  const auto lines = resolve(config, kHost);
  const std::set<std::string> said(lines.begin(), lines.end());
  EXPECT_TRUE(
      said.contains("global_batch_size = 64 (rollout_batch_size 8 x n_samples_per_prompt 8 "
                    "/ num_steps_per_rollout 1)"));
  EXPECT_TRUE(said.contains("threads_per_rank = 2 (2 cores / 1 ranks)"));
  EXPECT_TRUE(said.contains("dtype = bfloat16 (this processor has AVX-512 BF16)"));
  EXPECT_EQ(config.compute.device, Device::cpu);
  EXPECT_EQ(config.cluster.rollout_num_gpus, 1);
  EXPECT_EQ(config.algorithm.eps_clip_high, 0.2);
  EXPECT_EQ(config.train.deterministic_layout, true);
  EXPECT_EQ(config.evaluate.eval_max_response_len, 16);
  EXPECT_EQ(config.evaluate.eval_label_key, "label");
  EXPECT_EQ(config.logging.run_dir, "runs/20260131-235959-smollm2");
}

TEST(Resolve, KeepsWhatIsGivenAndIsDoneAfterOnce) {
  Config config = good_config();
  config.train.global_batch_size = 16;
  config.compute.threads_per_rank = 7;
  config.model.dtype = ComputeDtype::float32;
  config.algorithm.eps_clip_high = 0.28;
  config.logging.run_dir = "here";
  resolve(config, kHost);
  EXPECT_EQ(config.train.num_steps_per_rollout, 4);
  EXPECT_EQ(config.compute.threads_per_rank, 7);
  EXPECT_EQ(config.model.dtype, ComputeDtype::float32);
  EXPECT_EQ(config.algorithm.eps_clip_high, 0.28);
  EXPECT_EQ(config.logging.run_dir, "here");
  EXPECT_TRUE(resolve(config, kHost).empty());
}

TEST(Resolve, WithoutTheInstructionsTheDefaultTypeIsFloat32) {
  Config config = good_config();
  resolve(config, Host{.num_cpus = 1, .bf16_instructions = false, .time = "t"});
  EXPECT_EQ(config.model.dtype, ComputeDtype::float32);
}

TEST(Resolve, ContextLengthGivesTheOtherTwo) {
  Config config = good_config();
  config.rollout.rollout_max_response_len.reset();
  config.rollout.rollout_max_context_len = 128;
  ASSERT_TRUE(validate(config).empty());
  resolve(config, kHost);
  EXPECT_EQ(config.rollout.rollout_max_response_len, 127);
  EXPECT_EQ(config.rollout.rollout_max_prompt_len, 127);
}

TEST(Resolve, EpochsBecomeRollouts) {
  Config config = good_config();
  config.data.num_rollout.reset();
  config.data.num_epoch = 3;
  EXPECT_EQ(resolve_num_rollout(config, 20),
            std::vector<std::string>{"num_rollout = 6 (num_epoch 3 x (20 prompts / "
                                     "rollout_batch_size 8))"});
  EXPECT_EQ(config.data.num_rollout, 6);
  EXPECT_THROW(resolve_num_rollout(config, 7), Error);
}

// Sets every row to a value that is neither its default nor round in binary.
void fill_all(const std::vector<FlagRow>& rows) {
  for (const FlagRow& row : rows) {
    std::visit(
        [](const auto& value) {
          using T = std::remove_cvref_t<decltype(value)>;
          if constexpr (std::is_same_v<T, EnumRef>) {
            value.set(value.value,
                      (value.get(value.value) + 1) % static_cast<int>(value.spellings.size()));
          } else if constexpr (std::is_same_v<T, bool*>) {
            *value = !*value;
          } else if constexpr (std::is_same_v<T, std::optional<bool>*>) {
            *value = false;
          } else if constexpr (std::is_same_v<T, std::string*>) {
            *value += " \"quoted\" \n\xc3\xa9";
          } else if constexpr (std::is_same_v<T, std::vector<std::string>*>) {
            *value = {"", "two words", "{}"};
          } else if constexpr (std::is_same_v<T, std::vector<std::int64_t>*>) {
            *value = {-1, INT64_MAX};
          } else if constexpr (std::is_same_v<T, double*> ||
                               std::is_same_v<T, std::optional<double>*>) {
            *value = 0.1 + 0.2;
          } else {
            *value = INT64_MAX - 1;
          }
        },
        row.value);
  }
}

template <class C>
void expect_round_trip() {
  C config;
  fill_all(rows_of(config));
  const std::string text = dump_json(to_json(config));
  C back = tandem::from_json<C>(parse_ordered_json(text, "test"), "test");
  const std::vector<FlagRow> a = rows_of(config);
  const std::vector<FlagRow> b = rows_of(back);
  const C untouched{};
  C copy = untouched;
  const std::vector<FlagRow> standard = rows_of(copy);
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(show(a[i]), show(b[i])) << a[i].name;
    EXPECT_NE(show(a[i]), show(standard[i])) << a[i].name;
  }
  EXPECT_EQ(text, dump_json(to_json(back)));
}

TEST(ConfigJson, RoundTripIsExact) {
  expect_round_trip<Config>();
  expect_round_trip<GenerateConfig>();
  expect_round_trip<ScoreConfig>();
  expect_round_trip<SelftestConfig>();
  expect_round_trip<ServeConfig>();
  Config config = good_config();
  resolve(config, kHost);
  const Config back = tandem::from_json<Config>(to_json(config), "test");
  EXPECT_EQ(dump_json(to_json(config)), dump_json(to_json(back)));
  EXPECT_FALSE(tandem::from_json<Config>(to_json(Config{}), "test").rollout.rollout_batch_size);
}

TEST(ConfigJson, UnknownKeysAndWrongTypesAreErrors) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"optimizer": {"lrr": 1}})", "c: optimizer.lrr: unknown key"},
      {R"({"kitchen": {}})", "c: unknown key 'kitchen'"},
      {R"({"optimizer": {"lr": "1"}})", "c: optimizer.lr: found \"1\""},
      {R"({"rollout": {"rollout_batch_size": 1.5}})", "c: rollout.rollout_batch_size: found 1.5"},
      {R"({"compute": {"device": "tpu"}})", "c: compute.device: found 'tpu'"},
      {R"([1])", "c: found array"},
  };
  for (const auto& [text, start] : cases) {
    try {
      tandem::from_json<Config>(parse_ordered_json(text, "c"), "c");
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_TRUE(std::string_view(error.what()).starts_with(start)) << error.what();
    }
  }
}

TEST(Table, NamesAreUniqueAndReasonsAreGiven) {
  Config config;
  std::set<std::string_view> seen;
  for (const FlagRow& row : rows_of(config)) {
    EXPECT_TRUE(seen.insert(row.name).second) << row.name;
    for (const std::string_view alias : alternatives(row.options.alias)) {
      EXPECT_TRUE(seen.insert(alias).second) << alias;
    }
    if (!row.options.inverse.empty()) {
      EXPECT_TRUE(seen.insert(row.options.inverse).second) << row.options.inverse;
    }
    const bool needs_why = row.options.kind != Kind::honoured || !row.options.now.empty();
    EXPECT_EQ(needs_why, !row.options.why.empty()) << row.name;
    EXPECT_FALSE(row.help.empty()) << row.name;
  }
  for (const MilesFlag& flag : miles_flags()) {
    EXPECT_TRUE(seen.insert(flag.name).second) << flag.name;
    EXPECT_FALSE(flag.why.empty()) << flag.name;
    EXPECT_NE(flag.kind, Kind::honoured) << flag.name;
  }
}

TEST(Table, TwoRowsNeverShareAMember) {
  Config config;
  std::set<const void*> members;
  for (const FlagRow& row : rows_of(config)) {
    const void* address = std::visit(
        [](const auto& value) -> const void* {
          if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, EnumRef>) {
            return value.value;
          } else {
            return value;
          }
        },
        row.value);
    EXPECT_TRUE(members.insert(address).second) << row.name;
  }
}

TEST(Table, EveryDefaultIsAcceptedByItsOwnRow) {
  Config config;
  Config standard;
  const auto rows = rows_of(config);
  const auto defaults = rows_of(standard);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    EXPECT_FALSE(row_fault(rows[i], defaults[i], std::string(rows[i].name)).has_value());
  }
}

TEST(Docs, HelpIsGroupedAndShowsWhatIsHonoured) {
  const std::string help = help_text<Config>("usage: tandem train ...");
  EXPECT_TRUE(help.starts_with("usage: tandem train ...\n"));
  for (const char* part : {"\nOptimizer\n", "  --lr <number>\n", "[1e-06]", "  --no-share-prompt\n",
                           "  --device auto|cpu|cuda\n", "  --config FILE\n",
                           "  --rollout-seed <int>\n", "  --rollout-batch-size <int>\n"}) {
    EXPECT_NE(help.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(help.find("--partial-rollout"), std::string::npos) << "refused flags are not offered";
}

// With TANDEM_WRITE_DOCS set the page is written instead: that is how it is made without the cli.
TEST(Docs, FlagsPageIsCurrent) {
  const std::string path = std::string(TANDEM_SOURCE_DIR) + "/docs/flags.md";
  if (std::getenv("TANDEM_WRITE_DOCS") != nullptr) write_file_atomic(path, flags_markdown());
  EXPECT_TRUE(read_file(path) == flags_markdown())
      << "docs/flags.md is not current: run `tandem flags --markdown > docs/flags.md`";
}

}  // namespace
}  // namespace tandem
