// Driver's client and engine's face over a real socket, with the real engine over the hash model
// on a compute thread of its own.
#include "engine/serve.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "base/check.h"
#include "engine/client.h"
#include "engine/engine.h"
#include "unit/engine_hash_model.h"

namespace tandem {
namespace {

class ServeTest : public ::testing::Test {
 protected:
  ServeTest() {
    ServeOptions options;
    options.limits = limits_;
    options.model_path = "models/hash";
    options.model_type = "hash";
    options.version = "test";
    options.text.encode = [this](const std::string& text) {
      std::unique_lock lock(encode_mutex_);
      encode_allowed_.wait(lock, [&] { return may_encode_; });
      TD_CHECK(text != "bad", "text: no token for it");
      return std::vector<TokenId>(text.begin(), text.end());
    };
    options.text.decode = [](std::span<const TokenId> ids, bool) {
      std::string text;
      for (const TokenId id : ids) text += static_cast<char>('!' + id % 90);
      return text;
    };
    add_engine_routes(server_, mailbox_, std::move(options));
    server_.start();
    compute_ = std::thread([this] {
      while (!stopping_) {
        if (version_ != engine_.weight_version()) engine_.set_weight_version(version_);
        if (!engine_.step()) mailbox_.wait(Deadline::after(0.005));
      }
    });
    address_ = {.host = "127.0.0.1", .port = server_.port(), .token = "secret"};
  }
  ~ServeTest() override {
    stopping_ = true;
    compute_.join();
    server_.stop();
  }

  static Deadline soon() { return Deadline::after(20); }

  EngineLimits limits_ = {.num_blocks = 200,
                          .block_tokens = 4,
                          .max_running = 16,
                          .max_prefill_tokens = 32,
                          .context_length = 128,
                          .vocab_size = 100,
                          .eos_token_ids = {9},
                          .vocabulary = {}};
  test::HashModel model_{200, 4, 100};
  std::mutex encode_mutex_;
  std::condition_variable encode_allowed_;
  bool may_encode_ = true;
  std::atomic<bool> slow_{false};
  Mailbox mailbox_;
  Engine engine_{limits_,
                 [this](const StepPlan& plan, std::span<SampledToken> sampled) {
                   if (slow_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                   model_.run(plan, sampled);
                 },
                 mailbox_};
  http::Server server_{{.token = "secret"}};
  std::atomic<bool> stopping_{false};
  std::atomic<std::int64_t> version_{0};
  std::thread compute_;
  http::Address address_;
};

// Collects the groups of one generate round.
class Groups {
 public:
  explicit Groups(std::size_t wanted) : wanted_(wanted) {}
  std::function<void(GroupResult)> callback() {
    return [this](GroupResult result) {
      const std::lock_guard lock(mutex_);
      const std::uint64_t id = result.prompt_id;
      groups_[id] = std::move(result);
      changed_.notify_all();
    };
  }
  const std::map<std::uint64_t, GroupResult>& wait() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(20), [&] { return groups_.size() == wanted_; });
    return groups_;
  }

