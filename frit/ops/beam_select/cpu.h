// The CPU form of beam_select. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Columns of a group: whole vectors where a row is long enough, and at least `count` groups always.
int64_t beam_select_group(int64_t vocabulary, int64_t count);
// Candidates held at a time for a row.
int64_t beam_select_capacity(int64_t vocabulary, int64_t count);
// Tasks that the rows are cut into.
int64_t beam_select_tasks(int64_t rows);

void beam_select_cpu(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
                     const Tensor& lse, const Tensor& survivors);

}  // namespace frit
