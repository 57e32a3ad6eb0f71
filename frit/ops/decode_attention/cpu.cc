#include "frit/ops/decode_attention/cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace frit {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The sentence of a row, or -1: a row of padding.
int64_t sentence_of(const DecodeRows& rows, int64_t row) {
  const int64_t index = row / rows.width, sentences = rows.live_sentence.dim(0);
  if (index >= std::min<int64_t>(rows.live.data<int32_t>()[0], sentences)) return -1;
  const int32_t sentence = rows.live_sentence.data<int32_t>()[index];
  return sentence >= 0 && sentence < sentences ? sentence : -1;
}

// One row of one head, online. key_at(j) and value_at(j) point at `width` columns; sums has as many floats.
template <typename T, typename K, typename V>
void attend(const T* q, int64_t keys, K&& key_at, V&& value_at, int64_t width, float scale, float* sums, T* out) {
  float top = kLowest, total = 0;
  std::fill(sums, sums + width, 0.0f);
  for (int64_t j = 0; j < keys; ++j) {
    const T* k = key_at(j);
    const T* v = value_at(j);
    float score = 0;
    for (int64_t d = 0; d < width; ++d) score += static_cast<float>(q[d]) * static_cast<float>(k[d]);
    score *= scale;
    if (score > top) {
      const float shrink = std::exp(top - score);
      top = score, total *= shrink;
      for (int64_t d = 0; d < width; ++d) sums[d] *= shrink;
    }
    const float p = std::exp(score - (top == kLowest ? 0.0f : top));
    total += p;
    for (int64_t d = 0; d < width; ++d) sums[d] += p * static_cast<float>(v[d]);
  }
  for (int64_t d = 0; d < width; ++d) out[d] = T(total == 0 ? 0.0f : sums[d] / total);
}

template <typename F>
void for_type(const Tensor& t, F&& f) {
  if (t.dtype() == DType::kF32)
    f(float());
  else
    f(bfloat16());
}

}  // namespace

void decode_self_attention_cpu(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out) {
  const int64_t rows = out.dim(0), width = out.dim(1), heads = args.heads, d = width / heads;
  Buffer scratch = context.allocate({rows, width}, DType::kF32, "decode_attention.sums");
  if (context.planning() || rows == 0) return;
  const int64_t positions = args.cache.dim(0), slots = args.cache.dim(1), places = args.origin.dim(2);
  const int64_t now = args.position.data<int32_t>()[0];
  FRIT_CHECK(now >= 0 && now < positions, "[decode_attention] position is {}, the cache has {}", now, positions);
  const int32_t* origin = args.origin.data<int32_t>() + (now & 1) * slots * places;
  float* sums = scratch->data<float>();
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t sentence = sentence_of(args.rows, r), slot = sentence * args.rows.width + r % args.rows.width;
    if (sentence < 0) continue;
    for (int64_t j = 0; j < now; ++j)
      FRIT_CHECK(origin[slot * places + j] >= 0 && origin[slot * places + j] < slots,
                 "[decode_attention] slot {} has origin {} at position {}, there are {} slots", slot,
                 origin[slot * places + j], j, slots);
  }
  for_type(out, [&](auto type) {
    using T = decltype(type);
    T* cache = args.cache.data<T>();
    context.pool().run(rows, [&](int64_t r, int) {
      T* to = out.data<T>() + r * out.row_stride();
      const int64_t sentence = sentence_of(args.rows, r), slot = sentence * args.rows.width + r % args.rows.width;
      if (sentence < 0) return std::fill(to, to + width, T(0.0f));
      const T* mine = args.qkv.data<T>() + r * args.qkv.row_stride();
      const auto cached = [&](int64_t j) {
        const int64_t from = j == now ? slot : origin[slot * places + j];
        return cache + (j * slots + from) * 2 * width;
      };
      std::copy(mine + width, mine + 3 * width, cached(now));
      for (int64_t h = 0; h < heads; ++h)
        attend(
            mine + h * d, now + 1, [&](int64_t j) { return cached(j) + h * d; },
            [&](int64_t j) { return cached(j) + width + h * d; }, d, args.scale, sums + r * width + h * d, to + h * d);
    });
  });
}

void decode_cross_attention_cpu(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out) {
  const int64_t rows = out.dim(0), width = out.dim(1), heads = args.heads, d = width / heads;
  Buffer scratch = context.allocate({rows, width}, DType::kF32, "decode_attention.sums");
  if (context.planning() || rows == 0) return;
  const int32_t* offsets = args.source_offsets.data<int32_t>();
  const int64_t sentences = args.source_offsets.dim(0) - 1, stride = args.keys.row_stride();
  for (int64_t s = 0; s <= sentences; ++s)
    FRIT_CHECK(offsets[s] >= (s == 0 ? 0 : offsets[s - 1]) && offsets[s] <= args.keys.dim(0),
               "[decode_attention] source offset {} is {}, the one before it {}, tokens {}", s, offsets[s],
               s == 0 ? 0 : offsets[s - 1], args.keys.dim(0));
  float* sums = scratch->data<float>();
  for_type(out, [&](auto type) {
    using T = decltype(type);
    context.pool().run(rows, [&](int64_t r, int) {
      T* to = out.data<T>() + r * out.row_stride();
      const int64_t sentence = sentence_of(args.rows, r);
      if (sentence < 0) return std::fill(to, to + width, T(0.0f));
      const T* q = args.q.data<T>() + r * args.q.row_stride();
      const int64_t first = offsets[sentence], keys = offsets[sentence + 1] - first;
      for (int64_t h = 0; h < heads; ++h)
        attend(
            q + h * d, keys, [&](int64_t j) { return args.keys.data<T>() + (first + j) * stride + h * d; },
            [&](int64_t j) { return args.values.data<T>() + (first + j) * stride + h * d; }, d, args.scale,
            sums + r * width + h * d, to + h * d);
    });
  });
}

}  // namespace frit
