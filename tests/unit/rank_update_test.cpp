// A double-buffered update while answers are being written, with the threads of a rank: the engine
// goes on sampling with the old weights while new ones move, and rests for the swap only.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <thread>

#include "base/check.h"
#include "base/work_thread.h"
#include "rank/compute_queue.h"
#include "transfer/client.h"
#include "transfer/serve.h"
#include "unit/engine_hash_model.h"
#include "unit/tiny_llama.h"

namespace tandem {
namespace {

// A move that ends only when the engine has sampled so many tokens since it began.
class SlowTransfer final : public Transfer {
 public:
  SlowTransfer(std::unique_ptr<Transfer> whole, const Mailbox& engine, std::int64_t tokens)
      : whole_(std::move(whole)), engine_(engine), tokens_(tokens) {}
  std::int64_t move(std::span<RowsSum> sums) override {
    const std::int64_t bytes = whole_->move(sums);
    const std::int64_t begun = engine_.stats().tokens_sampled;
    const Deadline deadline = Deadline::after(20);
    while (engine_.stats().tokens_sampled < begun + tokens_ && !deadline.expired())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return bytes;
  }

 private:
  std::unique_ptr<Transfer> whole_;
  const Mailbox& engine_;
  std::int64_t tokens_;
};

// The engine of a rank whose trainer's weights lie in `source`, and the threads around it.
class ServingRank {
 public:
  static constexpr std::int64_t kTokensOfAMove = 7;

  ServingRank() : server_({.token = "secret"}) {
    setup_.source_layouts = setup_.target_layouts = {make_arena_layout(tiny_llama(), Element::f32)};
    setup_.source_process = setup_.target_process = {0};
    setup_.plan = make_transfer_plan({{&setup_.source_layouts[0], 0, false}},
                                     {{&setup_.target_layouts[0], 0, false}});
    setup_.source = &source_;
    setup_.target = &staging_;
    setup_.served = &served_;
    for (std::int64_t i = 0; i < source_.layout().flat_elements; ++i)
      weights_.push_back(static_cast<float>(i % 97));
    source_.write_flat(0, source_.layout().flat_elements, weights_.data());
    update_ = std::make_unique<WeightUpdate>(
        setup_,
        std::make_unique<SlowTransfer>(make_colocate_transfer(setup_), mailbox_, kTokensOfAMove),
        EngineSide{.version = [this] { return engine_.weight_version(); },
                   .quiet =
                       [this] {
                         const EngineStats s = engine_.stats();
                         return engine_.paused() || (s.running == 0 && s.waiting == 0);
                       },
                   .overwrite = {},
                   .swap =
                       [this](std::int64_t version) {
                         served_.swap_memory(staging_);
                         engine_.flush_cache();
                         engine_.set_weight_version(version);
                       },
                   .moves_aside = true,
                   .tokens_sampled = [this] { return mailbox_.stats().tokens_sampled; }});
    add_weight_routes(server_,
                      {.post = [this](auto work) { queue_.post(std::move(work)); },
                       .post_move = [this](auto work) { move_thread_.post(std::move(work)); },
                       .last_write = [] { return 0.0; },
                       .gather = [this] { return weights_; }},
                      *update_);
    server_.start();
    compute_ = std::thread([this] {
      while (!stop_)
        if (!queue_.run() && !engine_.step()) queue_.wait(Deadline::after(0.05));
    });
  }
  ~ServingRank() {
    stop_ = true;
    compute_.join();
  }

  http::Address address() const { return {"127.0.0.1", server_.port(), "secret"}; }
  Mailbox& mailbox() { return mailbox_; }
  // The weights that the engine reads; after the last step.
  std::vector<float> served() const {
    std::vector<float> flat(weights_.size());
    served_.read_flat(flat.data());
    return flat;
  }
  const std::vector<float>& weights() const { return weights_; }
  void control(auto command) {
    std::promise<void> done;
    command.reply = [&](const ControlAnswer&) { done.set_value(); };
    mailbox_.post(std::move(command));
    done.get_future().get();
  }

