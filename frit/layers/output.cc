#include "frit/layers/output.h"

#include <algorithm>

#include "frit/ops/criterion/criterion.h"
#include "frit/ops/gemm/gemm.h"

namespace frit {

void output_criterion(Context& context, const Output& w, const CriterionOptions& options, const Tensor& x,
                      const Tensor& labels, const Tensor& scale, const Tensor& loss, const Tensor& nll, bool accumulate,
                      const Tensor& dweight) {
  const int64_t tokens = x.dim(0), V = w.weight.dim(0);
  FRIT_CHECK(options.chunk_rows >= 0, "[output] chunk_rows is {}, expected 0 (all) or more", options.chunk_rows);
  const int64_t rows = options.chunk_rows == 0 ? std::max<int64_t>(tokens, 1)
                                               : std::min(options.chunk_rows, std::max<int64_t>(tokens, 1));
  Buffer chunk = allocate(context, w.place, {std::min(rows, tokens), V}, x.dtype(), "logits");
  // An empty batch has no chunk to overwrite the gradient with.
  if (tokens == 0 && scale.defined() && !accumulate) fill_zero(context, dweight);
  for (int64_t begin = 0; begin < tokens; begin += rows) {
    const int64_t end = std::min(tokens, begin + rows);
    const Tensor logits = chunk->rows(0, end - begin), x_rows = x.rows(begin, end);
    linear(context, x_rows, w.weight, {}, logits);
    criterion_forward_backward(context, logits, w.bias, labels.rows(begin, end), options.smoothing, scale,
                               loss.rows(begin, end), nll.rows(begin, end));
    if (!scale.defined()) continue;
    linear_backward_weight(context, logits, x_rows, accumulate || begin > 0, dweight);
    linear_backward_input(context, logits, w.weight, false, x_rows);
  }
}

}  // namespace frit
