// The scheduler as a pure step: admission, sharing of prompts, chunked prefill, preemption, ends,
// abort; and, over random load with a hash model on real slots, that no answer depends on the
// batch.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "base/check.h"
#include "unit/engine_hash_model.h"

namespace tandem {
namespace {

using test::HashModel;
using test::reference_answer;

EngineLimits small_limits() {
  return {.num_blocks = 64,
          .block_tokens = 4,
          .max_running = 8,
          .max_prefill_tokens = 16,
          .context_length = 64,
          .vocab_size = 100,
          .eos_token_ids = {},
          .vocabulary = {}};
}

GenerateRequest make_request(std::int64_t prompt_length, std::int64_t n,
                             std::int64_t max_new_tokens, const std::string& rid = "r") {
  GenerateRequest request;
  request.rid = rid;
  request.prompt.resize(prompt_length);
  std::iota(request.prompt.begin(), request.prompt.end(), 1);
  request.n = n;
  request.params.max_new_tokens = max_new_tokens;
  return request;
}

// Answers every draw of the plan with one token, or with `apart` tokens between neighbouring ids.
void answer_all(Scheduler& scheduler, const StepPlan& plan, TokenId token, std::int64_t version = 0,
                TokenId apart = 0) {
  std::vector<SampledToken> sampled;
  for (const PlanDraw& draw : plan.draws) {
    sampled.push_back({token + apart * static_cast<TokenId>(draw.sample_id), -1.0f});
  }
  scheduler.apply(sampled, version);
  ASSERT_EQ(scheduler.find_fault(), "");
}

void run_to_end(Scheduler& scheduler, HashModel& model) {
  std::vector<SampledToken> sampled;
  for (int step = 0; scheduler.has_work(); ++step) {
    ASSERT_LT(step, 100000) << "the scheduler makes no progress";
    const StepPlan& plan = scheduler.plan();
    ASSERT_FALSE(plan.empty());
    sampled.resize(plan.draws.size());
    model.run(plan, sampled);
    scheduler.apply(sampled, 0);
    ASSERT_EQ(scheduler.find_fault(), "") << "after step " << step;
  }
}

TEST(Scheduler, OnePrefillServesAllSamplesOfAPrompt) {
  Scheduler scheduler(small_limits());
  scheduler.add(make_request(10, 3, 4));
  const StepPlan& first = scheduler.plan();
  EXPECT_EQ(first.tokens.size(), 10u);
  ASSERT_EQ(first.segments.size(), 1u);
  EXPECT_EQ(first.logit_rows, std::vector<std::int64_t>{9});
  ASSERT_EQ(first.draws.size(), 3u);
  for (std::uint64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(first.draws[i].sample_id, i);
    EXPECT_EQ(first.draws[i].position, 0u);
    EXPECT_EQ(first.draws[i].logits_index, 0);
  }
  answer_all(scheduler, first, 50);
  // 10 positions: two full blocks and a border block, held three times.
  EXPECT_EQ(scheduler.stats().free_blocks, 61);

  const StepPlan& second = scheduler.plan();
  EXPECT_EQ(second.tokens, (std::vector<TokenId>{50, 50, 50}));
  EXPECT_EQ(second.positions, (std::vector<std::int32_t>{10, 10, 10}));
  ASSERT_EQ(second.copies.size(), 2u) << "the last holder writes the border block in place";
  EXPECT_EQ(second.copies[0].from, second.copies[1].from);
  EXPECT_EQ(std::set<std::int64_t>(second.slots.begin(), second.slots.end()).size(), 3u);
  for (int block = 0; block < 2; ++block) {
    EXPECT_EQ(second.block_ids[block], second.block_ids[3 + block]) << "full blocks stay shared";
  }
  answer_all(scheduler, second, 51);
  EXPECT_EQ(scheduler.stats().free_blocks, 59);
}

TEST(Scheduler, PromptOfWholeBlocksNeedsNoCopy) {
  Scheduler scheduler(small_limits());
  scheduler.add(make_request(8, 4, 4));
  answer_all(scheduler, scheduler.plan(), 50);
  const StepPlan& second = scheduler.plan();
  EXPECT_TRUE(second.copies.empty());
  EXPECT_EQ(second.draws.size(), 4u);
  answer_all(scheduler, second, 50);
}

TEST(Scheduler, PrefillIsCutIntoChunksBesideDecodes) {
  Scheduler scheduler(small_limits());
  scheduler.add(make_request(3, 1, 20, "a"));
  answer_all(scheduler, scheduler.plan(), 50);
  scheduler.add(make_request(40, 2, 4, "b"));
  const std::vector<std::int64_t> chunk_rows = {16, 16, 8};
  for (std::size_t i = 0; i < chunk_rows.size(); ++i) {
    const StepPlan& plan = scheduler.plan();
    ASSERT_EQ(plan.segments.size(), 2u);
    EXPECT_EQ(plan.segments[0].num_rows, 1) << "the older sample decodes in every step";
    EXPECT_EQ(plan.segments[1].num_rows, chunk_rows[i]);
    EXPECT_EQ(plan.segments[1].position_begin, 16 * static_cast<std::int64_t>(i));
    EXPECT_EQ(plan.draws.size(), i == 2 ? 3u : 1u) << "logits after the last chunk only";
    answer_all(scheduler, plan, 50);
  }
}

TEST(Scheduler, AdmitsInOrderOfArrivalUpToMaxRunning) {
  EngineLimits limits = small_limits();
  limits.max_running = 3;
  limits.max_prefill_tokens = 100;
  limits.prefix_cache = false;
  Scheduler scheduler(limits);
  for (int i = 0; i < 5; ++i) scheduler.add(make_request(4 + i, 1, 2, std::to_string(i)));
  const StepPlan& first = scheduler.plan();
  EXPECT_EQ(first.segments.size(), 3u);
  EXPECT_EQ(first.tokens.size(), 4u + 5u + 6u);
  answer_all(scheduler, first, 50);
  answer_all(scheduler, scheduler.plan(), 50);
  EXPECT_EQ(scheduler.plan().tokens.size(), 7u + 8u);
}

TEST(Scheduler, MoreSamplesThanMaxRunningTakeTurns) {
  EngineLimits limits = small_limits();
  limits.max_running = 2;
  Scheduler scheduler(limits);
  const GenerateRequest request = make_request(6, 5, 3);
  scheduler.add(request);
  answer_all(scheduler, scheduler.plan(), 50);
  while (scheduler.has_work()) {
    const StepPlan& plan = scheduler.plan();
    EXPECT_LE(plan.tokens.size(), 2u);
    answer_all(scheduler, plan, 50);
  }
  const auto finished = scheduler.take_finished(0);
  ASSERT_TRUE(finished);
  for (const SampleResult& sample : finished->result.samples) {
    EXPECT_EQ(sample.output_ids.size(), 3u);
  }
}

TEST(Scheduler, AdmissionWaitsForFreeBlocks) {
  EngineLimits limits = small_limits();
  limits.num_blocks = 11;
  limits.max_prefill_tokens = 64;
  Scheduler scheduler(limits);
  scheduler.add(make_request(16, 1, 17, "a"));  // can come to hold 8 blocks
  scheduler.add(make_request(16, 1, 17, "b"));
  scheduler.add(make_request(1, 1, 1, "c"));
  const StepPlan& plan = scheduler.plan();
  EXPECT_EQ(plan.segments.size(), 2u) << "4 + 4 blocks and one more each fit";
  EXPECT_EQ(scheduler.stats().waiting, 1) << "c would take the reserve";
}

TEST(Scheduler, PreemptionKeepsTokensAndResultsAreThoseOfAnEmptyEngine) {
  EngineLimits limits = small_limits();
  limits.num_blocks = 13;
  Scheduler scheduler(limits);
  HashModel model(limits.num_blocks, limits.block_tokens, 100);
  std::map<std::uint64_t, GenerateRequest> requests;
  for (int i = 0; i < 3; ++i) {
    GenerateRequest request = make_request(6 + i, 2, 30, std::to_string(i));
    request.first_sample_id = 10u * i;
    requests[scheduler.add(request)] = request;
  }
  run_to_end(scheduler, model);
  EXPECT_GT(scheduler.stats().preemptions, 0) << "the case must be tight enough to preempt";
  std::int64_t preempted = 0;
  while (auto finished = scheduler.take_finished(0)) {
    const GenerateRequest& request = requests.at(finished->key);
    for (std::int64_t i = 0; i < request.n; ++i) {
      const SampleResult& sample = finished->result.samples[i];
      const SampleResult wanted = reference_answer(request, i, limits);
      EXPECT_EQ(sample.output_ids, wanted.output_ids);
      EXPECT_EQ(sample.log_probs, wanted.log_probs);
      EXPECT_EQ(sample.output_ids.size(), 30u);
      preempted += sample.num_preemptions;
    }
  }
  EXPECT_EQ(preempted, scheduler.stats().preemptions);
  EXPECT_EQ(scheduler.stats().free_blocks, 13);
}

TEST(Scheduler, PreemptsTheYoungestAndComputesItAgainWithItsTokens) {
  EngineLimits limits = small_limits();
  limits.num_blocks = 6;
  limits.max_prefill_tokens = 32;
  Scheduler scheduler(limits);
  scheduler.add(make_request(8, 2, 13));  // two full blocks, then up to 3 more blocks each
  answer_all(scheduler, scheduler.plan(), 50, 0, 10);
  for (int i = 0; i < 8; ++i) answer_all(scheduler, scheduler.plan(), 60 + i, 0, 10);
  EXPECT_EQ(scheduler.stats().free_blocks, 0);
  const StepPlan& tight = scheduler.plan();
  EXPECT_EQ(tight.segments.size(), 1u);
  EXPECT_EQ(tight.draws[0].sample_id, 0u) << "the older sample goes on";
  answer_all(scheduler, tight, 70);
  EXPECT_EQ(scheduler.stats().waiting, 1);
  while (scheduler.stats().running == 1 && scheduler.stats().waiting == 1) {
    answer_all(scheduler, scheduler.plan(), 71);
  }
  const StepPlan& again = scheduler.plan();
  ASSERT_EQ(again.segments.size(), 1u);
  // The other needed one block, so the last of its own is gone and the one before still known.
  EXPECT_EQ(again.segments[0].position_begin, 12);
  EXPECT_EQ(again.tokens, (std::vector<TokenId>{73, 74, 75, 76, 77})) << "tokens are kept";
  EXPECT_EQ(again.draws[0].position, 9u);
}

TEST(Scheduler, RetractKeepsTokensAndGivesAllKvBack) {
  Scheduler scheduler(small_limits());
  scheduler.add(make_request(8, 3, 6));
  answer_all(scheduler, scheduler.plan(), 50);
  scheduler.retract_all();
  EXPECT_EQ(scheduler.find_fault(), "");
  EXPECT_TRUE(scheduler.flush());
  EXPECT_EQ(scheduler.stats().waiting, 3);
  while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 52);
  const auto finished = scheduler.take_finished(0);
  for (const SampleResult& sample : finished->result.samples) {
    EXPECT_EQ(sample.output_ids.front(), 50);
    EXPECT_EQ(sample.output_ids.size(), 6u);
    EXPECT_EQ(sample.num_preemptions, 1);
  }
}

TEST(Scheduler, RetractedSamplesOfOnePromptComputeItOnceAgain) {
  EngineLimits limits = small_limits();
  limits.max_prefill_tokens = 64;
  Scheduler scheduler(limits);
  scheduler.add(make_request(10, 3, 6));
  answer_all(scheduler, scheduler.plan(), 50);
  answer_all(scheduler, scheduler.plan(), 51);
  scheduler.retract_all();
  EXPECT_TRUE(scheduler.flush());
  const StepPlan& first = scheduler.plan();
  ASSERT_EQ(first.segments.size(), 3u);
  EXPECT_EQ(first.segments[0].num_rows, 12);
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(first.segments[i].position_begin, 8) << "two full blocks of this very batch";
    EXPECT_EQ(first.segments[i].num_rows, 4);
    for (int block = 0; block < 2; ++block) {
      EXPECT_EQ(first.block_ids[first.segments[i].blocks_begin + block], first.block_ids[block]);
    }
  }
  EXPECT_TRUE(first.copies.empty());
  answer_all(scheduler, first, 53, 0, 1);
  EXPECT_EQ(scheduler.stats().free_blocks, 64 - 2 - 1 - 1 - 1);
}

