// The GPU form of beam_select. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

constexpr int kBeamSelectThreads = 256;
// Up to this count the best are found by groups, above it by their keys' bytes.
constexpr int64_t kBeamSelectMostByGroups = 128;
// Logits collected before the bytes' form takes over (very many ties, or most of a row above the threshold).
constexpr int64_t kBeamSelectCapacity = 512;
// Column numbers and those of the vectors behind a row's end stay below 2^31.
constexpr int64_t kBeamSelectLargestGpuVocabulary = int64_t{1} << 30;
// Groups of a row, each of neighbouring threads. Thread of column c in a row that begins s elements behind a multiple
// of 16 bytes: vector v = (c + s) / (elements in 16 bytes); v modulo kBeamSelectThreads if s is 0, else v - 1.
constexpr int64_t beam_select_gpu_groups(int64_t count) {
  return count <= 16 ? 32 : kBeamSelectThreads;
}

// Rows up to which a row is cut into parts, if it has more than one.
constexpr int64_t kBeamSelectFewRows = 32;
// Parts of a row: one for every 32 elements a thread.
constexpr int64_t beam_select_gpu_parts(int64_t vocabulary, int64_t element_bytes) {
  const int64_t n = 16 / element_bytes, vectors = (vocabulary + n - 1) / n, of_a_part = 32 / n * kBeamSelectThreads;
  return (vectors + of_a_part - 1) / of_a_part;
}

// Instances of beam_select_forward: "groups" (HARS; count up to kBeamSelectMostByGroups; reads each logit once, and a
// few again), "parts" (the same, and the same bits, in two launches of which the first gives a row several blocks; rows
// that all begin at multiples of 16 bytes) and "radix" (any count; one more read for each byte of the key until the
// threshold is found).
void beam_select_gpu(Context& context, const Tensor& logits, int64_t count, const Tensor& values, const Tensor& columns,
                     const Tensor& lse, const Tensor& survivors);

}  // namespace frit
