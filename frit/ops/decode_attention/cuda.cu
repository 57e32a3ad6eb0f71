#include "frit/ops/decode_attention/gpu.h"
#include "frit/simt/early.h"
#include "frit/simt/launch.h"

namespace frit {
namespace {

using namespace simt;

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kThreads = kDecodeAttentionThreads, kWarps = kThreads / kWarpSize;

FRIT_DEVICE int least(int a, int b) {
  return a < b ? a : b;
}
FRIT_DEVICE int clamped(int x, int low, int high) {
  return x < low ? low : x > high ? high : x;
}

// DecodeRows as kernels have them.
struct RowTable {
  Global<const int32_t> live, live_sentence;
  int sentences, width, heads, rows;

  // The index-th live sentence; -1 for padding.
  FRIT_DEVICE int sentence(int index) const {
    if (index >= sentences) return -1;
    const int count = load(live, 0), s = load(live_sentence, index);
    return index < count && s >= 0 && s < sentences ? s : -1;
  }
};
RowTable row_table(const DecodeRows& rows, int64_t heads, const Tensor& out) {
  return {global<const int32_t>(rows.live),
          global<const int32_t>(rows.live_sentence),
          static_cast<int>(rows.live_sentence.dim(0)),
          static_cast<int>(rows.width),
          static_cast<int>(heads),
          static_cast<int>(out.dim(0))};
}

// Rows of one tensor.
template <typename T>
struct Matrix {
  Global<T> first;
  int64_t stride = 0;
  FRIT_DEVICE Global<T> at(int64_t row, int column) const { return first + (row * stride + column); }
};
template <typename T>
Matrix<T> matrix(const Tensor& t) {
  return {global<T>(t), t.row_stride()};
}

// What self attention reads beside qkv. Of one (row, head).
template <typename T>
struct Past {
  Global<const T> cached;
  Global<T> cache;
  Global<const int32_t> origin, position;
  int positions, slots;
  int64_t places;
};
// Where one (row, head) finds its keys; the values lie H further. Key `now` is the row's own.
template <typename T>
struct Keys {
  static constexpr bool kElsewhere = true;  // a key has an origin
  Global<const T> own, cached;
  Global<T> kept;  // where the row's own key goes
  Global<const int32_t> origins;
  int now, slots, width;

  FRIT_DEVICE int count() const { return now + 1; }
  FRIT_DEVICE int from(int j) const { return j < now ? clamped(load(origins, j), 0, slots - 1) : 0; }
  FRIT_DEVICE Global<const T> key(int j, int from) const {
    return j < now ? cached + (static_cast<int64_t>(j) * slots + from) * (2 * static_cast<int64_t>(width)) : own;
  }
  FRIT_DEVICE Global<const T> value(int j, int from) const { return key(j, from) + width; }
  template <int N>
  FRIT_DEVICE void seen(int j, int part, const Vec<T, N>& k, const Vec<T, N>& v) const {
    if (j == now) store_vec<N>(kept, part * N, k), store_vec<N>(kept, width + part * N, v);
  }
};
template <typename T>
FRIT_DEVICE Keys<T> keys_of(const Past<T>& past, const Global<const T>& mine, int now, int slot, int width,
                            int column) {
  return {mine + width,
          past.cached + column,
          past.cache + ((static_cast<int64_t>(now) * past.slots + slot) * 2 * width + column),
          past.origin + (static_cast<int64_t>(now & 1) * past.slots + slot) * past.places,
          now,
          past.slots,
          width};
}
// The same of a source sentence.
template <typename T>
struct SourceKeys {
  static constexpr bool kElsewhere = false;
  Global<const T> keys, values;  // of the first
  int64_t stride;
  int tokens;

  FRIT_DEVICE int count() const { return tokens; }
  FRIT_DEVICE int from(int) const { return 0; }
  FRIT_DEVICE Global<const T> key(int j, int) const { return keys + j * stride; }
  FRIT_DEVICE Global<const T> value(int j, int) const { return values + j * stride; }
  template <int N>
  FRIT_DEVICE void seen(int, int, const Vec<T, N>&, const Vec<T, N>&) const {}
};

// ---- Head widths 32, 64 and 128 ----

// A row's softmax over the keys of one group of threads, of which this thread has N columns.
template <int N>
struct Softmax {
  float top = -INFINITY, total = 0;
  float sums[N] = {};

