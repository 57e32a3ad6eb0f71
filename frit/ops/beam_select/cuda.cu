#include "frit/ops/beam_select/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"
#include "frit/simt/warp_max.h"
#include "frit/simt/warp_sum.h"

namespace frit {
namespace {

using namespace simt;

constexpr float kLog2E = 1.4426950408889634f;
constexpr double kLn2 = 0.69314718055994531;
constexpr float kNaN = std::bit_cast<float>(0x7fc00000u);
constexpr int kThreads = kBeamSelectThreads, kWarps = kThreads / kWarpSize;
// Vectors that a thread loads at a time: 32 elements, as many as registers hold beside their sums.
template <typename T>
constexpr int kBatch = 32 / kVecOf<T>;

// Shared memory, in bytes: candidates' keys; a maximum a group; a histogram; and one of each warp's or the block's.
constexpr int kKeysAt = 0, kMaximaAt = kBeamSelectCapacity * 8, kHistogramAt = kMaximaAt + kThreads * 4,
              kSumsAt = kHistogramAt + 1024, kFlagsAt = kSumsAt + kWarps * 8, kCounterAt = kFlagsAt + kWarps * 4,
              kThresholdAt = kCounterAt + 4, kSharedBytes = kThresholdAt + 4;

// 2^e as a float, e in [-126, 127].
FRIT_DEVICE float power_of_two(int e) {
  return std::bit_cast<float>(static_cast<uint32_t>(e + 127) << 23);
}

// Orders candidates: the larger value first, then the smaller column, as one rising number. -0 counts as 0.
FRIT_DEVICE uint64_t key_of(float value, int column) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint32_t>(column);
}
FRIT_DEVICE float value_of(uint64_t key) {
  const uint32_t rising = ~static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>(rising & 0x80000000u ? rising & 0x7fffffffu : ~rising);
}
// A NaN can be no candidate before all else: it counts as -inf (and the row's log-sum-exp is NaN).
FRIT_DEVICE float candidate(float x) {
  return x == x ? x : -INFINITY;
}

// A row as its block sees it: vectors of N elements that begin at multiples of 16 bytes; the first and the last may lie
// in the row in part. Thread t has the whole vectors whole_begin + t + k * kThreads, the last thread also a first one
// that is not whole.
template <typename T>
struct Row {
  static constexpr int N = kVecOf<T>;
  Global<const T> at;
  int columns, shift, vectors, whole_begin, whole_end;

  FRIT_DEVICE Row(const Global<const T>& row, int columns)
      : at(row),
        columns(columns),
        shift(row_shift(row)),
        vectors((columns + shift + N - 1) / N),
        whole_begin(shift > 0 ? 1 : 0),
        whole_end((columns + shift) / N) {}
  FRIT_DEVICE int column(int v) const { return v * N - shift; }
  // What lies outside of the row is -inf.
  FRIT_DEVICE Vec<T, N> load(int v) const { return load_span<N>(at, column(v), columns, convert<T>(-INFINITY)); }
  // The whole ones of the vectors v + u * kThreads; -inf for others.
  FRIT_DEVICE void load_batch(int v, Vec<T, N> (&x)[kBatch<T>]) const {
    FRIT_UNROLL
    for (int u = 0; u < kBatch<T>; ++u) x[u] = load_whole(v + u * kThreads);
  }
  // Vector v, if it is a whole one; else -inf.
  FRIT_DEVICE Vec<T, N> load_whole(int v) const {
    Vec<T, N> x;
    if (v < whole_end) {
      x = load_vec<N>(at, column(v));
    } else {
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) x[i] = convert<T>(-INFINITY);
    }
    return x;
  }
  // For which u that is the row's last vector, if that is not whole; -1: for none.
  FRIT_DEVICE int partial_in_batch(int v) const {
    const int behind = vectors - 1 - v;
    return vectors > whole_end && behind >= 0 && behind < kBatch<T> * kThreads && behind % kThreads == 0
               ? behind / kThreads
               : -1;
  }
  FRIT_DEVICE Vec<T, N> partial_vector() const {
    const int begin = column(vectors - 1);
    Vec<T, N> x;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i)
      x[i] = begin + i >= 0 && begin + i < columns ? simt::load(at, begin + i) : convert<T>(-INFINITY);
    return x;
  }
  // f(v) for the vectors of thread `owner`: each `step`-th from the `first`-th on.
  template <typename F>
  FRIT_DEVICE void each_vector_of(int owner, int first, int step, F&& f) const {
    for (int v = whole_begin + owner + (first - 1) * kThreads; v < vectors; v += step * kThreads)
      if (v >= 0) f(v);
  }
  // f(value, column) for the elements of vector v that lie in the row.
  template <typename F>
  FRIT_DEVICE void each(int v, F&& f) const {
    each(v, load(v), f);
  }
  // The same; x: the vector.
  template <typename F>
  FRIT_DEVICE void each(int v, const Vec<T, N>& x, F&& f) const {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i)
      if (column(v) + i >= 0 && column(v) + i < columns) f(candidate(widen(x[i])), column(v) + i);
  }
};

