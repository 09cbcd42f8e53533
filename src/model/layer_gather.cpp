// Units of transfer, the order of gathers, and the thread that makes them.
#include "model/layer_gather.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/check.h"
#include "base/clock.h"
#include "ops/kernels/kernels.h"

namespace tandem {

LayerGather::LayerGather(const ArenaLayout& whole, const Arena& shard, Group& group,
                         std::int64_t num_slots)
    : shard_(shard),
      group_(group),
      num_slots_(num_slots),
      ranges_(shard_ranges(whole, group.size())),
      arena_(make_slot_layout(whole, num_slots)),
      held_(static_cast<std::size_t>(num_slots), -1) {
  TD_CHECK(whole.place == Place::cpu, "{}", "sharded weights: only on the CPU so far");
  TD_CHECK(shard.layout().flat_elements == ranges_[static_cast<std::size_t>(group.rank())].size(),
           "sharded weights: rank {} of {} holds {} elements, {} wanted", group.rank(),
           group.size(), shard.layout().flat_elements,
           ranges_[static_cast<std::size_t>(group.rank())].size());
  arena_.set_version(-1);
  std::optional<std::int64_t> last;
  for (std::size_t i = 0; i < whole.storages.size(); ++i) {
    const auto layer = layer_of(whole.storages[i].name);
    std::vector<Unit>& units = layer ? layers_ : rest_;
    if (i == 0 || layer != last) units.emplace_back();
    last = layer;
    add(units.back(), arena_.layout().storages[i], whole.storages[i]);
  }
}

// A storage's parts by owner. Rows that a rank owns are whole panels, so they are as many bytes in
// its shard as here, in the same order.
void LayerGather::add(Unit& unit, const ArenaStorage& slot, const ArenaStorage& whole) {
  const std::int64_t row_count =
      whole.layout == Layout::panels ? round_up(whole.rows, kPanel) : whole.rows;
  const std::int64_t row_bytes = whole.bytes / row_count;
  for (int r = 0; r < group_.size(); ++r) {
    const FlatRange range = ranges_[static_cast<std::size_t>(r)];
    const std::int64_t begin = std::max(range.begin, whole.flat_begin);
    const std::int64_t end = std::min(range.end, whole.flat_begin + whole.rows * whole.cols);
    if (begin >= end) continue;
    const std::int64_t first = (begin - whole.flat_begin) / whole.cols;
    const std::int64_t last = (end - whole.flat_begin) / whole.cols;
    const std::int64_t to = slot.offset_bytes + first * row_bytes;
    const std::int64_t bytes = (last == whole.rows ? row_count - first : last - first) * row_bytes;
    if (!unit.stretches.empty() && unit.stretches.back().owner == r)
      unit.stretches.back().end = to + bytes;
    else
      unit.stretches.push_back({r, to, to + bytes});
    if (r != group_.rank()) continue;
    const ArenaStorage& own =
        shard_.layout().storages[static_cast<std::size_t>(shard_.storage_index(whole.name))];
    unit.copies.push_back({own.offset_bytes, to, bytes});
  }
}

void LayerGather::fetch(const Unit& unit) {
  auto* const memory = static_cast<std::byte*>(arena_.memory().data());
  const auto* const own = static_cast<const std::byte*>(shard_.memory().data());
  for (const Copy& c : unit.copies)
    std::memcpy(memory + c.to, own + c.from, static_cast<std::size_t>(c.bytes));
  for (const Stretch& s : unit.stretches)
    group_.broadcast({memory + s.begin, static_cast<std::size_t>(s.end - s.begin)}, s.owner);
}

// What it throws comes out of the future.
std::future<void> LayerGather::start(const Unit& unit) {
  auto task = std::make_shared<std::packaged_task<void()>>([this, &unit] { fetch(unit); });
  std::future<void> done = task->get_future();
  thread_.post([task] { (*task)(); });
  return done;
}

void LayerGather::wait_for(std::future<void>& done) {
  const double start = monotonic_seconds();
  done.get();
  wait_seconds_ += monotonic_seconds() - start;
}

void LayerGather::begin(const std::vector<std::vector<std::int64_t>>& passes) {
  TD_CHECK(visit_ + 1 == std::ssize(visits_) && pass_ == pass_ends_.size(),
           "sharded weights: {} of {} passes over the layers were made before the next ones begin",
           pass_, pass_ends_.size());
  if (arena_.version() != shard_.version()) {
    std::vector<std::future<void>> parts;
    for (const Unit& unit : rest_) parts.push_back(start(unit));
    for (auto& part : parts) wait_for(part);
    std::ranges::fill(held_, -1);
    arena_.set_version(shard_.version());
  }
  visits_.clear();
  pass_ends_.clear();
  gathers_.clear();
  visit_ = -1;
  pass_ = started_ = 0;
  std::vector<std::int64_t> read(held_.size(), -1);  // the last visit of each slot
  for (const auto& pass : passes) {
    for (const std::int64_t layer : pass) {
      if (!visits_.empty() && visits_.back().layer == layer) continue;
      const auto slot = static_cast<std::size_t>(layer % num_slots_);
      Visit visit{.layer = layer};
      if (held_[slot] != layer) {
        visit.gather = std::ssize(gathers_);
        gathers_.push_back({.layer = layer, .after = read[slot], .done = {}});
        held_[slot] = layer;
      }
      read[slot] = std::ssize(visits_);
      visits_.push_back(visit);
    }
    pass_ends_.push_back(std::ssize(visits_) - 1);
  }
}

// Goes on to the next layer. Whoever computes is done with the one before, so gathers into its slot
// may start.
void LayerGather::advance() {
  TD_CHECK(visit_ + 1 < std::ssize(visits_), "{}",
           "sharded weights: a layer is needed after the last pass");
  ++visit_;
  for (; started_ < gathers_.size() && gathers_[started_].after < visit_; ++started_)
    gathers_[started_].done = start(layers_[static_cast<std::size_t>(gathers_[started_].layer)]);
  const std::int64_t gather = visits_[static_cast<std::size_t>(visit_)].gather;
  if (gather >= 0) wait_for(gathers_[static_cast<std::size_t>(gather)].done);
}

void LayerGather::need(std::int64_t layer) {
  if (visit_ >= 0 && visits_[static_cast<std::size_t>(visit_)].layer == layer) return;
  advance();
  TD_CHECK(visits_[static_cast<std::size_t>(visit_)].layer == layer,
           "sharded weights: layer {} is needed, layer {} comes next in the passes", layer,
           visits_[static_cast<std::size_t>(visit_)].layer);
}

void LayerGather::end_pass() {
  TD_CHECK(pass_ < pass_ends_.size(), "sharded weights: all {} passes are made", pass_);
  while (visit_ < pass_ends_[pass_]) advance();
  ++pass_;
}

}  // namespace tandem
