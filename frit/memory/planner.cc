#include "frit/memory/planner.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <queue>
#include <set>
#include <utility>

namespace frit {
namespace {

// A tensor to place: its size rounded up to kAlignment (never 0), alive in [birth, death).
struct Item {
  size_t size;
  int64_t birth, death;
};

struct Placement {
  std::vector<size_t> offsets;  // by item
  size_t peak = 0;
  int64_t blocks = 0;
};

using Order = std::vector<int32_t>;

template <typename Key>
Order order_by(const std::vector<Item>& items, Key key) {  // largest key first, ties in order of production
  Order order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key(items[a]) > key(items[b]); });
  return order;
}

// The published form. Every tensor, in order of production, goes to the free block where the arena grows least: the
// smallest that holds it, else the largest, which grows. A new block only where none is free. Blocks lie end to end.
Placement place_in_blocks(const std::vector<Item>& items) {
  const Order order = order_by(items, [](const Item& i) { return -i.birth; });
  std::vector<size_t> block_size, block_of(items.size());
  std::set<std::pair<size_t, size_t>> free;  // (size, block)
  std::priority_queue<std::pair<int64_t, size_t>, std::vector<std::pair<int64_t, size_t>>, std::greater<>> busy;
  for (const int32_t i : order) {
    const Item& item = items[i];
    for (; !busy.empty() && busy.top().first <= item.birth; busy.pop())
      free.emplace(block_size[busy.top().second], busy.top().second);
    auto best = free.lower_bound({item.size, 0});
    if (best == free.end() && !free.empty()) {
      // The largest; of several as large the first, so that the choice does not hang on the set's order.
      best = free.lower_bound({std::prev(best)->first, 0});
    }
    size_t block;
    if (best == free.end()) {
      block = block_size.size();
      block_size.push_back(item.size);
    } else {
      block = best->second;
      block_size[block] = std::max(block_size[block], item.size);
      free.erase(best);
    }
    block_of[i] = block;
    busy.emplace(item.death, block);
  }
  Placement result;
  std::vector<size_t> block_offset;
  for (const size_t size : block_size) {
    block_offset.push_back(result.peak);
    result.peak += size;
  }
  result.blocks = static_cast<int64_t>(block_size.size());
  for (const size_t block : block_of) result.offsets.push_back(block_offset[block]);
  return result;
}

// What a heap with foresight of nothing does: in order of birth, each tensor takes the smallest free gap that holds it,
// else the top. backwards runs time from the end, which suits steps whose large tensors die last.
Placement place_like_a_heap(const std::vector<Item>& items, bool backwards) {
  const auto start = [&](const Item& i) { return backwards ? -i.death : i.birth; };
  const auto stop = [&](const Item& i) { return backwards ? -i.birth : i.death; };
  const Order order = order_by(items, [&](const Item& i) { return -start(i); });
  std::map<size_t, size_t> gaps;                // offset -> size; neighbours are never adjacent
  std::set<std::pair<size_t, size_t>> by_size;  // (size, offset)
  size_t top = 0;
  Placement result;
  result.offsets.resize(items.size());
  std::priority_queue<std::pair<int64_t, int32_t>, std::vector<std::pair<int64_t, int32_t>>, std::greater<>> alive;
  const auto erase = [&](std::map<size_t, size_t>::iterator gap) {
    by_size.erase({gap->second, gap->first});
    return gaps.erase(gap);
  };
  const auto insert = [&](size_t offset, size_t size) {
    auto next = gaps.lower_bound(offset);
    if (next != gaps.end() && next->first == offset + size) size += next->second, next = erase(next);
    if (next != gaps.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        offset = before->first, size += before->second;
        erase(before);
      }
    }
    if (offset + size == top) {
      top = offset;
      return;
    }
    gaps.emplace(offset, size);
    by_size.emplace(size, offset);
  };
  for (const int32_t i : order) {
    const Item& item = items[i];
    for (; !alive.empty() && alive.top().first <= start(item); alive.pop()) {
      const int32_t dead = alive.top().second;
      insert(result.offsets[dead], items[dead].size);
    }
    const auto fit = by_size.lower_bound({item.size, 0});
    if (fit == by_size.end()) {
      result.offsets[i] = top;
      top += item.size;
    } else {
      const auto [size, offset] = *fit;
      erase(gaps.find(offset));
      result.offsets[i] = offset;
      if (size > item.size) {
        gaps.emplace(offset + item.size, size - item.size);
        by_size.emplace(size - item.size, offset + item.size);
      }
    }
    result.peak = std::max(result.peak, result.offsets[i] + item.size);
    alive.emplace(stop(item), i);
  }
  return result;
}