// ---- One walk over the row: maximum and sum of exponentials ----

// What the exponentials of a row are about: they are 2^(x * kLog2E - about).
struct Reference {
  float value, about;
  FRIT_DEVICE explicit Reference(float value) : value(value), about(value * kLog2E) {}
};
// A logit that is likely near the row's largest, in each lane: the largest of the first 32. Taken from columns, not
// from a thread's share of the row, which depends on where the row lies.
template <typename T>
FRIT_DEVICE float first_logit(const Row<T>& row) {
  return lane() < row.columns ? widen(load(row.at, lane())) : -INFINITY;
}
FRIT_DEVICE Reference reference_of(float first) {
  const float most = warp_max_float(first > -INFINITY && first < INFINITY ? first : -INFINITY);
  return Reference(most > -INFINITY ? most : 0.0f);
}

// The largest of the elements of vectors, of 16-bit ones found by pairs. A NaN gives way.
template <typename T>
struct Largest {
  uint32_t pairs = convert<T>(-INFINITY).bits * 0x10001u;
  template <int N>
  FRIT_DEVICE void add(const Vec<T, N>& x) {
    FRIT_UNROLL
    for (int i = 0; i < N / 2; ++i) pairs = max2(T(), pairs, x.pairs[i]);
  }
  FRIT_DEVICE float get() const {
    return fmaxf(widen(T::from_bits(static_cast<uint16_t>(pairs))),
                 widen(T::from_bits(static_cast<uint16_t>(pairs >> 16))));
  }
};
template <>
struct Largest<float> {
  float even = -INFINITY, odd = -INFINITY;
  template <int N>
  FRIT_DEVICE void add(const Vec<float, N>& x) {
    FRIT_UNROLL
    for (int i = 0; i < N; i += 2) even = fmaxf(even, x[i]), odd = fmaxf(odd, x[i + 1]);
  }
  FRIT_DEVICE float get() const { return fmaxf(even, odd); }
};

