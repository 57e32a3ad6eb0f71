// Attention's forward on a GPU for short sequences, f16 and bf16.
#include "frit/ops/attention/short-inl.h"

namespace frit {
namespace {

using namespace attention_short;

// Keys that are on their way to shared memory together, and that a warp takes at a time.
constexpr int kStage = kAttentionForwardStage;
// How far a score, in units of log 2, may be above what the exponentials are about: sums stay far below the largest f32
// and probabilities below the largest f16.
constexpr float kSlack = 8.0f;
constexpr float kLowest = -3.4028234663852886e38f;

// What a warp has of its 16 queries so far.
template <int D>
struct Running {
  float sums[D / 8][4];
  float about[2];  // exponentials are 2^(score - about)
  float total[2];  // of the exponentials, this lane's share
};

// 8 * N keys for the warp's queries. Of a row's scores, those of keys limits[h] and on are not seen (edge: there are
// any). mask: the queries' words for these keys.
template <typename T, int D, int N>
FRIT_DEVICE void take_keys(Running<D>& run, const uint32_t (&queries)[D / 16][4], const Shared<T>& k,
                           const Shared<T>& v, float scale, bool edge, const int (&limits)[2], bool dropping,
                           const Shared<uint32_t>& mask) {
  const int c = lane() % 4;
  float s[N][4];
  clear(s);
  FRIT_UNROLL
  for (int x = 0; x < D / 16; ++x) multiply_step<T, D>(s, queries[x], k, x);
  if (edge) {
    FRIT_UNROLL
    for (int j = 0; j < N; ++j) {
      FRIT_UNROLL
      for (int e = 0; e < 4; ++e)
        if (8 * j + 2 * c + e % 2 >= limits[e / 2]) s[j][e] = -INFINITY;
    }
  }
  float top[2];
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    float even = s[0][2 * h], odd = s[0][2 * h + 1];
    FRIT_UNROLL
    for (int j = 1; j < N; ++j) even = fmaxf(even, s[j][2 * h]), odd = fmaxf(odd, s[j][2 * h + 1]);
    top[h] = fmaxf(even, odd) * scale;
  }
  // Most steps but the first find no score far above what they know: nothing is exchanged then, and nothing scaled.
  if (ballot(top[0] > run.about[0] + kSlack || top[1] > run.about[1] + kSlack) != 0) {
    FRIT_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float largest = warp_max<4>(top[h]);
      const float about = largest > run.about[h] + kSlack ? largest : run.about[h];
      const float shrink = exp2_fast(run.about[h] - about);
      run.about[h] = about;
      run.total[h] *= shrink;
      FRIT_UNROLL
      for (int n = 0; n < D / 8; ++n) run.sums[n][2 * h] *= shrink, run.sums[n][2 * h + 1] *= shrink;
    }
  }
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    float even = 0, odd = 0;
    FRIT_UNROLL
    for (int j = 0; j < N; ++j) {
      float &x = s[j][2 * h], &y = s[j][2 * h + 1];
      x = exp2_fast(fmaf(x, scale, -run.about[h])), y = exp2_fast(fmaf(y, scale, -run.about[h]));
      even += x, odd += y;
    }
    run.total[h] += even + odd;
  }
  uint32_t p[N / 2][4];
  round_to_left<T>(p, s);
  if (dropping) {
    FRIT_UNROLL
    for (int h = 0; h < 2; ++h) {
      FRIT_UNROLL
      for (int w = 0; w < N / 4; ++w) {
        const uint32_t odd = load(mask, 8 * h * kMaskRow + w) << (6 - 2 * c), even = odd << 1;
        p[2 * w][h] &= spread_signs<0>(even, odd);
        p[2 * w][2 + h] &= spread_signs<1>(even, odd);
        p[2 * w + 1][h] &= spread_signs<2>(even, odd);
        p[2 * w + 1][2 + h] &= spread_signs<3>(even, odd);
      }
    }
  }
  multiply_columns<T, D>(run.sums, p, v);
}

