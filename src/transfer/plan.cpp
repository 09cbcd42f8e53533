// For each target entry, row by row, the holder that serves it.
#include "transfer/plan.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/check.h"
#include "base/text.h"

namespace tandem {
namespace {

struct Held {
  std::int64_t rank, entry, global_row, rows;
};

std::string show(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::int64_t element_bytes(const ArenaLayout& l) { return l.element == Element::f32 ? 4 : 2; }

// The holder of global row `row` that the rule picks: the target's own process, else one of the
// others, another for each entry.
const Held* holder(const std::vector<Held>& held, std::int64_t row,
                   const std::vector<TransferSide>& sources, std::int64_t process,
                   std::size_t entry) {
  std::vector<const Held*> found;
  for (const Held& h : held) {
    if (row < h.global_row || row >= h.global_row + h.rows) continue;
    if (sources[h.rank].process == process) return &h;
    found.push_back(&h);
  }
  return found.empty() ? nullptr : found[entry % found.size()];
}

}  // namespace

TransferPlan make_transfer_plan(const std::vector<TransferSide>& sources,
                                const std::vector<TransferSide>& targets) {
  std::map<std::string, std::vector<Held>> by_name;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    const auto& entries = sources[s].layout->entries;
    for (std::size_t e = 0; e < entries.size(); ++e)
      by_name[entries[e].hf_name].push_back({static_cast<std::int64_t>(s),
                                             static_cast<std::int64_t>(e), entries[e].global_row,
                                             entries[e].rows});
  }
  TransferPlan plan;
  std::set<std::string> taken;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const ArenaLayout& layout = *targets[t].layout;
    for (std::size_t e = 0; e < layout.entries.size(); ++e) {
      const ArenaEntry& target = layout.entries[e];
      const auto found = by_name.find(target.hf_name);
      TD_CHECK(found != by_name.end(), "{}: engine rank {} needs it, no trainer rank holds it",
               target.hf_name, t);
      taken.insert(target.hf_name);
      const std::int64_t cols = layout.storages[target.storage].cols;
      for (std::int64_t row = 0; row < target.rows;) {
        const Held* h =
            holder(found->second, target.global_row + row, sources, targets[t].process, e);
        TD_CHECK(h, "{}: engine rank {} needs row {}, no trainer rank holds it", target.hf_name, t,
                 target.global_row + row);
        const ArenaLayout& from = *sources[h->rank].layout;
        const ArenaEntry& source = from.entries[h->entry];
        TD_CHECK(source.hf_shape == target.hf_shape,
                 "{}: shape {} at trainer rank {}, {} at engine rank {}", target.hf_name,
                 show(source.hf_shape), h->rank, show(target.hf_shape), t);
        const std::int64_t first = target.global_row + row - h->global_row;
        const std::int64_t col = target.global_col - source.global_col;
        TD_CHECK(col >= 0 && col + cols <= from.storages[source.storage].cols,
                 "{}: engine rank {} needs columns [{}, {}), trainer rank {} does not hold them",
                 target.hf_name, t, target.global_col, target.global_col + cols, h->rank);
        TransferBox box{.source_rank = h->rank,
                        .target_rank = static_cast<std::int64_t>(t),
                        .source_entry = h->entry,
                        .target_entry = static_cast<std::int64_t>(e),
                        .source_row = first,
                        .target_row = row,
                        .rows = std::min(target.rows - row, h->rows - first),
                        .source_col = col,
                        .row_elements = cols};
        box.in_place = targets[t].shares_arena && sources[h->rank].shares_arena &&
                       sources[h->rank].process == targets[t].process;
        const std::int64_t bytes = box.rows * cols * element_bytes(layout);
        plan.total_bytes += bytes;
        plan.moved_bytes += box.in_place ? 0 : bytes;
        row += box.rows;
        plan.boxes.push_back(box);
      }
    }
  }
  for (const auto& [name, held] : by_name)
    TD_CHECK(targets.empty() || taken.count(name),
             "{}: trainer rank {} holds it, no engine takes it", name, held.front().rank);
  return plan;
}

}  // namespace tandem