// A thread's maximum, and its sums of exponentials: element i of its vectors has a sum ("slot") of its own. Whatever
// the row's alignment, there is for each slot one, here or in the thread before, that sums the same columns in the same
// order; so the slots, added as whole numbers, give the same bits wherever the row lies.
template <int N>
struct Scan {
  float top = -INFINITY, second = -INFINITY;  // of the batches' maxima the largest, and the next
  int where = 0;                              // the batch of `top`
  float slots[N] = {};
  float batch[N] = {};  // sums that slots take next
  template <typename T>
  FRIT_DEVICE void add(const Vec<T, N>& x, float about, Largest<T>& largest) {
    largest.add(x);
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) batch[i] += exp2_fast(fmaf(widen(x[i]), kLog2E, -about));
  }
  // A batch's maximum; b < 0: of what belongs to no batch.
  FRIT_DEVICE void note(float most, int b) {
    const bool above = b >= 0 && most > top;
    second = fmaxf(second, above ? top : most);
    top = above ? most : fmaxf(top, most);
    where = above ? b : where;
  }
  // Slots [begin, end) take their batch, which begins anew.
  FRIT_DEVICE void take(int begin, int end) {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i)
      if (i >= begin && i < end) slots[i] += batch[i], batch[i] = 0;
  }
};
// A batch's sums are made apart and then added, so that another block may make them. A slot's batch is that of the
// kBatch columns that it sums: where a row's first vector is not whole, the last thread's slots in it are one vector
// ahead of the others.
template <typename T>
FRIT_DEVICE void add_batch(Scan<kVecOf<T>>& scan, const Row<T>& row, int v, const Vec<T, kVecOf<T>> (&x)[kBatch<T>],
                           float about, int ahead, int b) {
  constexpr int N = kVecOf<T>, kLast = kBatch<T> - 1;
  Largest<T> largest;
  // Vectors behind the row's end would add zeros.
  const int left = row.vectors - (v - thread_index());
  FRIT_UNROLL
  for (int u = 0; u < kLast; ++u)
    if (u == 0 || u * kThreads < left) scan.add(x[u], about, largest);
  const int partial = row.partial_in_batch(v);
  if (partial >= 0 && partial < kLast) scan.add(row.partial_vector(), about, largest);
  if (ahead < N) scan.take(ahead, N);
  if (kLast * kThreads < left) scan.add(x[kLast], about, largest);
  if (partial == kLast) scan.add(row.partial_vector(), about, largest);
  scan.take(0, ahead);
  scan.note(largest.get(), b);
}
// A batch of whole vectors; those of the next, next(u), take their places one by one, so that as many as registers hold
// are always on their way.
template <typename T, typename F>
FRIT_DEVICE void add_whole_batch(Scan<kVecOf<T>>& scan, F&& next, Vec<T, kVecOf<T>> (&x)[kBatch<T>], float about,
                                 int ahead, int b) {
  constexpr int N = kVecOf<T>, kLast = kBatch<T> - 1;
  Largest<T> largest;
  FRIT_UNROLL
  for (int u = 0; u <= kLast; ++u) {
    if (u == kLast && ahead < N) scan.take(ahead, N);
    scan.add(x[u], about, largest);
    x[u] = next(u);
  }
  scan.take(0, ahead);
  scan.note(largest.get(), b);
}
template <typename T>
FRIT_DEVICE Scan<kVecOf<T>> rescan(const Row<T>& row, float about) {
  Scan<kVecOf<T>> scan;
  Largest<T> largest;
  row.each_vector_of(thread_index(), 0, 1, [&](int v) { scan.add(row.load(v), about, largest); });
  scan.take(0, kVecOf<T>);
  scan.note(largest.get(), -1);
  return scan;
}

// Exponent bits that the whole-number sum of a row's exponentials, each at most about 1, has room for.
FRIT_DEVICE int sum_bits(int columns) {
  const int bits = leading_zeros(static_cast<uint32_t>(columns)) + 28;  // 2^(60 - log2(columns)), or more finely
  return bits < 40 ? bits : 40;
}

// The sum of a row's exponentials, in pieces: value * 2^shift.
struct RowSum {
  Reference reference;
  int exponent;  // the row's maximum is about 2^exponent above the reference
};