// In the given order, each tensor goes to the lowest offset where it fits among those already placed that it meets in
// time. Gives up, with an endless peak, as soon as the peak is no longer below `limit`.
Placement place_lowest(const std::vector<Item>& items, const Order& order, size_t limit) {
  struct Placed {
    size_t begin, end;
    int64_t birth, death;
  };
  std::vector<Placed> placed;  // by begin
  placed.reserve(items.size());
  Placement result;
  result.offsets.resize(items.size());
  for (const int32_t i : order) {
    const Item& item = items[i];
    size_t offset = 0;
    for (const Placed& p : placed) {
      if (p.birth >= item.death || item.birth >= p.death) continue;
      if (p.begin >= offset + item.size) break;
      offset = std::max(offset, p.end);
    }
    if (offset + item.size >= limit) {
      result.peak = std::numeric_limits<size_t>::max();
      return result;
    }
    const Placed fresh{offset, offset + item.size, item.birth, item.death};
    placed.insert(std::upper_bound(placed.begin(), placed.end(), fresh,
                                   [](const Placed& a, const Placed& b) { return a.begin < b.begin; }),
                  fresh);
    result.offsets[i] = offset;
    result.peak = std::max(result.peak, fresh.end);
  }
  return result;
}

// The largest sum of sizes alive at one time.
size_t largest_live_set(const std::vector<Item>& items) {
  std::vector<std::pair<int64_t, int64_t>> changes;  // deaths before births of the same time
  for (const Item& i : items) {
    changes.emplace_back(i.birth, static_cast<int64_t>(i.size));
    changes.emplace_back(i.death, -static_cast<int64_t>(i.size));
  }
  std::sort(changes.begin(), changes.end());
  int64_t live = 0, most = 0;
  for (const auto& [time, change] : changes) most = std::max(most, live += change);
  return static_cast<size_t>(most);
}

// Placing in a given order is quadratic: beyond this many tensors only the other strategies run.
constexpr size_t kMostQuadratic = 2048;

}  // namespace

Plan plan_memory(const std::vector<Lifetime>& lifetimes) {
  std::vector<Item> items;
  std::vector<size_t> tensor_of;  // by item
  Plan plan;
  for (size_t i = 0; i < lifetimes.size(); ++i) {
    const Lifetime& t = lifetimes[i];
    FRIT_CHECK(t.birth < t.death, "[planner] tensor {} ({}) lives from {} to {}: it dies before it is born", i, t.name,
               t.birth, t.death);
    plan.bytes.push_back(t.bytes);
    plan.births.push_back(t.birth);
    plan.deaths.push_back(t.death);
    plan.total += align_up(t.bytes);
    if (t.bytes == 0) continue;  // lies anywhere: offset 0
    items.push_back({align_up(t.bytes), t.birth, t.death});
    tensor_of.push_back(i);
  }
  plan.lower_bound = largest_live_set(items);

  Placement best = place_in_blocks(items);
  const auto consider = [&](const std::function<Placement()>& place) {
    if (best.peak == plan.lower_bound) return;
    Placement other = place();
    if (other.peak < best.peak) best = std::move(other);
  };
  consider([&] { return place_like_a_heap(items, false); });
  consider([&] { return place_like_a_heap(items, true); });
  if (items.size() <= kMostQuadratic) {
    const auto consider_order = [&](const auto& key) {
      consider([&] { return place_lowest(items, order_by(items, key), best.peak); });
    };
    consider_order([](const Item& i) { return i.size; });
    consider_order([](const Item& i) { return i.death - i.birth; });
    consider_order([](const Item& i) { return static_cast<double>(i.size) * static_cast<double>(i.death - i.birth); });
  }
  plan.offsets.assign(lifetimes.size(), 0);
  for (size_t i = 0; i < items.size(); ++i) plan.offsets[tensor_of[i]] = best.offsets[i];
  plan.peak = best.peak;
  plan.blocks = best.blocks;
  return plan;
}

Plan plan_without_sharing(const std::vector<Lifetime>& lifetimes) {
  Plan plan = plan_memory(lifetimes);
  plan.peak = 0, plan.blocks = 0;
  for (size_t i = 0; i < lifetimes.size(); ++i) {
    plan.offsets[i] = plan.peak;
    plan.peak += align_up(lifetimes[i].bytes);
  }
  return plan;
}

}  // namespace frit
