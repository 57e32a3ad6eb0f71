// What kernels of a decoding step share: where the search stands, and what its settings say of a hypothesis' next
// token.
#pragma once
#include "frit/ops/search_step/search_step.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

// SearchState as kernels have it.
struct State {
  int width;
  int64_t sentences, slots, places;
  Global<int32_t> live, live_sentence, position;
  Global<const int32_t> prompt, max_length;
  Global<int32_t> ids, origin;
  Global<float> token_scores, scores;
  Global<int32_t> ended, broken;
  Global<float> done_scores;
  Global<int32_t> done_length, done_column, done_ids;
  Global<float> done_token_scores;
  Global<int32_t> row_ids, row_positions, scratch;
  Global<uint32_t> counter;
  Global<int64_t> progress;

  FRIT_DEVICE int64_t row_of(int side, int64_t slot) const { return (side * slots + slot) * places; }
};

FRIT_DEVICE float without_nan(float x) {
  return x == x ? x : -INFINITY;
}

// A step's settings; the first `held` of them lie in shared memory too.
struct Settings {
  Global<const int32_t> all;
  Shared<int32_t> near;
  int held = 0;
  FRIT_DEVICE int operator()(int i) const { return i < held ? load(near, i) : load(all, i); }
};

// What settings say, read once.
struct Rules {
  Settings settings;
  int ngram, eos_count, singles, sequences;
  bool eos_banned;
  float penalty;

  FRIT_DEVICE Rules(const Settings& all, float penalty, int length, int prompt)
      : settings(all),
        ngram(all(kSearchNgram)),
        eos_count(all(kSearchEos)),
        singles(all(kSearchSingles)),
        sequences(all(kSearchSequences)),
        eos_banned(length < all(kSearchMinLength) || length - prompt < all(kSearchMinNew)),
        penalty(penalty) {}
  FRIT_DEVICE bool is_eos(int token) const {
    FRIT_UNROLL_BY(1)
    for (int i = 0; i < eos_count; ++i)
      if (settings(kSearchLists + i) == token) return true;
    return false;
  }
  FRIT_DEVICE bool is_single(int token) const {
    FRIT_UNROLL_BY(1)
    for (int i = 0; i < singles; ++i)
      if (settings(kSearchLists + eos_count + i) == token) return true;
    return false;
  }
  FRIT_DEVICE int sequence_begin(int i) const { return settings(kSearchLists + eos_count + singles + i); }
  // Whether a hypothesis' own ids count.
  FRIT_DEVICE bool looks_back() const { return ngram > 0 || sequences > 0 || penalty != 1.0f; }
  FRIT_DEVICE float penalised(float value) const {
    return value < 0.0f ? mul_rn(value, penalty) : div_rn(value, penalty);
  }
};

FRIT_DEVICE bool contains(const Shared<int32_t>& list, int count, int token) {
  FRIT_UNROLL_BY(1)
  for (int i = 0; i < count; ++i)
    if (load(list, i) == token) return true;
  return false;
}

// The ids of a hypothesis into shared memory, and the tokens that they ban. 3 barriers; the list's length is behind
// them in counters[0].
template <int kThreads>
FRIT_DEVICE void look_back(const Rules& rules, const Global<int32_t>& hypothesis, int length,
                           const Shared<int32_t>& ids, const Shared<int32_t>& banned,
                           const Shared<uint32_t>& counters) {
  const int me = thread_index(), n = rules.ngram;
  barrier();  // the row before is done with
  FRIT_UNROLL_BY(1)
  for (int i = me; i < length; i += kThreads) store(ids, i, load(hypothesis, i));
  if (me == 0) store(counters, 0, 0u), store(counters, 1, 0u);
  barrier();
  if (n > 0) {
    FRIT_UNROLL_BY(1)
    for (int i = me; i + n <= length; i += kThreads) {
      bool same = true;
      FRIT_UNROLL_BY(1)
      for (int j = 0; same && j < n - 1; ++j) same = load(ids, i + j) == load(ids, length - n + 1 + j);
      if (same) store(banned, atomic_add(counters, 0, 1u), load(ids, i + n - 1));
    }
  }
  FRIT_UNROLL_BY(1)
  for (int q = me; q < rules.sequences; q += kThreads) {
    const int begin = rules.sequence_begin(q), before = rules.sequence_begin(q + 1) - begin - 1;
    bool same = before <= length;
    FRIT_UNROLL_BY(1)
    for (int j = 0; same && j < before; ++j) same = rules.settings(begin + j) == load(ids, length - before + j);
    if (same) store(banned, atomic_add(counters, 0, 1u), rules.settings(begin + before));
  }
  barrier();
}

State state_of(const SearchState& s) {
  State d;
  d.width = static_cast<int>(s.width);
  d.sentences = s.live_sentence.dim(0), d.slots = s.ids.dim(1), d.places = s.ids.dim(2);
  d.live = global<int32_t>(s.live), d.live_sentence = global<int32_t>(s.live_sentence);
  d.position = global<int32_t>(s.position);
  d.prompt = global<const int32_t>(s.prompt), d.max_length = global<const int32_t>(s.max_length);
  d.ids = global<int32_t>(s.ids), d.origin = global<int32_t>(s.origin);
  d.token_scores = global<float>(s.token_scores), d.scores = global<float>(s.scores);
  d.ended = global<int32_t>(s.ended), d.broken = global<int32_t>(s.broken);
  d.done_scores = global<float>(s.done_scores), d.done_length = global<int32_t>(s.done_length);
  d.done_column = global<int32_t>(s.done_column), d.done_ids = global<int32_t>(s.done_ids);
  d.done_token_scores = global<float>(s.done_token_scores);
  d.row_ids = global<int32_t>(s.row_ids), d.row_positions = global<int32_t>(s.row_positions);
  d.scratch = global<int32_t>(s.scratch);
  d.counter = Global<uint32_t>(reinterpret_cast<uint32_t*>(s.scratch.data<int32_t>() + 2 * d.sentences));
  d.progress = global<int64_t>(s.progress);
  return d;
}

}  // namespace
}  // namespace frit
