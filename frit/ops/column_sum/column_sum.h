// Sums over rows: bias gradients.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: y[c] (+)= sum over rows of x[r][c], in fp32, in an order that depends on the shape alone.
// Shapes: x [rows, cols] f32 or bf16, any row stride; y [cols] f32 or x's dtype.
void column_sum(Context& context, const Tensor& x, bool accumulate, const Tensor& y);

// While it lives, operators on a GPU whose column sums end with a small launch of their own (biases, LayerNorm's gamma
// and beta) leave that, and many are done in one launch: when kMost have come, and at finish(). In an order that the
// shapes decide. What is summed must not be read before. On the CPU it does nothing. Cost: the partial sums live until
// then: what an operator has as scratch, times kMost.
class LaterSums {
 public:
  static constexpr int kMost = 24;
  explicit LaterSums(Context& context);
  // Without finish() (an exception) what was left is dropped.
  ~LaterSums();
  LaterSums(const LaterSums&) = delete;
  LaterSums& operator=(const LaterSums&) = delete;
  void finish();

 private:
  Context& context_;
  std::vector<Context::LaterSum> left_;
};

}  // namespace frit
