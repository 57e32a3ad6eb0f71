#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/beam_select/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/beam_select/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {
namespace {

// Columns whose maximum the log-sum-exp refers to while it walks: a few vectors of any target.
constexpr size_t kBlock = 64;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Orders candidates: the larger value first, then the smaller column, as one rising number. -0 counts as 0.
uint64_t key_of(float value, size_t column) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(~rising) << 32 | static_cast<uint32_t>(column);
}
float value_of(uint64_t key) {
  const uint32_t rising = ~static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>(rising & 0x80000000u ? rising & 0x7fffffffu : ~rising);
}

// Maximum of row[begin, end), as a vector; adds to `bad` where a NaN is.
template <typename T>
HWY_INLINE VF maximum(const T* row, size_t begin, size_t end, VF& bad) {
  const size_t step = lanes();
  VF top = hn::Set(DF(), kLowest);
  for (size_t i = begin; i < end; i += step) {
    const VF v = load_any(row + i, std::min(step, end - i), kLowest);
    bad = hn::Or(bad, hn::VecFromMask(DF(), hn::IsNaN(v)));
    top = hn::Max(top, v);
  }
  return top;
}

// The row's group maxima, and its log-sum-exp if lse is not null. False: the row holds a NaN.
template <typename T>
bool scan_row(const T* row, size_t cols, size_t group, float* maxima, float* lse) {
  const DF d;
  const size_t step = lanes();
  VF bad = hn::Zero(d), sum = hn::Zero(d);
  float top = kLowest, group_top = kLowest;
  size_t groups = 0;
  for (size_t begin = 0; begin < cols; begin += kBlock) {
    const size_t end = std::min(cols, begin + kBlock);
    const float block_top = max_of_lanes(maximum(row, begin, end, bad));
    group_top = std::max(group_top, block_top);
    if (group >= kBlock && (end % group == 0 || end == cols)) maxima[groups++] = group_top, group_top = kLowest;
    if (!lse || block_top == kLowest) continue;
    if (block_top > top) {
      sum = hn::Mul(sum, hn::Set(d, top == kLowest ? 0.0f : std::exp(top - block_top)));
      top = block_top;
    }
    if (top == -kLowest) continue;  // +inf: so is the log-sum-exp
    const VF about = hn::Set(d, top);
    VF block = hn::Zero(d);
    size_t i = begin;
    for (; i + step <= end; i += step) block = hn::Add(block, exp_fast(hn::Sub(load(row + i), about)));
    if (i < end) block = hn::Add(block, exp_fast(hn::Sub(load_n(row + i, end - i, kLowest), about)));
    sum = hn::Add(sum, block);
  }
  if (!hn::AllFalse(d, hn::IsNaN(bad))) return false;
  if (group < kBlock)
    for (size_t begin = 0; begin < cols; begin += group) {
      float most = kLowest;
      for (size_t i = begin, end = std::min(cols, begin + group); i < end; ++i)
        most = std::max(most, static_cast<float>(row[i]));
      maxima[groups++] = most;
    }
  if (lse) *lse = std::isinf(top) ? top : static_cast<float>(top + std::log(static_cast<double>(sum_of_lanes(sum))));
  return true;
}

// The first `count` keys of the row in order, at the start of `keys`. maxima: room for one number a group, then
// another. Returns how many logits were at or above the threshold.
template <typename T>
int64_t select_row(const T* row, size_t cols, size_t group, size_t count, float* maxima, uint64_t* keys,
                   size_t capacity) {
  const DF d;
  const size_t groups = (cols + group - 1) / group, step = lanes();
  float* sorted = maxima + groups;
  std::copy(maxima, maxima + groups, sorted);
  std::nth_element(sorted, sorted + (count - 1), sorted + groups, std::greater<float>());
  const float threshold = sorted[count - 1];
  const VF limit = hn::Set(d, threshold);
  size_t held = 0;
  int64_t found = 0;
  uint64_t worst = ~uint64_t{0};  // keys above it cannot be among the first `count`
  for (size_t g = 0; g < groups; ++g) {
    if (!(maxima[g] >= threshold)) continue;
    for (size_t i = g * group, end = std::min(cols, i + group); i < end; i += step) {
      const size_t n = std::min(step, end - i);
      const VF v = load_any(row + i, n, kLowest);
      if (hn::AllFalse(d, hn::Ge(v, limit))) continue;
      for (size_t j = 0; j < n; ++j) {
        const float value = static_cast<float>(row[i + j]);
        if (!(value >= threshold)) continue;
        ++found;
        const uint64_t key = key_of(value, i + j);
        if (key > worst) continue;
        if (held == capacity) {  // many ties: keep the first `count` and go on with less
          std::nth_element(keys, keys + (count - 1), keys + held);
          held = count;
          worst = keys[count - 1];
          if (key > worst) continue;
        }
        keys[held++] = key;
      }
    }
  }
  std::nth_element(keys, keys + (count - 1), keys + held);
  std::sort(keys, keys + count);
  return found;
}

