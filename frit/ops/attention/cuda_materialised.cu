// Attention as the papers have it, on a GPU: heads and sequences copied apart, products for the scores and with the
// values, softmax between them. Any head width, any length.
#include "frit/ops/attention/short-inl.h"
#include "frit/ops/gemm/gemm.h"

namespace frit {
namespace {

using namespace attention_short;

constexpr int kThreads = 256, kRowThreads = 128;
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// A chunk of pairs (sequence, head), counted head by head of the first sequence, then of the next; and the rows
// [count, rows, ...] that are kept of them: each pair has as many as the longest sequence.
struct Pairs {
  int64_t first = 0, count = 0;
  int rows = 0;
  bool keys = false;  // rows are keys, not queries
};

// One row of one pair.
struct PairRow {
  Sequence at;
  int head, index;  // within the sequence
  int length;       // rows from there on are filling
  int64_t token;    // of the packed batch, if index < length
};
FRIT_DEVICE PairRow pair_row(const Global<const int32_t>& q_offsets, const Global<const int32_t>& k_offsets,
                             const Geometry& geometry, const Pairs& pairs, int64_t row) {
  PairRow r;
  const int64_t own = row / pairs.rows, pair = pairs.first + own, sequence = pair / geometry.heads;
  r.index = static_cast<int>(row - own * pairs.rows);
  r.head = static_cast<int>(pair - sequence * geometry.heads);
  r.at = sequence_at(q_offsets, k_offsets, geometry, static_cast<int>(sequence));
  r.length = pairs.keys ? r.at.lk : r.at.lq;
  r.token = (pairs.keys ? r.at.k_first : r.at.q_first) + r.index;
  return r;
}

// Where a thread stands that takes 16 bytes of a row of width d.
template <typename T>
struct Piece {
  int64_t row;
  int column;
  FRIT_DEVICE explicit Piece(int d) {
    const int pieces = (d + kVecOf<T> - 1) / kVecOf<T>;
    const int64_t i = block_index() * thread_count() + thread_index();
    row = i / pieces;
    column = static_cast<int>(i - row * pieces) * kVecOf<T>;
  }
};

// to[pair][row][d] = from[token][head][d]; zeros where the sequence has ended.
template <typename T>
FRIT_KERNEL(kThreads, 4)
attention_gather_pairs_kernel(Rows<const T> from, Global<const int32_t> q_offsets, Global<const int32_t> k_offsets,
                              Geometry geometry, Pairs pairs, int d, Global<T> to) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const Piece<T> piece(d);
  if (piece.row >= pairs.count * pairs.rows) return;
  const PairRow r = pair_row(q_offsets, k_offsets, geometry, pairs, piece.row);
  Vec<T, N> v{};
  if (r.index < r.length) v = load_span<N>(from.at(r.token, r.head, d), piece.column, d, T());
  store_span<N>(to + piece.row * d, piece.column, d, v);
}

// to[token][head][d] = from[pair][row][d].
template <typename T>
FRIT_KERNEL(kThreads, 4)
attention_scatter_pairs_kernel(Global<const T> from, Global<const int32_t> q_offsets, Global<const int32_t> k_offsets,
                               Geometry geometry, Pairs pairs, int d, Rows<T> to) {
  constexpr int N = kVecOf<T>;
  wait_for_previous();
  const Piece<T> piece(d);
  if (piece.row >= pairs.count * pairs.rows) return;
  const PairRow r = pair_row(q_offsets, k_offsets, geometry, pairs, piece.row);
  if (r.index >= r.length) return;
  const Vec<T, N> v = load_span<N>(from + piece.row * d, piece.column, d, T());
  store_span<N>(to.at(r.token, r.head, d), piece.column, d, v);
}

// The 8 columns from j on of a row of scores, which are aligned.
FRIT_DEVICE void load_eight(float (&x)[8], const Global<const float>& row, int j) {
  FRIT_UNROLL
  for (int half = 0; half < 8; half += 4) {
    const Vec<float, 4> v = load_vec<4>(row, j + half);
    FRIT_UNROLL
    for (int e = 0; e < 4; ++e) x[half + e] = v[e];
  }
}
template <typename T>
FRIT_DEVICE void store_eight(const Global<T>& row, int j, const float (&x)[8]) {
  constexpr int N = kVecOf<T>;
  FRIT_UNROLL
  for (int part = 0; part < 8; part += N) {
    Vec<float, N> v;
    FRIT_UNROLL
    for (int e = 0; e < N; ++e) v[e] = x[part + e];
    store_vec<N>(row, j + part, from_float<T>(v));
  }
}
FRIT_DEVICE uint32_t kept_eight(const Dropout& dropout, const PairRow& r, int j) {
  return dropout_keep_group(dropout, static_cast<uint32_t>(r.token), static_cast<uint32_t>(j) / 8,
                            static_cast<uint32_t>(r.head));
}

// p = dropout(softmax(scale * scores)) over the keys that a query sees, 0 elsewhere; lse of the packed row. A warp
// takes a row of `cols` columns and reads it three times. p may be the scores themselves: a lane reads what it writes
// before.
template <typename T>
FRIT_KERNEL(kRowThreads, 8)
attention_forward_materialised_kernel(Global<const float> scores, Global<const int32_t> q_offsets,
                                      Global<const int32_t> k_offsets, Geometry geometry, Pairs pairs, int cols,
                                      Dropout dropout, Global<T> p, Global<float> lse) {
  wait_for_previous();
  const int64_t row = block_index() * warp_count() + warp();
  if (row >= pairs.count * pairs.rows) return;
  const PairRow r = pair_row(q_offsets, k_offsets, geometry, pairs, row);
  const int visible = r.index < r.length ? r.at.visible(r.index, geometry.causal) : 0;
  const Global<const float> x_row = scores + row * cols;
  const Global<T> p_row = p + row * cols;
  const float scale = geometry.scale * kLog2E;  // scores in units of log 2
  float top = -INFINITY, x[8];
  for (int j = lane() * 8; j < visible; j += 256) {
    load_eight(x, x_row, j);
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e)
      if (j + e < visible && x[e] * scale > top) top = x[e] * scale;
  }
  top = warp_max(top);
  const float base = top == -INFINITY ? 0.0f : top;
  float sum = 0;
  for (int j = lane() * 8; j < visible; j += 256) {
    load_eight(x, x_row, j);
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e)
      if (j + e < visible) sum += exp2_fast(fmaf(x[e], scale, -base));
  }
  sum = warp_sum(sum);
  const bool dropping = dropout.active();
  const float factor = sum == 0 ? 0.0f : (dropping ? dropout.scale() : 1.0f) / sum;
  for (int j = lane() * 8; j < cols; j += 256) {
    load_eight(x, x_row, j);
    const uint32_t kept = dropping && j < visible ? kept_eight(dropout, r, j) : 0xffu;
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e)
      x[e] = j + e < visible && kept >> e & 1 ? exp2_fast(fmaf(x[e], scale, -base)) * factor : 0.0f;
    store_eight(p_row, j, x);
  }
  if (lane() == 0 && r.index < r.length)
    store(lse, r.token * geometry.heads + r.head, sum == 0 ? -INFINITY : (base + log2_fast(sum)) * kLn2);
}

