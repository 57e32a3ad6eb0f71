#include "frit/ops/search_step/gpu.h"
#include "frit/ops/search_step/rules-inl.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = kSearchThreads, kWarps = kThreads / kWarpSize;
// A beam that cannot win against a real one: what transformers uses.
constexpr float kWorst = -1.0e9f;

struct Step {
  Global<const float> values;
  Global<const int32_t> columns;
  Global<const float> lse;
  Global<const int32_t> drawn;
  Global<const float> drawn_scores;
  Global<const int32_t> settings;
  Global<const float> numbers;
  int64_t values_stride, columns_stride;
  int count, keep, kept, together, vocabulary;  // kept: of a row; together: rows whose candidates are looked at at once
  int held;                                     // settings that every block copies to shared memory
  bool beam;
};

// Where a block's arrays lie in shared memory, each of 4-byte elements.
struct Places {
  int values, tokens, pool_values, pool_tokens, sums, banned, ids, best_values, best_tokens, best_parents, best_scores,
      best_running, best_ends, next_values, next_tokens, next_parents, next_scores, pool_scores, old_scores,
      merged_scores, merged_lengths, merged_columns, merged_ranks, done_scores, done_lengths, free_columns, counters,
      settings;
};

// put(i, rank) for each of n elements, rank being how many of `all` come before it: make(i) gives a predicate of their
// numbers. Four lanes share an element, one of them calls put. The warps [first_warp, first_warp + warps) take part.
template <typename Make, typename Put>
FRIT_DEVICE void rank_elements(int first_warp, int warps, int n, int all, Make&& make, Put&& put) {
  FRIT_UNROLL_BY(1)
  for (int begin = 0; begin < n; begin += 8 * warps) {
    const int i = begin + (warp() - first_warp) * 8 + lane() / 4;
    int rank = 0;
    if (i < n) {
      const auto before = make(i);
      FRIT_UNROLL_BY(2)
      for (int j = lane() % 4; j < all; j += 4) rank += before(j) ? 1 : 0;
    }
    rank += shuffle_xor(rank, 1);
    rank += shuffle_xor(rank, 2);
    if (i < n && lane() % 4 == 0) put(i, rank);
  }
}
// For how many i of [0, n) `holds`; all lanes of the warp call it and get it.
template <typename F>
FRIT_DEVICE int count_of(int n, F&& holds) {
  int count = 0;
  FRIT_UNROLL_BY(1)
  for (int begin = 0; begin < n; begin += kWarpSize)
    count += count_bits(ballot(begin + lane() < n && holds(begin + lane())));
  return count;
}

