#include "frit/ops/criterion/gpu.h"
#include "frit/simt/columns.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"
#include "frit/simt/warp_max.h"
#include "frit/simt/warp_sum.h"

namespace frit {
namespace {

using namespace simt;

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kNaN = std::bit_cast<float>(0x7fc00000u);

// What is added to the logits; at most one of the two is given.
template <typename T>
struct Bias {
  Global<const float> f32;
  Global<const T> same;
};

// Calls f(i) for each i in [0, N) with column + i inside of the row.
template <int N, typename F>
FRIT_DEVICE void each_inside(int column, int columns, F&& f) {
  if (column >= 0 && column + N <= columns) {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) f(i);
  } else {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i)
      if (column + i >= 0 && column + i < columns) f(i);
  }
}

// The largest and the smallest of 16-bit elements, found by pairs: 3 instructions for two elements. A NaN gives way, as
// in fmaxf and fminf.
template <typename T>
struct Extremes {
  uint32_t tops[2], negatives[2];  // running maxima of the elements, and of them negated

  FRIT_DEVICE Extremes() {
    const uint32_t lowest = convert<T>(-INFINITY).bits * 0x10001u;
    tops[0] = tops[1] = negatives[0] = negatives[1] = lowest;
  }
  template <int N>
  FRIT_DEVICE void add(const Vec<T, N>& x) {
    FRIT_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      tops[i % 2] = max2(T(), tops[i % 2], x.pairs[i]);
      negatives[i % 2] = max2(T(), negatives[i % 2], x.pairs[i] ^ 0x80008000u);
    }
  }
  FRIT_DEVICE float top() const { return larger(max2(T(), tops[0], tops[1])); }
  FRIT_DEVICE float bottom() const { return -larger(max2(T(), negatives[0], negatives[1])); }

 private:
  FRIT_DEVICE static float larger(uint32_t pair) {
    return fmaxf(widen(T::from_bits(static_cast<uint16_t>(pair))),
                 widen(T::from_bits(static_cast<uint16_t>(pair >> 16))));
  }
};
template <>
struct Extremes<float> {};

template <int N, typename B>
FRIT_DEVICE void add_bias(Vec<float, N>& x, const Global<const B>& bias, int column, int columns) {
  constexpr int M = N < kVecOf<B> ? N : kVecOf<B>;
  FRIT_UNROLL
  for (int k = 0; k < N; k += M) {
    const Vec<float, M> b = to_float(load_span<M, Cache::kReadOnly>(bias, column + k, columns, B()));
    FRIT_UNROLL
    for (int i = 0; i < M; ++i) x[k + i] += b[i];
  }
}
template <bool has_bias, int N, typename T>
FRIT_DEVICE Vec<float, N> values(const Vec<T, N>& x, const Bias<T>& bias, int column, int columns) {
  Vec<float, N> y = to_float(x);
  if constexpr (has_bias) {
    if (bias.f32)
      add_bias(y, bias.f32, column, columns);
    else if (bias.same)
      add_bias(y, bias.same, column, columns);
  }
  return y;
}

// 2^e as a float, e in [-126, 127].
FRIT_DEVICE float power_of_two(int e) {
  return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23);
}

// ---- Sums that do not depend on how a row lies in memory ----
// A thread's vectors begin at multiples of 16 bytes, so which columns it has depends on the row's alignment. Element i
// of its vectors, summed apart from the others (a "slot"), is a sum over the same columns in the same order whatever
// the alignment, only in another thread's slot. Slots become whole numbers, whose sum is exact in any order.

constexpr int kSumBits = 40;    // an exponential is at most 1, about: its unit is 2^-40
constexpr int kRowBits = 17;    // rows are shorter than 2^17 columns
constexpr int kTotalBits = 57;  // the sum of a row's logits stays below 2^57 units
constexpr int kLowBits = 27;    // 32 numbers of so many bits have a sum below 2^32

