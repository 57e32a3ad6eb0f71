// Attention's backward on a GPU for short sequences, f16 and bf16.
#include "frit/ops/attention/short-inl.h"

namespace frit {
namespace {

using namespace attention_short;

// What of a block's shared memory holds what, in bytes. Full areas hold all keys (or queries), tiles what one pass
// takes.
struct Areas {
  bool resident;       // q, k, v and dout fit together: the tiles are whole areas, and one pass is all
  int pass;            // queries or keys of a tile
  int64_t full[2];     // k and v; not resident: later q and dout
  int64_t tile[2];     // q and dout; not resident: later k and v
  int64_t lse, delta;  // f32, one a query
  int64_t mask;        // dropout bits
  int64_t slice[2];    // probabilities, and gradients of scores, of all queries and kSlice keys (D < 128)
  int64_t bytes;       // the whole
};
// Keys whose probabilities a block has in shared memory, and elements from query to query there.
constexpr int kSlice = 32, kSliceRow = kSlice + 8;

Areas areas_of(int max_q, int max_k, int warps, bool dropping, int64_t d, bool resident) {
  const int64_t row_bytes = (d + 8) * 2, slice_bytes = d < 128 ? round_up(max_q, 32) * kSliceRow * int64_t{2} : 0;
  const int q_rows = round_up(max_q, 32), k_rows = round_up(max_k, 32);
  Areas a;
  a.resident = resident;
  a.pass = resident ? (q_rows > k_rows ? q_rows : k_rows) : warps * 16;
  const int full_rows = resident || k_rows > q_rows ? k_rows : q_rows, tile_rows = resident ? q_rows : a.pass;
  a.full[0] = 0, a.full[1] = full_rows * row_bytes;
  a.tile[0] = 2 * full_rows * row_bytes, a.tile[1] = a.tile[0] + tile_rows * row_bytes;
  a.lse = a.tile[1] + tile_rows * row_bytes, a.delta = a.lse + q_rows * int64_t{4};
  a.mask = a.delta + q_rows * int64_t{4};
  a.slice[0] = a.mask + (dropping ? q_rows * kMaskRow * int64_t{4} : 0), a.slice[1] = a.slice[0] + slice_bytes;
  a.bytes = a.slice[1] + slice_bytes;
  return a;
}

// Eight 16-bit elements as they travel.
struct Eight {
  uint32_t v[4];

