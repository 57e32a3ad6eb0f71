#include "frit/ops/embedding/gpu.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 256, kWarps = kThreads / kWarpSize;

// The N elements (16 bytes) [column, column + N) of a row wherever it begins: one access if they are aligned, else the
// two aligned vectors that they lie in, joined; element by element at the row's ends. What lies outside is zero.
template <int N, Cache cache, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> load_anywhere(const Global<T>& row, int column, int columns) {
  using Value = std::remove_const_t<T>;
  const Global<T> at = row + column;
  const int past = row_shift(at);
  if (column < past || column - past + (past ? 2 * N : N) > columns) {  // the row's first and last vectors
    Vec<Value, N> v;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) v[i] = column + i >= 0 && column + i < columns ? load<cache>(at, i) : Value();
    return v;
  }
  if (past == 0) return load_vec<N, cache>(at, 0);
  const auto a = load_vec<N, cache>(at, -past), b = load_vec<N, cache>(at, N - past);
  struct Words {
    uint32_t w[4];
  };
  const Words low = std::bit_cast<Words>(a), high = std::bit_cast<Words>(b);
  uint32_t w[8] = {low.w[0], low.w[1], low.w[2], low.w[3], high.w[0], high.w[1], high.w[2], high.w[3]};
  const int bytes = past * static_cast<int>(sizeof(T));
  FRIT_UNROLL
  for (int i = 0; i < 7; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
  FRIT_UNROLL
  for (int i = 0; i < 5; ++i) w[i] = bytes & 8 ? w[i + 2] : w[i];
  Words joined;
  FRIT_UNROLL
  for (int i = 0; i < 4; ++i) joined.w[i] = bytes & 2 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
  return std::bit_cast<Vec<Value, N>>(joined);
}

// The factors of dropout for N columns of a token, folded into x.
template <int N>
FRIT_DEVICE void drop(const Dropout& dropout, int64_t token, int column, Vec<float, N>& x) {
  const uint32_t keep = dropout_keep<N>(dropout, token, column);
  const float scale = dropout.scale();
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) x[i] = keep >> i & 1 ? x[i] * scale : 0.0f;
}

// The sequence that token t lies in: the last one that begins at or before it. All lanes of the warp call it, with one
// t. Cost: a load and a vote for each factor of 32 in the number of sequences.
FRIT_DEVICE int sequence_of(const Global<const int32_t>& offsets, int sequences, int64_t t) {
  int low = 0, high = sequences + 1;
  while (high - low > 1) {
    const int step = (high - low + 30) / 32, probe = low + (lane() + 1) * step;
    const bool before = probe < high && load(offsets, probe) <= t;
    low += count_bits(ballot(before)) * step;
    high = low + step < high ? low + step : high;
  }
  return low;
}

template <typename T>
struct Lookup {
  Global<const int32_t> ids, offsets, position_ids;  // the last two may be missing
  Global<const T> table, positions;
  Global<T> y;
  int64_t tokens, table_stride, positions_stride, y_stride, position_offset, places;
  int32_t vocabulary, sequences, columns;
  float scale;
  Dropout dropout;
};

