// Attention on a GPU for short sequences in f32: plain multiply-adds, a warp a row.
#include "frit/ops/attention/short-inl.h"

namespace frit {
namespace {

using namespace attention_short;

constexpr int kWarps = 4, kRowsOfWarp = 4, kBlockRows = kWarps * kRowsOfWarp, kTile = 32;
// Floats from row to row: whole 16 bytes, and neighbouring rows begin four banks apart.
template <int D>
constexpr int kFloatsOf = D + 4;

// Rows [first, first + count) of a head to shared memory, zeros up to `padded`.
template <int D>
FRIT_DEVICE void load_floats(const Shared<float>& to, const Global<const float>& from, int64_t stride, int count,
                             int padded) {
  constexpr int kParts = D / 4;
  for (int i = thread_index(); i < padded * kParts; i += thread_count()) {
    const int r = i / kParts, column = i % kParts * 4;
    Vec<float, 4> v = {{0, 0, 0, 0}};
    if (r < count) v = load_span<4>(from + r * stride, column, D, 0.0f);
    store_vec<4>(to, r * kFloatsOf<D> + column, v);
  }
}
template <int D>
FRIT_DEVICE float dot(const Shared<float>& a, const Shared<float>& b) {
  float sum = 0;
  FRIT_UNROLL
  for (int i = 0; i < D; i += 4) {
    const Vec<float, 4> x = load_vec<4>(a, i), y = load_vec<4>(b, i);
    FRIT_UNROLL
    for (int e = 0; e < 4; ++e) sum = fmaf(x[e], y[e], sum);
  }
  return sum;
}
// sums[n] += the lanes' p times their row of `tile`, column lane + 32 n: every lane holds one row's p.
template <int D>
FRIT_DEVICE void add_rows(float (&sums)[D / 32], float p, const Shared<float>& tile) {
  for (int j = 0; j < kTile; ++j) {
    const float x = shuffle(p, j);
    FRIT_UNROLL
    for (int n = 0; n < D / 32; ++n) sums[n] = fmaf(x, load(tile, j * kFloatsOf<D> + lane() + 32 * n), sums[n]);
  }
}
template <int D>
FRIT_DEVICE void store_sums(const Global<float>& to, const float (&sums)[D / 32], float factor) {
  FRIT_UNROLL
  for (int n = 0; n < D / 32; ++n) store(to, lane() + 32 * n, sums[n] * factor);
}
// Is key first_key + lane kept for a query? Each lane computes eight keys' bits; four lanes' are the tile's.
FRIT_DEVICE bool keep_key(const Dropout& dropout, int64_t row, int first_key, int head) {
  const uint32_t bits = dropout_keep<8>(dropout, row, first_key + lane() % 4 * 8, static_cast<uint32_t>(head));
  return shuffle(bits, lane() / 8) >> (lane() % 8) & 1;
}

// A block takes kBlockRows queries of one sequence and head.
template <int D>
FRIT_KERNEL(128, 2)
attention_forward_short_f32_kernel(Rows<const float> q, Rows<const float> k, Rows<const float> v,
                                   Global<const int32_t> q_offsets, Global<const int32_t> k_offsets, Geometry geometry,
                                   Dropout dropout, Rows<float> out, Global<float> lse) {
  wait_for_previous();
  const int tiles = (geometry.max_q + kBlockRows - 1) / kBlockRows, heads = geometry.heads;
  const int block = static_cast<int>(block_index()), work = geometry.sequences * tiles * heads;
  if (block >= work) {
    const int64_t end = offset_at(q_offsets, geometry.sequences, geometry.q_tokens);
    zero_rows(out, end, geometry.q_tokens, heads * D, block - work);
    minus_infinity_rows(lse, end, geometry.q_tokens, heads, block - work);
    return;
  }
  const int head = block % heads, first = block / heads % tiles * kBlockRows;
  const Sequence at = sequence_at(q_offsets, k_offsets, geometry, block / heads / tiles);
  if (first >= at.lq) return;
  const int rows = least(kBlockRows, at.lq - first), keys = at.visible(first + rows - 1, geometry.causal);
  const bool dropping = dropout.active();
  constexpr int kRow = kFloatsOf<D>;
  const Shared<float> qs = shared_array<float>(0), ks = qs + kBlockRows * kRow, vs = ks + kTile * kRow;
  load_floats<D>(qs, q.at(at.q_first + first, head, D), q.stride, rows, kBlockRows);

  float sums[kRowsOfWarp][D / 32], top[kRowsOfWarp], total[kRowsOfWarp];
  FRIT_UNROLL
  for (int r = 0; r < kRowsOfWarp; ++r) {
    top[r] = -INFINITY, total[r] = 0;
    FRIT_UNROLL
    for (int n = 0; n < D / 32; ++n) sums[r][n] = 0;
  }
  const float scale = geometry.scale * 1.4426950408889634f;
  for (int first_key = 0; first_key < keys; first_key += kTile) {
    if (first_key > 0) barrier();
    load_floats<D>(ks, k.at(at.k_first + first_key, head, D), k.stride, keys - first_key, kTile);
    load_floats<D>(vs, v.at(at.k_first + first_key, head, D), v.stride, keys - first_key, kTile);
    barrier();
    FRIT_UNROLL
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = warp() * kRowsOfWarp + r, visible = at.visible(first + row, geometry.causal);
      if (row >= rows || first_key >= visible) continue;
      const bool seen = first_key + lane() < visible;
      const float s = seen ? dot<D>(qs + row * kRow, ks + lane() * kRow) * scale : -INFINITY;
      const float now = warp_max(s > top[r] ? s : top[r]), base = now == -INFINITY ? 0.0f : now;
      const float shrink = exp2_fast(top[r] - base);
      float p = exp2_fast(s - base);
      top[r] = now;
      total[r] = total[r] * shrink + p;  // of this lane's keys
      FRIT_UNROLL
      for (int n = 0; n < D / 32; ++n) sums[r][n] *= shrink;
      if (dropping && !keep_key(dropout, at.q_first + first + row, first_key, head)) p = 0;
      add_rows<D>(sums[r], p, vs);
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int row = warp() * kRowsOfWarp + r;
    if (row >= rows) continue;
    const float sum = warp_sum(total[r]);
    store_sums<D>(out.at(at.q_first + first + row, head, D), sums[r],
                  sum == 0 ? 0.0f : (dropping ? dropout.scale() : 1.0f) / sum);
    if (lane() == 0)
      store(lse, (at.q_first + first + row) * heads + head,
            sum == 0 ? -INFINITY : (top[r] + log2_fast(sum)) * 0.6931471805599453f);
  }
}

// Blocks of queries, which write dq, come first; blocks of keys, which write dk and dv, behind them.
template <int D>
FRIT_KERNEL(128, 2)
attention_backward_short_f32_kernel(Rows<const float> q, Rows<const float> k, Rows<const float> v,
                                    Global<const int32_t> q_offsets, Global<const int32_t> k_offsets, Geometry geometry,
                                    Dropout dropout, Rows<const float> out, Global<const float> lse,
                                    Rows<const float> dout, Rows<float> dq, Rows<float> dk, Rows<float> dv) {
  wait_for_previous();
  const int heads = geometry.heads, block = static_cast<int>(block_index());
  const int q_tiles = (geometry.max_q + kBlockRows - 1) / kBlockRows,
            k_tiles = (geometry.max_k + kBlockRows - 1) / kBlockRows;
  const int q_work = geometry.sequences * q_tiles * heads, work = q_work + geometry.sequences * k_tiles * heads;
  if (block >= work) {
    const int64_t q_end = offset_at(q_offsets, geometry.sequences, geometry.q_tokens);
    const int64_t k_end = offset_at(k_offsets, geometry.sequences, geometry.k_tokens);
    zero_rows(dq, q_end, geometry.q_tokens, heads * D, block - work);
    zero_rows(dk, k_end, geometry.k_tokens, heads * D, block - work);
    zero_rows(dv, k_end, geometry.k_tokens, heads * D, block - work);
    return;
  }
  const bool of_queries = block < q_work, dropping = dropout.active();
  const int index = of_queries ? block : block - q_work, tiles = of_queries ? q_tiles : k_tiles;
  const int head = index % heads, first = index / heads % tiles * kBlockRows;
  const Sequence at = sequence_at(q_offsets, k_offsets, geometry, index / heads / tiles);
  if (first >= (of_queries ? at.lq : at.lk)) return;
  const int rows = least(kBlockRows, (of_queries ? at.lq : at.lk) - first);
  const float scale = geometry.scale * 1.4426950408889634f, keep_scale = dropping ? dropout.scale() : 1.0f;

  // own: this block's queries and their dout, or its keys and values; tile: of the other side.
  constexpr int kRow = kFloatsOf<D>;
  const Shared<float> own_a = shared_array<float>(0), own_b = own_a + kBlockRows * kRow,
                      tile_a = own_b + kBlockRows * kRow, tile_b = tile_a + kTile * kRow,
                      deltas = tile_b + kTile * kRow;  // kTile
  const auto lse_of = [&](int query) { return load(lse, (at.q_first + query) * heads + head) * 1.4426950408889634f; };
  // dout times out of one query, whose dout is in shared memory; the same in all lanes.
  const auto delta_of = [&](int query, const Shared<float>& gradient) {
    const Global<const float> o = out.at(at.q_first + query, head, D);
    float sum = 0;
    FRIT_UNROLL
    for (int n = 0; n < D / 32; ++n) sum = fmaf(load(o, lane() + 32 * n), load(gradient, lane() + 32 * n), sum);
    return warp_sum(sum);
  };

  float a_sums[kRowsOfWarp][D / 32], b_sums[kRowsOfWarp][D / 32];
  FRIT_UNROLL
  for (int r = 0; r < kRowsOfWarp; ++r) {
    FRIT_UNROLL
    for (int n = 0; n < D / 32; ++n) a_sums[r][n] = b_sums[r][n] = 0;
  }
  if (of_queries) {
    load_floats<D>(own_a, q.at(at.q_first + first, head, D), q.stride, rows, kBlockRows);
    load_floats<D>(own_b, dout.at(at.q_first + first, head, D), dout.stride, rows, kBlockRows);
    const int keys = at.visible(first + rows - 1, geometry.causal);
    for (int first_key = 0; first_key < keys; first_key += kTile) {
      if (first_key > 0) barrier();
      load_floats<D>(tile_a, k.at(at.k_first + first_key, head, D), k.stride, keys - first_key, kTile);
      load_floats<D>(tile_b, v.at(at.k_first + first_key, head, D), v.stride, keys - first_key, kTile);
      barrier();
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const int row = warp() * kRowsOfWarp + r, visible = at.visible(first + row, geometry.causal);
        if (row >= rows || first_key >= visible) continue;
        const float delta = delta_of(first + row, own_b + row * kRow);
        const float s = dot<D>(own_a + row * kRow, tile_a + lane() * kRow);
        float gradient = dot<D>(own_b + row * kRow, tile_b + lane() * kRow);
        if (dropping)
          gradient = keep_key(dropout, at.q_first + first + row, first_key, head) ? gradient * keep_scale : 0.0f;
        const float p = first_key + lane() < visible ? exp2_fast(s * scale - lse_of(first + row)) : 0.0f;
        float sums[D / 32] = {};
        add_rows<D>(sums, p * (gradient - delta), tile_a);
        FRIT_UNROLL
        for (int x = 0; x < kRowsOfWarp; ++x) {
          FRIT_UNROLL
          for (int n = 0; n < D / 32; ++n) a_sums[x][n] += x == r ? sums[n] : 0.0f;
        }
      }
    }
    FRIT_UNROLL
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = warp() * kRowsOfWarp + r;
      if (row < rows) store_sums<D>(dq.at(at.q_first + first + row, head, D), a_sums[r], geometry.scale);
    }
    return;
  }
  load_floats<D>(own_a, k.at(at.k_first + first, head, D), k.stride, rows, kBlockRows);
  load_floats<D>(own_b, v.at(at.k_first + first, head, D), v.stride, rows, kBlockRows);
  const int seen_from =
      geometry.causal && first > at.shift() ? first - at.shift() : 0;  // the first query that sees one
  for (int query = seen_from / kTile * kTile; query < at.lq; query += kTile) {
    barrier();
    load_floats<D>(tile_a, q.at(at.q_first + query, head, D), q.stride, at.lq - query, kTile);
    load_floats<D>(tile_b, dout.at(at.q_first + query, head, D), dout.stride, at.lq - query, kTile);
    barrier();
    for (int i = warp(); i < kTile; i += kWarps) {
      const float delta = query + i < at.lq ? delta_of(query + i, tile_b + i * kRow) : 0.0f;
      if (lane() == 0) store(deltas, i, delta);
    }
    barrier();
    const int mine = query + lane();
    const bool real = mine < at.lq;
    const float delta = load(deltas, lane()), own_lse = real ? lse_of(mine) : 0.0f;
    FRIT_UNROLL
    for (int r = 0; r < kRowsOfWarp; ++r) {
      const int row = warp() * kRowsOfWarp + r, key = first + row;
      if (row >= rows) continue;
      const bool seen = real && key < at.visible(mine, geometry.causal);
      const float s = dot<D>(own_a + row * kRow, tile_a + lane() * kRow);
      float gradient = dot<D>(own_b + row * kRow, tile_b + lane() * kRow);
      float p = seen ? exp2_fast(s * scale - own_lse) : 0.0f, dropped = p;
      if (dropping) {
        const bool keep = dropout_keep<1>(dropout, at.q_first + mine, key, static_cast<uint32_t>(head)) != 0;
        gradient = keep ? gradient * keep_scale : 0.0f, dropped = keep ? p * keep_scale : 0.0f;
      }
      add_rows<D>(a_sums[r], p * (gradient - delta), tile_a);
      add_rows<D>(b_sums[r], dropped, tile_b);
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int row = warp() * kRowsOfWarp + r;
    if (row >= rows) continue;
    store_sums<D>(dk.at(at.k_first + first + row, head, D), a_sums[r], geometry.scale);
    store_sums<D>(dv.at(at.k_first + first + row, head, D), b_sums[r], 1.0f);
  }
}

// The one block shape, so that a forced name that is another's throws.
void choose_block(Context& context, const char* op, const Geometry& geometry, int64_t d) {
  constexpr const char* kNames[] = {"rows16"};
  choose_instance(context, op, fmt::format("q{} k{} D{} f32", geometry.max_q, geometry.max_k, d), kNames, 0,
                  [](int) { return true; });
}

int64_t row_blocks(const Geometry& geometry, int longest) {
  return int64_t{geometry.sequences} * geometry.heads * ((longest + kBlockRows - 1) / kBlockRows);
}

}  // namespace

