#include "frit/ops/cross_keys_values/cross_keys_values.h"

#include "frit/ops/column_sum/column_sum.h"
#include "frit/ops/gemm/gemm.h"

namespace frit {
namespace {

// Rows of the weight that belong to one layer: its keys' and its values'.
int64_t check_shapes(const Tensor& memory, const Tensor& weight, const Tensor& y, const char* y_name) {
  FRIT_CHECK(memory.rank() == 2, "[cross_keys_values] memory is {}, expected [tokens, H]", memory.to_string());
  const int64_t width = memory.dim(1), layer = 2 * width;
  FRIT_CHECK(weight.rank() == 2 && weight.dim(1) == width && (layer == 0 || weight.dim(0) % layer == 0),
             "[cross_keys_values] weight is {}, expected [layers * {}, {}]", weight.to_string(), layer, width);
  FRIT_CHECK(y.rank() == 2 && y.dim(0) == memory.dim(0) && y.dim(1) == weight.dim(0),
             "[cross_keys_values] {} is {}, expected [{}, {}]", y_name, y.to_string(), memory.dim(0), weight.dim(0));
  return layer;
}

}  // namespace

void cross_keys_values_forward(Context& context, const Tensor& memory, const Tensor& weight, const Tensor& bias,
                               const Tensor& y) {
  check_shapes(memory, weight, y, "y");
  linear(context, memory, weight, bias, y);
}

void cross_keys_values_backward(Context& context, const Tensor& dy, const Tensor& memory, const Tensor& weight,
                                const std::vector<bool>& frozen, bool accumulate, const Tensor& dmemory,
                                const Tensor& dweight, const Tensor& dbias) {
  const int64_t layer = check_shapes(memory, weight, dy, "dy");
  const int64_t layers = layer == 0 ? 0 : weight.dim(0) / layer;
  FRIT_CHECK(frozen.empty() || static_cast<int64_t>(frozen.size()) == layers,
             "[cross_keys_values] {} layers are marked frozen or not, expected {}", frozen.size(), layers);
  FRIT_CHECK(!dmemory.defined() || dmemory.shape() == memory.shape(), "[cross_keys_values] dmemory is {}, expected {}",
             dmemory.to_string(), memory.shape().to_string());
  FRIT_CHECK(!dweight.defined() || dweight.shape() == weight.shape(), "[cross_keys_values] dweight is {}, expected {}",
             dweight.to_string(), weight.shape().to_string());
  FRIT_CHECK(!dbias.defined() || (dbias.rank() == 1 && dbias.dim(0) == weight.dim(0)),
             "[cross_keys_values] dbias is {}, expected [{}]", dbias.to_string(), weight.dim(0));
  if (dmemory.defined()) linear_backward_input(context, dy, weight, false, dmemory);
  // One product a run of layers that are not frozen: one over all of them when none is.
  for (int64_t begin = 0; begin < layers;) {
    if (!frozen.empty() && frozen[begin]) {
      ++begin;
      continue;
    }
    int64_t end = begin + 1;
    while (end < layers && (frozen.empty() || !frozen[end])) ++end;
    const Tensor slice = dy.columns(begin * layer, end * layer);
    const Tensor db = dbias.defined() ? dbias.rows(begin * layer, end * layer) : Tensor();
    if (dweight.defined())
      linear_backward_weight(context, slice, memory, accumulate, dweight.rows(begin * layer, end * layer), db);
    else if (db.defined())
      column_sum(context, slice, accumulate, db);
    begin = end;
  }
}

}  // namespace frit
