// Reading a rotary embedding from config.json: the older hub style (rope_theta, rope_scaling, with
// original_max_position_embeddings and partial_rotary_factor beside them) and that of transformers
// 5 (rope_parameters, flat or one object a layer type). Both give the same RopeConfig; where they
// are there both and disagree, that is a fault.
#pragma once

#include <string>

#include "model/config_reader.h"
#include "model/rope_config.h"

namespace tandem {

struct ModelConfig;

// What a family says about its rotary embedding; the defaults are those of most.
struct RopeRules {
  std::string layer_type = {};              // which object of rope_parameters; empty: it is flat
  std::string theta_key = "rope_theta";     // where the older style has the base
  double theta = 10000.0;                   // where the file has none
  bool scaled = true;                       // the older style's rope_scaling counts
  bool partial = false;                     // the config may ask to turn only a part of each head
  double partial_factor = 1.0;              // where the file has none
  std::int64_t original_max_positions = 0;  // where the file has none; 0: max_position_embeddings
};

// Head and position sizes of `config` must have been read.
RopeConfig read_rope(ConfigReader& reader, const ModelConfig& config, const RopeRules& rules = {});

}  // namespace tandem
