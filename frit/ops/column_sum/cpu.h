// The CPU form of column_sum, and the pieces that other operators' bias gradients share.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Rows are summed in pieces; the pieces' cuts depend on the number of rows alone, and the partial sums are added in
// their order, so the bits do not depend on the number of threads. Number of pieces for an operator that writes one row
// of partial sums a piece.
int64_t partial_sum_pieces(int64_t rows);

// y (+)= sum over partials' rows, in order. partials f32 [pieces, cols]; y [cols] f32 or bf16. 1 parallel region.
void add_partial_sums(Context& context, const Tensor& partials, bool accumulate, const Tensor& y);
// The same for two results at once: partials f32 [pieces, 2 * cols], y's columns before z's. 1 parallel region.
void add_partial_sums(Context& context, const Tensor& partials, bool accumulate, const Tensor& y, const Tensor& z);

void column_sum_cpu(Context& context, const Tensor& x, bool accumulate, const Tensor& y);

}  // namespace frit