  // K more keys: their scores (-inf: none) in units of log 2, and values.
  template <int K, typename T>
  FRIT_DEVICE void add(const float (&scores)[K], const Vec<T, N> (&values)[K]) {
    float largest = top;
    FRIT_UNROLL
    for (int u = 0; u < K; ++u) largest = fmaxf(largest, scores[u]);
    const float base = largest == -INFINITY ? 0.0f : largest;
    rescale(exp2_fast(top - base));
    top = largest;
    FRIT_UNROLL
    for (int u = 0; u < K; ++u) {
      const float p = exp2_fast(scores[u] - base);
      total += p;
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) sums[i] = fmaf(p, widen(values[u][i]), sums[i]);
    }
  }
  FRIT_DEVICE void rescale(float factor) {
    total *= factor;
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) sums[i] *= factor;
  }
  // Takes in the keys of another group.
  FRIT_DEVICE void merge(float other_top, float other_total, const float (&other)[N]) {
    const float largest = fmaxf(top, other_top), base = largest == -INFINITY ? 0.0f : largest;
    const float theirs = exp2_fast(other_top - base);
    rescale(exp2_fast(top - base));
    top = largest;
    total = fmaf(other_total, theirs, total);
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) sums[i] = fmaf(other[i], theirs, sums[i]);
  }
  // Takes in the keys of the warp's other groups of `lanes` threads; the first group has the result.
  template <int lanes>
  FRIT_DEVICE void merge_warp() {
    FRIT_UNROLL
    for (int bits = lanes; bits < kWarpSize; bits *= 2) {
      const float other_top = shuffle_xor(top, bits), other_total = shuffle_xor(total, bits);
      float other[N];
      FRIT_UNROLL
      for (int i = 0; i < N; ++i) other[i] = shuffle_xor(sums[i], bits);
      merge(other_top, other_total, other);
    }
  }
};

template <typename T, int N>
FRIT_DEVICE Vec<T, N> zeros() {
  Vec<T, N> v;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) v[i] = convert<T>(0.0f);
  return v;
}
template <int N, typename T>
FRIT_DEVICE float dot(const float (&q)[N], const Vec<T, N>& k) {
  float sum = 0;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) sum = fmaf(q[i], widen(k[i]), sum);
  return sum;
}
template <int N, typename T>
FRIT_DEVICE void load_query(float (&q)[N], const Global<const T>& from, int64_t i, float scale) {
  const Vec<T, N> v = load_vec<N>(from, i);
  FRIT_UNROLL
  for (int e = 0; e < N; ++e) q[e] = widen(v[e]) * scale;
}

// kWarps partial softmaxes of each of `rows` rows in shared memory: for each D sums, then its top and total.
template <int D, int rows>
struct WarpResults {
  static constexpr int kRow = D + 4;
  static constexpr int64_t kBytes = int64_t{kWarps} * rows * kRow * 4;

  template <int N>
  FRIT_DEVICE static void put(const Softmax<N>& softmax, int row, int w, int part) {
    const Shared<float> at = shared_array<float>(0) + (w * rows + row) * kRow;
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4)
      store_vec<4>(at, part * N + i,
                   Vec<float, 4>{softmax.sums[i], softmax.sums[i + 1], softmax.sums[i + 2], softmax.sums[i + 3]});
    if (part == 0) store(at, D, softmax.top), store(at, D + 1, softmax.total);
  }
  template <int N>
  FRIT_DEVICE static Softmax<N> get(int row, int part) {
    Softmax<N> softmax;
    FRIT_UNROLL
    for (int w = 0; w < kWarps; ++w) {
      const Shared<float> at = shared_array<float>(0) + (w * rows + row) * kRow;
      float sums[N];
      FRIT_UNROLL
      for (int i = 0; i < N; i += 4) {
        const Vec<float, 4> four = load_vec<4>(at, part * N + i);
        FRIT_UNROLL
        for (int e = 0; e < 4; ++e) sums[i + e] = four[e];
      }
      softmax.merge(load(at, D), load(at, D + 1), sums);
    }
    return softmax;
  }
};
template <typename T, int N>
FRIT_DEVICE Vec<T, N> result(const Softmax<N>& softmax) {
  const float factor = softmax.total == 0 ? 0.0f : 1.0f / softmax.total;
  Vec<float, N> y;
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) y[i] = softmax.sums[i] * factor;
  return from_float<T>(y);
}

