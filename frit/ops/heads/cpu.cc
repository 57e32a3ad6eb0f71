#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/heads/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/column_sum/cpu.h"
#include "frit/ops/heads/cpu.h"

// What all targets share.
#ifndef FRIT_OPS_HEADS_CPU_CC_
#define FRIT_OPS_HEADS_CPU_CC_
namespace frit {

struct HeadLayout {
  int64_t stride;  // elements between tokens of the joined side
  int64_t tokens, blocks, d;
  int64_t begin, end;  // tokens of this piece
};

}  // namespace frit
#endif

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

template <typename T, typename B>
void split_piece(const HeadLayout& l, const T* joined, const B* bias, T* apart) {
  for (int64_t b = 0; b < l.blocks; ++b)
    for_columns(static_cast<size_t>(l.d), [&](size_t i, size_t n) {
      const VF add = bias ? load_any(bias + b * l.d + i, n) : hn::Zero(DF());
      for (int64_t t = l.begin; t < l.end; ++t)
        store_any(hn::Add(load_any(joined + t * l.stride + b * l.d + i, n), add), apart + (b * l.tokens + t) * l.d + i,
                  n);
    });
}

// sums: [blocks * d], or null.
template <typename T>
void merge_piece(const HeadLayout& l, const T* apart, T* joined, float* sums) {
  for (int64_t b = 0; b < l.blocks; ++b)
    for_columns(static_cast<size_t>(l.d), [&](size_t i, size_t n) {
      VF total = hn::Zero(DF());
      for (int64_t t = l.begin; t < l.end; ++t) {
        const VF x = load_any(apart + (b * l.tokens + t) * l.d + i, n);
        total = hn::Add(total, x);
        store_any(x, joined + t * l.stride + b * l.d + i, n);
      }
      if (sums) store_any(total, sums + b * l.d + i, n);
    });
}

void split_piece_f32(const HeadLayout& l, const float* joined, const float* bias, float* apart) {
  split_piece(l, joined, bias, apart);
}
void split_piece_bf16(const HeadLayout& l, const bfloat16* joined, const bfloat16* bias, bfloat16* apart) {
  split_piece(l, joined, bias, apart);
}
void split_piece_bf16_f32(const HeadLayout& l, const bfloat16* joined, const float* bias, bfloat16* apart) {
  split_piece(l, joined, bias, apart);
}
void merge_piece_f32(const HeadLayout& l, const float* apart, float* joined, float* sums) {
  merge_piece(l, apart, joined, sums);
}
void merge_piece_bf16(const HeadLayout& l, const bfloat16* apart, bfloat16* joined, float* sums) {
  merge_piece(l, apart, joined, sums);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(split_piece_f32);
HWY_EXPORT(split_piece_bf16);
HWY_EXPORT(split_piece_bf16_f32);
HWY_EXPORT(merge_piece_f32);
HWY_EXPORT(merge_piece_bf16);

// Tokens a piece: enough that waking a thread is worth it.
static int64_t grain_of(int64_t width) {
  return std::max<int64_t>(1, 16384 / width);
}

void joined_to_heads_cpu(Context& context, const Tensor& joined, const Tensor& bias, const Tensor& apart,
                         int64_t blocks, int64_t d) {
  if (context.planning()) return;
  const int64_t tokens = joined.dim(0);
  if (blocks * d == 0) return;
  const bool bias_f32 = bias.defined() && bias.dtype() == DType::kF32;
  const float* bias_as_f32 = bias_f32 ? bias.data<float>() : nullptr;
  const bfloat16* bias_as_bf16 = bias.defined() && !bias_f32 ? bias.data<bfloat16>() : nullptr;
  context.pool().parallel_for(tokens, grain_of(blocks * d), [&](int64_t begin, int64_t end, int) {
    const HeadLayout l{joined.row_stride(), tokens, blocks, d, begin, end};
    if (joined.dtype() == DType::kF32)
      HWY_DYNAMIC_DISPATCH(split_piece_f32)(l, joined.data<float>(), bias_as_f32, apart.data<float>());
    else if (bias_f32)
      HWY_DYNAMIC_DISPATCH(split_piece_bf16_f32)(l, joined.data<bfloat16>(), bias_as_f32, apart.data<bfloat16>());
    else
      HWY_DYNAMIC_DISPATCH(split_piece_bf16)(l, joined.data<bfloat16>(), bias_as_bf16, apart.data<bfloat16>());
  });
}

void heads_to_joined_cpu(Context& context, const Tensor& apart, const Tensor& joined, bool accumulate,
                         const Tensor& dbias, int64_t blocks, int64_t d) {
  const int64_t tokens = joined.dim(0), pieces = partial_sum_pieces(tokens);
  Buffer partials;
  if (dbias.defined()) partials = context.allocate({pieces, blocks * d}, DType::kF32, "heads.partials");
  if (context.planning() || blocks * d == 0) return;
  const auto piece = [&](int64_t begin, int64_t end, float* sums) {
    const HeadLayout l{joined.row_stride(), tokens, blocks, d, begin, end};
    if (joined.dtype() == DType::kF32)
      HWY_DYNAMIC_DISPATCH(merge_piece_f32)(l, apart.data<float>(), joined.data<float>(), sums);
    else
      HWY_DYNAMIC_DISPATCH(merge_piece_bf16)(l, apart.data<bfloat16>(), joined.data<bfloat16>(), sums);
  };
  if (!dbias.defined()) {
    context.pool().parallel_for(tokens, grain_of(blocks * d),
                                [&](int64_t begin, int64_t end, int) { piece(begin, end, nullptr); });
    return;
  }
  context.pool().run(pieces, [&](int64_t p, int) {
    piece(tokens * p / pieces, tokens * (p + 1) / pieces, partials->data<float>() + p * blocks * d);
  });
  add_partial_sums(context, partials, accumulate, dbias);
}

}  // namespace frit
#endif