 private:
  std::size_t wanted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, GroupResult> groups_;
};

PromptGroup make_group(std::uint64_t id, std::int64_t n = 4, std::int64_t answer = 20) {
  PromptGroup group;
  group.prompt_id = id;
  group.first_sample_id = id * static_cast<std::uint64_t>(n);
  group.n = n;
  for (std::uint64_t i = 0; i < 3 + id % 9; ++i) {
    group.prompt.push_back(static_cast<TokenId>((7 * id + i) % 100));
  }
  group.params.max_new_tokens = answer;
  group.params.seed = 42;
  return group;
}

TEST_F(ServeTest, GroupsArriveAsTheEngineMadeThem) {
  version_ = 7;
  // Declared before the fetcher: callbacks refer to it until the fetcher has ended.
  Groups groups(40);
  http::Fetcher fetcher;
  EngineClient client(address_, fetcher);
  client.wait_healthy(soon());
  while (client.weight_version(soon()) != 7) std::this_thread::yield();
  for (std::uint64_t id = 0; id < 40; ++id) {
    client.generate(make_group(id), soon(), groups.callback());
  }
  ASSERT_EQ(groups.wait().size(), 40u);
  for (const auto& [id, group] : groups.wait()) {
    ASSERT_TRUE(group.ok()) << group.error;
    const PromptGroup asked = make_group(id);
    GenerateRequest request;
    request.prompt = asked.prompt;
    request.first_sample_id = asked.first_sample_id;
    request.params = asked.params;
    ASSERT_EQ(group.samples.size(), 4u);
    for (std::size_t i = 0; i < 4; ++i) {
      const Sample& sample = group.samples[i];
      const SampleResult wanted =
          test::reference_answer(request, static_cast<std::int64_t>(i), limits_);
      EXPECT_EQ(sample.id, asked.first_sample_id + i);
      EXPECT_EQ(sample.prompt_id, id);
      EXPECT_EQ(sample.prompt_length(), static_cast<std::int64_t>(asked.prompt.size()));
      EXPECT_EQ(
          std::vector<TokenId>(sample.tokens.begin() + sample.prompt_length(), sample.tokens.end()),
          wanted.output_ids);
      EXPECT_EQ(sample.log_probs, wanted.log_probs);
      EXPECT_EQ(sample.loss_mask.size(), wanted.output_ids.size());
      EXPECT_EQ(sample.weight_versions, std::vector<std::int64_t>(wanted.output_ids.size(), 7));
      EXPECT_EQ(sample.finish, wanted.finish);
      EXPECT_EQ(sample.status, wanted.finish == FinishReason::stop ? SampleStatus::completed
                                                                   : SampleStatus::truncated);
    }
  }
}

TEST_F(ServeTest, PauseFlushContinueAndAbort) {
  slow_ = true;
  Groups groups(3);
  http::Fetcher fetcher;
  EngineClient client(address_, fetcher);
  for (std::uint64_t id = 0; id < 3; ++id) {
    PromptGroup group = make_group(id, 2, 100);
    group.params.ignore_eos = true;
    client.generate(group, soon(), groups.callback());
  }
  while (mailbox_.stats().running < 6) std::this_thread::yield();
  EXPECT_THROW(client.flush_cache(soon()), Error);
  client.pause(PauseMode::retract, soon());
  client.flush_cache(soon());
  EXPECT_TRUE(client.generates(soon())) << "a paused engine is alive";
  client.abort(1, false, soon());
  slow_ = false;
  client.resume(soon());
  ASSERT_EQ(groups.wait().size(), 3u);
  for (const auto& [id, group] : groups.wait()) {
    ASSERT_TRUE(group.ok()) << group.error;
    for (const Sample& sample : group.samples) {
      EXPECT_EQ(sample.status, id == 1 ? SampleStatus::aborted : SampleStatus::truncated);
      EXPECT_EQ(sample.log_probs.size(), static_cast<std::size_t>(sample.response_length));
      if (id != 1) {
        EXPECT_EQ(sample.response_length, 100);
      }
    }
  }
  EXPECT_TRUE(client.generates(soon()));
}

TEST_F(ServeTest, RefusalsSayWhyAndLeaveTheEngineAlone) {
  http::Client client(address_);
  const auto post = [&](const std::string& path, const std::string& body) {
    return client.post(path, body, "application/json", soon());
  };
  struct Case {
    const char* path;
    const char* body;
    const char* start;
  };
  const std::vector<Case> cases = {
      {"/generate", R"({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}})",
       "sampling_params.max_new_tokens: -1 is negative"},
      {"/generate", R"({"input_ids": [[1], [100]]})", "input_ids: id 100"},
      {"/generate", R"({"input_ids": []})", "input_ids: the prompt is empty"},
      {"/generate", R"({"input_ids": [1], "sampling_params": {"top_p": 0}})",
       "sampling_params.top_p: 0 found, wanted above 0, at most 1"},
      {"/generate", R"({"input_ids": [1], "sampling_params": {"stop": "."}})",
       "sampling_params.stop: this engine does not know the tokens' texts"},
      {"/generate", R"({"input_ids": [1)", "body: not valid JSON"},
      {"/generate", R"({"input_ids": [1e999]})", "body: not valid JSON: number overflow"},
      {"/pause_generation", R"({"mode": "nap"})", "mode: 'nap' found"},
      {"/abort_request", R"({})", "rid: empty"},
  };
  for (const Case& c : cases) {
    const http::Response response = post(c.path, c.body);
    EXPECT_EQ(response.status, 400) << c.body;
    EXPECT_TRUE(http::error_message(response).starts_with(c.start)) << c.body << "\n"
                                                                    << response.body;
  }
  EXPECT_EQ(mailbox_.stats().tokens_sampled, 0);
  EXPECT_EQ(client.get("/v1/completions", soon()).status, 404);
  EXPECT_EQ(http::Client("127.0.0.1", server_.port()).get("/model_info", soon()).status, 401);

  const http::Response empty =
      post("/generate", R"({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}})");
  EXPECT_EQ(empty.status, 200);
  const Json answer = parse_json(empty.body, "answer");
  EXPECT_TRUE(answer["output_ids"].empty());
  EXPECT_EQ(answer["meta_info"]["finish_reason"]["type"], "length");
}

// A slow tokenizer holds up who asks it, not the server.
TEST_F(ServeTest, TextIsEncodedOffTheServersThread) {
  {
    const std::lock_guard lock(encode_mutex_);
    may_encode_ = false;
  }
  std::vector<std::thread> askers;
  std::mutex mutex;
  std::vector<http::Response> answers;
  for (const char* text : {"AB", "bad"}) {
    askers.emplace_back([&, text] {
      http::Client asker(address_);
      auto response = asker.post("/generate",
                                 fmt::format(R"({{"text": "{}", "sampling_params": )"
                                             R"({{"max_new_tokens": 3, "ignore_eos": true}}}})",
                                             text),
                                 "application/json", soon());
      const std::lock_guard lock(mutex);
      answers.push_back(std::move(response));
    });
  }
  http::Client client(address_);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(client.get("/health", soon()).status, 200);
  {
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(answers.empty());
  }
  {
    const std::lock_guard lock(encode_mutex_);
    may_encode_ = true;
  }
  encode_allowed_.notify_all();
  for (std::thread& asker : askers) asker.join();
  if (answers[0].status != 200) std::swap(answers[0], answers[1]);
  ASSERT_EQ(answers[0].status, 200);
  const Json answer = parse_json(answers[0].body, "answer");
  EXPECT_EQ(answer["meta_info"]["prompt_tokens"], 2);
  EXPECT_EQ(answer["text"].get<std::string>().size(), 3u);
  EXPECT_EQ(answers[1].status, 400);
  EXPECT_EQ(http::error_message(answers[1]), "text: no token for it");
}

TEST_F(ServeTest, AClientThatGoesAwayFreesItsBlocks) {
  slow_ = true;
  {
    http::Fetcher fetcher;  // its end closes the connections
    EngineClient client(address_, fetcher);
    for (std::uint64_t id = 0; id < 3; ++id) {
      PromptGroup group = make_group(id, 2, 100);
      group.params.ignore_eos = true;
      client.generate(group, soon(), [](const GroupResult&) {});
    }
    while (mailbox_.stats().running < 6) std::this_thread::yield();
  }
  const Deadline deadline = soon();
  while (mailbox_.stats().running > 0 && !deadline.expired()) std::this_thread::yield();
  const EngineStats stats = mailbox_.stats();
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.free_blocks, stats.total_blocks);
  EXPECT_LT(stats.tokens_sampled, 6 * 100) << "they ended before their length";
}

