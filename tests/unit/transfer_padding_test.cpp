// Boxes between arenas of GPUs as the one launch copies them, here in host memory: with the padding
// behind a storage where both ends have some. Every row arrives, and no byte of another row or
// storage is read or written, whatever the two ends' cuts.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "base/text.h"
#include "model/shard.h"
#include "transfer/pieces.h"
#include "unit/tiny_llama.h"

namespace tandem {
namespace {

constexpr std::uint8_t kSourcePadding = 0x77, kUntouched = 0xEE;  // values are below 0x40

// Host memory that begins at a page, as an arena does.
struct Pages {
  explicit Pages(std::int64_t bytes, std::uint8_t fill)
      : room(static_cast<std::size_t>(bytes + kArenaAlignment)) {
    auto at = reinterpret_cast<std::uintptr_t>(room.data());
    at = (at + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
    data = reinterpret_cast<std::uint8_t*>(at);
    std::memset(data, fill, static_cast<std::size_t>(bytes));
  }
  std::vector<std::uint8_t> room;
  std::uint8_t* data = nullptr;
};

std::int64_t row_bytes(const ArenaLayout& layout, const ArenaEntry& e) {
  return layout.storages[e.storage].cols * (layout.element == Element::f32 ? 4 : 2);
}

// Rows of an entry get what their place in the Hugging Face tensor says.
void fill_rows(const ArenaLayout& layout, const ArenaEntry& e, std::int64_t row, std::int64_t rows,
               std::uint8_t* arena) {
  const std::int64_t width = row_bytes(layout, e);
  std::uint8_t* at = arena + layout.storages[e.storage].offset_bytes + (e.row_begin + row) * width;
  const std::size_t name = std::hash<std::string>{}(e.hf_name);
  for (std::int64_t i = 0; i < rows * width; ++i)
    at[i] = static_cast<std::uint8_t>(
        (name + 7u * static_cast<std::size_t>((e.global_row + row) * width + i)) % 61);
}

void expect_boxes_keep_apart(const std::vector<ArenaLayout>& sources,
                             const std::vector<ArenaLayout>& targets) {
  std::vector<TransferSide> from, to;
  for (const ArenaLayout& l : sources) from.push_back({&l, 0, false});
  for (const ArenaLayout& l : targets) to.push_back({&l, 0, false});
  std::vector<Pages> source_pages, target_pages, want;
  for (const ArenaLayout& l : sources) {
    source_pages.emplace_back(l.bytes, kSourcePadding);
    for (const ArenaEntry& e : l.entries) fill_rows(l, e, 0, e.rows, source_pages.back().data);
  }
  for (const ArenaLayout& l : targets) {
    target_pages.emplace_back(l.bytes, kUntouched);
    want.emplace_back(l.bytes, kUntouched);
  }
  const TransferPlan plan = make_transfer_plan(from, to);
  std::int64_t boxes_with_padding = 0, rows = 0;
  for (const TransferBox& b : plan.boxes) {
    const ArenaLayout& source = sources[b.source_rank];
    const ArenaLayout& target = targets[b.target_rank];
    const ArenaEntry& e = target.entries[b.target_entry];
    const ArenaStorage& storage = target.storages[e.storage];
    std::uint8_t* const memory = target_pages[b.target_rank].data;
    std::uint8_t* const wanted = want[b.target_rank].data;
    SCOPED_TRACE(fmt::format("{} rows {} to {}", e.hf_name, b.target_row, b.target_row + b.rows));
    const BytesCopy copy =
        device_copy(view_entry(source, source_pages[b.source_rank].data, b.source_entry),
                    b.source_row, b.rows, view_entry(target, memory, b.target_entry), b.target_row);
    // It reads no further than the source storage's last page.
    const ArenaStorage& s = source.storages[source.entries[b.source_entry].storage];
    ASSERT_LE(
        static_cast<const std::uint8_t*>(copy.from) + copy.bytes,
        source_pages[b.source_rank].data + round_up(s.offset_bytes + s.bytes, kArenaAlignment));
    std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.bytes));
    fill_rows(target, e, b.target_row, b.rows, wanted);
    rows += b.rows;
    // Behind the storage lies nobody's memory, if the box ends where the storage does.
    if (e.row_begin + b.target_row + b.rows == storage.rows) {
      const std::int64_t end = storage.offset_bytes + storage.bytes;
      const std::int64_t padding = round_up(end, kArenaAlignment) - end;
      boxes_with_padding += copy.bytes > b.rows * row_bytes(target, e);
      std::memcpy(wanted + end, memory + end, static_cast<std::size_t>(padding));
    }
    ASSERT_EQ(std::memcmp(memory, wanted, static_cast<std::size_t>(target.bytes)), 0);
  }
  std::int64_t all_rows = 0;
  for (const ArenaLayout& l : targets)
    for (const ArenaEntry& e : l.entries) all_rows += e.rows;
  EXPECT_EQ(rows, all_rows);
  EXPECT_GT(boxes_with_padding, 0);
}

TEST(DeviceCopy, RowsArriveAndNeighboursStay) {
  for (const Element element : {Element::f32, Element::bf16})
    for (const std::int64_t shards : {1, 2, 3, 40})
      for (const std::int64_t parts : {1, 2, 4}) {
        SCOPED_TRACE(fmt::format("{} shards to {} parts", shards, parts));
        const ArenaLayout whole = make_arena_layout(tiny_llama(), element, 0, 1, Place::cuda);
        std::vector<ArenaLayout> sources, targets;
        for (const FlatRange& range : shard_ranges(whole, shards))
          sources.push_back(shards == 1 ? whole : make_shard_layout(whole, range));
        for (std::int64_t r = 0; r < parts; ++r)
          targets.push_back(make_arena_layout(tiny_llama(), element, r, parts, Place::cuda));
        expect_boxes_keep_apart(sources, targets);
      }
}

// A whole arena to another one is a single run of bytes, all of it.
TEST(DeviceCopy, BoxesOfAWholeArenaFollowEachOther) {
  const ArenaLayout whole = make_arena_layout(tiny_llama(), Element::bf16, 0, 1, Place::cuda);
  const Pages source(whole.bytes, kSourcePadding), target(whole.bytes, kUntouched);
  std::int64_t at = 0;
  for (const TransferBox& b :
       make_transfer_plan({{&whole, 0, false}}, {{&whole, 0, false}}).boxes) {
    const BytesCopy copy =
        device_copy(view_entry(whole, source.data, b.source_entry), b.source_row, b.rows,
                    view_entry(whole, target.data, b.target_entry), b.target_row);
    EXPECT_EQ(copy.from, source.data + at);
    EXPECT_EQ(copy.to, target.data + at);
    at += copy.bytes;
  }
  EXPECT_EQ(at, whole.bytes);
}

}  // namespace
}  // namespace tandem
