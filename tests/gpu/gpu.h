// For tests that need a GPU: starts it, or skips the test and says why.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>

#include "base/process.h"
#include "ops/place.h"

#define TD_NEED_GPU()                                                   \
  if (num_gpus() == 0) GTEST_SKIP() << "not run: 0 GPUs";               \
  if (!std::filesystem::exists(cuda_part_path()))                       \
    GTEST_SKIP() << "not run: " << cuda_part_path() << " is not built"; \
  load_cuda_part()
