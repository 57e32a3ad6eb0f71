// layer_norm_forward's `held` at every alignment: the bits are those of aligned rows, in place or not, and nothing
// beside the rows is touched. `in_place`: the same bits at the same place, and elsewhere to the last one. The ragged
// softmax's to the last one. Backward's `held`: the bits depend on where x lies alone.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "frit/ops/case.h"
#include "frit/ops/layer_norm/layer_norm.h"
#include "frit/ops/softmax/softmax.h"

namespace frit {
namespace {

using Bits = std::vector<uint16_t>;

class RowsAnywhere : public ::testing::Test {
 protected:
  RowsAnywhere() : gpu_(make_gpu()), memory_(gpu_.get()), pool_(1), context_(pool_, memory_, gpu_.get()) {}
  Bits normal(int64_t n, DType dtype) {
    Bits bits(static_cast<size_t>(n));
    for (uint16_t& b : bits) {
      const float v = static_cast<float>(0.5 + 2 * random_.normal());
      b = dtype == DType::kBF16 ? bfloat16(v).bits : float16(v).bits;
    }
    return bits;
  }
  // Rows `stride` elements apart, the first of which begins `shift` elements past a multiple of 16 bytes.
  Tensor put(const Bits& v, int64_t cols, DType dtype, int64_t stride, int64_t shift) {
    const int64_t rows = static_cast<int64_t>(v.size()) / cols;
    kept_.push_back(context_.allocate({rows, stride}, dtype, "test"));
    gpu_->fill(kept_.back()->raw(), kAround, static_cast<size_t>(kept_.back()->bytes()));
    const Tensor t = kept_.back()->columns(shift, shift + cols);
    for (int64_t r = 0; r < rows; ++r)
      gpu_->upload(static_cast<char*>(t.raw()) + 2 * r * stride, v.data() + r * cols, static_cast<size_t>(2 * cols));
    return t;
  }
  // The rows, if all that lies between them is as put() left it.
  Bits get(int64_t cols, int64_t shift) {
    const Tensor all = kept_.back();
    const int64_t rows = all.dim(0), stride = all.dim(1);
    Bits bits(static_cast<size_t>(rows * stride)), result;
    gpu_->download(bits.data(), all.raw(), bits.size() * 2);
    for (int64_t i = 0; i < rows * stride; ++i) {
      const int64_t c = i % stride - shift;
      if (c >= 0 && c < cols)
        result.push_back(bits[static_cast<size_t>(i)]);
      else
        EXPECT_EQ(bits[static_cast<size_t>(i)], kAround * 0x101) << "column " << c;
    }
    return result;
  }

