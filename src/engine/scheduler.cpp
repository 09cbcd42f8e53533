// The scheduler's step. Requests come and go in scheduler_requests.cpp.
#include "engine/scheduler.h"

#include <algorithm>
#include <cassert>
#include <limits>

#include "base/check.h"

namespace tandem {

void StepPlan::clear() {
  copies.clear();
  tokens.clear();
  positions.clear();
  slots.clear();
  segments.clear();
  block_ids.clear();
  logit_rows.clear();
  draws.clear();
  changes.clear();
}

Scheduler::Scheduler(EngineLimits limits)
    : limits_(std::move(limits)), cache_(limits_.num_blocks, limits_.block_tokens) {
  TD_CHECK(limits_.max_running >= 1, "max_running: {} found, wanted at least 1",
           limits_.max_running);
  TD_CHECK(limits_.max_prefill_tokens >= 1, "max_prefill_tokens: {} found, wanted at least 1",
           limits_.max_prefill_tokens);
  TD_CHECK(limits_.context_length >= 1, "context_length: {} found, wanted at least 1",
           limits_.context_length);
  const std::int64_t max_rows = limits_.max_running + limits_.max_prefill_tokens;
  for (StepPlan* plan : {&step_.plan, &running_.plan}) {
    plan->tokens.reserve(max_rows);
    plan->positions.reserve(max_rows);
    plan->slots.reserve(max_rows);
  }
  block_scratch_.resize(static_cast<std::size_t>(limits_.block_tokens));
}

std::int64_t Scheduler::prompt_length(const Sequence& s) const {
  return static_cast<std::int64_t>(groups_[s.group].request.prompt.size());
}

std::int64_t Scheduler::known(const Sequence& s) const {
  return prompt_length(s) + static_cast<std::int64_t>(s.result.output_ids.size());
}

TokenId Scheduler::token_at(const Sequence& s, std::int64_t position) const {
  const std::int64_t prompt = prompt_length(s);
  return position < prompt ? groups_[s.group].request.prompt[position]
                           : s.result.output_ids[position - prompt];
}

// True while the sequence computes the prompt for its whole group.
bool Scheduler::leads(const Sequence& s) const {
  return s.index == 0 && !groups_[s.group].prompt_computed;
}

std::int64_t Scheduler::samples_behind(const Sequence& s) const {
  return leads(s) ? groups_[s.group].request.n : 1;
}

const StepPlan& Scheduler::plan() {
  assert(!in_step_);
  step_.plan.clear();
  step_.planned.clear();
  step_.drawing.clear();
  admit();
  std::int64_t decodes_left = limits_.max_running;
  std::int64_t prefill_left = limits_.max_prefill_tokens;
  // By index: make_room may take sequences off the end.
  for (std::size_t i = 0; i < active_.size(); ++i) {
    const std::int32_t id = active_[i];
    Sequence& s = sequences_[id];
    remember_prefix(s, s.computed, true);
    if (prefill_left > 0) take_prefix(s);
    const std::int64_t missing = known(s) - s.computed;
    std::int64_t& budget = missing == 1 ? decodes_left : prefill_left;
    const std::int64_t rows = std::min(missing, budget);
    if (rows == 0 || !make_room(id, rows)) continue;
    budget -= rows;
    plan_rows(id, rows);
    if (rows == missing) plan_draws(id);
  }
  in_step_ = !step_.plan.empty();
  return step_.plan;
}

void Scheduler::admit() {
  while (!waiting_.empty() && may_admit(sequences_[waiting_.back()])) {
    const std::int32_t id = waiting_.back();
    waiting_.pop_back();
    activate(id);
  }
}

// Admission wants room for all known tokens of the active samples and of this one, and beyond that
// one more block for each sample: all of them can take block_tokens steps before any is preempted.
bool Scheduler::may_admit(const Sequence& s) const {
  if (active_.empty()) return true;
  std::int64_t samples = 0;
  std::int64_t wanted = blocks_wanted(s) + samples_behind(s);
  for (const std::int32_t id : active_) {
    const Sequence& other = sequences_[id];
    samples += samples_behind(other);
    wanted += blocks_wanted(other);
  }
  return samples < limits_.max_running && wanted + samples <= cache_.num_free();
}

// Blocks that the sample still has to get for the tokens it knows. What the prefix cache knows and
// others hold costs nothing; retired blocks count as free and so cost what they are.
std::int64_t Scheduler::blocks_wanted(const Sequence& s) const {
  const std::int64_t held = s.state == State::waiting ? known_prefix_in_use(s)
                                                      : static_cast<std::int64_t>(s.blocks.size());
  return cache_.blocks_for(known(s)) - held;
}

// The tokens of a full block of the sequence; valid until the next call.
std::span<const TokenId> Scheduler::block_tokens_of(const Sequence& s, std::int64_t index) const {
  const std::int64_t begin = index * limits_.block_tokens;
  for (std::int64_t i = 0; i < limits_.block_tokens; ++i) {
    block_scratch_[i] = token_at(s, begin + i);
  }
  return block_scratch_;
}

// Leading blocks of a waiting sample that are known and held by others.
std::int64_t Scheduler::known_prefix_in_use(const Sequence& s) const {
  if (!limits_.prefix_cache) return 0;
  std::int64_t blocks = 0;
  std::int32_t parent = PrefixCache::kNone;
  while ((blocks + 1) * limits_.block_tokens < known(s)) {
    parent = cache_.find(parent, block_tokens_of(s, blocks));
    if (parent == PrefixCache::kNone || !cache_.is_referenced(parent)) break;
    ++blocks;
  }
  return blocks;
}

// Goes on through blocks that are known in place of computing them. The last known token is always
// computed: its logits are wanted.
void Scheduler::take_prefix(Sequence& s) {
  if (!limits_.prefix_cache || s.mixed) return;
  const std::int64_t step = limits_.block_tokens;
  while (s.remembered * step == s.computed && s.computed + step < known(s) &&
         cache_.take(s.blocks, block_tokens_of(s, s.remembered))) {
    ++s.remembered;
    s.computed += step;
    rows_cached_ += step;
    if (s.result.output_ids.empty()) s.result.cached_tokens += step;
  }
}

// Makes the full blocks of positions [0, end) known, `end` counting rows already planned. A block
// that somebody else made known meanwhile stops it, or with `replace` takes the own one's place;
// that waits for the next step, since the own one's rows may be in this plan.
void Scheduler::remember_prefix(Sequence& s, std::int64_t end, bool replace) {
  if (!limits_.prefix_cache || s.mixed) return;
  while ((s.remembered + 1) * limits_.block_tokens <= end &&
         cache_.remember(s.blocks, s.remembered, block_tokens_of(s, s.remembered), replace)) {
    ++s.remembered;
  }
}

void Scheduler::release_kv(Sequence& s) {
  cache_.release(s.blocks);
  s.computed = 0;
  s.remembered = 0;
  s.mixed = false;
}

// Preempts younger samples until `rows` more rows of `id` have blocks; false if it is the youngest
// and must wait for older ones to end.
bool Scheduler::make_room(std::int32_t id, std::int64_t rows) {
  const Sequence& s = sequences_[id];
  while (cache_.blocks_to_write(s.blocks, s.computed, s.computed + rows) > cache_.num_free()) {
    if (active_.back() == id) return false;
    preempt_youngest();
  }
  return true;
}

void Scheduler::plan_rows(std::int32_t id, std::int64_t rows) {
  Sequence& s = sequences_[id];
  const std::int64_t end = s.computed + rows;
  cache_.prepare_write(s.blocks, s.computed, end, step_.plan.copies);
  step_.plan.segments.push_back(
      {.row_begin = static_cast<std::int64_t>(step_.plan.tokens.size()),
       .num_rows = rows,
       .position_begin = s.computed,
       .blocks_begin = static_cast<std::int64_t>(step_.plan.block_ids.size()),
       .num_blocks = static_cast<std::int64_t>(s.blocks.size())});
  step_.plan.block_ids.insert(step_.plan.block_ids.end(), s.blocks.begin(), s.blocks.end());
  for (std::int64_t position = s.computed; position < end; ++position) {
    step_.plan.tokens.push_back(position < known(s) ? token_at(s, position) : 0);
    step_.plan.positions.push_back(static_cast<std::int32_t>(position));
    step_.plan.slots.push_back(cache_.slot(s.blocks, position));
  }
  step_.planned.push_back(id);
  remember_prefix(s, std::min(end, known(s)), false);
}

void Scheduler::plan_draws(std::int32_t id) {
  const Sequence& s = sequences_[id];
  const Group& group = groups_[s.group];
  const auto logits_index = static_cast<std::int64_t>(step_.plan.logit_rows.size());
  step_.plan.logit_rows.push_back(static_cast<std::int64_t>(step_.plan.tokens.size()) - 1);
  const auto draw = [&](std::int32_t drawer_id) {
    const Sequence& drawer = sequences_[drawer_id];
    const SamplingParams& params = group.request.params;
    const auto changes_begin = static_cast<std::int64_t>(step_.plan.changes.size());
    plan_changes(drawer);
    step_.plan.draws.push_back(
        {.logits_index = logits_index,
         .temperature = params.temperature,
         .top_p = params.top_p,
         .top_k = params.top_k < limits_.vocab_size ? params.top_k : -1,
         .min_p = params.min_p,
         .seed = params.seed,
         .sample_id = group.request.first_sample_id + static_cast<std::uint64_t>(drawer.index),
         .position = static_cast<std::uint64_t>(step_.plan.positions.back() + 1 - prompt_length(s)),
         .evaluation = params.evaluation,
         .changes_begin = changes_begin,
         .num_changes = static_cast<std::int64_t>(step_.plan.changes.size()) - changes_begin});
    step_.drawing.push_back(drawer_id);
  };
  if (leads(s)) {
    for (const std::int32_t member : group.sequences) draw(member);
  } else {
    draw(id);
  }
}

// SGLang's order: penalties of what the answer holds, then bias, then the ids that may not end it
// yet.
void Scheduler::plan_changes(const Sequence& s) {
  const SamplingParams& params = groups_[s.group].request.params;
  for (const TokenCount& c : s.counts) {
    step_.plan.changes.push_back(
        {.id = c.id,
         .subtract = static_cast<float>(params.frequency_penalty * static_cast<double>(c.count) +
                                        params.presence_penalty),
         .scale = static_cast<float>(params.repetition_penalty)});
  }
  for (const auto& [id, bias] : params.logit_bias) {
    step_.plan.changes.push_back({.id = id, .add = static_cast<float>(bias)});
  }
  if (static_cast<std::int64_t>(s.result.output_ids.size()) >= params.min_new_tokens) return;
  const auto forbid = [&](const std::vector<TokenId>& ids) {
    for (const TokenId id : ids) {
      if (id < 0 || id >= limits_.vocab_size) continue;
      step_.plan.changes.push_back({.id = id, .add = -std::numeric_limits<float>::infinity()});
    }
  };
  forbid(limits_.eos_token_ids);
  forbid(params.stop_token_ids);
}

void Scheduler::preempt_youngest() {
  const std::int32_t id = active_.back();
  active_.pop_back();
  Sequence& s = sequences_[id];
  release_kv(s);
  if (s.result.output_ids.empty()) s.result.cached_tokens = 0;
  s.state = State::waiting;
  ++s.result.num_preemptions;
  ++preemptions_;
  waiting_.push_back(id);  // older than all that wait, since it was active
}

bool Scheduler::ends_by_length(const Sequence& s) const {
  return static_cast<std::int64_t>(s.result.output_ids.size()) + 1 ==
             groups_[s.group].request.params.max_new_tokens ||
         known(s) + 1 == limits_.context_length;
}

bool Scheduler::may_plan_ahead() const {
  const StepPlan& plan = step_.plan;
  const std::size_t rows = plan.tokens.size();
  if (plan.segments.size() != rows || plan.draws.size() != rows) return false;
  if (!waiting_.empty() && may_admit(sequences_[waiting_.back()])) return false;
  std::size_t running = 0, continuing = 0;
  std::int64_t wanted = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    if (step_.planned[i] < 0) continue;
    ++running;
    const Sequence& s = sequences_[step_.planned[i]];
    const SamplingParams& params = groups_[s.group].request.params;
    const bool penalizes = params.frequency_penalty != 0 || params.presence_penalty != 0 ||
                           params.repetition_penalty != 1;
    if (leads(s) || penalizes || !plan.draws[i].is_plain()) return false;
    if (ends_by_length(s)) continue;
    ++continuing;
    wanted += cache_.blocks_for(s.computed + 2) - static_cast<std::int64_t>(s.blocks.size());
  }
  return running == active_.size() && continuing > 0 && wanted <= cache_.num_free();
}

