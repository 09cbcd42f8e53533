// The engine's step and the commands it serves between steps.
#include "engine/engine.h"

#include <fmt/format.h>

#include <cassert>

namespace tandem {

Engine::Engine(EngineLimits limits, StepRunner runner, Mailbox& mailbox, AsyncRunner async)
    : scheduler_(std::move(limits)),
      runner_(std::move(runner)),
      async_(std::move(async)),
      mailbox_(mailbox) {
  mailbox_.publish(stats());
}

void Engine::add(GenerateRequest request, GenerateCallback on_finish, TokenCallback on_token,
                 std::uint64_t ticket) {
  const std::uint64_t key = scheduler_.add(std::move(request));
  if (on_token) ++num_streams_;
  askers_.emplace(key, Asker{std::move(on_finish), std::move(on_token), ticket});
}

bool Engine::step() {
  return step_by([&](const StepPlan& plan) { run_plan(plan); });
}

bool Engine::run(const std::function<bool()>& wanted) {
  return step_by([&](const StepPlan& plan) {
    if (async_.start && async_.start(plan, {}))
      run_async(plan, wanted);
    else
      run_plan(plan);
  });
}

template <class Run>
bool Engine::step_by(Run&& run) {
  serve_mail();
  if (!paused_) {
    const StepPlan& plan = scheduler_.plan();
    if (!plan.empty()) run(plan);
  }
  // Published first: who reads the state in a callback sees the end of the request in it.
  mailbox_.publish(stats());
  deliver();
  return !paused_ && scheduler_.has_work();
}

void Engine::run_plan(const StepPlan& plan) {
  sampled_.resize(plan.draws.size());
  runner_(plan, sampled_);
  finish_step();
}

void Engine::run_async(const StepPlan& plan, const std::function<bool()>& wanted) {
  sampled_.resize(plan.draws.size());
  while (true) {
    const bool stop = mailbox_.waiting() || (wanted && wanted());
    const StepPlan* ahead = stop ? nullptr : scheduler_.plan_ahead();
    if (ahead) {
      // It draws as the step before it and has no more rows.
      [[maybe_unused]] const bool taken = async_.start(*ahead, scheduler_.sources());
      assert(taken);
    }
    async_.finish(sampled_);
    finish_step();
    if (!ahead) return;
    mailbox_.publish(stats());
    deliver();
    sampled_.resize(ahead->draws.size());
  }
}

void Engine::finish_step() {
  scheduler_.apply(sampled_, weight_version_);
  ++steps_;
  if (num_streams_ > 0) show_tokens();
}

void Engine::deliver() {
  while (auto finished = scheduler_.take_finished(weight_version_)) {
    const auto found = askers_.find(finished->key);
    const Asker asker = std::move(found->second);
    askers_.erase(found);
    if (asker.on_token) --num_streams_;
    if (asker.on_finish) asker.on_finish(std::move(finished->result));
  }
}

void Engine::show_tokens() {
  for (std::size_t i = 0; i < sampled_.size(); ++i) {
    const auto drawn = scheduler_.drawn(i);
    if (!drawn) continue;
    const Asker& asker = askers_.at(drawn->key);
    if (!asker.on_token) continue;
    asker.on_token(drawn->index, sampled_[i].token, sampled_[i].log_prob, weight_version_);
  }
}

void Engine::pause(PauseMode mode) {
  paused_ = true;
  if (mode == PauseMode::abort) scheduler_.abort_all();
  if (mode == PauseMode::retract) scheduler_.retract_all();
  mailbox_.publish(stats());
}

void Engine::resume() {
  paused_ = false;
  mailbox_.publish(stats());
}

ControlAnswer Engine::flush_cache() {
  const SchedulerStats now = scheduler_.stats();
  if (!paused_ && scheduler_.has_work()) {
    return {false, fmt::format("cache not flushed: {} samples run and {} wait; pause with mode "
                               "retract or abort first, or wait for their end",
                               now.running, now.waiting)};
  }
  if (!scheduler_.flush()) {
    return {false, fmt::format("cache not flushed: {} frozen samples hold KV; pause with mode "
                               "retract or abort gives it back",
                               now.running)};
  }
  return {true, "Cache flushed."};
}

std::int64_t Engine::abort(const std::string& rid_prefix) {
  return scheduler_.abort_prefix(rid_prefix);
}

void Engine::set_weight_version(std::int64_t version) {
  scheduler_.forget_prefixes();
  weight_version_ = version;
  mailbox_.publish(stats());
}

EngineStats Engine::stats() const {
  const SchedulerStats s = scheduler_.stats();
  return {.running = s.running,
          .waiting = s.waiting,
          .free_blocks = s.free_blocks,
          .total_blocks = s.total_blocks,
          .tokens_sampled = s.tokens_sampled,
          .rows_computed = s.rows_computed,
          .rows_cached = s.rows_cached,
          .cached_blocks = s.cached_blocks,
          .preemptions = s.preemptions,
          .steps = steps_,
          .weight_version = weight_version_,
          .paused = paused_};
}

void Engine::serve_mail() {
  mailbox_.take(mail_);
  for (Command& command : mail_) {
    std::visit([&](auto& c) { serve(c); }, command);
  }
  mail_.clear();
}

void Engine::serve(GenerateCommand& command) {
  add(std::move(command.request), std::move(command.on_finish), std::move(command.on_token),
      command.ticket);
}

void Engine::serve(CancelCommand& command) {
  for (const auto& [key, asker] : askers_) {
    if (asker.ticket != command.ticket) continue;
    scheduler_.abort(key);
    break;
  }
  deliver();
}

void Engine::serve(AbortCommand& command) {
  const std::int64_t ended = abort(command.rid_prefix);
  deliver();
  if (command.reply) command.reply({true, fmt::format("{} requests aborted", ended)});
}

void Engine::serve(PauseCommand& command) {
  pause(command.mode);
  deliver();
  if (command.reply) command.reply({true, "Generation paused successfully."});
}

void Engine::serve(ContinueCommand& command) {
  resume();
  if (command.reply) command.reply({true, "Generation continued successfully."});
}

void Engine::serve(FlushCommand& command) {
  const ControlAnswer answer = flush_cache();
  if (command.reply) command.reply(answer);
}

void Engine::serve(ProbeCommand& command) {
  if (paused_) {
    if (command.reply) command.reply({true, "paused"});
    return;
  }
  GenerateRequest request;
  request.rid = "HEALTH_CHECK";
  request.prompt = {0};
  request.params.max_new_tokens = 1;
  request.params.temperature = 0;
  add(std::move(request), [reply = std::move(command.reply)](const GenerateResult& result) {
    if (reply) reply({true, fmt::format("{} token", result.samples.front().output_ids.size())});
  });
}

}  // namespace tandem