  template <typename T>
  FRIT_DEVICE float at(int i) const {
    return widen(T::from_bits(static_cast<uint16_t>(v[i / 2] >> (16 * (i % 2)))));
  }
};

// Copies rows of dout to shared memory and writes each one's product with out to delta; zeros from `rows` to `padded`.
// `together` rows a thread are under way at once, the first of them while meanwhile() runs. read(row, column) gives
// eight elements.
template <typename T, int D, int together, typename Dout, typename Out, typename Meanwhile>
FRIT_DEVICE void load_dout_by(const Shared<T>& to, const Shared<float>& delta, Dout&& dout, Out&& out, int rows,
                              int padded, Meanwhile&& meanwhile) {
  constexpr int kParts = D / 8;
  const int part = thread_index() % kParts, own = thread_index() / kParts, step = thread_count() / kParts;
  for (int base = 0; base < padded; base += together * step) {
    Eight a[together], b[together];
    FRIT_UNROLL
    for (int u = 0; u < together; ++u) {
      const int r = base + own + u * step;
      a[u] = b[u] = {{0, 0, 0, 0}};
      if (r < rows) a[u] = dout(r, part * 8), b[u] = out(r, part * 8);
    }
    if (base == 0) meanwhile();
    FRIT_UNROLL
    for (int u = 0; u < together; ++u) {
      const int r = base + own + u * step;
      float sum = 0;
      FRIT_UNROLL
      for (int i = 0; i < 8; ++i) sum = fmaf(a[u].template at<T>(i), b[u].template at<T>(i), sum);
      sum = warp_sum<kParts>(sum);
      if (r < padded) {
        store_vec<8>(to, r * kRowOf<D> + part * 8, std::bit_cast<Vec<T, 8>>(a[u]));
        if (part == 0) store(delta, r, sum);
      }
    }
  }
}
template <typename T, int D, typename Meanwhile>
FRIT_DEVICE void load_dout(const Shared<T>& to, const Shared<float>& delta, const Global<const T>& dout,
                           int64_t dout_stride, const Global<const T>& out, int64_t out_stride, int rows, int padded,
                           Meanwhile&& meanwhile) {
  const uint64_t strides = static_cast<uint64_t>(dout_stride | out_stride) * sizeof(T);
  if ((dout.address() | out.address() | strides) % 16 == 0) {
    const auto read = [](const Global<const T>& from, int64_t stride) {
      return
          [&from, stride](int r, int column) { return std::bit_cast<Eight>(load_vec<8>(from, r * stride + column)); };
    };
    load_dout_by<T, D, 4>(to, delta, read(dout, dout_stride), read(out, out_stride), rows, padded, meanwhile);
  } else {
    const auto read = [](const Global<const T>& from, int64_t stride) {
      return [&from, stride](int r, int column) {
        return std::bit_cast<Eight>(load_span<8>(from + r * stride, column, D, T::from_bits(0)));
      };
    };
    load_dout_by<T, D, 1>(to, delta, read(dout, dout_stride), read(out, out_stride), rows, padded, meanwhile);
  }
}

// Eights of keys (or queries) that a warp takes at a time: as many as its registers hold beside the sums.
constexpr int kEights = 2;

// What the two halves of backward know of the block's sequence.
struct Work {
  Sequence at;
  bool causal, dropping;
  float scale, keep_scale;
  Shared<float> lse, delta;  // lse in units of log 2
  Shared<uint32_t> mask;
};

// For heads 128 wide: scores and probabilities are computed twice, once for dq and once for dk and dv, so that
// nothing need be kept of them, and operands may come in tiles.

// dq of 16 queries from `first` on: q and dout point to their rows, k and v to all keys.
template <typename T, int D>
FRIT_DEVICE void backward_queries(const Work& w, const Shared<T>& q, const Shared<T>& dout, const Shared<T>& k,
                                  const Shared<T>& v, int first, int head, const Rows<T>& dq) {
  const int g = lane() / 4, c = lane() % 4;
  const float scale = w.scale * 1.4426950408889634f;
  uint32_t queries[D / 16][4], gradients[D / 16][4];
  FRIT_UNROLL
  for (int x = 0; x < D / 16; ++x) left_fragment<D>(queries[x], q, x), left_fragment<D>(gradients[x], dout, x);
  float sums[D / 8][4];
  clear(sums);
  const float lse[2] = {load(w.lse, first + g), load(w.lse, first + g + 8)};
  const float delta[2] = {load(w.delta, first + g), load(w.delta, first + g + 8)};
  const int limits[2] = {w.at.visible(first + g, w.causal), w.at.visible(first + g + 8, w.causal)};
  const int keys = w.at.visible(least(first + 15, w.at.lq - 1), w.causal), sure_keys = w.at.visible(first, w.causal);
  constexpr int N = kEights;
  for (int first_key = 0; first_key < keys; first_key += 8 * N) {
    float s[N][4], dp[N][4];
    clear(s), clear(dp);
    FRIT_UNROLL
    for (int x = 0; x < D / 16; ++x) {
      multiply_step<T, D>(s, queries[x], k + first_key * kRowOf<D>, x);
      multiply_step<T, D>(dp, gradients[x], v + first_key * kRowOf<D>, x);
    }
    const bool edge = first_key + 8 * N > sure_keys;
    FRIT_UNROLL
    for (int h = 0; h < 2; ++h) {
      const uint32_t kept =
          w.dropping ? load(w.mask, (first + g + 8 * h) * kMaskRow + first_key / 32) >> (first_key % 32 + 2 * c) : 0;
      FRIT_UNROLL
      for (int j = 0; j < N; ++j) {
        FRIT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * h + e];
          float p = exp2_fast(fmaf(x, scale, -lse[h])), gradient = dp[j][2 * h + e];
          if (edge && first_key + 8 * j + 2 * c + e >= limits[h]) p = 0;
          if (w.dropping) gradient = kept >> (8 * j + e) & 1 ? gradient * w.keep_scale : 0.0f;
          x = p * (gradient - delta[h]);
        }
      }
    }
    uint32_t ds[N / 2][4];
    round_to_left<T>(ds, s);
    multiply_columns<T, D>(sums, ds, k + first_key * kRowOf<D>);
  }
  const float factor[2] = {w.scale, w.scale};
  store_rows<T, D>(dq.at(w.at.q_first + first, head, D), dq.stride, w.at.lq - first, sums, factor);
}

