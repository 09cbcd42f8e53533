// The map as JSON and as text.
#include "cluster/placement.h"

#include <algorithm>

#include "base/check.h"

namespace tandem {
namespace {

constexpr const char* kSource = "rank assignment";

int number(const Json& json, const char* key) {
  return static_cast<int>(require<std::int64_t>(json, key, kSource));
}

}  // namespace

std::vector<int> Placement::engine_ranks() const {
  std::vector<int> out;
  for (const RankRole& r : ranks)
    if (r.serves()) out.push_back(r.rank);
  return out;
}

std::vector<int> Placement::trainer_ranks() const {
  std::vector<int> out(static_cast<std::size_t>(num_trainers), -1);
  for (const RankRole& r : ranks)
    if (r.trains()) out.at(static_cast<std::size_t>(r.trainer_rank)) = r.rank;
  return out;
}

bool Placement::all_colocated() const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [](const RankRole& r) { return r.trains() || !r.serves(); });
}

std::string Placement::describe() const {
  std::string text;
  for (const RankRole& r : ranks) {
    std::string parts;
    if (r.trains()) parts = fmt::format("trainer {} of {}", r.trainer_rank, num_trainers);
    if (r.serves()) {
      if (!parts.empty()) parts += ", ";
      parts += fmt::format("engine {} of {}", r.engine, num_engines);
      if (r.engine_width > 1)
        parts += fmt::format(", part {} of {}", r.engine_rank, r.engine_width);
    }
    text += fmt::format("{}rank {} (node {}): {}", text.empty() ? "" : "\n", r.rank, r.node, parts);
  }
  return text;
}

Json to_json(const RankAssignment& a) {
  Json ranks = Json::array();
  for (const RankRole& r : a.placement.ranks)
    ranks.push_back({{"rank", r.rank},
                     {"node", r.node},
                     {"trainer_rank", r.trainer_rank},
                     {"engine", r.engine},
                     {"engine_rank", r.engine_rank},
                     {"engine_width", r.engine_width}});
  return {{"rank", a.rank},
          {"ranks", std::move(ranks)},
          {"num_trainers", a.placement.num_trainers},
          {"num_engines", a.placement.num_engines},
          {"store_host", a.store_host},
          {"store_port", a.store_port}};
}

RankAssignment assignment_from_json(const Json& json) {
  RankAssignment a;
  a.rank = number(json, "rank");
  a.placement.num_trainers = number(json, "num_trainers");
  a.placement.num_engines = number(json, "num_engines");
  a.store_host = require<std::string>(json, "store_host", kSource);
  a.store_port = number(json, "store_port");
  for (const Json& r : require<Json>(json, "ranks", kSource))
    a.placement.ranks.push_back({.rank = number(r, "rank"),
                                 .node = number(r, "node"),
                                 .trainer_rank = number(r, "trainer_rank"),
                                 .engine = number(r, "engine"),
                                 .engine_rank = number(r, "engine_rank"),
                                 .engine_width = number(r, "engine_width")});
  TD_CHECK(a.rank >= 0 && a.rank < static_cast<int>(a.placement.ranks.size()),
           "{}: rank {} of {} ranks", kSource, a.rank, a.placement.ranks.size());
  return a;
}

}  // namespace tandem
