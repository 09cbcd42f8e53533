// Byte streams between "processes" (threads with connections of their own): every byte arrives in
// order whatever the pieces, also handed on; a peer that is gone or silent ends the wait by name.
#include "comm/streams.h"

#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "base/check.h"

namespace tandem {
namespace {

using Bytes = std::vector<std::byte>;

Bytes numbered(std::size_t size, int salt) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i)
    bytes[i] = static_cast<std::byte>((i * 7 + i / 251 + static_cast<std::size_t>(salt)) % 256);
  return bytes;
}

// Pieces of growing size, so that those of both ends never fall together.
ByteStreams::Source source_of(const Bytes& bytes, std::size_t piece) {
  return
      [&bytes, piece, at = std::size_t{0}]() mutable -> std::optional<std::span<const std::byte>> {
        const std::size_t size = std::min(piece++, bytes.size() - at);
        at += size;
        return std::span(bytes).subspan(at - size, size);
      };
}
ByteStreams::Sink sink_of(Bytes& bytes, std::size_t piece) {
  return [&bytes, piece, at = std::size_t{0}]() mutable -> std::optional<std::span<std::byte>> {
    const std::size_t size = std::min(piece++, bytes.size() - at);
    at += size;
    return std::span(bytes).subspan(at - size, size);
  };
}

class Streams : public ::testing::Test {
 protected:
  // body(store, process) on `count` threads; what each throws.
  template <class Body>
  std::vector<std::string> on_processes(int count, Body body) {
    std::vector<std::string> faults(static_cast<std::size_t>(count));
    std::vector<std::thread> threads;
    for (int p = 0; p < count; ++p)
      threads.emplace_back([&, p] {
        try {
          Store store = Store::connect("127.0.0.1", server_.port(), 20);
          body(store, p);
        } catch (const Error& error) {
          faults[static_cast<std::size_t>(p)] = error.what();
        }
      });
    for (auto& t : threads) t.join();
    return faults;
  }
  Store server_ = Store::serve("127.0.0.1", 0, 20);
  GroupOptions options_{.host = "127.0.0.1", .interface = {}, .timeout_seconds = 20};
};

