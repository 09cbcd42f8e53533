// A model folder of random weights for GPU tests: the same in every process, gone with the object.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/json.h"
#include "base/safetensors.h"

namespace tandem {

// With heads of 64, which FlashInfer's kernels take.
class RandomModel {
 public:
  explicit RandomModel(std::int64_t head_dim = 64)
      : folder_(std::filesystem::temp_directory_path() /
                ("tandem-gpu-rank-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
    const Json config{{"architectures", {"LlamaForCausalLM"}},
                      {"model_type", "llama"},
                      {"vocab_size", kVocab},
                      {"hidden_size", kHidden},
                      {"intermediate_size", kInner},
                      {"num_hidden_layers", kLayers},
                      {"num_attention_heads", 4},
                      {"num_key_value_heads", 2},
                      {"head_dim", head_dim},
                      {"rms_norm_eps", 1e-5},
                      {"max_position_embeddings", 1024},
                      {"rope_theta", 10000.0},
                      {"tie_word_embeddings", true},
                      {"hidden_act", "silu"},
                      {"torch_dtype", "float32"},
                      {"eos_token_id", 2},
                      {"bos_token_id", 1}};
    write_file_atomic(path() + "/config.json", dump_json(config));
    add("model.embed_tokens.weight", {kVocab, kHidden});
    add("model.norm.weight", {kHidden});
    for (std::int64_t layer = 0; layer < kLayers; ++layer) {
      const std::string p = "model.layers." + std::to_string(layer) + ".";
      add(p + "input_layernorm.weight", {kHidden});
      add(p + "post_attention_layernorm.weight", {kHidden});
      add(p + "self_attn.q_proj.weight", {4 * head_dim, kHidden});
      add(p + "self_attn.k_proj.weight", {2 * head_dim, kHidden});
      add(p + "self_attn.v_proj.weight", {2 * head_dim, kHidden});
      add(p + "self_attn.o_proj.weight", {kHidden, 4 * head_dim});
      add(p + "mlp.gate_proj.weight", {kInner, kHidden});
      add(p + "mlp.up_proj.weight", {kInner, kHidden});
      add(p + "mlp.down_proj.weight", {kHidden, kInner});
    }
    std::vector<TensorView> tensors;
    for (std::size_t i = 0; i < names_.size(); ++i)
      tensors.push_back({names_[i].c_str(), Dtype::f32, shapes_[i], bytes_of(values_[i])});
    write_file_atomic(path() + "/model.safetensors", encode_safetensors(tensors, {}));
  }
  ~RandomModel() { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_; }

 private:
  static constexpr std::int64_t kVocab = 320, kHidden = 256, kInner = 512, kLayers = 2;
  void add(const std::string& name, std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t n : shape) count *= n;
    std::normal_distribution<float> normal(0.0f, 0.08f);
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = normal(random_) + (shape.size() == 1 ? 1.0f : 0.0f);
    names_.push_back(name);
    shapes_.push_back(std::move(shape));
    values_.push_back(std::move(values));
  }
  std::filesystem::path folder_;
  std::mt19937_64 random_{7};
  std::vector<std::string> names_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<std::vector<float>> values_;
};

}  // namespace tandem