// Loops run once or twice: unrolled, they would only make more instructions to fetch, which a step that runs once in
// some hundred microseconds finds in no near cache.
template <typename T>
FRIT_KERNEL(kThreads, 4)
search_step_kernel(State s, Step x, Places at, Global<const T> logits, int64_t logits_stride) {
  let_next_start();
  wait_for_previous();
  const Shared<float> values = shared_array<float>(at.values), pool_values = shared_array<float>(at.pool_values),
                      sums = shared_array<float>(at.sums), best_values = shared_array<float>(at.best_values),
                      best_scores = shared_array<float>(at.best_scores),
                      best_running = shared_array<float>(at.best_running),
                      old_scores = shared_array<float>(at.old_scores),
                      next_values = shared_array<float>(at.next_values),
                      next_scores = shared_array<float>(at.next_scores),
                      pool_scores = shared_array<float>(at.pool_scores),
                      merged_scores = shared_array<float>(at.merged_scores),
                      done_scores = shared_array<float>(at.done_scores);
  const Shared<int32_t> tokens = shared_array<int32_t>(at.tokens), pool_tokens = shared_array<int32_t>(at.pool_tokens),
                        banned = shared_array<int32_t>(at.banned), id_row = shared_array<int32_t>(at.ids),
                        best_tokens = shared_array<int32_t>(at.best_tokens),
                        best_parents = shared_array<int32_t>(at.best_parents),
                        best_ends = shared_array<int32_t>(at.best_ends),
                        next_tokens = shared_array<int32_t>(at.next_tokens),
                        next_parents = shared_array<int32_t>(at.next_parents),
                        merged_lengths = shared_array<int32_t>(at.merged_lengths),
                        merged_columns = shared_array<int32_t>(at.merged_columns),
                        merged_ranks = shared_array<int32_t>(at.merged_ranks),
                        done_lengths = shared_array<int32_t>(at.done_lengths),
                        free_columns = shared_array<int32_t>(at.free_columns);
  const Shared<uint32_t> counters = shared_array<uint32_t>(at.counters);
  const int me = thread_index(), k = s.width;
  const int64_t entry = block_index(), row = entry * k;
  // A step is a chain of short accesses: whatever needs no other comes at once, first what needs nothing, then what
  // needs to know the sentence.
  const int position = load(s.position, 0), live = load(s.live, 0), sentence = load(s.live_sentence, entry);
  const float penalty = load(x.numbers, kSearchPenalty), diversity = load(x.numbers, kSearchDiversity);
  const int32_t setting = me < x.held ? load(x.settings, me) : 0;
  float first_logit = 0, first_lse = 0;
  int first_token = 0;
  if (!x.drawn && me < k * x.count) {
    const int64_t r = row + me / x.count, c = me % x.count;
    first_logit = load(x.values, r * x.values_stride + c), first_lse = load(x.lse, r);
    first_token = load(x.columns, r * x.columns_stride + c);
  }
  const int64_t base = int64_t{sentence} * k;
  const int prompt = load(s.prompt, sentence), max_length = load(s.max_length, sentence);
  FRIT_UNROLL_BY(1)
  for (int b = me; b < k; b += kThreads) {
    const float old = load(s.scores, base + b);
    if (x.beam) {
      const float score = load(s.done_scores, base + b);
      const int32_t old_length = load(s.done_length, base + b), column = load(s.done_column, base + b);
      store(merged_scores, b, score), store(merged_lengths, b, old_length), store(merged_columns, b, column);
      store(merged_lengths, k + b, -1);
    } else {
      store(merged_ranks, b, load(s.ended, base + b));  // until the hypothesis has gone its way
    }
    store(old_scores, b, old);
  }
  const Settings settings{x.settings, shared_array<int32_t>(at.settings), x.held};
  if (me < x.held) store(settings.near, me, setting);
  if (me == 0) store(counters, 2, 0u);
  barrier();
  // What the rest of the block does not wait for: a thread that has little else to do.
  if (me == kThreads - 1 && s.broken && x.lse && entry < live) {
    bool bad = false;
    for (int b = 0; b < k; ++b) {
      const float lse = load(x.lse, row + b);
      bad |= lse != lse;
    }
    if (bad) store(s.broken, sentence, 1);
  }
  const int length = position + 1, side = position & 1;
  const bool active = entry < live, choosing = active && length >= prompt, begun = length > prompt;
  const bool room = length < s.places;
  bool over = false;
  int new_finished = 0;  // merged entries of hypotheses that finished now lie behind the old ones

  if (choosing) {
    const float divisor = load(x.numbers, kSearchNormalisers + length + 1 - prompt);
    const bool bound = x.beam && settings(kSearchLongestBound) != 0;
    const float running_divisor = bound ? load(x.numbers, kSearchNormalisers + max_length - prompt) : divisor;
    const Rules rules(settings, penalty, length, prompt);
    const auto stops = [&](int token) { return length + 1 >= max_length || rules.is_eos(token); };
    if (!x.drawn) {
      // ---- The best `kept` candidates of each row, after what settings do to them ----
      int forced = length == 1 ? settings(kSearchForcedBos) : -1;
      if (length == max_length - 1 && settings(kSearchForcedEos) >= 0) forced = settings(kSearchForcedEos);
      const int rows = begun ? k : 1;
      const auto keep = [&](int b, int rank, float value, int token) {
        store(pool_values, b * x.keep + rank, value);
        store(pool_tokens, b * x.keep + rank, token);
        if (!x.beam) return;
        const float joined = sub_rn(value, mul_rn(diversity, static_cast<float>(rank)));
        // At the first choice all beams are one; the others' sums keep them from being chosen twice.
        FRIT_UNROLL_BY(1)
        FRIT_UNROLL_BY(1)
        for (int parent = b; parent < (begun ? b + 1 : k); ++parent)
          store(sums, parent * x.kept + rank, without_nan(add_rn(joined, load(old_scores, parent))));
      };
      if (forced >= 0) {
        FRIT_UNROLL_BY(1)
        for (int i = me; i < rows * x.kept; i += kThreads) {
          const int b = i / x.kept, j = i - b * x.kept;
          keep(b, j, j == 0 ? 0.0f : -INFINITY, j == 0 ? forced : j - 1 < forced ? j - 1 : j);
          if (j == 0) store(pool_scores, b, 0.0f);
        }
      } else {
        const bool back = rules.looks_back();
        const int together = back ? 1 : x.together;
        FRIT_UNROLL_BY(1)
        FRIT_UNROLL_BY(1)
        for (int first = 0; first < rows; first += together) {
          const int n = together < rows - first ? together : rows - first;
          int banned_count = 0;
          if (back) {
            look_back<kThreads>(rules, s.ids + s.row_of(side, base + first), length, id_row, banned, counters);
            banned_count = static_cast<int>(load(counters, 0));
          }
          const auto processed = [&](float value, int token) {
            if ((rules.eos_banned && rules.is_eos(token)) || rules.is_single(token) ||
                (back && contains(banned, banned_count, token)))
              return -INFINITY;
            return rules.penalty != 1.0f && contains(id_row, length, token) ? rules.penalised(value) : value;
          };
          FRIT_UNROLL_BY(1)
          for (int i = me; i < n * x.count; i += kThreads) {
            float logit = first_logit, lse = first_lse;
            int token = first_token;
            if (first > 0 || i != me) {
              const int b = first + i / x.count, c = i % x.count;
              logit = load(x.values, (row + b) * x.values_stride + c), lse = load(x.lse, row + b);
              token = load(x.columns, (row + b) * x.columns_stride + c);
            }
            store(values, i,
                  without_nan(processed(x.beam       ? sub_rn(logit, lse)
                                        : lse == lse ? logit
                                                     : -INFINITY,
                                        token)));
            store(tokens, i, token);
          }
          int all = n * x.count;
          if (rules.penalty < 1.0f && logits) {  // tokens that are there already may overtake all of these
            barrier();
            FRIT_UNROLL_BY(1)
            for (int i = me; i < length; i += kThreads) {
              const int token = load(id_row, i);
              if (contains(id_row, i, token) || contains(tokens, x.count, token)) continue;
              const float logit = widen(load(logits, (row + first) * logits_stride + token)),
                          lse = load(x.lse, row + first);
              const int to = x.count + static_cast<int>(atomic_add(counters, 1, 1u));
              store(values, to, without_nan(processed(x.beam ? sub_rn(logit, lse) : logit, token)));
              store(tokens, to, token);
            }
            barrier();
            all = x.count + static_cast<int>(load(counters, 1));
          }
          barrier();
          const auto row_of = [&](int i) { return back ? 0 : i / x.count; };
          rank_elements(
              0, kWarps, all, back ? all : x.count,
              [&](int i) {
                const int from = row_of(i) * x.count, token = load(tokens, i);
                const float value = load(values, i);
                return [=](int j) {
                  const float other = load(values, from + j);
                  return other > value || (other == value && load(tokens, from + j) < token);
                };
              },
              [&](int i, int rank) {
                if (rank >= x.kept) return;
                const int b = row_of(i), from = b * x.count, token = load(tokens, i);
                keep(first + b, rank, load(values, i), token);
                if (rank == 0 && !x.beam) {
                  const float logit = i - from < x.count
                                          ? load(x.values, (row + first + b) * x.values_stride + i - from)
                                          : widen(load(logits, (row + first) * logits_stride + token));
                  store(pool_scores, first + b, sub_rn(logit, load(x.lse, row + first + b)));
                }
              });
          if (first + together < rows) barrier();
        }
      }
      barrier();
    }

    int old_count = 0;
    bool all_end = true;
    if (x.beam) {
      // ---- The best of all rows ----
      const int all = k * x.kept, kept = all < x.keep ? all : x.keep;
      const auto from_of = [&](int e) {
        const int b = e / x.kept;
        return (begun ? b : 0) * x.keep + e - b * x.kept;
      };
      rank_elements(
          0, kWarps, all, all,
          [&](int e) {
            const float value = load(sums, e);
            return [=](int f) {
              const float other = load(sums, f);
              if (other != value || f == e) return other > value;
              const int parent = e / x.kept, p = f / x.kept;
              return p < parent || (p == parent && load(pool_tokens, from_of(f)) < load(pool_tokens, from_of(e)));
            };
          },
          [&](int e, int rank) {
            if (rank >= kept) return;
            const int from = from_of(e), token = load(pool_tokens, from);
            const float value = load(sums, e);
            const bool ends = stops(token);
            store(best_values, rank, value);
            store(best_running, rank, ends ? add_rn(value, kWorst) : value);
            store(best_tokens, rank, token);
            store(best_parents, rank, begun ? e / x.kept : 0);
            store(best_scores, rank, load(pool_values, from));
            store(best_ends, rank, ends ? 1 : 0);
            if (rank >= k || !ends) return;
            store(merged_scores, k + rank, without_nan(div_rn(value, divisor)));
            store(merged_lengths, k + rank, length);
          });
      barrier();
      // ---- Half of the warps: who goes on ----
      if (warp() < kWarps / 2)
        rank_elements(
            0, kWarps / 2, kept, kept,
            [&](int i) {
              const float value = load(best_running, i);
              return [=](int j) {
                const float other = load(best_running, j);
                return other > value || (other == value && j < i);
              };
            },
            [&](int i, int rank) {
              if (rank >= k) return;
              store(next_values, rank, load(best_running, i));
              store(next_tokens, rank, load(best_tokens, i));
              store(next_parents, rank, load(best_parents, i));
              store(next_scores, rank, load(best_scores, i));
            });
      // ---- The others: who has finished, of the old ones, then those of the first k candidates that end ----
      else
        rank_elements(
            kWarps / 2, kWarps / 2, 2 * k, 2 * k,
            [&](int m) {
              const bool there = load(merged_lengths, m) >= 0;
              const float score = there ? load(merged_scores, m) : 0.0f;
              return [=](int o) {
                if (!there || load(merged_lengths, o) < 0) return false;
                const float other = load(merged_scores, o);
                return other > score || (other == score && o < m);
              };
            },
            [&](int m, int rank) {
              const int done = load(merged_lengths, m);
              const bool stays = done >= 0 && rank < k;
              store(merged_ranks, m, stays ? rank : -1);
              if (stays) store(done_scores, rank, load(merged_scores, m)), store(done_lengths, rank, done);
            });
      old_count = k;
      all_end = count_of(kept, [&](int i) { return load(best_ends, i) != 0; }) == kept;
      new_finished = count_of(k < kept ? k : kept, [&](int i) { return load(best_ends, i) != 0; });
      barrier();
      // Everything was banned: what is left is better than nothing.
      bool none = all_end;
      FRIT_UNROLL_BY(1)
      for (int m = 0; none && m < 2 * k; ++m) none = load(merged_ranks, m) < 0 || load(merged_lengths, m) <= 0;
      if (none) {
        barrier();
        FRIT_UNROLL_BY(1)
        for (int m = me; m < 2 * k; m += kThreads) {
          const int rank = load(merged_ranks, m);
          if (m < k) {
            if (rank == 0) store(merged_ranks, m, -1);  // gives its place to the new one
          } else {
            store(merged_ranks, m, m == k ? 0 : -1);
            if (m == k) {
              const float score = without_nan(div_rn(load(best_values, 0), divisor));
              store(merged_scores, m, score), store(merged_lengths, m, length);
              store(done_scores, 0, score), store(done_lengths, 0, length);
            }
          }
        }
        new_finished = 1;
        barrier();
      }
      if (new_finished > 0) {
        // Columns that no old one needs any more, to the new ones in order.
        FRIT_UNROLL_BY(1)
        for (int m = me; m < k; m += kThreads)
          if (load(merged_ranks, m) < 0) {
            int before = 0;
            FRIT_UNROLL_BY(1)
            for (int o = 0; o < m; ++o) before += load(merged_ranks, o) < 0;
            store(free_columns, before, load(merged_columns, m));
          }
        barrier();
        FRIT_UNROLL_BY(1)
        for (int m = k + me; m < 2 * k; m += kThreads)
          if (load(merged_ranks, m) >= 0) {
            int before = 0;
            for (int o = k; o < m; ++o) before += load(merged_ranks, o) >= 0;
            store(merged_columns, m, load(free_columns, before));
          }
        barrier();
      }
      if (new_finished > 0) {
        FRIT_UNROLL_BY(1)
        for (int m = me; m < 2 * k; m += kThreads) {
          const int rank = load(merged_ranks, m);
          if (rank < 0) continue;
          store(s.done_scores, base + rank, load(merged_scores, m));
          store(s.done_length, base + rank, load(merged_lengths, m));
          store(s.done_column, base + rank, load(merged_columns, m));
        }
      }
      // ---- Whether the sentence is over ----
      const int finished = count_of(k, [&](int j) { return load(done_lengths, j) > 0; });
      const float best = div_rn(load(next_values, 0), running_divisor), worst = load(done_scores, k - 1);
      const bool improvable = (finished > 0 && best > worst) || (finished < k && best > kWorst);
      over = all_end || !improvable || (settings(kSearchEarlyStopping) == 1 && finished == k);
      if (!over) {
        FRIT_UNROLL_BY(1)
        for (int b = me; b < k; b += kThreads) store(s.scores, base + b, load(next_values, b));
      }
    } else {
      // ---- Greedy and sampling: every hypothesis goes its own way ----
      FRIT_UNROLL_BY(1)
      for (int b = me; b < k; b += kThreads) {
        const bool ended = load(merged_ranks, b) != 0;
        int token = settings(kSearchPad), finished = -1;
        float score = 0;
        if (!ended) {
          token = x.drawn ? load(x.drawn, row + b) : load(pool_tokens, b * x.keep);
          score = x.drawn ? load(x.drawn_scores, row + b) : load(pool_scores, b);
          const float sum = add_rn(load(old_scores, b), score);
          store(s.scores, base + b, sum);
          if (stops(token)) {
            store(s.done_scores, base + b, div_rn(sum, divisor));
            store(s.done_length, base + b, length);
            store(s.ended, base + b, 1);
            finished = length;
          } else {
            atomic_add(counters, 2, 1u);
          }
        }
        store(next_tokens, b, token);
        store(next_parents, b, b);
        store(next_scores, b, score);
        store(merged_lengths, b, finished);
        store(merged_columns, b, b);
      }
      barrier();
      over = load(counters, 2) == 0;
      new_finished = 1;
    }

    // ---- The ids of those that finished ----
    if (new_finished > 0) {
      FRIT_UNROLL_BY(1)
      for (int i = 0; i < k; ++i) {
        const int m = old_count + i;
        if (load(merged_lengths, m) <= 0 || (x.beam && load(merged_ranks, m) < 0)) continue;
        const int parent = x.beam ? load(best_parents, i) : i;
        const int token = x.beam ? load(best_tokens, i) : load(next_tokens, i);
        const int64_t from = s.row_of(side, base + parent), to = base + load(merged_columns, m);
        FRIT_UNROLL_BY(1)
        for (int j = 1 + me; j <= length; j += kThreads) {
          if (j >= s.places) continue;
          store(s.done_ids, (j - 1) * s.slots + to, j < length ? load(s.ids, from + j) : token);
          if (!s.token_scores) continue;
          const float last = x.beam ? load(best_scores, i) : load(next_scores, i);
          const float score = j == length ? last : j >= prompt ? load(s.token_scores, from + j) : 0.0f;
          store(s.done_token_scores, (j - 1) * s.slots + to, score);
        }
      }
    }
  }

  // ---- Tables of the next step ----
  const bool goes_on = choosing && !over;
  const bool given = active && !choosing;  // still the prefix
  const auto from_row = [&](int b) { return s.row_of(side, base + (goes_on ? load(next_parents, b) : b)); };
  if (room) {
    FRIT_UNROLL_BY(1)
    for (int b = me; b < k; b += kThreads) {
      const int64_t to = s.row_of(side ^ 1, base + b);
      const int token = goes_on ? load(next_tokens, b) : given ? load(s.ids, from_row(b) + length) : 0;
      if (!given) store(s.ids, to + length, token);
      store(s.origin, to + length, static_cast<int32_t>(base + b));
      if (s.token_scores) store(s.token_scores, to + length, goes_on ? load(next_scores, b) : 0.0f);
      store(s.row_ids, row + b, token);
      store(s.row_positions, row + b, length);
    }
  }
  // A warp copies 32 places of a row at a time, and `kAtOnce` times as many are on their way.
  constexpr int kAtOnce = 2;
  const int whole = given && prompt > length ? prompt : length, chunks = (whole + kWarpSize - 1) / kWarpSize;
  FRIT_UNROLL_BY(1)
  for (int first = warp(); first < k * chunks; first += kWarps * kAtOnce) {
    int32_t id[kAtOnce] = {}, origin[kAtOnce] = {};
    float score[kAtOnce] = {};
    FRIT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const int task = first + u * kWarps;
      if (task >= k * chunks) break;
      const int b = task / chunks, j = (task - b * chunks) * kWarpSize + lane();
      const int64_t from = from_row(b) + j;
      if (j < whole) id[u] = load(s.ids, from);
      if (j < length) origin[u] = load(s.origin, from);
      if (j < length && s.token_scores) score[u] = load(s.token_scores, from);
    }
    FRIT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const int task = first + u * kWarps;
      if (task >= k * chunks) break;
      const int b = task / chunks, j = (task - b * chunks) * kWarpSize + lane();
      const int64_t to = s.row_of(side ^ 1, base + b) + j;
      if (j < whole) store(s.ids, to, id[u]);
      if (j < length) store(s.origin, to, origin[u]);
      if (j < length && s.token_scores) store(s.token_scores, to, score[u]);
    }
  }
  if (me == 0 && active) store(s.scratch, entry, over ? 1 : 0);

  if (block_count() == 1) {  // nobody to wait for, and nobody changes places
    if (me != 0) return;
    const int left = active && !over ? 1 : 0;
    if (over) store(s.scratch, s.sentences, sentence);
    store(s.position, 0, length);
    store(s.live, 0, left);
    store(s.progress, 0, static_cast<int64_t>(length) << 32 | left);
    return;
  }
  // ---- The last block lets sentences go that are over ----
  if (!last_block(s.counter, counters + 3)) return;
  int kept_before = 0, left_before = 0;
  FRIT_UNROLL_BY(1)
  for (int begin = 0; begin < live; begin += kThreads) {
    const int i = begin + me;
    const bool inside = i < live;
    const int ends = inside ? load(s.scratch, i) : 0, who = inside ? load(s.live_sentence, i) : 0;
    const bool leaves = ends != 0, stays = inside && !leaves;
    const uint32_t staying = ballot(stays), leaving = ballot(leaves), below = (1u << lane()) - 1u;
    if (lane() == 0) {
      store(counters, 4 + warp(), static_cast<uint32_t>(count_bits(staying)));
      store(counters, 4 + kWarps + warp(), static_cast<uint32_t>(count_bits(leaving)));
    }
    barrier();  // also: all of these have read their sentence
    int stay_at = kept_before, leave_at = left_before;
    FRIT_UNROLL_BY(1)
    for (int w = 0; w < kWarps; ++w) {
      const int stay = static_cast<int>(load(counters, 4 + w)),
                leave = static_cast<int>(load(counters, 4 + kWarps + w));
      if (w < warp()) stay_at += stay, leave_at += leave;
      kept_before += stay, left_before += leave;
    }
    if (stays) store(s.live_sentence, stay_at + count_bits(staying & below), who);
    if (leaves) store(s.scratch, s.sentences + leave_at + count_bits(leaving & below), who);
    if (begin + kThreads < live || left_before > 0) barrier();  // counters are written again, who leaves is read
  }
  if (left_before > 0) {
    FRIT_UNROLL_BY(1)
    for (int i = me; i < left_before; i += kThreads)
      store(s.live_sentence, kept_before + i, load(s.scratch, s.sentences + i));
    barrier();
    if (room) {
      FRIT_UNROLL_BY(1)
      for (int r = me; r < live * k; r += kThreads) {
        const int i = r / k;
        const int64_t slot = int64_t{load(s.live_sentence, i)} * k + r - i * k;
        store(s.row_ids, r, load(s.ids, s.row_of(side ^ 1, slot) + length));
      }
    }
  }
  if (me == 0) {
    store(s.position, 0, length);
    store(s.live, 0, kept_before);
    store(s.progress, 0, static_cast<int64_t>(length) << 32 | kept_before);
  }
}