// Adds what groups of threads of warp `w` of `warps` see: a warp's groups take neighbouring keys, the warps take turns.
// All lanes call it. kAtOnce keys a group are on their way together, and the origins of the next ones.
template <int D, typename T, typename K>
FRIT_DEVICE void add_keys(Softmax<kVecOf<T>>& softmax, const K& keys, const float (&q)[kVecOf<T>], int w, int warps) {
  constexpr int N = kVecOf<T>, kLanes = D / N, kOwn = kWarpSize / kLanes, kAtOnce = 8, kPair = 2;
  constexpr int kOriginLoads = (kOwn * kAtOnce + kWarpSize - 1) / kWarpSize;
  const int part = lane() % kLanes, group = lane() / kLanes, count = keys.count(), apart = warps * kOwn;
  // Origin e of those on their way is that of group e % kOwn, turn e / kOwn; lane e % 32 has it.
  int origins[kOriginLoads] = {};
  const auto fetch = [&](int first) {
    if constexpr (K::kElsewhere) {
      FRIT_UNROLL
      for (int i = 0; i < kOriginLoads; ++i) {
        const int e = i * kWarpSize + lane(), j = first + e / kOwn * apart + e % kOwn;
        origins[i] = e < kOwn * kAtOnce && j < count ? keys.from(j) : 0;
      }
    }
  };
  fetch(w * kOwn);
  FRIT_UNROLL_BY(1)
  for (int first = w * kOwn; first < count; first += apart * kAtOnce) {
    Vec<T, N> k[kAtOnce / kPair][kPair], v[kAtOnce / kPair][kPair];
    FRIT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      const int j = first + u * apart + group;
      int from = 0;
      if constexpr (K::kElsewhere) from = shuffle(origins[u * kOwn / kWarpSize], u * kOwn % kWarpSize + group);
      Vec<T, N>&key = k[u / kPair][u % kPair], &value = v[u / kPair][u % kPair];
      key = zeros<T, N>(), value = zeros<T, N>();
      if (j < count) key = load_vec<N>(keys.key(j, from), part * N), value = load_vec<N>(keys.value(j, from), part * N);
    }
    fetch(first + apart * kAtOnce);
    FRIT_UNROLL
    for (int p = 0; p < kAtOnce / kPair; ++p) {
      if (first + p * kPair * apart >= count) break;
      float scores[kPair];
      FRIT_UNROLL
      for (int u = 0; u < kPair; ++u) {
        const int j = first + (p * kPair + u) * apart + group;
        const float score = warp_sum<kLanes>(dot(q, k[p][u]));
        scores[u] = j < count ? score : -INFINITY;
        keys.template seen<N>(j, part, k[p][u], v[p][u]);
      }
      softmax.add(scores, v[p]);
    }
  }
}

// One row of one head, before it is known whether the row is padding: its query is on its way.
template <typename T, int D>
struct SelfRow {
  static constexpr int N = kVecOf<T>, kLanes = D / N;
  int now, sentence;
  float q[N];
  Keys<T> keys;

  FRIT_DEVICE SelfRow(const RowTable& table, const Matrix<const T>& qkv, const Past<T>& past, float scale, int row,
                      int column) {
    const Global<const T> mine = qkv.at(row, column);
    now = load(past.position, 0), sentence = table.sentence(row / table.width);
    load_query(q, mine, lane() % kLanes * N, scale);
    if (now < 0 || now >= past.positions) sentence = -1;
    if (sentence >= 0)
      keys = keys_of(past, mine, now, sentence * table.width + row % table.width, table.heads * D, column);
  }
  // Few keys are one warp's: the sums of more would take longer to put together than to make. The rows' number may
  // change how a row's work is spread, so what is added to what must depend on `now` alone.
  FRIT_DEVICE bool brief() const { return now < kDecodeAttentionBrief * (kWarpSize / kLanes); }
};

