// Building a plan: all arrays in one host buffer, sent with one copy.
#include "ops/cuda/plan.h"

#include <algorithm>
#include <cstring>

#include "ops/cuda/kernels.h"

namespace tandem::cuda {
namespace {

// Arrays one after the other, each aligned to 16 bytes.
class Packed {
 public:
  template <class T>
  std::int64_t add(const std::vector<T>& values) {
    return add(values.data(), static_cast<std::int64_t>(values.size() * sizeof(T)));
  }
  std::int64_t add(const void* data, std::int64_t bytes) {
    const auto at = static_cast<std::int64_t>(bytes_.size());
    bytes_.resize(static_cast<std::size_t>(ceil_div(at + bytes, 16) * 16));
    if (bytes > 0) std::memcpy(bytes_.data() + at, data, static_cast<std::size_t>(bytes));
    return at;
  }
  std::unique_ptr<Scratch> send() const {
    auto memory = std::make_unique<Scratch>(static_cast<std::int64_t>(bytes_.size()));
    CHECK_CUDA(cudaMemcpyAsync(memory->as<void>(), bytes_.data(), bytes_.size(),
                               cudaMemcpyHostToDevice, stream()));
    return memory;
  }

 private:
  std::vector<char> bytes_;
};

std::int64_t keys_of(const Segment& s) { return s.position_begin + s.num_rows; }

bool keys_are_own_rows(const Segment& s) {
  if (s.position_begin != 0) return false;
  for (std::int64_t i = 0; i < s.num_rows; ++i)
    if (s.key_rows[i] != s.row_begin + i) return false;
  return true;
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

}  // namespace

AttentionPlan* plan_attention(Element, const AttentionShape&, const AttentionCall& call) {
  auto plan = std::make_unique<AttentionPlan>();
  plan->rows = call.rows;
  plan->num_segments = call.num_segments;
  plan->num_writes = call.num_writes;
  plan->from_rows = call.num_segments > 0 && call.segments[0].key_rows != nullptr;
  plan->own_rows = plan->from_rows;

  std::vector<PlannedSegment> segments;
  std::vector<std::int32_t> row_segment(static_cast<std::size_t>(call.rows)), keys;
  std::vector<std::int32_t> cum_rows{0}, cum_keys{0};
  for (std::int64_t i = 0; i < call.num_segments; ++i) {
    const Segment& s = call.segments[i];
    segments.push_back(
        {static_cast<std::int32_t>(s.row_begin), static_cast<std::int32_t>(s.num_rows),
         static_cast<std::int32_t>(s.position_begin), static_cast<std::int32_t>(keys.size())});
    std::fill_n(row_segment.begin() + s.row_begin, s.num_rows, static_cast<std::int32_t>(i));
    if (plan->from_rows)
      keys.insert(keys.end(), s.key_rows, s.key_rows + keys_of(s));
    else
      keys.insert(keys.end(), s.blocks, s.blocks + ceil_div(keys_of(s), kBlockTokens));
    plan->own_rows = plan->own_rows && keys_are_own_rows(s);
    cum_rows.push_back(cum_rows.back() + static_cast<std::int32_t>(s.num_rows));
    cum_keys.push_back(cum_keys.back() + static_cast<std::int32_t>(keys_of(s)));
    plan->max_rows = std::max(plan->max_rows, s.num_rows);
    plan->max_keys = std::max(plan->max_keys, keys_of(s));
    plan->total_keys += keys_of(s);
  }
  std::vector<std::int32_t> uses_begin;
  std::vector<KeyUse> uses;
  if (plan->from_rows) list_uses(call, uses_begin, uses);

  Packed packed;
  const auto at_segments = packed.add(segments), at_rows = packed.add(row_segment),
             at_keys = packed.add(keys), at_cum_rows = packed.add(cum_rows),
             at_cum_keys = packed.add(cum_keys), at_begin = packed.add(uses_begin),
             at_uses = packed.add(uses),
             at_writes = packed.add(call.writes,
                                    call.num_writes * static_cast<std::int64_t>(sizeof(KvWrite)));
  plan->memory = packed.send();
  const char* base = plan->memory->as<char>();
  auto place = [&](auto*& member, std::int64_t at) {
    member = reinterpret_cast<std::remove_reference_t<decltype(member)>>(base + at);
  };
  place(plan->segments, at_segments);
  place(plan->row_segment, at_rows);
  place(plan->keys, at_keys);
  place(plan->cum_rows, at_cum_rows);
  place(plan->cum_keys, at_cum_keys);
  place(plan->uses_begin, at_begin);
  place(plan->uses, at_uses);
  place(plan->writes, at_writes);
  return plan.release();
}

void free_plan(AttentionPlan* plan) { delete plan; }

}  // namespace tandem::cuda
