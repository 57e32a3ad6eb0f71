// Bias and change of layout between joined rows and heads, for attention that needs its heads apart.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Math: y[p][n][t][d] = x[t][p][n][d] + bias[p][n][d].
// Shapes: x [tokens, parts, N, D] (parts is 3 for q, k, v); bias [parts * N * D], optional; y [parts, N, tokens, D].
void split_heads_forward(Context& context, const Tensor& x, const Tensor& bias, const Tensor& y);
// Math: dx[t][p][n][d] = dy[p][n][t][d]; dbias (+)= column sums of dx.
void split_heads_backward(Context& context, const Tensor& dy, bool accumulate, const Tensor& dx, const Tensor& dbias);

// Math: y[t][n][d] = x[n][t][d]. Shapes: x [N, tokens, D]; y [tokens, N, D].
void merge_heads_forward(Context& context, const Tensor& x, const Tensor& y);
// Math: dx[n][t][d] = dy[t][n][d].
void merge_heads_backward(Context& context, const Tensor& dy, const Tensor& dx);

}  // namespace frit