struct RowSums {
  int64_t exponentials = 0, logits = 0;
  bool bad = false;  // something is NaN, or too large to be summed
};

// log2 of the units of the sum of logits whose sizes are up to `size`.
FRIT_DEVICE int total_bits(float size) {
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(size) >> 23) - 126;  // size < 2^exponent
  const int bits = kTotalBits - kRowBits - exponent;
  return bits < 100 ? bits : 100;
}

template <int N>
FRIT_DEVICE RowSums whole_numbers(const float (&sums)[N], const float (&totals)[N], float size) {
  RowSums s;
  float all = 0;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) all += sums[i];
  // False for NaN, which a NaN among the logits leads to. `about` is rounded: where logits are of 1e8 an exponential
  // may be far above 1. 512 threads' sums of so much stay below 2^63 units.
  s.bad = !(all <= 16383.0f);
  if (s.bad) return s;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) s.exponentials += static_cast<int64_t>(sums[i] * power_of_two(kSumBits));
  if (!(size < INFINITY)) return s;
  const float unit = power_of_two(total_bits(size));
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) s.logits += static_cast<int64_t>(totals[i] * unit);
  return s;
}
// The sum of the warp's sums of logits, which is in [-2^58, 2^58).
FRIT_DEVICE int64_t warp_sum_logits(int64_t x) {
  const uint64_t bits = static_cast<uint64_t>(x);
  const uint32_t low = warp_sum_uint(static_cast<uint32_t>(bits) & ((1u << kLowBits) - 1));
  const uint32_t high = warp_sum_uint(static_cast<uint32_t>(bits >> kLowBits));
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<int32_t>(high)) << kLowBits) + low;
}

// What the row's gradient and losses follow from. Exponentials are 2^(x * kLog2E - about).
struct Row {
  float top, about;
  float sum;   // of the exponentials
  float mean;  // of the logits
};
FRIT_DEVICE float sum_of(int64_t exponentials, bool bad) {
  return bad ? kNaN : static_cast<float>(exponentials) * power_of_two(-kSumBits);
}
// `logits`: their sum; size: of the largest.
FRIT_DEVICE float mean_of(int64_t logits, float size, int columns) {
  if (!(size < INFINITY)) return -INFINITY;
  return static_cast<float>(logits) * power_of_two(-total_bits(size)) / static_cast<float>(columns);
}

FRIT_DEVICE float exponential(float x, float about) {
  return exp2_fast(fmaf(x, kLog2E, -about));
}

struct Losses {
  float loss, nll;
};
FRIT_DEVICE Losses losses_of(const Row& row, float label_logit, float smoothing) {
  // `about` is near top * log2(e); how near is the same factor in all exponentials.
  const float log_sum = logf(row.sum) - fmaf(row.top, kLog2E, -row.about) * kLn2;  // about top
  const float nll = (row.top - label_logit) + log_sum;
  // Not with a smoothing of 0: a -inf logit would make it NaN.
  return {smoothing == 0 ? nll : (1 - smoothing) * nll + smoothing * ((row.top - row.mean) + log_sum), nll};
}

// The gradient of logit x, not the label's: e^x / sum - smoothing / V, times scale.
struct Gradient {
  float about, factor, shift;
  FRIT_DEVICE Gradient(const Row& row, float smoothing, float scale, int columns)
      : Gradient(row.about, row.sum, scale, shift_of(smoothing, scale, columns)) {}
  FRIT_DEVICE Gradient(float about, float sum, float scale, float shift)
      : about(about), factor(scale / sum), shift(shift) {}
  FRIT_DEVICE static float shift_of(float smoothing, float scale, int columns) {
    return -smoothing / static_cast<float>(columns) * scale;
  }
  FRIT_DEVICE float operator()(float x) const { return fmaf(exponential(x, about), factor, shift); }
};
FRIT_DEVICE float label_gradient(const Row& row, float x, float smoothing, float scale, int columns) {
  const float p = 1 - smoothing + smoothing / static_cast<float>(columns);
  return (exponential(x, row.about) / row.sum - p) * scale;
}

