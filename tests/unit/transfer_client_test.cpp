// The driver's side of a weight update against ranks that answer what the case says: both ends of
// every box must agree before any rank is told to swap.
#include "transfer/client.h"

#include <gtest/gtest.h>

#include <atomic>

#include "base/check.h"
#include "http/server.h"

namespace tandem {
namespace {

std::string box(int index, const char* tensor, const char* sum) {
  return fmt::format(R"({{"box":{},"tensor":"{}","sum":"{}"}})", index, tensor, sum);
}

// What ranks say of version 1 after an update.
class CheckedRank {
 public:
  CheckedRank(const std::string& version, const std::string& fresh, const std::string& served)
      : server_({.token = "secret"}) {
    server_.route("POST", "/weights/check", [=](http::Request, http::Respond respond) {
      respond({.status = 200,
               .body = fmt::format(R"({{"weight_version":{},"fresh":[{}],"served":[{}]}})", version,
                                   fresh, served)});
    });
    server_.start();
  }
  http::Address address() const { return {"127.0.0.1", server_.port(), "secret"}; }

 private:
  http::Server server_;
};

TEST(UpdateClient, ChecksThatEveryEngineServesTheMasters) {
  struct Checked {
    std::string version, fresh, served;
    std::vector<std::string> text;  // of the error; empty: none
  };
  const std::string a = box(0, "model.norm.weight", "aa"), b = box(1, "lm_head.weight", "bb");
  for (const Checked& c : std::vector<Checked>{
           {"1", a + "," + b, b + "," + a, {}},
           {"0", a, a, {"engine rank 1 serves version 0", "the trainer's is 1"}},
           {"1",
            a + "," + b,
            a + "," + box(1, "lm_head.weight", "bc"),
            {"lm_head.weight", "engine rank 1 serves checksum bc", "trainer rank 0 give bb"}},
           {"1", a, a + "," + b, {"lm_head.weight", "no trainer has it"}},
           {"1", a + "," + b, a, {"2 boxes at trainers, 1 at engines"}},
       }) {
    CheckedRank trainer("null", c.fresh, ""), engine(c.version, "", c.served);
    http::Fetcher fetcher;
    UpdateClient client({trainer.address(), engine.address()}, fetcher);
    std::string text;
    std::int64_t compared = 0;
    try {
      compared = client.check(1, Deadline::after(10));
    } catch (const Error& e) {
      text = e.what();
    }
    for (const std::string& part : c.text) EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(text.empty(), c.text.empty()) << text;
    EXPECT_EQ(compared, c.text.empty() ? 2 : 0);
  }
}

// A rank with fixed answers.
class FakeRank {
 public:
  FakeRank(const std::string& sent, const std::string& received, int status = 200)
      : server_({.token = "secret"}) {
    server_.route("POST", "/weights/move", [=](http::Request, http::Respond respond) {
      if (status != 200)
        return respond(http::error_response(status, "the engine still runs samples"));
      respond({.status = 200,
               .body = fmt::format(
                   R"({{"weight_version":1,"waited_seconds":0.5,"announce_seconds":0.0,)"
                   R"("move_seconds":0.25,"verify_seconds":0.0,"total_bytes":100,)"
                   R"("moved_bytes":60,"decoded_tokens":3,"sent":[{}],"received":[{}]}})",
                   sent, received)});
    });
    server_.route("POST", "/weights/swap", [this](http::Request, http::Respond respond) {
      ++swaps;
      respond({.status = 200, .body = "{}"});
    });
    server_.start();
  }
  http::Address address() const { return {"127.0.0.1", server_.port(), "secret"}; }
  std::atomic<int> swaps{0};

 private:
  http::Server server_;
};

struct Case {
  std::string sent, received;
  int status;
  std::vector<std::string> text;  // of the error; empty: none
};

TEST(UpdateClient, SwapsOnlyWhatArrivedAsItLeft) {
  const std::string a = box(0, "model.norm.weight", "aa"), b = box(1, "lm_head.weight", "bb");
  for (const Case& c : std::vector<Case>{
           {a + "," + b, b + "," + a, 200, {}},
           {a + "," + b,
            a + "," + box(1, "lm_head.weight", "bc"),
            200,
            {"lm_head.weight", "bb", "bc", "trainer rank 0", "engine rank 1"}},
           {a + "," + b, a, 200, {"lm_head.weight", "no rank reports it"}},
           {a, a + "," + b, 200, {"1 boxes sent, 2 received"}},
           {a, a, 400, {"the engine still runs samples", "/weights/move"}},
       }) {
    FakeRank trainer(c.sent, ""), engine("", c.received, c.status);
    http::Fetcher fetcher;
    UpdateClient client({trainer.address(), engine.address()}, fetcher);
    std::string text;
    UpdateTimes times;
    try {
      times = client.update(1, true, Deadline::after(10));
    } catch (const Error& e) {
      text = e.what();
    }
    for (const std::string& part : c.text) EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_EQ(text.empty(), c.text.empty()) << text;
    EXPECT_EQ(trainer.swaps, c.text.empty() ? 1 : 0);
    EXPECT_EQ(engine.swaps, c.text.empty() ? 1 : 0);
    if (!c.text.empty()) continue;
    EXPECT_EQ(times.num_verified, 2);
    EXPECT_EQ(times.moved_bytes, 120);
    EXPECT_EQ(times.decoded_tokens, 6);
    EXPECT_EQ(times.move_seconds, 0.25);
    EXPECT_GE(times.seconds, 0.5);
    EXPECT_LT(client.update(2, false, Deadline::after(10)).seconds, times.seconds);
  }
}

}  // namespace
}  // namespace tandem
