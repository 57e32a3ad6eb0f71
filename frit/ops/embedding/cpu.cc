#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/embedding/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cstring>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/embedding/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace {

// Columns whose dropout factors are made at a time: they stay in the first cache.
constexpr size_t kTile = 512;

template <typename T>
void forward_rows_of(const EmbeddingArgs& args, const Tensor& y, int64_t begin, int64_t end) {
  const size_t cols = static_cast<size_t>(y.dim(1));
  const int32_t* ids = args.ids.data<int32_t>();
  const int32_t* given = args.position_ids.defined() ? args.position_ids.data<int32_t>() : nullptr;
  const bool placed = args.positions.defined(), active = args.dropout.active();
  // The sequence that token `begin` is in: the last one that starts at or before it.
  const int32_t* starts = placed && !given ? args.offsets.data<int32_t>() : nullptr;
  int64_t sequence = starts ? std::upper_bound(starts, starts + args.offsets.dim(0), begin) - starts - 1 : 0;
  const VF scale = hn::Set(DF(), args.scale);
  HWY_ALIGN float factors[kTile];
  for (int64_t t = begin; t < end; ++t) {
    int64_t position = 0;
    if (given) position = given[t];
    if (starts) {
      while (starts[sequence + 1] <= t) ++sequence;
      position = t - starts[sequence] + args.position_offset;
    }
    const T* word = args.table.data<T>() + ids[t] * args.table.row_stride();
    const T* place = placed ? args.positions.data<T>() + position * args.positions.row_stride() : nullptr;
    T* out = y.data<T>() + t * y.row_stride();
    for (size_t c = 0; c < cols; c += kTile) {
      const size_t width = std::min(kTile, cols - c);
      if (active) dropout_factors(args.dropout, t, 0, width, factors, c);
      for_columns(width, [&](size_t i, size_t n) {
        VF v = hn::Mul(load_any(word + c + i, n), scale);
        if (place) v = hn::Add(v, load_any(place + c + i, n));
        if (active) v = hn::Mul(v, hn::Load(DF(), factors + i));
        store_any(v, out + c + i, n);
      });
    }
  }
}
void forward_rows(const EmbeddingArgs& args, const Tensor& y, int64_t begin, int64_t end) {
  if (y.dtype() == DType::kF32)
    forward_rows_of<float>(args, y, begin, end);
  else
    forward_rows_of<bfloat16>(args, y, begin, end);
}

// out[w] (+)= scale * sum of factor * dy[t] over the tokens order[starts[w]..starts[w + 1]), for rows [begin, end).
// Sums are in fp32 and rounded once. Row `skipped` gets nothing.
template <typename T, typename O>
void sum_rows_of(const Tensor& dy, const Dropout& dropout, float factor_of_all, const int32_t* starts,
                 const int32_t* order, int64_t skipped, bool accumulate, const Tensor& out, int64_t begin,
                 int64_t end) {
  const size_t cols = static_cast<size_t>(dy.dim(1));
  const bool active = dropout.active();
  const VF scale = hn::Set(DF(), factor_of_all);
  HWY_ALIGN float factors[kTile];
  HWY_ALIGN float sums[kTile + HWY_MAX_BYTES / sizeof(float)];
  for (int64_t w = begin; w < end; ++w) {
    O* row = out.data<O>() + w * out.row_stride();
    if (w == skipped || starts[w] == starts[w + 1]) {
      if (!accumulate) std::memset(static_cast<void*>(row), 0, cols * sizeof(O));
      continue;
    }
    for (size_t c = 0; c < cols; c += kTile) {
      const size_t width = std::min(kTile, cols - c);
      std::fill(sums, sums + width, 0.0f);
      for (int32_t j = starts[w]; j < starts[w + 1]; ++j) {
        const int64_t t = order[j];
        const T* gradient = dy.data<T>() + t * dy.row_stride() + c;
        if (active) dropout_factors(dropout, t, 0, width, factors, c);
        for_columns(width, [&](size_t i, size_t n) {
          VF v = load_any(gradient + i, n);
          if (active) v = hn::Mul(v, hn::Load(DF(), factors + i));
          // Missing lanes of v are 0; the factor's are not set.
          hn::StoreU(hn::Add(hn::LoadU(DF(), sums + i), n == lanes() ? v : hn::IfThenElseZero(hn::FirstN(DF(), n), v)),
                     DF(), sums + i);
        });
      }
      for_columns(width, [&](size_t i, size_t n) {
        VF v = hn::Mul(hn::LoadU(DF(), sums + i), scale);
        if (accumulate) v = hn::Add(v, load_any(row + c + i, n));
        store_any(v, row + c + i, n);
      });
    }
  }
}
void sum_rows(const Tensor& dy, const Dropout& dropout, float factor_of_all, const int32_t* starts,
              const int32_t* order, int64_t skipped, bool accumulate, const Tensor& out, int64_t begin, int64_t end) {
  if (dy.dtype() == DType::kF32)
    sum_rows_of<float, float>(dy, dropout, factor_of_all, starts, order, skipped, accumulate, out, begin, end);
  else if (out.dtype() == DType::kF32)
    sum_rows_of<bfloat16, float>(dy, dropout, factor_of_all, starts, order, skipped, accumulate, out, begin, end);
  else
    sum_rows_of<bfloat16, bfloat16>(dy, dropout, factor_of_all, starts, order, skipped, accumulate, out, begin, end);
}

}  // namespace
}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(forward_rows);
HWY_EXPORT(sum_rows);