// Leaves each warp's part of the row's sum in shared memory. `top` is the row's maximum. Rows whose maximum is further
// from the reference than exponents reach are walked again, about their maximum.
template <typename T>
FRIT_DEVICE RowSum store_sums(const Row<T>& row, Scan<kVecOf<T>> scan, Reference reference, float top) {
  RowSum sum{reference, 0};
  if (top > -INFINITY && top < INFINITY) {
    const float above = fmaf(top, kLog2E, -reference.about);
    if (above > -60.0f && above < 60.0f) {
      sum.exponent = static_cast<int>(above);
    } else {
      sum.reference = Reference(top);
      scan = rescan(row, sum.reference.about);
    }
  }
  const float unit = power_of_two(sum_bits(row.columns) - sum.exponent);
  const bool counts = top < INFINITY;
  bool bad = false;
  int64_t whole = 0;
  FRIT_UNROLL
  for (int i = 0; i < kVecOf<T>; ++i) {
    bad |= scan.slots[i] != scan.slots[i];
    whole += static_cast<int64_t>(counts && scan.slots[i] == scan.slots[i] ? scan.slots[i] * unit : 0.0f);
  }
  whole = warp_sum_whole(whole);
  const bool any_bad = ballot(bad) != 0;
  if (lane() == 0) {
    store(shared_array<int64_t>(kSumsAt), warp(), whole);
    store(shared_array<uint32_t>(kFlagsAt), warp(), any_bad ? 1u : 0u);
  }
  return sum;
}
// What the row's log-sum-exp is made of beside the sum itself.
FRIT_DEVICE double log_of_unit(const RowSum& sum) {
  // `about` is the reference times log2(e), rounded; what that lost is the same factor in all exponentials.
  const float lost = fmaf(sum.reference.value, kLog2E, -sum.reference.about);
  return static_cast<double>(sum.reference.value) +
         (static_cast<double>(sum.exponent) - static_cast<double>(lost)) * kLn2;
}
// The row's log-sum-exp, from what store_sums() left, behind a barrier; for one thread.
FRIT_DEVICE float log_sum_exp(double of_unit, float top, int columns) {
  int64_t whole = 0;
  uint32_t bad = 0;
  FRIT_UNROLL
  for (int w = 0; w < kWarps; ++w) {
    whole += load(shared_array<int64_t>(kSumsAt), w);
    bad |= load(shared_array<uint32_t>(kFlagsAt), w);
  }
  if (bad != 0) return kNaN;
  if (!(top > -INFINITY && top < INFINITY)) return top;
  const float scaled = static_cast<float>(whole) * power_of_two(-sum_bits(columns));
  return static_cast<float>(of_unit + static_cast<double>(logf(scaled)));
}

// ---- The count-th key, found byte by byte ----

// The largest of the row's `count` first keys, or a larger number below which there are no more; in all threads. Cost:
// up to 8 reads of the row (one for most data without ties in the value: until a byte tells the count-th from the next)
// and 3 barriers each.
template <typename T>
FRIT_DEVICE uint64_t radix_threshold(const Row<T>& row, int count) {
  const Shared<uint32_t> histogram = shared_array<uint32_t>(kHistogramAt);
  const int me = thread_index();
  uint64_t prefix = 0;
  uint32_t remaining = static_cast<uint32_t>(count);
  for (int byte = 7; byte >= 0; --byte) {
    store(histogram, me, 0u);
    barrier();
    for (int v = me; v < row.vectors; v += kThreads)
      row.each(v, [&](float value, int column) {
        const uint64_t key = key_of(value, column);
        if (byte == 7 || key >> (8 * (byte + 1)) == prefix)
          atomic_add(histogram, static_cast<int64_t>(key >> (8 * byte) & 255u), 1u);
      });
    barrier();
    uint32_t bin = 0, inside = load(histogram, 0);
    while (inside < remaining) remaining -= inside, inside = load(histogram, ++bin);
    prefix = prefix << 8 | bin;
    barrier();  // before the histogram is cleared
    if (inside == remaining) return prefix << (8 * byte) | ((uint64_t{1} << (8 * byte)) - 1);
  }
  return prefix;
}

// Where a row's results go.
struct Results {
  Global<float> values;
  int64_t values_stride;
  Global<int32_t> columns;
  int64_t columns_stride;
  Global<float> lse;
  Global<int32_t> survivors;