const StepPlan* Scheduler::plan_ahead() {
  assert(in_step_ && !ahead_);
  if (!may_plan_ahead()) return nullptr;
  std::swap(step_, running_);
  ahead_ = true;
  step_.plan.clear();
  step_.planned.clear();
  step_.drawing.clear();
  sources_.clear();
  for (std::size_t i = 0; i < running_.planned.size(); ++i) {
    const std::int32_t id = running_.planned[i];
    if (id < 0) continue;
    Sequence& s = sequences_[id];
    ++s.computed;
    remember_prefix(s, s.computed, true);
    if (ends_by_length(s)) continue;
    plan_rows(id, 1);
    plan_draws(id);
    sources_.push_back(static_cast<std::int32_t>(i));
  }
  return &step_.plan;
}

void Scheduler::apply(std::span<const SampledToken> sampled, std::int64_t version) {
  assert(in_step_);
  const Step& step = ahead_ ? running_ : step_;
  assert(sampled.size() == step.plan.draws.size());
  in_step_ = ahead_;
  for (std::size_t i = 0; i < step.planned.size(); ++i) {
    if (step.planned[i] < 0) continue;
    const std::int64_t rows = step.plan.segments[i].num_rows;
    if (!ahead_) sequences_[step.planned[i]].computed += rows;  // else plan_ahead has
    rows_computed_ += rows;
  }
  for (std::size_t i = 0; i < step.drawing.size(); ++i) {
    if (step.drawing[i] < 0) continue;
    Sequence& s = sequences_[step.drawing[i]];
    ++tokens_sampled_;
    if (leads(s)) fork_prompt(s);
    append_token(step.drawing[i], sampled[i], version);
  }
  applied_running_ = ahead_;
  if (ahead_) pass_over_ended();
  ahead_ = false;
}