  static constexpr int kAround = 0x5a;
  std::unique_ptr<Gpu> gpu_;
  Memory memory_;
  ThreadPool pool_;
  Context context_;
  CaseRandom random_{11};
  std::vector<Buffer> kept_;
};

TEST_F(RowsAnywhere, HeldNormsHaveTheSameBits) {
  constexpr int64_t kRows = 5;
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int64_t cols : {264, 512, 767, 1025, 1536, 2047}) {
      const Bits x = normal(kRows * cols, dtype), gamma = normal(cols, dtype), beta = normal(cols, dtype);
      const int64_t around = (cols + 7) / 8 * 8 + 16;
      const auto vector = [&](const Bits& v, int64_t shift) {
        return put(v, cols, dtype, around, shift).reshape({cols});
      };
      const auto run = [&](int64_t x_stride, int64_t x_shift, int64_t y_stride, int64_t y_shift, int64_t shared) {
        const Tensor g = vector(gamma, shared), b = vector(beta, shared);
        const Tensor from = put(x, cols, dtype, x_stride, x_shift);
        const Tensor to = y_stride > 0 ? put(x, cols, dtype, y_stride, y_shift) : from;
        layer_norm_forward(context_, from, g, b, 1e-5f, to, {}, {});
        EXPECT_EQ(context_.used("layer_norm_forward"), "held");
        Bits result = get(cols, y_stride > 0 ? y_shift : x_shift);
        kept_.clear();
        return result;
      };
      const Bits want = run(around, 0, around, 0, 0);
      for (int64_t shift = 0; shift < 8; ++shift) {
        EXPECT_EQ(run(around + shift % 3, shift, around + 5, 7 - shift, 0), want)
            << cols << " columns, shift " << shift;
        EXPECT_EQ(run(around + 1, shift, 0, 0, shift % 2 * 3), want) << cols << " columns in place, shift " << shift;
      }
    }
}

// Of rows that lie alike the order of a row's sums depends on how far past a multiple of 16 bytes it begins, and on
// nothing else; rows that do not are taken by `held`.
TEST_F(RowsAnywhere, NormsInPlaceAreTheSameToTheLastBit) {
  constexpr int64_t kRows = 9;
  context_.force("layer_norm_forward", "in_place");
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int64_t cols : {264, 519, 767, 1025, 1031, 2047}) {
      const Bits x = normal(kRows * cols, dtype), gamma = normal(cols, dtype), beta = normal(cols, dtype);
      const int64_t around = (cols + 7) / 8 * 8 + 16;
      const auto vector = [&](const Bits& v, int64_t shift) {
        return put(v, cols, dtype, around, shift).reshape({cols});
      };
      struct Place {
        int64_t stride, shift;
      };
      const auto run = [&](Place of_x, Place of_y, int64_t shared, bool in_place = false) {
        const Tensor g = vector(gamma, shared), b = vector(beta, shared);
        const Tensor from = put(x, cols, dtype, of_x.stride, of_x.shift);
        const Tensor to = in_place ? from : put(x, cols, dtype, of_y.stride, of_y.shift);
        layer_norm_forward(context_, from, g, b, 1e-5f, to, {}, {});
        Bits result = get(cols, of_y.shift);
        kept_.clear();
        return result;
      };
      const Bits want = run({around, 0}, {around, 0}, 0);
      const auto value = [&](uint16_t bits) {
        return dtype == DType::kBF16 ? static_cast<float>(bfloat16::from_bits(bits))
                                     : static_cast<float>(float16::from_bits(bits));
      };
      const auto is_near = [&](const Bits& got, int64_t shift, const char* what) {
        ASSERT_EQ(got.size(), want.size());
        for (size_t i = 0; i < got.size(); ++i) {
          // Near 0 what gamma's product and beta cancel is more than a last bit.
          const bool near = std::abs(static_cast<int>(got[i]) - static_cast<int>(want[i])) <= 1 ||
                            std::abs(value(got[i]) - value(want[i])) < 2e-6f;
          EXPECT_TRUE(near) << cols << " columns, shift " << shift << ", " << what << ", element " << i;
        }
      };
      for (int64_t shift = 0; shift < 8; ++shift) {
        const Place place = {around + shift % 3, shift};
        const Bits got = run(place, place, 0);
        is_near(got, shift, "alike");
        EXPECT_EQ(run({place.stride + 8, shift}, {place.stride + 16, shift}, 0), got)
            << cols << " columns, shift " << shift;
        EXPECT_EQ(run(place, place, 0, true), got) << cols << " columns in place, shift " << shift;
        is_near(run(place, place, shift % 4), shift, "beside gamma and beta elsewhere");
        is_near(run(place, {around + 5, 7 - shift}, 0), shift, "otherwise");
      }
    }
}

