// Learning rates of a run of 10 steps, worked out by hand from Megatron's formulas.
#include "trainer/schedule.h"

#include <gtest/gtest.h>

namespace tandem {
namespace {

TEST(Schedule, WarmsUpAndDecays) {
  OptimizerConfig c;
  c.lr = 1.0;
  EXPECT_EQ(learning_rate(c, 0, 10), 1.0);
  EXPECT_EQ(learning_rate(c, 9, 10), 1.0);
  c.lr_warmup_iters = 4;
  EXPECT_EQ(learning_rate(c, 0, 10), 0.0);
  EXPECT_EQ(learning_rate(c, 1, 10), 0.25);
  EXPECT_EQ(learning_rate(c, 4, 10), 1.0);
  c.lr_warmup_init = 0.2;
  EXPECT_DOUBLE_EQ(learning_rate(c, 2, 10), 0.6);
  c.lr_decay_style = LrDecayStyle::linear;
  c.min_lr = 0.1;
  EXPECT_DOUBLE_EQ(learning_rate(c, 7, 10), 0.1 + 0.9 * 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(c, 10, 10), 0.1);
  c.lr_decay_style = LrDecayStyle::cosine;
  EXPECT_NEAR(learning_rate(c, 7, 10), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(c, 5, 10), 0.1 + 0.9 * 0.9330127018922193, 1e-12);
  c.lr_decay_iters = 6;
  EXPECT_DOUBLE_EQ(learning_rate(c, 8, 10), 0.1);
}

}  // namespace
}  // namespace tandem
