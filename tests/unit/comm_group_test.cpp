// Store and Group over loopback, with real processes: the test program starts itself again as each
// rank (CommRank.Body with TD_COMM_RANK set), so no rank is forked from a process that has threads.
#include "comm/group.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "base/check.h"
#include "base/clock.h"
#include "base/process.h"

namespace tandem {
namespace {

constexpr const char* kHost = "127.0.0.1";

::testing::AssertionResult holds(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// What a rank does, by the scenario's name. Exit code 0 of the process means that all held.
void collectives(Group& group) {
  const int rank = group.rank(), size = group.size();
  group.barrier();

  std::vector<std::int32_t> word(1000, rank == 1 ? 42 : 0);
  group.broadcast(std::as_writable_bytes(std::span(word)), 1);
  EXPECT_EQ(word, std::vector<std::int32_t>(1000, 42));

  const std::array<std::int64_t, 3> mine = {rank, 10 + rank, 20 + rank};
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(size));
  group.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all)));
  for (int r = 0; r < size; ++r) {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(all[static_cast<std::size_t>(3 * r + i)], 10 * i + r);
  }

  const std::vector<std::string> texts =
      group.all_gather_text(std::string(static_cast<std::size_t>(rank) * 3, 'a'));
  ASSERT_EQ(texts.size(), static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r)
    EXPECT_EQ(texts[static_cast<std::size_t>(r)].size(), static_cast<std::size_t>(3 * r));

  std::vector<float> floats(5000);
  std::iota(floats.begin(), floats.end(), static_cast<float>(rank));
  group.all_reduce_sum(std::span(floats));
  for (std::size_t i = 0; i < floats.size(); ++i) {
    EXPECT_EQ(floats[i], static_cast<float>(size) * static_cast<float>(i) +
                             static_cast<float>(size * (size - 1) / 2));
  }
  std::vector<double> doubles = {0.5, 1e-300 * rank};
  group.all_reduce_sum(std::span(doubles));
  EXPECT_EQ(doubles[0], 0.5 * size);
  std::vector<std::int64_t> integers = {(std::int64_t{1} << 60) + rank};
  group.all_reduce_sum(std::span(integers));
  EXPECT_EQ(integers[0], (std::int64_t{1} << 60) * size + size * (size - 1) / 2);
}

// Rank 1 dies without a word; rank 0 must end its wait with a named Error well before the limit of
// the test, and the group refuses further work.
void dead_peer(Group& group) {
  group.barrier();
  if (group.rank() == 1) ::kill(::getpid(), SIGKILL);
  std::vector<float> values(100000, 1.0f);
  const std::string first = error_of([&] { group.all_reduce_sum(std::span(values)); });
  EXPECT_TRUE(holds(first, "all_reduce in group 'test', rank 0 of 2"));
  EXPECT_TRUE(holds(error_of([&] { group.barrier(); }), "failed before"));
}

// Rank 1 lives but does not come; the operation's own limit ends the wait.
void silent_peer(Group& group, Store& store) {
  group.barrier();
  if (group.rank() == 1) {
    store.get("rank 0 has given up", 60.0);
    return;
  }
  group.set_timeout(0.5);
  std::vector<std::byte> bytes(16);
  EXPECT_TRUE(holds(error_of([&] { group.broadcast(bytes, 1); }),
                    "broadcast in group 'test', rank 0 of 2, limit 0.5 s"));
  store.set("rank 0 has given up", "");
}

TEST(CommRank, Body) {
  const char* rank_text = std::getenv("TD_COMM_RANK");
  if (rank_text == nullptr) GTEST_SKIP() << "the body of a rank; the other tests start it";
  const int rank = std::atoi(rank_text), size = std::atoi(std::getenv("TD_COMM_SIZE"));
  const std::string scenario = std::getenv("TD_COMM_SCENARIO");
  Store store = Store::connect(
      kHost, static_cast<std::uint16_t>(std::atoi(std::getenv("TD_COMM_PORT"))), 20.0);
  GroupOptions options;
  options.timeout_seconds = 20.0;
  Group group = Group::gloo(store, "test", rank, size, options);
  EXPECT_EQ(group.rank(), rank);
  EXPECT_EQ(group.size(), size);
  if (scenario == "collectives") collectives(group);
  if (scenario == "dead_peer") dead_peer(group);
  if (scenario == "silent_peer") silent_peer(group, store);
}

std::vector<ProcessExit> run_ranks(const std::string& scenario, int size) {
  Store server = Store::serve(kHost, 0, 20.0);
  std::vector<Process> ranks;
  for (int rank = 0; rank < size; ++rank) {
    SpawnOptions options;
    options.argv = {own_executable(), "--gtest_filter=CommRank.Body", "--gtest_brief=1"};
    options.env = {{"TD_COMM_RANK", std::to_string(rank)},
                   {"TD_COMM_SIZE", std::to_string(size)},
                   {"TD_COMM_PORT", std::to_string(server.port())},
                   {"TD_COMM_SCENARIO", scenario}};
    ranks.push_back(Process::spawn(options));
  }
  std::vector<ProcessExit> exits;
  const Deadline deadline = Deadline::after(90.0);
  for (Process& rank : ranks) {
    const auto exit = rank.wait(deadline);
    EXPECT_TRUE(exit.has_value()) << "a rank of " << scenario << " did not end";
    exits.push_back(exit.value_or(ProcessExit{255, 0}));
  }
  return exits;
}

