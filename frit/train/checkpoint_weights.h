// A model's blocks as checkpoints hold them.
#pragma once
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "frit/memory/workspace.h"
#include "frit/train/checkpoint_store.h"

namespace frit {

// A block of the workspace: the bytes where it lies, or a copy of what lies on a GPU. workspace must outlive it.
class BlockBytes {
 public:
  BlockBytes(const Workspace& workspace, const Tensor& block);
  std::span<std::byte> bytes();
  void fetch();     // from the GPU
  void put_back();  // to it

 private:
  const Workspace& workspace_;
  Tensor block_;
  std::vector<std::byte> copy_;
};

// A checkpoint's blocks of weights and moments by name.
std::vector<std::pair<const char*, Tensor>> named_blocks(const Workspace& workspace);

// The fp32 values of all parameters that a checkpoint of such a workspace holds: from its master, with its residual, or
// as they are; averaged: those of the moving average. Errors: frit::Error as read_blob.
std::vector<float> read_weights(const CheckpointInfo& checkpoint, const Workspace& workspace, bool averaged);

}  // namespace frit