// A block takes `tile` = 16 queries a warp of one sequence and head; heads run fastest, so that neighbouring blocks
// read the neighbouring pieces of the same tokens. Keys and values come in stages, all of them under way from the
// beginning.
template <typename T, int D>
FRIT_KERNEL(256, (D == 128 ? 1 : 2))
attention_forward_short_kernel(Rows<const T> q, Rows<const T> k, Rows<const T> v, Global<const int32_t> q_offsets,
                               Global<const int32_t> k_offsets, Geometry geometry, DropoutTable dropout, Rows<T> out,
                               Global<float> lse) {
  wait_for_previous();
  let_next_start();
  const int tile = warp_count() * 16, tiles = (geometry.max_q + tile - 1) / tile;
  const int heads = geometry.heads, block = static_cast<int>(block_index()), work = geometry.sequences * tiles * heads;
  if (block >= work) {
    const int64_t end = offset_at(q_offsets, geometry.sequences, geometry.q_tokens);
    zero_rows(out, end, geometry.q_tokens, heads * D, block - work);
    minus_infinity_rows(lse, end, geometry.q_tokens, heads, block - work);
    return;
  }
  const int head = block % heads, first = block / heads % tiles * tile;
  const Sequence at = sequence_at(q_offsets, k_offsets, geometry, block / heads / tiles);
  if (first >= at.lq) return;
  const int rows = least(tile, at.lq - first), keys = at.visible(first + rows - 1, geometry.causal);

  constexpr int kRow = kRowOf<D>;
  const int64_t key_bytes = static_cast<int64_t>(round_up(geometry.max_k, 32)) * kRow * sizeof(T);
  const Shared<T> ks = shared_array<T>(0), vs = shared_array<T>(key_bytes), qs = shared_array<T>(2 * key_bytes);
  const int64_t mask_at = 2 * key_bytes + static_cast<int64_t>(tile) * kRow * sizeof(T);
  const int padded_keys = round_up(keys, 32);
  const Global<const T> k_rows = k.at(at.k_first, head, D), v_rows = v.at(at.k_first, head, D);
  load_rows<T, D>(qs, q.at(at.q_first + first, head, D), q.stride, rows, round_up(rows, 16));
  int stages = 0;
  do {
    const int begin = stages * kStage, end = least(padded_keys, begin + kStage);
    load_rows<T, D>(ks, k_rows, k.stride, keys, end, begin);
    load_rows<T, D>(vs, v_rows, v.stride, keys, end, begin);
    copy_async_commit();
  } while (++stages * kStage < padded_keys);

  const int mine = warp() * 16, g = lane() / 4, c = lane() % 4;
  const int last_keys = mine < rows ? least(at.visible(first + mine + 15, geometry.causal), keys) : 0;
  if (dropout.active)
    fill_mask(shared_array<uint16_t>(mask_at) + mine * kMaskRow * 2, dropout, at, first + mine, last_keys, last_keys,
              head);
  // Scores are in units of log 2; no zero, which times -inf were NaN.
  const float scale = fmaxf(fabsf(geometry.scale) * 1.4426950408889634f, 1e-30f);
  const int sure_keys = at.visible(first + mine, geometry.causal);  // all 16 queries see these
  const int limits[2] = {at.visible(first + mine + g, geometry.causal),
                         at.visible(first + mine + g + 8, geometry.causal)};

  uint32_t queries[D / 16][4];
  Running<D> run;
  clear(run.sums);
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) run.about[h] = kLowest, run.total[h] = 0;
  for (int stage = 0; stage < stages; ++stage) {
    const int later = stages - 1 - stage;
    if (later == 0)
      copy_async_wait<0>();
    else if (later == 1)
      copy_async_wait<1>();
    else if (later == 2)
      copy_async_wait<2>();
    else
      copy_async_wait<3>();
    barrier();
    if (stage == 0 && mine < rows) {
      FRIT_UNROLL
      for (int x = 0; x < D / 16; ++x) {
        left_fragment<D>(queries[x], qs + mine * kRow, x);
        if (geometry.scale < 0) {
          FRIT_UNROLL
          for (int i = 0; i < 4; ++i) queries[x][i] ^= 0x80008000u;
        }
      }
    }
    const int key = stage * kStage;
    const auto take = [&](auto count) {
      constexpr int N = decltype(count)::value;
      const int relative[2] = {limits[0] - key, limits[1] - key};
      take_keys<T, D, N>(run, queries, ks + key * kRow, vs + key * kRow, scale, key + 8 * N > sure_keys, relative,
                         dropout.active, shared_array<uint32_t>(mask_at) + ((mine + g) * kMaskRow + key / 32));
    };
    if (last_keys > key + kStage / 2)
      take(std::integral_constant<int, kStage / 8>());
    else if (last_keys > key)
      take(std::integral_constant<int, kStage / 16>());
  }
  if (mine >= rows) return;
  float factor[2];
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    const float sum = warp_sum<4>(run.total[h]);
    factor[h] = sum == 0 ? 0.0f : (dropout.active ? dropout.scale : 1.0f) * reciprocal_fast(sum);
    const int row = mine + g + 8 * h;
    if (c == 0 && row < rows)
      store(lse, (at.q_first + first + row) * heads + head,
            sum == 0 ? -INFINITY : (run.about[h] + log2_fast(sum)) * 0.6931471805599453f);
  }
  store_rows_by<T, D>(2 * key_bytes + mine * kRow * int64_t{sizeof(T)}, out.at(at.q_first + first + mine, head, D),
                      out.stride, rows - mine, run.sums, factor);
}