TEST(Group, CollectivesOfTwoProcesses) {
  for (const ProcessExit& exit : run_ranks("collectives", 2))
    EXPECT_TRUE(exit.ok()) << exit.describe();
}

TEST(Group, CollectivesOfThreeProcesses) {
  for (const ProcessExit& exit : run_ranks("collectives", 3))
    EXPECT_TRUE(exit.ok()) << exit.describe();
}

TEST(Group, DeadPeerEndsTheWait) {
  const std::vector<ProcessExit> exits = run_ranks("dead_peer", 2);
  EXPECT_TRUE(exits[0].ok()) << exits[0].describe();
  EXPECT_EQ(exits[1].signal, SIGKILL);
}

TEST(Group, SilentPeerEndsAtTheLimit) {
  for (const ProcessExit& exit : run_ranks("silent_peer", 2))
    EXPECT_TRUE(exit.ok()) << exit.describe();
}

TEST(Group, OfOneNeedsNoBackend) {
  Group group = Group::alone("solo");
  group.barrier();
  std::vector<float> values = {1, 2};
  group.all_reduce_sum(std::span(values));
  EXPECT_EQ(values, (std::vector<float>{1, 2}));
  std::vector<float> out(2);
  group.all_gather(std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, values);
  EXPECT_EQ(group.all_gather_text("abc"), std::vector<std::string>{"abc"});
  EXPECT_THROW(group.broadcast(std::as_writable_bytes(std::span(values)), 1), Error);
  EXPECT_THROW(group.all_gather(std::as_bytes(std::span(values)), {}), Error);
}

TEST(Group, BuildingWithoutThePeerEndsAtTheLimit) {
  Store server = Store::serve(kHost, 0, 5.0);
  GroupOptions options;
  options.timeout_seconds = 0.5;
  const std::string error = error_of([&] { Group::gloo(server, "lonely", 0, 2, options); });
  EXPECT_TRUE(holds(error, "group 'lonely', rank 0 of 2: building within 0.5 s"));
}

TEST(Store, KeysAndCounters) {
  Store server = Store::serve(kHost, 0, 5.0);
  EXPECT_NE(server.port(), 0);
  Store client = Store::connect(kHost, server.port(), 5.0);
  client.set("a", "text\n");
  EXPECT_EQ(server.get("a", 1.0), "text\n");
  EXPECT_TRUE(server.has("a"));
  EXPECT_FALSE(server.has("b"));
  EXPECT_EQ(client.add("n", 2), 2);
  EXPECT_EQ(server.add("n", 3), 5);
  EXPECT_TRUE(client.remove("a"));
  EXPECT_FALSE(client.has("a"));
}

TEST(Store, WaitsEndWithTheKeyAndTheAddress) {
  Store server = Store::serve(kHost, 0, 5.0);
  const std::string error = error_of([&] { server.get("never", 0.2); });
  EXPECT_TRUE(holds(error, server.address()));
  EXPECT_TRUE(holds(error, "'never' was not set within 0.2 s"));
  const std::string taken = error_of([&] { Store::serve(kHost, server.port(), 1.0); });
  EXPECT_TRUE(holds(taken, "cannot listen"));
}

// What libtorch finds as getnameinfo, which c10d calls for each connection: a reverse lookup would
// take the resolver's limit where there is no name server.
TEST(Store, APeersAddressIsNotLookedUp) {
  const auto found =
      reinterpret_cast<decltype(&::getnameinfo)>(::dlsym(RTLD_DEFAULT, "getnameinfo"));
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  char host[NI_MAXHOST] = {};
  ASSERT_EQ(found(reinterpret_cast<const sockaddr*>(&loopback), sizeof loopback, host, sizeof host,
                  nullptr, 0, NI_NUMERICSERV),
            0);
  EXPECT_STREQ(host, "127.0.0.1");  // /etc/hosts says localhost
}

TEST(Store, ConnectingToNobodyEndsAtTheLimit) {
  std::uint16_t free_port = 0;
  { free_port = Store::serve(kHost, 0, 1.0).port(); }
  ::testing::internal::CaptureStderr();
  const std::string error = error_of([&] { Store::connect(kHost, free_port, 0.5); });
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");  // the Error says it, c10d need not
  EXPECT_TRUE(holds(error, "cannot connect within 0.5 s"));
}

// Debian's gloo headers are older than the gloo in the torch wheel: a vtable or function of gloo
// that td_comm itself defined would be linked in place of the right one.
TEST(Gloo, NoGlooSymbolIsDefinedByUs) {
  const std::string command = "nm -C --defined-only '" TANDEM_BINARY_DIR "/libtd_comm.a'";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  ASSERT_NE(pipe, nullptr);
  std::string text;
  std::array<char, 4096> part;
  while (const std::size_t n = std::fread(part.data(), 1, part.size(), pipe))
    text.append(part.data(), n);
  ASSERT_EQ(::pclose(pipe), 0);
  ASSERT_TRUE(holds(text, "tandem::Group::gloo"));
  EXPECT_EQ(text.find("vtable for gloo::"), std::string::npos);
  EXPECT_EQ(text.find("GlooStore"), std::string::npos);
  for (std::size_t at = text.find(" gloo::"); at != std::string::npos;
       at = text.find(" gloo::", at + 1)) {
    ADD_FAILURE() << "td_comm defines" << text.substr(at, text.find('\n', at) - at);
  }
}

}  // namespace
}  // namespace tandem