// From scores, lse and the gradient dp of the dropped probabilities: p as forward had it, and the scores' gradient ds,
// the scale in it. A warp takes a row and reads it twice. p may be the scores, ds may be dp.
template <typename T>
FRIT_KERNEL(kRowThreads, 6)
attention_backward_materialised_kernel(Global<const float> scores, Global<const float> dp,
                                       Global<const int32_t> q_offsets, Global<const int32_t> k_offsets,
                                       Geometry geometry, Pairs pairs, int cols, Dropout dropout,
                                       Global<const float> lse, Global<T> p, Global<T> ds) {
  wait_for_previous();
  const int64_t row = block_index() * warp_count() + warp();
  if (row >= pairs.count * pairs.rows) return;
  const PairRow r = pair_row(q_offsets, k_offsets, geometry, pairs, row);
  int visible = r.index < r.length ? r.at.visible(r.index, geometry.causal) : 0;
  const float log_sum = visible > 0 ? load(lse, r.token * geometry.heads + r.head) * kLog2E : 0.0f;
  if (log_sum == -INFINITY) visible = 0;
  const Global<const float> x_row = scores + row * cols, dp_row = dp + row * cols;
  const Global<T> p_row = p + row * cols, ds_row = ds + row * cols;
  const float scale = geometry.scale * kLog2E;
  const bool dropping = dropout.active();
  const float keep_scale = dropping ? dropout.scale() : 1.0f;
  // x becomes the probabilities, g the gradient behind dropout.
  const auto load_both = [&](float(&x)[8], float(&g)[8], int j) {
    load_eight(x, x_row, j), load_eight(g, dp_row, j);
    const uint32_t kept = dropping && j < visible ? kept_eight(dropout, r, j) : 0xffu;
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e) {
      x[e] = j + e < visible ? exp2_fast(fmaf(x[e], scale, -log_sum)) : 0.0f;
      g[e] = j + e < visible && kept >> e & 1 ? g[e] * keep_scale : 0.0f;
    }
    return kept;
  };
  float x[8], g[8], sum = 0;
  for (int j = lane() * 8; j < visible; j += 256) {
    load_both(x, g, j);
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e) sum = fmaf(x[e], g[e], sum);
  }
  sum = warp_sum(sum);
  for (int j = lane() * 8; j < cols; j += 256) {
    const uint32_t kept = load_both(x, g, j);
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e) g[e] = geometry.scale * x[e] * (g[e] - sum);
    store_eight(ds_row, j, g);
    FRIT_UNROLL
    for (int e = 0; e < 8; ++e) x[e] = kept >> e & 1 ? x[e] * keep_scale : 0.0f;
    store_eight(p_row, j, x);
  }
}

