// Learning rates of a run of 10 steps, worked out by hand from Megatron's formulas.
#include "trainer/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

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

// Steps 0 to 10 of the further styles (lr 1, min_lr 0.1), from OptimizerParamScheduler.get_lr.
TEST(Schedule, FurtherStyles) {
  OptimizerConfig c;
  c.lr = 1.0;
  c.min_lr = 0.1;
  c.lr_decay_style = LrDecayStyle::inverse_square_root;
  c.lr_warmup_iters = 4;
  EXPECT_DOUBLE_EQ(learning_rate(c, 2, 10), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(c, 4, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(c, 9, 10), std::sqrt(4.0 / 9.0));
  EXPECT_DOUBLE_EQ(learning_rate(c, 11, 10), 0.1);
  c.lr_warmup_iters = 0;
  EXPECT_DOUBLE_EQ(learning_rate(c, 0, 10), 1.0);
  EXPECT_DOUBLE_EQ(learning_rate(c, 9, 10), 1.0 / 3);

  c.lr_decay_style = LrDecayStyle::wsd;
  c.lr_wsd_decay_iters = 4;  // steps 7 to 10
  struct Case {
    WsdDecayStyle style;
    double at8, at9;  // half and three quarters of the decay are over
  };
  for (const Case& w : {Case{WsdDecayStyle::linear, 0.5, 0.25},
                        Case{WsdDecayStyle::cosine, 0.5, 0.1464466094067262},
                        Case{WsdDecayStyle::exponential, 0.41421356237309515, 0.18920711500272103},
                        Case{WsdDecayStyle::minus_sqrt, 0.2928932188134524, 0.1339745962155614}}) {
    c.lr_wsd_decay_style = w.style;
    EXPECT_DOUBLE_EQ(learning_rate(c, 0, 10), 1.0);
    EXPECT_DOUBLE_EQ(learning_rate(c, 6, 10), 1.0);
    EXPECT_NEAR(learning_rate(c, 8, 10), 0.1 + 0.9 * w.at8, 1e-12);
    EXPECT_NEAR(learning_rate(c, 9, 10), 0.1 + 0.9 * w.at9, 1e-12);
    EXPECT_NEAR(learning_rate(c, 10, 10), 0.1, 1e-12);
  }
}

TEST(Schedule, WarmUpAsAShareOfTheDecay) {
  OptimizerConfig c;
  c.lr = 1.0;
  c.lr_warmup_fraction = 0.25;
  c.lr_decay_style = LrDecayStyle::linear;
  EXPECT_DOUBLE_EQ(learning_rate(c, 1, 10), 0.4);
  EXPECT_DOUBLE_EQ(learning_rate(c, 10, 10), 0.0);
  EXPECT_DOUBLE_EQ(learning_rate(c, 4, 10), 0.8);
  c.lr_decay_iters = 8;
  EXPECT_DOUBLE_EQ(learning_rate(c, 1, 10), 0.5);
}

}  // namespace
}  // namespace tandem
