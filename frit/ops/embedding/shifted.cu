#include "frit/ops/embedding/shifted-inl.h"
#include "frit/ops/embedding/shifted.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize, kVectors = 4, kTokens = 2;

// A warp takes neighbouring tokens: it finds their rows at once, a token a lane, then writes one row after the other.
// The next row is asked for while one is written.
template <typename T>
FRIT_KERNEL(kThreads, 6)
embedding_forward_shifted_kernel(Lookup<T> a) {
  let_next_start();
  wait_for_previous();
  constexpr int kLine = 64;
  const int64_t begin = (block_index() * kWarps + warp()) * kTokens;
  if (begin >= a.tokens) return;
  const FoundTokens found = find_tokens<kTokens>(a, begin);
  const int left = static_cast<int>(a.tokens - begin < kTokens ? a.tokens - begin : kTokens);
  const bool placed = static_cast<bool>(a.positions);
  const uint32_t threshold = dropout_threshold(a.dropout);
  FRIT_UNROLL_BY(1)
  for (int i = 0; i < left; ++i) {
    const int64_t t = begin + i;
    const int32_t word_id = shuffle(found.id, i), place_id = shuffle(found.place, i);
    const int32_t next_id = shuffle(found.id, i + 1);
    if (i + 1 < left && next_id >= 0 && next_id != word_id) {
      FRIT_UNROLL_BY(1)
      for (int column = lane() * kLine; column < a.columns; column += kWarpSize * kLine)
        prefetch(a.table + row_begin(next_id, a.columns), column);
    }
    const int64_t to = row_begin(t, a.columns);
    ShiftedRow row = shifted_row<kVectors>(t, a.columns);
    if (word_id < 0) {
      for (int j = lane(); j < row.vectors; j += kWarpSize)
        store_vec<8, Cache::kStream>(a.y, to + row.head + 8 * j, Vec<T, 8>{});
      const int column = edge_column(row);
      if (column >= 0) store(a.y, to + column, T());
      continue;
    }
    const SpreadRow<T> words = spread_row(a.table, word_id, a.vocabulary, row);
    SpreadRow<T> places{};
    if (placed) places = spread_row(a.positions, place_id, static_cast<int32_t>(a.places), row);
    FRIT_UNROLL_BY(1)
    for (int first = 0; first < row.vectors; first += kShiftedChunk<kVectors>) {
      Vec<T, 8> w[kVectors], p[kVectors];
      load_spread<Cache::kDefault, kVectors>(words, first, w);
      load_spread<Cache::kDefault, kVectors>(places, first, p);
      join_spread<kVectors>(w, words.past);
      join_spread<kVectors>(p, places.past);
      FRIT_UNROLL
      for (int k = 0; k < kVectors; k += 2) {
        const uint32_t r = static_cast<uint32_t>(t),
                       group = opaque(static_cast<uint32_t>(first + k * kWarpSize + lane()));
        const DropoutWords<2> random = dropout_words<2>(a.dropout, {r, r}, {group, group + kWarpSize});
        FRIT_UNROLL
        for (int j = 0; j < 2; ++j) {
          const Vec<float, 8> word = to_float(settled(w[k + j])), place = to_float(settled(p[k + j]));
          Vec<float, 8> sum;
          FRIT_UNROLL
          for (int c = 0; c < 8; ++c) {
            sum[c] = fmaf(word[c], a.scale, place[c]) * a.dropout.scale;
            sum[c] = random.kept(j, c, threshold) ? sum[c] : 0.0f;
          }
          w[k + j] = from_float<T>(sum);
        }
      }
      store_shifted<kVectors>(a.y, to, row, first, w);
    }
    const int column = edge_column(row);
    if (column < 0) continue;
    const T word = load(a.table, row_begin(word_id, a.columns) + column);
    const T place = placed ? load(a.positions, row_begin(place_id, a.columns) + column) : T();
    const float sum = fmaf(widen(word), a.scale, widen(place)) * a.dropout.scale;
    store(a.y, to + column, convert<T>(edge_kept(a.dropout, t, column) ? sum : 0.0f));
  }
}

// Backward's rows; see sums-inl.h. A lane has kVectors vectors of a row at a time.
template <typename T, int kBlocks>
struct ShiftedRows {
  using In = T;
  using Out = T;
  static constexpr int kWordThreads = 640 / kBlocks, kWordBlocks = kBlocks, kPieceBlocks = 5, kVectors = 4;