// A block takes one row and head.
template <typename T, int D>
FRIT_KERNEL(kThreads, 4)
decode_self_attention_vectors_kernel(RowTable table, Matrix<const T> qkv, Past<T> past, float scale, Matrix<T> out) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>, kLanes = D / N;
  const int row = static_cast<int>(block_index() / table.heads);
  const int column = static_cast<int>(block_index() % table.heads) * D, part = thread_index() % kLanes;
  const SelfRow<T, D> self(table, qkv, past, scale, row, column);
  if (self.sentence < 0) {
    if (thread_index() < kLanes) store_vec<N>(out.at(row, column), part * N, zeros<T, N>());
    return;
  }
  const bool brief = self.brief();
  if (brief && warp() > 0) return;
  Softmax<N> softmax;
  add_keys<D, T>(softmax, self.keys, self.q, warp(), brief ? 1 : kWarps);
  softmax.template merge_warp<kLanes>();
  if (!brief) {
    if (lane() < kLanes) WarpResults<D, 1>::put(softmax, 0, warp(), part);
    barrier();
    if (thread_index() < kLanes) softmax = WarpResults<D, 1>::template get<N>(0, part);
  }
  if (thread_index() < kLanes) store_vec<N>(out.at(row, column), part * N, result<T>(softmax));
}

// A warp takes one row and head, and does what the block's warps do one after the other: the same bits.
template <typename T, int D>
FRIT_KERNEL(kThreads, 4)
decode_self_attention_warps_kernel(RowTable table, Matrix<const T> qkv, Past<T> past, float scale, Matrix<T> out) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>, kLanes = D / N;
  const int pair = static_cast<int>(block_index()) * kWarps + warp(), row = pair / table.heads;
  if (row >= table.rows) return;
  const int column = (pair - row * table.heads) * D, part = lane() % kLanes;
  const SelfRow<T, D> self(table, qkv, past, scale, row, column);
  if (self.sentence < 0) {
    if (lane() < kLanes) store_vec<N>(out.at(row, column), part * N, zeros<T, N>());
    return;
  }
  using Results = WarpResults<D, kWarps>;
  const int warps = self.brief() ? 1 : kWarps;
  Softmax<N> softmax;
  FRIT_UNROLL_BY(1)
  for (int w = 0; w < warps; ++w) {
    softmax = {};
    add_keys<D, T>(softmax, self.keys, self.q, w, warps);
    softmax.template merge_warp<kLanes>();
    if (warps > 1 && lane() < kLanes) Results::put(softmax, warp(), w, part);
  }
  if (warps > 1) {
    warp_barrier();
    softmax = Results::template get<N>(warp(), part);
  }
  if (lane() < kLanes) store_vec<N>(out.at(row, column), part * N, result<T>(softmax));
}

// A warp takes one row and head; its neighbours, which take the sentence's other rows, read the same keys and values.
template <typename T, int D>
FRIT_KERNEL(kThreads, 4)
decode_cross_attention_warps_kernel(RowTable table, Matrix<const T> q, Matrix<const T> keys, Global<const T> values,
                                    int tokens, Global<const int32_t> offsets, float scale, Matrix<T> out) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>, kLanes = D / N;
  const int task = static_cast<int>(block_index()) * kWarps + warp(), pair = task / table.width;
  const int index = pair / table.heads, column = (pair - index * table.heads) * D, part = lane() % kLanes;
  const int row = index * table.width + task - pair * table.width;
  if (row >= table.rows) return;
  float query[N];
  load_query(query, q.at(row, column), part * N, scale);
  const int sentence = table.sentence(index);
  if (sentence < 0) {
    if (lane() < kLanes) store_vec<N>(out.at(row, column), part * N, zeros<T, N>());
    return;
  }
  const int begin = clamped(load(offsets, sentence), 0, tokens);
  const int count = clamped(load(offsets, sentence + 1), begin, tokens) - begin;
  const int64_t first = begin * keys.stride + column;
  Softmax<N> softmax;
  add_keys<D, T>(softmax, SourceKeys<T>{keys.first + first, values + first, keys.stride, count}, query, 0, 1);
  softmax.template merge_warp<kLanes>();
  if (lane() < kLanes) store_vec<N>(out.at(row, column), part * N, result<T>(softmax));
}