TEST_F(Streams, EveryByteArrivesInOrderAlsoASecondTime) {
  constexpr std::size_t kBytes = 3'000'001;
  // Both ways between 0 and 1, and two from 0 to 2.
  const Bytes a = numbered(kBytes, 1), b = numbered(kBytes / 2, 2), c = numbered(17, 3),
              d = numbered(0, 4);
  Bytes got_a(a.size()), got_b(b.size()), got_c(c.size()), got_d;
  const auto faults = on_processes(3, [&](Store& store, int process) {
    std::vector<ByteStreams::Route> to, from;
    if (process == 0) to = {{1, 0}, {2, 5}, {2, 4}}, from = {{1, 0}};
    if (process == 1) to = {{0, 0}}, from = {{0, 0}};
    if (process == 2) from = {{0, 4}, {0, 5}};
    ByteStreams streams(store, "test", process, to, from, options_);
    for (int round = 0; round < 2; ++round) {
      std::vector<ByteStreams::Source> sources;
      std::vector<ByteStreams::Sink> sinks;
      if (process == 0) {
        sources = {source_of(a, 1000), source_of(c, 1), source_of(d, 9)};
        sinks = {sink_of(got_b, 70'000)};
      }
      if (process == 1) sources = {source_of(b, 1)}, sinks = {sink_of(got_a, 3333)};
      if (process == 2) sinks = {sink_of(got_d, 1), sink_of(got_c, 5)};
      streams.run(sources, sinks);
      if (process == 0) {
        EXPECT_TRUE(got_b == b);
      }
      if (process == 1) {
        EXPECT_TRUE(got_a == a);
      }
      if (process == 2) {
        EXPECT_TRUE(got_c == c);
      }
    }
  });
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
}

// What is received goes on at once: the middle process never holds more than one piece.
TEST_F(Streams, AChainHandsOn) {
  const Bytes all = numbered(2'000'003, 1);
  Bytes got(all.size()), piece(50'000);
  std::size_t come = 0, gone = 0, size = 0;
  bool full = false;
  const auto faults = on_processes(3, [&](Store& store, int process) {
    std::vector<ByteStreams::Route> to, from;
    if (process < 2) to = {{process + 1, 0}};
    if (process > 0) from = {{process - 1, 0}};
    ByteStreams streams(store, "chain", process, to, from, options_);
    std::vector<ByteStreams::Source> sources;
    std::vector<ByteStreams::Sink> sinks;
    if (process == 0) sources = {source_of(all, 100'000)};
    if (process == 2) sinks = {sink_of(got, 9'999)};
    if (process == 1) {
      sinks = {[&]() -> std::optional<std::span<std::byte>> {
        if (size > 0 && !full) full = true, come += size;
        if (come == all.size()) return std::span<std::byte>();
        if (full) return std::nullopt;
        size = std::min(piece.size(), all.size() - come);
        return std::span(piece).first(size);
      }};
      sources = {[&, asked = false]() mutable -> std::optional<std::span<const std::byte>> {
        if (asked) gone += size, size = 0, full = asked = false;
        if (gone == all.size()) return std::span<const std::byte>();
        if (!full) return std::nullopt;
        asked = true;
        return std::span<const std::byte>(piece).first(size);
      }};
    }
    streams.run(sources, sinks);
  });
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  EXPECT_EQ(got, all);
}

TEST_F(Streams, APeerThatIsGoneIsNamedAndTheStreamsStayShut) {
  const Bytes all = numbered(8'000'000, 1);
  for (const bool receiver_goes : {true, false}) {
    const auto faults = on_processes(2, [&](Store& store, int process) {
      std::vector<ByteStreams::Route> to, from;
      if (process == 0) to = {{1, 0}};
      if (process == 1) from = {{0, 0}};
      auto streams = std::make_unique<ByteStreams>(store, receiver_goes ? "receiver" : "sender",
                                                   process, to, from, options_);
      if ((process == 1) == receiver_goes) return streams.reset();
      Bytes into(all.size());
      const std::vector<ByteStreams::Source> sources{source_of(all, all.size())};
      const std::vector<ByteStreams::Sink> sinks{sink_of(into, all.size())};
      std::string first;
      try {
        streams->run(process == 0 ? sources : std::vector<ByteStreams::Source>(),
                     process == 1 ? sinks : std::vector<ByteStreams::Sink>());
      } catch (const Error& error) {
        first = error.what();
      }
      EXPECT_NE(first.find(fmt::format("rank {} closed its connection", 1 - process)), first.npos)
          << first;
      streams->run({}, {});
    });
    EXPECT_NE(faults[receiver_goes ? 0 : 1].find("failed before and must be built anew"),
              std::string::npos);
  }
}

TEST_F(Streams, ASilentPeerEndsTheWaitAtTheLimit) {
  // Alone, where the call blocks, and beside another route, where it polls.
  for (const bool beside : {false, true}) {
    const std::string name = beside ? "beside" : "alone";
    const auto faults = on_processes(2, [&](Store& store, int process) {
      options_.timeout_seconds = 20;
      std::vector<ByteStreams::Route> to, from{{1 - process, 0}};
      if (beside) to = {{1 - process, 0}};
      if (!beside && process == 0) to = {{1, 0}}, from = {};
      GroupOptions options = options_;
      options.timeout_seconds = process == 1 ? 0.5 : 20;
      if (process == 1) store.get("listening/" + name, 20);
      if (process == 0) server_.set("listening/" + name, "");
      ByteStreams streams(store, name, process, to, from, options);
      if (process == 0) {
        store.get("given up/" + name, 20);
        return;
      }
      Bytes into(10);
      const Bytes out = numbered(100'000'000, 0);
      const std::vector<ByteStreams::Sink> sinks{sink_of(into, 10)};
      const std::vector<ByteStreams::Source> sources{source_of(out, out.size())};
      std::string fault;
      try {
        streams.run(beside ? sources : std::vector<ByteStreams::Source>(), sinks);
      } catch (const Error& error) {
        fault = error.what();
      }
      store.set("given up/" + name, "");
      EXPECT_NE(fault.find("limit 0.5 s: nothing moved between this rank and"), fault.npos)
          << fault;
    });
    for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  }
}

TEST_F(Streams, BuildingWithoutThePeerEndsAtTheLimit) {
  options_.timeout_seconds = 0.3;
  const auto text = [&](std::vector<ByteStreams::Route> to, std::vector<ByteStreams::Route> from) {
    try {
      ByteStreams(server_, "lonely", 0, std::move(to), std::move(from), options_);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(text({{1, 0}}, {}).find("streams/lonely/1"), std::string::npos) << text({{1, 0}}, {});
  EXPECT_NE(text({}, {{1, 0}}).find("1 of 1 connections missing"), std::string::npos);
}

}  // namespace
}  // namespace tandem
