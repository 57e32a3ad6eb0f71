// SimGpu: one matrix product, plainly.
#include <vector>

#include "frit/backend/sim/internal.h"
#include "frit/core/error.h"

namespace frit::sim {
namespace {

double value_at(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF32:
      return static_cast<const float*>(p)[i];
    case DType::kBF16:
      return static_cast<float>(static_cast<const bfloat16*>(p)[i]);
    case DType::kF16:
      return static_cast<float>(static_cast<const float16*>(p)[i]);
    default:
      fail_argument("[simulator] a product of {}", name_of(dtype));
  }
}
void set_at(void* p, DType dtype, int64_t i, double value) {
  const auto v = static_cast<float>(value);
  if (dtype == DType::kF32)
    static_cast<float*>(p)[i] = v;
  else if (dtype == DType::kBF16)
    static_cast<bfloat16*>(p)[i] = bfloat16(v);
  else
    static_cast<float16*>(p)[i] = float16(v);
}

// rows x cols stored elements of a matrix, as doubles. Throws unless a living tensor holds all of them, written.
void read(const Machine& machine, const char* name, const void* p, DType dtype, int64_t rows, int64_t cols,
          int64_t stride, std::vector<double>& values) {
  values.resize(static_cast<size_t>(rows * cols));
  const auto size = static_cast<uint64_t>(size_of(dtype));
  for (int64_t r = 0; r < rows && cols > 0; ++r) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p) + static_cast<uint64_t>(r * stride) * size;
    const Region* region = machine.find(begin);
    if (!region || begin + static_cast<uint64_t>(cols) * size > region->begin + region->bytes)
      throw Fault(fmt::format("[product] row {} of {} lies outside of every tensor", r, name));
    for (int64_t c = 0; c < cols; ++c) {
      const uint64_t cell = (begin - region->begin + static_cast<uint64_t>(c) * size) >> region->shift;
      if (!region->filled && !(region->cells[cell].writer & kValid))
        throw Fault(fmt::format("[product] reads element ({}, {}) of {}, which nothing wrote", r, c, name));
      values[static_cast<size_t>(r * cols + c)] = value_at(p, dtype, r * stride + c);
    }
  }
}

}  // namespace

void SimGpu::product(const GpuProduct& given) {
  if (graph_) return note("product", [this, given] { product(given); });
  GpuProduct p = given;
  const std::lock_guard lock(machine_->mutex);
  Machine& machine = *machine_;
  std::vector<double> a, b, c, bias;
  if (p.bias) read(machine, "bias", p.bias, p.bias_dtype, 1, p.n, p.n, bias);
  for (int64_t item = 0; item < p.batch; ++item) {
    const auto at = [&](const void* base, int64_t step, DType dtype) {
      return static_cast<const char*>(base) + item * step * size_of(dtype);
    };
    read(machine, "a", at(p.a, p.a_step, p.dtype), p.dtype, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k,
         p.a_stride, a);
    read(machine, "b", at(p.b, p.b_step, p.dtype), p.dtype, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n,
         p.b_stride, b);
    char* to = static_cast<char*>(p.c) + item * p.c_step * size_of(p.c_dtype);
    if (p.accumulate) read(machine, "c", to, p.c_dtype, p.m, p.n, p.c_stride, c);
    std::vector<double> row(static_cast<size_t>(p.n));
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j)
        row[static_cast<size_t>(j)] =
            (p.bias ? bias[static_cast<size_t>(j)] : 0) + (p.accumulate ? c[static_cast<size_t>(i * p.n + j)] : 0);
      for (int64_t k = 0; k < p.k; ++k) {
        const double x = a[static_cast<size_t>(p.transpose_a ? k * p.m + i : i * p.k + k)];
        if (p.transpose_b)
          for (int64_t j = 0; j < p.n; ++j) row[static_cast<size_t>(j)] += x * b[static_cast<size_t>(j * p.k + k)];
        else
          for (int64_t j = 0; j < p.n; ++j) row[static_cast<size_t>(j)] += x * b[static_cast<size_t>(k * p.n + j)];
      }
      for (int64_t j = 0; j < p.n; ++j) set_at(to, p.c_dtype, i * p.c_stride + j, row[static_cast<size_t>(j)]);
      if (p.n > 0)
        machine.mark(to + i * p.c_stride * size_of(p.c_dtype), static_cast<size_t>(p.n * size_of(p.c_dtype)), true);
    }
  }
}

}  // namespace frit::sim
