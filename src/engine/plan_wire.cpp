// Each vector as its length and its elements.
#include "engine/plan_wire.h"

#include <cstring>
#include <type_traits>

#include "base/check.h"

namespace tandem {
namespace {

template <class T>
void put(std::string& out, const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T>);
  const std::uint64_t count = values.size();
  out.append(reinterpret_cast<const char*>(&count), sizeof count);
  out.append(reinterpret_cast<const char*>(values.data()), count * sizeof(T));
}

template <class T>
void take(std::string_view& in, std::vector<T>& values) {
  std::uint64_t count = 0;
  TD_CHECK(in.size() >= sizeof count, "engine plan: {} bytes left, a length wanted", in.size());
  std::memcpy(&count, in.data(), sizeof count);
  in.remove_prefix(sizeof count);
  TD_CHECK(count <= in.size() / sizeof(T), "engine plan: {} elements of {} bytes in {} bytes",
           count, sizeof(T), in.size());
  values.resize(count);
  std::memcpy(values.data(), in.data(), count * sizeof(T));
  in.remove_prefix(count * sizeof(T));
}

}  // namespace

std::string encode_plan(const StepPlan& plan) {
  std::string out;
  put(out, plan.copies);
  put(out, plan.tokens);
  put(out, plan.positions);
  put(out, plan.slots);
  put(out, plan.segments);
  put(out, plan.block_ids);
  put(out, plan.logit_rows);
  put(out, plan.draws);
  return out;
}

void decode_plan(std::string_view bytes, StepPlan& plan) {
  plan.clear();
  take(bytes, plan.copies);
  take(bytes, plan.tokens);
  take(bytes, plan.positions);
  take(bytes, plan.slots);
  take(bytes, plan.segments);
  take(bytes, plan.block_ids);
  take(bytes, plan.logit_rows);
  take(bytes, plan.draws);
  TD_CHECK(bytes.empty(), "engine plan: {} bytes too many", bytes.size());
}

}  // namespace tandem
