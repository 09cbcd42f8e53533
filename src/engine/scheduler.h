// The rollout scheduler: a pure step. plan() turns the state into one batch for the model, apply()
// takes the sampled tokens back; no clock, no thread, no tensor, no I/O.
//
// A sequence (one sample) knows `known` = prompt + sampled tokens and has KV for the first
// `computed` of them. Every step it may run some of the rows [computed, known): one row is a
// decode, more are a prefill chunk; when the last known row has run, its logits give the next
// token. Recomputing a preempted sample is therefore nothing special. Of a request's n samples only
// the first (the leader) runs the prompt; at its last row all n draw their first token from the
// same logits and share its blocks (kv_cache.h).
//
// A full block is known to the prefix cache from the moment its rows are planned, since a layer
// writes all keys of a batch before it reads any. So prompts with one beginning compute it once
// even in one batch, and so do samples that were preempted together. A sample that kept its KV over
// a change of weights holds a mixture, which nobody else may take.
//
// Order: every sample has an arrival number; all active samples are older than all waiting ones.
// Admission takes the oldest waiting, preemption the youngest active, rows are planned oldest
// first, and the oldest can always run (check_request saw to it that it fits alone), so work
// always ends. What a sample draws depends on its own tokens, seed and id only, never on the batch.
// After the vectors have reached their sizes (in add), plan and apply allocate nothing.
//
// While a decode step runs, plan_ahead makes the next one for a device that knows the tokens first.
// Nothing enters, is preempted or ends meanwhile but by those tokens; KV freed by such an end may
// be written again by later steps only, which run later.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/kv_cache.h"
#include "engine/request.h"

namespace tandem {

// Consecutive rows of one sequence; its block table covers [0, position_begin + num_rows).
struct PlanSegment {
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;
  std::int64_t position_begin = 0;
  std::int64_t blocks_begin = 0;  // into StepPlan::block_ids
  std::int64_t num_blocks = 0;
};

// What a draw does to one logit before the temperature: see apply_changes in sampler.h. Those of
// one draw are applied in order and may name an id several times.
struct LogitChange {
  TokenId id = 0;
  float subtract = 0;  // frequency and presence penalty
  float scale = 1;     // repetition penalty
  float add = 0;       // bias; minus infinity forbids the token
};

// One token to sample.
struct PlanDraw {
  std::int64_t logits_index = 0;  // into StepPlan::logit_rows; n samples may share one
  double temperature = 1.0;       // 0: greedy
  double top_p = 1.0;
  std::int64_t top_k = -1;
  double min_p = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t sample_id = 0;
  std::uint64_t position = 0;  // in the generated tokens
  bool evaluation = false;
  std::int64_t changes_begin = 0;  // into StepPlan::changes
  std::int64_t num_changes = 0;

  bool truncates() const { return top_p < 1 || top_k > 0 || min_p > 0; }
  // Whether the temperature alone decides.
  bool is_plain() const { return num_changes == 0 && (temperature == 0 || !truncates()); }
};

// A batch, complete in itself: a follower rank needs nothing else to run it.
struct StepPlan {
  std::vector<BlockCopy> copies;         // first, in this order
  std::vector<TokenId> tokens;           // [rows]
  std::vector<std::int32_t> positions;   // [rows]
  std::vector<std::int64_t> slots;       // [rows] where each row's keys and values go
  std::vector<PlanSegment> segments;     // cover the rows in order
  std::vector<std::int32_t> block_ids;   // the segments' block tables, one after the other
  std::vector<std::int64_t> logit_rows;  // ascending, distinct
  std::vector<PlanDraw> draws;           // ascending logits_index
  std::vector<LogitChange> changes;      // the draws' changes, one after the other

  bool empty() const { return tokens.empty(); }
  void clear();
};

struct SampledToken {
  TokenId token = 0;
  float log_prob = 0;
};

struct SchedulerStats {
  std::int64_t running = 0;  // samples with KV, or about to share a prompt that is being computed
  std::int64_t waiting = 0;  // samples without
  std::int64_t free_blocks = 0;
  std::int64_t total_blocks = 0;
  std::int64_t tokens_sampled = 0;
  std::int64_t rows_computed = 0;
  std::int64_t rows_cached = 0;    // taken from the prefix cache in place of being computed
  std::int64_t cached_blocks = 0;  // known to it now
  std::int64_t preemptions = 0;
};

class Scheduler {
 public:
  // Throws Error if the limits cannot serve anything.
  explicit Scheduler(EngineLimits limits);

  const EngineLimits& limits() const { return limits_; }

  // Queues a request; throws what check_request throws. Returns a key that its result carries.
  std::uint64_t add(GenerateRequest request);

  // The next batch (empty: nothing to do). Stays valid until the next plan().
  const StepPlan& plan();

  // Between plan and apply: the step after the planned one, if both are decoding alone and nothing
  // but the values of the planned step's tokens is missing; else null. Its row i follows draw
  // sources()[i] of the planned step and has token 0. A sequence that ends with that draw ran in
  // vain, and its draw is passed over. The planned step is applied first, then the one ahead is the
  // planned one.
  const StepPlan* plan_ahead();
  std::span<const std::int32_t> sources() const { return sources_; }

  // One result per draw of the planned step, in its order, sampled by weight version `version`.
  void apply(std::span<const SampledToken> sampled, std::int64_t version);

