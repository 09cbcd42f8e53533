// Command lines and TOML files into a config: values, arities, mixing, and all faults at once.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/check.h"
#include "config/parse.h"

namespace tandem {
namespace {

using Words = std::vector<std::string>;

Words words_of(const std::string& line) {
  Words words;
  std::istringstream text(line);
  for (std::string word; text >> word;) words.push_back(word);
  return words;
}

std::string joined(const Words& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// A file that lives as long as the test.
struct TempFile {
  explicit TempFile(const std::string& content) {
    path = testing::TempDir() + "config_" +
           testing::UnitTest::GetInstance()->current_test_info()->name() + ".toml";
    std::ofstream(path) << content;
  }
  ~TempFile() { std::filesystem::remove(path); }
  std::string path;
};

// The value of a row after parsing `line` into a Config.
std::string value_after(const std::string& line, std::string_view name, Parsed* parsed = nullptr) {
  Config config;
  const Parsed result = parse(words_of(line), config);
  if (parsed != nullptr) *parsed = result;
  for (const FlagRow& row : rows_of(config)) {
    if (row.name == name) return show(row);
  }
  return "no such row";
}

TEST(Parse, ReadsValuesOfEveryType) {
  struct Case {
    const char* line;
    const char* name;
    const char* value;
  };
  const Case cases[] = {
      {"--lr 1e-5", "lr", "1e-05"},
      {"--lr=0.5", "lr", "0.5"},
      {"--rollout-batch-size 8", "rollout_batch_size", "8"},
      {"--rollout_batch_size 8", "rollout_batch_size", "8"},
      {"--rollout-batch-size 8 --rollout-batch-size 4", "rollout_batch_size", "4"},
      {"--colocate", "colocate", "true"},
      {"--colocate --no-colocate", "colocate", "false"},
      {"--no-share-prompt", "share_prompt", "false"},
      {"--share-prompt=false", "share_prompt", "false"},
      {"--no-deterministic-layout", "deterministic_layout", "false"},
      {"--device cpu", "device", "cpu"},
      {"--dtype bfloat16", "dtype", "bfloat16"},
      {"--lr-decay-style cosine", "lr_decay_style", "cosine"},
      {"--rollout-stop-token-ids 1 2 3", "rollout_stop_token_ids", "1 2 3"},
      {"--eval-prompt-data a b.jsonl c d.jsonl", "eval_prompt_data", "a b.jsonl c d.jsonl"},
      {"--eval-prompt-data a b --lr 1 --colocate", "eval_prompt_data", "a b"},
      {"--apply-chat-template-kwargs {\"a\":1}", "apply_chat_template_kwargs", "{\"a\":1}"},
      {"--disable-grpo-std-normalization", "grpo_std_normalization", "false"},
      {"--disable-grpo-std-normalization --no-disable-grpo-std-normalization",
       "grpo_std_normalization", "true"},
      {"--sglang-max-running-requests 7", "max_running_requests", "7"},
      {"--no-save-optim", "save_optim", "false"},
      {"--save-hf=", "save_hf", ""},
  };
  for (const Case& c : cases) {
    Parsed parsed;
    EXPECT_EQ(value_after(c.line, c.name, &parsed), c.value) << c.line;
    EXPECT_EQ(joined(parsed.faults), "") << c.line;
  }
}

TEST(Parse, NamesKeyValueAndRemedyOfEachFault) {
  struct Case {
    const char* line;
    Words parts;
  };
  const Case cases[] = {
      {"--lr 1e-5x", {"--lr:", "'1e-5x'", "number"}},
      {"--lr", {"--lr:", "no value", "<number>"}},
      {"--lr 1 2", {"--lr:", "'1 2'", "one number"}},
      {"--rollout-batch-size 8.0", {"--rollout-batch-size:", "'8.0'", "integer"}},
      {"--rollout-batch-size 99999999999999999999", {"--rollout-batch-size:", "integer"}},
      {"--rollout-batch-size 0", {"--rollout-batch-size:", "found 0", "at least 1"}},
      {"--eps-clip 0", {"--eps-clip:", "found 0", "above 0", "at most 1"}},
      {"--eps-clip nan", {"--eps-clip:", "nan", "finite"}},
      {"--lr inf", {"--lr:", "inf", "finite"}},
      {"--rollout-stop-token-ids 1 x", {"--rollout-stop-token-ids:", "'1 x'", "integers"}},
      {"--rollout-stop-token-ids 1 -2", {"--rollout-stop-token-ids:", "-2", "at least 0"}},
      {"--device tpu", {"--device:", "'tpu'", "auto, cpu, cuda"}},
      {"--colocate yes", {"--colocate:", "'yes'", "true or false"}},
      {"--rm-type last_number", {"--rm-type:", "'last_number'", "last-number"}},
      {"--rm-type dapo", {"--rm-type:", "dapo is not built yet", "last-number, exact"}},
      {"--apply-chat-template-kwargs [1]", {"--apply-chat-template-kwargs:", "[1]", "object"}},
      {"--rollout-batchsize 8", {"--rollout-batchsize:", "did you mean --rollout-batch-size?"}},
      {"--tensor-model-paralel-size 1", {"did you mean --tensor-model-parallel-size?"}},
      {"--xyzzy-plugh", {"--xyzzy-plugh: unknown flag", "--help"}},
      {"stray --colocate", {"'stray'", "wanted a flag"}},
      {"--config", {"--config:", "one TOML file"}},
      {"--config no/such.toml", {"--config:", "no/such.toml"}},
  };
  for (const Case& c : cases) {
    Config config;
    const Parsed parsed = parse(words_of(c.line), config);
    ASSERT_EQ(parsed.faults.size(), 1u) << c.line << "\n" << joined(parsed.faults);
    for (const std::string& part : c.parts) {
      EXPECT_NE(parsed.faults[0].find(part), std::string::npos)
          << c.line << ": '" << part << "' is not in: " << parsed.faults[0];
    }
  }
}

TEST(Parse, ReportsAllFaultsAtOnce) {
  Config config;
  const Words words = words_of(
      "--hf-checkpoint no/such/model --lr fast --rollout-batch-size 7 --n-samples-per-prompt 8 "
      "--global-batch-size 256 --partial-rollout --lora-rank 8 --rolout-seed 1 "
      "--eps-clip 2 "
      "--rollout-temperature 0 --prompt-data no/such.jsonl --rm-type math --label-key label");
  std::string text;
  try {
    read_command_line(words, config);
  } catch (const Error& error) {
    text = error.what();
  }
  for (const char* part :
       {"--lr: found 'fast'", "--global-batch-size: found 256",
        "--partial-rollout: true is not built yet", "--lora-rank 8: not built yet",
        "did you mean --rollout-seed?", "--eps-clip: found 2", "--rollout-temperature: found 0",
        "--rollout-num-gpus: not given", "--num-rollout: neither",
        "--rollout-max-response-len: not given", "'no/such/model' is not a folder",
        "--prompt-data: 'no/such.jsonl' is not a file", "12 faults"}) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
  }
}

TEST(Parse, DoesNotRepeatAFlagThatAlreadyHasAFault) {
  Config config;
  Parsed parsed = parse(words_of("--rollout-batch-size eight"), config);
  add_faults(parsed, validate(config));
  int about_batch = 0;
  for (const std::string& fault : parsed.faults) {
    about_batch += fault.starts_with("--rollout-batch-size");
  }
  EXPECT_EQ(about_batch, 1) << joined(parsed.faults);
}

TEST(Parse, RefusedFlagsAreKnownAndTheirDefaultIsAccepted) {
  struct Case {
    const char* refused;
    const char* accepted;
  };
  const Case cases[] = {
      {"--ref-ckpt-step 7", "--no-use-opd"},
      {"--advantage-estimator ppo", "--advantage-estimator grpo"},
      {"--train-backend megatron", "--train-backend fsdp"},
      {"--actor-num-nodes 2", "--actor-num-nodes 1"},
      {"--update-weight-transfer-mode disk", "--update-weight-transfer-mode p2p"},
      {"--tensor-model-parallel-size 2", "--tensor-model-parallel-size 1"},
      {"--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor 0.20"},
      {"--use-fault-tolerance", "--no-use-fault-tolerance"},
      {"--use-session-server", "--no-lora-train-only"},
      {"--use-session-server v2", "--target-modules"},
      {"--no-keep-fp32-master", "--keep-fp32-master"},
      {"--fully-async", "--no-fully-async"},
      {"--sglang-quantization fp8", "--sglang-max-running-requests 64"},
      {"--multi-lora-adapter a b", "--attention-dropout 0.0"},
      {"--save-trigger-sentinel out", "--save-trigger-sentinel="},
  };
  for (const Case& c : cases) {
    Config config;
    const Parsed refused = parse(words_of(c.refused), config);
    EXPECT_EQ(refused.faults.size(), 1u) << c.refused << "\n" << joined(refused.faults);
    if (!refused.faults.empty()) {
      EXPECT_NE(refused.faults[0].find("not built yet"), std::string::npos) << refused.faults[0];
    }
  }
  for (const Case& c : cases) {
    Config config;
    const Parsed accepted = parse(words_of(c.accepted), config);
    EXPECT_EQ(joined(accepted.faults) + joined(accepted.notes), "") << c.accepted;
  }
}

TEST(Parse, FlagsWithoutEffectAreAcceptedWithALine) {
  for (const char* line :
       {"--offload-train", "--no-offload-train", "--micro-batch-size 4", "--use-dynamic-batch-size",
        "--num-layers 30", "--spec a b", "--swiglu", "--recompute-activations",
        "--sglang-mem-fraction-static 0.7", "--router-policy random", "--use-wandb",
        "--wandb-project x", "--lambd 0.9", "--attention-backend flash", "--no-load-rng",
        "--moe-token-dispatcher-type alltoall", "--skip-actor-forward-only", "--balance-data"}) {
    Config config;
    const Parsed parsed = parse(words_of(line), config);
    EXPECT_EQ(joined(parsed.faults), "") << line;
    ASSERT_EQ(parsed.notes.size(), 1u) << line;
    EXPECT_TRUE(parsed.notes[0].starts_with("--")) << parsed.notes[0];
    EXPECT_NE(parsed.notes[0].find(" changes nothing: "), std::string::npos) << parsed.notes[0];
  }
}

TEST(Parse, AFileAndFlagsMixAndFlagsWin) {
  const TempFile file(
      "rollout-batch-size = 8\n"
      "lr = 1e-5\n"
      "colocate = true\n"
      "disable_grpo_std_normalization = true\n"
      "micro_batch_size = 4\n"
      "eval_prompt_data = [\"add\", \"add.jsonl\"]\n"
      "[optimizer]\n"
      "adam_beta2 = 0.99\n"
      "[data]\n"
      "apply-chat-template-kwargs = { enable_thinking = false }\n");
  Config config;
  const Words words{"--lr", "2e-5", "--config", file.path, "--no-colocate"};
  const Parsed parsed = parse(words, config);
  EXPECT_EQ(joined(parsed.faults), "");
  EXPECT_EQ(config.rollout.rollout_batch_size, 8);
  EXPECT_EQ(config.optimizer.lr, 2e-5);
  EXPECT_EQ(config.optimizer.adam_beta2, 0.99);
  EXPECT_FALSE(config.cluster.colocate);
  EXPECT_FALSE(config.algorithm.grpo_std_normalization);
  EXPECT_EQ(config.evaluate.eval_prompt_data, (Words{"add", "add.jsonl"}));
  EXPECT_NE(config.data.apply_chat_template_kwargs.find("\"enable_thinking\""), std::string::npos);
  EXPECT_EQ(parsed.notes.size(), 1u);
}

TEST(Parse, FaultsOfAFileNameTheFileTheKeyAndTheLine) {
  const TempFile file(
      "lr = \"fast\"\n"
      "rollout_seeds = 3\n"
      "[optimizer]\n"
      "rollout_batch_size = 8\n"
      "weight_decay = -1\n"
      "[kitchen]\n"
      "sink = 1\n");
  Config config;
  const Parsed parsed = parse(Words{"--config", file.path}, config);
  const std::string text = joined(parsed.faults);
  for (const char* part :
       {": lr (line 1): found 'fast'",
        ": rollout_seeds (line 2): unknown key; did you mean "
        "rollout_seed?",
        ": optimizer.rollout_batch_size (line 4): this key belongs to [rollout]",
        ": optimizer.weight_decay (line 5): found -1", ": kitchen.sink (line 7): unknown key"}) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
  }
  EXPECT_EQ(parsed.faults.size(), 5u) << text;
}

TEST(Parse, ABrokenFileIsAFaultWithItsLine) {
  const TempFile file("lr = 1\nmin_lr = = 2\n");
  Config config;
  const Parsed parsed = parse(Words{"--config", file.path, "--eps-clip", "7"}, config);
  ASSERT_EQ(parsed.faults.size(), 2u) << joined(parsed.faults);
  EXPECT_NE(parsed.faults[0].find("not valid TOML at line 2"), std::string::npos);
}

TEST(Parse, AFolderIsNoConfig) {
  Config config;
  const Parsed parsed = parse(Words{"--config", "/tmp"}, config);
  ASSERT_EQ(parsed.faults.size(), 1u) << joined(parsed.faults);
  EXPECT_EQ(parsed.faults[0], "--config: '/tmp' is a folder, a TOML file wanted");
}

TEST(Parse, OtherCommandsUseTheSameWalk) {
  GenerateConfig generate;
  Parsed parsed = parse(Words{"--hf-checkpoint", "m", "--prompt", "one two", "three",
                              "--max-new-tokens", "5", "--max-running-requests", "2"},
                        generate);
  EXPECT_EQ(joined(parsed.faults), "");
  EXPECT_EQ(generate.prompt, (Words{"one two", "three"}));
  EXPECT_EQ(generate.max_new_tokens, 5);
  EXPECT_EQ(generate.engine.max_running_requests, 2);
  EXPECT_TRUE(validate(generate).empty());

  ScoreConfig score;
  parsed = parse(words_of("--hf-checkpoint m --input x.jsonl --through engine --gradients"), score);
  EXPECT_EQ(joined(parsed.faults), "");
  EXPECT_EQ(validate(score).size(), 1u);

  ServeConfig serve;
  parsed = parse(words_of("--hf-checkpoint m --port 99999 --colocate"), serve);
  EXPECT_EQ(parsed.faults.size(), 2u) << joined(parsed.faults);
}

TEST(Parse, HelpChecksNothingElse) {
  Config config;
  EXPECT_TRUE(read_command_line(Words{"--help"}, config).help);
}

}  // namespace
}  // namespace tandem
