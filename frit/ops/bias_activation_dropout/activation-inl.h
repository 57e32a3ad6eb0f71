// The activations and their slopes, as the kernels of bias_activation_dropout compute them.
#pragma once
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"
#include "frit/simt/simt.h"

namespace frit::simt {

FRIT_DEVICE float sigmoid(float x) {
  return reciprocal_fast(1 + exp_fast(-x));
}
constexpr float kRootHalf = 0.70710678f, kRootTwoOverPi = 0.79788456f, kCube = 0.044715f;

// erfc(sqrt(1/2) a) = 2^p(a) for a >= 0, p of degree 5 without a constant: 3.8e-6 off at most, 1e-4 of its value up to
// a = 3 and 4 % at a = 5. p falls for ever. Coefficients: minimax of a times the error, weighted so that GELU is 6e-7
// off at most (Lawson's iteration over [0, 6]).
FRIT_DEVICE float erfc_exponent(float a) {
  return a * (-1.15102275f + a * (-0.459531755f + a * (-5.22095023e-2f + a * (7.22390529e-3f + a * -4.91614981e-4f))));
}
// GELU, times `scale`, where 16 bits are stored: 1 exponential.
FRIT_DEVICE float gelu_16(float x, float scale) {
  const float half = x * (0.5f * scale);
  return fmaf(fabsf(half), 1 - exp2_fast(erfc_exponent(fabsf(x))), half);
}
// Its slope Phi + x phi, 2e-6 off: below zero Phi is half of erfc, and the slope at -x is 1 less that at x.
FRIT_DEVICE float gelu_slope_16(float x) {
  const float a = fabsf(x);
  const float upper = 0.5f * exp2_fast(erfc_exponent(a));
  const float below = fmaf(-a, exp2_fast(fmaf(x * x, -0.72134752f, -1.32574806f)), upper);
  return x < 0 ? below : 1 - below;
}
// tanh of gelu_new's argument; hardware's own, good to 5e-4, where bf16 is stored.
template <typename T>
FRIT_DEVICE float gelu_tanh(float x) {
  const float u = kRootTwoOverPi * x * (1 + kCube * x * x);
  if constexpr (std::is_same_v<T, bfloat16>)
    return tanh_fast(u);
  else
    return 2 * sigmoid(2 * u) - 1;
}

// The activation is a kernel argument, the same for all threads: a branch that never diverges, once a vector, instead
// of four kernels. Calls f with it as a constant.
template <typename F>
FRIT_DEVICE void with_activation(Activation activation, F&& f) {
  switch (activation) {
    case Activation::kRelu:
      return f(std::integral_constant<Activation, Activation::kRelu>());
    case Activation::kGelu:
      return f(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh:
      return f(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSilu:
      return f(std::integral_constant<Activation, Activation::kSilu>());
  }
}
template <typename T, Activation activation>
FRIT_DEVICE float activate(float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? x : 0.0f;
    case Activation::kGelu:
      if constexpr (sizeof(T) == 2) return gelu_16(x, 1);
      return 0.5f * x * erfcf(-x * kRootHalf);
    case Activation::kGeluTanh:
      return 0.5f * x + 0.5f * x * gelu_tanh<T>(x);
    case Activation::kSilu:
      return x * sigmoid(x);
  }
  return 0;
}
template <typename T, Activation activation>
FRIT_DEVICE float slope(float x) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? 1.0f : 0.0f;
    case Activation::kGelu:
      if constexpr (sizeof(T) == 2) return gelu_slope_16(x);
      return 0.5f * erfcf(-x * kRootHalf) + x * 0.39894228f * exp_fast(-0.5f * x * x);
    case Activation::kGeluTanh: {
      const float t = gelu_tanh<T>(x);
      return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * kRootTwoOverPi * (1 + 3 * kCube * x * x);
    }
    case Activation::kSilu: {
      const float s = sigmoid(x);
      return s * (1 + x * (1 - s));
    }
  }
  return 0;
}
// activate(x) * scale.
template <typename T, Activation activation>
FRIT_DEVICE float activate_scaled(float x, float scale) {
  if constexpr (activation == Activation::kGelu && sizeof(T) == 2)
    return gelu_16(x, scale);
  else
    return activate<T, activation>(x) * scale;
}

}  // namespace frit::simt
