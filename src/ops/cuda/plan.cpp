// Building a plan: all arrays in one host buffer, sent with one copy. A reserved plan, which a
// captured graph reads again and again, gives each array its full room, so that a later call's
// arrays lie where the first one's did.
#include "ops/cuda/plan.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "ops/cuda/attention.h"
#include "ops/cuda/kernels.h"

namespace tandem {

AttentionPlan::Reserved::~Reserved() {
  for (void* p : pinned)
    if (p) cudaFreeHost(p);
}

namespace cuda {
namespace {

// Arrays one after the other, each aligned to 16 bytes. Members of the plan are set once the
// buffer's place on the device is known.
class Packed {
 public:
  // `member` will point at the values; room for `capacity` of them at least.
  template <class T, class M>
  void add(M*& member, const std::vector<T>& values, std::int64_t capacity = 0) {
    static_assert(sizeof(T) == sizeof(M));
    add(member, values.data(), static_cast<std::int64_t>(values.size()), capacity);
  }
  template <class T, class M>
  void add(M*& member, const T* values, std::int64_t count, std::int64_t capacity = 0) {
    const std::int64_t at = size_;
    used_ = at + count * static_cast<std::int64_t>(sizeof(T));
    const std::int64_t room = std::max(count, capacity) * static_cast<std::int64_t>(sizeof(T));
    size_ = ceil_div(at + room, 16) * 16;
    bytes_.resize(static_cast<std::size_t>(used_));  // room beyond the values is not filled
    if (count > 0)
      std::memcpy(bytes_.data() + at, values, static_cast<std::size_t>(count) * sizeof(T));
    members_.push_back([&member, at](char* base) { member = reinterpret_cast<M*>(base + at); });
  }
  const char* data() const { return bytes_.data(); }
  std::int64_t bytes() const { return size_; }
  std::int64_t used() const { return used_; }  // up to the end of the last array's values
  void place(char* base) const {
    for (const auto& set : members_) set(base);
  }