// dk and dv of 16 keys from `first` on: k and v point to their rows, q and dout to all queries. Scores are transposed:
// a row a key.
template <typename T, int D>
FRIT_DEVICE void backward_keys(const Work& w, const Shared<T>& k, const Shared<T>& v, const Shared<T>& q,
                               const Shared<T>& dout, int first, int head, const Rows<T>& dk, const Rows<T>& dv) {
  const int g = lane() / 4, c = lane() % 4;
  const float scale = w.scale * 1.4426950408889634f;
  float dk_sums[D / 8][4], dv_sums[D / 8][4];
  clear(dk_sums), clear(dv_sums);
  // The first query that sees a key of these, and the first that sees all.
  const int seen_from = w.causal ? first - w.at.shift() : 0, all_from = w.causal ? seen_from + 15 : 0;
  constexpr int N = kEights;
  for (int query = seen_from < 0 ? 0 : seen_from / (8 * N) * (8 * N); query < w.at.lq; query += 8 * N) {
    float s[N][4], dp[N][4];
    clear(s), clear(dp);
    FRIT_UNROLL
    for (int x = 0; x < D / 16; ++x) {
      uint32_t fragment[4];
      left_fragment<D>(fragment, k, x);
      multiply_step<T, D>(s, fragment, q + query * kRowOf<D>, x);
      left_fragment<D>(fragment, v, x);
      multiply_step<T, D>(dp, fragment, dout + query * kRowOf<D>, x);
    }
    const bool edge = query < all_from;
    FRIT_UNROLL
    for (int j = 0; j < N; ++j) {
      const int column = query + 8 * j + 2 * c;
      const Vec<float, 2> lse = load_vec<2>(w.lse, column), delta = load_vec<2>(w.delta, column);
      FRIT_UNROLL
      for (int e = 0; e < 2; ++e) {
        const uint32_t kept = w.dropping ? load(w.mask, (column + e) * kMaskRow + first / 32) >> (first % 32 + g) : 0;
        FRIT_UNROLL
        for (int h = 0; h < 2; ++h) {
          float &x = s[j][2 * h + e], &gradient = dp[j][2 * h + e];
          float p = exp2_fast(fmaf(x, scale, -lse[e]));
          if (edge && column + e < seen_from + g + 8 * h) p = 0;
          const bool keep = !w.dropping || kept >> (8 * h) & 1;
          if (w.dropping) gradient = keep ? gradient * w.keep_scale : 0.0f;
          gradient = p * (gradient - delta[e]);
          x = keep ? p : 0.0f;
        }
      }
    }
    uint32_t fragment[N / 2][4];
    round_to_left<T>(fragment, s);
    multiply_columns<T, D>(dv_sums, fragment, dout + query * kRowOf<D>);
    round_to_left<T>(fragment, dp);
    multiply_columns<T, D>(dk_sums, fragment, q + query * kRowOf<D>);
  }
  const float dk_factor[2] = {w.scale, w.scale}, dv_factor[2] = {w.keep_scale, w.keep_scale};
  store_rows<T, D>(dk.at(w.at.k_first + first, head, D), dk.stride, w.at.lk - first, dk_sums, dk_factor);
  store_rows<T, D>(dv.at(w.at.k_first + first, head, D), dv.stride, w.at.lk - first, dv_sums, dv_factor);
}

