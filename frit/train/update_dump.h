// What run.dump_steps writes, so that another program can train the same.
#pragma once
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "frit/data/batch.h"

namespace frit {

// RUN/batches.jsonl: a line for each micro-batch of a run's first updates.
class UpdateDump {
 public:
  // Removes what an earlier start left. updates: how many are written.
  UpdateDump(const std::filesystem::path& run, int64_t updates);
  // Notes a micro-batch of update number `update` (from 1), which will have this learning rate, if it is to be written.
  void add(const Batch& batch, int64_t update, double rate);
  // The update is whole: writes what was noted of it. Errors: frit::Error.
  void write();

 private:
  std::filesystem::path path_;
  int64_t updates_;
  std::string noted_;
  std::ofstream file_;
};

}  // namespace frit
