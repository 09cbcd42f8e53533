// How requests enter and leave the scheduler, and what can be asked about it. All growth of its
// vectors happens here, in add, so that a step allocates nothing.
#include <fmt/format.h>

#include <algorithm>
#include <cassert>

#include "engine/scheduler.h"

namespace tandem {
namespace {

template <class T>
void grow(std::vector<T>& vector, std::size_t wanted) {
  if (vector.capacity() < wanted) vector.reserve(std::max(wanted, 2 * vector.capacity()));
}

}  // namespace

std::uint64_t Scheduler::add(GenerateRequest request) {
  assert(!in_step_);
  check_request(request, limits_);
  const std::int32_t group_id = new_group();
  const std::uint64_t key = next_key_++;
  for (std::int64_t i = 0; i < request.n; ++i) {
    const std::int32_t id = new_sequence(request);
    Sequence& s = sequences_[id];
    s.state = i == 0 ? State::waiting : State::following;
    s.group = group_id;
    s.index = i;
    s.order = next_order_++;
    groups_[group_id].sequences.push_back(id);
  }
  Group& group = groups_[group_id];
  group.key = key;
  group.unfinished = request.n;
  group.prompt_computed = false;
  group.request = std::move(request);
  reserve_steps();
  waiting_.insert(waiting_.begin(), group.sequences.front());
  if (max_kv_positions(group.request, limits_) == 0) {
    for (const std::int32_t id : group.sequences) finish(id, FinishReason::length, -1);
  }
  return key;
}

std::int32_t Scheduler::new_group() {
  if (unused_groups_.empty()) {
    groups_.emplace_back();
    unused_groups_.reserve(groups_.capacity());
    return static_cast<std::int32_t>(groups_.size()) - 1;
  }
  const std::int32_t id = unused_groups_.back();
  unused_groups_.pop_back();
  return id;
}

std::int32_t Scheduler::new_sequence(const GenerateRequest& request) {
  std::int32_t id;
  if (unused_sequences_.empty()) {
    id = static_cast<std::int32_t>(sequences_.size());
    sequences_.emplace_back();
    unused_sequences_.reserve(sequences_.capacity());
  } else {
    id = unused_sequences_.back();
    unused_sequences_.pop_back();
  }
  Sequence& s = sequences_[id];
  s.result = {};
  const std::int64_t positions = max_kv_positions(request, limits_);
  if (positions > 0) {
    const std::int64_t answer = positions + 1 - static_cast<std::int64_t>(request.prompt.size());
    s.result.output_ids.reserve(answer);
    s.result.log_probs.reserve(answer);
    s.result.versions.reserve(answer);
  }
  s.blocks.reserve(cache_.blocks_for(positions));
  const SamplingParams& params = request.params;
  const bool penalizes = params.frequency_penalty != 0 || params.presence_penalty != 0 ||
                         params.repetition_penalty != 1;
  s.counts.clear();
  if (penalizes) s.counts.reserve(s.result.output_ids.capacity());
  s.max_changes =
      s.counts.capacity() * (penalizes ? 1 : 0) + params.logit_bias.size() +
      (params.min_new_tokens > 0 ? limits_.eos_token_ids.size() + params.stop_token_ids.size() : 0);
  max_changes_ += s.max_changes;
  s.tail.clear();
  std::size_t longest = 0;
  for (const std::string& text : params.stop) longest = std::max(longest, text.size());
  if (longest > 0) s.tail.reserve(longest + limits_.vocabulary->longest_bytes());
  return id;
}

void Scheduler::reserve_steps() {
  const std::size_t samples = sequences_.size();
  grow(active_, samples);
  grow(waiting_, samples);
  grow(finished_groups_, groups_.size());
  grow(sources_, samples);
  // At most max_running samples decode and as many compute a prompt in one step.
  const std::size_t segments =
      std::min<std::size_t>(samples, static_cast<std::size_t>(2 * limits_.max_running));
  const std::int64_t table =
      std::min(cache_.blocks_for(limits_.context_length), limits_.num_blocks);
  for (Step* step : {&step_, &running_}) {
    grow(step->planned, samples);
    grow(step->drawing, samples);
    grow(step->plan.segments, samples);
    grow(step->plan.logit_rows, samples);
    grow(step->plan.draws, samples);
    grow(step->plan.copies, samples);
    grow(step->plan.changes, max_changes_);
    grow(step->plan.block_ids, segments * static_cast<std::size_t>(table));
  }
}

void Scheduler::finish(std::int32_t id, FinishReason reason, TokenId matched) {
  Sequence& s = sequences_[id];
  if (s.state == State::active) active_.erase(std::find(active_.begin(), active_.end(), id));
  if (s.state == State::waiting) waiting_.erase(std::find(waiting_.begin(), waiting_.end(), id));
  release_kv(s);
  s.state = State::finished;
  s.result.finish = reason;
  s.result.matched_stop = matched;
  if (--groups_[s.group].unfinished == 0) finished_groups_.push_back(s.group);
}

void Scheduler::abort_group(Group& group) {
  for (const std::int32_t id : group.sequences) {
    if (sequences_[id].state != State::finished) finish(id, FinishReason::abort, -1);
  }
}

bool Scheduler::abort(std::uint64_t key) {
  assert(!in_step_);
  for (Group& group : groups_) {
    if (group.unfinished == 0 || group.key != key) continue;
    abort_group(group);
    return true;
  }
  return false;
}

std::int64_t Scheduler::abort_prefix(std::string_view rid_prefix) {
  assert(!in_step_);
  std::int64_t ended = 0;
  for (Group& group : groups_) {
    if (group.unfinished == 0 || !group.request.rid.starts_with(rid_prefix)) continue;
    ++ended;
    abort_group(group);
  }
  return ended;
}

void Scheduler::retract_all() {
  assert(!in_step_);
  while (!active_.empty()) preempt_youngest();
}

bool Scheduler::flush() {
  if (cache_.num_free() != cache_.num_blocks()) return false;
  cache_.reset();
  return true;
}

void Scheduler::forget_prefixes() {
  assert(!in_step_);
  cache_.forget();
  for (const std::int32_t id : active_) {
    Sequence& s = sequences_[id];
    s.remembered = 0;
    s.mixed = s.computed > 0;
    if (!s.mixed || !s.result.output_ids.empty()) continue;
    // Still in its prompt: from its first token on the answer shall be of the new weights alone.
    release_kv(s);
    s.result.cached_tokens = 0;
  }
}

std::optional<Scheduler::Finished> Scheduler::take_finished(std::int64_t version) {
  if (finished_groups_.empty()) return std::nullopt;
  const std::int32_t group_id = finished_groups_.front();
  finished_groups_.erase(finished_groups_.begin());
  Group& group = groups_[group_id];
  Finished finished;
  finished.key = group.key;
  finished.result.rid = std::move(group.request.rid);
  finished.result.prompt_tokens = static_cast<std::int64_t>(group.request.prompt.size());
  finished.result.weight_version = version;
  finished.result.samples.reserve(group.sequences.size());
  for (const std::int32_t id : group.sequences) {
    finished.result.samples.push_back(std::move(sequences_[id].result));
    max_changes_ -= sequences_[id].max_changes;
    sequences_[id].state = State::unused;
    unused_sequences_.push_back(id);
  }
  group.sequences.clear();
  group.request = {};
  unused_groups_.push_back(group_id);
  return finished;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats;
  for (const std::int32_t id : active_) stats.running += samples_behind(sequences_[id]);
  for (const std::int32_t id : waiting_) stats.waiting += samples_behind(sequences_[id]);
  stats.free_blocks = cache_.num_free();
  stats.total_blocks = cache_.num_blocks();
  stats.tokens_sampled = tokens_sampled_;
  stats.rows_computed = rows_computed_;
  stats.rows_cached = rows_cached_;
  stats.cached_blocks = cache_.num_cached();
  stats.preemptions = preemptions_;
  return stats;
}

std::string Scheduler::find_fault() const {
  std::vector<const BlockTable*> tables;
  std::int64_t num_active = 0;
  for (const Sequence& s : sequences_) {
    tables.push_back(&s.blocks);
    num_active += s.state == State::active ? 1 : 0;
    if (s.state != State::active && !s.blocks.empty()) {
      return fmt::format("sample {} holds blocks and is not active", s.order);
    }
    const SampleResult& result = s.result;
    if (result.output_ids.size() != result.log_probs.size() ||
        result.output_ids.size() != result.versions.size()) {
      return fmt::format("sample {} has {} tokens, {} log-probabilities, {} versions", s.order,
                         result.output_ids.size(), result.log_probs.size(), result.versions.size());
    }
    if (s.state == State::active &&
        static_cast<std::int64_t>(s.blocks.size()) != cache_.blocks_for(s.computed) && !in_step_) {
      return fmt::format("sample {} has KV of {} positions and {} blocks", s.order, s.computed,
                         s.blocks.size());
    }
  }
  if (num_active != static_cast<std::int64_t>(active_.size())) {
    return fmt::format("{} samples are active, the list has {}", num_active, active_.size());
  }
  const auto older = [&](std::int32_t a, std::int32_t b) {
    return sequences_[a].order < sequences_[b].order;
  };
  if (!std::is_sorted(active_.begin(), active_.end(), older)) return "active samples out of order";
  if (!std::is_sorted(waiting_.rbegin(), waiting_.rend(), older)) {
    return "waiting samples out of order";
  }
  if (!active_.empty() && !waiting_.empty() && !older(active_.back(), waiting_.back())) {
    return fmt::format("waiting sample {} is older than active sample {}",
                       sequences_[waiting_.back()].order, sequences_[active_.back()].order);
  }
  return cache_.find_fault(tables);
}

}  // namespace tandem
