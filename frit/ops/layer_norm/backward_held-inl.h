// layer_norm's backward for 16-bit rows that go through shared memory, for the operators that end with dx (layer_norm)
// and that go on through the dropout below it (bias_dropout_residual_norm). Included by those alone.
#pragma once
#include "frit/ops/layer_norm/backward-inl.h"
#include "frit/simt/early.h"

namespace frit::layer_norm {

// Beside pointers: strides in elements, also to a group's next row (steps), and how rows are shared out.
struct HeldBackwardRows {
  int64_t dy_stride, x_stride, dresidual_stride, dx_stride;
  int64_t dy_step, x_step, dx_step, dz_step;
  int64_t rows;
  int cols, warps, period, step;  // step: as rows of a class
  int of_piece, of_group;  // rows of a class from a block's first to the next block's, from a group's to the next's
  float by_cols;           // 1 / cols
  bool streams;            // is dx too large to stay in the second-level cache?
};

// Sums of two values over the warp, the first in lanes 0 to 15, the second in lanes 16 to 31. Cost: 5 shuffles.
FRIT_DEVICE float warp_sum_of_two(float a, float b) {
  const bool low = lane() < 16;
  float mine = (low ? a : b) + shuffle_xor(low ? b : a, 16);
  FRIT_UNROLL
  for (int bits = 8; bits > 0; bits /= 2) mine += shuffle_xor(mine, bits);
  return mine;
}

// Takes dx's vector `group` of 8 columns through dropout, as drop() does: that writes its bits out.
template <typename T>
FRIT_DEVICE Vec<T, 8> drop_group(const DropoutTable& dropout, const Vec<T, 8>& dx, int64_t row, int group,
                                 float (&sum)[8]) {
  Vec<float, 8> d = to_float(dx);
  if (dropout.active) {
    const uint32_t keep = dropout_keep_group(dropout, static_cast<uint32_t>(row), static_cast<uint32_t>(group));
    FRIT_UNROLL
    for (int i = 0; i < 8; ++i) d[i] = keep >> i & 1 ? d[i] * dropout.scale : 0.0f;
  }
  FRIT_UNROLL
  for (int i = 0; i < 8; ++i) sum[i] += d[i];
  return from_float<T>(d);
}

// The xhat form for 16-bit rows by classes of rows that begin equally far past a multiple of 16 bytes: block b takes
// rows of class b % period, batch by batch, each group of `warps` warps a row. A lane has V whole aligned vectors of
// its row; the up to 7 columns before the row's first and the up to 7 behind its last one are one more column in lanes
// 0 to 6 and 8 to 14 of the row's last warp, which keeps their sums in shared memory. A row's vectors are copied to
// shared memory while the rows before it are computed (two; of 4 vectors a lane one), so that registers hold the
// columns' sums and little else; 3 or more vectors a lane are read there a second time. A residual goes through shared
// memory too, from when its row is begun. gamma lies there as fp32. At the end the block's groups are added up in their
// order.
//
// x of 16 bits differs from the mean by a multiple of 2^-11 |x| or more: x * rstd - mean * rstd, which takes one
// instruction, is as good as (x - mean) * rstd.
//
// full: all rows are whole aligned vectors, 256 V columns a warp. Cost: 14.5 instructions an element, and about 100 a
// row and warp.
template <typename T, int V, bool full, typename Below>
FRIT_KERNEL((32 * held_block_warps(V, Below::kDropped ? 3 : 2)), 1)
layer_norm_backward_held_kernel(Below below, HeldBackwardRows s, Global<const T> dy, Global<const T> x,
                                Global<const T> gamma, Global<const float> mean, Global<const float> rstd,
                                Global<const T> dresidual, Global<T> dx, Global<float> partials) {
  wait_for_previous();
  constexpr int N = 8, kStep = 32 * N, kStages = held_stages(V), kRow = V * kStep;  // of a warp's part of a row
  constexpr bool kDropped = Below::kDropped, kEnds = !full && !Below::kWhole;
  static_assert(!kDropped || !kEnds, "dropout's groups of 8 columns are a whole row's vectors");
  constexpr int kEach = (kDropped ? 3 : 2) * N / 4;  // fours of sums of a vector: dgamma's, dbeta's, dz's
  constexpr int kPairs = V * kEach;
  constexpr int kRing = 2 * kStages * V, kOfLane = kRing > kPairs ? kRing : kPairs;  // vectors of 16 bytes
  constexpr bool kAgain = V > 2;           // has the row no room in registers?
  constexpr bool kTight = kEnds && V > 3;  // is there no room for pointers that go from row to row?
  const int warps = s.warps, groups = warp_count() / warps, group = warp() / warps, part = warp() - group * warps;
  const bool alone = warps == 1;
  const int period = kEnds ? s.period : 1, row_class = kEnds ? static_cast<int>(block_index() % period) : 0;
  const int shift = kEnds ? row_shift(x + row_class * s.x_stride) : 0, head = (N - shift) % N;
  const int count = (s.cols - head) / N, tail = (s.cols - head) % N;  // whole vectors; columns behind them
  const int first = part * V * 32 + lane();                           // the lane's first vector
  const bool last = full || first + (V - 1) * 32 < count;             // has it the last one? It has the others.
  const auto has = [&](int k) { return full || k < V - 1 || last; };
  const int begins = head + first * N;  // its column
  int end = -1;  // the single column of this lane and of the one 16 behind it, which loads its dy
  if (kEnds && part == warps - 1) {
    const int i = lane() % 16;
    if (i < head) end = i;
    if (i >= N && i < N + tail) end = head + count * N + i - N;
  }
  const bool has_end = kEnds && end >= 0 && lane() < 16;
  // Row r here is row row_class + r * period.
  const int all_rows = static_cast<int>((s.rows - row_class + period - 1) / period);
  // A batch's rows go to the blocks in turn, so that the last ones, which are few, are not all one block's; ragged
  // ones, which share sectors with their neighbours, stay together.
  const int begin = static_cast<int>(block_index() / period) * s.of_piece + group * s.of_group;
  const auto row_of = [&](int r) { return row_class + int64_t{r} * period; };
  const auto lies_so = [&](const auto& other, int64_t stride) {
    return !kEnds || (row_shift(other + row_class * stride) == shift && (stride * period % N == 0 || all_rows == 1));
  };
  const uint32_t likes = opaque(  // in one register
      (lies_so(dy, s.dy_stride) ? 1u : 0u) | (lies_so(dx, s.dx_stride) ? 2u : 0u) |
      (dresidual && lies_so(dresidual, s.dresidual_stride) ? 4u : 0u));
  const auto dy_like = [&] { return !kEnds || (likes & 1u); };
  const auto dx_like = [&] { return !kEnds || (likes & 2u); };
  const auto residual_like = [&] { return !kEnds || (likes & 4u); };

  // gamma as [part][k][half of a vector][lane][4], the groups' sums of a row, and the rows.
  const int weights = warps * kRow, row_sums = 2 * ((warps + 1) / 2 * 2);
  const Shared<float> mine_of_gamma = shared_array<float>(0) + (part * kRow + lane() * 4);
  const Shared<float> scratch = shared_array<float>(int64_t{4} * weights);
  const int64_t ring_at = int64_t{4} * (weights + kStages * groups * row_sums);
  const Shared<T> ring = shared_array<T>(ring_at) + (warp() * kStages * 2 * kRow + lane() * N);
  // Of the lane's single column: dgamma's sum, dbeta's, gamma, and the row's x and dy side by side.
  const Shared<float> handed = shared_array<float>(ring_at);
  const Shared<float> ends = handed + groups * kOfLane * warps * 128, mine_of_ends = ends + (group * 32 + lane()) * 4;
  const auto slot = [&](int stage, int of, int k) { return (stage * 2 + of) * kRow + k * kStep; };
  const auto weight_of = [&](int k) {
    Vec<float, N> w;
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      const Vec<float, 4> four = load_vec<4>(mine_of_gamma, k * kStep + i * 32);
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) w[i + j] = four[j];
    }
    return w;
  };

  // Of the lane's first column: of the next row to be copied, and of the row that is computed.
  Global<const T> next_x = x + (row_of(begin) * s.x_stride + begins);
  Global<const T> next_dy = dy + (row_of(begin) * s.dy_stride + begins);
  Global<T> lane_dx = dx + (row_of(begin) * s.dx_stride + begins), lane_dz;
  if constexpr (kDropped)
    if (below.dz) lane_dz = below.dz + (begin * below.dz_stride + begins);
  const auto start = [&](int r, int stage) {
    if (r < all_rows) {
      FRIT_UNROLL
      for (int k = 0; k < V; ++k)
        if (has(k)) copy_async16(ring, slot(stage, 0, k), next_x, k * kStep);
      if constexpr (kTight) next_dy = dy + (row_of(r) * s.dy_stride + begins);  // fewer registers
      if (dy_like()) {
        FRIT_UNROLL
        for (int k = 0; k < V; ++k)
          if (has(k)) copy_async16(ring, slot(stage, 1, k), next_dy, k * kStep);
      } else {
        FRIT_UNROLL_BY(1)
        for (int i = 0; i < V * N; ++i)
          if (has(i / N))
            store(ring, slot(stage, 1, i / N) + i % N, load<Cache::kStream>(next_dy, i / N * kStep + i % N));
      }
      next_x = next_x + s.x_step;
      if constexpr (!kTight) next_dy = next_dy + s.dy_step;
    }
    copy_async_commit();
  };
  const auto put = [&](const Global<T>& to, int i, const Vec<T, N>& v) {
    if (!kEnds && s.streams)  // vectors that share a sector with the next row's had better wait for it there
      store_vec<N, Cache::kStream>(to, i, v);
    else
      store_vec<N>(to, i, v);
  };
  const auto x_of_end = [](float both) { return widen(T::from_bits(std::bit_cast<uint32_t>(both) & 0xffffu)); };
  const auto dy_of_end = [](float both) { return widen(T::from_bits(std::bit_cast<uint32_t>(both) >> 16)); };
  const Shared<T> more = shared_array<T>(ring_at + int64_t{512} * groups * (kOfLane * warps + 1)) +
                         (warp() * kRow + lane() * N);  // of the residual's row
  const auto start_more = [&](int r) {
    const Global<const T> from = dresidual + (row_of(r) * s.dresidual_stride + begins);
    FRIT_UNROLL
    for (int k = 0; k < V; ++k)
      if (residual_like() && has(k)) copy_async16(more, k * kStep, from, k * kStep);
    if (!residual_like()) {
      FRIT_UNROLL_BY(1)
      for (int i = 0; i < V * N; ++i)
        if (has(i / N)) store(more, i / N * kStep + i % N, load<Cache::kStream>(from, i / N * kStep + i % N));
    }
  };
  uint32_t of_next = 0;  // lane 15: the row's mean; 31: its rstd; others: bits of x, or of dy, at its ends
  const auto start_single = [&](int r) {
    if (r >= all_rows) return;
    const int64_t row = row_of(r);
    const int l = static_cast<int>(opaque(lane()));  // else the chosen pointers stay in registers from row to row
    if (l % 16 == 15)
      of_next = std::bit_cast<uint32_t>(load(l == 15 ? mean : rstd, row));
    else if (kEnds && end >= 0)
      of_next = load<Cache::kStream>(l < 16 ? x : dy, row * (l < 16 ? s.x_stride : s.dy_stride) + end).bits;
  };
  if (!last) {
    FRIT_UNROLL
    for (int i = 0; i < 2 * kStages; ++i) store_vec<N>(ring, slot(i / 2, i % 2, V - 1), Vec<T, N>{});
  }
  if (has_end) {
    store_vec<2>(mine_of_ends, 0, Vec<float, 2>{});
    if (group == 0) {
      const float w = widen(load<Cache::kReadOnly>(gamma, end));
      for (int of = 0; of < groups; ++of) store(ends, (of * 32 + lane()) * 4 + 2, w);
    }
  }
  start_single(begin);
  FRIT_UNROLL
  for (int i = 0; i < kStages; ++i) start(begin + i * s.step, i);
  for (int j = thread_index(); j < warps * V * 32; j += thread_count()) {
    const Vec<float, N> w = to_float(load_span<N, Cache::kReadOnly>(gamma, head + j * N, head + count * N, T()));
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4)
      store_vec<4>(shared_array<float>(0), j / 32 * kStep + i * 32 + j % 32 * 4, four(w.v, i));
  }
  if (!alone)
    for (int j = thread_index(); j < kStages * groups * row_sums; j += thread_count()) store(scratch, j, 0.0f);
  barrier();

  float sum_gamma[V][N] = {}, sum_beta[V][N] = {}, sum_dz[kDropped ? V : 1][N] = {};
  int stage = 0;  // the row's place in the ring; and its sums' place in scratch: one barrier a row
  const int end_of_batches = all_rows + (alone ? 0 : group * s.of_group);
  for (int r = begin; r < end_of_batches; r += s.step) {
    const bool live = alone || r < all_rows;
    const float scale = std::bit_cast<float>(shuffle(of_next, 31));
    const float below_mean = -std::bit_cast<float>(shuffle(of_next, 15)) * scale;
    if constexpr (kEnds) {
      const uint32_t both = of_next | shuffle_xor(of_next, 16) << 16;
      if (has_end) store(mine_of_ends, 3, std::bit_cast<float>(both));
      if constexpr (!kAgain) warp_barrier();  // dx may be dy, whose single columns another lane has read
    }
    start_single(r + s.step);
    if (dresidual) {
      if (live) start_more(r);
      copy_async_commit();
      copy_async_wait<kStages>();
    } else {
      copy_async_wait<kStages - 1>();
    }

    Vec<T, N> xs[V], dys[V];
    float sum = 0, product = 0;
    if (live) {
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        float of_vector = 0, product_of_vector = 0;
        xs[k] = load_vec<N>(ring, slot(stage, 0, k)), dys[k] = load_vec<N>(ring, slot(stage, 1, k));
        const Vec<float, N> a = to_float(xs[k]), d = to_float(dys[k]), w = weight_of(k);
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) {  // outside of the row dy is 0
          const float hat = fmaf(a[i], scale, below_mean), g = d[i] * w[i];
          of_vector += g, product_of_vector = fmaf(g, hat, product_of_vector);
          sum_gamma[k][i] = fmaf(d[i], hat, sum_gamma[k][i]);
          sum_beta[k][i] += d[i];
        }
        sum += of_vector, product += product_of_vector;
        if constexpr (kAgain) warp_barrier();  // else nvcc loads all vectors at once, and spills
      }
      if (has_end) {
        const Vec<float, 4> own = load_vec<4>(mine_of_ends, 0);
        const float d = dy_of_end(own[3]), hat = fmaf(x_of_end(own[3]), scale, below_mean), g = d * own[2];
        sum += g, product = fmaf(g, hat, product);
        store_vec<2>(mine_of_ends, 0, Vec<float, 2>{{fmaf(d, hat, own[0]), own[1] + d}});
      }
    }
    if constexpr (!kAgain) start(r + kStages * s.step, stage);  // where the row lay, which is in registers by now
    const float of_two = warp_sum_of_two(sum, product);
    if (alone) {
      sum = shuffle(of_two, 0), product = shuffle(of_two, 16);
    } else {
      const Shared<float> sums = scratch + (stage * groups + group) * row_sums;
      if (lane() % 16 == 0) store(sums, part * 2 + lane() / 16, of_two);
      barrier();
      sum = product = 0;
      FRIT_UNROLL
      for (int w = 0; w < 8; w += 2) {
        if (w >= warps) break;
        const Vec<float, 4> two = load_vec<4>(sums, w * 2);
        sum += two[0] + two[2], product += two[1] + two[3];
      }
    }
    if (live) {
      if (dresidual) copy_async_wait<kAgain ? 0 : 1>();
      if constexpr (kTight) lane_dx = dx + (row_of(r) * s.dx_stride + begins);  // fewer registers
      const float mean_product = product * s.by_cols, by_x = -scale * scale * mean_product;
      const float constant = -scale * fmaf(below_mean, mean_product, sum * s.by_cols);
      FRIT_UNROLL
      for (int k = 0; k < V; ++k) {
        if constexpr (kAgain) {
          xs[k] = load_vec<N>(ring, slot(stage, 0, k)), dys[k] = load_vec<N>(ring, slot(stage, 1, k));
        }
        const Vec<float, N> a = to_float(xs[k]), d = to_float(dys[k]), w = weight_of(k);
        Vec<float, N> v;
        FRIT_UNROLL
        for (int i = 0; i < N; ++i) v[i] = fmaf(d[i] * w[i], scale, fmaf(a[i], by_x, constant));
        if (dresidual && has(k)) {
          const Vec<float, N> m = to_float(load_vec<N>(more, k * kStep));
          FRIT_UNROLL
          for (int i = 0; i < N; ++i) v[i] += m[i];
        }
        const Vec<T, N> out = from_float<T>(v);
        if (has(k)) {
          if (dx_like()) {
            put(lane_dx, k * kStep, out);
          } else {
            FRIT_UNROLL
            for (int i = 0; i < N; ++i) store(lane_dx, k * kStep + i, static_cast<T>(out[i]));
          }
          if constexpr (kDropped) {
            const Vec<T, N> z = drop_group(below.dropout, out, r, first + k * 32, sum_dz[k]);
            if (below.dz) put(lane_dz, k * kStep, z);
          }
        }
      }
      if (has_end) {
        const Vec<float, 2> own = load_vec<2>(mine_of_ends, 2);
        float v = fmaf(dy_of_end(own[1]) * own[0], scale, fmaf(x_of_end(own[1]), by_x, constant));
        if (dresidual) v += widen(load(dresidual, row_of(r) * s.dresidual_stride + end));
        store(lane_dx, end - begins, convert<T>(v));
      }
      if constexpr (!kTight) lane_dx = lane_dx + s.dx_step;
      if constexpr (kDropped) lane_dz = lane_dz + s.dz_step;
    }
    if constexpr (kAgain) start(r + kStages * s.step, stage);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  let_next_start();  // there is no room for it before this kernel's blocks end
  copy_async_wait<0>();
  // Four sums of a thread at [group][pair][thread of the group][4], where the rows lay.
  if (alone && kRing == kPairs)
    warp_barrier();
  else
    barrier();  // other warps have read their rows
  const int in_group = part * 32 + lane(), width = warps * 32;
  const auto sums_at = [&](int of, int pair) { return ((of * kPairs + pair) * width + in_group) * 4; };
  FRIT_UNROLL
  for (int k = 0; k < V; ++k) {
    FRIT_UNROLL
    for (int i = 0; i < N; i += 4) {
      store_vec<4>(handed, sums_at(group, k * kEach + i / 4), four(sum_gamma[k], i));
      store_vec<4>(handed, sums_at(group, k * kEach + (N + i) / 4), four(sum_beta[k], i));
      if constexpr (kDropped) store_vec<4>(handed, sums_at(group, k * kEach + (2 * N + i) / 4), four(sum_dz[k], i));
    }
  }
  if (groups > 1) barrier();
  const Global<float> to = partials + block_index() * 2 * s.cols;
  for (int pair = group; pair < kPairs; pair += groups) {
    const int k = pair / kEach, i = pair % kEach * 4;
    if (!has(k)) continue;
    Vec<float, 4> total = load_vec<4>(handed, sums_at(0, pair));
    FRIT_UNROLL_BY(4)
    for (int of = 1; of < groups; ++of) {
      const Vec<float, 4> other = load_vec<4>(handed, sums_at(of, pair));
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) total[j] += other[j];
    }
    const int c = begins + k * kStep + i % N;
    if constexpr (kDropped) {
      if (i >= 2 * N) {
        if (below.partials) store_vec<4>(below.partials, block_index() * s.cols + c, total);
        continue;
      }
    }
    const Global<float> at = i < N ? to : to + s.cols;
    if constexpr (kEnds)
      store_span<4>(at, c, s.cols, total);
    else
      store_vec<4>(at, c, total);
  }
  if (group == 0 && has_end) {
    Vec<float, 2> total = load_vec<2>(mine_of_ends, 0);
    for (int of = 1; of < groups; ++of) {
      const Vec<float, 2> other = load_vec<2>(ends, (of * 32 + lane()) * 4);
      total[0] += other[0], total[1] += other[1];
    }
    store(to, end, total[0]), store(to + s.cols, end, total[1]);
  }
}