// A row without a label, or with one that is no column.
FRIT_DEVICE bool dead(int label, int columns) {
  return label < 0 || label >= columns;
}
FRIT_DEVICE Losses dead_losses(int label) {
  return label < 0 ? Losses{0.0f, 0.0f} : Losses{kNaN, kNaN};
}

// ---- A warp a row ----
constexpr int kWarpVectors = 8;  // a lane's, in registers

template <typename T, bool has_bias>
FRIT_KERNEL(256, 2)
criterion_forward_row_per_warp_kernel(Global<T> logits, int64_t stride, int columns, int64_t rows, Bias<T> bias,
                                      Global<const int32_t> labels, float smoothing, Global<const float> scale,
                                      Global<float> loss, Global<float> nll) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>;
  const int64_t r = block_index() * warp_count() + warp();
  if (r >= rows) return;
  const Global<T> row = logits + r * stride;
  const int shift = row_shift(row), label = load(labels, r);
  const auto column_of = [&](int j) { return (j * kWarpSize + lane()) * N - shift; };
  if (dead(label, columns)) {
    if (lane() == 0) store(loss, r, dead_losses(label).loss), store(nll, r, dead_losses(label).nll);
    if (scale)
      for (int j = 0; column_of(j) < columns; ++j)
        store_span<N>(row, column_of(j), columns, from_float<T>(Vec<float, N>{}));
    return;
  }
  Vec<T, N> x[kWarpVectors];
  float top = -INFINITY, bottom = INFINITY;
  FRIT_UNROLL
  for (int j = 0; j < kWarpVectors; ++j)
    if (column_of(j) < columns) x[j] = load_span<N, Cache::kStream>(row, column_of(j), columns, T());
  FRIT_UNROLL
  for (int j = 0; j < kWarpVectors; ++j) {
    if (column_of(j) >= columns) continue;
    const Vec<float, N> v = values<has_bias>(x[j], bias, column_of(j), columns);
    each_inside<N>(column_of(j), columns, [&](int i) { top = fmaxf(top, v[i]), bottom = fminf(bottom, v[i]); });
  }
  top = warp_max_float(top), bottom = -warp_max_float(-bottom);
  float sums[N] = {}, totals[N] = {};
  const float about = top * kLog2E, size = fmaxf(fabsf(top), fabsf(bottom));
  float label_logit = 0;
  FRIT_UNROLL
  for (int j = 0; j < kWarpVectors; ++j) {
    if (column_of(j) >= columns) continue;
    const Vec<float, N> v = values<has_bias>(x[j], bias, column_of(j), columns);
    each_inside<N>(column_of(j), columns, [&](int i) {
      sums[i] += exponential(v[i], about), totals[i] += v[i];
      if (column_of(j) + i == label) label_logit = v[i];
    });
  }
  const RowSums part = whole_numbers(sums, totals, size);
  const Row result{top, about, sum_of(warp_sum_whole(part.exponentials), ballot(part.bad) != 0),
                   mean_of(warp_sum_logits(part.logits), size, columns)};
  // The lane that has the label's column ends the row.
  const bool mine = (label + shift) / N % kWarpSize == lane();
  if (mine) {
    const Losses losses = losses_of(result, label_logit, smoothing);
    store(loss, r, losses.loss), store(nll, r, losses.nll);
  }
  if (!scale) return;
  const float s = load(scale, 0), at_label = label_gradient(result, label_logit, smoothing, s, columns);
  const Gradient gradient(result, smoothing, s, columns);
  FRIT_UNROLL
  for (int j = 0; j < kWarpVectors; ++j) {
    const int column = column_of(j);
    if (column >= columns) continue;
    Vec<float, N> v = values<has_bias>(x[j], bias, column, columns);
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) v[i] = column + i == label ? at_label : gradient(v[i]);
    store_span<N, Cache::kStream>(row, column, columns, from_float<T>(v));
  }
}