  FRIT_DEVICE void put(int64_t row, int rank, uint64_t key) const {
    store(values, row * values_stride + rank, value_of(key));
    store(columns, row * columns_stride + rank, static_cast<int32_t>(key & 0xffffffffu));
  }
};

// Hierarchical selection in row r, behind the walk over it, for a block.
template <typename T>
FRIT_DEVICE void select_by_groups(const Row<T>& row, const Scan<kVecOf<T>>& scan, const Reference& reference, int64_t r,
                                  int count, int groups, const Results& results) {
  const Shared<uint64_t> keys = shared_array<uint64_t>(kKeysAt);
  const Shared<float> maxima = shared_array<float>(kMaximaAt), threshold_at = shared_array<float>(kThresholdAt);
  const Shared<uint32_t> counter = shared_array<uint32_t>(kCounterAt);
  const int me = thread_index(), columns = row.columns;
  if (me == 0) store(counter, 0, 0u);
  const bool few = groups == 32;
  const float group_top = few ? warp_max<8>(scan.top) : scan.top;
  if (!few || lane() % 8 == 0) store(maxima, few ? me / 8 : me, group_top);
  barrier();

  // R, the count-th largest of the group maxima: every warp finds it among 32, a thread a group among more.
  float top, threshold;
  if (few) {
    int32_t mine = ordered_bits(std::bit_cast<int32_t>(load(maxima, lane()) + 0.0f));  // no -0
    int32_t most = warp_max_int(mine);
    top = std::bit_cast<float>(ordered_bits(most));
    for (int left = count;;) {
      const bool is_most = mine == most;
      left -= count_bits(ballot(is_most));
      if (left <= 0) break;
      if (is_most) mine = static_cast<int32_t>(0x80000000u);  // below all numbers
      most = warp_max_int(mine);
    }
    threshold = std::bit_cast<float>(ordered_bits(most));
  } else {
    int rank = 0;
    top = -INFINITY;
    for (int g = 0; g < groups; g += 4) {
      const Vec<float, 4> other = load_vec<4>(maxima, g);
      FRIT_UNROLL
      for (int i = 0; i < 4; ++i) {
        rank += other[i] > group_top || (other[i] == group_top && g + i < me);
        top = fmaxf(top, other[i]);
      }
    }
    if (rank == count - 1) store(threshold_at, 0, group_top);
    barrier();
    threshold = load(threshold_at, 0);
  }

  // Collects the logits from R on. Only threads whose maximum reaches R have any, and most of them in one batch, which
  // kBatch lanes read again: those of several threads together, so that a warp waits for memory once.
  const auto collect = [&](float value, int column) {
    if (!(value >= threshold)) return;
    const uint32_t position = atomic_add(counter, 0, 1u);
    if (position < kBeamSelectCapacity) store(keys, position, key_of(value, column));
  };
  constexpr int kTogether = kWarpSize / kBatch<T>;
  uint32_t holders = ballot(scan.top >= threshold && scan.second < threshold);
  // The lane's vector of the next holders; row.vectors if there are not so many.
  const auto next_vector = [&] {
    uint32_t mine = holders;
    FRIT_UNROLL
    for (int i = 1; i < kTogether; ++i)
      if (i <= lane() / kBatch<T>) mine &= mine - 1;
    FRIT_UNROLL
    for (int i = 0; i < kTogether; ++i) holders &= holders - 1;
    const int holder = mine != 0 ? find_first_set(mine) - 1 : 0, b = shuffle(scan.where, holder);
    const int v = row.whole_begin + warp() * kWarpSize + holder + (b * kBatch<T> + lane() % kBatch<T>)*kThreads;
    return mine != 0 && v < row.vectors ? v : row.vectors;
  };
  // The first ones are on their way while the sums are made.
  const int first_vector = next_vector();
  const auto first_values = row.load_whole(first_vector);
  const RowSum sum = store_sums(row, scan, reference, top);
  const double of_unit = me == kThreads - 1 ? log_of_unit(sum) : 0.0;
  if (first_vector < row.whole_end)
    row.each(first_vector, first_values, collect);
  else if (first_vector < row.vectors)
    row.each(first_vector, collect);
  while (holders != 0) {
    const int v = next_vector();
    if (v < row.vectors) row.each(v, collect);
  }
  // In more than one: the warp reads all columns of such a thread.
  for (uint32_t holders = ballot(scan.second >= threshold); holders != 0; holders &= holders - 1)
    row.each_vector_of(warp() * kWarpSize + find_first_set(holders) - 1, lane(), kWarpSize,
                       [&](int v) { row.each(v, collect); });
  barrier();

  const uint32_t found = load(counter, 0);
  if (me == kThreads - 1) {
    if (results.lse) store(results.lse, r, log_sum_exp(of_unit, top, columns));
    if (results.survivors) store(results.survivors, r, static_cast<int32_t>(found));
  }
  uint32_t held = found;
  if (found > kBeamSelectCapacity) {  // exactly the `count` first instead
    const uint64_t last = radix_threshold(row, count);
    if (me == 0) store(counter, 0, 0u);
    barrier();
    for (int v = me; v < row.vectors; v += kThreads)
      row.each(v, [&](float value, int column) {
        const uint64_t key = key_of(value, column);
        if (key <= last) store(keys, atomic_add(counter, 0, 1u), key);
      });
    barrier();
    held = static_cast<uint32_t>(count);
  }
  for (uint32_t i = static_cast<uint32_t>(me); i < held; i += kThreads) {
    const uint64_t key = load(keys, i);
    int before = 0;
    FRIT_UNROLL_BY(8)
    for (uint32_t j = 0; j < held; ++j) before += load(keys, j) < key;
    if (before < count) results.put(r, before, key);
  }
}