// Starts `held` on b.
template <typename T, bool full, typename Below>
void launch_held(Context& context, const BackwardShape& shape, const LayerNormBackward& b, const Below& below) {
  const int vectors = shape.held_vectors();
  const BackwardCut cut = shape.cut(kHeldBackward, Below::kDropped ? 3 : 2);
  const int64_t shared_bytes = cut.shared_bytes + (b.dresidual.defined() ? int64_t{cut.threads()} * 16 * vectors : 0);
  HeldBackwardRows s;
  s.dy_stride = b.dy.row_stride(), s.x_stride = b.x.row_stride();
  s.dresidual_stride = b.dresidual.row_stride(), s.dx_stride = b.dx.row_stride();
  s.rows = shape.rows, s.cols = static_cast<int>(shape.cols);
  s.warps = cut.warps, s.period = static_cast<int>(shape.period);
  s.by_cols = 1.0f / static_cast<float>(shape.cols);
  s.streams = shape.rows * shape.cols * int64_t{sizeof(T)} > int64_t{16} << 20;
  const int64_t step = cut.blocks * cut.groups;  // rows
  s.step = static_cast<int>(step / shape.period);
  s.of_piece = shape.period > 1 ? cut.groups : 1;
  s.of_group = shape.period > 1 ? 1 : static_cast<int>(cut.blocks);
  s.dy_step = step * s.dy_stride, s.x_step = step * s.x_stride, s.dx_step = step * s.dx_stride, s.dz_step = 0;
  if constexpr (Below::kDropped) s.dz_step = step * below.dz_stride;
  const auto start = [&](auto kernel) {
    launch(context, Below::kHeldKernel, kernel, {cut.blocks, cut.threads(), shared_bytes}, below, s,
           global<const T>(b.dy), global<const T>(b.x), global<const T>(b.gamma), global<const float>(b.mean),
           global<const float>(b.rstd), global<const T>(b.dresidual), global<T>(b.dx), global<float>(b.partials));
  };
  if (vectors == 3) return start(layer_norm_backward_held_kernel<T, 3, full, Below>);
  if constexpr (!Below::kDropped)
    if (vectors == 4) return start(layer_norm_backward_held_kernel<T, 4, full, Below>);
  start(layer_norm_backward_held_kernel<T, 2, full, Below>);
}

}  // namespace frit::layer_norm