// For heads up to 64 wide, of which shared memory holds all operands and more: a warp owns 16 queries, computes their
// probabilities and gradients of scores for kSlice keys once, for dq, and leaves them in shared memory;
// from there the warps compute dk and dv of these keys, each of 16 keys and some columns of one of the two. Cost: 2
// barriers a slice, less one; 5 products.

// Columns [16 chunk, 16 (chunk + count)) of dk (or dv) of 16 keys: the product of `scores`, transposed, of these keys
// and of queries from `first_query` on, with `rows`. Rows from `keys` on are not written.
template <typename T, int D, int count>
FRIT_DEVICE void slice_columns(const Shared<T>& scores, const Shared<T>& rows, int first_query, int lq, int chunk,
                               float factor, int keys, const Global<T>& to, int64_t stride) {
  const int g = lane() / 4, c = lane() % 4;
  float sums[2 * count][4];
  clear(sums);
  for (int query = first_query; query < lq; query += 16) {
    uint32_t a[4];
    ldmatrix_x4_transposed(a, scores, (query + lane() % 8 + lane() / 16 * 8) * kSliceRow + lane() / 8 % 2 * 8);
    FRIT_UNROLL
    for (int n = 0; n < count; ++n) {
      uint32_t r[4];
      ldmatrix_x4_transposed(r, rows, (query + lane() % 16) * kRowOf<D> + lane() / 16 * 8 + (chunk + n) * 16);
      const uint32_t low[2] = {r[0], r[1]}, high[2] = {r[2], r[3]};
      mma_m16n8k16<T>(sums[2 * n], a, low);
      mma_m16n8k16<T>(sums[2 * n + 1], a, high);
    }
  }
  const bool pairs = to.address() % 4 == 0 && stride % 2 == 0;
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    if (g + 8 * h >= keys) continue;
    const Global<T> row = to + ((g + 8 * h) * stride + chunk * 16 + 2 * c);
    FRIT_UNROLL
    for (int j = 0; j < 2 * count; ++j) {
      struct Pair {
        uint32_t bits;
      };
      const Vec<T, 2> v =
          std::bit_cast<Vec<T, 2>>(Pair{pack2(T(), sums[j][2 * h] * factor, sums[j][2 * h + 1] * factor)});
      if (pairs)
        store_vec<2>(row, 8 * j, v);
      else
        store(row, 8 * j, static_cast<T>(v[0])), store(row, 8 * j + 1, static_cast<T>(v[1]));
    }
  }
}
template <typename T, int D>
FRIT_DEVICE void backward_slices(const Work& w, const Areas& areas, const Shared<T>& q, const Shared<T>& dout,
                                 const Shared<T>& k, const Shared<T>& v, int head, const Rows<T>& dq, const Rows<T>& dk,
                                 const Rows<T>& dv) {
  const int g = lane() / 4, c = lane() % 4, first = warp() * 16, lq = w.at.lq, lk = w.at.lk;
  const float scale = w.scale * 1.4426950408889634f;
  const bool active = first < lq;
  uint32_t queries[D / 16][4], gradients[D / 16][4];
  float sums[D / 8][4];
  clear(sums);
  const int keys = active ? w.at.visible(least(first + 15, lq - 1), w.causal) : 0;
  const int sure_keys = w.at.visible(first, w.causal);
  if (active) {
    FRIT_UNROLL
    for (int x = 0; x < D / 16; ++x) {
      left_fragment<D>(queries[x], q + first * kRowOf<D>, x);
      left_fragment<D>(gradients[x], dout + first * kRowOf<D>, x);
    }
  }
  for (int slice = 0; slice < lk; slice += kSlice) {
    if (slice > 0) barrier();  // the one before has been read
    FRIT_UNROLL_BY(1)
    for (int part = 0; part < kSlice && slice < keys; part += 16) {
      const int first_key = slice + part;
      // Read anew: registers are short.
      const float lse[2] = {load(w.lse, first + g), load(w.lse, first + g + 8)};
      const float delta[2] = {load(w.delta, first + g), load(w.delta, first + g + 8)};
      float s[2][4], dp[2][4];
      clear(s), clear(dp);
      FRIT_UNROLL
      for (int x = 0; x < D / 16; ++x) {
        multiply_step<T, D>(s, queries[x], k + first_key * kRowOf<D>, x);
        multiply_step<T, D>(dp, gradients[x], v + first_key * kRowOf<D>, x);
      }
      FRIT_UNROLL
      for (int j = 0; j < 2; ++j) {
        FRIT_UNROLL
        for (int e = 0; e < 4; ++e) s[j][e] = exp2_fast(fmaf(s[j][e], scale, -lse[e / 2]));
      }
      if (first_key + 16 > sure_keys) {
        const int limits[2] = {w.at.visible(first + g, w.causal), w.at.visible(first + g + 8, w.causal)};
        FRIT_UNROLL
        for (int j = 0; j < 2; ++j) {
          FRIT_UNROLL
          for (int e = 0; e < 4; ++e)
            if (first_key + 8 * j + 2 * c + e % 2 >= limits[e / 2]) s[j][e] = 0;
        }
      }
      uint32_t ds[1][4];
      FRIT_UNROLL
      for (int h = 0; h < 2; ++h) {
        const int row = first + g + 8 * h;
        const uint32_t kept = w.dropping ? load(w.mask, row * kMaskRow + slice / 32) >> (part + 2 * c) : 0x303u;
        FRIT_UNROLL
        for (int j = 0; j < 2; ++j) {
          float p[2], gradient[2];
          FRIT_UNROLL
          for (int e = 0; e < 2; ++e) {
            const bool keep = kept >> (8 * j + e) & 1;
            p[e] = s[j][2 * h + e];
            gradient[e] = p[e] * fmaf(dp[j][2 * h + e], keep ? w.keep_scale : 0.0f, -delta[h]);
            p[e] = keep ? p[e] : 0.0f;
          }
          ds[0][2 * j + h] = pack2(T(), gradient[0], gradient[1]);
          const int at = row * (kSliceRow / 2) + part / 2 + 4 * j + c;
          store(shared_array<uint32_t>(areas.slice[0]), at, pack2(T(), p[0], p[1]));
          store(shared_array<uint32_t>(areas.slice[1]), at, ds[0][2 * j + h]);
        }
      }
      multiply_columns<T, D>(sums, ds, k + first_key * kRowOf<D>);
    }
    barrier();
    // The first 16 queries of which one sees the slice.
    const int seen_from = w.causal ? slice - w.at.shift() : 0, first_query = seen_from < 0 ? 0 : seen_from / 16 * 16;
    constexpr int kChunks = D / 16, kUnits = 4 * kChunks;
    const auto columns = [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      for (int unit = warp() * kCount; unit < kUnits; unit += warp_count() * kCount) {
        const int chunk = unit % kChunks, part = unit / kChunks % 2 * 16;
        const bool of_k = unit >= kUnits / 2;
        const Rows<T> to{of_k ? dk.first : dv.first, of_k ? dk.stride : dv.stride};
        slice_columns<T, D, kCount>(shared_array<T>(of_k ? areas.slice[1] : areas.slice[0]) + part, of_k ? q : dout,
                                    first_query, lq, chunk, of_k ? w.scale : w.keep_scale, lk - slice - part,
                                    to.at(w.at.k_first + slice + part, head, D), to.stride);
      }
    };
    if (warp_count() >= kUnits)
      columns(std::integral_constant<int, 1>());
    else
      columns(std::integral_constant<int, 2>());
  }
  const float factor[2] = {w.scale, w.scale};
  if (active) store_rows<T, D>(dq.at(w.at.q_first + first, head, D), dq.stride, lq - first, sums, factor);
}