// A block a row.
template <typename T>
FRIT_KERNEL(kThreads, 4)
beam_select_forward_groups_kernel(Global<const T> logits, int64_t stride, int columns, int count, int groups,
                                  Results results) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>;
  const int me = thread_index();
  const int64_t r = block_index();
  const Row<T> row(logits + r * stride, columns);

  // Maxima and sums, in one walk. The first batch is on its way before anything waits for the reference.
  Vec<T, N> x[kBatch<T>];
  const float first = first_logit(row);
  row.load_batch(row.whole_begin + me, x);
  const Reference reference = reference_of(first);
  Scan<N> scan;
  if (row.whole_begin > 0 && me == kThreads - 1) {
    Largest<T> largest;
    scan.add(row.load(0), reference.about, largest);
    scan.note(largest.get(), -1);
  }
  constexpr int kStep = kBatch<T> * kThreads;
  const int ahead = row.shift > 0 && me == kThreads - 1 ? row.shift : N;
  int v = row.whole_begin + me, b = 0;
  Global<const T> next = row.at + row.column(v);
  for (; row.whole_begin + (b + 2) * kStep <= row.whole_end; ++b, v += kStep) {
    next = next + kStep * N;
    add_whole_batch<T>(
        scan, [&](int u) { return load_vec<N>(next, u * kThreads * N); }, x, reference.about, ahead, b);
  }
  if (row.whole_begin + (b + 1) * kStep <= row.whole_end && row.whole_begin + (b + 1) * kStep < row.vectors) {
    v += kStep;
    add_whole_batch<T>(
        scan, [&](int u) { return row.load_whole(v + u * kThreads); }, x, reference.about, ahead, b);
    ++b;
  }
  add_batch<T>(scan, row, v, x, reference.about, ahead, b);
  scan.take(0, N);
  select_by_groups(row, scan, reference, r, count, groups, results);
}