// A block takes `most` rows of one sentence and head.
template <typename T, int D, int most>
FRIT_KERNEL(kThreads, (most == 8 ? 2 : 4))
decode_cross_attention_vectors_kernel(RowTable table, Matrix<const T> q, Matrix<const T> keys, Global<const T> values,
                                      int tokens, Global<const int32_t> offsets, float scale, Matrix<T> out) {
  let_next_start();
  wait_for_previous();
  constexpr int N = kVecOf<T>, kLanes = D / N, kGroups = kThreads / kLanes, kBatch = most == 8 ? 2 : 4;
  const int heads = table.heads, chunks = (table.width + most - 1) / most;
  const int column = static_cast<int>(block_index() % heads) * D;
  const int chunk = static_cast<int>(block_index() / heads) % chunks;
  const int index = static_cast<int>(block_index() / heads) / chunks, first_row = index * table.width + chunk * most;
  const int rows = least(least(most, table.width - chunk * most), table.rows - first_row);
  const int part = thread_index() % kLanes, group = thread_index() / kLanes;
  if (rows <= 0) return;
  const int sentence = table.sentence(index);
  if (sentence < 0) {
    for (int i = thread_index(); i < rows * kLanes; i += kThreads)
      store_vec<N>(out.at(first_row + i / kLanes, column), part * N, zeros<T, N>());
    return;
  }
  const int begin = clamped(load(offsets, sentence), 0, tokens);
  const int count = clamped(load(offsets, sentence + 1), begin, tokens) - begin;

  float queries[most][N];
  FRIT_UNROLL
  for (int r = 0; r < most; ++r) load_query(queries[r], q.at(first_row + least(r, rows - 1), column), part * N, scale);
  Softmax<N> softmax[most];
  for (int first = 0; first < count; first += kGroups * kBatch) {
    Vec<T, N> k[kBatch], v[kBatch];
    FRIT_UNROLL
    for (int u = 0; u < kBatch; ++u) {
      const int j = first + u * kGroups + group;
      const int64_t at = static_cast<int64_t>(begin + j) * keys.stride + column + part * N;
      k[u] = zeros<T, N>(), v[u] = zeros<T, N>();
      if (j < count) k[u] = load_vec<N>(keys.first, at), v[u] = load_vec<N>(values, at);
    }
    FRIT_UNROLL
    for (int r = 0; r < most; ++r) {
      float scores[kBatch];
      FRIT_UNROLL
      for (int u = 0; u < kBatch; ++u) {
        const float score = warp_sum<kLanes>(dot(queries[r], k[u]));
        scores[u] = first + u * kGroups + group < count ? score : -INFINITY;
      }
      softmax[r].add(scores, v);
    }
  }
  FRIT_UNROLL
  for (int r = 0; r < most; ++r) {
    softmax[r].template merge_warp<kLanes>();
    if (lane() < kLanes) WarpResults<D, most>::put(softmax[r], r, warp(), part);
  }
  barrier();
  for (int i = thread_index(); i < rows * kLanes; i += kThreads)
    store_vec<N>(out.at(first_row + i / kLanes, column), part * N,
                 result<T>(WarpResults<D, most>::template get<N>(i / kLanes, part)));
}

// ---- Any head width and alignment ----

// Shared memory: query and sums, d floats each; probabilities; two blocks' sums.
constexpr int64_t any_shared_bytes(int64_t d) {
  return (2 * d + kThreads + 64) * 4;
}

// One row of one head; key_at(j) and value_at(j) are where column 0 lies.
template <typename T, typename K, typename V>
FRIT_DEVICE void attend(const Global<const T>& query, int count, K&& key_at, V&& value_at, int d, float scale,
                        const Global<T>& out) {
  const int me = thread_index();
  const Shared<float> q = shared_array<float>(0), sums = q + d, p = sums + d, scratch = p + kThreads;
  for (int c = me; c < d; c += kThreads) store(q, c, widen(load(query, c)) * scale), store(sums, c, 0.0f);
  barrier();
  float top = -INFINITY, total = 0;
  for (int first = 0; first < count; first += kThreads) {
    const int here = least(kThreads, count - first);
    float score = -INFINITY;
    if (me < here) {
      const Global<const T> key = key_at(first + me);
      score = 0;
      for (int c = 0; c < d; ++c) score = fmaf(load(q, c), widen(load(key, c)), score);
    }
    const float largest = fmaxf(top, block_max(score, scratch)), base = largest == -INFINITY ? 0.0f : largest;
    const float shrink = exp2_fast(top - base), mine = exp2_fast(score - base);
    top = largest;
    total = fmaf(total, shrink, mine);
    store(p, me, mine);
    barrier();
    for (int c = me; c < d; c += kThreads) {
      float sum = load(sums, c) * shrink;
      for (int j = 0; j < here; ++j) sum = fmaf(load(p, j), widen(load(value_at(first + j), c)), sum);
      store(sums, c, sum);
    }
    barrier();
  }
  total = block_sum(total, scratch + 32);
  for (int c = me; c < d; c += kThreads) store(out, c, convert<T>(total == 0 ? 0.0f : load(sums, c) * (1.0f / total)));
}

