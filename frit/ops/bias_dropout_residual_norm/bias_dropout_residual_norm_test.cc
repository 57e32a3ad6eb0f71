// One launch gives the bits of two: bias_dropout_residual_norm against bias_dropout_residual and layer_norm.
#include "frit/ops/bias_dropout_residual_norm/bias_dropout_residual_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "frit/ops/case.h"
#include "frit/ops/layer_norm/layer_norm.h"

namespace frit {
namespace {

class BiasDropoutResidualNormGpu : public ::testing::Test {
 protected:
  BiasDropoutResidualNormGpu()
      : gpu_(make_gpu()), memory_(gpu_.get()), pool_(1), context_(pool_, memory_, gpu_.get()) {}
  Buffer filled(Shape shape, DType dtype, double mean, double deviation) {
    Buffer b = context_.allocate(shape, dtype, "test");
    std::vector<unsigned char> bytes(static_cast<size_t>(b->bytes()));
    for (int64_t i = 0; i < b->numel(); ++i) {
      const float v = static_cast<float>(mean + deviation * random_.normal());
      if (dtype == DType::kF32) {
        std::memcpy(&bytes[static_cast<size_t>(4 * i)], &v, 4);
      } else {
        const bfloat16 rounded(v);
        std::memcpy(&bytes[static_cast<size_t>(2 * i)], &rounded, 2);
      }
    }
    gpu_->upload(b->raw(), bytes.data(), bytes.size());
    return b;
  }
  Buffer empty(Shape shape, DType dtype) {
    Buffer b = context_.allocate(shape, dtype, "test");
    gpu_->fill(b->raw(), 0xff, static_cast<size_t>(b->bytes()));
    return b;
  }
  std::vector<unsigned char> bytes_of(const Tensor& t) {
    std::vector<unsigned char> bytes(static_cast<size_t>(t.bytes()));
    gpu_->download(bytes.data(), t.raw(), bytes.size());
    return bytes;
  }
  std::vector<float> floats_of(const Tensor& t) {
    std::vector<float> v(static_cast<size_t>(t.numel()));
    gpu_->download(v.data(), t.raw(), v.size() * 4);
    return v;
  }
  struct Results {
    std::vector<std::vector<unsigned char>> forward, backward;
    std::vector<float> dbias;
    std::string forward_used, backward_used;
    int64_t forward_launches = 0;
  };
  // Both directions with the same numbers every time.
  Results run(int64_t rows, int64_t cols, DType dtype, float p_drop) {
    random_ = CaseRandom{5};
    const Buffer x = filled({rows, cols}, dtype, 0, 1), bias = filled({cols}, dtype, 0, 1),
                 residual = filled({rows, cols}, dtype, 0.5, 2), gamma = filled({cols}, dtype, 1, 0.5),
                 beta = filled({cols}, dtype, 0, 1), dy = filled({rows, cols}, dtype, 0, 1),
                 more = filled({rows, cols}, dtype, 0, 1);
    const Buffer s = empty({rows, cols}, dtype), y = empty({rows, cols}, dtype), mean = empty({rows}, DType::kF32),
                 rstd = empty({rows}, DType::kF32), ds = empty({rows, cols}, dtype), dx = empty({rows, cols}, dtype),
                 dgamma = empty({cols}, DType::kF32), dbeta = empty({cols}, DType::kF32),
                 dbias = empty({cols}, DType::kF32);
    const Dropout dropout{p_drop, dropout_site("test"), 0, {3, 4}};
    Results r;
    const int64_t before = gpu_->launches();
    bias_dropout_residual_norm_forward(context_, x, bias, residual, dropout, gamma, beta, 1e-5f, s, y, mean, rstd);
    r.forward_launches = gpu_->launches() - before;
    bias_dropout_residual_norm_backward(context_, dy, s, gamma, mean, rstd, more, dropout, false, ds, dx, dgamma, dbeta,
                                        dbias);
    r.forward = {bytes_of(s), bytes_of(y), bytes_of(mean), bytes_of(rstd)};
    r.backward = {bytes_of(ds), bytes_of(dx), bytes_of(dgamma), bytes_of(dbeta)};
    r.dbias = floats_of(dbias);
    r.forward_used = context_.used("bias_dropout_residual_norm_forward");
    r.backward_used = context_.used("bias_dropout_residual_norm_backward");
    // The norm alone, of the sum: what is computed again in backward.
    const Buffer again = empty({rows, cols}, dtype);
    layer_norm_forward(context_, s, gamma, beta, 1e-5f, again, {}, {});
    EXPECT_EQ(bytes_of(again), r.forward[1]);
    return r;
  }

  std::unique_ptr<Gpu> gpu_;
  Memory memory_;
  ThreadPool pool_;
  Context context_;
  CaseRandom random_{5};
};

TEST_F(BiasDropoutResidualNormGpu, HasTheBitsOfTheTwoOperators) {
  const struct {
    int64_t rows, cols;
    const char* norm;  // what layer_norm_forward is told to run; empty: nothing
    const char *forward, *backward;
  } shapes[] = {{67, 200, "", "one_sync_1", "xhat_1"},
                {35, 512, "", "held", "held"},
                {35, 512, "one_sync_2", "one_sync_2", "held"},
                {35, 512, "spans_2", "spans_2", "held"},
                {9, 1024, "", "held", "held"},
                {9, 1024, "spans_4", "spans_4", "held"},
                {5, 33, "", "one_sync_1", "xhat_1"},
                {5, 1023, "", "apart", "apart"},
                {3, 1280, "", "spans_5", "apart"},
                {3, 1500, "", "apart", "apart"},
                {3, 1504, "", "held", "held"},
                {5, 600, "", "held", "held"},
                {3, 4096, "", "held", "held"},
                {2, 40, "moments", "apart", "xhat_1"}};
  for (const auto& shape : shapes) {
    SCOPED_TRACE(fmt::format("{}x{} {}", shape.rows, shape.cols, shape.norm));
    for (const float p : {0.0f, 0.3f}) {
      context_.force("layer_norm_forward", shape.norm);
      for (const char* direction : {"forward", "backward"})
        context_.force(std::string("bias_dropout_residual_norm_") + direction, "");
      const Results one = run(shape.rows, shape.cols, DType::kBF16, p);
      EXPECT_EQ(one.forward_used, shape.forward);
      EXPECT_EQ(one.backward_used, shape.backward);
      EXPECT_EQ(one.forward_launches, std::string_view(shape.forward) == "apart" ? 2 : 1);
      for (const char* direction : {"forward", "backward"})
        context_.force(std::string("bias_dropout_residual_norm_") + direction, "apart");
      context_.force("layer_norm_backward", std::string_view(shape.backward) == "apart" ? "" : shape.backward);
      const Results two = run(shape.rows, shape.cols, DType::kBF16, p);
      context_.force("layer_norm_backward", "");
      EXPECT_EQ(two.forward_used, "apart");
      EXPECT_EQ(two.backward_used, "apart");
      EXPECT_EQ(one.forward, two.forward);
      EXPECT_EQ(one.backward, two.backward);
      for (size_t i = 0; i < one.dbias.size(); ++i) ASSERT_NEAR(one.dbias[i], two.dbias[i], 1e-4) << i;
    }
  }
}

}  // namespace
}  // namespace frit
