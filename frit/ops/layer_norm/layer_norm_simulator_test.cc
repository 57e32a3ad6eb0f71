// What the case table does not show: how the forms that layer_norm keeps differ in cost and in error, operands that
// share memory, and rows of any alignment.
#include "frit/ops/layer_norm/layer_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "frit/backend/sim/machine.h"
#include "frit/ops/case.h"
#include "frit/ops/layer_norm/backward.h"

namespace frit {
namespace {

// Operands of one call on the GPU of this build.
class Rows {
 public:
  Rows(int64_t rows, int64_t cols, double mean = 0.5, double deviation = 2)
      : rows(rows), cols(cols), gpu_(make_gpu()), memory_(gpu_.get()), pool_(1), context_(pool_, memory_, gpu_.get()) {
    CaseRandom random{7};
    const auto normal = [&](int64_t n, double m, double d) {
      std::vector<float> v(n);
      for (float& x : v) x = static_cast<float>(m + d * random.normal());
      return v;
    };
    x = normal(rows * cols, mean, deviation), dy = normal(rows * cols, 0, 1), dresidual = normal(rows * cols, 0, 1);
    gamma = normal(cols, 1, 0.5), beta = normal(cols, 0, 1);
  }
  Context& context() { return context_; }
  Gpu& gpu() { return *gpu_; }
  Buffer put(const std::vector<float>& v, Shape shape) {
    Buffer b = context_.allocate(shape, DType::kF32, "test");
    gpu_->upload(b->raw(), v.data(), v.size() * 4);
    return b;
  }
  // [rows, cols] whose rows begin `shift` elements past a multiple of `stride`.
  Tensor put_strided(const std::vector<float>& v, int64_t stride, int64_t shift, std::vector<Buffer>& keep) {
    keep.push_back(context_.allocate({rows, stride}, DType::kF32, "test"));
    const Tensor t = keep.back()->columns(shift, shift + cols);
    for (int64_t r = 0; r < rows; ++r) gpu_->upload(t.data<float>() + r * stride, v.data() + r * cols, cols * 4);
    return t;
  }
  std::vector<float> get(const Tensor& t) {
    const int64_t n = t.rank() == 2 ? t.dim(0) : 1, inner = t.rank() == 2 ? t.dim(1) : t.dim(0);
    std::vector<float> v(n * inner);
    for (int64_t r = 0; r < n; ++r)
      gpu_->download(v.data() + r * inner, t.data<float>() + r * (n > 1 ? t.row_stride() : 0), inner * 4);
    return v;
  }

  int64_t rows, cols;
  std::vector<float> x, dy, dresidual, gamma, beta;

