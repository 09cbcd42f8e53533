// FsdpTrainer's state to disk and back: the rank's range of master weights, moments and a reference
// that moves, as pieces of Hugging Face tensors, so that a checkpoint does not remember how many
// ranks wrote it. Nothing here is collective, so a rank that fails leaves none waiting.
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
const std::string kReference = "reference.";

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

// Elements [begin, begin + out.size()) of an entry, counted row-major from its first row here.
void read_elements(const Arena& arena, const ArenaEntry& e, std::int64_t begin,
                   std::span<float> out) {
  const std::int64_t cols = arena.layout().storages[e.storage].cols;
  const std::int64_t end = begin + static_cast<std::int64_t>(out.size());
  const std::int64_t row = begin / cols, rows = (end + cols - 1) / cols - row;
  std::vector<float> whole(static_cast<std::size_t>(rows * cols));
  arena.read_rows(e, row, rows, whole.data());
  std::copy_n(whole.begin() + (begin - row * cols), out.size(), out.begin());
}

void load_reference(const ShardReader& reader, Arena& arena) {
  std::vector<float> values;
  for (const ArenaEntry& e : arena.layout().entries) {
    const std::int64_t cols = arena.layout().storages[e.storage].cols;
    const std::int64_t step =
        std::max<std::int64_t>(kPanel, kElementsAtOnce / cols / kPanel * kPanel);
    for (std::int64_t row = 0; row < e.rows; row += step) {
      const std::int64_t rows = std::min(step, e.rows - row);
      values.resize(static_cast<std::size_t>(rows * cols));
      reader.read(kReference + e.hf_name, e.hf_shape, (e.global_row + row) * cols, values);
      arena.write_rows(e, row, rows, values.data());
    }
  }
  arena.set_version(arena.version() + 1);
}

}  // namespace

// Whether the reference is state: it becomes the present model now and then.
bool FsdpTrainer::reference_moves() const {
  return reference_ && setup_.algorithm.ref_update_interval.has_value();
}

// What this rank writes of the reference: as much as of the masters, or all that it holds.
std::vector<FlatPiece> FsdpTrainer::reference_pieces() const {
  const ArenaLayout& held = reference_weights_->arena.layout();
  return weights_.layers ? flat_pieces(held, 0, held.flat_elements)
                         : flat_pieces(held, optimizer_.begin(), optimizer_.end());
}

void FsdpTrainer::save_hf(const std::string& target) {
  std::vector<FlatRange> wanted(static_cast<std::size_t>(group_.size()));
  wanted.front() = {0, layout().flat_elements};
  std::vector<float> flat(static_cast<std::size_t>(wanted[group_.rank()].size()));
  optimizer_.gather(wanted, flat);
  if (group_.rank() == 0)
    save_flat(target, weights_.folder.path(), weights_.folder.config(), layout(), flat);
  group_.barrier();
}

ShardFile FsdpTrainer::save(const std::string& folder, const SaveOptions& options) {
  const auto flat = flat_pieces(layout(), optimizer_.begin(), optimizer_.end());
  const auto parts = parts_of(optimizer_, options.optimizer);
  std::vector<ShardPiece> pieces;
  const auto add = [&](const std::string& prefix, const std::vector<FlatPiece>& from) {
    for (const FlatPiece& p : from)
      pieces.push_back({.name = prefix + p.entry->hf_name,
                        .shape = p.entry->hf_shape,
                        .offset = p.offset,
                        .elements = p.elements});
  };
  for (const Part& part : parts) add(part.prefix, flat);
  std::vector<FlatPiece> reference;
  if (options.reference && reference_moves()) reference = reference_pieces();
  add(kReference, reference);
  return write_shard(folder, group_.rank(), group_.size(), pieces,
                     [&](std::size_t piece, std::int64_t begin, std::span<float> out) {
                       if (piece < parts.size() * flat.size()) {
                         const FlatPiece& p = flat[piece % flat.size()];
                         parts[piece / flat.size()].values->read(
                             p.begin - optimizer_.begin() + begin, out);
                       } else {
                         const FlatPiece& p = reference[piece - parts.size() * flat.size()];
                         read_elements(reference_weights_->arena, *p.entry,
                                       p.begin - p.entry->flat_begin + begin, out);
                       }
                     });
}

void FsdpTrainer::load(const std::string& folder, const SaveOptions& options) {
  const CheckpointState state = read_checkpoint(folder);
  const ShardReader reader(folder, state.files);
  std::vector<float> values;
  for (const Part& part : parts_of(optimizer_, options.optimizer))
    for (const FlatPiece& p : flat_pieces(layout(), optimizer_.begin(), optimizer_.end())) {
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
  // A checkpoint without a reference is of a run whose reference stayed what --ref-load names.
  if (options.reference && reference_moves() &&
      reader.has(kReference + layout().entries.front().hf_name))
    load_reference(reader, reference_weights_->arena);
}

}  // namespace tandem
