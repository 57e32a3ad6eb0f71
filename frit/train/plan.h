// What a training run will take, before anything runs: memory by tensor, and the cost of a step (`frit plan`).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "frit/backend/gpu.h"
#include "frit/models/transformer/config.h"
#include "frit/train/config.h"

namespace frit {

struct TrainingPlanOptions {
  int64_t sentence_tokens = 25;  // length of the sentences that the largest batch is assumed to hold, either side
  bool measure = false;          // time a product and a copy on the device for an estimate of a step's time
};

// Bytes and operations of one training step on the largest batch: batch_tokens source and as many target tokens.
struct TrainingPlan {
  struct Item {
    std::string name;  // with its path: "decoder.2.feed_forward.a", "model.shared.weight"
    int64_t bytes = 0;
  };
  int64_t parameters = 0;
  // Blocks of fixed size. master_bytes: fp32 master or residual; ema_bytes: the average and, in bf16, what is set
  // aside. copy_bytes: fp32 copies of gradients, see training.trainer.
  int64_t parameter_bytes = 0, gradient_bytes = 0, moment_bytes = 0, master_bytes = 0, ema_bytes = 0, copy_bytes = 0;
  // The arena: what it takes, the least any plan could take (the largest sum of sizes alive at one time), and what the
  // temporaries would take if none shared memory.
  int64_t arena_bytes = 0, lower_bound_bytes = 0, unshared_bytes = 0;
  std::vector<Item> weights, temporaries;  // largest first; temporaries of one name are added up

  int64_t total_bytes() const {
    return parameter_bytes + gradient_bytes + moment_bytes + master_bytes + ema_bytes + copy_bytes + arena_bytes;
  }

  // Cost of an update. Products: multiply-adds count 2. Moved: every temporary written once and read once, and the
  // update's blocks as the optimizer documents them.
  int64_t source_tokens = 0, target_tokens = 0, accumulate = 1;  // tokens of a batch, batches of an update
  double product_flops = 0;
  int64_t moved_bytes = 0, update_bytes = 0;
  // The device, if it was to be measured (else 0), and its name.
  double flops_per_s = 0, bytes_per_s = 0;
  std::string measured_on;
  double step_s = 0;  // products at the measured rate, then everything moved at the measured rate;

  int64_t machine_bytes = 0, available_bytes = 0;  // RAM in all, and free for use now
  bool fits() const { return total_bytes() <= available_bytes; }

  // Text for people; the `largest` largest tensors of each kind.
  std::string to_string(int largest = 20) const;
};

// Reserves address space for the model but touches none of it; reads no training text. Errors: frit::Error for a
// configuration that cannot work, and for measuring the simulator, which has no clock; std::bad_alloc if the system
// does not even reserve the memory.
TrainingPlan plan_training(const TrainConfig& config, const TrainingPlanOptions& options = {});

// The largest token budget, a multiple of 256, whose steps fit into `bytes` of a GPU's memory: weights, gradients and
// optimizer, the arena, and what the GPU's libraries take. 0: not even the smallest. Takes some planning, and no memory
// to speak of.
int64_t largest_batch_tokens(const TrainConfig& config, const TransformerConfig& sizes, Gpu& gpu, int64_t bytes);

}  // namespace frit