// A block takes one sequence and head.
template <typename T, int D>
FRIT_KERNEL((D == 128 ? 256 : 512), 1)
attention_backward_short_kernel(Rows<const T> q, Rows<const T> k, Rows<const T> v, Global<const int32_t> q_offsets,
                                Global<const int32_t> k_offsets, Geometry geometry, DropoutTable dropout, Areas areas,
                                Rows<const T> out, Global<const float> lse, Rows<const T> dout, Rows<T> dq, Rows<T> dk,
                                Rows<T> dv) {
  wait_for_previous();
  let_next_start();
  const int heads = geometry.heads, block = static_cast<int>(block_index()), all = geometry.sequences * heads;
  if (block >= all) {
    const int64_t q_end = offset_at(q_offsets, geometry.sequences, geometry.q_tokens);
    const int64_t k_end = offset_at(k_offsets, geometry.sequences, geometry.k_tokens);
    zero_rows(dq, q_end, geometry.q_tokens, heads * D, block - all);
    zero_rows(dk, k_end, geometry.k_tokens, heads * D, block - all);
    zero_rows(dv, k_end, geometry.k_tokens, heads * D, block - all);
    return;
  }
  const int head = block % heads;
  Work w;
  w.at = sequence_at(q_offsets, k_offsets, geometry, block / heads);
  const Sequence& at = w.at;
  if (at.lq == 0 && at.lk == 0) return;
  w.causal = geometry.causal, w.dropping = dropout.active;
  w.scale = geometry.scale, w.keep_scale = w.dropping ? dropout.scale : 1.0f;
  w.lse = shared_array<float>(areas.lse), w.delta = shared_array<float>(areas.delta);
  w.mask = shared_array<uint32_t>(areas.mask);

  constexpr int kRow = kRowOf<D>;
  const bool resident = areas.resident;
  const Shared<T> full_0 = shared_array<T>(areas.full[0]), full_1 = shared_array<T>(areas.full[1]),
                  tile_0 = shared_array<T>(areas.tile[0]), tile_1 = shared_array<T>(areas.tile[1]);
  const Global<const T> q_rows = q.at(at.q_first, head, D), k_rows = k.at(at.k_first, head, D),
                        v_rows = v.at(at.k_first, head, D), dout_rows = dout.at(at.q_first, head, D),
                        out_rows = out.at(at.q_first, head, D);
  const int padded_queries = round_up(at.lq, 32), padded_keys = round_up(at.lk, 32);
  load_rows<T, D>(full_0, k_rows, k.stride, at.lk, padded_keys);
  load_rows<T, D>(full_1, v_rows, v.stride, at.lk, padded_keys);
  const int passed = areas.pass;
  for (int pass = 0; pass < padded_queries || pass == 0; pass += passed) {
    if (pass > 0) barrier();
    const int rows = least(passed, at.lq - pass);
    load_rows<T, D>(tile_0, q_rows + pass * q.stride, q.stride, rows, least(passed, padded_queries - pass));
    copy_async_commit();
    load_dout<T, D>(tile_1, w.delta + pass, dout_rows + pass * dout.stride, dout.stride, out_rows + pass * out.stride,
                    out.stride, rows, least(passed, padded_queries - pass), [&] {
                      if (pass > 0) return;
                      const auto lse_at = [&](int i) {
                        return i < at.lq ? load(lse, (at.q_first + i) * heads + head) * 1.4426950408889634f : 0.0f;
                      };
                      const float mine = lse_at(thread_index());  // on its way beside the random numbers
                      if (w.dropping)
                        for (int first = warp() * 16; first < padded_queries; first += warp_count() * 16)
                          fill_mask(shared_array<uint16_t>(areas.mask) + first * kMaskRow * 2, dropout, at, first,
                                    at.visible(first + 15, geometry.causal), at.lk, head);
                      if (thread_index() < padded_queries) store(w.lse, thread_index(), mine);
                      for (int i = thread_index() + thread_count(); i < padded_queries; i += thread_count())
                        store(w.lse, i, lse_at(i));
                    });
    copy_async_wait<0>();
    barrier();
    if constexpr (D < 128)
      return backward_slices<T, D>(w, areas, tile_0, tile_1, full_0, full_1, head, dq, dk, dv);
    else
      for (int first = pass + warp() * 16; first < pass + rows; first += warp_count() * 16)
        backward_queries<T, D>(w, tile_0 + (first - pass) * kRow, tile_1 + (first - pass) * kRow, full_0, full_1, first,
                               head, dq);
  }
  if constexpr (D == 128) {
    if (!resident) {
      barrier();
      load_rows<T, D>(full_0, q_rows, q.stride, at.lq, padded_queries);
      load_rows<T, D>(full_1, dout_rows, dout.stride, at.lq, padded_queries);
    }
    for (int pass = 0; pass < at.lk; pass += passed) {
      const int rows = least(passed, at.lk - pass);
      if (!resident) {
        if (pass > 0) barrier();
        load_rows<T, D>(tile_0, k_rows + pass * k.stride, k.stride, rows, least(passed, padded_keys - pass));
        load_rows<T, D>(tile_1, v_rows + pass * v.stride, v.stride, rows, least(passed, padded_keys - pass));
        copy_async_commit();
        copy_async_wait<0>();
        barrier();
      }
      for (int first = pass + warp() * 16; first < pass + rows; first += warp_count() * 16) {
        const int from = (first - pass) * kRow;
        backward_keys<T, D>(w, shared_array<T>(resident ? areas.full[0] : areas.tile[0]) + from,
                            shared_array<T>(resident ? areas.full[1] : areas.tile[1]) + from,
                            shared_array<T>(resident ? areas.tile[0] : areas.full[0]),
                            shared_array<T>(resident ? areas.tile[1] : areas.full[1]), first, head, dk, dv);
      }
    }
  }
}