 private:
  std::unique_ptr<Gpu> gpu_;
  Memory memory_;
  ThreadPool pool_;
  Context context_;
};

constexpr float kEps = 1e-5f;

struct Forward {
  std::vector<float> y, mean, rstd;
};
Forward forward(Rows& t, const char* instance) {
  t.context().force("layer_norm_forward", instance);
  const Buffer x = t.put(t.x, {t.rows, t.cols}), gamma = t.put(t.gamma, {t.cols}), beta = t.put(t.beta, {t.cols});
  const Buffer y = t.context().allocate({t.rows, t.cols}, DType::kF32, "y"),
               mean = t.context().allocate({t.rows}, DType::kF32, "mean"),
               rstd = t.context().allocate({t.rows}, DType::kF32, "rstd");
  layer_norm_forward(t.context(), x, gamma, beta, kEps, y, mean, rstd);
  return {t.get(y), t.get(mean), t.get(rstd)};
}
struct Gradients {
  std::vector<float> dx, dgamma, dbeta;
};
Gradients backward(Rows& t, const char* instance) {
  const Forward f = forward(t, "");
  t.context().force("layer_norm_backward", instance);
  const Buffer x = t.put(t.x, {t.rows, t.cols}), dy = t.put(t.dy, {t.rows, t.cols}), gamma = t.put(t.gamma, {t.cols}),
               mean = t.put(f.mean, {t.rows}), rstd = t.put(f.rstd, {t.rows});
  const Buffer dx = t.context().allocate({t.rows, t.cols}, DType::kF32, "dx"),
               dgamma = t.context().allocate({t.cols}, DType::kF32, "dgamma"),
               dbeta = t.context().allocate({t.cols}, DType::kF32, "dbeta");
  layer_norm_backward(t.context(), dy, x, gamma, mean, rstd, {}, false, dx, dgamma, dbeta);
  return {t.get(dx), t.get(dgamma), t.get(dbeta)};
}

// dx in double from the fp32 inputs.
std::vector<double> exact_dx(const Rows& t) {
  std::vector<double> dx(t.rows * t.cols);
  const double m = static_cast<double>(t.cols);
  for (int64_t r = 0; r < t.rows; ++r) {
    double mean = 0, variance = 0, sum = 0, product = 0;
    const float *x = &t.x[r * t.cols], *dy = &t.dy[r * t.cols];
    for (int64_t i = 0; i < t.cols; ++i) mean += x[i] / m;
    for (int64_t i = 0; i < t.cols; ++i) variance += (x[i] - mean) * (x[i] - mean) / m;
    const double rstd = 1 / std::sqrt(variance + static_cast<double>(kEps));
    for (int64_t i = 0; i < t.cols; ++i) {
      const double g = static_cast<double>(t.gamma[i]) * dy[i];
      sum += g, product += g * (x[i] - mean) * rstd;
    }
    for (int64_t i = 0; i < t.cols; ++i)
      dx[r * t.cols + i] =
          rstd * (static_cast<double>(t.gamma[i]) * dy[i] - (sum + (x[i] - mean) * rstd * product) / m);
  }
  return dx;
}
double rms_error(const std::vector<float>& got, const std::vector<double>& want) {
  double sum = 0;
  for (size_t i = 0; i < want.size(); ++i) sum += (got[i] - want[i]) * (got[i] - want[i]);
  return std::sqrt(sum / static_cast<double>(want.size()));
}

// The slides' form of dx loses what it cancels: its error beside the xhat form's grows with mean / std.
TEST(LayerNorm, ErrorOfTheSlidesFormGrows) {
  double ratios[3];
  const double means[] = {0, 10, 1000};
  for (int i = 0; i < 3; ++i) {
    Rows t(48, 1024, means[i], 1);
    const std::vector<double> want = exact_dx(t);
    const double xhat = rms_error(backward(t, "xhat_1").dx, want), slides = rms_error(backward(t, "slides").dx, want),
                 dependence = rms_error(backward(t, "dependence").dx, want);
    ratios[i] = slides / xhat;
    std::printf("mean %g: rms error of dx, xhat %.2e, slides %.2e (%.2f times), dependence %.2e\n", means[i], xhat,
                slides, ratios[i], dependence);
    EXPECT_LT(dependence, 2 * xhat) << "mean " << means[i];
  }
  EXPECT_LT(ratios[0], 1.5);
  EXPECT_GT(ratios[1], ratios[0]);
  EXPECT_GT(ratios[2], 2);
}

// E[x^2] - E[x]^2 errs by eps * (mean / std)^2; the other forms do not.
TEST(LayerNorm, ErrorOfMomentsGrows) {
  for (const double mean : {1.0, 30.0, 1000.0}) {
    Rows t(16, 1024, mean, 1);
    const auto error = [&](const char* instance) {
      const Forward f = forward(t, instance);
      double worst = 0;
      for (int64_t r = 0; r < t.rows; ++r) {
        double m = 0, variance = 0;
        for (int64_t i = 0; i < t.cols; ++i) m += t.x[r * t.cols + i] / static_cast<double>(t.cols);
        for (int64_t i = 0; i < t.cols; ++i)
          variance += std::pow(t.x[r * t.cols + i] - m, 2) / static_cast<double>(t.cols);
        const double rstd = 1 / std::sqrt(variance + static_cast<double>(kEps));
        worst = std::max(worst, std::abs(f.rstd[r] / rstd - 1));
      }
      return worst;
    };
    const double ours = error("one_sync_1"), two = error("two_sync"), moments = error("moments");
    const double formula = 0x1p-24 * mean * mean;
    std::printf(
        "mean %g std 1: largest relative error of rstd, ours %.1e, two_sync %.1e, moments %.1e (eps (mean/std)^2 = "
        "%.1e)\n",
        mean, ours, two, moments, formula);
    EXPECT_LT(ours, 1e-6);
    EXPECT_LT(two, 1e-6);
    EXPECT_LT(moments, 1e-6 + 4 * formula);
    if (mean >= 1000) {
      EXPECT_GT(moments, 100 * ours);
    }
  }
}

// Rows that begin anywhere, of every operand apart: the bits are those of aligned rows, because a thread's columns are
// the same. dx may be dy, and dresidual may be dx, also there.
TEST(LayerNorm, BitsDoNotDependOnAlignmentOrAliasing) {
  for (const int64_t cols : {130, 1001, 1025}) {
    Rows t(7, cols);
    std::vector<Buffer> keep;
    const Forward f = forward(t, "");
    const Buffer x = t.put(t.x, {t.rows, cols}), dy = t.put(t.dy, {t.rows, cols}),
                 residual = t.put(t.dresidual, {t.rows, cols}), gamma = t.put(t.gamma, {cols}),
                 beta = t.put(t.beta, {cols}), mean = t.put(f.mean, {t.rows}), rstd = t.put(f.rstd, {t.rows});
    const Buffer dgamma = t.context().allocate({cols}, DType::kF32, "dgamma"),
                 dbeta = t.context().allocate({cols}, DType::kF32, "dbeta"),
                 dx = t.context().allocate({t.rows, cols}, DType::kF32, "dx");
    for (const std::string instance : {cols > 1024 ? "xhat_2" : "xhat_1", "xhat_2", "xhat_4", "looped"}) {
      t.context().force("layer_norm_backward", instance);
      layer_norm_backward(t.context(), dy, x, gamma, mean, rstd, residual, false, dx, dgamma, dbeta);
      const std::vector<float> want_dx = t.get(dx), want_dgamma = t.get(dgamma);
      for (int64_t shift = 0; shift < 4; ++shift) {
        const Tensor far_x = t.put_strided(t.x, cols + 7, shift, keep);
        const Tensor far_dy = t.put_strided(t.dy, cols + 6, 3 - shift, keep);
        const Tensor far_residual = t.put_strided(t.dresidual, cols + 5, (shift + 2) % 4, keep);
        layer_norm_backward(t.context(), far_dy, far_x, gamma, mean, rstd, far_residual, false, far_dy, dgamma, dbeta);
        EXPECT_EQ(t.get(far_dy), want_dx) << instance << " dx is dy, " << cols << " columns, shift " << shift;
        EXPECT_EQ(t.get(dgamma), want_dgamma) << instance;
        const Tensor again_dy = t.put_strided(t.dy, cols + 6, 3 - shift, keep);
        layer_norm_backward(t.context(), again_dy, far_x, gamma, mean, rstd, far_residual, false, far_residual, dgamma,
                            dbeta);
        EXPECT_EQ(t.get(far_residual), want_dx)
            << instance << " dx is dresidual, " << cols << " columns, shift " << shift;
      }
    }
    for (const char* instance : {cols > 1024 ? "one_sync_2" : "one_sync_1", "one_sync_4", "looped"}) {
      t.context().force("layer_norm_forward", instance);
      const std::vector<float> want = forward(t, instance).y;
      for (int64_t shift = 0; shift < 4; ++shift) {  // in place, and without mean and rstd
        const Tensor far_x = t.put_strided(t.x, cols + 7, shift, keep);
        layer_norm_forward(t.context(), far_x, gamma, beta, kEps, far_x, {}, {});
        EXPECT_EQ(t.get(far_x), want) << instance << " y is x, " << cols << " columns, shift " << shift;
      }
    }
  }
}

// Where threads take a row's vectors as they lie, the order of additions follows the row's place; but outputs that are
// inputs, too, change nothing, wherever each operand begins, and no element is far from that of aligned rows.
TEST(LayerNorm, SpansMayWorkInPlaceAtAnyAlignment) {
  for (const int64_t cols : {132, 513, 1001}) {
    Rows t(11, cols);
    std::vector<Buffer> keep;
    const Forward f = forward(t, "looped");
    const Buffer gamma = t.put(t.gamma, {cols}), beta = t.put(t.beta, {cols}), mean = t.put(f.mean, {t.rows}),
                 rstd = t.put(f.rstd, {t.rows}), x = t.put(t.x, {t.rows, cols}), dy = t.put(t.dy, {t.rows, cols}),
                 residual = t.put(t.dresidual, {t.rows, cols});
    const Buffer dgamma = t.context().allocate({cols}, DType::kF32, "dgamma"),
                 dbeta = t.context().allocate({cols}, DType::kF32, "dbeta"),
                 dx = t.context().allocate({t.rows, cols}, DType::kF32, "dx");
    t.context().force("layer_norm_backward", "looped");
    layer_norm_backward(t.context(), dy, x, gamma, mean, rstd, residual, false, dx, dgamma, dbeta);
    const std::vector<float> aligned_dx = t.get(dx), aligned_dgamma = t.get(dgamma);
    const auto near = [](const std::vector<float>& a, const std::vector<float>& b) {
      float most = 0;
      for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]) / (1 + std::abs(b[i])));
      return most < 1e-5f;
    };
    for (const char* instance : {"spans_2", "spans_4", "spans_5"}) {
      t.context().force("layer_norm_backward", instance);
      t.context().force("layer_norm_forward", instance);
      for (int64_t shift = 0; shift < 4; ++shift) {
        for (int64_t gap : {4 - cols % 4, 7 - cols % 4}) {  // rows a multiple of 16 bytes apart, and not
          const auto what = fmt::format("{}, {} columns, shift {}, gap {}", instance, cols, shift, gap);
          const Tensor far_x = t.put_strided(t.x, cols + gap, shift, keep);
          const Tensor far_dy = t.put_strided(t.dy, cols + 6, 3 - shift, keep);
          const Tensor far_residual = t.put_strided(t.dresidual, cols + 5, (shift + 2) % 4, keep);
          layer_norm_backward(t.context(), far_dy, far_x, gamma, mean, rstd, far_residual, false, dx, dgamma, dbeta);
          const std::vector<float> want_dx = t.get(dx), want_dgamma = t.get(dgamma);
          EXPECT_TRUE(near(want_dx, aligned_dx)) << what;
          EXPECT_TRUE(near(want_dgamma, aligned_dgamma)) << what;
          layer_norm_backward(t.context(), far_dy, far_x, gamma, mean, rstd, far_residual, false, far_dy, dgamma,
                              dbeta);
          EXPECT_EQ(t.get(far_dy), want_dx) << "dx is dy, " << what;
          EXPECT_EQ(t.get(dgamma), want_dgamma) << what;
          const Tensor again_dy = t.put_strided(t.dy, cols + 6, 3 - shift, keep);
          layer_norm_backward(t.context(), again_dy, far_x, gamma, mean, rstd, far_residual, false, far_residual,
                              dgamma, dbeta);
          EXPECT_EQ(t.get(far_residual), want_dx) << "dx is dresidual, " << what;
          layer_norm_forward(t.context(), far_x, gamma, beta, kEps, dx, {}, {});
          EXPECT_TRUE(near(t.get(dx), f.y)) << what;
          const std::vector<float> want = t.get(dx);
          layer_norm_forward(t.context(), far_x, gamma, beta, kEps, far_x, {}, {});
          EXPECT_EQ(t.get(far_x), want) << "y is x, " << what;
        }
      }
    }
  }
}