void attention_short_forward_f32_gpu(Context& context, const AttentionArgs& args, const Tensor& out,
                                     const Tensor& lse) {
  const Geometry geometry = geometry_of(args);
  choose_block(context, "attention_forward", geometry, args.q.dim(2));
  dispatch_width(args.q.dim(2), [&](auto width) {
    launch(context, "attention_forward_short_f32_kernel", attention_forward_short_f32_kernel<width()>,
           {row_blocks(geometry, geometry.max_q) + kAttentionTailBlocks, kWarps * 32,
            (kBlockRows + 2 * kTile) * kFloatsOf<width()> * 4},
           rows_of<const float>(args.q), rows_of<const float>(args.k), rows_of<const float>(args.v),
           global<const int32_t>(args.q_offsets), global<const int32_t>(args.k_offsets), geometry, args.dropout,
           rows_of<float>(out), global<float>(lse));
  });
}

void attention_short_backward_f32_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                      const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const Geometry geometry = geometry_of(args);
  choose_block(context, "attention_backward", geometry, args.q.dim(2));
  dispatch_width(args.q.dim(2), [&](auto width) {
    launch(context, "attention_backward_short_f32_kernel", attention_backward_short_f32_kernel<width()>,
           {row_blocks(geometry, geometry.max_q) + row_blocks(geometry, geometry.max_k) + kAttentionTailBlocks,
            kWarps * 32, (2 * kBlockRows + 2 * kTile) * kFloatsOf<width()> * 4 + kTile * 4},
           rows_of<const float>(args.q), rows_of<const float>(args.k), rows_of<const float>(args.v),
           global<const int32_t>(args.q_offsets), global<const int32_t>(args.k_offsets), geometry, args.dropout,
           rows_of<const float>(out), global<const float>(lse), rows_of<const float>(dout), rows_of<float>(dq),
           rows_of<float>(dk), rows_of<float>(dv));
  });
}

}  // namespace frit