// The end of a conversation's turn is the beginning of the next; prompts of one batch share what
// they have in common; the last token is always computed.
TEST(Scheduler, KnownBeginningsAreTakenAndNotComputed) {
  Scheduler scheduler(small_limits());
  const auto finish = [&] {
    while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 50);
    std::vector<std::int64_t> cached;
    while (auto finished = scheduler.take_finished(0)) {
      for (const SampleResult& sample : finished->result.samples) {
        cached.push_back(sample.cached_tokens);
      }
    }
    return cached;
  };
  GenerateRequest turn = make_request(10, 1, 3);
  scheduler.add(turn);
  EXPECT_EQ(finish(), std::vector<std::int64_t>{0});
  EXPECT_EQ(scheduler.stats().rows_computed, 10 + 2);
  EXPECT_EQ(scheduler.stats().free_blocks, 64);
  EXPECT_EQ(scheduler.stats().cached_blocks, 3) << "two of the prompt, one of prompt and answer";

  turn.prompt.insert(turn.prompt.end(), {50, 50, 50, 7, 8});  // the answer and a next question
  scheduler.add(turn);
  EXPECT_EQ(finish(), std::vector<std::int64_t>{12});
  EXPECT_EQ(scheduler.stats().rows_cached, 12);

  scheduler.add(make_request(8, 3, 1));
  EXPECT_EQ(finish(), (std::vector<std::int64_t>{4, 8, 8}))
      << "the second block holds the last token; the others of a request share all";

  scheduler.flush();
  EXPECT_EQ(scheduler.stats().cached_blocks, 0);
  for (TokenId last : {91, 92}) {
    GenerateRequest request = make_request(11, 1, 2);
    request.prompt.back() = last;
    scheduler.add(request);
  }
  const StepPlan& plan = scheduler.plan();
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_EQ(plan.segments[1].position_begin, 8) << "while the first computes it";
  EXPECT_EQ(plan.tokens.size(), 11u + 3u);
  answer_all(scheduler, plan, 50);
  EXPECT_EQ(finish(), (std::vector<std::int64_t>{0, 8}));
}