// Backward sums a row as x lies: its bits depend on that, but not on where all else lies, nor on whether dx is dy.
TEST_F(RowsAnywhere, HeldGradientsHaveTheBitsOfTheirRows) {
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int64_t cols : {511, 767, 1025, 2560}) {  // 2, 3 and 4 vectors a lane; warps that share a row
      const int64_t kRows = cols == 511 ? 137 : 5;       // some warps take a second row
      const Bits x = normal(kRows * cols, dtype), dy = normal(kRows * cols, dtype), more = normal(kRows * cols, dtype);
      const Bits gamma = normal(cols, dtype);
      const int64_t around = (cols + 7) / 8 * 8 + 16;
      const Buffer mean = context_.allocate({kRows}, DType::kF32, "test"),
                   rstd = context_.allocate({kRows}, DType::kF32, "test"),
                   dgamma = context_.allocate({cols}, DType::kF32, "test"),
                   dbeta = context_.allocate({cols}, DType::kF32, "test");
      layer_norm_forward(context_, put(x, cols, dtype, around, 0), put(gamma, cols, dtype, around, 0).reshape({cols}),
                         put(gamma, cols, dtype, around, 0).reshape({cols}), 1e-5f, put(x, cols, dtype, around, 0),
                         mean, rstd);
      kept_.clear();
      struct Result {
        Bits dx;
        std::vector<float> sums;
      };
      enum class Into { kElsewhere, kDy, kResidual };
      const auto run = [&](int64_t x_stride, int64_t x_shift, int64_t stride, int64_t shift, Into into) {
        const Tensor g = put(gamma, cols, dtype, around, shift).reshape({cols});
        const Tensor from = put(x, cols, dtype, x_stride, x_shift);
        Tensor gradient, residual, to;
        const auto put_gradient = [&] { gradient = put(dy, cols, dtype, stride, shift); };
        const auto put_residual = [&] { residual = put(more, cols, dtype, stride, shift); };
        if (into == Into::kDy)
          put_residual(), put_gradient(), to = gradient;
        else
          put_gradient(), put_residual(), to = into == Into::kResidual ? residual : put(x, cols, dtype, stride, shift);
        layer_norm_backward(context_, gradient, from, g, mean, rstd, residual, false, to, dgamma, dbeta);
        EXPECT_EQ(context_.used("layer_norm_backward"), "held");
        Result result{get(cols, shift), std::vector<float>(static_cast<size_t>(2 * cols))};
        gpu_->download(result.sums.data(), Tensor(dgamma).raw(), static_cast<size_t>(4 * cols));
        gpu_->download(result.sums.data() + cols, Tensor(dbeta).raw(), static_cast<size_t>(4 * cols));
        kept_.clear();
        return result;
      };
      for (int64_t shift = 0; shift < 8; ++shift) {
        const int64_t x_stride = around + shift % 3;
        const Result want = run(x_stride, shift, x_stride, shift, Into::kElsewhere);
        for (const Into into : {Into::kElsewhere, Into::kDy, Into::kResidual}) {
          const Result other = run(x_stride, shift, around + 5, 7 - shift, into);
          EXPECT_EQ(other.dx, want.dx) << cols << " columns, shift " << shift << ", into " << static_cast<int>(into);
          EXPECT_EQ(other.sums, want.sums) << cols << " columns, shift " << shift;
        }
      }
    }
}

// Where rows of all operands lie alike, the order of a row's sums depends on how far past a multiple of 16 bytes it
// begins: the last bit may differ, and no more, from other places and from where they lie otherwise.
TEST_F(RowsAnywhere, SoftmaxIsTheSameToTheLastBit) {
  constexpr int64_t kRows = 6;
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int64_t cols : {264, 511, 513, 801, 2049}) {
      const Bits x = normal(kRows * cols, dtype), dy = normal(kRows * cols, dtype);
      const int64_t around = (cols + 7) / 8 * 8 + 16;
      SoftmaxArgs args;
      args.dropout = Dropout{0.3f, dropout_site("test"), 0, {3, 4}};
      const Buffer lse = context_.allocate({kRows}, DType::kF32, "test");
      struct Place {
        int64_t stride, shift;
      };
      const auto run = [&](bool backward, Place of_x, Place of_dy, Place of_y) {
        const Tensor from = put(x, cols, dtype, of_x.stride, of_x.shift);
        const Tensor gradient = put(dy, cols, dtype, of_dy.stride, of_dy.shift);
        const Tensor to = put(x, cols, dtype, of_y.stride, of_y.shift);
        if (backward)
          softmax_backward(context_, gradient, from, lse, args, to);
        else
          softmax_forward(context_, from, args, to, lse);
        Bits result = get(cols, of_y.shift);
        kept_.clear();
        return result;
      };
      const auto alike = [&](bool backward, Place place) {
        const Bits result = run(backward, place, {place.stride + 8, place.shift}, place);
        EXPECT_EQ(context_.used(backward ? "softmax_backward" : "softmax_forward"),
                  cols <= 519 ? "row_per_warp" : "long_row_per_warp");
        return result;
      };
      for (const bool backward : {false, true}) {
        const Bits want = alike(backward, {around, 0});
        const auto is_near = [&](const Bits& got, int64_t shift, const char* what) {
          ASSERT_EQ(got.size(), want.size());
          for (size_t i = 0; i < got.size(); ++i)
            EXPECT_LE(std::abs(static_cast<int>(got[i]) - static_cast<int>(want[i])), 1)
                << cols << " columns, shift " << shift << ", " << what << ", element " << i;
        };
        for (int64_t shift = 0; shift < 8; ++shift) {
          const int64_t stride = around + shift % 3;
          const Bits got = alike(backward, {stride, shift});
          is_near(got, shift, "alike");
          EXPECT_EQ(alike(backward, {stride + 16, shift}), got) << cols << " columns, shift " << shift;
          is_near(run(backward, {stride, shift}, {stride + 1, 7 - shift}, {around + 5, 7 - shift}), shift, "otherwise");
        }
      }
    }
}

}  // namespace
}  // namespace frit
