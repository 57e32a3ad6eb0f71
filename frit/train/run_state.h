// What a checkpoint holds beside the blocks of weights: where training stands, as JSON; and what may change on resume.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "frit/data/batcher.h"
#include "frit/train/config.h"

namespace frit {

struct RunState {
  int64_t updates = 0;              // made: the optimizer's step count
  int64_t attempts = 0;             // updates tried, skipped ones included: decides dropout masks
  int64_t skipped = 0;              // updates left out because something was not finite
  int64_t skipped_in_a_row = 0;     // up to now
  int64_t finite_updates = 0;       // since the loss scale last changed
  double loss_scale = 1;            // of the next step
  int64_t target_tokens = 0;        // trained on
  int64_t source_tokens = 0;        // trained on
  BatchPosition position;           // of the next batch
  int64_t epoch_sentences = 0;      // sentence pairs of this epoch that are behind
  double seconds = 0;               // of training
  int64_t validated = -1;           // attempts at the last validation
  bool validation_pending = false;  // stopped before a validation that was due
  // Since the last line of metrics.
  double window_loss = 0, window_seconds = 0;
  int64_t window_tokens = 0;
  // Lines of metrics written before: the step alone does not tell which of its lines were. -1: not known.
  int64_t metrics_lines = 0;
  std::string early_stopping;  // EarlyStopper::save()
  std::optional<double> valid_loss, valid_bleu;
  // What the run was made from: a resumed run must find the same.
  uint64_t tokenizer_hash = 0, train_hash = 0, valid_hash = 0;

  std::string to_json() const;
  // Errors: frit::Error if the text is not such a state.
  static RunState from_json(std::string_view text);
};

}  // namespace frit
