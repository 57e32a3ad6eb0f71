// The backward kernel of softmax.
#pragma once
#include "frit/ops/softmax/rows.h"

namespace frit::simt {

// x is p, which forward wrote, where `stored`; keep is its mask.
template <typename T, typename TX, int instance, bool stored>
FRIT_KERNEL(softmax_threads(instance), softmax_blocks(instance, true))
softmax_backward_rows_kernel(SoftmaxShape s, Global<const T> dy, Global<const T> x, Global<const float> lse,
                             Global<const int32_t> lengths, Global<const float> mask, Global<const uint8_t> keep,
                             Global<TX> dx) {
  constexpr int N = kVecOf<T>, G = softmax_lanes(instance), V = softmax_vectors(instance);
  constexpr bool loops = softmax_loops(instance), masks = instance == kAny && !stored;
  wait_for_previous();
  SoftmaxPlace at = softmax_place<G>(s, x, lengths);
  const float log_sum = at.active ? load(lse, at.row) : 0.0f;
  // A row that is masked whole has no gradient, whatever dy is.
  if (log_sum == -INFINITY) at.visible = at.visible_chunks = 0;
  const Global<const T> x_row = x + at.row * s.x_stride, dy_row = dy + at.row * s.dy_stride;
  const Global<TX> dx_row = dx + at.row * s.y_stride;
  const bool dy_vectors = softmax_lies_like<N>(dy_row, at.shift), dx_vectors = softmax_lies_like<N>(dx_row, at.shift);
  const float c = s.scale * kLog2E, shift = log_sum * kLog2E;
  const T outside = stored ? convert<T>(0.0f) : convert<T>(-INFINITY);
  const auto column = [&](int chunk) { return chunk * N - at.shift; };

  Vec<T, N> v[V], g[V];
  FRIT_UNROLL
  for (int i = 0; i < V; ++i)
    if (i * G < at.visible_chunks) {
      v[i] = softmax_load<N, Cache::kStream>(x_row, column(i * G + at.lane), at.visible, true, outside);
      g[i] = softmax_load<N, Cache::kStream>(dy_row, column(i * G + at.lane), at.visible, dy_vectors, convert<T>(0.0f));
    }

  const bool drop = s.dropout.active();
  const uint32_t head = static_cast<uint32_t>(at.row) / s.rows_per_head;
  const uint32_t dropout_row = s.first_row + static_cast<uint32_t>(at.row) - head * s.rows_per_head;
  const auto stored_keep = [&](int chunk) {
    const Vec<uint8_t, N> bytes =
        load_span<N, Cache::kStream>(keep + at.row * s.keep_stride, column(chunk), at.visible, uint8_t{0});
    uint32_t bits = 0;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) bits |= static_cast<uint32_t>(bytes[k]) << k;
    return bits;
  };
  constexpr bool words = G <= 32;
  uint32_t keep_words[words ? (V * N + 31) / 32 : 1];
  FRIT_UNROLL
  for (uint32_t& word : keep_words) word = stored && drop ? 0 : kFullMask;
  if constexpr (stored && words) {
    FRIT_UNROLL
    for (int i = 0; i < V; ++i)
      if (drop && i * G < at.visible_chunks) keep_words[i * N / 32] |= stored_keep(i * G + at.lane) << (i * N % 32);
  } else if constexpr (words) {
    if (drop) softmax_keep<N, G, V>(s.dropout, dropout_row, head, at, keep_words);
  }
  const auto keep_of = [&](int i, int chunk) -> uint32_t {
    if constexpr (words)
      if (i < V) return keep_words[i * N / 32] >> (i * N % 32);
    if (!drop) return kFullMask;
    if constexpr (stored)
      return stored_keep(chunk);
    else
      return dropout_keep<N>(s.dropout, dropout_row, column(chunk), head);
  };
  const auto probabilities = [&](const Vec<T, N>& from, int chunk, float* to) {
    float offset[N];
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) offset[k] = -shift;
    if constexpr (masks) {
      if (mask) {
        FRIT_UNROLL
        for (int half = 0; half < N; half += 4) {
          const Vec<float, 4> m =
              load_span<4, Cache::kStream>(mask + at.row * s.mask_stride, column(chunk) + half, at.visible, 0.0f);
          FRIT_UNROLL
          for (int k = 0; k < 4; ++k) offset[half + k] = fmaf(m[k], kLog2E, -shift);
        }
      }
    }
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) {
      const float a = widen(static_cast<T>(from[k]));
      to[k] = stored ? a : exp2_fast(fmaf(a, c, offset[k]));
    }
  };

  // sum(g * p), and dropout's scale put in last.
  const auto part_of = [&](const float* prob, const Vec<T, N>& gradient, uint32_t bits) {
    float part = 0;
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) part = fmaf(prob[k], bits >> k & 1 ? widen(static_cast<T>(gradient[k])) : 0.0f, part);
    return part;
  };
  float sum = 0;
  float p[V][N];
  uint32_t bits[words ? 1 : V];  // one Philox block must do for both passes
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i * G >= at.visible_chunks) continue;
    const uint32_t now = keep_of(i, i * G + at.lane);
    if constexpr (!words) bits[i] = now;
    probabilities(v[i], i * G + at.lane, p[i]);
    sum += part_of(p[i], g[i], now);
  }
  if constexpr (loops)
    for (int chunk = V * G + at.lane; chunk < at.visible_chunks; chunk += G) {
      float prob[N];
      probabilities(softmax_load<N>(x_row, column(chunk), at.visible, true, outside), chunk, prob);
      sum += part_of(prob, softmax_load<N>(dy_row, column(chunk), at.visible, dy_vectors, convert<T>(0.0f)),
                     keep_of(V, chunk));
    }
  const float factor = s.scale * (drop ? s.dropout.scale() : 1.0f);
  const float mean = softmax_sum<G>(sum, 0) * factor;

  const auto write = [&](int chunk, const float* prob, const Vec<T, N>& gradient, uint32_t kept, bool visible) {
    Vec<float, N> out{};
    if (visible) {
      FRIT_UNROLL
      for (int k = 0; k < N; ++k)
        out[k] = prob[k] * fmaf(kept >> k & 1 ? widen(static_cast<T>(gradient[k])) : 0.0f, factor, -mean);
    }
    softmax_store<N>(dx_row, column(chunk), at.cols, dx_vectors, from_float<TX>(out));
  };
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i * G >= at.chunks) continue;
    const bool visible = i * G < at.visible_chunks;
    uint32_t kept = 0;
    if constexpr (words)
      kept = keep_of(i, 0);
    else if (visible)
      kept = bits[i];
    write(i * G + at.lane, p[i], g[i], kept, visible);
  }
  if constexpr (loops)
    for (int chunk = V * G + at.lane; chunk < at.chunks; chunk += G) {
      float prob[N] = {};
      Vec<T, N> gradient{};
      uint32_t kept = 0;
      const bool visible = chunk < at.visible_chunks;
      if (visible) {
        probabilities(softmax_load<N>(x_row, column(chunk), at.visible, true, outside), chunk, prob);
        gradient = softmax_load<N>(dy_row, column(chunk), at.visible, dy_vectors, convert<T>(0.0f));
        kept = keep_of(V, chunk);
      }
      write(chunk, prob, gradient, kept, visible);
    }
}

}  // namespace frit::simt