TEST(Scheduler, TheSameBlockComputedTwiceIsKeptOnce) {
  EngineLimits limits = small_limits();
  limits.max_prefill_tokens = 2;  // both go on side by side, neither finds the other's block whole
  Scheduler scheduler(limits);
  scheduler.add(make_request(2, 2, 30));
  while (scheduler.has_work()) {
    answer_all(scheduler, scheduler.plan(), 50);
    // One partly filled block each and one chain of full blocks, whatever the length.
    const std::int64_t held = 64 - scheduler.stats().free_blocks;
    EXPECT_LE(held, scheduler.stats().cached_blocks + 3);
  }
  EXPECT_EQ(scheduler.stats().cached_blocks, 7) << "31 positions";
}

TEST(Scheduler, EvictsTheLeastRecentlyUsedAndItsFollowersFirst) {
  EngineLimits limits = small_limits();
  limits.num_blocks = 10;
  Scheduler scheduler(limits);
  const auto run = [&](TokenId first, std::int64_t length) {
    GenerateRequest request = make_request(length, 1, 1);
    std::iota(request.prompt.begin(), request.prompt.end(), first);
    scheduler.add(request);
    while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 99);
    return scheduler.take_finished(0)->result.samples[0].cached_tokens;
  };
  EXPECT_EQ(run(1, 17), 0);   // four blocks known
  EXPECT_EQ(run(30, 17), 0);  // eight
  EXPECT_EQ(scheduler.stats().cached_blocks, 8);
  EXPECT_EQ(run(1, 5), 4) << "the first block of the first is used again";
  EXPECT_EQ(run(60, 13), 0);  // needs four blocks, two were free
  EXPECT_EQ(run(30, 17), 16) << "the second is whole";
  EXPECT_EQ(run(1, 17), 8) << "the first has lost its last two blocks";
}