TEST_F(ServeTest, StreamsWhatItAnswers) {
  http::Client client(address_);
  const std::string ask = R"({"input_ids": [1, 2, 3], "return_logprob": true, "sample_id": 7,
      "sampling_params": {"n": 2, "max_new_tokens": 6, "sampling_seed": 5, "ignore_eos": true})";
  const Json whole = parse_json(client.call("/generate", ask + "}", soon()), "answer");
  const std::string body = client.call("/generate", ask + R"(, "stream": true})", soon());
  std::vector<Json> events;
  bool done = false;
  for (std::size_t at = 0; at < body.size();) {
    const std::size_t end = body.find("\n\n", at);
    ASSERT_NE(end, std::string::npos);
    const std::string event = body.substr(at, end - at);
    at = end + 2;
    ASSERT_TRUE(event.starts_with("data: ")) << event;
    ASSERT_FALSE(done);
    done = event == "data: [DONE]";
    if (!done) events.push_back(parse_json(event.substr(6), "event"));
  }
  EXPECT_TRUE(done);
  ASSERT_EQ(events.size(), 2u * (6 + 1));
  std::size_t length[2] = {0, 0};
  for (std::size_t i = 0; i < events.size(); ++i) {
    const auto index = events[i]["index"].get<std::size_t>();
    const Json& final_answer = whole[index];
    const Json& meta = events[i]["meta_info"];
    if (i < 12) {
      EXPECT_EQ(events[i]["output_ids"].size(), ++length[index]);
      EXPECT_TRUE(meta["finish_reason"].is_null());
    } else {
      EXPECT_EQ(events[i]["text"], final_answer["text"]);
      EXPECT_EQ(meta["finish_reason"]["type"], "length");
    }
    for (std::size_t t = 0; t < length[index]; ++t) {
      EXPECT_EQ(events[i]["output_ids"][t], final_answer["output_ids"][t]);
      EXPECT_EQ(meta["output_token_logprobs"][t],
                final_answer["meta_info"]["output_token_logprobs"][t]);
    }
  }
  EXPECT_EQ(
      client.post("/generate", R"({"input_ids": [], "stream": true})", "application/json", soon())
          .status,
      400);
}