  // Whose token draw i of the step last applied is (none: it was passed over); until the next plan,
  // apply or take_finished.
  struct Drawn {
    std::uint64_t key = 0;
    std::int64_t index = 0;  // of the sample in its request
  };
  std::optional<Drawn> drawn(std::size_t i) const;

  // Ends all unfinished samples of matching requests with finish = abort; what they have sampled
  // stays. Returns the number of requests ended. Not between plan and apply.
  std::int64_t abort_prefix(std::string_view rid_prefix);
  std::int64_t abort_all() { return abort_prefix({}); }
  // The same for one request; false if it has ended.
  bool abort(std::uint64_t key);

  // Gives all KV back; active samples wait again with their tokens kept. Not between plan and
  // apply.
  void retract_all();

  // True if no sample holds KV; the block order is then as new and no prefix is known.
  bool flush();

  // The weights have changed: KV computed so far serves only who holds it, and nobody who has not
  // drawn a token yet. So a sample all of whose tokens have one version attended to KV of that
  // version only. Not between plan and apply.
  void forget_prefixes();

  bool has_work() const { return !active_.empty() || !waiting_.empty(); }

  // A finished request, oldest end first; moves the results out.
  struct Finished {
    std::uint64_t key = 0;
    GenerateResult result;
  };
  std::optional<Finished> take_finished(std::int64_t version);

  SchedulerStats stats() const;

  // Empty text when counts, tables, order and lengths agree, else what does not. For tests.
  std::string find_fault() const;

 private:
  enum class State : std::uint8_t { unused, waiting, following, active, finished };

  // How often a token stands in an answer.
  struct TokenCount {
    TokenId id = 0;
    std::int64_t count = 0;
  };

  struct Sequence {
    State state = State::unused;
    std::int32_t group = 0;
    std::int64_t index = 0;   // sample number within the group
    std::uint64_t order = 0;  // arrival number
    std::int64_t computed = 0;
    std::int64_t remembered = 0;  // leading blocks that the prefix cache knows
    bool mixed = false;           // holds KV of several weight versions
    BlockTable blocks;
    std::vector<TokenCount> counts;  // of the answer's tokens; kept for penalties only
    std::string tail;                // last bytes of the answer's text; kept for `stop` only
    std::size_t max_changes = 0;     // of one draw
    SampleResult result;
  };

  struct Group {
    GenerateRequest request;
    std::uint64_t key = 0;
    std::int64_t unfinished = 0;
    bool prompt_computed = false;         // once: later all samples are on their own
    std::vector<std::int32_t> sequences;  // [n]
  };

  std::int64_t prompt_length(const Sequence& s) const;
  std::int64_t known(const Sequence& s) const;
  TokenId token_at(const Sequence& s, std::int64_t position) const;
  bool leads(const Sequence& s) const;
  std::int64_t samples_behind(const Sequence& s) const;

  void admit();
  bool may_admit(const Sequence& s) const;
  std::int64_t blocks_wanted(const Sequence& s) const;
  std::span<const TokenId> block_tokens_of(const Sequence& s, std::int64_t index) const;
  std::int64_t known_prefix_in_use(const Sequence& s) const;
  void take_prefix(Sequence& s);
  void remember_prefix(Sequence& s, std::int64_t end, bool replace);
  void release_kv(Sequence& s);
  bool make_room(std::int32_t id, std::int64_t rows);
  void plan_rows(std::int32_t id, std::int64_t rows);
  void plan_draws(std::int32_t id);
  bool may_plan_ahead() const;
  bool ends_by_length(const Sequence& s) const;
  void pass_over_ended();
  void plan_changes(const Sequence& s);
  void preempt_youngest();
  void fork_prompt(Sequence& leader);
  void activate(std::int32_t id);
  void append_token(std::int32_t id, SampledToken sampled, std::int64_t version);
  const std::string* match_stop(Sequence& s, TokenId token);
  void finish(std::int32_t id, FinishReason reason, TokenId matched);
  void abort_group(Group& group);
  std::int32_t new_group();
  std::int32_t new_sequence(const GenerateRequest& request);
  void reserve_steps();

  EngineLimits limits_;
  KvCache cache_;
  std::vector<Sequence> sequences_;
  std::vector<std::int32_t> unused_sequences_;
  std::vector<Group> groups_;
  std::vector<std::int32_t> unused_groups_;
  std::vector<std::int32_t> active_;   // oldest first
  std::vector<std::int32_t> waiting_;  // youngest first: the back is next
  std::vector<std::int32_t> finished_groups_;

  struct Step {
    StepPlan plan;
    std::vector<std::int32_t> planned;  // sequence of each segment; -1: passed over
    std::vector<std::int32_t> drawing;  // sequence of each draw, likewise
  };
  Step step_;                          // the last one planned
  Step running_;                       // the one before it, if step_ was planned ahead
  std::vector<std::int32_t> sources_;  // of step_, if it was planned ahead
  bool ahead_ = false;                 // step_ is ahead of running_
  bool applied_running_ = false;       // which of the two was applied last
  mutable std::vector<TokenId> block_scratch_;
  bool in_step_ = false;  // between plan and apply

  std::size_t max_changes_ = 0;  // of one draw each of all samples that are here

  std::uint64_t next_order_ = 0;
  std::uint64_t next_key_ = 0;
  std::int64_t tokens_sampled_ = 0;
  std::int64_t rows_computed_ = 0;
  std::int64_t rows_cached_ = 0;
  std::int64_t preemptions_ = 0;
};

}  // namespace tandem
