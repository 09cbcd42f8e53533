// Placement: which rank does what for every shape of request, and what is refused with numbers.
#include "driver/placement.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace tandem {
namespace {

struct Shape {
  bool colocate;
  int trainers, engine_ranks, width;
  const char* want;  // "T0E0.0": trainer 0 and engine 0's rank 0
};

std::string draw(const Placement& p) {
  std::string text;
  for (const RankRole& r : p.ranks) {
    if (!text.empty()) text += " ";
    if (r.trains()) text += fmt::format("T{}", r.trainer_rank);
    if (r.serves()) text += fmt::format("E{}.{}", r.engine, r.engine_rank);
  }
  return text;
}

ClusterConfig request(const Shape& s) {
  ClusterConfig c;
  c.colocate = s.colocate;
  c.actor_num_gpus_per_node = s.trainers;
  c.rollout_num_gpus = s.engine_ranks;
  c.rollout_num_gpus_per_engine = s.width;
  return c;
}

TEST(Placement, LaysTrainersAndEngines) {
  for (const Shape& s : {
           Shape{true, 1, 1, 1, "T0E0.0"},
           Shape{true, 2, 2, 1, "T0E0.0 T1E1.0"},
           Shape{true, 4, 4, 2, "T0E0.0 T1E0.1 T2E1.0 T3E1.1"},
           Shape{true, 1, 3, 1, "T0E0.0 E1.0 E2.0"},  // surplus engines get ranks of their own
           Shape{true, 2, 1, 1, "T0E0.0 T1"},
           Shape{false, 1, 1, 1, "T0 E0.0"},
           Shape{false, 2, 2, 2, "T0 T1 E0.0 E0.1"},
           Shape{false, 2, 3, 1, "T0 T1 E0.0 E1.0 E2.0"},
       }) {
    const Placement p = make_placement(request(s), {});
    EXPECT_EQ(draw(p), s.want);
    EXPECT_EQ(p.num_trainers, s.trainers);
    EXPECT_EQ(p.num_engines, s.engine_ranks / s.width);
    for (const RankRole& r : p.ranks) EXPECT_EQ(r.engine_width, r.serves() ? s.width : 0);
    EXPECT_EQ(p.all_colocated(), s.colocate && s.engine_ranks <= s.trainers);
    // And over the wire.
    const RankAssignment a = assignment_from_json(to_json(RankAssignment{0, p, "127.0.0.1", 1234}));
    EXPECT_EQ(draw(a.placement), s.want);
    EXPECT_EQ(a.store_port, 1234);
  }
}

TEST(Placement, EnginesOfDifferentWidth) {
  ClusterConfig c = request({false, 1, 3, 1, ""});
  c.rollout_num_gpus_of_engines = {2, 1};
  const Placement p = make_placement(c, {});
  EXPECT_EQ(draw(p), "T0 E0.0 E0.1 E1.0");
  EXPECT_EQ(p.num_engines, 2);
  EXPECT_EQ(p.engine_ranks(), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(p.ranks[2].engine_width, 2);
  EXPECT_EQ(p.ranks[3].engine_width, 1);
  EXPECT_NE(p.describe().find("rank 2 (node 0): engine 0 of 2, part 1 of 2"), std::string::npos);
  c.colocate = true;
  EXPECT_EQ(draw(make_placement(c, {})), "T0E0.0 E0.1 E1.0");
}

std::string fault(const Shape& s, const Resources& r) {
  try {
    make_placement(request(s), r);
  } catch (const Error& e) {
    return e.what();
  }
  return {};
}

TEST(Placement, RefusesWithHaveAndNeed) {
  const std::string few = fault({false, 2, 3, 1, ""}, {.num_nodes = 1, .gpus_per_node = 4});
  EXPECT_NE(few.find("5 ranks wanted"), std::string::npos) << few;
  EXPECT_NE(few.find("4 GPUs there"), std::string::npos) << few;
  EXPECT_EQ(fault({true, 2, 2, 1, ""}, {.num_nodes = 1, .gpus_per_node = 2}), "");
  const std::string uneven = fault({false, 1, 3, 2, ""}, {});
  EXPECT_NE(uneven.find("3 engine ranks"), std::string::npos) << uneven;
}

}  // namespace
}  // namespace tandem