// The same in two launches, for rows too few to fill the GPU: a block a batch of a row makes its sums, then a block a
// row adds them in order. All rows begin at multiples of 16 bytes. sums: [rows * parts, kThreads, N]; tops:
// [rows * parts, kThreads].
template <typename T>
FRIT_KERNEL(kThreads, 4)
beam_select_forward_parts_kernel(Global<const T> logits, int64_t stride, int columns, int parts, Global<float> sums,
                                 Global<float> tops) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>;
  const int64_t r = block_index() / parts;
  const int me = thread_index(), p = static_cast<int>(block_index() - r * parts);
  const Row<T> row(logits + r * stride, columns);
  Vec<T, N> x[kBatch<T>];
  const float first = first_logit(row);
  const int v = p * kBatch<T> * kThreads + me;
  row.load_batch(v, x);
  const Reference reference = reference_of(first);
  Scan<N> scan;
  add_batch<T>(scan, row, v, x, reference.about, N, 0);
  const int64_t mine = block_index() * kThreads + me;
  FRIT_UNROLL
  for (int i = 0; i < N; i += 4)
    store_vec<4>(sums, mine * N + i,
                 Vec<float, 4>{scan.slots[i], scan.slots[i + 1], scan.slots[i + 2], scan.slots[i + 3]});
  store(tops, mine, scan.top);
}
template <typename T>
FRIT_KERNEL(kThreads, 4)
beam_select_forward_join_kernel(Global<const T> logits, int64_t stride, int columns, int count, int groups, int parts,
                                Global<const float> sums, Global<const float> tops, Results results) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>;
  const int64_t r = block_index();
  const Row<T> row(logits + r * stride, columns);
  const float first = first_logit(row);
  Scan<N> scan;
  FRIT_UNROLL_BY(4)
  for (int p = 0; p < parts; ++p) {
    const int64_t theirs = (r * parts + p) * kThreads + thread_index();
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      const Vec<float, 4> four = load_vec<4>(sums, theirs * N + i);
      FRIT_UNROLL
      for (int e = 0; e < 4; ++e) scan.batch[i + e] = four[e];
    }
    scan.note(load(tops, theirs), p);
    scan.take(0, N);
  }
  select_by_groups(row, scan, reference_of(first), r, count, groups, results);
}

// A block a row, any count: the threshold byte by byte, then a bitonic sort of `padded` (a power of two) keys in global
// memory.
template <typename T>
FRIT_KERNEL(kThreads, 4)
beam_select_forward_radix_kernel(Global<const T> logits, int64_t stride, int columns, int count, int padded,
                                 Global<int64_t> all_keys, Results results) {
  let_next_start();
  wait_for_previous();
  const Shared<float> maxima = shared_array<float>(kMaximaAt);
  const Shared<uint32_t> counter = shared_array<uint32_t>(kCounterAt);
  const int me = thread_index();
  const int64_t r = block_index();
  const Row<T> row(logits + r * stride, columns);
  const Global<int64_t> keys = all_keys + r * padded;
  const Reference reference = reference_of(first_logit(row));
  const Scan<kVecOf<T>> scan = rescan(row, reference.about);
  if (me == 0) store(counter, 0, 0u);
  const float top = block_max(scan.top, maxima);
  const RowSum sum = store_sums(row, scan, reference, top);
  const uint64_t last = radix_threshold(row, count);
  for (int v = me; v < row.vectors; v += kThreads)
    row.each(v, [&](float value, int column) {
      const uint64_t key = key_of(value, column);
      if (key <= last) store(keys, atomic_add(counter, 0, 1u), static_cast<int64_t>(key));
    });
  for (int i = count + me; i < padded; i += kThreads) store(keys, i, int64_t{-1});  // behind all keys
  if (me == kThreads - 1) {
    if (results.lse) store(results.lse, r, log_sum_exp(log_of_unit(sum), top, columns));
    if (results.survivors) store(results.survivors, r, count);
  }
  barrier();
  for (int width = 2; width <= padded; width *= 2)
    for (int apart = width / 2; apart > 0; apart /= 2) {
      for (int i = me; i < padded / 2; i += kThreads) {
        const int low = i / apart * (2 * apart) + i % apart, high = low + apart;
        const uint64_t a = static_cast<uint64_t>(load(keys, low)), b = static_cast<uint64_t>(load(keys, high));
        if ((a > b) == ((low & width) == 0))
          store(keys, low, static_cast<int64_t>(b)), store(keys, high, static_cast<int64_t>(a));
      }
      barrier();
    }
  for (int i = me; i < count; i += kThreads) results.put(r, i, static_cast<uint64_t>(load(keys, i)));
}

