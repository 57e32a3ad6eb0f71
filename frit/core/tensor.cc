#include "frit/core/tensor.h"

namespace frit {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBF16: return "bf16";
    case DType::kF16: return "f16";
    case DType::kI32: return "i32";
    case DType::kI64: return "i64";
    case DType::kU8: return "u8";
    case DType::kF64: return "f64";
  }
  return "?";
}

Shape::Shape(std::initializer_list<int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  FRIT_CHECK(dims.size() <= kMaxRank, "[shape] {} dimensions given, at most {} are supported", dims.size(), +kMaxRank);
  int i = 0;
  for (int64_t d : dims) {
    FRIT_CHECK(d >= 0, "[shape] dimension {} is {}, expected 0 or more", i, d);
    dims_[i++] = d;
  }
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank_; ++i) n *= dims_[i];
  return n;
}

int64_t Shape::inner() const {
  int64_t n = 1;
  for (int i = 1; i < rank_; ++i) n *= dims_[i];
  return n;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i)
    if (dims_[i] != other.dims_[i]) return false;
  return true;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int i = 0; i < rank_; ++i) text += (i ? ", " : "") + std::to_string(dims_[i]);
  return text + "]";
}

Tensor Tensor::reshape(Shape shape) const {
  FRIT_CHECK(shape.numel() == numel(), "[tensor] cannot reshape {} to {}: {} elements against {}", shape_.to_string(),
             shape.to_string(), numel(), shape.numel());
  FRIT_CHECK(contiguous(), "[tensor] cannot reshape {}: its rows are {} elements apart", shape_.to_string(), row_stride_);
  return Tensor(data_, dtype_, shape, device_);
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  FRIT_CHECK(rank() >= 1 && 0 <= begin && begin <= end && end <= dim(0), "[tensor] rows {}..{} of {}", begin, end,
             shape_.to_string());
  Tensor view = *this;
  view.shape_[0] = end - begin;
  if (data_) view.data_ = static_cast<char*>(data_) + begin * row_stride_ * size_of(dtype_);
  return view;
}

Tensor Tensor::columns(int64_t begin, int64_t end) const {
  FRIT_CHECK(rank() == 2 && 0 <= begin && begin <= end && end <= dim(1), "[tensor] columns {}..{} of {}", begin, end,
             shape_.to_string());
  Tensor view = *this;
  view.shape_[1] = end - begin;
  if (data_) view.data_ = static_cast<char*>(data_) + begin * size_of(dtype_);
  return view;
}

Tensor Tensor::split_columns(std::initializer_list<int64_t> inner) const {
  FRIT_CHECK(rank() == 2, "[tensor] split_columns of {}: expected two dimensions", shape_.to_string());
  Shape shape(inner);
  FRIT_CHECK(shape.numel() == dim(1), "[tensor] cannot split {} columns into {}", dim(1), shape.to_string());
  Tensor view = *this;
  Shape whole = inner.size() == 1 ? Shape{dim(0), shape[0]}
                : inner.size() == 2 ? Shape{dim(0), shape[0], shape[1]}
                : inner.size() == 3 ? Shape{dim(0), shape[0], shape[1], shape[2]}
                                    : Shape{dim(0), shape[0], shape[1], shape[2], shape[3]};
  view.shape_ = whole;
  return view;
}

std::string Tensor::to_string() const { return defined_ ? name_of(dtype_) + shape_.to_string() : "undefined"; }

}  // namespace frit
