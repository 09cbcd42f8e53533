// The engine between two steps: commands of the mailbox, the three ways to pause, flush, versions.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include "unit/engine_hash_model.h"

namespace tandem {
namespace {

const EngineLimits kLimits = {.num_blocks = 64,
                              .block_tokens = 4,
                              .max_running = 8,
                              .max_prefill_tokens = 64,
                              .context_length = 64,
                              .vocab_size = 100,
                              .eos_token_ids = {},
                              .vocabulary = {}};

struct Bench {
  Mailbox mailbox;
  test::HashModel model{64, 4, 100};
  Engine engine{
      kLimits,
      [this](const StepPlan& plan, std::span<SampledToken> sampled) { model.run(plan, sampled); },
      mailbox};
  std::vector<GenerateResult> results;

  GenerateRequest request(const std::string& rid, std::int64_t n = 2, std::int64_t answer = 10) {
    GenerateRequest request;
    request.rid = rid;
    request.prompt = {1, 2, 3, 4, 5, 6};
    request.n = n;
    request.params.max_new_tokens = answer;
    return request;
  }
  void add(const GenerateRequest& r) {
    engine.add(r, [this](GenerateResult result) { results.push_back(std::move(result)); });
  }
  void finish() {
    for (int i = 0; engine.step(); ++i) ASSERT_LT(i, 1000);
  }
  template <class C>
  ControlAnswer send(C command) {
    ControlAnswer answer{false, "not answered"};
    command.reply = [&](const ControlAnswer& a) { answer = a; };
    mailbox.post(std::move(command));
    engine.step();
    return answer;
  }
};

void expect_equal_to_reference(const GenerateRequest& request, const GenerateResult& result) {
  for (std::int64_t i = 0; i < request.n; ++i) {
    const SampleResult wanted = test::reference_answer(request, i, kLimits);
    EXPECT_EQ(result.samples[i].output_ids, wanted.output_ids);
    EXPECT_EQ(result.samples[i].log_probs, wanted.log_probs);
    EXPECT_EQ(result.samples[i].versions.size(), wanted.output_ids.size());
  }
}

TEST(Engine, CallsBackOnceWithAllSamples) {
  Bench b;
  b.add(b.request("a"));
  b.add(b.request("b", 3, 4));
  b.finish();
  ASSERT_EQ(b.results.size(), 2u);
  EXPECT_EQ(b.results[0].rid, "b");
  EXPECT_EQ(b.results[0].samples.size(), 3u);
  EXPECT_EQ(b.results[0].prompt_tokens, 6);
  expect_equal_to_reference(b.request("a"), b.results[1]);
}

TEST(Engine, PauseByAbortReturnsWhatThereIs) {
  Bench b;
  b.add(b.request("a"));
  for (int i = 0; i < 3; ++i) b.engine.step();
  EXPECT_TRUE(b.send(PauseCommand{PauseMode::abort, {}}).ok);
  ASSERT_EQ(b.results.size(), 1u);
  for (const SampleResult& sample : b.results[0].samples) {
    EXPECT_EQ(sample.finish, FinishReason::abort);
    EXPECT_EQ(sample.output_ids.size(), 3u);
    EXPECT_EQ(sample.log_probs.size(), 3u);
    EXPECT_EQ(sample.versions.size(), 3u);
  }
  b.add(b.request("b"));
  EXPECT_FALSE(b.engine.step()) << "a paused engine has nothing to do";
  EXPECT_EQ(b.engine.stats().waiting, 2) << "but takes requests";
  EXPECT_TRUE(b.send(ContinueCommand{}).ok);
  b.finish();
  EXPECT_EQ(b.results.size(), 2u);
}

TEST(Engine, PauseByRetractDropsKvAndKeepsTokensAndVersions) {
  Bench b;
  b.engine.set_weight_version(3);
  b.add(b.request("a"));
  for (int i = 0; i < 4; ++i) b.engine.step();
  EXPECT_FALSE(b.send(FlushCommand{}).ok) << "running";
  EXPECT_TRUE(b.send(PauseCommand{PauseMode::retract, {}}).ok);
  EXPECT_TRUE(b.mailbox.stats().paused);
  EXPECT_EQ(b.mailbox.stats().free_blocks, 64);
  EXPECT_TRUE(b.send(FlushCommand{}).ok) << "paused and no KV is held";
  std::fill(b.model.slots.begin(), b.model.slots.end(), 0);
  b.engine.set_weight_version(4);
  EXPECT_TRUE(b.send(ContinueCommand{}).ok);
  b.finish();
  ASSERT_EQ(b.results.size(), 1u);
  expect_equal_to_reference(b.request("a"), b.results[0]);
  EXPECT_EQ(b.results[0].weight_version, 4);
  for (const SampleResult& sample : b.results[0].samples) {
    // Flush was refused at a step boundary, after which one more step ran.
    EXPECT_EQ(sample.versions, (std::vector<std::int64_t>{3, 3, 3, 3, 3, 4, 4, 4, 4, 4}));
    EXPECT_EQ(sample.num_preemptions, 1);
  }
}

TEST(Engine, PauseInPlaceKeepsTheKv) {
  Bench b;
  b.add(b.request("a"));
  for (int i = 0; i < 4; ++i) b.engine.step();
  const std::int64_t rows = b.engine.stats().rows_computed;
  EXPECT_TRUE(b.send(PauseCommand{PauseMode::in_place, {}}).ok);
  const ControlAnswer flush = b.send(FlushCommand{});
  EXPECT_FALSE(flush.ok);
  EXPECT_NE(flush.message.find("2 frozen samples"), std::string::npos) << flush.message;
  EXPECT_TRUE(b.send(ContinueCommand{}).ok);
  b.finish();
  expect_equal_to_reference(b.request("a"), b.results[0]);
  EXPECT_EQ(b.engine.stats().rows_computed - rows, 2 * 6) << "nothing was computed twice";
}

TEST(Engine, ServesItsMailboxInOrder) {
  Bench b;
  const auto collect = [&](GenerateResult result) { b.results.push_back(std::move(result)); };
  b.mailbox.post(GenerateCommand{b.request("x-1"), collect});
  b.mailbox.post(GenerateCommand{b.request("y-1"), collect});
  b.engine.step();
  EXPECT_TRUE(b.send(AbortCommand{"x-", {}}).ok);
  ASSERT_EQ(b.results.size(), 1u);
  EXPECT_EQ(b.results[0].rid, "x-1");
  b.finish();
  EXPECT_EQ(b.results.size(), 2u);
}

TEST(Engine, ProbeAnswersAfterATokenAndAtOnceWhilePaused) {
  Bench b;
  EXPECT_EQ(b.send(ProbeCommand{}).message, "1 token");
  EXPECT_EQ(b.engine.stats().tokens_sampled, 1);
  b.engine.pause(PauseMode::in_place);
  EXPECT_EQ(b.send(ProbeCommand{}).message, "paused");
}

// C28: prompt P, new weights, P again: the answer is a fresh engine's, nothing comes from the
// cache.
TEST(Engine, NewWeightsNeverMeetOldKv) {
  Bench b;
  GenerateRequest request = b.request("p", 1, 6);
  request.prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  const auto run = [&](std::int64_t version) {
    b.results.clear();
    b.add(request);
    b.finish();
    const SampleResult& got = b.results.at(0).samples[0];
    const SampleResult wanted = test::reference_answer(request, 0, kLimits, b.model.weights);
    EXPECT_EQ(got.output_ids, wanted.output_ids);
    EXPECT_EQ(got.log_probs, wanted.log_probs);
    EXPECT_EQ(got.versions, std::vector<std::int64_t>(6, version));
    return got.cached_tokens;
  };
  EXPECT_EQ(run(0), 0);
  EXPECT_EQ(run(0), 8);
  b.model.weights = 77;
  b.engine.set_weight_version(1);
  EXPECT_EQ(run(1), 0);
  EXPECT_EQ(run(1), 8);
  // Frozen in place, a sample goes on over its old KV; one that comes now gets none of it.
  b.add(b.request("frozen", 1, 20));
  for (int i = 0; i < 8; ++i) b.engine.step();
  b.engine.pause(PauseMode::in_place);
  b.model.weights = 78;
  b.engine.set_weight_version(2);
  b.engine.resume();
  b.finish();
  EXPECT_EQ(run(2), 0);
}

// Frozen in its prompt, a sample computes that again: all of its answer is of the new weights, also
// by the keys that it reads.
TEST(Engine, AnAnswerThatIsNotBegunIsOfTheNewWeightsAlone) {
  EngineLimits limits = kLimits;
  limits.max_prefill_tokens = 4;
  Bench b;
  Engine engine(
      limits,
      [&](const StepPlan& plan, std::span<SampledToken> sampled) { b.model.run(plan, sampled); },
      b.mailbox);
  GenerateRequest request = b.request("p", 2, 6);
  request.prompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::optional<GenerateResult> got;
  engine.add(request, [&](GenerateResult result) { got = std::move(result); });
  engine.step();
  EXPECT_EQ(engine.stats().rows_computed, 4);
  engine.pause(PauseMode::in_place);
  b.model.weights = 77;
  engine.set_weight_version(1);
  engine.resume();
  while (engine.step()) continue;
  for (std::int64_t i = 0; i < 2; ++i) {
    const SampleResult wanted = test::reference_answer(request, i, limits, 77);
    EXPECT_EQ(got.value().samples[i].output_ids, wanted.output_ids);
    EXPECT_EQ(got->samples[i].log_probs, wanted.log_probs);
    EXPECT_EQ(got->samples[i].versions, std::vector<std::int64_t>(6, 1));
  }
}

TEST(Mailbox, WaitEndsByDeadlineOrPost) {
  int wakes = 0;
  Mailbox mailbox([&] { ++wakes; });
  EXPECT_FALSE(mailbox.wait(Deadline::after(0.01)));
  mailbox.post(ContinueCommand{});
  EXPECT_TRUE(mailbox.wait(Deadline::after(0.0)));
  EXPECT_EQ(wakes, 1);
}

}  // namespace
}  // namespace tandem