// ---- A block a row, the row in shared memory ----
// Scratch in front of the row: whole-number sums of 32 warps, maxima and minima, flags.
constexpr int kSumsAt = 0, kExtremesAt = 512, kFlagsAt = 768, kRowAt = 896;
constexpr int kLineBytes = 128;

constexpr int shared_threads(bool has_bias) {
  return has_bias ? 320 : 512;
}

// A thread reads from shared memory only what it brought there itself: the 16 bytes of the row at (thread + k *
// threads) * 16, from the row's first line of 128 bytes on, so that a warp moves whole lines. So the copies need no
// barrier, and the next row's begin as soon as a vector of this one is done: they and the stores of one block fill the
// time that another block computes in.
template <typename T, bool has_bias>
FRIT_KERNEL(shared_threads(has_bias), (has_bias ? 2 : 3))
criterion_forward_row_in_shared_kernel(Global<T> logits, int64_t stride, int columns, int64_t rows, Bias<T> bias,
                                       Global<const int32_t> labels, float smoothing, Global<const float> scale,
                                       Global<float> loss, Global<float> nll, Divider by_threads, int multiprocessors) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>, kLine = kLineBytes / static_cast<int>(sizeof(T));
  const Shared<int64_t> sums_scratch = shared_array<int64_t>(kSumsAt);
  const Shared<float> extremes_scratch = shared_array<float>(kExtremesAt);
  const Shared<uint32_t> flags_scratch = shared_array<uint32_t>(kFlagsAt);
  const Shared<T> held = shared_array<T>(kRowAt);
  const int me = thread_index(), threads = thread_count(), warps = warp_count();
  const float s = scale ? load(scale, 0) : 0.0f, gradient_shift = Gradient::shift_of(smoothing, s, columns);
  // Elements of the row's first line that lie before it.
  const auto shift_of = [&](const Global<T>& row) {
    return static_cast<int>(static_cast<uint32_t>(row.address()) / sizeof(T) % kLine);
  };
  // Of a row that begins `shift` elements behind a line's begin.
  const auto vectors_of = [&](int shift) { return (columns + shift + N - 1) / N; };
  const auto is_whole = [&](int v, int shift) { return v * N >= shift && (v + 1) * N - shift <= columns; };
  const auto owner_of = [&](int v) {
    return v - static_cast<int>(by_threads(static_cast<uint32_t>(v)) * by_threads.divisor);
  };
  const auto fetch_whole = [&](const Global<T>& row, int shift, int v) {
    if (is_whole(v, shift)) copy_async16(held, v * N, row, v * N - shift);
  };
  // The first and the last vector, if they are not whole; then all copies are on their way.
  const auto fetch_ends = [&](const Global<T>& row, int shift) {
    const int first = shift / N, last = vectors_of(shift) - 1;
    copy_async_commit();
    if (me == first && !is_whole(first, shift))
      store_vec<N>(held, first * N, load_span<N>(row, first * N - shift, columns, T()));
    if (last > first && !is_whole(last, shift) && me == owner_of(last))
      store_vec<N>(held, last * N, load_span<N>(row, last * N - shift, columns, T()));
  };
  const auto fetch = [&](const Global<T>& row) {
    const int shift = shift_of(row), vectors = vectors_of(shift);
    for (int v = me; v < vectors; v += threads) fetch_whole(row, shift, v);
    fetch_ends(row, shift);
  };

  int64_t r = block_index();
  int label = load(labels, r);
  if (!dead(label, columns)) fetch(logits + r * stride);
  // Blocks that share a multiprocessor begin together; so that they do not go on in step, all computing and all waiting
  // for memory at the same time, the second of them fetches its second row late, the third its second and third.
  int late = static_cast<int>(block_index()) / multiprocessors;
  for (int64_t next; r < rows; r = next, --late) {
    next = r + block_count();
    const Global<T> row = logits + r * stride, next_row = logits + (next < rows ? next : r) * stride;
    const int shift = shift_of(row), vectors = vectors_of(shift), next_shift = shift_of(next_row);
    const int next_label = next < rows ? load(labels, next) : -1;
    const bool next_dead = dead(next_label, columns), fetching = !next_dead && late <= 0;
    const int next_vectors = fetching ? vectors_of(next_shift) : 0;
    if (dead(label, columns)) {
      if (me == 0) store(loss, r, dead_losses(label).loss), store(nll, r, dead_losses(label).nll);
      for (int v = me; v < vectors || v < next_vectors; v += threads) {
        if (scale && v < vectors)
          store_span<N, Cache::kStream>(row, v * N - shift, columns, from_float<T>(Vec<float, N>{}));
        if (v < next_vectors) fetch_whole(next_row, next_shift, v);
      }
    } else {
      copy_async_wait<0>();
      // Vectors that lie in the row in part are two threads' at most; all others need no look at the row's ends.
      const int first = shift / N, whole_begin = (shift + N - 1) / N, whole_end = (columns + shift) / N;
      const int begin = me < whole_begin ? me + threads : me;
      const bool first_mine = first < whole_begin && me == first;
      const bool last_mine = whole_end < vectors && whole_end >= whole_begin && me == owner_of(whole_end);
      const auto each_vector = [&](auto&& part, auto&& whole) {
        if (first_mine) part(first);
        for (int v = begin; v < whole_end; v += threads) whole(v);
        if (last_mine) part(whole_end);
      };
      const auto held_at = [&](int v) { return load_vec<N>(held, v * N); };
      const auto values_at = [&](int v) { return values<has_bias>(held_at(v), bias, v * N - shift, columns); };

      float top = -INFINITY, bottom = INFINITY;
      Extremes<T> pairs;
      each_vector(
          [&](int v) {
            const Vec<float, N> x = values_at(v);
            each_inside<N>(v * N - shift, columns,
                           [&](int i) { top = fmaxf(top, x[i]), bottom = fminf(bottom, x[i]); });
          },
          [&](int v) {
            if constexpr (sizeof(T) == 2 && !has_bias) {
              pairs.add(held_at(v));
            } else {
              const Vec<float, N> x = values_at(v);
              FRIT_UNROLL
              for (int i = 0; i < N; ++i) top = fmaxf(top, x[i]), bottom = fminf(bottom, x[i]);
            }
          });
      if constexpr (sizeof(T) == 2 && !has_bias) top = fmaxf(top, pairs.top()), bottom = fminf(bottom, pairs.bottom());
      top = warp_max_float(top), bottom = -warp_max_float(-bottom);
      if (lane() == 0) store(extremes_scratch, warp(), top), store(extremes_scratch, 32 + warp(), bottom);
      barrier();
      top = warp_max_float(lane() < warps ? load(extremes_scratch, lane()) : -INFINITY);
      bottom = -warp_max_float(lane() < warps ? -load(extremes_scratch, 32 + lane()) : -INFINITY);
      const float about = top * kLog2E, size = fmaxf(fabsf(top), fabsf(bottom));

      RowSums sums;
      {
        float slots[N] = {}, totals[N] = {};
        each_vector(
            [&](int v) {
              const Vec<float, N> x = values_at(v);
              each_inside<N>(v * N - shift, columns,
                             [&](int i) { slots[i] += exponential(x[i], about), totals[i] += x[i]; });
            },
            [&](int v) {
              const Vec<float, N> x = values_at(v);
              FRIT_UNROLL
              for (int i = 0; i < N; ++i) slots[i] += exponential(x[i], about), totals[i] += x[i];
            });
        sums = whole_numbers(slots, totals, size);
      }
      sums = {warp_sum_whole(sums.exponentials), warp_sum_logits(sums.logits), ballot(sums.bad) != 0};
      if (lane() == 0) {
        store(sums_scratch, warp(), sums.exponentials), store(sums_scratch, 32 + warp(), sums.logits);
        store(flags_scratch, warp(), sums.bad ? 1u : 0u);
      }
      barrier();
      const bool holds = lane() < warps;
      const float sum = sum_of(warp_sum_whole(holds ? load(sums_scratch, lane()) : 0),
                               ballot(holds && load(flags_scratch, lane()) != 0) != 0);

      // The thread that has the label's column ends the row; it takes the logit before the next row's may land on it.
      const int owner = owner_of((label + shift) / N);
      const bool mine = owner == me;
      float label_logit = 0;
      const int64_t all_logits = warp_sum_logits(holds ? load(sums_scratch, 32 + lane()) : 0);
      if (mine) {
        label_logit = widen(load(held, label + shift));
        if constexpr (has_bias)
          label_logit += bias.f32 ? load(bias.f32, label) : bias.same ? widen(load(bias.same, label)) : 0.0f;
      }
      const Gradient gradient(about, sum, s, gradient_shift);
      const auto gradients_of = [&](const Vec<T, N>& logits_there, int v) {
        Vec<float, N> x = values<has_bias>(logits_there, bias, v * N - shift, columns);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) x[i] = gradient(x[i]);
        return from_float<T>(x);
      };
      // Of this row's and of the next one's vectors: those that are whole in both, and the others.
      const int next_begin = fetching ? (next_shift + N - 1) / N : 0;
      const int next_end = fetching ? (columns + next_shift) / N : whole_end;
      const int both_begin = next_begin > whole_begin ? next_begin : whole_begin;
      const int both_end = !scale ? 0 : next_end < whole_end ? next_end : whole_end;
      const auto other = [&](int v) {
        if (scale && v >= first && v < vectors)
          store_span<N, Cache::kStream>(row, v * N - shift, columns, gradients_of(held_at(v), v));
        if (v < next_vectors) fetch_whole(next_row, next_shift, v);
      };
      int v = me;
      if (v < both_begin) other(v), v += threads;
      if (v < both_end) {
        Global<T> to = row + (v * N - shift), from = next_row + (v * N - next_shift);
        Shared<T> at = held + v * N;
        if (fetching) {
          FRIT_UNROLL_BY(1)
          for (; v < both_end; v += threads) {
            store_vec<N, Cache::kStream>(to, 0, gradients_of(load_vec<N>(at, 0), v));
            copy_async16(at, 0, from, 0);
            to = to + threads * N, from = from + threads * N, at = at + threads * N;
          }
        } else {
          FRIT_UNROLL_BY(1)
          for (; v < both_end; v += threads) {
            store_vec<N, Cache::kStream>(to, 0, gradients_of(load_vec<N>(at, 0), v));
            to = to + threads * N, at = at + threads * N;
          }
        }
      }
      FRIT_UNROLL_BY(1)
      for (; v < vectors || v < next_vectors; v += threads) other(v);
      if (mine) {
        const Row result{top, about, sum, mean_of(all_logits, size, columns)};
        const Losses losses = losses_of(result, label_logit, smoothing);
        store(loss, r, losses.loss), store(nll, r, losses.nll);
        if (scale) store(row, label, convert<T>(label_gradient(result, label_logit, smoothing, s, columns)));
      }
    }
    if (fetching)
      fetch_ends(next_row, next_shift);
    else if (!next_dead)
      fetch(next_row);
    label = next_label;
  }
}

