// Where training.count_swallowed goes: swallowed.jsonl and a line for people.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "frit/train/step.h"

namespace frit {

// Appends to RUN/swallowed.jsonl of every tensor the updates since the last line and how many were lost:
// {"step": 50, "tensors": {"model.shared.weight": [4096, 12], ...}}. Returns the sum of it in words.
std::string report_swallowed(const std::filesystem::path& run, int64_t step,
                             const std::vector<TrainingStep::Swallowed>& tensors);

}  // namespace frit