void embedding_forward_cpu(Context& context, const EmbeddingArgs& args, const Tensor& y) {
  if (context.planning() || y.numel() == 0) return;
  context.pool().parallel_for(y.dim(0), 16384 / y.dim(1), [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(forward_rows)(args, y, begin, end);
  });
}

namespace {

// Sorts tokens by key, keeping their order: starts[k] becomes the place in `order` of key k's first token, starts[keys]
// the number of tokens. key(t) is called twice a token, t rising.
template <typename Key>
void sort_tokens(int64_t tokens, int64_t keys, int32_t* starts, int32_t* order, Key&& key) {
  // Counts go one place up, so that filling moves each start to where the next key's begins.
  std::fill(starts, starts + keys + 2, 0);
  for (int64_t t = 0; t < tokens; ++t) ++starts[key(t) + 2];
  for (int64_t k = 2; k < keys + 2; ++k) starts[k] += starts[k - 1];
  for (int64_t t = 0; t < tokens; ++t) order[starts[key(t) + 1]++] = static_cast<int32_t>(t);
}

// Cuts the rows [0, keys) into tasks of about the same work: a row costs its write and its tokens.
void sum_all_rows(Context& context, const Tensor& dy, const Dropout& dropout, float scale, const int32_t* starts,
                  const int32_t* order, int64_t skipped, bool accumulate, const Tensor& out) {
  const int64_t keys = out.dim(0), tokens = dy.dim(0), work = keys + 2 * tokens;
  const int64_t pieces = std::clamp<int64_t>(work * dy.dim(1) / 16384, 1, 64);
  const auto cut = [&](int64_t p) {  // the first row whose work before it reaches p shares
    int64_t low = 0, high = keys;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if ((middle + 2 * static_cast<int64_t>(starts[middle])) * pieces >= p * work)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  };
  context.pool().run(pieces, [&](int64_t p, int) {
    HWY_DYNAMIC_DISPATCH(sum_rows)
    (dy, dropout, scale, starts, order, skipped, accumulate, out, p == 0 ? 0 : cut(p),
     p + 1 == pieces ? keys : cut(p + 1));
  });
}

}  // namespace

void embedding_backward_cpu(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id,
                            bool accumulate, const Tensor& dtable, const Tensor& dpositions) {
  const int64_t tokens = dy.dim(0), vocabulary = dtable.dim(0), places = dpositions.defined() ? dpositions.dim(0) : 0;
  const int64_t keys = std::max(vocabulary, places);
  Buffer starts = context.allocate({keys + 2}, DType::kI32, "embedding.starts");
  Buffer order = context.allocate({tokens}, DType::kI32, "embedding.order");
  if (context.planning() || dy.dim(1) == 0) return;
  int32_t *first = starts->data<int32_t>(), *sorted = order->data<int32_t>();
  const int32_t* ids = args.ids.data<int32_t>();
  sort_tokens(tokens, vocabulary, first, sorted, [&](int64_t t) { return ids[t]; });
  sum_all_rows(context, dy, args.dropout, args.scale, first, sorted, pad_id, accumulate, dtable);
  if (!dpositions.defined()) return;
  if (args.position_ids.defined()) {
    const int32_t* given = args.position_ids.data<int32_t>();
    sort_tokens(tokens, places, first, sorted, [&](int64_t t) { return given[t]; });
  } else {
    const int32_t* offsets = args.offsets.data<int32_t>();
    int64_t sequence = 0;
    sort_tokens(tokens, places, first, sorted, [&](int64_t t) {
      if (t == 0) sequence = 0;
      while (offsets[sequence + 1] <= t) ++sequence;
      return t - offsets[sequence] + args.position_offset;
    });
  }
  sum_all_rows(context, dy, args.dropout, 1.0f, first, sorted, -1, accumulate, dpositions);
}

}  // namespace frit
#endif
