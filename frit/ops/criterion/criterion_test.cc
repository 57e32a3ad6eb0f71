// What the case table cannot hold: values that are not finite, and errors.
#include "frit/ops/criterion/criterion.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace frit {
namespace {

struct Bench {
  ThreadPool pool{2};
  Memory memory;
  Context context{pool, memory};
};

TEST(Criterion, LossOfLogitsThatAreNotFiniteIsNotFinite) {
  Bench b;
  for (int64_t at : {0, 5, 511, 512, 1299})
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      std::vector<float> x(2 * 1300, 0.5f), loss(2), nll(2), scale{1.0f};
      std::vector<int32_t> labels{7, 7};
      x[at] = bad;
      criterion_forward_backward(b.context, Tensor(x.data(), DType::kF32, {2, 1300}), Tensor(),
                                 Tensor(labels.data(), DType::kI32, {2}), 0.1f, Tensor(scale.data(), DType::kF32, {1}),
                                 Tensor(loss.data(), DType::kF32, {2}), Tensor(nll.data(), DType::kF32, {2}));
      EXPECT_FALSE(std::isfinite(loss[0])) << at << " " << bad;
      EXPECT_TRUE(std::isfinite(loss[1]));
      EXPECT_NEAR(loss[1], std::log(1300.0), 1e-5);
    }
}

TEST(Criterion, Errors) {
  Bench b;
  std::vector<float> x(2 * 5), loss(2);
  std::vector<int32_t> labels{0, 5};
  const Tensor logits(x.data(), DType::kF32, {2, 5}), l(labels.data(), DType::kI32, {2}),
      out(loss.data(), DType::kF32, {2});
  EXPECT_THROW(criterion_forward_backward(b.context, logits, Tensor(), l, 0, Tensor(), out, out),
               std::invalid_argument);
  labels[1] = 4;
  EXPECT_NO_THROW(criterion_forward_backward(b.context, logits, Tensor(), l, 0, Tensor(), out, out));
  EXPECT_THROW(criterion_forward_backward(b.context, logits, Tensor(), l, -0.1f, Tensor(), out, out),
               std::invalid_argument);
  EXPECT_THROW(criterion_forward_backward(b.context, logits, out, l, 0, Tensor(), out, out), std::invalid_argument);
}

}  // namespace
}  // namespace frit
