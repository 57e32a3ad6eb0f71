#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/bias_activation_dropout/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/bias_activation_dropout/cpu.h"
#include "frit/ops/column_sum/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace {

// Columns whose dropout factors are made at a time: they stay in the first cache.
constexpr size_t kTile = 512;

// The activations: value(x), and slope(x) = the derivative at x.
struct Relu {
  static VF value(VF x) { return hn::Max(hn::Zero(DF()), x); }  // this order keeps NaN (x86 returns the second operand)
  static VF slope(VF x) { return hn::IfThenElseZero(hn::Gt(x, hn::Zero(DF())), hn::Set(DF(), 1.0f)); }
};

// Phi(x), the normal distribution function, with a small relative error in both tails, and e^(-x^2/2).
// Phi(-a) = e^(-a^2/2) * t * P(t) for a >= 0, t = 1 / (1 + 0.35 a), P of degree 8 fitted to a relative error of 3.2e-8
// over a in [0, 14] (least maximum, by reweighted least squares against erfc in double precision).
HWY_INLINE void normal_distribution(VF x, VF& phi, VF& bell) {
  const DF d;
  const VF a = hn::Abs(x);
  bell = exp_fast(hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f)));
  const VF one = hn::Set(d, 1.0f);
  const VF t = hn::Div(one, hn::MulAdd(a, hn::Set(d, 0.35f), one));
  VF p = hn::MulAdd(hn::Set(d, -0.02914591432820017f), t, hn::Set(d, 0.1439716265157678f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.2557141202580085f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.1591740224133677f));
  p = hn::MulAdd(p, t, hn::Set(d, -0.02310975077670028f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.10550797286339737f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.11983287439453424f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.1398618688967694f));
  p = hn::MulAdd(p, t, hn::Set(d, 0.13962140433398665f));
  const VF tail = hn::Mul(hn::Mul(bell, t), p);
  phi = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail));
}
struct Gelu {
  static VF value(VF x) {
    VF phi, bell;
    normal_distribution(x, phi, bell);
    return hn::Mul(x, phi);
  }
  static VF slope(VF x) {
    VF phi, bell;
    normal_distribution(x, phi, bell);
    return hn::MulAdd(hn::Mul(x, hn::Set(DF(), 0.398942280401433f)), bell, phi);
  }
};

// 0.5 * (1 + tanh(u)) = sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float kTwoRoot = 1.5957691216057308f;  // 2 * sqrt(2/pi)
  static VF gate(VF x) {
    const DF d;
    const VF cubic = hn::MulAdd(hn::Mul(x, x), hn::Set(d, 0.044715f), hn::Set(d, 1.0f));
    return sigmoid(hn::Mul(hn::Mul(x, cubic), hn::Set(d, kTwoRoot)));
  }
  static VF value(VF x) { return hn::Mul(x, gate(x)); }
  static VF slope(VF x) {
    const DF d;
    const VF one = hn::Set(d, 1.0f), s = gate(x);
    const VF inner = hn::Mul(hn::MulAdd(hn::Mul(x, x), hn::Set(d, 3 * 0.044715f), one), hn::Set(d, kTwoRoot));
    return hn::MulAdd(hn::Mul(x, inner), hn::Mul(s, hn::Sub(one, s)), s);
  }
};
struct Silu {
  static VF value(VF x) { return hn::Mul(x, sigmoid(x)); }
  static VF slope(VF x) {
    const VF one = hn::Set(DF(), 1.0f), s = sigmoid(x);
    return hn::Mul(s, hn::MulAdd(x, hn::Sub(one, s), one));
  }
};

template <typename T, typename Act>
void forward_rows_of(const Tensor& x, const Tensor& bias, const Dropout& dropout, const Tensor& y, int64_t begin,
                     int64_t end) {
  const size_t cols = static_cast<size_t>(x.dim(1));
  const bool active = dropout.active();
  HWY_ALIGN float factors[kTile];
  for (int64_t r = begin; r < end; ++r)
    for (size_t c = 0; c < cols; c += kTile) {
      const size_t width = std::min(kTile, cols - c);
      if (active) dropout_factors(dropout, r, 0, width, factors, c);
      const T* from = x.data<T>() + r * x.row_stride() + c;
      const T* add = bias.defined() ? bias.data<T>() + c : nullptr;
      T* to = y.data<T>() + r * y.row_stride() + c;
      for_columns(width, [&](size_t i, size_t n) {
        VF v = load_any(from + i, n);
        if (add) v = hn::Add(v, load_any(add + i, n));
        v = Act::value(v);
        if (active) v = hn::Mul(v, hn::Load(DF(), factors + i));
        store_any(v, to + i, n);
      });
    }
}