template <typename T>
FRIT_KERNEL(kThreads, 4)
decode_self_attention_any_kernel(RowTable table, Matrix<const T> qkv, Past<T> past, int d, float scale, Matrix<T> out) {
  let_next_start();
  wait_for_previous();
  const int heads = table.heads, width = heads * d;
  const int row = static_cast<int>(block_index() / heads), column = static_cast<int>(block_index() % heads) * d;
  const int now = load(past.position, 0), sentence = table.sentence(row / table.width);
  const Global<const T> mine = qkv.at(row, column);
  const Global<T> to = out.at(row, column);
  if (sentence < 0 || now < 0 || now >= past.positions) {
    for (int c = thread_index(); c < d; c += kThreads) store(to, c, convert<T>(0.0f));
    return;
  }
  const int slot = sentence * table.width + row % table.width;
  const Keys<T> keys = keys_of(past, mine, now, slot, width, column);
  for (int c = thread_index(); c < d; c += kThreads) {
    store(keys.kept, c, load(mine, width + c));
    store(keys.kept, width + c, load(mine, 2 * width + c));
  }
  attend(
      mine, now + 1, [&](int j) { return keys.key(j, keys.from(j)); },
      [&](int j) { return keys.value(j, keys.from(j)); }, d, scale, to);
}

template <typename T>
FRIT_KERNEL(kThreads, 4)
decode_cross_attention_any_kernel(RowTable table, Matrix<const T> q, Matrix<const T> keys, Matrix<const T> values,
                                  int tokens, Global<const int32_t> offsets, int d, float scale, Matrix<T> out) {
  let_next_start();
  wait_for_previous();
  const int heads = table.heads;
  const int row = static_cast<int>(block_index() / heads), column = static_cast<int>(block_index() % heads) * d;
  const int sentence = table.sentence(row / table.width);
  const Global<T> to = out.at(row, column);
  if (sentence < 0) {
    for (int c = thread_index(); c < d; c += kThreads) store(to, c, convert<T>(0.0f));
    return;
  }
  const int begin = clamped(load(offsets, sentence), 0, tokens);
  const int count = clamped(load(offsets, sentence + 1), begin, tokens) - begin;
  attend(
      q.at(row, column), count, [&](int j) { return keys.at(begin + j, column); },
      [&](int j) { return values.at(begin + j, column); }, d, scale, to);
}

// ---- Launches ----

constexpr const char* kNames[] = {"vectors", "any", "warps"};

bool aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 &&
         (t.dim(0) <= 1 || t.row_stride() * size_of(t.dtype()) % 16 == 0);
}

// Calls f with T(), the dtype, an integral constant: the head width, or 0 for "any"; and whether a warp takes a row
// and head. `kind` names the attention, and what else the choice depends on.
template <typename F>
void dispatch(Context& context, const char* kind, bool warps, const Tensor& out, int64_t d,
              std::initializer_list<Tensor> tensors, F&& f) {
  bool vectors = d == 32 || d == 64 || d == 128;
  for (const Tensor& t : tensors) vectors = vectors && aligned(t);
  const std::string key = fmt::format("{} D{}/{}", kind, d, name_of(out.dtype()));
  const int chosen = choose_instance(context, "decode_attention_forward", key, kNames,
                                     !vectors ? 1
                                     : warps  ? 2
                                              : 0,
                                     [&](int i) { return i == 1 || vectors; });
  dispatch_float(out.dtype(), [&](auto type) {
    if (chosen == 1) return f(type, std::integral_constant<int, 0>(), false);
    if (d == 32) return f(type, std::integral_constant<int, 32>(), chosen == 2);
    if (d == 64) return f(type, std::integral_constant<int, 64>(), chosen == 2);
    f(type, std::integral_constant<int, 128>(), chosen == 2);
  });
}

int64_t blocks_of_warps(int64_t warps) {
  return (warps + kWarps - 1) / kWarps;
}

}  // namespace