// Forms that are kept to be measured never run unasked, whatever a tuning file says.
TEST(LayerNorm, MeasuredFormsAreNotTuned) {
  Rows t(4, 64);
  Tuning tuning;
  tuning.set("layer_norm_forward", "4x64/f32", "moments");
  tuning.set("layer_norm_backward", "4x64/f32", "atomic");
  t.context().set_tuning(&tuning);
  backward(t, "");
  EXPECT_EQ(t.context().used("layer_norm_forward"), "one_sync_1");
  EXPECT_EQ(t.context().used("layer_norm_backward"), "xhat_1");
  tuning.set("layer_norm_forward", "4x64/f32", "one_sync_2");
  backward(t, "");
  EXPECT_EQ(t.context().used("layer_norm_forward"), "one_sync_2");
}

sim::Counts counts_of(Rows& t, const std::function<void()>& work) {
  auto& gpu = static_cast<sim::SimGpu&>(t.gpu());
  gpu.reset_counts();
  work();
  return gpu.counts();
}

// What rewriting saves: barriers. What fusing saves: launches and bytes.
TEST(LayerNorm, CostOfEachForm) {
  const int64_t rows = 64, cols = 1024, pass = rows * cols * 4;
  Rows t(rows, cols);
  const auto forward_counts = [&](const char* name) { return counts_of(t, [&] { forward(t, name); }); };
  const sim::Counts ours = forward_counts("one_sync_1"), two = forward_counts("two_sync"),
                    moments = forward_counts("moments");
  EXPECT_EQ(ours.barriers, 1);
  EXPECT_EQ(two.barriers, 2);
  EXPECT_EQ(moments.barriers, 1);
  EXPECT_EQ(ours.read_bytes, two.read_bytes);
  EXPECT_EQ(ours.read_bytes, moments.read_bytes);

  const sim::Counts before = forward_counts("");
  const auto backward_counts = [&](const char* name) {
    sim::Counts c = counts_of(t, [&] { backward(t, name); });
    c.launches -= before.launches, c.barriers -= before.barriers;  // of the forward that it needs
    c.read_bytes -= before.read_bytes, c.written_bytes -= before.written_bytes;
    return c;
  };
  // A block of 8 warps takes 2 rows at a time, 16 blocks 4 rows each: 2 batches.
  const sim::Counts xhat = backward_counts("xhat_1"), slides = backward_counts("slides"),
                    dependence = backward_counts("dependence");
  EXPECT_EQ(xhat.launches, 2);
  EXPECT_EQ(xhat.barriers, 2 + 1);
  EXPECT_EQ(slides.barriers, 2 + 1);
  EXPECT_EQ(dependence.barriers, 4 + 1);
  EXPECT_EQ(slides.read_bytes, xhat.read_bytes);
  EXPECT_EQ(dependence.read_bytes, xhat.read_bytes);
  const int64_t small = 16 * cols * 4 + 8 * 8 * rows;  // gamma once a block, mean and rstd once a warp
  EXPECT_EQ(xhat.read_bytes, 2 * pass + small + 16 * 2 * cols * 4);
  EXPECT_EQ(xhat.atomics, 0);
  for (const char* name : {"column_serial", "atomic", "tiled_32x32", "tiled_32x33", "two_stage_apart"}) {
    const sim::Counts apart = backward_counts(name);
    const bool atomic = std::string(name) == "atomic";
    EXPECT_EQ(apart.launches, atomic ? 4 : 3) << name;
    // x and dy twice, and a thread reads mean and rstd beside every element; one row of partial sums is added.
    EXPECT_EQ(apart.read_bytes, 4 * pass + small + 2 * pass + 2 * cols * 4) << name;
    EXPECT_EQ(apart.atomics, atomic ? 2 * rows * cols : 0) << name;
  }
}

