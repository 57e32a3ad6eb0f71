// Parameters, gradients and optimizer state: each one block, every parameter a named slice of it.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frit/core/tensor.h"

namespace frit {

// Which numbers a training run keeps.
enum class Precision : uint8_t {
  kF32,             // fp32 everything: 16 bytes a parameter with gradient and Adam's m, v
  kBF16Master,      // bf16 parameters and gradients, fp32 master copy
  kBF16Stochastic,  // bf16 alone, updates rounded stochastically
  kBF16Residual,    // bf16 (rounded half up) + the low 16 bits of the fp32 value: the fp32 master, bit for bit
};
const char* name_of(Precision precision);  // "fp32", "bf16-master", "bf16-stochastic", "bf16-residual"
// Errors: frit::Error with the four names if `name` is none of them.
Precision parse_precision(std::string_view name);
// The dtype of parameters and activations.
constexpr DType compute_dtype(Precision p) { return p == Precision::kF32 ? DType::kF32 : DType::kBF16; }

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
  // Errors: std::invalid_argument if the name is taken or the layout is already in use by a Workspace.
  void add(std::string name, Shape shape);
  // Several parameters of one trailing shape, one behind the other with no gap, so that group(name) views them as one
  // matrix or vector: members' dimension 0 adds up. Members keep their own names.
  void add_group(std::string group, std::vector<std::pair<std::string, Shape>> members);
  // Fixes the offsets. No add() after it.
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
  // accumulate, else the compute dtype.
  Workspace(ParameterLayout layout, Precision precision, bool training, int moments = 2, DType gradient_dtype = DType::kF32);
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
  Tensor master() const { return master_; }      // f32, kBF16Master
  Tensor residual() const { return residual_; }  // 16 bits an element kept as bf16, kBF16Residual
  int64_t bytes() const { return bytes_; }       // of all blocks

  // Sets parameter `name` from fp32 values, master or residual included. Errors: if the count differs.
  void set(std::string_view name, const float* values, int64_t count);
  // The fp32 value of parameter `name`: from the master or with the residual where there is one.
  void get(std::string_view name, float* values, int64_t count) const;

 private:
  Tensor view(const Tensor& block, const ParameterLayout::Slice& slice) const;
  ParameterLayout layout_;
  Precision precision_;
  bool training_;
  Tensor parameters_, gradients_, moment1_, moment2_, master_, residual_;
  std::vector<void*> owned_;
  int64_t bytes_ = 0;
};

}  // namespace frit
