// The kernels for 16-bit rows that are whole aligned vectors, or fold to such, one for each activation.
#pragma once
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"
#include "frit/simt/walk_16.h"

namespace frit {

// Threads of a block without and with column sums.
constexpr int kActivationThreads = 256, kActivationSumThreads = 768;
constexpr FoldedBlocks kFolded = {8, kActivationThreads / 32, 32}, kFoldedSums = {4, 12, 24};

// Calls f with the activation as a constant.
template <typename F>
void dispatch_activation(Activation activation, F&& f) {
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

// walk: such that walks_whole, and bias begins_whole.
void start_activation_forward_whole(Context& context, const ColumnWalk& walk, const Tensor& x, const Tensor& bias,
                                    Activation activation, const simt::DropoutTable& dropout, const Tensor& y);
// partial: where blocks write their column sums; may be missing.
void start_activation_backward_whole(Context& context, const ColumnWalk& walk, const Tensor& dy, const Tensor& x,
                                     const Tensor& bias, Activation activation, const simt::DropoutTable& dropout,
                                     const Tensor& dx, const Tensor& partial);

// walk: such that walks_folded. The backward one writes column sums.
void start_activation_forward_folded(Context& context, const ColumnWalk& walk, const Tensor& x, const Tensor& bias,
                                     Activation activation, const simt::DropoutTable& dropout, const Tensor& y);
void start_activation_backward_folded(Context& context, const ColumnWalk& walk, const Tensor& dy, const Tensor& x,
                                      const Tensor& bias, Activation activation, const simt::DropoutTable& dropout,
                                      const Tensor& dx, const Tensor& partial);

}  // namespace frit
