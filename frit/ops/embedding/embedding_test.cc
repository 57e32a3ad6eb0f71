// Errors of embedding, and that nothing is written when one is found.
#include "frit/ops/embedding/embedding.h"

#include <gtest/gtest.h>

#include <vector>

namespace frit {
namespace {

struct EmbeddingErrors : testing::Test {
  ThreadPool pool{2};
  Memory memory;
  Context context{pool, memory};
  std::vector<int32_t> ids{1, 0, 2}, offsets{0, 2, 3}, position_ids{0, 1, 3};
  std::vector<float> table = std::vector<float>(3 * 4, 1.0f), positions = std::vector<float>(2 * 4, 1.0f);
  std::vector<float> y = std::vector<float>(3 * 4, -7.0f);

  EmbeddingArgs args() {
    EmbeddingArgs a;
    a.ids = Tensor(ids.data(), DType::kI32, {3});
    a.offsets = Tensor(offsets.data(), DType::kI32, {3});
    a.table = Tensor(table.data(), DType::kF32, {3, 4});
    a.positions = Tensor(positions.data(), DType::kF32, {2, 4});
    return a;
  }
  void expect_refused(const EmbeddingArgs& a) {
    EXPECT_THROW(embedding_forward(context, a, Tensor(y.data(), DType::kF32, {3, 4})), std::invalid_argument);
    for (float v : y) EXPECT_EQ(v, -7.0f);
  }
};

TEST_F(EmbeddingErrors, AcceptsWhatIsInRange) {
  embedding_forward(context, args(), Tensor(y.data(), DType::kF32, {3, 4}));
  for (float v : y) EXPECT_EQ(v, 2.0f);
}
TEST_F(EmbeddingErrors, IdsOutOfRange) {
  for (int32_t bad : {-1, 3}) {
    ids[2] = bad;
    expect_refused(args());
  }
}
TEST_F(EmbeddingErrors, PositionsOutOfRange) {
  EmbeddingArgs a = args();
  a.position_offset = 1;
  expect_refused(a);
  a = args();
  a.position_ids = Tensor(position_ids.data(), DType::kI32, {3});
  expect_refused(a);
}
TEST_F(EmbeddingErrors, OffsetsThatDoNotCoverTheTokens) {
  offsets[2] = 2;
  expect_refused(args());
  offsets = {1, 2, 3};
  expect_refused(args());
  offsets = {0, 4, 3};
  expect_refused(args());
}

}  // namespace
}  // namespace frit
