// DeviceMemory: where tensors of one device come from, and how bytes get there and back.
#pragma once
#include <cstddef>

#include "frit/core/tensor.h"

namespace frit {

// Memory of one device. Copies and fills are ordered with what the device was told to do before, and done when they
// return.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  virtual Device device() const = 0;
  // Memory aligned to 256 bytes. Errors: frit::Error naming the device and the bytes asked for if there is not enough.
  virtual void* allocate(size_t bytes) = 0;
  virtual void release(void* p) noexcept = 0;
  virtual void upload(void* device, const void* host, size_t bytes) = 0;
  virtual void download(void* host, const void* device, size_t bytes) = 0;
  virtual void fill(void* device, unsigned char byte, size_t bytes) = 0;
  // Fills with NaN patterns; a simulator also takes the bytes for unwritten again.
  virtual void poison(void* device, size_t bytes) { fill(device, 0xff, bytes); }
  // A tensor now lives at p, or has died: what a simulator checks accesses against. Elsewhere nothing happens.
  virtual void born(void* /*p*/, size_t /*bytes*/, DType /*dtype*/) {}
  virtual void died(void* /*p*/) noexcept {}
};

}  // namespace frit
