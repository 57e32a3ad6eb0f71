// Tensor: a view of memory that somebody else owns.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "frit/core/error.h"
#include "frit/core/float16.h"

namespace frit {

enum class DType : uint8_t { kF32, kBF16, kF16, kI32, kI64, kU8, kF64 };
enum class Device : uint8_t { kCpu, kCuda, kSim };

// Bytes of one element.
constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: case DType::kI32: return 4;
    case DType::kBF16: case DType::kF16: return 2;
    case DType::kI64: case DType::kF64: return 8;
    case DType::kU8: return 1;
  }
  return 0;
}
constexpr bool is_16bit_float(DType dtype) { return dtype == DType::kBF16 || dtype == DType::kF16; }
// "f32", "bf16", "f16", "i32", "i64", "u8", "f64".
const char* name_of(DType dtype);

template <typename T> struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::kF32; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::kF64; };
template <> struct DTypeOf<bfloat16> { static constexpr DType value = DType::kBF16; };
template <> struct DTypeOf<float16> { static constexpr DType value = DType::kF16; };
template <> struct DTypeOf<int32_t> { static constexpr DType value = DType::kI32; };
template <> struct DTypeOf<int64_t> { static constexpr DType value = DType::kI64; };
template <> struct DTypeOf<uint8_t> { static constexpr DType value = DType::kU8; };

// Up to six dimensions, outermost first.
class Shape {
 public:
  static constexpr int kMaxRank = 6;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int rank() const { return rank_; }
  // Negative i counts from the end: [-1] is the innermost dimension.
  int64_t operator[](int i) const { return dims_[i < 0 ? i + rank_ : i]; }
  int64_t& operator[](int i) { return dims_[i < 0 ? i + rank_ : i]; }
  int64_t numel() const;
  // Elements in one step of the outermost dimension (1 for rank 0).
  int64_t inner() const;
  bool operator==(const Shape& other) const;
  std::string to_string() const;  // "[3, 4]"

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// A pointer, a dtype, a shape and a device. Contiguous but for the outermost dimension, whose step may be larger than
// the rest of the shape (row_stride), so that a slice of columns or the q of a joined [tokens, 3, N, D] is a Tensor too.
// A default-constructed Tensor is "undefined": operators take it for an optional operand that is not given.
class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, DType dtype, Shape shape, Device device = Device::kCpu)
      : data_(data), shape_(shape), row_stride_(shape.inner()), dtype_(dtype), device_(device), defined_(true) {}

  bool defined() const { return defined_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t numel() const { return shape_.numel(); }
  int64_t bytes() const { return numel() * size_of(dtype_); }
  // Elements between consecutive indices of dimension 0.
  int64_t row_stride() const { return row_stride_; }
  bool contiguous() const { return row_stride_ == shape_.inner() || dim0() <= 1; }

  void* raw() const { return data_; }
  // Typed pointer. Errors: std::invalid_argument if T is not the tensor's dtype.
  template <typename T> T* data() const {
    FRIT_CHECK(DTypeOf<T>::value == dtype_, "[tensor] read as {}, but it holds {}", name_of(DTypeOf<T>::value), name_of(dtype_));
    return static_cast<T*>(data_);
  }

  // The same memory under another shape with the same number of elements. Errors: if the count differs, or not contiguous.
  Tensor reshape(Shape shape) const;
  // Indices [begin, end) of dimension 0.
  Tensor rows(int64_t begin, int64_t end) const;
  // Columns [begin, end) of a rank-2 tensor; keeps the row stride.
  Tensor columns(int64_t begin, int64_t end) const;
  // A rank-2 tensor [rows, a*b*...] seen as [rows, a, b, ...]; keeps the row stride.
  Tensor split_columns(std::initializer_list<int64_t> inner) const;
  std::string to_string() const;  // "bf16[3, 4]"

 private:
  int64_t dim0() const { return shape_.rank() == 0 ? 1 : shape_[0]; }
  void* data_ = nullptr;
  Shape shape_;
  int64_t row_stride_ = 1;
  DType dtype_ = DType::kF32;
  Device device_ = Device::kCpu;
  bool defined_ = false;
};

}  // namespace frit