constexpr const char* kNames[] = {"tile16", "tile32", "tile64", "tile128"};

template <typename T, int D>
void forward(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  const Geometry geometry = geometry_of(args);
  const int max_q = geometry.max_q, max_k = geometry.max_k;
  const auto shared_bytes = [&](int64_t tile) {
    return (2 * round_up(max_k, 32) + tile) * kRowOf<D> * int64_t{sizeof(T)} +
           (args.dropout.active() ? tile * kMaskRow * 4 : 0);
  };
  int fallback = 0;
  while (16 << fallback < attention_short_tile(geometry.sequences, geometry.heads, max_q)) ++fallback;
  const std::string key = fmt::format("q{} k{} D{} {}{}{}", max_q, max_k, D, geometry.causal ? "causal " : "",
                                      args.dropout.active() ? "dropout " : "", name_of(args.q.dtype()));
  const int64_t tile = 16 << choose_instance(context, "attention_forward", key, kNames, fallback, [&](int i) {
                         return shared_bytes(16 << i) <= context.gpu().shared_bytes_limit();
                       });
  const int64_t blocks = geometry.sequences * ((max_q + tile - 1) / tile) * geometry.heads + kAttentionTailBlocks;
  launch(context, "attention_forward_short_kernel", attention_forward_short_kernel<T, D>,
         {blocks, static_cast<int>(2 * tile), shared_bytes(tile)}, rows_of<const T>(args.q), rows_of<const T>(args.k),
         rows_of<const T>(args.v), global<const int32_t>(args.q_offsets), global<const int32_t>(args.k_offsets),
         geometry, DropoutTable(args.dropout), rows_of<T>(out), global<float>(lse));
}

}  // namespace

int64_t attention_short_tile(int64_t sequences, int64_t heads, int64_t max_q) {
  int64_t tile = 16;
  while (tile < 128 && tile < max_q) tile *= 2;
  // Few sequences: smaller blocks keep more multiprocessors busy, though each reads the keys again.
  while (tile > 32 && sequences * heads * ((max_q + tile - 1) / tile) < 128) tile /= 2;
  return tile;
}

void attention_short_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  if (out.numel() == 0) return;
  if (args.q.dtype() == DType::kF32) return attention_short_forward_f32_gpu(context, args, out, lse);
  dispatch_width(args.q.dim(2), [&](auto width) {
    if (args.q.dtype() == DType::kBF16)
      forward<bfloat16, width()>(context, args, out, lse);
    else
      forward<float16, width()>(context, args, out, lse);
  });
}

}  // namespace frit
