#include "frit/memory/planner.h"

namespace frit {

Plan plan_memory(const std::vector<Lifetime>& lifetimes) {
  Plan plan;
  for (const Lifetime& t : lifetimes) {
    plan.offsets.push_back(plan.peak);
    plan.bytes.push_back(t.bytes);
    plan.peak += align_up(t.bytes);
  }
  return plan;
}

}  // namespace frit
