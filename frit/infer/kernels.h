// SIMD kernels of one decoding step. Each computes one row by itself, so its bits depend on that row alone.
#pragma once
#include <cstdint>

namespace frit {

// One query against keys and values. Math: out = sum_t softmax_t(scale * q.k_t) * v_t.
struct AttendOne {
  const float* q = nullptr;
  int64_t d = 0;      // width of q, k_t, v_t and out
  int64_t count = 0;  // keys, at least 1
  float scale = 1;
  float* scores = nullptr;  // scratch of attend_scratch(count) floats
  float* out = nullptr;
};
constexpr int64_t attend_scratch(int64_t count) {
  return count + 16;
}
// k_t = history[t] + k_offset, v_t = history[t] + v_offset.
void attend_history(const AttendOne& a, const float* const* history, int64_t k_offset, int64_t v_offset);
// k_t = k + t * stride, v_t = v + t * stride.
void attend_rows(const AttendOne& a, const float* k, const float* v, int64_t stride);

// Math: s = residual + y; out = norm(s) * gamma + beta; sum = s. y, gamma and sum are optional: without gamma out = s.
// out and sum may be residual or y.
struct AddNormRow {
  const float *residual = nullptr, *y = nullptr, *gamma = nullptr, *beta = nullptr;
  float *sum = nullptr, *out = nullptr;
  int64_t cols = 0;
  float eps = 1e-5f;
};
void add_norm_row(const AddNormRow& row);

}  // namespace frit
