#include "frit/ops/embedding/shifted-inl.h"
#include "frit/ops/embedding/shifted.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize, kVectors = 4;

// A warp takes neighbouring tokens: it finds their rows at once, a token a lane, then writes one row after the other.
// The next row is asked for while one is written.
template <typename T>
FRIT_KERNEL(kThreads, 5)
embedding_forward_shifted_kernel(Lookup<T> a) {
  let_next_start();
  wait_for_previous();
  constexpr int kTokens = static_cast<int>(kEmbeddingTokens), kLine = 64;
  const int64_t begin = (block_index() * kWarps + warp()) * kTokens;
  if (begin >= a.tokens) return;
  const FoundTokens found = find_tokens<kTokens>(a, begin);
  const int left = static_cast<int>(a.tokens - begin < kTokens ? a.tokens - begin : kTokens);
  const bool placed = static_cast<bool>(a.positions);
  FRIT_UNROLL_BY(1)
  for (int i = 0; i < left; ++i) {
    const int64_t t = begin + i;
    const int32_t word_id = shuffle(found.id, i), place_id = shuffle(found.place, i);
    const int32_t next_id = shuffle(found.id, i + 1);
    if (i + 1 < left && next_id >= 0) {
      FRIT_UNROLL_BY(1)
      for (int column = lane() * kLine; column < a.columns; column += kWarpSize * kLine)
        prefetch(a.table + next_id * a.table_stride, column);
    }
    const Global<T> y = a.y + t * a.y_stride;
    ShiftedRow row = shifted_row(t, a.columns);
    if (word_id < 0) {
      for (int j = lane(); j < row.vectors; j += kWarpSize)
        store_vec<8, Cache::kStream>(y, row.head + 8 * j, Vec<T, 8>{});
      const int column = edge_column(row);
      if (column >= 0) store(y, column, T());
      continue;
    }
    const SpreadRow<T> words = spread_row(a.table, word_id, a.vocabulary, row);
    SpreadRow<T> places{};
    if (placed) places = spread_row(a.positions, place_id, a.places, row);
    const int column = edge_column(row);
    T edge_word{}, edge_place{};
    if (column >= 0) {
      edge_word = load(words.begin, column);
      if (placed) edge_place = load(places.begin, column);
    }
    KeptRows edges;
    const Global<T> to = y + (row.head + 8 * lane());
    FRIT_UNROLL_BY(1)
    for (int first = 0; first < row.vectors || first == 0; first += kWarpSize * kVectors) {
      const int there = row.vectors - first - lane();
      Spread<T> w[kVectors] = {};
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k)
        if (k * kWarpSize < there) w[k] = load_spread<Cache::kDefault>(words, first + k * kWarpSize);
      if (first == 0) edges = edge_groups(a.dropout, t, column, kVectors, kVectors);
      KeptRows kept =
          shifted_groups<kVectors>(a.dropout, t, row.head, first, edges, 24 + first / (kWarpSize * kVectors));
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = first + k * kWarpSize;
        Spread<T> p = {};
        if (placed && k * kWarpSize < there) p = load_spread<Cache::kDefault>(places, j);
        const Vec<float, 8> word = to_float(join_spread(w[k], words.past));
        const Vec<float, 8> place = to_float(join_spread(p, places.past));
        Vec<float, 8> sum;
        FRIT_UNROLL
        for (int c = 0; c < 8; ++c) sum[c] = fmaf(word[c], a.scale, place[c]) * a.dropout.scale;
        Vec<T, 8> out = from_float<T>(sum);
        kept.drop(out);
        kept.next();
        if (k * kWarpSize < there) store_vec<8, Cache::kStream>(to, 8 * j, out);
      }
    }
    const float sum = fmaf(widen(edge_word), a.scale, widen(edge_place)) * a.dropout.scale;
    if (column >= 0) store(y, column, convert<T>(edge_kept(edges, column) ? sum : 0.0f));
  }
}

// Backward's rows; see sums-inl.h. A lane has kVectors vectors of a row at a time.
template <typename T>
struct ShiftedRows {
  using In = T;
  using Out = T;
  static constexpr int kWordThreads = 384, kWordBlocks = 2, kPieceBlocks = 5, kVectors = 2;

