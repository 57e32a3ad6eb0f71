// The GPU form of sample_step. Arguments are checked already.
#pragma once
#include "frit/ops/sample_step/sample_step.h"

namespace frit {

constexpr int kSampleThreads = 256;

void sample_step_gpu(Context& context, const SampleStepArgs& args);

}  // namespace frit