// The tile read along columns: 32 rounds an access with rows of 32 floats, 1 with rows of 33.
TEST(LayerNorm, BankConflictsOfTheTile) {
  const int64_t rows = 512, cols = 96;
  Rows t(rows, cols);
  const Forward f = forward(t, "");
  const Buffer x = t.put(t.x, {rows, cols}), dy = t.put(t.dy, {rows, cols}), gamma = t.put(t.gamma, {cols}),
               mean = t.put(f.mean, {rows}), rstd = t.put(f.rstd, {rows}),
               partials = t.context().allocate({1, 2 * cols}, DType::kF32, "partials");
  const Tensor none;
  const LayerNormBackward operands = {dy, x, gamma, mean, rstd, none, none, partials};
  const auto count = [&](ColumnWay way) {
    return counts_of(t, [&] { layer_norm_sum_columns(t.context(), operands, way); });
  };
  const sim::Counts plain = count(ColumnWay::kTiled32x32), padded = count(ColumnWay::kTiled32x33);
  const int64_t warps = cols / 32 * 32;
  EXPECT_EQ(plain.shared_accesses, warps * 4);  // two writes, two reads
  EXPECT_EQ(padded.shared_accesses, warps * 4);
  EXPECT_EQ(plain.shared_rounds, warps * (2 * 1 + 2 * 32));
  EXPECT_EQ(padded.shared_rounds, warps * 4);
  EXPECT_EQ(2 * plain.shared_rounds, 33 * plain.shared_accesses);  // 16.5 rounds an access
  // 16 rows a thread: 32 loads of x and dy and two stores of sums, of a round each, beside the tile's 4 accesses.
  EXPECT_NEAR((34 + static_cast<double>(plain.shared_rounds) / static_cast<double>(warps)) / (34 + 4), 2.63, 0.005);
}

}  // namespace
}  // namespace frit