  FRIT_DEVICE static void write_zeros(const Sums<T, T>& a, int32_t key) {
    const ShiftedRow row = shifted_row<kVectors>(key, a.columns);
    const Global<T> out = a.out + row_begin(key, a.columns);
    FRIT_UNROLL_BY(4)
    for (int j = lane(); j < row.vectors; j += kWarpSize)
      store_vec<8, Cache::kStream>(out, row.head + 8 * j, Vec<T, 8>{});
    const int column = edge_column(row);
    if (column >= 0) store(out, column, T());
  }
  template <bool kPiece>
  FRIT_DEVICE static void sum(const Sums<T, T>& a, int32_t tokens, int count, int32_t key,
                              const Global<float>& partial) {
    ShiftedRow row = shifted_row<kVectors>(kPiece ? 0 : key, a.columns);
    // dy's last row may have its last vector where dy ends.
    if (ballot(lane() < count && tokens == a.keys.tokens - 1))
      spread_row(a.dy, static_cast<int32_t>(a.keys.tokens - 1), static_cast<int32_t>(a.keys.tokens), row);
    const Global<T> out = a.out + row_begin(key, a.columns);
    const uint32_t threshold = dropout_threshold(a.dropout);
    const float factor = a.dropout.scale * (kPiece ? 1.0f : a.scale);
    FRIT_UNROLL_BY(1)
    for (int first = 0; first < row.vectors; first += kShiftedChunk<kVectors>) {
      Vec<float, 8> sum[kVectors] = {};
      FRIT_UNROLL_BY(1)
      for (int i = 0; i < count; ++i) {
        const int32_t t = shuffle(tokens, i);
        const SpreadRow<T> from = spread_row(a.dy, t, static_cast<int32_t>(a.keys.tokens), row);
        Vec<T, 8> v[kVectors];
        load_spread<Cache::kStream, kVectors>(from, first, v);
        join_spread<kVectors>(v, from.past);
        FRIT_UNROLL
        for (int k = 0; k < kVectors; k += 2) {
          const uint32_t r = static_cast<uint32_t>(t),
                         group = opaque(static_cast<uint32_t>(first + k * kWarpSize + lane()));
          const DropoutWords<2> random = dropout_words<2>(a.dropout, {r, r}, {group, group + kWarpSize});
          FRIT_UNROLL
          for (int j = 0; j < 2; ++j) {
            const Vec<float, 8> x = to_float(settled(v[k + j]));
            FRIT_UNROLL
            for (int c = 0; c < 8; ++c)
              if (random.kept(j, c, threshold)) sum[k + j][c] += x[c];
          }
        }
      }
      if constexpr (kPiece) {
        FRIT_UNROLL
        for (int k = 0; k < kVectors; ++k) {
          const int j = first + k * kWarpSize + lane();
          if (j >= row.vectors) continue;
          FRIT_UNROLL
          for (int c = 0; c < 8; c += 4)
            store_vec<4, Cache::kStream>(partial, 8 * j + c,
                                         Vec<float, 4>{sum[k][c] * factor, sum[k][c + 1] * factor,
                                                       sum[k][c + 2] * factor, sum[k][c + 3] * factor});
        }
      } else {
        Vec<T, 8> v[kVectors] = {};
        if (a.accumulate) {
          load_shifted<kVectors>(out, row, first, v);
        }
        FRIT_UNROLL
        for (int k = 0; k < kVectors; ++k) {
          FRIT_UNROLL
          for (int c = 0; c < 8; ++c) sum[k][c] = fmaf(sum[k][c], factor, widen(static_cast<T>(v[k][c])));
          v[k] = from_float<T>(sum[k]);
        }
        if (a.accumulate) warp_barrier();  // neighbours have read what is written now
        store_shifted<kVectors>(a.out, row_begin(key, a.columns), row, first, v);
        if (a.accumulate) warp_barrier();  // and this is written before the next chunk is read
      }
    }
    const int column = edge_column(row);
    float edge = 0;
    FRIT_UNROLL_BY(1)
    for (int i = 0; i < count; ++i) {
      const int32_t t = shuffle(tokens, i);
      const T x = column >= 0 ? load(a.dy, row_begin(t, a.columns) + column) : T();
      edge += edge_kept(a.dropout, t, column) ? widen(x) : 0.0f;
    }
    // A partial row goes on to a multiple of 4 columns.
    const int pad = a.columns + lane() - 24;
    if (kPiece && pad >= a.columns && pad < a.partials_stride) store(partial, pad, 0.0f);
    if (column < 0) return;
    if constexpr (kPiece)
      store(partial, column, edge * factor);
    else
      store(out, column, convert<T>(fmaf(edge, factor, a.accumulate ? widen(load(out, column)) : 0.0f)));
  }
};

template <typename T>
void start(Context& context, const Lookup<T>& a) {
  constexpr int64_t kBlock = kWarps * kTokens;
  launch(context, "embedding_forward_shifted_kernel", embedding_forward_shifted_kernel<T>,
         {(a.tokens + kBlock - 1) / kBlock, kThreads}, a);
}

template <typename T>
void start(Context& context, const Sums<T, T>& a, bool few) {
  if (few)
    simt::launch_sums<ShiftedRows<T, 1>>(context, a);
  else
    simt::launch_sums<ShiftedRows<T, 2>>(context, a);
}

}  // namespace

void start_embedding_forward_shifted(Context& context, const Lookup<bfloat16>& a) {
  start(context, a);
}
void start_embedding_forward_shifted(Context& context, const Lookup<float16>& a) {
  start(context, a);
}
void start_embedding_backward_shifted(Context& context, const Sums<bfloat16, bfloat16>& a, bool few) {
  start(context, a, few);
}
void start_embedding_backward_shifted(Context& context, const Sums<float16, float16>& a, bool few) {
  start(context, a, few);
}

}  // namespace frit
