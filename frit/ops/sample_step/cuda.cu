#include <cmath>

#include "frit/ops/sample_step/gpu.h"
#include "frit/ops/search_step/rules-inl.h"
#include "frit/simt/early.h"

namespace frit {
namespace {

constexpr int kThreads = kSampleThreads, kBins = 256, kWarps = kThreads / kWarpSize;
static_assert(kThreads == kBins, "a thread a bin");
using Weight = unsigned long long;  // what atomics of the GPU add

// Where the block's arrays lie in shared memory, in bytes.
constexpr int kSumsAt = 0, kHistogramAt = kSumsAt + kBins * 8, kChosenAt = kHistogramAt + kBins * 4,
              kWarpSumsAt = kChosenAt + 4 * 8, kScratchAt = kWarpSumsAt + kWarps * 8, kCountersAt = kScratchAt + 32 * 4,
              kListsAt = kCountersAt + 4 * 4;

// Larger values first, then smaller ids, as one rising number. -0 counts as 0.
FRIT_DEVICE uint32_t rising(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// What is left of a row: tokens of at least `lowest`, with whole numbers for probabilities.
struct Tokens {
  Global<float> row;
  int count;
  float lowest, top;
  double temperature;
  double unit;    // 2^bits: the likeliest token's weight
  uint64_t last;  // keys above it are cut off

  FRIT_DEVICE uint64_t key(int token, float value) const {
    return static_cast<uint64_t>(~rising(value)) << 32 | static_cast<uint32_t>(token);
  }
  FRIT_DEVICE Weight weight(float value) const {
    if (!(value >= lowest) || value == -INFINITY) return 0;
    const double share = exp((static_cast<double>(value) - static_cast<double>(top)) / temperature);
    return static_cast<Weight>(share * unit + 0.5);
  }
};

struct Bin {
  int bin;
  Weight before;  // of the bins before it
};
// The bin in which a running sum over the bins, from `before` on, exceeds `target`, which some bin's does; in all
// threads. A thread gives its own bin. 2 barriers.
FRIT_DEVICE Bin bin_of(Weight mine, Weight before, Weight target) {
  const Shared<Weight> chosen = shared_array<Weight>(kChosenAt), warps = shared_array<Weight>(kWarpSumsAt);
  Weight up_to = mine;
  FRIT_UNROLL
  for (int by = 1; by < kWarpSize; by *= 2) {
    const Weight other = shuffle_up(up_to, by);
    if (lane() >= by) up_to += other;
  }
  if (lane() == kWarpSize - 1) store(warps, warp(), up_to);
  barrier();
  Weight base = before;
  for (int w = 0; w < warp(); ++w) base += load(warps, w);
  if (base + up_to > target && base + up_to - mine <= target)
    store(chosen, 2, static_cast<Weight>(thread_index())), store(chosen, 3, base + up_to - mine);
  barrier();
  return {static_cast<int>(load(chosen, 2)), load(chosen, 3)};
}

struct Found {
  uint64_t key;
  Weight before;  // weights of smaller keys
};

// The smallest key up to which weights sum to more than `target`, byte by byte; in all threads. Keys are those of
// falling likelihood, or the ids alone. Cost: a walk over the row and 5 barriers for each byte.
FRIT_DEVICE Found find_key(const Tokens& tokens, bool by_id, Weight target) {
  const Shared<Weight> sums = shared_array<Weight>(kSumsAt), chosen = shared_array<Weight>(kChosenAt);
  const Shared<uint32_t> histogram = shared_array<uint32_t>(kHistogramAt);
  const int me = thread_index();
  uint64_t prefix = 0;
  Weight before = 0;
  for (int byte = by_id ? 3 : 7; byte >= 0; --byte) {
    if (by_id && byte > 0 && (tokens.count - 1) >> (8 * byte) == 0) {  // all ids have zeros there
      prefix <<= 8;
      continue;
    }
    barrier();
    store(sums, me, Weight{0});
    store(histogram, me, 0u);
    barrier();
    for (int i = me; i < tokens.count; i += kThreads) {
      const float value = load(tokens.row, i);
      const uint64_t full = tokens.key(i, value), key = by_id ? static_cast<uint64_t>(i) : full;
      if (byte < 7 && key >> (8 * (byte + 1)) != prefix) continue;
      if (full > tokens.last) continue;
      const Weight weight = tokens.weight(value);
      if (weight == 0) continue;
      atomic_add(sums, static_cast<int64_t>(key >> (8 * byte) & 255u), weight);
      atomic_add(histogram, static_cast<int64_t>(key >> (8 * byte) & 255u), 1u);
    }
    barrier();
    const Bin found = bin_of(load(sums, me), before, target);
    const int bin = found.bin;
    before = found.before;
    prefix = prefix << 8 | static_cast<uint32_t>(bin);
    if (!by_id && load(histogram, bin) == 1) {  // one token has these bytes: which one?
      if (me == 0) store(chosen, 0, Weight{0});
      barrier();
      for (int i = me; i < tokens.count; i += kThreads) {
        const float value = load(tokens.row, i);
        const uint64_t key = tokens.key(i, value);
        if (key >> (8 * byte) == prefix && key <= tokens.last && tokens.weight(value) != 0)
          store(chosen, 0, Weight{key});
      }
      barrier();
      return {load(chosen, 0), before};
    }
  }
  return {prefix, before};
}

// The count-th largest value of a row; in all threads. 4 walks over the row.
FRIT_DEVICE uint32_t kth_largest(const Global<float>& row, int columns, uint32_t count) {
  const Shared<uint32_t> histogram = shared_array<uint32_t>(kHistogramAt);
  const int me = thread_index();
  uint32_t prefix = 0;
  for (int byte = 3; byte >= 0; --byte) {
    barrier();
    store(histogram, me, 0u);
    barrier();
    for (int i = me; i < columns; i += kThreads) {
      const uint32_t key = ~rising(load(row, i));
      if (byte == 3 || key >> (8 * (byte + 1)) == prefix)
        atomic_add(histogram, static_cast<int64_t>(key >> (8 * byte) & 255u), 1u);
    }
    barrier();
    const Bin found = bin_of(load(histogram, me), 0, count - 1);
    count -= static_cast<uint32_t>(found.before);
    prefix = prefix << 8 | static_cast<uint32_t>(found.bin);
  }
  return ~prefix;
}

FRIT_DEVICE float value_of(uint32_t rising_bits) {
  return std::bit_cast<float>(rising_bits & 0x80000000u ? rising_bits & 0x7fffffffu : ~rising_bits);
}

// A block a row.
FRIT_KERNEL(kThreads, 4)
sample_step_kernel(State s, Global<float> logits, int64_t stride, int columns, Global<const float> lse,
                   Global<const int64_t> draw, Global<const int32_t> settings, Global<const float> numbers, int bits,
                   int lists, Global<int32_t> drawn, Global<float> drawn_scores) {
  let_next_start();
  wait_for_previous();
  const int64_t row_number = block_index(), entry = row_number / s.width;
  const int me = thread_index(), beam = static_cast<int>(row_number - entry * s.width);
  const int position = load(s.position, 0), length = position + 1, side = position & 1;
  const int sentence = load(s.live_sentence, entry);
  const int64_t slot = int64_t{sentence} * s.width + beam;
  const int prompt = load(s.prompt, sentence), max_length = load(s.max_length, sentence);
  int forced = length == 1 ? load(settings, kSearchForcedBos) : -1;
  if (length == max_length - 1 && load(settings, kSearchForcedEos) >= 0) forced = load(settings, kSearchForcedEos);
  if (entry >= load(s.live, 0) || length < prompt || load(s.ended, slot) != 0 || forced >= 0) {
    if (me == 0) store(drawn, row_number, forced >= 0 ? forced : 0), store(drawn_scores, row_number, 0.0f);
    return;
  }
  const Global<float> row = logits + row_number * stride;
  const Shared<float> scratch = shared_array<float>(kScratchAt);
  const Shared<int32_t> banned = shared_array<int32_t>(kListsAt), ids = banned + lists;
  const Shared<float> as_they_came = shared_array<float>(kListsAt + 4 * (lists + static_cast<int>(s.places)));
  const Shared<uint32_t> counters = shared_array<uint32_t>(kCountersAt);

  // ---- Penalties and bans, in place ----
  const Rules rules(Settings{settings, {}, 0}, load(numbers, kSearchPenalty), length, prompt);
  if (rules.looks_back()) {
    look_back<kThreads>(rules, s.ids + s.row_of(side, slot), length, ids, banned, counters);
    for (int i = me; i < length; i += kThreads) store(as_they_came, i, load(row, load(ids, i)));
    barrier();
    if (rules.penalty != 1.0f)
      for (int i = me; i < length; i += kThreads) {
        const int token = load(ids, i);
        if (!contains(ids, i, token)) store(row, token, rules.penalised(load(as_they_came, i)));
      }
    barrier();
  }
  // One list after the other; a token that a list names twice is written once.
  const auto ban = [&](int count, auto&& token_of) {
    for (int i = me; i < count; i += kThreads) {
      const int token = token_of(i);
      bool named = false;
      for (int j = 0; j < i; ++j) named = named || token_of(j) == token;
      if (!named) store(row, token, -INFINITY);
    }
    barrier();
  };
  if (rules.looks_back())
    ban(static_cast<int>(load(counters, 0)), [&](int i) { return static_cast<int>(load(banned, i)); });
  ban(rules.singles, [&](int i) { return static_cast<int>(load(settings, kSearchLists + rules.eos_count + i)); });
  if (rules.eos_banned) ban(rules.eos_count, [&](int i) { return static_cast<int>(load(settings, kSearchLists + i)); });

  // ---- What may be drawn ----
  float top = -INFINITY;
  for (int i = me; i < columns; i += kThreads) top = fmaxf(top, load(row, i));
  top = block_max(top, scratch);
  if (top == -INFINITY) {
    if (me == 0) store(drawn, row_number, 0), store(drawn_scores, row_number, -INFINITY);
    return;
  }
  Tokens tokens;
  tokens.row = row, tokens.count = columns, tokens.top = top, tokens.lowest = -INFINITY;
  tokens.temperature = std::bit_cast<double>(load(draw, kDrawTemperature));
  tokens.unit = static_cast<double>(Weight{1} << bits);
  tokens.last = ~uint64_t{0};
  const int64_t top_k = load(draw, kDrawTopK);
  if (top_k > 0 && top_k < columns) tokens.lowest = value_of(kth_largest(row, columns, static_cast<uint32_t>(top_k)));
  const Shared<Weight> chosen = shared_array<Weight>(kChosenAt);
  const auto total_of = [&] {
    barrier();
    if (me == 0) store(chosen, 1, Weight{0});
    barrier();
    Weight sum = 0;
    for (int i = me; i < columns; i += kThreads) {
      const float value = load(row, i);
      if (tokens.key(i, value) <= tokens.last) sum += tokens.weight(value);
    }
    atomic_add(chosen, 1, sum);
    barrier();
    return load(chosen, 1);
  };
  Weight total = total_of();
  const double top_p = std::bit_cast<double>(load(draw, kDrawTopP));
  if (top_p < 1.0) {
    // The fewest that reach the share: up to the key at which the sum is no longer below it.
    const double enough = top_p * static_cast<double>(total);
    Weight need = static_cast<Weight>(enough);
    if (static_cast<double>(need) < enough) ++need;
    tokens.last = find_key(tokens, false, need > 0 ? need - 1 : 0).key;
    total = total_of();
  }

  // ---- The draw ----
  const double u = sampling_uniform(static_cast<uint64_t>(load(draw, kDrawSeed)),
                                    static_cast<uint64_t>(load(draw, kDrawSentences + sentence)),
                                    static_cast<uint32_t>(beam), static_cast<uint32_t>(length));
  Weight target = static_cast<Weight>(u * static_cast<double>(total));
  if (target >= total) target = total - 1;
  const uint64_t key = find_key(tokens, top_p >= 1.0, target).key;
  const int token = static_cast<int>(key & 0xffffffffu);
  if (me != 0) return;
  float logit = load(row, token);
  if (rules.looks_back())
    for (int i = 0; i < length; ++i)
      if (load(ids, i) == token) {
        logit = load(as_they_came, i);
        break;
      }
  store(drawn, row_number, token);
  store(drawn_scores, row_number, sub_rn(logit, load(lse, row_number)));
}

}  // namespace

void sample_step_gpu(Context& context, const SampleStepArgs& a) {
  const State s = state_of(a.state);
  const int64_t columns = a.logits.dim(1), lists = s.places + a.settings.numel();
  int bits = 44;  // the sum of all weights stays below 2^62
  while ((columns << bits) > (int64_t{1} << 61)) --bits;
  launch(context, "sample_step_kernel", sample_step_kernel,
         {a.logits.dim(0), kThreads, kListsAt + 4 * (lists + 2 * s.places)}, s, global<float>(a.logits),
         a.logits.row_stride(), static_cast<int>(columns), global<const float>(a.lse), global<const int64_t>(a.draw),
         global<const int32_t>(a.settings), global<const float>(a.numbers), bits, static_cast<int>(lists),
         global<int32_t>(a.drawn), global<float>(a.drawn_scores));
}

}  // namespace frit