// C28: what was computed with old weights is not taken by a request that comes after them.
TEST(Scheduler, ForgottenPrefixesAreComputedAgain) {
  Scheduler scheduler(small_limits());
  scheduler.add(make_request(10, 1, 9, "kept over the change"));
  answer_all(scheduler, scheduler.plan(), 50);
  scheduler.forget_prefixes();
  EXPECT_EQ(scheduler.find_fault(), "");
  EXPECT_EQ(scheduler.stats().cached_blocks, 0);
  scheduler.add(make_request(10, 1, 2, "new"));
  const StepPlan& plan = scheduler.plan();
  ASSERT_EQ(plan.segments.size(), 2u);
  EXPECT_EQ(plan.segments[0].num_rows, 1);
  EXPECT_EQ(plan.segments[1].num_rows, 10);
  answer_all(scheduler, plan, 50);
  while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 50);
  EXPECT_EQ(scheduler.stats().cached_blocks, 2) << "the mixture is nobody's prefix";
  // A frozen sample whose first block was not full at the change is a mixture too.
  scheduler.flush();
  scheduler.add(make_request(2, 1, 9));
  answer_all(scheduler, scheduler.plan(), 50);
  scheduler.forget_prefixes();
  while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 50);
  EXPECT_EQ(scheduler.stats().cached_blocks, 0);
}

