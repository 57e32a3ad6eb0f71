#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/gradient_norm/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/gradient_norm/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

// Sixteen running sums whatever the target: element i of a piece goes to sum i % 16. A square of two fp32 numbers is
// exact in fp64, so fused or not, every target gives the same bits.
constexpr size_t kSums = 16;

using DD = hn::CappedTag<double, kSums>;
HWY_INLINE hn::Vec<DD> load_double(const float* p) {
  return hn::PromoteTo(DD(), hn::LoadU(hn::Rebind<float, DD>(), p));
}
HWY_INLINE hn::Vec<DD> load_double(const bfloat16* p) {
  const hn::Rebind<uint32_t, DD> du32;
  const auto bits = hn::LoadU(hn::Rebind<uint16_t, DD>(), reinterpret_cast<const uint16_t*>(p));
  return hn::PromoteTo(DD(), hn::BitCast(hn::Rebind<float, DD>(), hn::ShiftLeft<16>(hn::PromoteTo(du32, bits))));
}

template <typename T>
double sum_of_squares(const T* g, int64_t n) {
  constexpr size_t kLanes = hn::MaxLanes(DD()), kVectors = kSums / kLanes;
  hn::Vec<DD> sums[kVectors];
  for (size_t j = 0; j < kVectors; ++j) sums[j] = hn::Zero(DD());
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kSums) <= n; i += kSums) {
    for (size_t j = 0; j < kVectors; ++j) {
      const auto x = load_double(g + i + j * kLanes);
      sums[j] = hn::MulAdd(x, x, sums[j]);
    }
  }
  HWY_ALIGN double total[kSums];
  for (size_t j = 0; j < kVectors; ++j) hn::Store(sums[j], DD(), total + j * kLanes);
  for (size_t j = 0; i < n; ++i, ++j) {
    const double x = static_cast<float>(g[i]);
    total[j] += x * x;
  }
  for (size_t half = kSums / 2; half > 0; half /= 2)
    for (size_t j = 0; j < half; ++j) total[j] += total[j + half];
  return total[0];
}
double sum_of_squares_f32(const float* g, int64_t n) {
  return sum_of_squares(g, n);
}
double sum_of_squares_bf16(const bfloat16* g, int64_t n) {
  return sum_of_squares(g, n);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(sum_of_squares_f32);
HWY_EXPORT(sum_of_squares_bf16);

int64_t gradient_norm_pieces(int64_t n) {
  return std::clamp<int64_t>(n / 16384, 1, 256);
}

void gradient_norm_cpu(Context& context, const Tensor& gradients, const Tensor& sum_of_squares,
                       const Tensor& not_finite) {
  const int64_t n = gradients.numel(), pieces = gradient_norm_pieces(n);
  Buffer partials = context.allocate({pieces}, DType::kF64, "gradient_norm.partials");
  if (context.planning()) return;
  double* partial = partials->data<double>();
  context.pool().run(pieces, [&](int64_t piece, int) {
    const auto cut = [&](int64_t p) { return p == pieces ? n : n / pieces * p / 16 * 16; };
    const int64_t begin = cut(piece), end = cut(piece + 1);
    partial[piece] = gradients.dtype() == DType::kF32
                         ? HWY_DYNAMIC_DISPATCH(sum_of_squares_f32)(gradients.data<float>() + begin, end - begin)
                         : HWY_DYNAMIC_DISPATCH(sum_of_squares_bf16)(gradients.data<bfloat16>() + begin, end - begin);
  });
  double total = 0;
  for (int64_t p = 0; p < pieces; ++p) total += partial[p];
  sum_of_squares.data<double>()[0] = total;
  // Squares of finite fp32 numbers cannot overflow fp64, and NaN and infinity stay in a sum: the total tells.
  not_finite.data<int32_t>()[0] = !std::isfinite(total);
}

}  // namespace frit
#endif
