// The middle of a feed-forward layer: bias, activation and dropout in one pass.
#pragma once
#include <string_view>

#include "frit/backend/context.h"

namespace frit {

enum class Activation : uint8_t { kRelu, kGelu, kGeluTanh, kSilu };
const char* name_of(Activation activation);  // Hugging Face's names: "relu", "gelu", "gelu_new", "swish"
// Takes these names and "silu", "gelu_tanh". Errors: frit::Error with the known names.
Activation parse_activation(std::string_view name);

// Math: y = dropout(act(x + bias)). GELU is x * Phi(x) by erf; gelu_new is the tanh form; SiLU is x * sigmoid(x).
// Shapes: x, y [rows, cols] (y may be x, then backward cannot follow); bias [cols], optional.
void bias_activation_dropout_forward(Context& context, const Tensor& x, const Tensor& bias, Activation activation,
                                     const Dropout& dropout, const Tensor& y);

// Math: dx = mask/keep * dy * act'(x + bias); dbias (+)= column sums of dx, in a fixed order.
// Shapes: dy, x (as given to forward), dx [rows, cols] (dx may be dy); dbias [cols], f32 or dy's dtype, optional.
void bias_activation_dropout_backward(Context& context, const Tensor& dy, const Tensor& x, const Tensor& bias,
                                      Activation activation, const Dropout& dropout, bool accumulate, const Tensor& dx,
                                      const Tensor& dbias);

// ReLU's backward from what forward wrote, y = dropout(relu(x + bias)), so that nobody keeps x (y may lie in its place)
// or draws the mask again: y is above 0 exactly where an element was positive and kept. (But for what rounds to 0 in
// 16 bits: its gradient is 0 here.)
// Math: dx = (y > 0) / keep * dy; dbias (+)= column sums of dx, in a fixed order. Of `dropout` the kept share counts.
// Shapes: as bias_activation_dropout_backward.
void relu_dropout_backward(Context& context, const Tensor& dy, const Tensor& y, const Dropout& dropout, bool accumulate,
                           const Tensor& dx, const Tensor& dbias);

}  // namespace frit