// A warp a token; a lane has kVectors vectors of its row at a time.
template <typename T, int kVectors>
FRIT_KERNEL(kThreads, kVectors == 1 ? 4 : 3)
embedding_forward_row_per_warp_kernel(Lookup<T> a) {
  wait_for_previous();
  constexpr int kN = kVecOf<T>;
  const int64_t t = block_index() * kWarps + warp();
  if (t >= a.tokens) return;
  const int32_t id = load(a.ids, t);
  bool real = id >= 0 && id < a.vocabulary && (!a.offsets || t < load(a.offsets, a.sequences));
  const Global<const T> word_row = a.table + (real ? id * a.table_stride : 0);
  const Global<T> y = a.y + t * a.y_stride;
  const int shift = row_shift(y), vectors = (a.columns + shift + kN - 1) / kN;
  int64_t position = 0;
  for (int first = 0; first < vectors; first += kWarpSize * kVectors) {
    Vec<T, kN> word[kVectors] = {};
    const auto each = [&](auto&& f) {
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = first + k * kWarpSize + lane();
        if (j < vectors) f(k, j * kN - shift);
      }
    };
    if (real)
      each([&](int k, int column) { word[k] = load_anywhere<kN, Cache::kDefault>(word_row, column, a.columns); });
    if (a.positions) {
      if (first == 0 && real) {  // behind the loads above, so that they overlap
        if (a.position_ids) {
          position = load(a.position_ids, t);
        } else {
          position = t - load(a.offsets, sequence_of(a.offsets, a.sequences, t)) + a.position_offset;
        }
        real = position >= 0 && position < a.places;
      }
    }
    each([&](int k, int column) {
      Vec<T, kN> place = {};
      if (a.positions && real)
        place = load_anywhere<kN, Cache::kDefault>(a.positions + position * a.positions_stride, column, a.columns);
      const Vec<float, kN> w = to_float(word[k]), p = to_float(place);
      Vec<float, kN> sum;
      FRIT_UNROLL
      for (int i = 0; i < kN; ++i) sum[i] = real ? w[i] * a.scale + p[i] : 0.0f;
      if (a.dropout.active() && real) drop(a.dropout, t, column, sum);
      store_span<kN>(y, column, a.columns, from_float<T>(sum));
    });
  }
}

// ---- Backward ----

// keys[t] = position of token t in its sequence, plus position_offset; -1 for tokens behind the last sequence.
FRIT_KERNEL(kThreads, 4)
embedding_backward_positions_kernel(Global<const int32_t> offsets, int sequences, int64_t tokens,
                                    int64_t position_offset, Global<int32_t> keys) {
  wait_for_previous();
  const int64_t t = block_index() * kThreads + thread_index();
  if (t >= tokens) return;
  int low = 0, high = sequences + 1;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (load(offsets, middle) <= t)
      low = middle;
    else
      high = middle;
  }
  store(keys, t, low == sequences ? -1 : static_cast<int32_t>(t - load(offsets, low) + position_offset));
}

// Tokens and what they are grouped by.
struct Keys {
  Global<const int32_t> keys;     // [tokens]; a token with a key outside of [0, count), or `skipped`, counts nothing
  Global<const int32_t> offsets;  // may be missing; tokens from offsets[sequences] on count nothing
  int64_t tokens;
  int32_t sequences, count, skipped;
};

constexpr int kSortThreads = 1024, kSortWarps = kSortThreads / kWarpSize, kKeyBits = 8, kOwned = 1 << kKeyBits;
constexpr int64_t kSortShared = (kSortWarps * kOwned + 2 * kWarpSize) * static_cast<int64_t>(sizeof(int32_t));

