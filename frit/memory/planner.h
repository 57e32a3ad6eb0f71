// Static memory planning: offsets for a recorded step, so that tensors never alive together share addresses.
#pragma once
#include <vector>

#include "frit/memory/memory.h"

namespace frit {

// Plans an arena for the recorded lifetimes.
// Guarantees: offsets are multiples of kAlignment; tensors alive at the same time never overlap; lower_bound <= peak <=
// total (sizes rounded up to kAlignment). Deterministic. Several strategies are tried and the smallest peak is kept;
// the first is the published one: each tensor, in order of production, goes to the shared block where the arena grows
// least (ties to the smaller block), which meets the published bound of self-attention backward with 4 blocks. Source:
// LightSeq2 (arXiv:2110.05722), section on memory; spec in docs/design.md.
Plan plan_memory(const std::vector<Lifetime>& lifetimes);

// A plan in which nothing shares: every tensor keeps its place, and what was last written to it, for good. For work
// that runs in parts, each on what the others left.
Plan plan_without_sharing(const std::vector<Lifetime>& lifetimes);

}  // namespace frit
