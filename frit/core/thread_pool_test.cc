#include "frit/core/thread_pool.h"

#include <gtest/gtest.h>

#include <numeric>

namespace frit {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(tasks);
      pool.run(tasks, [&](int64_t i, int worker) {
        EXPECT_LT(worker, threads);
        seen[i]++;
      });
      for (auto& s : seen) EXPECT_EQ(s, 1);
    }
  }
}

TEST(ThreadPool, PiecesDoNotDependOnThreads) {
  auto cuts = [](int threads) {
    ThreadPool pool(threads);
    std::vector<std::pair<int64_t, int64_t>> result;
    std::mutex mutex;
    pool.parallel_for(1000, 7, [&](int64_t b, int64_t e, int) {
      std::lock_guard lock(mutex);
      result.emplace_back(b, e);
    });
    std::sort(result.begin(), result.end());
    return result;
  };
  EXPECT_EQ(cuts(1), cuts(3));
  int64_t at = 0;
  for (auto [b, e] : cuts(3)) {
    EXPECT_EQ(b, at);
    EXPECT_GE(e - b, 7);
    at = e;
  }
  EXPECT_EQ(at, 1000);
}

TEST(ThreadPool, NestedRunWorksInTheTask) {
  ThreadPool pool(2);
  std::atomic<int> sum{0};
  pool.run(4, [&](int64_t, int) { pool.run(5, [&](int64_t i, int) { sum += static_cast<int>(i); }); });
  EXPECT_EQ(sum, 40);
}

TEST(ThreadPool, ThrowsTheFirstError) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.run(8, [](int64_t i, int) { if (i == 5) throw std::runtime_error("five"); }), std::runtime_error);
  std::atomic<int> n{0};
  pool.run(8, [&](int64_t, int) { n++; });
  EXPECT_EQ(n, 8);
}

}  // namespace
}  // namespace frit