// Sorts tokens by key, keeping their order: starts[k] becomes the place in `order` of key k's first token,
// starts[count] the number of tokens that count. Block b owns kOwned keys and looks through all tokens for them: warp w
// through its own stretch of them, first counting, then, when the counts before it are known, placing. No block waits
// for another. Tells the cache to fetch `fetch_bytes` of dy meanwhile, which the next kernel will read.
FRIT_KERNEL(kSortThreads, 1)
embedding_backward_sort_kernel(Keys a, Global<int32_t> starts, Global<int32_t> order, Global<const uint8_t> fetch,
                               int64_t fetch_bytes) {
  wait_for_previous();
  constexpr int64_t kLine = 128;
  for (int64_t at = (block_index() * kSortThreads + thread_index()) * kLine; at < fetch_bytes;
       at += block_count() * kSortThreads * kLine)
    prefetch(fetch, at);
  const auto counts = shared_array<int32_t>(0);                                     // [warp][owned key]
  const auto below = shared_array<int32_t>(kSortWarps * kOwned * sizeof(int32_t));  // by warp: tokens of lower keys
  const auto sums = below + kWarpSize;                                              // by warp: tokens of its keys
  const int32_t low = static_cast<int32_t>(block_index()) * kOwned;
  int64_t real = a.tokens;
  if (a.offsets) {
    const int64_t last = load(a.offsets, a.sequences);
    real = last < real ? last : real;
  }
  const int64_t stretch = (real + kSortThreads - 1) / kSortThreads * kWarpSize, begin = warp() * stretch;
  const int64_t end = begin + stretch < real ? begin + stretch : real;
  for (int i = thread_index(); i < kSortWarps * kOwned; i += kSortThreads) store(counts, i, 0);
  barrier();

  // f(token, its key or -1, is the key owned?) for the warp's tokens in order, 32 at a time; several loads in flight.
  const auto each = [&](auto&& f) {
    constexpr int kAhead = 4;
    for (int64_t first = begin; first < end; first += kAhead * kWarpSize) {
      int32_t key[kAhead];
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        const int64_t t = first + k * kWarpSize + lane();
        key[k] = t < end ? load(a.keys, t) : -1;
      }
      FRIT_UNROLL
      for (int k = 0; k < kAhead; ++k) {
        if (key[k] >= a.count || key[k] == a.skipped) key[k] = -1;
        f(first + k * kWarpSize + lane(), key[k], key[k] >= low && key[k] - low < kOwned);
      }
    }
  };
  // Among the 32 tokens: this one's place in the warp's list of its key. Lanes of one key are found bit by bit.
  const auto place = [&](int32_t key, bool mine, auto&& f) {
    const uint32_t all = ballot(mine);
    if (all == 0) return;
    const int local = mine ? key - low : 0;
    uint32_t peers = all;
    FRIT_UNROLL
    for (int bit = 0; bit < kKeyBits; ++bit) {
      const uint32_t set = ballot(mine && (local >> bit & 1));
      peers &= local >> bit & 1 ? set : ~set;
    }
    const int rank = count_bits(peers & ((1u << lane()) - 1)), cell = warp() * kOwned + local;
    const int32_t before = mine ? load(counts, cell) : 0;
    warp_barrier();
    if (mine && rank == 0) store(counts, cell, before + count_bits(peers));
    warp_barrier();
    f(before + rank);
  };

  int32_t lower = 0;
  each([&](int64_t, int32_t key, bool mine) {
    lower += key >= 0 && key < low;
    place(key, mine, [](int32_t) {});
  });
  FRIT_UNROLL
  for (int bits = kWarpSize / 2; bits > 0; bits /= 2) lower += shuffle_xor(lower, bits);
  if (lane() == 0) store(below, warp(), lower);
  barrier();

  // Counts become places: thread k takes key low + k.
  int32_t total = 0, through = 0;
  if (thread_index() < kOwned) {
    for (int w = 0; w < kSortWarps; ++w) {
      const int cell = w * kOwned + thread_index();
      const int32_t count = load(counts, cell);
      store(counts, cell, total);
      total += count;
    }
    through = total;
    FRIT_UNROLL
    for (int by = 1; by < kWarpSize; by *= 2) {
      const int32_t other = shuffle_up(through, by);
      if (lane() >= by) through += other;
    }
    if (lane() == kWarpSize - 1) store(sums, warp(), through);
  }
  barrier();
  if (thread_index() < kOwned) {
    int32_t start = load(below, lane());
    FRIT_UNROLL
    for (int bits = kWarpSize / 2; bits > 0; bits /= 2) start += shuffle_xor(start, bits);
    for (int w = 0; w < warp(); ++w) start += load(sums, w);
    start += through - total;
    for (int w = 0; w < kSortWarps; ++w) {
      const int cell = w * kOwned + thread_index();
      store(counts, cell, load(counts, cell) + start);
    }
    const int32_t key = low + thread_index();
    if (key < a.count) store(starts, key, start);
    if (key == a.count - 1) store(starts, key + 1, start + total);
  }
  barrier();
  each([&](int64_t t, int32_t key, bool mine) {
    place(key, mine, [&](int32_t at) {
      if (mine) store(order, at, static_cast<int32_t>(t));
    });
  });
}

