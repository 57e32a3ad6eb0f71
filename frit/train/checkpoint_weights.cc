#include "frit/train/checkpoint_weights.h"

namespace frit {

BlockBytes::BlockBytes(const Workspace& workspace, const Tensor& block) : workspace_(workspace), block_(block) {
  if (workspace.device()) copy_.resize(static_cast<size_t>(block.bytes()));
}
std::span<std::byte> BlockBytes::bytes() {
  if (workspace_.device()) return copy_;
  return {static_cast<std::byte*>(block_.raw()), static_cast<size_t>(block_.bytes())};
}
void BlockBytes::fetch() {
  if (workspace_.device()) workspace_.read(block_, copy_.data());
}
void BlockBytes::put_back() {
  if (workspace_.device()) workspace_.write(block_, copy_.data());
}

std::vector<std::pair<const char*, Tensor>> named_blocks(const Workspace& w) {
  std::vector<std::pair<const char*, Tensor>> blocks;
  for (const auto& [name, block] : {std::pair{"parameters", w.parameters()},
                                    {"master", w.master()},
                                    {"residual", w.residual()},
                                    {"moment1", w.moment1()},
                                    {"moment2", w.moment2()}})
    if (block.defined()) blocks.emplace_back(name, block);
  return blocks;
}

std::vector<float> read_weights(const CheckpointInfo& checkpoint, const Workspace& w, bool averaged) {
  const auto count = static_cast<size_t>(w.layout().elements());
  std::vector<float> values(count);
  const auto into = std::as_writable_bytes(std::span(values));
  if (averaged) {
    read_blob(checkpoint, "ema", into);
  } else if (w.precision() == Precision::kF32) {
    read_blob(checkpoint, "parameters", into);
  } else if (w.master().defined()) {
    read_blob(checkpoint, "master", into);
  } else {
    std::vector<uint16_t> high(count), low(count);
    read_blob(checkpoint, "parameters", std::as_writable_bytes(std::span(high)));
    if (w.residual().defined()) read_blob(checkpoint, "residual", std::as_writable_bytes(std::span(low)));
    const bool half = w.parameters().dtype() == DType::kF16;
    for (size_t i = 0; i < count; ++i)
      values[i] = w.residual().defined() ? join_float({high[i], low[i]})
                  : half                 ? static_cast<float>(float16::from_bits(high[i]))
                                         : static_cast<float>(bfloat16::from_bits(high[i]));
  }
  return values;
}

}  // namespace frit