 private:
  std::vector<char> bytes_;
  std::int64_t used_ = 0, size_ = 0;
  std::vector<std::function<void(char*)>> members_;
};

std::int64_t keys_of(const Segment& s) { return s.position_begin + s.num_rows; }

bool keys_are_own_rows(const Segment& s) {
  if (s.position_begin != 0) return false;
  for (std::int64_t i = 0; i < s.num_rows; ++i)
    if (s.key_rows[i] != s.row_begin + i) return false;
  return true;
}

// A response that follows its prompt's rows is one sequence with it; other responses of the same
// prompt stay segments of their own.
std::vector<Segment> joined(const AttentionCall& call) {
  std::vector<Segment> out;
  for (std::int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& s = call.segments[i];
    const bool continues = [&] {
      if (out.empty() || !s.key_rows) return false;
      const Segment& before = out.back();
      if (before.position_begin != 0 || before.num_rows != s.position_begin ||
          before.row_begin + before.num_rows != s.row_begin || !keys_are_own_rows(before))
        return false;
      return std::equal(before.key_rows, before.key_rows + before.num_rows, s.key_rows);
    }();
    if (!continues) {
      out.push_back(s);
      continue;
    }
    out.back().num_rows += s.num_rows;
    out.back().key_rows = s.key_rows;
  }
  return out;
}

// For each row the segments that read it as a key, in the order of segments.
void list_uses(const AttentionCall& call, std::vector<std::int32_t>& begin,
               std::vector<KeyUse>& uses) {
  begin.assign(static_cast<std::size_t>(call.rows) + 1, 0);
  for (std::int64_t s = 0; s < call.num_segments; ++s)
    for (std::int64_t p = 0; p < keys_of(call.segments[s]); ++p)
      ++begin[call.segments[s].key_rows[p] + 1];
  for (std::int64_t r = 0; r < call.rows; ++r) begin[r + 1] += begin[r];
  uses.resize(static_cast<std::size_t>(begin.back()));
  std::vector<std::int32_t> next(begin.begin(), begin.end() - 1);
  for (std::int64_t s = 0; s < call.num_segments; ++s)
    for (std::int64_t p = 0; p < keys_of(call.segments[s]); ++p)
      uses[next[call.segments[s].key_rows[p]]++] = {static_cast<std::int32_t>(s),
                                                    static_cast<std::int32_t>(p)};
}

// ---- the work list of FlashInfer's kernel

// Blocks that keep an H200 busy: two for each of its 132 multiprocessors.
constexpr std::int64_t kWantedBlocks = 264;
constexpr std::int64_t kLeastChunkPages = 8;
// Exact mode: keys are cut every 512 positions from 0 on, queries in tiles of 64, always.
constexpr std::int64_t kExactChunkPages = 32, kExactTile = 64;

struct WorkList {
  std::vector<std::int32_t> request, query_tile, key_chunk, partial_begin{0}, merge_begin{0},
      chunk_keys{0}, row_begin{0}, page_begin{0}, last_page_keys;
  std::vector<char> valid;
};

std::int64_t tiles_of(const Segment& s, std::int64_t group, std::int64_t tile) {
  return ceil_div(s.num_rows * group, tile);
}
std::int64_t pages_of(const Segment& s) { return ceil_div(keys_of(s), kBlockTokens); }

std::int64_t count_items(const AttentionCall& call, std::int64_t group, std::int64_t tile,
                         std::int64_t chunk_pages) {
  std::int64_t items = 0;
  for (std::int64_t i = 0; i < call.num_segments; ++i)
    items +=
        tiles_of(call.segments[i], group, tile) * ceil_div(pages_of(call.segments[i]), chunk_pages);
  return items;
}

// The smallest chunk with which the call has no more than `most` items.
std::int64_t choose_chunk(const AttentionCall& call, std::int64_t group, std::int64_t tile,
                          std::int64_t most) {
  std::int64_t low = kLeastChunkPages, high = kLeastChunkPages;
  for (std::int64_t i = 0; i < call.num_segments; ++i)
    high = std::max(high, pages_of(call.segments[i]));
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (count_items(call, group, tile, middle) <= most)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// reserved_rows > 0: a graph's list, whose number of items and whether keys are cut depend on that
// alone.
WorkList list_work(const AttentionShape& shape, const AttentionCall& call,
                   std::int64_t reserved_rows, std::int64_t reserved_pages, PagedWork& work) {
  const std::int64_t group = shape.num_heads / shape.num_kv_heads;
  const std::int64_t most = std::max<std::int64_t>(1, kWantedBlocks / shape.num_kv_heads);
  const std::int64_t average = call.rows * group / std::max<std::int64_t>(1, call.num_segments);
  work.tile = (reserved_rows > 0 ? group : average) <= 16 ? 16 : 64;
  if (exact_mode()) work.tile = kExactTile;
  const std::int64_t whole = count_items(call, group, work.tile, std::int64_t{1} << 40);
  bool cut = whole < most;
  std::int64_t chunk_pages = std::int64_t{1} << 26;
  if (cut) chunk_pages = choose_chunk(call, group, work.tile, most);
  if (exact_mode()) {
    cut = true;
    chunk_pages = kExactChunkPages;
  }
  WorkList list;
  std::int64_t chunks_of_all = 0;
  for (std::int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& s = call.segments[i];
    const std::int64_t chunks = ceil_div(pages_of(s), chunk_pages);
    chunks_of_all = std::max(chunks_of_all, chunks);
    for (std::int64_t t = 0; t < tiles_of(s, group, work.tile); ++t)
      for (std::int64_t c = 0; c < chunks; ++c) {
        list.request.push_back(static_cast<std::int32_t>(i));
        list.query_tile.push_back(static_cast<std::int32_t>(t));
        list.key_chunk.push_back(static_cast<std::int32_t>(c));
      }
    for (std::int64_t r = 0; r < s.num_rows; ++r)
      list.merge_begin.push_back(list.merge_begin.back() + static_cast<std::int32_t>(chunks));
    list.partial_begin.push_back(list.partial_begin.back() +
                                 static_cast<std::int32_t>(s.num_rows * chunks));
    list.row_begin.push_back(list.row_begin.back() + static_cast<std::int32_t>(s.num_rows));
    list.page_begin.push_back(list.page_begin.back() + static_cast<std::int32_t>(pages_of(s)));
    list.last_page_keys.push_back(
        static_cast<std::int32_t>(keys_of(s) - (pages_of(s) - 1) * kBlockTokens));
  }
  list.chunk_keys[0] = static_cast<std::int32_t>(
      std::min<std::int64_t>(chunk_pages * kBlockTokens, std::int64_t{1} << 30));
  if (reserved_rows == 0) cut = chunks_of_all > 1;
  work.items = static_cast<std::int64_t>(list.request.size());
  work.partial_rows = cut ? list.partial_begin.back() : 0;
  list.valid.assign(list.request.size(), 1);
  if (reserved_rows > 0) {
    work.items = std::max(reserved_rows, most);
    if (exact_mode())  // every row at its longest
      work.items = reserved_rows * ceil_div(reserved_pages / reserved_rows, kExactChunkPages);
    work.partial_rows = cut ? work.items : 0;
    for (auto* v : {&list.request, &list.query_tile, &list.key_chunk})
      v->resize(static_cast<std::size_t>(work.items), 0);
    list.valid.resize(static_cast<std::size_t>(work.items), 0);
  }
  return list;
}

// Whether the call's rows are a sequence each and it writes no key of a page that some sequence has
// before its last one. It may: a page that one row fills is another's prefix at once.
bool pages_settled(const AttentionCall& call) {
  if (call.rows != call.num_segments) return false;
  std::vector<bool> written;
  for (std::int64_t i = 0; i < call.num_writes; ++i) {
    const auto page = static_cast<std::size_t>(call.writes[i].slot / kBlockTokens);
    if (page >= written.size()) written.resize(page + 1);
    written[page] = true;
  }
  for (std::int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& s = call.segments[i];
    for (std::int64_t p = 0; p + 1 < pages_of(s); ++p) {
      const auto page = static_cast<std::size_t>(s.blocks[p]);
      if (page < written.size() && written[page]) return false;
    }
  }
  return true;
}

// Fills the plan's numbers and lays its arrays out in `packed`.
void describe(AttentionPlan& plan, Element e, const AttentionShape& shape,
              const AttentionCall& call, Packed& packed) {
  plan.rows = call.rows;
  plan.num_segments = call.num_segments;
  plan.num_writes = call.num_writes;
  plan.from_rows = call.num_segments > 0 && call.segments[0].key_rows != nullptr;
  plan.own_rows = plan.from_rows;
  plan.from_blocks = !plan.from_rows || exact_mode();
  plan.max_rows = plan.max_keys = plan.total_keys = 0;

  std::vector<PlannedSegment> segments, block_segments;
  std::vector<std::int32_t> blocks;
  std::vector<std::int32_t> row_segment(static_cast<std::size_t>(call.rows)), keys;
  std::vector<std::int32_t> cum_rows{0}, cum_keys{0};
  for (std::int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& s = call.segments[i];
    segments.push_back(
        {static_cast<std::int32_t>(s.row_begin), static_cast<std::int32_t>(s.num_rows),
         static_cast<std::int32_t>(s.position_begin), static_cast<std::int32_t>(keys.size())});
    std::fill_n(row_segment.begin() + s.row_begin, s.num_rows, static_cast<std::int32_t>(i));
    if (plan.from_blocks) {
      block_segments.push_back(segments.back());
      block_segments.back().keys_begin = static_cast<std::int32_t>(blocks.size());
      blocks.insert(blocks.end(), s.blocks, s.blocks + pages_of(s));
    }
    if (plan.from_rows) keys.insert(keys.end(), s.key_rows, s.key_rows + keys_of(s));
    plan.own_rows = plan.own_rows && keys_are_own_rows(s);
    cum_rows.push_back(cum_rows.back() + static_cast<std::int32_t>(s.num_rows));
    cum_keys.push_back(cum_keys.back() + static_cast<std::int32_t>(keys_of(s)));
    plan.max_rows = std::max(plan.max_rows, s.num_rows);
    plan.max_keys = std::max(plan.max_keys, keys_of(s));
    plan.total_keys += keys_of(s);
  }
  packed.add(plan.segments, segments);
  packed.add(plan.row_segment, row_segment);
  packed.add(plan.cum_rows, cum_rows);
  packed.add(plan.cum_keys, cum_keys);
  packed.add(plan.writes, call.writes, call.num_writes);
  if (plan.from_rows) {
    std::vector<std::int32_t> uses_begin;
    std::vector<KeyUse> uses;
    list_uses(call, uses_begin, uses);
    packed.add(plan.uses_begin, uses_begin);
    packed.add(plan.uses, uses);
    if (!plan.from_blocks)
      packed.add(plan.ragged, cudnn_offsets(shape, plan.own_rows, cum_rows, cum_keys));
  }
  packed.add(plan.keys, keys);
  packed.add(plan.block_segments, block_segments);
  plan.paged = plan.from_blocks && paged_takes(e, shape);
  if (plan.paged) {
    PagedWork& w = plan.work;
    const WorkList list = list_work(shape, call, plan.reserved ? plan.reserved->rows : 0,
                                    plan.reserved ? plan.reserved->pages : 0, w);
    packed.add(w.request, list.request);
    packed.add(w.query_tile, list.query_tile);
    packed.add(w.key_chunk, list.key_chunk);
    packed.add(w.valid, list.valid);
    packed.add(w.partial_begin, list.partial_begin);
    packed.add(w.merge_begin, list.merge_begin);
    packed.add(w.chunk_keys, list.chunk_keys);
    packed.add(w.settled, std::vector<std::int32_t>{pages_settled(call) ? 1 : 0});
    packed.add(w.row_begin, list.row_begin);
    packed.add(w.page_begin, list.page_begin);
    packed.add(w.last_page_keys, list.last_page_keys);
  }
  packed.add(plan.blocks, blocks, plan.reserved ? plan.reserved->pages : 0);
}

void finish(AttentionPlan& plan, const Packed& packed) {
  packed.place(plan.memory->as<char>());
  plan.work.pages = const_cast<std::int32_t*>(plan.blocks);
}

}  // namespace

AttentionPlan* plan_attention(Element e, const AttentionShape& shape,
                              const AttentionCall& described) {
  auto plan = std::make_unique<AttentionPlan>();
  // In exact mode a segment's blocks are its own, so it stays one.
  const std::vector<Segment> segments =
      exact_mode()
          ? std::vector<Segment>(described.segments, described.segments + described.num_segments)
          : joined(described);
  AttentionCall call = described;
  call.segments = segments.data();
  call.num_segments = static_cast<std::int64_t>(segments.size());
  Packed packed;
  describe(*plan, e, shape, call, packed);
  plan->memory = std::make_unique<Scratch>(packed.bytes());
  CHECK_CUDA(cudaMemcpyAsync(plan->memory->as<void>(), packed.data(),
                             static_cast<std::size_t>(packed.used()), cudaMemcpyHostToDevice,
                             stream()));
  finish(*plan, packed);
  return plan.release();
}

AttentionPlan* reserve_plan(std::int64_t rows, std::int64_t pages) {
  auto plan = std::make_unique<AttentionPlan>();
  plan->reserved = std::make_unique<AttentionPlan::Reserved>();
  plan->reserved->rows = rows;
  plan->reserved->pages = pages;
  return plan.release();
}

void update_plan(AttentionPlan* plan, Element e, const AttentionShape& shape,
                 const AttentionCall& call) {
  AttentionPlan::Reserved& r = *plan->reserved;
  if (call.rows != r.rows || call.num_segments != r.rows || call.num_writes != r.rows)
    throw std::runtime_error("decode plan: " + std::to_string(call.rows) + " rows found, " +
                             std::to_string(r.rows) + " sequences of one row wanted");
  Packed packed;
  describe(*plan, e, shape, call, packed);
  if (!plan->memory) {
    plan->memory = std::make_unique<Scratch>(packed.bytes());
    for (void*& p : r.pinned)
      CHECK_CUDA(cudaMallocHost(&p, static_cast<std::size_t>(packed.bytes())));
    r.bytes = packed.bytes();
  }
  if (packed.bytes() != r.bytes)
    throw std::runtime_error("decode plan: more pages than were reserved");
  // The copy before the last one is done: the results of its step have been read since.
  void* const pinned = r.pinned[r.turn ^= 1];
  std::memcpy(pinned, packed.data(), static_cast<std::size_t>(packed.used()));
  CHECK_CUDA(cudaMemcpyAsync(plan->memory->as<void>(), pinned,
                             static_cast<std::size_t>(packed.used()), cudaMemcpyHostToDevice,
                             stream()));
  finish(*plan, packed);
}

void free_plan(AttentionPlan* plan) { delete plan; }

}  // namespace cuda
}  // namespace tandem