// ---- A block a row that is read twice ----
// A thread has the columns (thread + k * threads) * N on, aligned or not: bits do not depend on where a row lies.
// Maximum and sum are found together: a larger maximum scales what was summed before it.
template <typename T>
FRIT_KERNEL(kCriterionTwoPassThreads, 2)
criterion_forward_row_twice_kernel(Global<T> logits, int64_t stride, int columns, Bias<T> bias,
                                   Global<const int32_t> labels, float smoothing, Global<const float> scale,
                                   Global<float> loss, Global<float> nll) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>;
  const Shared<float> scratch = shared_array<float>(0);
  const int64_t r = block_index();
  const Global<T> row = logits + r * stride;
  const int me = thread_index(), threads = thread_count(), label = load(labels, r);
  const int vectors = (columns + N - 1) / N;
  if (dead(label, columns)) {
    if (me == 0) store(loss, r, dead_losses(label).loss), store(nll, r, dead_losses(label).nll);
    if (scale)
      for (int v = me; v < vectors; v += threads)
        store_span<N, Cache::kStream>(row, static_cast<int64_t>(v) * N, columns, from_float<T>(Vec<float, N>{}));
    return;
  }
  // `about` is whole, so that parts that are about different maxima scale exactly.
  const auto about_of = [](float top) { return rintf(top * kLog2E); };
  float top = -INFINITY, sum = 0, total = 0;
  for (int v = me; v < vectors; v += threads) {
    const Vec<float, N> x =
        values<true>(load_span<N>(row, static_cast<int64_t>(v) * N, columns, T()), bias, v * N, columns);
    float most = top;
    each_inside<N>(v * N, columns, [&](int i) { most = fmaxf(most, x[i]); });
    const float about = most == -INFINITY ? 0.0f : about_of(most);
    if (most > top) sum *= top == -INFINITY ? 0.0f : exp2_fast(about_of(top) - about);
    top = most;
    each_inside<N>(v * N, columns, [&](int i) { sum += exponential(x[i], about), total += x[i]; });
  }
  // Parts without columns have no maximum, and sum to 0.
  const auto scaled = [&](float part, float part_top, float to_top) {
    return part_top == to_top || part == 0 ? part : part * exp2_fast(about_of(part_top) - about_of(to_top));
  };
  const float warp_top = warp_max(top);
  sum = warp_sum(scaled(sum, top, warp_top)), total = warp_sum(total);
  if (lane() == 0)
    store(scratch, warp(), warp_top), store(scratch, 32 + warp(), sum), store(scratch, 64 + warp(), total);
  const bool mine = label / N % threads == me;
  float label_logit = 0;
  if (mine) {
    label_logit = widen(load(row, label));
    label_logit += bias.f32 ? load(bias.f32, label) : bias.same ? widen(load(bias.same, label)) : 0.0f;
  }
  barrier();
  const bool holds = lane() < warp_count();
  const float part_top = holds ? load(scratch, lane()) : -INFINITY;
  top = warp_max(part_top);
  sum = warp_sum(holds ? scaled(load(scratch, 32 + lane()), part_top, top) : 0.0f);
  total = warp_sum(holds ? load(scratch, 64 + lane()) : 0.0f);
  const Row result{top, about_of(top), sum, total / static_cast<float>(columns)};
  const float s = scale ? load(scale, 0) : 0.0f;
  if (scale) {
    const Gradient gradient(result, smoothing, s, columns);
    for (int v = me; v < vectors; v += threads) {
      Vec<float, N> x =
          values<true>(load_span<N>(row, static_cast<int64_t>(v) * N, columns, T()), bias, v * N, columns);
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) x[i] = gradient(x[i]);
      store_span<N, Cache::kStream>(row, static_cast<int64_t>(v) * N, columns, from_float<T>(x));
    }
  }
  if (mine) {
    const Losses losses = losses_of(result, label_logit, smoothing);
    store(loss, r, losses.loss), store(nll, r, losses.nll);
    if (scale) store(row, label, convert<T>(label_gradient(result, label_logit, smoothing, s, columns)));
  }
}