// C30: an end-of-sequence id that stands anywhere in the list ends the answer and stays in it.
TEST(Scheduler, EveryIdOfTheEosListStops) {
  struct Case {
    const char* name;
    TokenId token;
    bool ignore_eos;
    std::vector<TokenId> stop_token_ids;
    FinishReason finish;
    std::size_t length;
  };
  const std::vector<Case> cases = {
      {"first of the list", 90, false, {}, FinishReason::stop, 1},
      {"middle of the list", 91, false, {}, FinishReason::stop, 1},
      {"last of the list", 92, false, {}, FinishReason::stop, 1},
      {"another id", 93, false, {}, FinishReason::length, 3},
      {"the request's own", 93, false, {93}, FinishReason::stop, 1},
      {"ignored", 91, true, {}, FinishReason::length, 3},
      {"own ignored too, as in SGLang", 93, true, {93}, FinishReason::length, 3},
  };
  for (const Case& c : cases) {
    EngineLimits limits = small_limits();
    limits.eos_token_ids = {90, 91, 92};
    Scheduler scheduler(limits);
    GenerateRequest request = make_request(4, 1, 3);
    request.params.ignore_eos = c.ignore_eos;
    request.params.stop_token_ids = c.stop_token_ids;
    scheduler.add(request);
    while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), c.token, 7);
    const auto finished = scheduler.take_finished(7);
    ASSERT_TRUE(finished) << c.name;
    const SampleResult& sample = finished->result.samples[0];
    EXPECT_EQ(sample.finish, c.finish) << c.name;
    EXPECT_EQ(sample.output_ids, std::vector<TokenId>(c.length, c.token)) << c.name;
    EXPECT_EQ(sample.log_probs.size(), c.length) << c.name;
    EXPECT_EQ(sample.versions, std::vector<std::int64_t>(c.length, 7)) << c.name;
    EXPECT_EQ(sample.matched_stop, c.finish == FinishReason::stop ? c.token : -1) << c.name;
  }
}

TEST(Scheduler, AStopTokenInTheLastPlaceIsAStop) {
  EngineLimits limits = small_limits();
  limits.eos_token_ids = {90};
  Scheduler scheduler(limits);
  scheduler.add(make_request(4, 1, 1));
  answer_all(scheduler, scheduler.plan(), 90);
  EXPECT_EQ(scheduler.take_finished(0)->result.samples[0].finish, FinishReason::stop);
}

Vocabulary letters() {
  return Vocabulary::parse(R"({"decoder": {"type": "Fuse"}, "model": {"vocab": {
      "a": 1, "b": 2, "ab": 3, "bc": 4, "\n": 5, "é": 6, "x": 7, "cab": 8}}})",
                           "test");
}

// Texts that end an answer are found wherever tokens are cut, and their tokens stay.
TEST(Scheduler, StopTextsEndAcrossTokenBorders) {
  struct Case {
    const char* name;
    std::vector<std::string> stop;
    std::vector<TokenId> tokens;
    std::size_t length;
    const char* matched;  // empty: ends by length
    std::int64_t min_new_tokens = 0;
    bool ignore_eos = false;
  };
  const std::vector<Case> cases = {
      {"one token", {"x"}, {1, 2, 7, 1, 1}, 3, "x"},
      {"inside a token", {"a"}, {7, 8, 1, 1, 1}, 2, "a"},
      {"over two tokens", {"bb"}, {3, 2, 1, 1, 1}, 2, "bb"},
      {"over three tokens", {"bcab"}, {4, 1, 4, 1, 2}, 3, "bcab"},
      {"whole characters of several bytes", {"xé"}, {7, 6, 1, 1, 1}, 2, "xé"},
      {"a newline", {"\n\n"}, {5, 1, 5, 5, 1}, 4, "\n\n"},
      {"the first of the list", {"b", "ab"}, {7, 3, 1, 1, 1}, 2, "b"},
      {"not there", {"cc", "é\n"}, {4, 6, 4, 6, 4}, 5, ""},
      {"in the last place", {"x"}, {1, 1, 1, 1, 7}, 5, "x"},
      {"too early", {"x"}, {7, 1, 7, 1, 1}, 3, "x", 3},
      {"the same text later does not count twice", {"ax"}, {1, 7, 1, 1, 1}, 5, "", 3},
      {"with ignore_eos too", {"x"}, {1, 7, 1, 1, 1}, 2, "x", 0, true},
  };
  EngineLimits limits = small_limits();
  limits.vocabulary = std::make_shared<Vocabulary>(letters());
  for (const Case& c : cases) {
    Scheduler scheduler(limits);
    GenerateRequest request = make_request(4, 1, 5);
    request.params.stop = c.stop;
    request.params.min_new_tokens = c.min_new_tokens;
    request.params.ignore_eos = c.ignore_eos;
    scheduler.add(request);
    for (std::size_t i = 0; scheduler.has_work(); ++i) {
      answer_all(scheduler, scheduler.plan(), c.tokens.at(i));
    }
    const auto finished = scheduler.take_finished(0);
    ASSERT_TRUE(finished) << c.name;
    const SampleResult& sample = finished->result.samples[0];
    EXPECT_EQ(sample.output_ids.size(), c.length) << c.name;
    EXPECT_EQ(sample.log_probs.size(), c.length) << c.name;
    EXPECT_EQ(sample.matched_text, c.matched) << c.name;
    EXPECT_EQ(sample.finish, *c.matched ? FinishReason::stop : FinishReason::length) << c.name;
  }
}

