// A plain copy: the yardstick of every operator that is bound by memory.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// to = from, byte for byte. Shapes: both u8 [n], 16-byte aligned, n a multiple of 16. Cost: 1 launch, reads and writes n bytes.
void copy_gpu(Context& context, const Tensor& from, const Tensor& to);

}  // namespace frit