// sum: this piece's column sums of dx, or null.
template <typename T, typename Act>
void backward_rows_of(const Tensor& dy, const Tensor& x, const Tensor& bias, const ActivationBackward& form,
                      const Tensor& dx, int64_t begin, int64_t end, float* sum) {
  const size_t cols = static_cast<size_t>(dy.dim(1));
  const Dropout& dropout = form.dropout;
  const bool active = dropout.active();  // its factors have the scale, too
  HWY_ALIGN float factors[kTile];
  if (sum) std::fill(sum, sum + cols, 0.0f);
  for (int64_t r = begin; r < end; ++r)
    for (size_t c = 0; c < cols; c += kTile) {
      const size_t width = std::min(kTile, cols - c);
      if (active) dropout_factors(dropout, r, 0, width, factors, c);
      const T* gradient = dy.data<T>() + r * dy.row_stride() + c;
      const T* from = x.data<T>() + r * x.row_stride() + c;
      const T* add = bias.defined() ? bias.data<T>() + c : nullptr;
      T* to = dx.data<T>() + r * dx.row_stride() + c;
      for_columns(width, [&](size_t i, size_t n) {
        VF v = load_any(from + i, n), g = load_any(gradient + i, n);
        if (add) v = hn::Add(v, load_any(add + i, n));
        g = hn::Mul(g, active ? hn::Load(DF(), factors + i) : hn::Set(DF(), form.scale));
        g = hn::Mul(g, Act::slope(v));
        if (sum) store_any(hn::Add(load_any(sum + c + i, n), g), sum + c + i, n);
        store_any(g, to + i, n);
      });
    }
}

template <typename Body>
void with_activation(Activation activation, Body&& body) {
  switch (activation) {
    case Activation::kRelu:
      return body(Relu());
    case Activation::kGelu:
      return body(Gelu());
    case Activation::kGeluTanh:
      return body(GeluTanh());
    case Activation::kSilu:
      return body(Silu());
  }
}

void forward_rows(const Tensor& x, const Tensor& bias, Activation activation, const Dropout& dropout, const Tensor& y,
                  int64_t begin, int64_t end) {
  with_activation(activation, [&](auto act) {
    if (x.dtype() == DType::kF32)
      forward_rows_of<float, decltype(act)>(x, bias, dropout, y, begin, end);
    else
      forward_rows_of<bfloat16, decltype(act)>(x, bias, dropout, y, begin, end);
  });
}
void backward_rows(const Tensor& dy, const Tensor& x, const Tensor& bias, const ActivationBackward& form,
                   const Tensor& dx, int64_t begin, int64_t end, float* sum) {
  with_activation(form.activation, [&](auto act) {
    if (x.dtype() == DType::kF32)
      backward_rows_of<float, decltype(act)>(dy, x, bias, form, dx, begin, end, sum);
    else
      backward_rows_of<bfloat16, decltype(act)>(dy, x, bias, form, dx, begin, end, sum);
  });
}

}  // namespace
}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_rows);

namespace {
// Elements a task should have at least.
constexpr int64_t kGrain = 8192;
}  // namespace

void bias_activation_dropout_forward_cpu(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                         const Dropout& dropout, const Tensor& y) {
  if (context.planning() || x.numel() == 0) return;
  context.pool().parallel_for(x.dim(0), kGrain / x.dim(1), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(forward_rows)(x, bias, activation, dropout, y, begin, end);
  });
}

void bias_activation_dropout_backward_cpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                          const ActivationBackward& form, bool accumulate, const Tensor& dx,
                                          const Tensor& dbias) {
  const int64_t rows = dy.dim(0), cols = dy.dim(1), pieces = partial_sum_pieces(rows);
  Buffer partials;
  if (dbias.defined()) partials = context.allocate({pieces, cols}, DType::kF32, "bias_activation_dropout.partials");
  if (context.planning() || cols == 0) return;
  if (!dbias.defined()) {
    context.pool().parallel_for(rows, kGrain / cols, [&](int64_t begin, int64_t end, int) {
      HWY_DYNAMIC_DISPATCH(backward_rows)(dy, x, bias, form, dx, begin, end, nullptr);
    });
    return;
  }
  context.pool().run(pieces, [&](int64_t p, int) {
    HWY_DYNAMIC_DISPATCH(backward_rows)
    (dy, x, bias, form, dx, rows * p / pieces, rows * (p + 1) / pieces, partials->data<float>() + p * cols);
  });
  add_partial_sums(context, partials, accumulate, dbias);
}

}  // namespace frit
#endif