TEST_F(ServeTest, SaysWhatItIs) {
  http::Client client(address_);
  const auto get = [&](const std::string& path) {
    return parse_json(client.fetch(path, soon()), path);
  };
  EXPECT_EQ(get("/get_model_info"), get("/model_info"));
  EXPECT_EQ(get("/model_info")["model_path"], "models/hash");
  EXPECT_EQ(get("/model_info")["weight_version"], "0");
  EXPECT_EQ(get("/get_server_info")["max_total_num_tokens"], 800);
  EXPECT_EQ(get("/server_info")["internal_states"][0]["free_blocks"], 200);
  EXPECT_EQ(get("/health_generate")["message"], "1 token");
  EXPECT_EQ(client.get("/health", soon()).status, 200);
  const Json batch = parse_json(
      client.call("/generate", R"({"input_ids": [[1, 2], [3]], "sampling_params": {"n": 2}})",
                  soon()),
      "batch");
  EXPECT_EQ(batch.size(), 4u);
  EXPECT_EQ(batch[3]["meta_info"]["prompt_tokens"], 1);
  EXPECT_FALSE(batch[0]["meta_info"].contains("output_token_logprobs"));
}

TEST_F(ServeTest, ADeadEngineIsAnErrorThatNamesIt) {
  Groups groups(1);
  http::Fetcher fetcher;
  int port = 0;
  {
    http::Server gone({});
    gone.start();
    port = gone.port();
  }
  EngineClient client({.host = "127.0.0.1", .port = port}, fetcher);
  client.generate(make_group(5), soon(), groups.callback());
  ASSERT_EQ(groups.wait().size(), 1u);
  const GroupResult& group = groups.wait().at(5);
  EXPECT_FALSE(group.ok());
  EXPECT_NE(group.error.find(std::to_string(port)), std::string::npos) << group.error;
  EXPECT_FALSE(client.healthy(Deadline::after(2)));
  EXPECT_THROW(client.wait_healthy(Deadline::after(0.2)), Error);
}

}  // namespace
}  // namespace tandem