template <typename T>
int64_t select_rows_of(const Tensor& logits, int64_t count, int64_t group, const Tensor& values, const Tensor& columns,
                       const Tensor& lse, const Tensor& survivors, int64_t begin, int64_t end, float* maxima,
                       uint64_t* keys, int64_t capacity) {
  const size_t cols = static_cast<size_t>(logits.dim(1));
  for (int64_t r = begin; r < end; ++r) {
    const T* row = logits.data<T>() + r * logits.row_stride();
    if (!scan_row(row, cols, static_cast<size_t>(group), maxima, lse.defined() ? lse.data<float>() + r : nullptr))
      return r;
    const int64_t found = select_row(row, cols, static_cast<size_t>(group), static_cast<size_t>(count), maxima, keys,
                                     static_cast<size_t>(capacity));
    if (survivors.defined()) survivors.data<int32_t>()[r] = static_cast<int32_t>(found);
    for (int64_t i = 0; i < count; ++i) {
      values.data<float>()[r * values.row_stride() + i] = value_of(keys[i]);
      columns.data<int32_t>()[r * columns.row_stride() + i] = static_cast<int32_t>(keys[i] & 0xffffffffu);
    }
  }
  return -1;
}

// Returns the first row with a NaN, or -1.
int64_t select_rows(const Tensor& logits, int64_t count, int64_t group, const Tensor& values, const Tensor& columns,
                    const Tensor& lse, const Tensor& survivors, int64_t begin, int64_t end, float* maxima,
                    uint64_t* keys, int64_t capacity) {
  return logits.dtype() == DType::kF32 ? select_rows_of<float>(logits, count, group, values, columns, lse, survivors,
                                                               begin, end, maxima, keys, capacity)
                                       : select_rows_of<bfloat16>(logits, count, group, values, columns, lse, survivors,
                                                                  begin, end, maxima, keys, capacity);
}

}  // namespace
}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(select_rows);

int64_t beam_select_group(int64_t vocabulary, int64_t count) {
  // Eight times as many groups as are asked for leave few logits above the threshold, and few maxima to choose from.
  const int64_t group = std::max<int64_t>(1, vocabulary / (8 * count));
  return group < 64 ? group : group / 64 * 64;
}
int64_t beam_select_capacity(int64_t vocabulary, int64_t count) {
  return std::min(vocabulary, std::max<int64_t>(2 * count, 1024));
}
int64_t beam_select_tasks(int64_t rows) {
  return std::min<int64_t>(rows, 64);
}

void beam_select_cpu(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
                     const Tensor& lse, const Tensor& survivors) {
  const int64_t rows = logits.dim(0), vocabulary = logits.dim(1), tasks = beam_select_tasks(rows);
  const int64_t group = beam_select_group(vocabulary, count), groups = (vocabulary + group - 1) / group;
  const int64_t capacity = beam_select_capacity(vocabulary, count);
  Buffer maxima = context.allocate({tasks, 2 * groups}, DType::kF32, "beam_select.maxima");
  Buffer keys = context.allocate({tasks, capacity}, DType::kI64, "beam_select.candidates");
  if (context.planning()) return;
  context.pool().run(tasks, [&](int64_t task, int) {
    const int64_t bad = HWY_DYNAMIC_DISPATCH(select_rows)(
        logits, count, group, values, columns, lse, survivors, rows * task / tasks, rows * (task + 1) / tasks,
        maxima->data<float>() + task * 2 * groups, reinterpret_cast<uint64_t*>(keys->data<int64_t>() + task * capacity),
        capacity);
    if (bad >= 0) fail("[beam_select] the logits of row {} hold a NaN", bad);
  });
}

}  // namespace frit
#endif
