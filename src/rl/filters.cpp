// See filters.h.
#include "rl/filters.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <unordered_map>

namespace tandem {

std::optional<GroupFilter> parse_group_filter(std::string_view path) {
  if (path.empty()) return GroupFilter::none;
  const std::string_view name = path.substr(path.rfind('.') + 1);
  if (name == "check_reward_nonzero_std") return GroupFilter::reward_nonzero_std;
  if (name == "check_no_aborted") return GroupFilter::no_aborted;
  return std::nullopt;
}

std::vector<GroupVerdict> judge_groups(std::span<const JudgedSample> samples, GroupFilter filter) {
  struct Group {
    double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
    bool finished = true;
    bool spreads() const { return lowest < highest; }
    bool has_value() const { return lowest <= highest; }
  };
  std::vector<GroupVerdict> verdicts;
  std::vector<Group> groups;
  std::unordered_map<std::uint64_t, std::size_t> place;
  for (const JudgedSample& s : samples) {
    const auto [found, is_new] = place.try_emplace(s.prompt_id, groups.size());
    if (is_new) {
      groups.emplace_back();
      verdicts.push_back({.prompt_id = s.prompt_id, .keep = true, .reason = {}});
    }
    Group& group = groups[found->second];
    if (s.has_value) {
      group.lowest = std::min(group.lowest, s.value);
      group.highest = std::max(group.highest, s.value);
    }
    group.finished = group.finished && s.finished;
  }
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (filter == GroupFilter::reward_nonzero_std && !groups[i].spreads())
      verdicts[i] = {
          verdicts[i].prompt_id, false,
          groups[i].has_value() ? fmt::format("zero_std_{:.1f}", groups[i].lowest) : "no_reward"};
    if (filter == GroupFilter::no_aborted && !groups[i].finished)
      verdicts[i] = {verdicts[i].prompt_id, false, "group_has_aborted"};
  }
  return verdicts;
}

}  // namespace tandem