void decode_self_attention_gpu(Context& context, const DecodeSelfAttentionArgs& args, const Tensor& out) {
  const int64_t d = out.dim(1) / args.heads;
  const bool many = out.dim(0) * args.heads >= kDecodeAttentionMany;
  const auto run = [&](auto type, auto width, bool warps) {
    using T = decltype(type);
    const Past<T> past{global<const T>(args.cache),
                       global<T>(args.cache),
                       global<const int32_t>(args.origin),
                       global<const int32_t>(args.position),
                       static_cast<int>(args.cache.dim(0)),
                       static_cast<int>(args.cache.dim(1)),
                       args.origin.dim(2)};
    const RowTable table = row_table(args.rows, args.heads, out);
    const int64_t blocks = out.dim(0) * args.heads;
    const float scale = args.scale * kLog2E;
    if constexpr (width() == 0)
      launch(context, "decode_self_attention_any_kernel", decode_self_attention_any_kernel<T>,
             {blocks, kThreads, any_shared_bytes(d)}, table, matrix<const T>(args.qkv), past, static_cast<int>(d),
             scale, matrix<T>(out));
    else if (warps)
      launch(context, "decode_self_attention_warps_kernel", decode_self_attention_warps_kernel<T, width()>,
             {blocks_of_warps(blocks), kThreads, WarpResults<width(), kWarps>::kBytes}, table,
             matrix<const T>(args.qkv), past, scale, matrix<T>(out));
    else
      launch(context, "decode_self_attention_vectors_kernel", decode_self_attention_vectors_kernel<T, width()>,
             {blocks, kThreads, WarpResults<width(), 1>::kBytes}, table, matrix<const T>(args.qkv), past, scale,
             matrix<T>(out));
  };
  dispatch(context, many ? "self, many" : "self", many, out, d, {args.qkv, args.cache, out}, run);
}

void decode_cross_attention_gpu(Context& context, const DecodeCrossAttentionArgs& args, const Tensor& out) {
  const int64_t d = out.dim(1) / args.heads, rows = out.dim(0);
  const int tokens = static_cast<int>(args.keys.dim(0));
  const bool several = args.rows.width > 1 && args.rows.width <= 8;
  const auto attend = [&](auto type, auto width, bool warps) {
    using T = decltype(type);
    const RowTable table = row_table(args.rows, args.heads, out);
    const float scale = args.scale * kLog2E;
    if constexpr (width() == 0) {
      launch(context, "decode_cross_attention_any_kernel", decode_cross_attention_any_kernel<T>,
             {rows * args.heads, kThreads, any_shared_bytes(d)}, table, matrix<const T>(args.q),
             matrix<const T>(args.keys), matrix<const T>(args.values), tokens,
             global<const int32_t>(args.source_offsets), static_cast<int>(d), scale, matrix<T>(out));
    } else if (warps) {
      const int64_t sentences = (rows + args.rows.width - 1) / args.rows.width;
      launch(context, "decode_cross_attention_warps_kernel", decode_cross_attention_warps_kernel<T, width()>,
             {blocks_of_warps(sentences * args.rows.width * args.heads), kThreads, 0}, table, matrix<const T>(args.q),
             matrix<const T>(args.keys), global<const T>(args.values), tokens,
             global<const int32_t>(args.source_offsets), scale, matrix<T>(out));
    } else {
      const auto run = [&](auto most) {
        const int64_t chunks = (args.rows.width + most() - 1) / most();
        const int64_t sentences = (rows + args.rows.width - 1) / args.rows.width;
        launch(context, "decode_cross_attention_vectors_kernel",
               decode_cross_attention_vectors_kernel<T, width(), most()>,
               {sentences * chunks * args.heads, kThreads, WarpResults<width(), most()>::kBytes}, table,
               matrix<const T>(args.q), matrix<const T>(args.keys), global<const T>(args.values), tokens,
               global<const int32_t>(args.source_offsets), scale, matrix<T>(out));
      };
      switch (decode_cross_rows(args.rows.width)) {
        case 1:
          return run(std::integral_constant<int, 1>());
        case 4:
          return run(std::integral_constant<int, 4>());
        default:
          return run(std::integral_constant<int, 8>());
      }
    }
  };
  dispatch(context, several ? "cross, several" : "cross", several, out, d, {args.q, args.keys, args.values, out},
           attend);
}

}  // namespace frit