// Zeros to rows [end, tokens) of what is given, -inf to their lse; any width.
template <typename T>
FRIT_KERNEL(kThreads, 4)
attention_zero_tail_kernel(Global<const int32_t> q_offsets, Global<const int32_t> k_offsets, Geometry geometry,
                           int width, Rows<T> of_queries, Rows<T> of_keys, Rows<T> of_keys_too, Global<float> lse) {
  wait_for_previous();
  const int64_t me = block_index() * thread_count() + thread_index(), step = block_count() * thread_count();
  const auto zero = [&](const Rows<T>& to, const Global<const int32_t>& offsets, int64_t tokens) {
    if (!to.first) return;
    const int64_t end = offset_at(offsets, geometry.sequences, tokens);
    for (int64_t i = me; i < (tokens - end) * width; i += step)
      store(to.first, (end + i / width) * to.stride + i % width, convert<T>(0.0f));
  };
  zero(of_queries, q_offsets, geometry.q_tokens);
  zero(of_keys, k_offsets, geometry.k_tokens);
  zero(of_keys_too, k_offsets, geometry.k_tokens);
  if (!lse) return;
  const int64_t end = offset_at(q_offsets, geometry.sequences, geometry.q_tokens);
  for (int64_t i = end * geometry.heads + me; i < geometry.q_tokens * geometry.heads; i += step)
    store(lse, i, -INFINITY);
}

// How a call is cut, by the shapes alone. Scratch goes by tokens and the longest sequences, whatever their number
// (there are no more than tokens), and never shrinks as these grow: a plan made for the longest has room for all
// others.
struct Sizes {
  int64_t pairs, q_rows, k_rows;                // rows of a pair
  int64_t chunk;                                // pairs at a time
  int64_t q_scratch, k_scratch, score_scratch;  // rows, rows, scores

  Sizes(int64_t sequences, int64_t heads, int64_t tokens, int64_t max_q, int64_t max_k, int64_t most_scores) {
    // Whole 16 rows: scores and probabilities then have aligned rows, and products fewer shapes.
    const auto whole = [](int64_t longest) { return std::max<int64_t>(1, (longest + 15) / 16) * 16; };
    const int64_t bound = std::max<int64_t>(heads * tokens, 1);
    pairs = sequences * heads, q_rows = whole(max_q), k_rows = whole(max_k);
    const int64_t scores = q_rows * k_rows;
    const int64_t most = std::min({most_scores / scores, kMaterialisedRows / q_rows, kMaterialisedRows / k_rows});
    chunk = std::clamp<int64_t>(most, 1, bound);
    q_scratch = std::min(std::max(kMaterialisedRows, q_rows), bound * q_rows);
    k_scratch = std::min(std::max(kMaterialisedRows, k_rows), bound * k_rows);
    score_scratch = std::min(std::max(most_scores, scores), bound * scores);
  }
};

// What both directions do to a chunk of pairs.
template <typename T>
class Chunks {
 public:
  Chunks(Context& context, const AttentionArgs& args, int64_t most_scores)
      : geometry(geometry_of(args)),
        sizes(geometry.sequences, geometry.heads, std::max(geometry.q_tokens, geometry.k_tokens), geometry.max_q,
              geometry.max_k, most_scores),
        context_(context),
        args_(args),
        d_(args.q.dim(2)),
        dtype_(args.q.dtype()) {}