FRIT_KERNEL(kThreads, 4)
search_begin_kernel(State s, Global<const int32_t> prompt_ids, Global<const int32_t> prompt_offsets,
                    Global<const int32_t> count, bool beam) {
  wait_for_previous();
  const int sentences = load(count, 0), me = thread_index(), k = s.width;
  const int64_t sentence = block_index(), base = sentence * k;
  const bool real = sentence < sentences;
  const int begin = real ? load(prompt_offsets, sentence) : 0;
  const int length = real ? load(prompt_offsets, sentence + 1) - begin : 1;
  const int first = real ? load(prompt_ids, begin) : 0;
  for (int b = 0; b < k; ++b)
    for (int j = me; j < length; j += kThreads)
      store(s.ids, s.row_of(0, base + b) + j, real ? load(prompt_ids, begin + j) : 0);
  for (int b = me; b < k; b += kThreads) {
    const int64_t slot = base + b;
    store(s.origin, s.row_of(0, slot), static_cast<int32_t>(slot));
    if (s.token_scores) store(s.token_scores, s.row_of(0, slot), 0.0f);
    store(s.scores, slot, beam && b > 0 ? kWorst : 0.0f);
    store(s.ended, slot, 0);
    store(s.done_scores, slot, kWorst);
    store(s.done_length, slot, 0);
    store(s.done_column, slot, b);
    store(s.row_ids, slot, first);
    store(s.row_positions, slot, 0);
  }
  if (me != 0) return;
  store(s.live_sentence, sentence, static_cast<int32_t>(sentence));
  if (s.broken) store(s.broken, sentence, 0);
  if (sentence > 0) return;
  store(s.position, 0, 0);
  store(s.live, 0, sentences);
  store(s.progress, 0, static_cast<int64_t>(sentences));
  store(s.counter, 0, 0u);
}

