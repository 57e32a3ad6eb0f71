// The copies of an update that goes tensor by tensor, on the GPU.
#include "frit/ops/optimizer/per_tensor.h"

#include "frit/ops/optimizer/update-inl.h"

namespace frit {
namespace {

using namespace optimizer_kernels;

// Tiles lie where they would for the whole block, as an update's do; from and to stand at element `begin`.
template <typename From, typename To>
FRIT_KERNEL(kThreads, 4)
optimizer_cast_kernel(Global<const From> from, Global<To> to, int64_t begin, int64_t end) {
  wait_for_previous();
  const int64_t tile = begin / kWarpElements * kWarpElements + (block_index() * kWarps + warp()) * kWarpElements;
  if (tile >= end) return;
  const bool inside = tile >= begin && tile + kWarpElements <= end;
  const int64_t first = tile + lane() * kGroup - begin, count = end - begin;
  FRIT_UNROLL
  for (int k = 0; k < kGroups; ++k) {
    const int64_t at = first + k * (kWarpSize * kGroup);
    store_four(to, at, count, inside, from_float<To>(to_float(load_four(from, at, count, inside))));
  }
}

}  // namespace

void optimizer_cast_gpu(Context& context, const Tensor& from, const Tensor& to, int64_t begin, int64_t end) {
  const auto run = [&]<typename From, typename To>() {
    const int64_t tiles = (end - begin / kWarpElements * kWarpElements + kWarpElements - 1) / kWarpElements;
    launch(context, "optimizer_cast_kernel", optimizer_cast_kernel<From, To>,
           {begin < end ? (tiles + kWarps - 1) / kWarps : 0, kThreads}, global<const From>(from) + begin,
           global<To>(to) + begin, begin, end);
  };
  const DType narrow = to.dtype() == DType::kF32 ? from.dtype() : to.dtype();
  dispatch_float(narrow, [&]<typename P>(P) {
    if constexpr (sizeof(P) == 2) {
      if (to.dtype() == DType::kF32)
        run.template operator()<P, float>();
      else
        run.template operator()<float, P>();
    }
  });
}

}  // namespace frit
