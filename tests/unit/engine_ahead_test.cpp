// Steps planned while the one before runs: the same answers as one by one, whatever ends, enters or
// is preempted in between.
#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "unit/engine_hash_model.h"

namespace tandem {
namespace {

EngineLimits limits_of(std::int64_t num_blocks) {
  return {.num_blocks = num_blocks,
          .block_tokens = 4,
          .max_running = 8,
          .max_prefill_tokens = 24,
          .context_length = 60,
          .vocab_size = 40,
          .eos_token_ids = {3},
          .vocabulary = {}};
}

// A device that runs plans in order and knows the tokens before the host does.
struct Device {
  test::HashModel model;
  std::deque<std::vector<SampledToken>> results;
  std::vector<SampledToken> last;
  std::int64_t ahead = 0;

  bool start(StepPlan plan, std::span<const std::int32_t> sources) {
    if (!sources.empty()) {
      EXPECT_EQ(sources.size(), plan.tokens.size());
      ++ahead;
    }
    for (std::size_t i = 0; i < sources.size(); ++i) {
      EXPECT_EQ(plan.tokens[i], 0);
      plan.tokens[i] = last[static_cast<std::size_t>(sources[i])].token;
    }
    last.assign(plan.draws.size(), {});
    model.run(plan, last);
    results.push_back(last);
    return true;
  }
  void finish(std::span<SampledToken> sampled) {
    ASSERT_EQ(sampled.size(), results.front().size());
    std::copy(results.front().begin(), results.front().end(), sampled.begin());
    results.pop_front();
  }
  AsyncRunner runner() {
    return {
        .start = [this](const StepPlan& p, std::span<const std::int32_t> s) { return start(p, s); },
        .finish = [this](std::span<SampledToken> s) { finish(s); }};
  }
};

GenerateRequest random_request(std::mt19937& random, int i) {
  GenerateRequest r;
  r.rid = std::to_string(i);
  r.prompt.resize(1 + random() % 12);
  for (TokenId& t : r.prompt) t = static_cast<TokenId>(10 + random() % 4);
  r.n = 1 + static_cast<std::int64_t>(random() % 4);
  r.first_sample_id = static_cast<std::uint64_t>(10 * i);
  r.params.max_new_tokens = 1 + static_cast<std::int64_t>(random() % 40);
  r.params.temperature = random() % 4 == 0 ? 0.0 : 1.0;
  r.params.ignore_eos = random() % 3 == 0;
  if (random() % 5 == 0) r.params.stop_token_ids = {7, 9};
  return r;
}

void expect_reference(const GenerateRequest& request, const GenerateResult& result,
                      const EngineLimits& limits) {
  for (std::int64_t i = 0; i < request.n; ++i) {
    const SampleResult wanted = test::reference_answer(request, i, limits);
    const SampleResult& got = result.samples[static_cast<std::size_t>(i)];
    EXPECT_EQ(got.output_ids, wanted.output_ids) << request.rid << " sample " << i;
    EXPECT_EQ(got.log_probs, wanted.log_probs);
    EXPECT_EQ(got.finish, wanted.finish);
    EXPECT_EQ(got.versions.size(), wanted.output_ids.size());
  }
}

TEST(Ahead, AnswersAreTheReferences) {
  for (unsigned seed = 0; seed < 40; ++seed) {
    const EngineLimits limits = limits_of(seed % 2 ? 200 : 26);  // much room, or preemption
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    Device device{.model = {limits.num_blocks, 4, 40}, .results = {}, .last = {}};
    Mailbox mailbox;
    Engine engine(
        limits, [](const StepPlan&, std::span<SampledToken>) { FAIL() << "not this one"; }, mailbox,
        device.runner());
    std::vector<GenerateRequest> requests;
    std::vector<GenerateResult> results(24);
    for (int i = 0; i < 24; ++i) {
      requests.push_back(random_request(random, i));
      engine.add(requests.back(), [&results, i](GenerateResult r) { results[i] = std::move(r); });
    }
    // Now and then somebody else wants the thread, so that steps end with none ahead.
    for (int i = 0; engine.run([&] { return random() % 6 == 0; }); ++i) ASSERT_LT(i, 5000);
    for (int i = 0; i < 24; ++i) expect_reference(requests[i], results[i], limits);
    EXPECT_TRUE(device.results.empty());
    EXPECT_GT(device.ahead, 5);
    EXPECT_EQ(engine.stats().free_blocks, limits.num_blocks);
  }
}

// The scheduler's own state is whole after each step, and a token counts once.
TEST(Ahead, SchedulerStaysWhole) {
  for (unsigned seed = 100; seed < 120; ++seed) {
    const EngineLimits limits = limits_of(30);
    std::mt19937 random(seed);
    Device device{.model = {limits.num_blocks, 4, 40}, .results = {}, .last = {}};
    Scheduler scheduler(limits);
    for (int i = 0; i < 20; ++i) scheduler.add(random_request(random, i));
    std::int64_t tokens = 0, passed_over = 0;
    while (scheduler.has_work()) {
      const StepPlan* plan = &scheduler.plan();
      ASSERT_FALSE(plan->empty());
      device.start(*plan, {});
      while (plan) {
        std::vector<SampledToken> sampled(plan->draws.size());
        plan = scheduler.plan_ahead();
        if (plan) device.start(*plan, scheduler.sources());
        device.finish(sampled);
        scheduler.apply(sampled, 1);
        ASSERT_EQ(scheduler.find_fault(), "");
        for (std::size_t i = 0; i < sampled.size(); ++i)
          scheduler.drawn(i) ? ++tokens : ++passed_over;
        while (auto finished = scheduler.take_finished(1))
          for (const SampleResult& s : finished->result.samples)
            tokens -= static_cast<std::int64_t>(s.output_ids.size());
      }
    }
    EXPECT_EQ(tokens, 0);
    EXPECT_GT(passed_over, 0) << "some must have ended by their token";
  }
}

// A stream shows each token once; mail is served between two steps, with nothing under way.
TEST(Ahead, MailEndsARun) {
  const EngineLimits limits = limits_of(200);
  Device device{.model = {limits.num_blocks, 4, 40}, .results = {}, .last = {}};
  Mailbox mailbox;
  Engine engine(
      limits, [](const StepPlan&, std::span<SampledToken>) { FAIL(); }, mailbox, device.runner());
  GenerateRequest request;
  request.rid = "a";
  request.prompt = {1, 2};
  request.params.max_new_tokens = 50;
  request.params.ignore_eos = true;
  int shown = 0;
  std::int64_t ended_with = -1;
  ControlAnswer answer;
  engine.add(
      request,
      [&](const GenerateResult& r) {
        ended_with = static_cast<std::int64_t>(r.samples[0].output_ids.size());
      },
      [&](std::int64_t, TokenId, float, std::int64_t) {
        if (++shown == 10)
          mailbox.post(AbortCommand{.rid_prefix = "a",
                                    .reply = [&](const ControlAnswer& a) { answer = a; }});
      });
  engine.run({});  // the prompt
  engine.run({});
  EXPECT_TRUE(device.results.empty());
  EXPECT_LE(shown, 11);
  EXPECT_FALSE(engine.run({}));
  EXPECT_EQ(answer.message, "1 requests aborted");
  EXPECT_EQ(ended_with, shown);
}

}  // namespace
}  // namespace tandem