// What a draw does to the logits depends on the answer so far, also after a preemption.
TEST(Scheduler, PlansPenaltiesBiasAndForbiddenEnds) {
  EngineLimits limits = small_limits();
  limits.eos_token_ids = {90};
  Scheduler scheduler(limits);
  GenerateRequest request = make_request(4, 2, 6);
  request.params.frequency_penalty = 0.5;
  request.params.presence_penalty = 0.25;
  request.params.repetition_penalty = 1.5;
  request.params.logit_bias = {{3, 2.0}};
  request.params.stop_token_ids = {91, 1000};
  request.params.min_new_tokens = 2;
  request.params.top_k = 100;  // the whole vocabulary
  scheduler.add(request);
  using Changes = std::vector<std::tuple<TokenId, float, float, float>>;
  const float never = -std::numeric_limits<float>::infinity();
  const auto changes_of = [](const StepPlan& plan, std::size_t draw) {
    Changes changes;
    for (std::int64_t i = 0; i < plan.draws[draw].num_changes; ++i) {
      const LogitChange& c = plan.changes[plan.draws[draw].changes_begin + i];
      changes.emplace_back(c.id, c.subtract, c.scale, c.add);
    }
    return changes;
  };
  const StepPlan& first = scheduler.plan();
  EXPECT_FALSE(first.draws[0].truncates());
  const Changes wanted_first = {{3, 0, 1, 2}, {90, 0, 1, never}, {91, 0, 1, never}};
  EXPECT_EQ(changes_of(first, 0), wanted_first);
  EXPECT_EQ(changes_of(first, 1), wanted_first);
  answer_all(scheduler, first, 40, 0, 1);  // 40 and 41
  answer_all(scheduler, scheduler.plan(), 40);
  scheduler.retract_all();
  const StepPlan& third = scheduler.plan();
  EXPECT_EQ(changes_of(third, 0), (Changes{{40, 1.25f, 1.5f, 0}, {3, 0, 1, 2}}));
  EXPECT_EQ(changes_of(third, 1),
            (Changes{{41, 0.75f, 1.5f, 0}, {40, 0.75f, 1.5f, 0}, {3, 0, 1, 2}}));
  answer_all(scheduler, third, 90);
  EXPECT_EQ(scheduler.take_finished(0)->result.samples[1].matched_stop, 90);
}

// C33: no room for an answer gives an empty one, and others of the batch do not notice.
TEST(Scheduler, NoRoomForAnAnswerFinishesByLength) {
  Scheduler scheduler(small_limits());
  scheduler.add(make_request(4, 2, 0, "zero"));
  scheduler.add(make_request(64, 1, 5, "full"));
  scheduler.add(make_request(63, 1, 5, "one left"));
  std::map<std::string, GenerateResult> results;
  const auto collect = [&] {
    while (auto finished = scheduler.take_finished(0)) {
      results[finished->result.rid] = std::move(finished->result);
    }
  };
  collect();
  ASSERT_EQ(results.size(), 2u);
  for (const auto& [rid, result] : results) {
    for (const SampleResult& sample : result.samples) {
      EXPECT_TRUE(sample.output_ids.empty()) << rid;
      EXPECT_TRUE(sample.log_probs.empty()) << rid;
      EXPECT_EQ(sample.finish, FinishReason::length) << rid;
    }
  }
  EXPECT_EQ(results["zero"].samples.size(), 2u);
  while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 50);
  collect();
  EXPECT_EQ(results["one left"].samples[0].output_ids, std::vector<TokenId>{50});
  EXPECT_EQ(results["one left"].samples[0].finish, FinishReason::length);
}

