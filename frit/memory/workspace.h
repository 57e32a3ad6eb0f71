// Parameters, gradients and optimizer state: each one block, every parameter a named slice of it.
#pragma once
#include <bit>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/core/tensor.h"
#include "frit/memory/block.h"

namespace frit {

// Which numbers a training run keeps.
enum class Precision : uint8_t {
  kF32,             // fp32 everything: 16 bytes a parameter with gradient and Adam's m, v
  kBF16Master,      // bf16 parameters and gradients, fp32 master copy
  kBF16Stochastic,  // bf16 alone, updates rounded stochastically
  kBF16Residual,    // bf16 (rounded half up) + the low 16 bits of the fp32 value: the fp32 master, bit for bit
  kF16Master,       // fp16 parameters and gradients, fp32 master copy; on a GPU
  kF16Stochastic,   // fp16 alone, updates rounded stochastically; on a GPU
};
// "fp32", "bf16-master", "bf16-stochastic", "bf16-residual", "fp16-master", "fp16-stochastic"
const char* name_of(Precision precision);
// Errors: frit::Error with the six names if `name` is none of them.
Precision parse_precision(std::string_view name);
// The dtype of parameters and activations.
constexpr DType compute_dtype(Precision p) {
  return p == Precision::kF32                                           ? DType::kF32
         : p == Precision::kF16Master || p == Precision::kF16Stochastic ? DType::kF16
                                                                        : DType::kBF16;
}
// Does an fp32 copy of the parameters stand beside them?
constexpr bool keeps_master(Precision p) {
  return p == Precision::kBF16Master || p == Precision::kF16Master;
}

// An fp32 number in two halves: the bf16 nearest to it (halves rounded away from zero) and its own low 16 bits. Joined,
// they are the number, bit for bit: rounding up is undone where the low half's top bit says that it happened.
struct SplitFloat {
  uint16_t high, low;
};
constexpr SplitFloat split_float(float value) {
  const uint32_t u = std::bit_cast<uint32_t>(value);
  return {static_cast<uint16_t>((u + 0x8000u) >> 16), static_cast<uint16_t>(u)};
}
constexpr float join_float(SplitFloat split) {
  const uint32_t high = static_cast<uint32_t>(split.high) - (split.low >> 15);
  return std::bit_cast<float>(high << 16 | split.low);
}

// Where each parameter lies, in elements from the block's start; the same layout serves every block whatever its dtype.
// Matrices (rank 2 and more) come first and the rest after decay_end(), so that weight decay needs one boundary.
class ParameterLayout {
 public:
  struct Slice {
    std::string name;
    Shape shape;
    int64_t offset = 0;
  };
  // A parameter with 256-byte alignment in fp32 blocks (64 elements; in 16-bit blocks 128 bytes at least).
  // Errors: std::invalid_argument if the name is taken, the shape has no elements, or the layout is finished.
  void add(std::string name, Shape shape);
  // Several parameters of one trailing shape, one behind the other with no gap, so that group(name) views them as one
  // matrix or vector: members' dimension 0 adds up. Members keep their own names. Group names are apart from parameter
  // names.
  void add_group(std::string group, std::vector<std::pair<std::string, Shape>> members);
  // Fixes the offsets. No add() after it; a second call does nothing. A Workspace does it to its own copy.
  void finish();

  const std::vector<Slice>& slices() const { return slices_; }  // in block order
  const Slice& slice(std::string_view name) const;              // Errors: std::invalid_argument, naming the nearest
  const Slice& group(std::string_view name) const;
  bool has(std::string_view name) const { return index_.find(name) != index_.end(); }
  int64_t elements() const { return elements_; }      // block length, padding included
  int64_t parameters() const { return parameters_; }  // sum of the slices' sizes
  int64_t decay_end() const { return decay_end_; }

 private:
  struct Entry {
    std::string group;  // empty for a parameter on its own
    std::vector<std::pair<std::string, Shape>> members;
  };
  void add_entry(Entry entry);
  std::vector<Entry> entries_;
  std::vector<Slice> slices_, groups_;
  std::map<std::string, int64_t, std::less<>> index_, group_index_;
  int64_t elements_ = 0, parameters_ = 0, decay_end_ = 0;
  bool finished_ = false;
};

// Owns the blocks. All memory is zeroed; it never moves, so Tensors taken from it stay valid as long as it lives.
class Workspace {
 public:
  // training false: parameters alone. moments: Adam 2, SGD with momentum 1. gradient_dtype: kF32 when micro-batches
  // accumulate, else the compute dtype. device: where the blocks lie, must outlive this; null: on the host. clear false
  // (planning): addresses alone are reserved, on the host whatever the device, and nothing is written. Errors:
  // std::invalid_argument for other counts or dtypes; frit::Error from a device that has no room.
  Workspace(ParameterLayout layout, Precision precision, bool training, int moments = 2,
            DType gradient_dtype = DType::kF32, bool clear = true, DeviceMemory* device = nullptr);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const ParameterLayout& layout() const { return layout_; }
  Precision precision() const { return precision_; }
  bool training() const { return training_; }

  Tensor parameter(std::string_view name) const;
  Tensor gradient(std::string_view name) const;
  Tensor group_parameter(std::string_view group) const;
  Tensor group_gradient(std::string_view group) const;

  // Whole blocks, rank 1, layout().elements() long; undefined where the precision or mode has none.
  Tensor parameters() const { return parameters_; }
  Tensor gradients() const { return gradients_; }
  Tensor moment1() const { return moment1_; }    // f32
  Tensor moment2() const { return moment2_; }    // f32
  Tensor master() const { return master_; }      // f32, if keeps_master(precision())
  Tensor residual() const { return residual_; }  // 16 bits an element kept as bf16, kBF16Residual
  int64_t bytes() const { return bytes_; }       // of all blocks

  // Sets parameter `name` from fp32 values, master or residual included. Errors: std::invalid_argument if the
  // count differs.
  void set(std::string_view name, const float* values, int64_t count);
  // The fp32 value of parameter `name`: from the master or with the residual where there is one.
  void get(std::string_view name, float* values, int64_t count) const;

  // Copies a whole block (parameters(), moment1(), ...) to the host, and back. `bytes`: as many as the block has.
  void read(const Tensor& block, void* bytes) const;
  void write(const Tensor& block, const void* bytes) const;
  DeviceMemory* device() const { return device_; }  // null: the host

 private:
  Tensor view(const Tensor& block, const ParameterLayout::Slice& slice) const;
  // Elements [slice.offset, + count) of a block, on the host.
  void read_slice(const Tensor& block, int64_t offset, int64_t count, void* values) const;
  void write_slice(const Tensor& block, int64_t offset, int64_t count, const void* values) const;
  ParameterLayout layout_;
  Precision precision_;
  bool training_;
  Tensor parameters_, gradients_, moment1_, moment2_, master_, residual_;
  std::vector<Block> owned_;
  int64_t bytes_ = 0;
  DeviceMemory* device_ = nullptr;
};

}  // namespace frit