// Rows whose candidates are looked at at once.
int64_t rows_together(int64_t width, int64_t count) {
  return std::min<int64_t>(std::max<int64_t>(1, 4096 / count), width);
}

// Shared memory of a step; `lists`: more than the number of banned sequences.
Places lay_out(int64_t k, int64_t keep, int64_t count, int64_t places, int64_t lists, int64_t* bytes) {
  const int64_t candidates = std::max(rows_together(k, count) * count, count + places);
  Places at = {};
  int64_t next = 0;
  const auto place = [&](int& to, int64_t elements) { to = static_cast<int>(4 * next), next += elements; };
  place(at.values, candidates), place(at.tokens, candidates);
  place(at.pool_values, k * keep), place(at.pool_tokens, k * keep), place(at.sums, k * keep);
  place(at.banned, places + lists), place(at.ids, places);
  place(at.best_values, keep), place(at.best_tokens, keep), place(at.best_parents, keep), place(at.best_scores, keep),
      place(at.best_running, keep), place(at.best_ends, keep);
  place(at.next_values, k), place(at.next_tokens, k), place(at.next_parents, k), place(at.next_scores, k);
  place(at.pool_scores, k), place(at.merged_scores, 2 * k), place(at.merged_lengths, 2 * k);
  place(at.merged_columns, 2 * k), place(at.merged_ranks, 2 * k), place(at.done_scores, k), place(at.done_lengths, k);
  place(at.free_columns, k), place(at.old_scores, k), place(at.settings, std::min<int64_t>(lists, kThreads));
  place(at.counters, 4 + 2 * kWarps);
  *bytes = 4 * next;
  return at;
}

}  // namespace

