// Dynamic sampling (DAPO, Yu et al. 2025): which groups are worth training on. A filter judges
// whole groups and keeps or drops them whole; nothing here sees a single sample by itself.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

enum class GroupFilter { none, reward_nonzero_std, no_aborted };

// The built-in filter of --dynamic-sampling-filter-path, whose last name decides
// ("check_reward_nonzero_std", "check_no_aborted"); nothing: a user's function.
std::optional<GroupFilter> parse_group_filter(std::string_view path);

// What a filter sees of a sample.
struct JudgedSample {
  std::uint64_t prompt_id = 0;
  double value = 0;       // the reward, or its part named by --dynamic-sampling-reward-key
  bool finished = true;   // false: aborted or failed
  bool has_value = true;  // false: failed, so it says nothing about its group's spread
};

struct GroupVerdict {
  std::uint64_t prompt_id = 0;
  bool keep = true;
  std::string reason;  // of a dropped group, as Miles names it: "zero_std_1.0"
};

// One verdict a group, in the order in which the groups first appear. reward_nonzero_std keeps a
// group whose values are not all equal (max > min, not a standard deviation of rounding errors;
// samples without a value aside, as in the group's mean); no_aborted one whose samples are all
// finished.
std::vector<GroupVerdict> judge_groups(std::span<const JudgedSample> samples, GroupFilter filter);

}  // namespace tandem