 private:
  static constexpr std::int64_t kBlocks = 256;
  Arena source_{make_arena_layout(tiny_llama(), Element::f32)},
      served_{make_arena_layout(tiny_llama(), Element::f32)},
      staging_{make_arena_layout(tiny_llama(), Element::f32)};
  std::vector<float> weights_;
  TransferSetup setup_;
  ComputeQueue queue_;
  Mailbox mailbox_{[this] { queue_.wake(); }};
  test::HashModel model_{kBlocks, 16, 100};
  Engine engine_{{.num_blocks = kBlocks,
                  .context_length = 4000,
                  .vocab_size = 100,
                  .eos_token_ids = {},
                  .vocabulary = {}},
                 [this](const StepPlan& plan, std::span<SampledToken> sampled) {
                   std::this_thread::sleep_for(std::chrono::milliseconds(1));
                   model_.run(plan, sampled);
                 },
                 mailbox_};
  std::unique_ptr<WeightUpdate> update_;
  http::Server server_;
  std::atomic<bool> stop_{false};
  WorkThread move_thread_;
  std::thread compute_;
};

TEST(DoubleBufferedUpdate, TheEngineSamplesWhileWeightsMove) {
  for (const PauseMode mode : {PauseMode::retract, PauseMode::in_place}) {
    ServingRank rank;
    std::promise<GenerateResult> ended;
    GenerateRequest request{.rid = "long", .prompt = {1, 2, 3}, .n = 2, .params = {}};
    request.params.max_new_tokens = 3000;
    rank.mailbox().post(
        GenerateCommand{.request = std::move(request),
                        .on_finish = [&](GenerateResult r) { ended.set_value(std::move(r)); },
                        .on_token = {},
                        .ticket = 1});
    const auto sampled = [&] { return rank.mailbox().stats().tokens_sampled; };
    const auto wait_for = [&](std::int64_t tokens) {
      const Deadline deadline = Deadline::after(20);
      while (sampled() < tokens && !deadline.expired())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ASSERT_GE(sampled(), tokens);
    };
    wait_for(5);
    http::Fetcher fetcher;
    UpdateClient client({rank.address()}, fetcher);
    // The swap is refused while samples run; they go on with what they had.
    try {
      client.update(1, false, Deadline::after(30));
      FAIL() << "swapped under running samples";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("runs samples on version 0; pause it first"),
                std::string::npos)
          << error.what();
    }
    std::int64_t at_pause = 0;
    const UpdateTimes times = client.update(2, false, Deadline::after(30), [&] {
      rank.control(PauseCommand{.mode = mode, .reply = {}});
      at_pause = sampled();
    });
    EXPECT_GE(times.decoded_tokens, ServingRank::kTokensOfAMove);
    EXPECT_GT(times.moved_bytes, 0);
    EXPECT_EQ(sampled(), at_pause);  // it rests until it may go on
    rank.control(ContinueCommand{});
    wait_for(at_pause + 5);
    rank.mailbox().post(AbortCommand{});
    const GenerateResult result = ended.get_future().get();
    std::int64_t old_tokens = 0;
    for (const SampleResult& sample : result.samples) {
      EXPECT_EQ(sample.versions.size(), sample.output_ids.size());
      EXPECT_TRUE(std::is_sorted(sample.versions.begin(), sample.versions.end()));
      EXPECT_EQ(sample.versions.front(), 0);
      EXPECT_EQ(sample.versions.back(), 2);
      old_tokens += std::count(sample.versions.begin(), sample.versions.end(), 0);
    }
    EXPECT_EQ(old_tokens, at_pause);  // all that were drawn before the pause, none after it
    EXPECT_EQ(rank.served(), rank.weights());
  }
}

}  // namespace
}  // namespace tandem