int64_t search_step_shared_bytes(int64_t width, int64_t keep, int64_t count, int64_t places, int64_t lists) {
  int64_t bytes = 0;
  lay_out(width, keep, count, places, lists, &bytes);
  return bytes;
}

void search_step_gpu(Context& context, const SearchStepArgs& a) {
  const State s = state_of(a.state);
  const bool drawn = a.drawn.defined();
  const int64_t rows = drawn ? a.drawn.dim(0) : a.lse.dim(0), k = a.state.width;
  const int64_t count = drawn ? 1 : a.values.dim(1);
  Step x = {};
  x.settings = global<const int32_t>(a.settings), x.numbers = global<const float>(a.numbers);
  if (drawn) {
    x.drawn = global<const int32_t>(a.drawn), x.drawn_scores = global<const float>(a.drawn_scores);
  } else {
    x.values = global<const float>(a.values), x.values_stride = a.values.row_stride();
    x.columns = global<const int32_t>(a.columns), x.columns_stride = a.columns.row_stride();
  }
  x.lse = global<const float>(a.lse);
  x.count = static_cast<int>(count), x.keep = static_cast<int>(a.keep);
  x.kept = static_cast<int>(std::min(a.keep, a.vocabulary)), x.vocabulary = static_cast<int>(a.vocabulary);
  x.together = static_cast<int>(rows_together(k, count));
  x.beam = a.beam;
  x.held = static_cast<int>(std::min<int64_t>(a.settings.numel(), kThreads));
  int64_t bytes = 0;
  const Places at = lay_out(k, a.keep, count, s.places, a.settings.numel(), &bytes);
  const auto run = [&](auto type) {
    using T = decltype(type);
    launch(context, "search_step_kernel", search_step_kernel<T>, {rows / k, kThreads, bytes}, s, x, at,
           a.logits.defined() ? global<const T>(a.logits) : Global<const T>(),
           a.logits.defined() ? a.logits.row_stride() : int64_t{0});
  };
  dispatch_float(a.logits.defined() ? a.logits.dtype() : DType::kF32, run);
}

void search_begin_gpu(Context& context, const SearchBeginArgs& a) {
  const State s = state_of(a.state);
  launch(context, "search_begin_kernel", search_begin_kernel, {s.sentences, kThreads, 0}, s,
         global<const int32_t>(a.prompt_ids), global<const int32_t>(a.prompt_offsets), global<const int32_t>(a.count),
         a.beam);
}

}  // namespace frit