TEST(Scheduler, RefusesWhatItCannotServe) {
  EngineLimits limits = small_limits();
  limits.num_blocks = 10;
  const auto refusal = [&](const GenerateRequest& request) -> std::string {
    try {
      Scheduler(limits).add(request);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  GenerateRequest outside = make_request(4, 1, 1);
  outside.prompt[2] = 100;
  GenerateRequest cold = make_request(4, 1, 1);
  cold.params.temperature = -0.5;
  const auto with = [&](auto change) {
    GenerateRequest request = make_request(4, 1, 4);
    change(request.params);
    return refusal(request);
  };
  using P = SamplingParams;
  const std::vector<std::pair<const char*, std::string>> outside_range = {
      {"min_new_tokens: 5", with([](P& p) { p.min_new_tokens = 5; })},
      {"top_p: 0", with([](P& p) { p.top_p = 0; })},
      {"top_p: 1.5", with([](P& p) { p.top_p = 1.5; })},
      {"top_k: 0", with([](P& p) { p.top_k = 0; })},
      {"min_p: -0.1", with([](P& p) { p.min_p = -0.1; })},
      {"frequency_penalty: 3", with([](P& p) { p.frequency_penalty = 3; })},
      {"presence_penalty: -3", with([](P& p) { p.presence_penalty = -3; })},
      {"repetition_penalty: 0", with([](P& p) { p.repetition_penalty = 0; })},
      {"logit_bias: id 100", with([](P& p) {
         p.logit_bias = {{100, 1}};
       })},
      {"logit_bias: inf", with([](P& p) {
         p.logit_bias = {{1, INFINITY}};
       })},
      {"stop: this engine", with([](P& p) { p.stop = {"x"}; })},
      {"stop: a text of 0", with([](P& p) { p.stop = {""}; })}};
  for (const auto& [start, text] : outside_range) {
    EXPECT_TRUE(text.starts_with("sampling_params." + std::string(start))) << start << "\n" << text;
  }
  EXPECT_TRUE(refusal(make_request(0, 1, 1)).starts_with("input_ids:"));
  EXPECT_TRUE(refusal(make_request(65, 1, 1)).starts_with("input_ids:"));
  EXPECT_TRUE(refusal(outside).starts_with("input_ids: id 100 at position 2"));
  EXPECT_TRUE(refusal(make_request(4, 1, -1)).starts_with("sampling_params.max_new_tokens: -1"));
  EXPECT_TRUE(refusal(cold).starts_with("sampling_params.temperature:"));
  EXPECT_TRUE(refusal(make_request(4, 0, 1)).starts_with("sampling_params.n:"));
  EXPECT_TRUE(refusal(make_request(20, 1, 22)).starts_with("sampling_params.max_new_tokens:"));
  EXPECT_EQ(refusal(make_request(20, 1, 21)), "") << "40 positions are the whole pool";
}

TEST(Scheduler, AbortEndsMatchingRequestsWithWhatTheyHave) {
  EngineLimits limits = small_limits();
  limits.max_running = 3;
  Scheduler scheduler(limits);
  scheduler.add(make_request(6, 2, 9, "run-1"));
  scheduler.add(make_request(6, 1, 2, "other"));
  scheduler.add(make_request(6, 3, 9, "run-2"));
  answer_all(scheduler, scheduler.plan(), 50);
  ASSERT_EQ(scheduler.stats().waiting, 3);
  EXPECT_EQ(scheduler.abort_prefix("run-"), 2);
  EXPECT_EQ(scheduler.find_fault(), "");
  EXPECT_EQ(scheduler.abort_prefix("run-"), 0);
  std::map<std::string, GenerateResult> results;
  while (auto finished = scheduler.take_finished(0)) {
    results[finished->result.rid] = std::move(finished->result);
  }
  ASSERT_EQ(results.size(), 2u);
  for (const SampleResult& sample : results["run-1"].samples) {
    EXPECT_EQ(sample.finish, FinishReason::abort);
    EXPECT_EQ(sample.output_ids, std::vector<TokenId>{50});
    EXPECT_EQ(sample.log_probs.size(), 1u);
  }
  EXPECT_EQ(results["run-2"].samples.size(), 3u);
  EXPECT_TRUE(results["run-2"].samples[2].output_ids.empty());
  while (scheduler.has_work()) answer_all(scheduler, scheduler.plan(), 50);
  EXPECT_EQ(scheduler.take_finished(0)->result.samples[0].output_ids.size(), 2u);
  EXPECT_EQ(scheduler.stats().free_blocks, 64);
}

GenerateRequest random_request(std::mt19937_64& random, int number) {
  const auto below = [&](std::uint64_t bound) {
    return static_cast<std::int64_t>(random() % bound);
  };
  GenerateRequest request = make_request(1 + below(24), 1 + below(5), below(26), "");
  request.rid = std::to_string(number);
  for (TokenId& token : request.prompt) token = static_cast<TokenId>(below(100));
  // Half of them begin as one of three long system prompts do.
  for (std::int64_t i = 0, same = below(2) * below(25), which = below(3);
       i < std::min<std::int64_t>(same, static_cast<std::int64_t>(request.prompt.size())); ++i) {
    request.prompt[i] = static_cast<TokenId>((7 * which + 3 * i) % 100);
  }
  request.first_sample_id = 100u * static_cast<std::uint64_t>(number);
  request.params.seed = random() % 3;
  request.params.temperature = below(4) == 0 ? 0.0 : 1.0;
  request.params.evaluation = below(5) == 0;
  if (below(3) == 0) request.params.stop_token_ids = {static_cast<TokenId>(below(100))};
  return request;
}

// The same requests through engines of different sizes, arriving at different times, with retracts,
// forgotten prefixes and chunks at random: every answer is that of the sample alone.
TEST(Scheduler, AnswersNeverDependOnTheBatch) {
  struct Size {
    std::int64_t num_blocks, max_running, max_prefill_tokens;
  };
  for (const Size size : {Size{14, 3, 5}, Size{20, 8, 7}, Size{40, 16, 64}, Size{400, 64, 4096}}) {
    EngineLimits limits = small_limits();
    limits.num_blocks = size.num_blocks;
    limits.max_running = size.max_running;
    limits.max_prefill_tokens = size.max_prefill_tokens;
    limits.eos_token_ids = {3, 77};
    Scheduler scheduler(limits);
    HashModel model(limits.num_blocks, limits.block_tokens, 100);
    std::mt19937_64 random(11);
    std::mt19937_64 schedule(static_cast<std::uint64_t>(size.num_blocks));
    std::map<std::uint64_t, GenerateRequest> requests;
    std::vector<SampledToken> sampled;
    int sent = 0;
    int received = 0;
    const int kRequests = 120;
    for (int step = 0; received < kRequests; ++step) {
      ASSERT_LT(step, 200000);
      while (sent < kRequests && (schedule() % 3 == 0 || !scheduler.has_work())) {
        const GenerateRequest request = random_request(random, sent++);
        requests[scheduler.add(request)] = request;
      }
      if (schedule() % 50 == 0) scheduler.retract_all();
      if (schedule() % 150 == 0) scheduler.forget_prefixes();
      const StepPlan& plan = scheduler.plan();
      sampled.resize(plan.draws.size());
      if (!plan.empty()) {
        model.run(plan, sampled);
        scheduler.apply(sampled, 0);
      }
      ASSERT_EQ(scheduler.find_fault(), "") << "after step " << step;
      while (auto finished = scheduler.take_finished(0)) {
        ++received;
        const GenerateRequest& request = requests.at(finished->key);
        for (std::int64_t i = 0; i < request.n; ++i) {
          const SampleResult& sample = finished->result.samples[i];
          const SampleResult wanted = reference_answer(request, i, limits);
          ASSERT_EQ(sample.output_ids, wanted.output_ids) << "request " << request.rid;
          ASSERT_EQ(sample.log_probs, wanted.log_probs);
          ASSERT_EQ(sample.finish, wanted.finish);
        }
      }
    }
    EXPECT_LE(model.max_rows_seen, size.max_running + size.max_prefill_tokens);
    EXPECT_EQ(scheduler.stats().free_blocks, size.num_blocks);
    EXPECT_GT(scheduler.stats().rows_cached, size.num_blocks) << "prefixes were taken";
    if (size.num_blocks == 14) {
      EXPECT_GT(scheduler.stats().preemptions, 0);
    }
  }
}

}  // namespace
}  // namespace tandem