template <typename T>
void run(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
         const Tensor& lse, const Tensor& survivors) {
  const int64_t rows = logits.dim(0), vocabulary = logits.dim(1);
  static constexpr const char* kNames[] = {"groups", "radix", "parts"};
  const int64_t parts = beam_select_gpu_parts(vocabulary, size_of(logits.dtype()));
  const bool whole = reinterpret_cast<uintptr_t>(logits.raw()) % 16 == 0 &&
                     (rows <= 1 || logits.row_stride() * size_of(logits.dtype()) % 16 == 0);
  const auto accepts = [&](int i) { return i == 1 || (count <= kBeamSelectMostByGroups && (i == 0 || whole)); };
  const bool few = rows <= kBeamSelectFewRows && parts > 1;
  const std::string key = fmt::format("{}x{}/{}/{}", rows, vocabulary, count, name_of(logits.dtype()));
  const int chosen = choose_instance(context, "beam_select_forward", key, kNames,
                                     !accepts(0)         ? 1
                                     : few && accepts(2) ? 2
                                                         : 0,
                                     accepts);
  const Results results{global<float>(values), values.row_stride(), global<int32_t>(columns),
                        columns.row_stride(),  global<float>(lse),  global<int32_t>(survivors)};
  const int width = static_cast<int>(vocabulary), wanted = static_cast<int>(count);
  if (chosen == 0) {
    launch(context, "beam_select_forward_groups_kernel", beam_select_forward_groups_kernel<T>,
           {rows, kThreads, kSharedBytes}, global<const T>(logits), logits.row_stride(), width, wanted,
           static_cast<int>(beam_select_gpu_groups(count)), results);
    return;
  }
  if (chosen == 2) {
    Buffer sums = context.allocate({rows * parts, kThreads * kVecOf<T>}, DType::kF32, "beam_select.sums");
    Buffer tops = context.allocate({rows * parts, kThreads}, DType::kF32, "beam_select.tops");
    launch(context, "beam_select_forward_parts_kernel", beam_select_forward_parts_kernel<T>,
           {rows * parts, kThreads, 0}, global<const T>(logits), logits.row_stride(), width, static_cast<int>(parts),
           global<float>(sums), global<float>(tops));
    launch(context, "beam_select_forward_join_kernel", beam_select_forward_join_kernel<T>,
           {rows, kThreads, kSharedBytes}, global<const T>(logits), logits.row_stride(), width, wanted,
           static_cast<int>(beam_select_gpu_groups(count)), static_cast<int>(parts), global<const float>(sums),
           global<const float>(tops), results);
    return;
  }
  int64_t padded = 1;
  while (padded < count) padded *= 2;
  Buffer keys = context.allocate({rows, padded}, DType::kI64, "beam_select.keys");
  launch(context, "beam_select_forward_radix_kernel", beam_select_forward_radix_kernel<T>,
         {rows, kThreads, kSharedBytes}, global<const T>(logits), logits.row_stride(), width, wanted,
         static_cast<int>(padded), global<int64_t>(keys), results);
}

}  // namespace

void beam_select_gpu(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
                     const Tensor& lse, const Tensor& survivors) {
  dispatch_float(logits.dtype(),
                 [&](auto type) { run<decltype(type)>(context, logits, count, values, columns, lse, survivors); });
}

}  // namespace frit
