// What a GPU did during some updates of a training run, from records of its work and of the host's calls. Knows nothing
// of CUPTI: frit_trace.cc collects the records.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace frit::trace {

enum class Kind : uint8_t { kKernel, kCopy, kFill, kGraph };

// Work on the GPU. Times in nanoseconds, on one clock with Call's.
struct Span {
  uint64_t begin = 0, end = 0;
  uint64_t bytes = 0;  // of copies and fills
  uint32_t name = 0;   // index into Records::names
  Kind kind = Kind::kKernel;
};

// A call of the host into the run time or the driver.
struct Call {
  uint64_t begin = 0, end = 0;
  uint32_t name = 0;  // index into Records::names
};

struct Records {
  std::vector<std::string> names;
  std::vector<Span> spans;
  std::vector<Call> calls;
};

// The window is `steps` updates long and begins at the end of update `skip`. Updates are told apart by a kernel that
// runs once in each.
struct Window {
  std::string marker;  // a part of that kernel's name
  int64_t skip = 50;   // at least 1
  int64_t steps = 200;
};

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}
inline bool starts(std::string_view text, std::string_view part) {
  return text.substr(0, part.size()) == part;
}

// A call's name without the version that CUPTI adds: cudaMalloc for cudaMalloc_v3020.
inline std::string plain_call_name(std::string_view name) {
  const size_t at = name.rfind("_v");
  if (starts(name, "cuda") && at != name.npos && at + 2 < name.size() &&
      name.find_first_not_of("0123456789", at + 2) == name.npos)
    name = name.substr(0, at);
  return std::string(name);
}

// True for a call that waits for the GPU: every *Synchronize*, copies and fills that are not *Async (some of them do
// not wait always; none belongs into a loop), and resets.
inline bool synchronises(std::string_view name) {
  if (contains(name, "Synchronize") || contains(name, "DeviceReset") || contains(name, "PrimaryCtxReset")) return true;
  for (const char* kind : {"cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset"})
    if (starts(name, kind)) return !contains(name, "Async");
  return false;
}

// True for a call that takes or gives back device memory or pinned memory, from or to a pool as well.
inline bool allocates(std::string_view name) {
  for (const char* kind : {"cudaMalloc",
                           "cudaFree",
                           "cudaHostAlloc",
                           "cudaHostRegister",
                           "cudaHostUnregister",
                           "cudaMemPoolTrim",
                           "cudaMemPoolCreate",
                           "cudaMemPoolDestroy",
                           "cuMemAlloc",
                           "cuMemFree",
                           "cuMemHostAlloc",
                           "cuMemHostRegister",
                           "cuMemHostUnregister",
                           "cuMemCreate",
                           "cuMemRelease",
                           "cuMemMap",
                           "cuMemUnmap",
                           "cuMemAddressReserve",
                           "cuMemAddressFree",
                           "cuMemPoolTrim",
                           "cuMemPoolCreate",
                           "cuMemPoolDestroy",
                           "cuArrayCreate",
                           "cuArray3DCreate",
                           "cuArrayDestroy",
                           "cuMipmappedArrayCreate",
                           "cuMipmappedArrayDestroy"})
    if (starts(name, kind)) return true;
  return false;
}

// True for a call that makes, changes or loads what the GPU runs: graphs and code. Legitimate when a batch size is new.
inline bool makes(std::string_view name) {
  for (const char* part : {"GraphInstantiate", "GraphUpload", "GraphExecUpdate", "GraphExecDestroy", "BeginCapture",
                           "ModuleLoad", "ModuleUnload", "LibraryLoad", "LibraryUnload", "LinkCreate"})
    if (contains(name, part)) return true;
  return contains(name, "GraphExec") && contains(name, "SetParams");
}

