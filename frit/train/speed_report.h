// What a training says of its speed when it ends.
#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include "frit/train/step.h"

namespace frit {

// Source and target tokens a second, and on a GPU what share of the floor (frit/train/floor.h) that is, measured on the
// batches that next_batch gives. accumulate: batches an update. The weights are worth nothing afterwards: call it when
// all is saved. That the floor cannot be measured is said, too.
std::string speed_report(TrainingStep& step, int64_t parameters, int64_t accumulate, double tokens_per_s,
                         const std::function<const Batch&()>& next_batch);

}  // namespace frit