  Buffer q_scratch(const char* name) const { return context_.allocate({sizes.q_scratch * d_}, dtype_, name); }
  Buffer k_scratch(const char* name) const { return context_.allocate({sizes.k_scratch * d_}, dtype_, name); }
  Buffer scores(const char* name) const { return context_.allocate({sizes.score_scratch}, DType::kF32, name); }
  // In q's dtype: `scores` itself, or `own`, which is made.
  Tensor narrow(const Buffer& scores, Buffer& own, const char* name) const {
    if (dtype_ == DType::kF32) return scores;
    own = context_.allocate({sizes.score_scratch}, dtype_, name);
    return own;
  }

  // Calls body(queries, keys) for each chunk.
  template <typename Body>
  void each(Body&& body) const {
    for (int64_t first = 0; first < sizes.pairs; first += sizes.chunk) {
      Pairs queries{first, std::min(sizes.chunk, sizes.pairs - first), static_cast<int>(sizes.q_rows), false};
      Pairs keys = queries;
      keys.rows = static_cast<int>(sizes.k_rows), keys.keys = true;
      body(queries, keys);
    }
  }
  // The front of a scratch tensor as [pairs, rows, cols].
  Tensor view(const Tensor& scratch, const Pairs& pairs, int64_t cols) const {
    return scratch.rows(0, pairs.count * pairs.rows * cols).reshape({pairs.count, pairs.rows, cols});
  }
  Tensor view(const Tensor& scratch, const Pairs& pairs) const { return view(scratch, pairs, d_); }
  Tensor view_scores(const Tensor& scratch, const Pairs& queries) const { return view(scratch, queries, sizes.k_rows); }

  void gather(const Tensor& from, const Pairs& pairs, const Tensor& to) const {
    launch(context_, "attention_gather_pairs_kernel", attention_gather_pairs_kernel<T>, pieces(pairs),
           rows_of<const T>(from), global<const int32_t>(args_.q_offsets), global<const int32_t>(args_.k_offsets),
           geometry, pairs, static_cast<int>(d_), global<T>(to));
  }
  void scatter(const Tensor& from, const Pairs& pairs, const Tensor& to) const {
    launch(context_, "attention_scatter_pairs_kernel", attention_scatter_pairs_kernel<T>, pieces(pairs),
           global<const T>(from), global<const int32_t>(args_.q_offsets), global<const int32_t>(args_.k_offsets),
           geometry, pairs, static_cast<int>(d_), rows_of<T>(to));
  }
  // c = op(a) * op(b) of every pair.
  void multiply(const Tensor& a, bool transpose_a, const Tensor& b, bool transpose_b, const Tensor& c) const {
    gemm(context_, {.a = a,
                    .b = b,
                    .c = c,
                    .transpose_a = transpose_a,
                    .transpose_b = transpose_b,
                    .accumulate = false,
                    .bias = {}});
  }
  Launch rows(const Pairs& queries) const {
    constexpr int kWarps = kRowThreads / kWarpSize;
    return {(queries.count * queries.rows + kWarps - 1) / kWarps, kRowThreads, 0};
  }

  const Geometry geometry;
  const Sizes sizes;

 private:
  Launch pieces(const Pairs& pairs) const {
    const int64_t threads = pairs.count * pairs.rows * ((d_ + kVecOf<T> - 1) / kVecOf<T>);
    return {(threads + kThreads - 1) / kThreads, kThreads, 0};
  }
  Context& context_;
  const AttentionArgs& args_;
  const int64_t d_;
  const DType dtype_;
};

}  // namespace

void attention_zero_tail_gpu(Context& context, const AttentionArgs& args, const Tensor& of_queries,
                             const Tensor& of_keys, const Tensor& of_keys_too, const Tensor& lse) {
  dispatch_float(args.q.dtype(), [&](auto t) {
    using T = decltype(t);
    const auto rows_or_none = [](const Tensor& of) { return of.defined() ? rows_of<T>(of) : Rows<T>(); };
    launch(context, "attention_zero_tail_kernel", attention_zero_tail_kernel<T>, {kAttentionTailBlocks, kThreads, 0},
           global<const int32_t>(args.q_offsets), global<const int32_t>(args.k_offsets), geometry_of(args),
           static_cast<int>(args.q.dim(1) * args.q.dim(2)), rows_or_none(of_queries), rows_or_none(of_keys),
           rows_or_none(of_keys_too), global<float>(lse));
  });
}

