// One step of hierarchical auto-regressive search (HARS): the best candidates of each row of logits without sorting
// them.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// For each row: the `count` largest logits with their columns, in falling order (ties: the smaller column first), and
// the row's log-sum-exp. Method: the row is split into at least `count` groups; R = the count-th largest group maximum;
// only logits >= R are collected and sorted (">=" keeps it exact, ties included).
// A row's values, columns and log-sum-exp depend on nothing but its values, wherever it lies and whatever is beside it.
// Shapes: logits [rows, V] f32 or bf16, f16 on a GPU, any row stride; values f32 [rows, count]; columns i32
// [rows, count]; lse f32 [rows], optional; survivors i32 [rows], optional: how many logits were collected (the groups,
// and so this number, differ between CPU and GPU).
// -inf logits come last; a NaN throws frit::Error. A GPU cannot throw for data: there the row's log-sum-exp is NaN, and
// the NaN itself counts as -inf.
// Cost: 1 launch, on a GPU 2 for few long rows; there each logit is read once (a few groups once more) and 2 barriers,
// 3 for a count above 16. Errors: std::invalid_argument if count < 1 or count > V, or shapes differ. Source: LightSeq
// (arXiv:2010.13887), section 3.2.
void beam_select(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
                 const Tensor& lse, const Tensor& survivors);

}  // namespace frit