// Of the step ahead: rows of sequences that the applied step ended.
void Scheduler::pass_over_ended() {
  for (auto* ids : {&step_.planned, &step_.drawing})
    for (std::int32_t& id : *ids)
      if (id >= 0 && sequences_[id].state != State::active) id = -1;
}

std::optional<Scheduler::Drawn> Scheduler::drawn(std::size_t i) const {
  const std::int32_t id = (applied_running_ ? running_ : step_).drawing[i];
  if (id < 0) return std::nullopt;
  const Sequence& s = sequences_[id];
  return Drawn{.key = groups_[s.group].key, .index = s.index};
}

void Scheduler::fork_prompt(Sequence& leader) {
  Group& group = groups_[leader.group];
  group.prompt_computed = true;
  for (const std::int32_t id : group.sequences) {
    Sequence& s = sequences_[id];
    if (s.state != State::following) continue;
    cache_.share(leader.blocks, leader.computed, s.blocks);
    s.computed = leader.computed;
    s.remembered = leader.remembered;
    s.mixed = leader.mixed;
    s.result.cached_tokens = leader.computed;
    activate(id);
  }
}

void Scheduler::activate(std::int32_t id) {
  sequences_[id].state = State::active;
  const auto younger = std::upper_bound(
      active_.begin(), active_.end(), sequences_[id].order,
      [&](std::uint64_t order, std::int32_t other) { return order < sequences_[other].order; });
  active_.insert(younger, id);
}