template <typename T>
void run(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels, float smoothing,
         const Tensor& scale, const Tensor& loss, const Tensor& nll) {
  const int64_t rows = logits.dim(0), vocabulary = logits.dim(1), stride = logits.row_stride();
  const int columns = static_cast<int>(vocabulary);
  const CriterionBlock block = CriterionBlock::of(vocabulary, logits.dtype(), bias.defined());
  static constexpr const char* kNames[] = {"warp", "shared", "two_pass"};
  const auto accepts = [&](int i) {
    return i == 0 ? vocabulary <= criterion_warp_columns(logits.dtype())
                  : i == 2 || (vocabulary < (int64_t{1} << kRowBits) &&
                               block.shared_bytes <= context.gpu().shared_bytes_limit());
  };
  const int fallback = accepts(0) ? 0 : accepts(1) ? 1 : 2;
  const std::string key = fmt::format("{}x{}/{}", rows, vocabulary, name_of(logits.dtype()));
  const int chosen = choose_instance(context, "criterion_forward", key, kNames, fallback, accepts);
  Bias<T> b;
  if (bias.defined() && bias.dtype() == DType::kF32)
    b.f32 = global<const float>(bias);
  else if (bias.defined())
    b.same = global<const T>(bias);
  const Global<T> x = global<T>(logits);
  const Global<const int32_t> l = global<const int32_t>(labels);
  const Global<const float> s = global<const float>(scale);
  const Global<float> out = global<float>(loss), out_nll = global<float>(nll);
  if (chosen == 0) {
    const auto kernel = bias.defined() ? criterion_forward_row_per_warp_kernel<T, true>
                                       : criterion_forward_row_per_warp_kernel<T, false>;
    launch(context, "criterion_forward_row_per_warp_kernel", kernel, {(rows + 7) / 8, 256, 0}, x, stride, columns, rows,
           b, l, smoothing, s, out, out_nll);
  } else if (chosen == 1) {
    const auto kernel = bias.defined() ? criterion_forward_row_in_shared_kernel<T, true>
                                       : criterion_forward_row_in_shared_kernel<T, false>;
    launch(context, "criterion_forward_row_in_shared_kernel", kernel,
           {block.blocks(rows, context.gpu().shared_bytes_limit(), context.gpu().multiprocessors()), block.threads,
            block.shared_bytes},
           x, stride, columns, rows, b, l, smoothing, s, out, out_nll, Divider(block.threads),
           context.gpu().multiprocessors());
  } else {
    launch(context, "criterion_forward_row_twice_kernel", criterion_forward_row_twice_kernel<T>,
           {rows, kCriterionTwoPassThreads, 96 * 4}, x, stride, columns, b, l, smoothing, s, out, out_nll);
  }
}

}  // namespace