// The figures of a window. Busy is the union of all spans; where kernels overlap, their own times add up to more.
// Errors: {"error": why} if the window is not whole.
inline nlohmann::ordered_json summarise(Records records, const Window& window) {
  using nlohmann::ordered_json;
  ordered_json out = {{"marker", window.marker}, {"skip", window.skip}, {"steps", window.steps}};
  if (window.skip < 1 || window.steps < 1) {
    out["error"] = "expected to skip at least 1 update and to look at least at 1";
    return out;
  }
  std::vector<uint64_t> markers;
  for (const Span& s : records.spans)
    if (s.kind == Kind::kKernel && contains(records.names[s.name], window.marker)) markers.push_back(s.end);
  std::sort(markers.begin(), markers.end());
  out["updates"] = markers.size();
  const auto last = static_cast<size_t>(window.skip + window.steps);
  if (markers.size() < last) {
    out["error"] = "the run had " + std::to_string(markers.size()) + " updates, the window needs " +
                   std::to_string(last) + ": kernels named *" + window.marker + "*";
    return out;
  }
  const uint64_t begin = markers[static_cast<size_t>(window.skip) - 1], end = markers[last - 1];
  const auto us = [](uint64_t ns) { return static_cast<double>(ns) / 1e3; };

  std::sort(records.spans.begin(), records.spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  struct Total {
    int64_t count = 0;
    uint64_t ns = 0, bytes = 0;
  };
  std::array<std::map<std::string, Total>, 4> work;
  constexpr std::array<std::pair<uint64_t, const char*>, 5> kGaps = {{{1000, "up to 1 us"},
                                                                      {2000, "1 to 2 us"},
                                                                      {5000, "2 to 5 us"},
                                                                      {20000, "5 to 20 us"},
                                                                      {~uint64_t{0}, "longer"}}};
  std::array<Total, kGaps.size()> gaps;
  std::map<std::pair<uint32_t, uint32_t>, Total> idle_between;
  uint64_t busy = 0, until = begin, longest_gap = 0;
  uint32_t before = 0;  // what was running until then
  for (const Span& s : records.spans) {
    if (s.end <= begin || s.begin >= end) {
      if (s.end == begin) before = s.name;
      continue;
    }
    if (s.end <= end) {  // counted where it ends: each update's marker once
      Total& t = work[static_cast<size_t>(s.kind)][records.names[s.name]];
      ++t.count, t.ns += s.end - s.begin, t.bytes += s.bytes;
    }
    const uint64_t from = std::max(s.begin, begin), to = std::min(s.end, end);
    if (from > until) {
      const uint64_t gap = from - until;
      longest_gap = std::max(longest_gap, gap);
      size_t i = 0;
      while (gap > kGaps[i].first) ++i;
      ++gaps[i].count, gaps[i].ns += gap;
      Total& t = idle_between[{before, s.name}];
      ++t.count, t.ns += gap;
    }
    if (to > until) {
      busy += to - std::max(from, until);
      until = to, before = s.name;
    }
  }
  const auto wall = static_cast<double>(end - begin);
  const auto steps = static_cast<double>(window.steps);
  out["wall_us"] = us(end - begin), out["busy_us"] = us(busy), out["busy_share"] = static_cast<double>(busy) / wall;
  out["wall_us_per_step"] = us(end - begin) / steps, out["busy_us_per_step"] = us(busy) / steps;
  out["longest_gap_us"] = us(longest_gap);
  for (size_t i = 0; i < gaps.size(); ++i)
    out["gaps"][kGaps[i].second] = {{"count", gaps[i].count}, {"us", us(gaps[i].ns)}};
  std::vector<std::pair<std::pair<uint32_t, uint32_t>, Total>> pairs(idle_between.begin(), idle_between.end());
  std::sort(pairs.begin(), pairs.end(), [](const auto& a, const auto& b) { return a.second.ns > b.second.ns; });
  if (pairs.size() > 12) pairs.resize(12);
  out["idle_between"] = ordered_json::array();
  for (const auto& [names, t] : pairs)
    out["idle_between"].push_back({{"after", records.names[names.first]},
                                   {"before", records.names[names.second]},
                                   {"count", t.count},
                                   {"us", us(t.ns)}});
  constexpr const char* kKinds[] = {"kernels", "copies", "fills", "graphs"};
  for (size_t k = 0; k < work.size(); ++k) {
    std::vector<std::pair<std::string, Total>> rows(work[k].begin(), work[k].end());
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.ns > b.second.ns; });
    ordered_json& list = out[kKinds[k]] = ordered_json::array();
    for (const auto& [name, t] : rows) {
      list.push_back({{"name", name}, {"count", t.count}, {"us", us(t.ns)}});
      if (t.bytes) list.back()["bytes"] = t.bytes;
    }
  }

  // Calls that were under way at some time of the window; the host is ahead of the GPU by some updates.
  std::map<std::string, Total> calls;
  for (const Call& c : records.calls) {
    if (c.begin >= end || c.end <= begin) continue;
    Total& t = calls[records.names[c.name]];
    ++t.count, t.ns += c.end - c.begin;
  }
  for (const char* list : {"synchronising", "allocating", "making", "calls"}) out[list] = ordered_json::object();
  for (const auto& [name, t] : calls) {
    const ordered_json row = {{"count", t.count}, {"us", us(t.ns)}};
    if (synchronises(name)) out["synchronising"][name] = row;
    if (allocates(name)) out["allocating"][name] = row;
    if (makes(name)) out["making"][name] = row;
    out["calls"][name] = row;
  }
  return out;
}

}  // namespace frit::trace
