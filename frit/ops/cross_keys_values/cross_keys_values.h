// Layer-batched cross attention: keys and values of all decoder layers from the encoder's output in one product.
#pragma once
#include <vector>

#include "frit/backend/context.h"

namespace frit {

// Math: y = memory * weight^T + bias, weight being [Wk_0; Wv_0; Wk_1; Wv_1; ...].
// Shapes: memory [tokens, H]; weight [layers * 2 * H, H]; bias [layers * 2 * H]; y [tokens, layers * 2 * H].
// dtypes: as gemm takes them.
// Cost: one product.
void cross_keys_values_forward(Context& context, const Tensor& memory, const Tensor& weight, const Tensor& bias,
                               const Tensor& y);

// Math: dmemory = dy * weight (always over all layers); dweight (+)= dy^T * memory and dbias (+)= column sums of dy,
// but for layers with frozen[l], whose slices of dweight and dbias are neither computed nor touched.
// Shapes: as in forward; frozen: empty (none) or one flag a layer; dmemory, dweight, dbias optional.
// Cost: one product for dmemory; one with its bias_gradient for each run of layers that are not frozen.
void cross_keys_values_backward(Context& context, const Tensor& dy, const Tensor& memory, const Tensor& weight,
                                const std::vector<bool>& frozen, bool accumulate, const Tensor& dmemory,
                                const Tensor& dweight, const Tensor& dbias);

}  // namespace frit