constexpr const char* kNames[] = {"warps1", "warps2", "warps4", "warps8", "warps16"};

template <typename T, int D>
void backward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse, const Tensor& dout,
              const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const Geometry geometry = geometry_of(args);
  const int max_q = geometry.max_q, max_k = geometry.max_k;
  const int64_t limit = context.gpu().shared_bytes_limit();
  const auto areas_for = [&](int warps) {
    const auto areas = [&](bool resident) { return areas_of(max_q, max_k, warps, args.dropout.active(), D, resident); };
    return D < 128 || areas(true).bytes <= limit ? areas(true) : areas(false);  // narrower heads always fit
  };
  int fallback = 0;
  while (1 << fallback < attention_short_backward_warps(max_q, max_k, D)) ++fallback;
  const std::string key = fmt::format("q{} k{} D{} {}{}{}", max_q, max_k, D, geometry.causal ? "causal " : "",
                                      args.dropout.active() ? "dropout " : "", name_of(args.q.dtype()));
  const int warps = 1 << choose_instance(context, "attention_backward", key, kNames, fallback, [&](int i) {
                      return (D == 128 ? i <= 3 : 16 << i >= max_q) && areas_for(1 << i).bytes <= limit;
                    });
  const Areas areas = areas_for(warps);
  const int64_t blocks = int64_t{geometry.sequences} * geometry.heads + kAttentionTailBlocks;
  launch(context, "attention_backward_short_kernel", attention_backward_short_kernel<T, D>,
         {blocks, warps * 32, areas.bytes}, rows_of<const T>(args.q), rows_of<const T>(args.k),
         rows_of<const T>(args.v), global<const int32_t>(args.q_offsets), global<const int32_t>(args.k_offsets),
         geometry, DropoutTable(args.dropout), areas, rows_of<const T>(out), global<const float>(lse),
         rows_of<const T>(dout), rows_of<T>(dq), rows_of<T>(dk), rows_of<T>(dv));
}

}  // namespace

int64_t attention_short_backward_warps(int64_t max_q, int64_t max_k, int64_t d) {
  int64_t warps = 1;
  while (warps < (d == 128 ? 8 : 16) && warps * 16 < std::max(max_q, max_k)) warps *= 2;
  return warps;
}

void attention_short_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                  const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  if (dq.numel() == 0 && dk.numel() == 0) return;
  if (args.q.dtype() == DType::kF32) return attention_short_backward_f32_gpu(context, args, out, lse, dout, dq, dk, dv);
  dispatch_width(args.q.dim(2), [&](auto width) {
    if (args.q.dtype() == DType::kBF16)
      backward<bfloat16, width()>(context, args, out, lse, dout, dq, dk, dv);
    else
      backward<float16, width()>(context, args, out, lse, dout, dq, dk, dv);
  });
}

}  // namespace frit