  FRIT_DEVICE static void write_zeros(const Sums<T, T>& a, int32_t key) {
    const ShiftedRow row = shifted_row(key, a.columns);
    const Global<T> out = a.out + key * a.out_stride;
    FRIT_UNROLL_BY(4)
    for (int j = lane(); j < row.vectors; j += kWarpSize)
      store_vec<8, Cache::kStream>(out, row.head + 8 * j, Vec<T, 8>{});
    const int column = edge_column(row);
    if (column >= 0) store(out, column, T());
  }
  template <bool kPiece>
  FRIT_DEVICE static void sum(const Sums<T, T>& a, int32_t tokens, int count, int32_t key,
                              const Global<float>& partial) {
    ShiftedRow row = kPiece ? ShiftedRow{a.columns, 0, a.columns / 8} : shifted_row(key, a.columns);
    // dy's last row may have its last vector where dy ends.
    if (ballot(lane() < count && tokens == a.keys.tokens - 1)) spread_row(a.dy, a.keys.tokens - 1, a.keys.tokens, row);
    const int column = edge_column(row);
    const Global<T> out = a.out + key * a.out_stride;
    const float factor = a.dropout.scale * (kPiece ? 1.0f : a.scale);
    FRIT_UNROLL_BY(1)
    for (int first = 0; first < row.vectors || first == 0; first += kWarpSize * kVectors) {
      const int there = row.vectors - first - lane();
      Vec<float, 8> sum[kVectors] = {};
      float edge = 0;
      FRIT_UNROLL_BY(1)
      for (int i = 0; i < count; ++i) {
        const int32_t t = shuffle(tokens, i);
        ShiftedRow same = row;
        const SpreadRow<T> from = spread_row(a.dy, t, a.keys.tokens, same);
        Spread<T> v[kVectors] = {};
        FRIT_UNROLL
        for (int k = 0; k < kVectors; ++k)
          if (k * kWarpSize < there) v[k] = load_spread<Cache::kStream>(from, first + k * kWarpSize);
        const T at_edge = first == 0 && column >= 0 ? load(from.begin, column) : T();
        const KeptRows edges = edge_groups(a.dropout, t, column, first / 32 + kVectors);
        KeptRows kept = shifted_groups<kVectors>(a.dropout, t, row.head, first, edges, 24);
        FRIT_UNROLL
        for (int k = 0; k < kVectors; ++k) {
          Vec<T, 8> x = join_spread(v[k], from.past);
          kept.drop(x);
          kept.next();
          FRIT_UNROLL
          for (int c = 0; c < 8; ++c) sum[k][c] += widen(static_cast<T>(x[c]));
        }
        edge += edge_kept(edges, column) ? widen(at_edge) : 0.0f;
      }
      FRIT_UNROLL
      for (int k = 0; k < kVectors; ++k) {
        const int j = first + k * kWarpSize + lane();
        if (j >= row.vectors) continue;
        Vec<T, 8> before{};
        if (!kPiece && a.accumulate) before = load_vec<8>(out, row.head + 8 * j);
        FRIT_UNROLL
        for (int c = 0; c < 8; ++c) sum[k][c] = fmaf(sum[k][c], factor, widen(static_cast<T>(before[c])));
        if constexpr (kPiece) {
          store_vec<4, Cache::kStream>(partial, 8 * j, Vec<float, 4>{sum[k][0], sum[k][1], sum[k][2], sum[k][3]});
          store_vec<4, Cache::kStream>(partial, 8 * j + 4, Vec<float, 4>{sum[k][4], sum[k][5], sum[k][6], sum[k][7]});
        } else {
          store_vec<8, Cache::kStream>(out, row.head + 8 * j, from_float<T>(sum[k]));
        }
      }
      // A partial row goes on to a multiple of 4 columns.
      const int pad = a.columns + lane() - 24;
      if (kPiece && first == 0 && pad >= a.columns && pad < a.partials_stride) store(partial, pad, 0.0f);
      if (first > 0 || column < 0) continue;
      if constexpr (kPiece)
        store(partial, column, edge * factor);
      else
        store(out, column, convert<T>(fmaf(edge, factor, a.accumulate ? widen(load(out, column)) : 0.0f)));
    }
  }
};

template <typename T>
void start(Context& context, const Lookup<T>& a) {
  constexpr int64_t kBlock = kWarps * kEmbeddingTokens;
  launch(context, "embedding_forward_shifted_kernel", embedding_forward_shifted_kernel<T>,
         {(a.tokens + kBlock - 1) / kBlock, kThreads}, a);
}

}  // namespace

void start_embedding_forward_shifted(Context& context, const Lookup<bfloat16>& a) {
  start(context, a);
}
void start_embedding_forward_shifted(Context& context, const Lookup<float16>& a) {
  start(context, a);
}
void start_embedding_backward_shifted(Context& context, const Sums<bfloat16, bfloat16>& a) {
  simt::launch_sums<ShiftedRows<bfloat16>>(context, a);
}
void start_embedding_backward_shifted(Context& context, const Sums<float16, float16>& a) {
  simt::launch_sums<ShiftedRows<float16>>(context, a);
}

}  // namespace frit