template <typename T, typename O>
struct Sums {
  Global<const int32_t> keys, starts, order;
  Global<const T> dy;
  Global<O> out;
  Global<float> partials;  // [2 * pieces, partials_stride]
  Global<int32_t> finish;  // [pieces]: the long run that begins in the piece, or -1
  int64_t dy_stride, out_stride, pieces;
  int32_t count, columns, partials_stride;
  float scale;
  bool accumulate;
  Dropout dropout;
};

// sum[k] = sum over tokens order[from..to) of mask/keep * dy, at the lane's vectors of this warp's columns from `first`
// on, shifted to the left by `shift`.
template <typename T, typename O, int kVectors>
FRIT_DEVICE void sum_run(const Sums<T, O>& a, int from, int to, int first, int shift,
                         Vec<float, kVecOf<T>> (&sum)[kVectors]) {
  constexpr int kN = kVecOf<T>;
  const auto add = [&](int k, int column, int64_t t, const Vec<T, kN>& v) {
    Vec<float, kN> x = to_float(v);
    if (a.dropout.active()) drop(a.dropout, t, column, x);
    FRIT_UNROLL
    for (int i = 0; i < kN; ++i) sum[k][i] += x[i];
  };
  int at = from;
  for (; at < to; ++at) {
    const int64_t t = load(a.order, at);
    Vec<T, kN> v[kVectors];
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k) {
      const int column = (first + k * kWarpSize + lane()) * kN - shift;
      v[k] = column < a.columns ? load_anywhere<kN, Cache::kStream>(a.dy + t * a.dy_stride, column, a.columns)
                                : Vec<T, kN>{};
    }
    FRIT_UNROLL
    for (int k = 0; k < kVectors; ++k) add(k, (first + k * kWarpSize + lane()) * kN - shift, t, v[k]);
  }
}

