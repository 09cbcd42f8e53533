// FsdpTrainer's state to disk and back: the rank's range of master weights and moments as pieces of
// Hugging Face tensors, so that a checkpoint does not remember how many ranks wrote it. Nothing
// here is collective, so a rank that fails leaves none waiting.
#include <algorithm>
#include <string>
#include <vector>

#include "base/check.h"
#include "checkpoint/checkpoints.h"
#include "checkpoint/weights.h"
#include "trainer/fsdp.h"

namespace tandem {
namespace {

constexpr std::int64_t kElementsAtOnce = 4 << 20;

struct Part {
  std::string prefix;  // of the tensor's name
  FlatBuffer* values;
};

std::vector<Part> parts_of(ShardedAdamW& optimizer, bool with_moments) {
  std::vector<Part> parts{{"master.", &optimizer.master()}};
  if (with_moments) {
    parts.push_back({"exp_avg.", &optimizer.exp_avg()});
    parts.push_back({"exp_avg_sq.", &optimizer.exp_avg_sq()});
  }
  return parts;
}

}  // namespace

void FsdpTrainer::save_hf(const std::string& target) {
  std::vector<float> flat(static_cast<std::size_t>(weights_.arena.layout().flat_elements));
  optimizer_.gather(flat);
  if (group_.rank() == 0)
    save_flat(target, weights_.folder.path(), weights_.folder.config(), weights_.arena.layout(),
              flat);
  group_.barrier();
}

ShardFile FsdpTrainer::save(const std::string& folder, const SaveOptions& options) {
  const auto flat = flat_pieces(weights_.arena.layout(), optimizer_.begin(), optimizer_.end());
  const auto parts = parts_of(optimizer_, options.optimizer);
  std::vector<ShardPiece> pieces;
  for (const Part& part : parts)
    for (const FlatPiece& p : flat)
      pieces.push_back({.name = part.prefix + p.entry->hf_name,
                        .shape = p.entry->hf_shape,
                        .offset = p.offset,
                        .elements = p.elements});
  return write_shard(folder, group_.rank(), group_.size(), pieces,
                     [&](std::size_t piece, std::int64_t begin, std::span<float> out) {
                       const FlatPiece& p = flat[piece % flat.size()];
                       parts[piece / flat.size()].values->read(p.begin - optimizer_.begin() + begin,
                                                               out);
                     });
}

void FsdpTrainer::load(const std::string& folder, const SaveOptions& options) {
  const CheckpointState state = read_checkpoint(folder);
  const ShardReader reader(folder, state.files);
  std::vector<float> values;
  for (const Part& part : parts_of(optimizer_, options.optimizer))
    for (const FlatPiece& p :
         flat_pieces(weights_.arena.layout(), optimizer_.begin(), optimizer_.end())) {
      const std::string name = part.prefix + p.entry->hf_name;
      TD_CHECK(
          reader.has(name) || part.values == &optimizer_.master(),
          "{}: no tensor '{}': it was saved with --no-save-optim; --no-load-optim goes on with "
          "the weights alone",
          folder, name);
      for (std::int64_t at = 0; at < p.elements; at += kElementsAtOnce) {
        values.resize(static_cast<std::size_t>(std::min(kElementsAtOnce, p.elements - at)));
        reader.read(name, p.entry->hf_shape, p.offset + at, values);
        part.values->write(p.begin - optimizer_.begin() + at, values);
      }
    }
  optimizer_.set_steps(options.optimizer ? state.optimizer_steps : 0);
}

}  // namespace tandem