int64_t attention_materialised_scratch(int64_t heads, int64_t width, int64_t tokens, int64_t max_q, int64_t max_k,
                                       DType dtype, bool backward, int64_t most_scores) {
  const Sizes s(1, heads, tokens, max_q, max_k, most_scores);
  const auto bytes = [](int64_t elements, DType type) {
    return static_cast<int64_t>(align_up(static_cast<size_t>(elements * size_of(type))));
  };
  const int64_t copies = bytes(s.q_scratch * width, dtype) * (backward ? 2 : 1) + 2 * bytes(s.k_scratch * width, dtype);
  const int64_t each = bytes(s.score_scratch, DType::kF32) + (dtype == DType::kF32 ? 0 : bytes(s.score_scratch, dtype));
  return copies + each * (backward ? 2 : 1);
}

void attention_materialised_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out,
                                        const Tensor& lse, int64_t most_scores) {
  if (out.numel() == 0) return;
  dispatch_float(args.q.dtype(), [&](auto t) {
    using T = decltype(t);
    const Chunks<T> chunks(context, args, most_scores);
    Buffer q = chunks.q_scratch("attention.q"), k = chunks.k_scratch("attention.k"),
           v = chunks.k_scratch("attention.v"), scores = chunks.scores("attention.scores"), own;
    const Tensor p = chunks.narrow(scores, own, "attention.probabilities");
    chunks.each([&](const Pairs& queries, const Pairs& keys) {
      const Tensor qs = chunks.view(q, queries), ks = chunks.view(k, keys), vs = chunks.view(v, keys),
                   ss = chunks.view_scores(scores, queries), ps = chunks.view_scores(p, queries);
      chunks.gather(args.q, queries, qs), chunks.gather(args.k, keys, ks), chunks.gather(args.v, keys, vs);
      chunks.multiply(qs, false, ks, true, ss);
      launch(context, "attention_forward_materialised_kernel", attention_forward_materialised_kernel<T>,
             chunks.rows(queries), global<const float>(ss), global<const int32_t>(args.q_offsets),
             global<const int32_t>(args.k_offsets), chunks.geometry, queries, static_cast<int>(chunks.sizes.k_rows),
             args.dropout, global<T>(ps), global<float>(lse));
      chunks.multiply(ps, false, vs, false, qs);  // in the place of q, which has served
      chunks.scatter(qs, queries, out);
    });
  });
  attention_zero_tail_gpu(context, args, out, {}, {}, lse);
}

void attention_materialised_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& lse,
                                         const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                                         int64_t most_scores) {
  if (dq.numel() == 0 && dk.numel() == 0) return;
  dispatch_float(args.q.dtype(), [&](auto t) {
    using T = decltype(t);
    const Chunks<T> chunks(context, args, most_scores);
    Buffer q = chunks.q_scratch("attention.q"), k = chunks.k_scratch("attention.k"),
           v = chunks.k_scratch("attention.v"), g = chunks.q_scratch("attention.dout"),
           scores = chunks.scores("attention.scores"), dps = chunks.scores("attention.dp"), own_p, own_ds;
    const Tensor p = chunks.narrow(scores, own_p, "attention.probabilities"),
                 ds = chunks.narrow(dps, own_ds, "attention.ds");
    chunks.each([&](const Pairs& queries, const Pairs& keys) {
      const Tensor qs = chunks.view(q, queries), ks = chunks.view(k, keys), vs = chunks.view(v, keys),
                   gs = chunks.view(g, queries), ss = chunks.view_scores(scores, queries),
                   dp = chunks.view_scores(dps, queries), ps = chunks.view_scores(p, queries),
                   dss = chunks.view_scores(ds, queries);
      chunks.gather(args.q, queries, qs), chunks.gather(args.k, keys, ks), chunks.gather(args.v, keys, vs);
      chunks.gather(dout, queries, gs);
      chunks.multiply(qs, false, ks, true, ss);
      chunks.multiply(gs, false, vs, true, dp);
      launch(context, "attention_backward_materialised_kernel", attention_backward_materialised_kernel<T>,
             chunks.rows(queries), global<const float>(ss), global<const float>(dp),
             global<const int32_t>(args.q_offsets), global<const int32_t>(args.k_offsets), chunks.geometry, queries,
             static_cast<int>(chunks.sizes.k_rows), args.dropout, global<const float>(lse), global<T>(ps),
             global<T>(dss));
      // Each gradient takes the place of an operand that has served.
      chunks.multiply(ps, true, gs, false, vs);    // dv
      chunks.multiply(dss, false, ks, false, gs);  // dq
      chunks.multiply(dss, true, qs, false, ks);   // dk
      chunks.scatter(vs, keys, dv), chunks.scatter(gs, queries, dq), chunks.scatter(ks, keys, dk);
    });
  });
  attention_zero_tail_gpu(context, args, dq, dk, dv, {});
}

}  // namespace frit