// The first warps take a piece of kEmbeddingPiece tokens each, of which they sum what belongs to long runs; the others
// a row of the result each, and write it unless its run is long. A run is long if it has more tokens than a piece: then
// at most two of them meet in a piece, one that goes on from the piece before and one that begins.
template <typename T, typename O, int kVectors>
FRIT_KERNEL(kThreads, 3)
embedding_backward_rows_kernel(Sums<T, O> a) {
  wait_for_previous();
  constexpr int kN = kVecOf<T>, kOut = kVecOf<O>;
  constexpr int kPiece = static_cast<int>(kEmbeddingPiece);
  const int64_t item = block_index() * kWarps + warp(), row = item - a.pieces;
  const bool is_piece = row < 0;
  if (row >= a.count) return;
  int from[2], to[2];  // what is summed: of a piece, the run that goes on and the one that begins
  Global<O> out;
  int shift = 0;
  if (is_piece) {
    const int begin = static_cast<int>(item) * kPiece, counted = load(a.starts, a.count);
    const int end = begin + kPiece < counted ? begin + kPiece : counted;
    from[0] = to[0] = from[1] = to[1] = 0;
    int32_t finish = -1;
    if (begin < end) {
      const int32_t old_key = load(a.keys, load(a.order, begin)), new_key = load(a.keys, load(a.order, end - 1));
      const int old_begin = load(a.starts, old_key), old_end = load(a.starts, old_key + 1);
      const int new_begin = load(a.starts, new_key), new_end = load(a.starts, new_key + 1);
      if (old_begin < begin && old_end - old_begin > kPiece) from[0] = begin, to[0] = old_end < end ? old_end : end;
      if (new_begin >= begin && new_end - new_begin > kPiece) from[1] = new_begin, to[1] = end, finish = new_key;
    }
    if (lane() == 0) store(a.finish, item, finish);
  } else {
    from[0] = load(a.starts, row), to[0] = load(a.starts, row + 1);
    if (to[0] - from[0] > kPiece || (a.accumulate && from[0] == to[0])) return;
    out = a.out + row * a.out_stride;
    shift = row_shift(out);
  }
  for (int part = 0; part < (is_piece ? 2 : 1); ++part) {
    if (is_piece && (part == 0 ? from[0] == to[0] : from[1] == to[1])) continue;
    const Global<float> partial = a.partials + (2 * item + part) * a.partials_stride;
    for (int first = 0; first * kN - shift < a.columns; first += kWarpSize * kVectors) {
      Vec<float, kN> sum[kVectors] = {};
      sum_run<T, O, kVectors>(a, part == 0 ? from[0] : from[1], part == 0 ? to[0] : to[1], first, shift, sum);
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int column = (first + k * kWarpSize + lane()) * kN - shift;
        if (is_piece) {
          FRIT_UNROLL
          for (int i = 0; i < kN; i += 4)
            if (column + i < a.columns)
              store_vec<4>(partial, column + i, Vec<float, 4>{sum[k][i], sum[k][i + 1], sum[k][i + 2], sum[k][i + 3]});
        } else {
          FRIT_UNROLL
          for (int i = 0; i < kN; i += kOut) {
            if (column + i >= a.columns) continue;
            Vec<float, kOut> x;
            FRIT_UNROLL
            for (int j = 0; j < kOut; ++j) x[j] = sum[k][i + j] * a.scale;
            if (a.accumulate) {
              const Vec<float, kOut> before = to_float(load_span<kOut>(out, column + i, a.columns, O()));
              FRIT_UNROLL
              for (int j = 0; j < kOut; ++j) x[j] += before[j];
            }
            store_span<kOut, Cache::kStream>(out, column + i, a.columns, from_float<O>(x));
          }
        }
      }
    }
  }
}

constexpr int kFinishPieces = 8, kFinishColumns = kWarpSize * 4;

// Adds the partial rows of each long run: a block looks at kFinishPieces pieces and, for every run that begins in one
// of them, adds kFinishColumns columns: warp w the partial rows w, w + 8, ..., then the warps' sums in order.
template <typename T, typename O>
FRIT_KERNEL(kThreads, 4)
embedding_backward_finish_kernel(Sums<T, O> a) {
  wait_for_previous();
  constexpr int kPiece = static_cast<int>(kEmbeddingPiece), kAhead = 8;
  const int64_t groups = (a.pieces + kFinishPieces - 1) / kFinishPieces;
  const int64_t first = block_index() % groups * kFinishPieces;
  const int column = static_cast<int>(block_index() / groups) * kFinishColumns + lane() * 4;
  const auto scratch = shared_array<float>(0);  // [warp][column]
  const int key = lane() < kFinishPieces && first + lane() < a.pieces ? load(a.finish, first + lane()) : -1;
  for (uint32_t runs = ballot(key >= 0); runs != 0; runs &= runs - 1) {
    const int which = find_first_set(runs) - 1;
    const int32_t row = shuffle(key, which);
    const int64_t piece = first + which;
    const int count = static_cast<int>((load(a.starts, row + 1) - 1) / kPiece - piece) + 1;
    Vec<float, 4> sum = {};
    if (column < a.columns) {
      for (int i = warp(); i < count; i += kAhead * kWarps) {
        Vec<float, 4> part[kAhead];
        FRIT_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          const int at = i + k * kWarps;
          const int64_t slot = 2 * (piece + at) + (at == 0);
          part[k] = at < count ? load_vec<4>(a.partials + slot * a.partials_stride, column) : Vec<float, 4>{};
        }
        FRIT_UNROLL
        for (int k = 0; k < kAhead; ++k) {
          FRIT_UNROLL
          for (int j = 0; j < 4; ++j) sum[j] += part[k][j];
        }
      }
      store_vec<4>(scratch, warp() * kFinishColumns + lane() * 4, sum);
    }
    barrier();
    if (warp() == 0 && column < a.columns) {
      for (int w = 1; w < kWarps; ++w) {
        const Vec<float, 4> other = load_vec<4>(scratch, w * kFinishColumns + lane() * 4);
        FRIT_UNROLL
        for (int j = 0; j < 4; ++j) sum[j] += other[j];
      }
      const Global<O> out = a.out + row * a.out_stride;
      const Vec<O, 4> before = a.accumulate ? load_span<4>(out, column, a.columns, O()) : Vec<O, 4>{};
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) sum[j] = sum[j] * a.scale + (a.accumulate ? static_cast<float>(before[j]) : 0.0f);
      store_span<4>(out, column, a.columns, from_float<O>(sum));
    }
    barrier();  // scratch is free again
  }
}

