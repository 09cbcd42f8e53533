// After warm-up neither the scheduler's step nor the engine's touches the heap: operator new of
// this test program counts while a guard is alive.
#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <numeric>

#include "unit/engine_hash_model.h"

namespace {
thread_local bool counting = false;
thread_local std::int64_t allocations = 0;

void* counted_allocation(std::size_t size) {
  if (counting) ++allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(std::size_t size) { return counted_allocation(size); }
void* operator new[](std::size_t size) { return counted_allocation(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace tandem {
namespace {

struct CountAllocations {
  CountAllocations() {
    allocations = 0;
    counting = true;
  }
  ~CountAllocations() { counting = false; }
};

EngineLimits limits_of(std::int64_t num_blocks) {
  return {.num_blocks = num_blocks,
          .block_tokens = 4,
          .max_running = 8,
          .max_prefill_tokens = 12,
          .context_length = 2048,
          .vocab_size = 100,
          .eos_token_ids = {5},
          .vocabulary = {}};
}

GenerateRequest request_of(std::int64_t prompt_length, std::int64_t n, std::int64_t answer) {
  GenerateRequest request;
  request.prompt.resize(prompt_length);
  std::iota(request.prompt.begin(), request.prompt.end(), 1);
  request.n = n;
  request.params.max_new_tokens = answer;
  return request;
}

TEST(Allocation, TheCounterCounts) {
  const CountAllocations guard;
  std::vector<int> some(100);
  EXPECT_EQ(allocations, 1);
}

// Admission, chunks, forks, preemption and endings all happen inside the counted steps.
TEST(Allocation, SchedulerStepAllocatesNothing) {
  Scheduler scheduler(limits_of(30));
  test::HashModel model(30, 4, 100);
  for (int i = 0; i < 300; ++i) {
    GenerateRequest request = request_of(5 + i % 20, 1 + i % 5, 40);
    request.first_sample_id = static_cast<std::uint64_t>(10 * i);
    scheduler.add(std::move(request));
  }
  std::vector<SampledToken> sampled(2000);
  const auto step = [&] {
    const StepPlan& plan = scheduler.plan();
    const std::span<SampledToken> results(sampled.data(), plan.draws.size());
    model.run(plan, results);
    scheduler.apply(results, 1);
  };
  for (int i = 0; i < 100; ++i) step();
  const SchedulerStats before = scheduler.stats();
  {
    const CountAllocations guard;
    for (int i = 0; i < 1000; ++i) step();
  }
  EXPECT_EQ(allocations, 0);
  const SchedulerStats after = scheduler.stats();
  EXPECT_GT(after.preemptions, before.preemptions) << "the load must be tight";
  EXPECT_LT(after.waiting, before.waiting);
  ASSERT_GT(after.waiting, 0) << "the load must outlast the counted steps";
}

TEST(Allocation, EngineStepAllocatesNothing) {
  Mailbox mailbox;
  test::HashModel model(4096, 4, 100);
  Engine engine(
      limits_of(4096),
      [&](const StepPlan& plan, std::span<SampledToken> sampled) { model.run(plan, sampled); },
      mailbox);
  GenerateRequest request = request_of(10, 8, 1500);
  request.params.ignore_eos = true;
  engine.add(std::move(request), [](const GenerateResult&) {});
  for (int i = 0; i < 100; ++i) engine.step();
  {
    const CountAllocations guard;
    for (int i = 0; i < 1000; ++i) engine.step();
  }
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(engine.stats().tokens_sampled, 8 * 1100);
}

}  // namespace
}  // namespace tandem