void Scheduler::append_token(std::int32_t id, SampledToken sampled, std::int64_t version) {
  Sequence& s = sequences_[id];
  s.result.output_ids.push_back(sampled.token);
  s.result.log_probs.push_back(sampled.log_prob);
  s.result.versions.push_back(version);
  const SamplingParams& params = groups_[s.group].request.params;
  const auto is_in = [&](const std::vector<TokenId>& ids) {
    return std::find(ids.begin(), ids.end(), sampled.token) != ids.end();
  };
  if (params.frequency_penalty != 0 || params.presence_penalty != 0 ||
      params.repetition_penalty != 1) {
    const auto same = std::find_if(s.counts.begin(), s.counts.end(),
                                   [&](const TokenCount& c) { return c.id == sampled.token; });
    if (same == s.counts.end()) {
      s.counts.push_back({sampled.token, 1});
    } else {
      ++same->count;
    }
  }
  // A stop in the last place is a stop: the answer is whole. As in SGLang, ignore_eos also turns
  // stop_token_ids off.
  if (!params.ignore_eos && (is_in(limits_.eos_token_ids) || is_in(params.stop_token_ids))) {
    finish(id, FinishReason::stop, sampled.token);
  } else if (const std::string* text = match_stop(s, sampled.token)) {
    s.result.matched_text = *text;
    finish(id, FinishReason::stop, -1);
  } else if (static_cast<std::int64_t>(s.result.output_ids.size()) == params.max_new_tokens ||
             known(s) == limits_.context_length) {
    finish(id, FinishReason::length, -1);
  }
}

// The first text of `stop` that ends within the token's bytes, wherever it begins; null if none
// does or the answer may not end yet.
const std::string* Scheduler::match_stop(Sequence& s, TokenId token) {
  const SamplingParams& params = groups_[s.group].request.params;
  if (params.stop.empty()) return nullptr;
  const std::size_t before = s.tail.size();
  s.tail += limits_.vocabulary->bytes(token);
  const bool may_end =
      static_cast<std::int64_t>(s.result.output_ids.size()) >= params.min_new_tokens;
  std::size_t longest = 0;
  for (const std::string& text : params.stop) {
    longest = std::max(longest, text.size());
    const std::size_t begin = before + 1 > text.size() ? before + 1 - text.size() : 0;
    if (may_end && s.tail.find(text, begin) != std::string::npos) return &text;
  }
  if (s.tail.size() >= longest) s.tail.erase(0, s.tail.size() - longest + 1);
  return nullptr;
}

}  // namespace tandem