// Vectors of 16 bytes that a lane takes of a row at a time, by instance.
constexpr int kForwardVectors[] = {1, 4}, kBackwardVectors[] = {1, 2};
constexpr const char *kForwardInstances[] = {"1_vector", "4_vectors"},
                     *kBackwardInstances[] = {"1_vector", "2_vectors"};

int choose(Context& context, const char* op, const char* const (&names)[2], int64_t columns, int64_t bytes) {
  return choose_instance(context, op, fmt::format("{}x{}", columns, bytes), names, columns * bytes > 16 * kWarpSize,
                         [](int) { return true; });
}
// f(std::integral_constant<int, vectors>()) of instance i.
template <const int (&vectors)[2], typename F>
void with_vectors(int i, F&& f) {
  if (i == 0)
    f(std::integral_constant<int, vectors[0]>());
  else
    f(std::integral_constant<int, vectors[1]>());
}

// out[k] (+)= scale * sum over tokens with key k of mask/keep * dy.
void sum_by_key(Context& context, const Keys& keys, const Tensor& dy, const Dropout& dropout, float scale,
                bool accumulate, const Tensor& out, int instance) {
  const int64_t tokens = keys.tokens, columns = dy.dim(1), pieces = (tokens + kEmbeddingPiece - 1) / kEmbeddingPiece;
  const int64_t partials_stride = (columns + 3) / 4 * 4;
  Buffer starts = context.allocate({keys.count + 1}, DType::kI32, "embedding.starts");
  Buffer order = context.allocate({tokens}, DType::kI32, "embedding.order");
  Buffer finish = context.allocate({pieces}, DType::kI32, "embedding.finish");
  Buffer partials = context.allocate({2 * pieces, partials_stride}, DType::kF32, "embedding.partials");
  // As much as the sort leaves time for.
  const int64_t fetch = dy.contiguous() ? std::min<int64_t>(dy.bytes(), 16 << 20) : 0;
  launch(context, "embedding_backward_sort_kernel", embedding_backward_sort_kernel,
         {(keys.count + kOwned - 1) / kOwned, kSortThreads, kSortShared}, keys, global<int32_t>(starts),
         global<int32_t>(order), Global<const uint8_t>(static_cast<const uint8_t*>(dy.raw())), fetch);
  dispatch_float(dy.dtype(), [&]<typename T>(T) {
    const auto run = [&]<typename O>(O) {
      const Sums<T, O> a{keys.keys,
                         global<const int32_t>(starts),
                         global<const int32_t>(order),
                         global<const T>(dy),
                         global<O>(out),
                         global<float>(partials),
                         global<int32_t>(finish),
                         dy.row_stride(),
                         out.row_stride(),
                         pieces,
                         keys.count,
                         static_cast<int32_t>(columns),
                         static_cast<int32_t>(partials_stride),
                         scale,
                         accumulate,
                         dropout};
      with_vectors<kBackwardVectors>(instance, [&](auto vectors) {
        launch(context, "embedding_backward_rows_kernel", embedding_backward_rows_kernel<T, O, vectors.value>,
               {(pieces + keys.count + kWarps - 1) / kWarps, kThreads}, a);
      });
      launch(context, "embedding_backward_finish_kernel", embedding_backward_finish_kernel<T, O>,
             {(pieces + kFinishPieces - 1) / kFinishPieces * ((columns + kFinishColumns - 1) / kFinishColumns),
              kThreads, kWarps * kFinishColumns * static_cast<int64_t>(sizeof(float))},
             a);
    };
    if (out.dtype() == DType::kF32)
      run(float());
    else if constexpr (sizeof(T) == 2)
      run(T());
  });
}

}  // namespace

