// Activations' names.
#include <gtest/gtest.h>

#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {
namespace {

TEST(Activation, NamesRoundTrip) {
  for (Activation a : {Activation::kRelu, Activation::kGelu, Activation::kGeluTanh, Activation::kSilu})
    EXPECT_EQ(parse_activation(name_of(a)), a);
  EXPECT_EQ(parse_activation("silu"), Activation::kSilu);
  EXPECT_EQ(parse_activation("gelu_tanh"), Activation::kGeluTanh);
  EXPECT_THROW(parse_activation("Relu"), Error);
}

}  // namespace
}  // namespace frit
