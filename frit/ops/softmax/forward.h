// The forward kernel of softmax.
#pragma once
#include "frit/ops/softmax/rows.h"

namespace frit::simt {

template <typename T, typename TY, int instance, bool stored>
FRIT_KERNEL(softmax_threads(instance), softmax_blocks(instance, false))
softmax_forward_rows_kernel(SoftmaxShape s, Global<const T> x, Global<const int32_t> lengths, Global<const float> mask,
                            Global<TY> y, Global<float> lse, Global<TY> p, Global<uint8_t> keep) {
  constexpr int N = kVecOf<T>, G = softmax_lanes(instance), V = softmax_vectors(instance);
  constexpr bool loops = softmax_loops(instance), masks = instance == kAny;
  constexpr bool twice = instance == kLongRowTwice;
  wait_for_previous();
  const SoftmaxPlace at = softmax_place<G>(s, x, lengths);
  const Global<const T> x_row = x + at.row * s.x_stride;
  const float c = s.scale * kLog2E;
  const T lowest = convert<T>(-INFINITY);
  const auto column = [&](int chunk) { return chunk * N - at.shift; };

  Vec<T, N> v[V];
  FRIT_UNROLL
  for (int i = 0; i < V; ++i)
    if (i * G < at.visible_chunks)
      v[i] = softmax_load<N, Cache::kStream>(x_row, column(i * G + at.lane), at.visible, true, lowest);

  const bool drop = s.dropout.active();
  const uint32_t head = static_cast<uint32_t>(at.row) / s.rows_per_head;
  const uint32_t dropout_row = s.first_row + static_cast<uint32_t>(at.row) - head * s.rows_per_head;
  constexpr bool words = G <= 32;
  // A row that begins at a multiple of 16 bytes needs no bits: the random numbers wait for the end as they are.
  constexpr bool raw = instance == kRowPerWarp && N == 8 && !stored;
  const bool as_is = raw && drop && at.shift == 0;
  PhiloxBlock random[raw ? V : 1];
  if (as_is) {
    FRIT_UNROLL
    for (int i = 0; i < (raw ? V : 1); ++i)
      random[i] = philox(s.dropout.key, static_cast<uint32_t>(i * G + at.lane), dropout_row,
                         head | s.dropout.stream << 16, s.dropout.site);
  }
  uint32_t keep_words[words ? (V * N + 31) / 32 : 1];
  if constexpr (words) {
    FRIT_UNROLL
    for (uint32_t& word : keep_words) word = kFullMask;
    if (drop && !as_is) softmax_keep<N, G, V>(s.dropout, dropout_row, head, at, keep_words);
  }
  const auto keep_of = [&](int i, int chunk) -> uint32_t {
    if constexpr (words)
      if (i < V) return keep_words[i * N / 32] >> (i * N % 32);
    if (!drop) return kFullMask;
    return dropout_keep<N>(s.dropout, dropout_row, column(chunk), head);
  };
  // Scores in units of log 2.
  const auto scores = [&](const Vec<T, N>& from, int chunk, float* to) {
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) to[k] = widen(static_cast<T>(from[k])) * c;
    if constexpr (masks) {
      if (!mask) return;
      FRIT_UNROLL
      for (int half = 0; half < N; half += 4) {
        const Vec<float, 4> m =
            load_span<4, Cache::kStream>(mask + at.row * s.mask_stride, column(chunk) + half, at.visible, 0.0f);
        FRIT_UNROLL
        for (int k = 0; k < 4; ++k) to[half + k] += m[k] * kLog2E;
      }
    }
  };
  const auto load_scores = [&](int chunk, float* to) {
    scores(softmax_load<N>(x_row, column(chunk), at.visible, true, lowest), chunk, to);
  };

