// Move on all ranks, compare, swap on all ranks.
#include "transfer/client.h"

#include <algorithm>
#include <map>
#include <string>

#include "base/check.h"
#include "base/json.h"
#include "http/fan.h"

namespace tandem {
namespace {

struct End {
  std::size_t rank = 0;
  std::string tensor, sum;
};

std::map<std::int64_t, End> ends(const std::vector<Json>& answers,
                                 const std::vector<std::string>& sources, const char* key) {
  std::map<std::int64_t, End> out;
  for (std::size_t r = 0; r < answers.size(); ++r)
    for (const Json& box : require<Json>(answers[r], key, sources[r]))
      out[require<std::int64_t>(box, "box", sources[r])] = {
          r, require<std::string>(box, "tensor", sources[r]),
          require<std::string>(box, "sum", sources[r])};
  return out;
}

// Every box has the same checksum at both ends; returns their number.
std::int64_t verify(const std::vector<Json>& answers, const std::vector<std::string>& sources,
                    std::int64_t version) {
  const auto sent = ends(answers, sources, "sent"), received = ends(answers, sources, "received");
  for (const auto& [box, from] : sent) {
    const auto to = received.find(box);
    TD_CHECK(to != received.end(), "weight update {}: {}: rank {} sent it, no rank reports it",
             version, from.tensor, from.rank);
    TD_CHECK(to->second.sum == from.sum,
             "weight update {}: {}: checksum {} at trainer rank {}, {} at engine rank {}; the "
             "engine did not swap",
             version, from.tensor, from.sum, from.rank, to->second.sum, to->second.rank);
  }
  TD_CHECK(sent.size() == received.size(), "weight update {}: {} boxes sent, {} received", version,
           sent.size(), received.size());
  return static_cast<std::int64_t>(sent.size());
}

}  // namespace

UpdateClient::Answers UpdateClient::call(const std::string& path, std::int64_t version,
                                         Deadline deadline) {
  std::vector<http::Call> calls;
  for (const auto& address : ranks_)
    calls.push_back(
        {.address = address, .path = path, .body = Json{{"weight_version", version}}.dump()});
  const auto bodies = http::call_all(fetcher_, calls, deadline);
  Answers answers;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    answers.sources.push_back(ranks_[i].where(path));
    answers.json.push_back(parse_json(bodies[i], answers.sources.back()));
  }
  return answers;
}

UpdateTimes UpdateClient::update(std::int64_t version, bool since_write, Deadline deadline,
                                 const std::function<void()>& before_swap) {
  const double start = monotonic_seconds();
  const auto [moved, sources] = call("/weights/move", version, deadline);
  UpdateTimes times;
  double waited = 0;
  for (std::size_t r = 0; r < moved.size(); ++r) {
    const auto most = [&moved = moved, &sources = sources, r](double& into, const char* key) {
      into = std::max(into, require<double>(moved[r], key, sources[r]));
    };
    most(waited, "waited_seconds");
    most(times.announce_seconds, "announce_seconds");
    most(times.move_seconds, "move_seconds");
    most(times.verify_seconds, "verify_seconds");
    times.total_bytes += require<std::int64_t>(moved[r], "total_bytes", sources[r]);
    times.moved_bytes += require<std::int64_t>(moved[r], "moved_bytes", sources[r]);
    times.decoded_tokens += require<std::int64_t>(moved[r], "decoded_tokens", sources[r]);
  }
  times.num_verified = verify(moved, sources, version);
  const double pause_start = monotonic_seconds();
  if (before_swap) before_swap();
  const double swap_start = monotonic_seconds();
  if (before_swap) times.pause_seconds = swap_start - pause_start;
  call("/weights/swap", version, deadline);
  times.swap_seconds = monotonic_seconds() - swap_start;
  times.seconds = (since_write ? waited : 0) + monotonic_seconds() - start;
  return times;
}

std::int64_t UpdateClient::check(std::int64_t version, Deadline deadline) {
  const auto [answers, sources] = call("/weights/check", version, deadline);
  for (std::size_t r = 0; r < answers.size(); ++r) {
    const Json served = require<Json>(answers[r], "weight_version", sources[r]);
    TD_CHECK(served.is_null() || served == version,
             "weight check: engine rank {} serves version {}, the trainer's is {}", r,
             dump_json(served), version);
  }
  const auto fresh = ends(answers, sources, "fresh"), served = ends(answers, sources, "served");
  for (const auto& [box, engine] : served) {
    const auto from = fresh.find(box);
    TD_CHECK(from != fresh.end(), "weight check: {}: engine rank {} serves it, no trainer has it",
             engine.tensor, engine.rank);
    TD_CHECK(
        from->second.sum == engine.sum,
        "weight check: version {}: {}: engine rank {} serves checksum {}, the master weights of "
        "trainer rank {} give {}",
        version, engine.tensor, engine.rank, engine.sum, from->second.rank, from->second.sum);
  }
  TD_CHECK(fresh.size() == served.size(), "weight check: {} boxes at trainers, {} at engines",
           fresh.size(), served.size());
  return static_cast<std::int64_t>(served.size());
}

}  // namespace tandem
