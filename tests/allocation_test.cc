// Training allocates nothing after its first steps: malloc and its relatives and operator new are counted, for every
// thread and the libraries' scratch included.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <vector>

#include "frit/data/prefetch.h"
#include "frit/data/token_file.h"
#include "frit/train/prepare.h"
#include "frit/train/trainer.h"
#include "tests/training.h"

// glibc's own, under the names by which it lets them be replaced: operator new, new[] and every library end up here.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
}

namespace {

std::atomic<int64_t> allocations{0};
std::atomic<bool> counting{false};
thread_local int64_t own_allocations = 0;

void count() {
  if (!counting.load(std::memory_order_relaxed)) return;
  ++allocations;
  ++own_allocations;
}

}  // namespace

extern "C" {
void* malloc(size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
  count();
  return __libc_calloc(n, bytes);
}
void* realloc(void* p, size_t bytes) {
  count();
  return __libc_realloc(p, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  count();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** p, size_t alignment, size_t bytes) {
  count();
  *p = __libc_memalign(alignment, bytes);
  return *p ? 0 : ENOMEM;
}
}

namespace frit {
namespace {

TEST(Allocation, IsCounted) {
  counting = true;
  const int64_t before = allocations;
  void* volatile a = malloc(10);
  int* volatile b = new int(3);
  auto* volatile c = new std::vector<int>(100);
  void* volatile d = std::aligned_alloc(256, 256);
  counting = false;
  EXPECT_EQ(allocations - before, 5);
  free(a), free(d);
  delete b;
  delete c;
}

// Real batches of changing shape from the prefetching thread, forward, backward and update.
void expect_no_allocation(const std::string& precision, int64_t accumulate, const std::string& gemm) {
  SCOPED_TRACE(precision + " " + gemm);
  const TestFolder folder("frit-allocation");
  write_corpus(folder.path(), "train", 2400, 1);
  TrainConfig config = tiny_config(folder.path(), "run");
  config.training.precision = precision;
  config.training.accumulate = accumulate;
  config.training.batch_tokens = 700;  // keys of 256, 512 and 768 tokens
  config.data.window = 3;
  config.run.gemm = gemm;
  const auto silent = [](std::string_view) {};
  const auto never = [] { return false; };
  const Tokenizer tokenizer = prepare_tokenizer(config, folder.path(), false, silent, never);
  ThreadPool pool(2);
  const TokenFile file = prepare_tokens(config, folder.path(), "train", config.data.train_source,
                                        config.data.train_target, tokenizer, pool, silent, never);
  Batcher batcher(file, train_batches(config, file, tokenizer), &tokenizer);
  Transformer model(model_config(config, tokenizer), training_options(config));
  model.initialise(1);
  TrainingStep step(model, pool, step_settings(config, model.workspace()));
  for (const BatchSize& size : batcher.sizes(0))
    for (const auto kind : {TrainingStep::Kind::kTrain, TrainingStep::Kind::kAccumulate}) step.plan(kind, size);
  step.reserve();
  const int64_t plans = step.plans();
  const int64_t batches = batcher.batches(0);
  std::vector<Batch> micro(static_cast<size_t>(accumulate));
  for (Batch& batch : micro) batcher.reserve(&batch);
  Prefetcher prefetcher(batcher, 2);
  std::vector<std::pair<int64_t, int64_t>> shapes;
  shapes.reserve(1000);
  const auto update = [&](int64_t i) {
    int64_t tokens = 0;
    for (Batch& batch : micro) {
      batch = *prefetcher.next();
      tokens += batch.target_tokens();
      shapes.emplace_back(batch.source_tokens(), batch.target_tokens());
    }
    const double rates[] = {1e-3};
    step.begin(i, tokens, rates, i + 1);
    for (int64_t m = 0; m < accumulate; ++m) step.forward_backward(micro[static_cast<size_t>(m)], m);
    step.update();
    const auto result = step.result(true);
    ASSERT_TRUE(result && result->finite);
    ASSERT_EQ(result->updates, i + 1);
  };
  // The ring's slots and the batcher's windows get their memory in the first steps.
  const int64_t warm = 6;
  ASSERT_GT(batches, 10);
  for (int64_t i = 0; i < warm; ++i) update(i);
  allocations = 0, own_allocations = 0;
  counting = true;
  const int64_t steps = batches / accumulate - warm - 1;
  for (int64_t i = 0; i < steps; ++i) update(warm + i);
  counting = false;
  EXPECT_EQ(own_allocations, 0) << "in the training thread";
  EXPECT_EQ(allocations, 0) << "in all threads";
  EXPECT_EQ(step.plans(), plans);
  std::sort(shapes.begin(), shapes.end());
  const auto different = std::unique(shapes.begin(), shapes.end()) - shapes.begin();
  EXPECT_GT(different, 5) << "the batches' shapes hardly changed";
}

TEST(Allocation, NoneInTrainingSteps) {
  expect_no_allocation("fp32", 1, "");
  expect_no_allocation("fp32", 2, "");
  expect_no_allocation("bf16-master", 1, "");
  expect_no_allocation("bf16-residual", 2, "");
}

}  // namespace
}  // namespace frit