CriterionBlock CriterionBlock::of(int64_t vocabulary, DType dtype, bool bias) {
  // Vectors of a row that begins as far behind a line's begin as it can; about 8 a thread.
  const int64_t n = 16 / size_of(dtype), before = kLineBytes / size_of(dtype) - 1;
  const int64_t vectors = (vocabulary + before + n - 1) / n, threads = (vectors + 255) / 256 * 32;
  const int64_t most = shared_threads(bias);
  return {static_cast<int>(threads < 64 ? 64 : threads > most ? most : threads), kRowAt + vectors * 16};
}
int64_t CriterionBlock::blocks(int64_t rows, int64_t shared_bytes_limit, int multiprocessors) const {
  // A multiprocessor has 1 KB of shared memory a block beside what a block may use, and here runs 1536 threads (40
  // registers each).
  const int64_t by_memory = (shared_bytes_limit + 1024) / (shared_bytes + 1024), by_threads = 1536 / threads;
  const int64_t resident = by_memory < 1 ? 1 : by_memory < by_threads ? by_memory : by_threads;
  return rows < resident * multiprocessors ? rows : resident * multiprocessors;
}
int64_t criterion_warp_columns(DType dtype) {
  const int64_t n = 16 / size_of(dtype);
  return kWarpVectors * kWarpSize * n - (n - 1);
}

void criterion_forward_backward_gpu(Context& context, const Tensor& logits, const Tensor& bias, const Tensor& labels,
                                    float smoothing, const Tensor& scale, const Tensor& loss, const Tensor& nll) {
  dispatch_float(logits.dtype(),
                 [&](auto type) { run<decltype(type)>(context, logits, bias, labels, smoothing, scale, loss, nll); });
}

}  // namespace frit
