// The GPU forms of search_step and search_begin. Arguments are checked already.
#pragma once
#include "frit/ops/search_step/search_step.h"

namespace frit {

constexpr int kSearchThreads = 128;

void search_step_gpu(Context& context, const SearchStepArgs& args);
void search_begin_gpu(Context& context, const SearchBeginArgs& args);

}  // namespace frit