  // The largest; where nothing loops, in x's own units.
  float top = -INFINITY;
  if constexpr (!loops && sizeof(T) == 2) {
    uint32_t tops = pack2(T(), -INFINITY, -INFINITY);
    FRIT_UNROLL
    for (int i = 0; i < V; ++i) {
      if (i * G >= at.visible_chunks) continue;
      FRIT_UNROLL
      for (int k = 0; k < N / 2; ++k) tops = max2(T(), tops, v[i].pairs[k]);
    }
    top =
        fmaxf(widen(T::from_bits(static_cast<uint16_t>(tops))), widen(T::from_bits(static_cast<uint16_t>(tops >> 16))));
  }
  float e[twice ? 1 : V][N];
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i * G >= at.visible_chunks || (!loops && sizeof(T) == 2)) continue;
    if constexpr (loops) scores(v[i], i * G + at.lane, e[i]);
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) top = fmaxf(top, loops ? e[i][k] : widen(static_cast<T>(v[i][k])));
  }
  if constexpr (loops)
    for (int chunk = V * G + at.lane; chunk < at.visible_chunks; chunk += G) {
      float score[N];
      load_scores(chunk, score);
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) top = fmaxf(top, score[k]);
    }
  top = softmax_max<G>(top, 0);
  // Nothing but -inf: exponentials are 0 then, and NaN where x is NaN, which fmaxf passes over.
  const float shift = top == -INFINITY ? 0.0f : loops ? top : top * c;

  // Of vector i; its scores are in `to` where the kernel loops.
  const auto exponentials = [&](int i, float* to) {
    FRIT_UNROLL
    for (int k = 0; k < N; ++k)
      to[k] = exp2_fast(loops ? to[k] - shift : fmaf(widen(static_cast<T>(v[i][k])), c, -shift));
  };
  float sum = 0;
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i * G >= at.visible_chunks) continue;
    float part = 0;
    float* const to = e[twice ? 0 : i];
    if constexpr (twice) v[i] = softmax_forget(v[i]);
    exponentials(i, to);
    FRIT_UNROLL
    for (int k = 0; k < N; ++k) part += to[k];
    sum += part;
  }
  if constexpr (loops)
    for (int chunk = V * G + at.lane; chunk < at.visible_chunks; chunk += G) {
      float score[N];
      load_scores(chunk, score);
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) sum += exp2_fast(score[k] - shift);
    }
  sum = softmax_sum<G>(sum, 128);
  if (lse && at.active && at.lane == 0) store(lse, at.row, sum == 0 ? -INFINITY : (shift + log2_fast(sum)) * kLn2);
  const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
  const Global<TY> y_row = y + at.row * s.y_stride;
  const bool y_vectors = softmax_lies_like<N>(y_row, at.shift);
  const float kept = inverse * (drop ? s.dropout.scale() : 1.0f);

  const auto write = [&](int i, int chunk, const float* exponential, bool visible) {
    Vec<float, N> out{};
    if constexpr (raw) {
      if (as_is && visible) {
        const uint32_t high = s.dropout.threshold() << 16;
        FRIT_UNROLL
        for (int k = 0; k < N; ++k) {
          const uint32_t pair = random[i].v[k / 2];
          out[k] = exponential[k] * ((k % 2 ? pair : pair << 16) >= high ? kept : 0.0f);
        }
        softmax_store<N>(y_row, column(chunk), at.cols, y_vectors, from_float<TY>(out));
        return;
      }
    }
    const uint32_t bits = visible ? keep_of(i, chunk) : 0;
    if (visible) {
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) out[k] = exponential[k] * (bits >> k & 1 ? kept : 0.0f);
    }
    softmax_store<N>(y_row, column(chunk), at.cols, y_vectors, from_float<TY>(out));
    if constexpr (stored) {
      Vec<uint8_t, N> mask_bytes;
      FRIT_UNROLL
      for (int k = 0; k < N; ++k) {
        out[k] = visible ? exponential[k] * inverse : 0.0f;
        mask_bytes[k] = static_cast<uint8_t>(column(chunk) + k < at.visible ? bits >> k & 1 : 0);
      }
      store_span<N, Cache::kStream>(p + at.row * s.p_stride, column(chunk), at.cols, from_float<TY>(out));
      store_span<N, Cache::kStream>(keep + at.row * s.keep_stride, column(chunk), at.cols, mask_bytes);
    }
  };
  FRIT_UNROLL
  for (int i = 0; i < V; ++i) {
    if (i * G >= at.chunks) continue;
    const bool visible = i * G < at.visible_chunks;
    if constexpr (twice) {
      if (visible) {
        v[i] = softmax_forget(v[i]);
        exponentials(i, e[0]);
      }
    }
    write(i, i * G + at.lane, e[twice ? 0 : i], visible);
  }
  if constexpr (loops)
    for (int chunk = V * G + at.lane; chunk < at.chunks; chunk += G) {
      float score[N] = {};
      const bool visible = chunk < at.visible_chunks;
      if (visible) {
        load_scores(chunk, score);
        FRIT_UNROLL
        for (int k = 0; k < N; ++k) score[k] = exp2_fast(score[k] - shift);
      }
      write(V, chunk, score, visible);
    }
}

}  // namespace frit::simt