void embedding_forward_gpu(Context& context, const EmbeddingArgs& args, const Tensor& y) {
  if (y.numel() == 0) return;
  const int instance = choose(context, "embedding_forward", kForwardInstances, y.dim(1), size_of(y.dtype()));
  dispatch_float(y.dtype(), [&]<typename T>(T) {
    const bool placed = args.positions.defined();
    const Lookup<T> a{global<const int32_t>(args.ids),
                      global<const int32_t>(args.offsets),
                      global<const int32_t>(args.position_ids),
                      global<const T>(args.table),
                      global<const T>(args.positions),
                      global<T>(y),
                      y.dim(0),
                      args.table.row_stride(),
                      placed ? args.positions.row_stride() : 0,
                      y.row_stride(),
                      args.position_offset,
                      placed ? args.positions.dim(0) : 0,
                      static_cast<int32_t>(args.table.dim(0)),
                      args.offsets.defined() ? static_cast<int32_t>(args.offsets.dim(0) - 1) : 0,
                      static_cast<int32_t>(y.dim(1)),
                      args.scale,
                      args.dropout};
    with_vectors<kForwardVectors>(instance, [&](auto vectors) {
      launch(context, "embedding_forward_row_per_warp_kernel", embedding_forward_row_per_warp_kernel<T, vectors.value>,
             {(y.dim(0) + kWarps - 1) / kWarps, kThreads}, a);
    });
  });
}

void embedding_backward_gpu(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id,
                            bool accumulate, const Tensor& dtable, const Tensor& dpositions) {
  const int64_t tokens = dy.dim(0);
  if (dy.dim(1) == 0) return;
  const int instance = choose(context, "embedding_backward", kBackwardInstances, dy.dim(1), size_of(dy.dtype()));
  Keys keys{global<const int32_t>(args.ids),
            global<const int32_t>(args.offsets),
            tokens,
            args.offsets.defined() ? static_cast<int32_t>(args.offsets.dim(0) - 1) : 0,
            static_cast<int32_t>(dtable.dim(0)),
            static_cast<int32_t>(pad_id)};
  sum_by_key(context, keys, dy, args.dropout, args.scale, accumulate, dtable, instance);
  if (!dpositions.defined()) return;
  keys.count = static_cast<int32_t>(dpositions.dim(0)), keys.skipped = -1;
  Buffer positions;
  if (args.position_ids.defined()) {
    keys.keys = global<const int32_t>(args.position_ids);
  } else {
    positions = context.allocate({tokens}, DType::kI32, "embedding.positions");
    keys.keys = global<const int32_t>(positions);
    launch(context, "embedding_backward_positions_kernel", embedding_backward_positions_kernel,
           {(tokens + kThreads - 1) / kThreads, kThreads}, global<const int32_t>(args.offsets), keys.sequences, tokens,
           args.position_offset, global<int32_t>(positions));
  }
  sum_by_key(context, keys, dy, args.dropout, 1.0f, accumulate, dpositions, instance);
}

}  // namespace frit
