// The activations and their slopes, as the kernels of bias_activation_dropout compute them.
#pragma once
#include <bit>

#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"
#include "frit/simt/simt.h"

namespace frit::simt {

FRIT_DEVICE float sigmoid(float x) {
  return reciprocal_fast(1 + exp_fast(-x));
}
constexpr float kRootHalf = 0.70710678f, kRootTwoOverPi = 0.79788456f, kCube = 0.044715f * kRootTwoOverPi;

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
// Twice its slope Phi + x phi, less 1, 4e-6 off: an odd function of x, which is 1 - erfc + 2 a phi at a >= 0.
FRIT_DEVICE float gelu_slope_16(float x) {
  const float a = fabsf(x), bell = exp2_fast(fmaf(x * x, -0.72134752f, -0.32574806f));
  const float odd = fmaf(a, bell, 1 - exp2_fast(erfc_exponent(a)));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(odd) ^ (std::bit_cast<uint32_t>(x) & 0x80000000u));
}
// tanh of gelu_new's argument u; hardware's own, good to 5e-4, where bf16 is stored.
template <typename T>
FRIT_DEVICE float gelu_tanh(float u) {
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
// act(x) * scale.
template <typename T, Activation activation>
FRIT_DEVICE float activate(float x, float scale) {
  switch (activation) {
    case Activation::kRelu:
      return (x > 0 ? x : 0.0f) * scale;
    case Activation::kGelu:
      if constexpr (sizeof(T) == 2) return gelu_16(x, scale);
      return 0.5f * x * erfcf(-x * kRootHalf) * scale;
    case Activation::kGeluTanh: {
      const float t = gelu_tanh<T>(x * fmaf(x * x, kCube, kRootTwoOverPi)), half = x * (0.5f * scale);
      return fmaf(half, t, half);
    }
    case Activation::kSilu:
      return x * scale * sigmoid(x);
  }
  return 0;
}
// g * act'(x) * scale.
template <typename T, Activation activation>
FRIT_DEVICE float through(float g, float x, float scale) {
  switch (activation) {
    case Activation::kRelu:
      return x > 0 ? g * scale : 0.0f;
    case Activation::kGelu: {
      if constexpr (sizeof(T) == 2) {
        const float half = g * (0.5f * scale);
        return fmaf(half, gelu_slope_16(x), half);
      }
      return g * scale * (0.5f * erfcf(-x * kRootHalf) + x * 0.39894228f * exp_fast(-0.5f * x * x));
    }
    case Activation::kGeluTanh: {  // x u' = 3 u - 2 sqrt(2 / pi) x
      const float half = g * (0.5f * scale), u = x * fmaf(x * x, kCube, kRootTwoOverPi), t = gelu_tanh<T>(u);
      return fmaf(half, fmaf(fmaf(x, -2 * kRootTwoOverPi, 3 * u), fmaf(-t, t, 1.0f), t), half);
    }
    case Activation::kSilu: {
      const float s = sigmoid(x);
      return g * scale * s * fmaf(x, 1 - s, 1.0f);
    }
  }
  return 0;
}

}  // namespace frit::simt
