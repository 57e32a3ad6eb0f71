// What libfrit_trace.so makes of its records: the window, the busy share, totals, and which calls are told apart.
#include <gtest/gtest.h>

#include "tools/trace/summary.h"

namespace frit::trace {
namespace {

// Names: 0 marker, 1 kernel, 2 copy, 3 onwards calls.
class Recorder {
 public:
  Recorder() { records.names = {"ns::optimizer_step_kernel<2>", "kernel", "pageable to device"}; }
  void span(uint64_t begin, uint64_t end, uint32_t name, Kind kind = Kind::kKernel, uint64_t bytes = 0) {
    records.spans.push_back({begin, end, bytes, name, kind});
  }
  void call(uint64_t begin, uint64_t end, const std::string& name) {
    records.names.push_back(name);
    records.calls.push_back({begin, end, static_cast<uint32_t>(records.names.size() - 1)});
  }
  // Update u, counted from 1, ends at 10000 u: 2 us of kernel, 3 us of pause, 4 us of marker, 1 us of pause before all.
  void update(uint64_t u) {
    const uint64_t t = 10000 * (u - 1);
    span(t + 1000, t + 3000, 1);
    span(t + 6000, t + 10000, 0);
  }
  Records records;
};

const Window kWindow{"optimizer_step", 2, 3};

TEST(TraceSummary, WindowAndBusyShare) {
  Recorder r;
  for (uint64_t u = 6; u >= 1; --u) r.update(u);  // in any order
  const auto out = summarise(r.records, kWindow);
  ASSERT_FALSE(out.contains("error")) << out;
  EXPECT_EQ(out["updates"], 6);
  EXPECT_DOUBLE_EQ(out["wall_us"].get<double>(), 30);
  EXPECT_DOUBLE_EQ(out["busy_us"].get<double>(), 18);
  EXPECT_DOUBLE_EQ(out["busy_share"].get<double>(), 0.6);
  EXPECT_DOUBLE_EQ(out["wall_us_per_step"].get<double>(), 10);
  EXPECT_EQ(out["kernels"][0]["name"], "ns::optimizer_step_kernel<2>");
  EXPECT_EQ(out["kernels"][0]["count"], 3);
  EXPECT_DOUBLE_EQ(out["kernels"][0]["us"].get<double>(), 12);
  EXPECT_EQ(out["kernels"][1]["count"], 3);
  EXPECT_EQ(out["gaps"]["up to 1 us"]["count"], 3);
  EXPECT_EQ(out["gaps"]["2 to 5 us"]["count"], 3);
  EXPECT_DOUBLE_EQ(out["gaps"]["2 to 5 us"]["us"].get<double>(), 9);
  EXPECT_DOUBLE_EQ(out["longest_gap_us"].get<double>(), 3);
  EXPECT_EQ(out["idle_between"][0]["after"], "kernel");
  EXPECT_EQ(out["idle_between"][0]["before"], "ns::optimizer_step_kernel<2>");
  EXPECT_EQ(out["idle_between"][1]["after"], "ns::optimizer_step_kernel<2>");
}

TEST(TraceSummary, OverlapCountsOnceAndEdgesAreCut) {
  Recorder r;
  for (uint64_t u = 1; u <= 5; ++u) r.update(u);
  r.span(15000, 21500, 2, Kind::kCopy, 64);  // over the window's begin and half of the first kernel
  r.span(42000, 42500, 2, Kind::kCopy, 8);   // within a kernel
  r.span(49000, 51000, 2, Kind::kCopy, 16);  // over its end: counted in no window that ends here
  r.span(43000, 44000, 1, Kind::kFill, 32);  // right after a kernel
  const auto out = summarise(r.records, kWindow);
  EXPECT_DOUBLE_EQ(out["busy_us"].get<double>(), 18 + 1 + 1);
  EXPECT_EQ(out["copies"][0]["count"], 2);
  EXPECT_EQ(out["copies"][0]["bytes"], 72);
  EXPECT_EQ(out["fills"][0]["bytes"], 32);
}

TEST(TraceSummary, CallsUnderWayInTheWindow) {
  Recorder r;
  for (uint64_t u = 1; u <= 6; ++u) r.update(u);
  r.call(19000, 19900, "cudaMalloc");             // before
  r.call(19000, 20100, "cudaStreamSynchronize");  // into it
  r.call(30000, 30500, "cudaMemcpy");             // within
  r.call(30000, 30500, "cuMemAlloc_v2");          // within
  r.call(31000, 31500, "cudaMemcpyAsync");        // harmless
  r.call(49000, 60000, "cudaGraphInstantiate");   // out of it
  r.call(50000, 50001, "cudaFree");               // behind it
  const auto out = summarise(r.records, kWindow);
  EXPECT_EQ(out["synchronising"].size(), 2u);
  EXPECT_EQ(out["synchronising"]["cudaStreamSynchronize"]["count"], 1);
  EXPECT_DOUBLE_EQ(out["synchronising"]["cudaMemcpy"]["us"].get<double>(), 0.5);
  EXPECT_EQ(out["allocating"].size(), 1u);
  EXPECT_EQ(out["allocating"]["cuMemAlloc_v2"]["count"], 1);
  EXPECT_EQ(out["making"].size(), 1u);
  EXPECT_EQ(out["calls"].size(), 5u);
}

TEST(TraceSummary, WhatIsMissingIsSaid) {
  Recorder r;
  for (uint64_t u = 1; u <= 4; ++u) r.update(u);
  EXPECT_NE(summarise(r.records, kWindow).value("error", "").find("4 updates, the window needs 5"), std::string::npos);
  EXPECT_TRUE(summarise(r.records, {"optimizer_step", 0, 3}).contains("error"));
  EXPECT_TRUE(summarise(r.records, {"optimizer_begin", 1, 1}).contains("error"));
}

TEST(TraceSummary, CallNames) {
  EXPECT_EQ(plain_call_name("cudaStreamSynchronize_v3020"), "cudaStreamSynchronize");
  EXPECT_EQ(plain_call_name("cuMemAlloc_v2"), "cuMemAlloc_v2");
  for (const char* name :
       {"cudaDeviceSynchronize", "cudaEventSynchronize", "cudaStreamSynchronize_ptsz", "cuCtxSynchronize",
        "cuStreamSynchronize", "cudaMemcpy2D", "cudaMemcpyToSymbol", "cuMemcpyDtoH_v2", "cudaMemset"})
    EXPECT_TRUE(synchronises(name)) << name;
  for (const char* name :
       {"cudaMemcpyAsync", "cuMemcpyHtoDAsync_v2", "cudaMemsetAsync", "cuMemsetD8Async", "cudaEventQuery",
        "cudaStreamWaitEvent", "cudaGraphLaunch", "cudaLaunchKernelExC", "cudaMalloc"})
    EXPECT_FALSE(synchronises(name)) << name;
  for (const char* name :
       {"cudaMalloc", "cudaMallocHost", "cudaMallocAsync", "cudaFree", "cudaFreeAsync", "cudaHostAlloc",
        "cuMemAlloc_v2", "cuMemAllocAsync", "cuMemFreeHost", "cuMemCreate", "cuMemMap"})
    EXPECT_TRUE(allocates(name)) << name;
  for (const char* name : {"cudaMemGetInfo", "cuMemGetAllocationGranularity", "cudaMemcpyAsync", "cudaGraphLaunch"})
    EXPECT_FALSE(allocates(name)) << name;
  for (const char* name : {"cudaGraphInstantiate", "cudaGraphUpload", "cudaGraphExecKernelNodeSetParams",
                           "cuModuleLoadDataEx", "cuLibraryLoadData", "cudaStreamBeginCapture"})
    EXPECT_TRUE(makes(name)) << name;
  EXPECT_FALSE(makes("cudaGraphLaunch"));
}

}  // namespace
}  // namespace frit::trace
