// Attention's forward on a GPU for short sequences, f16 and bf16.
#include "frit/ops/attention/short-inl.h"

namespace frit {
namespace {

using namespace attention_short;

// A block takes `tile` = 16 queries a warp of one sequence and head; heads run fastest, so that neighbouring blocks
// read the neighbouring pieces of the same tokens.
template <typename T, int D>
FRIT_KERNEL(256, (D == 128 ? 1 : 2))
attention_forward_short_kernel(Rows<const T> q, Rows<const T> k, Rows<const T> v, Global<const int32_t> q_offsets,
                               Global<const int32_t> k_offsets, Geometry geometry, Dropout dropout, Rows<T> out,
                               Global<float> lse) {
  wait_for_previous();
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
  const bool dropping = dropout.active();

  constexpr int kRow = kRowOf<D>;
  const int64_t key_bytes = static_cast<int64_t>(round_up(geometry.max_k, 32)) * kRow * sizeof(T);
  const Shared<T> ks = shared_array<T>(0), vs = shared_array<T>(key_bytes), qs = shared_array<T>(2 * key_bytes);
  const int64_t mask_at = 2 * key_bytes + static_cast<int64_t>(tile) * kRow * sizeof(T);
  const int padded_keys = round_up(keys, 32), padded_rows = round_up(rows, 16);
  load_rows<T, D>(qs, q.at(at.q_first + first, head, D), q.stride, rows, padded_rows);
  load_rows<T, D>(ks, k.at(at.k_first, head, D), k.stride, keys, padded_keys);
  load_rows<T, D>(vs, v.at(at.k_first, head, D), v.stride, keys, padded_keys);
  copy_async_commit();
  if (dropping)
    fill_mask(shared_array<uint16_t>(mask_at), dropout, at, first, rows, padded_rows, head, geometry.causal);
  copy_async_wait<0>();
  barrier();

  const int mine = warp() * 16, g = lane() / 4, c = lane() % 4;
  if (mine >= rows) return;
  const float scale = geometry.scale * 1.4426950408889634f;  // scores in units of log 2
  const int last_keys = least(at.visible(first + mine + 15, geometry.causal), keys);
  const int sure_keys = at.visible(first + mine, geometry.causal);  // all 16 queries see these
  const int limits[2] = {at.visible(first + mine + g, geometry.causal),
                         at.visible(first + mine + g + 8, geometry.causal)};
  const Shared<uint32_t> mask = shared_array<uint32_t>(mask_at) + (mine + g) * kMaskRow;

  uint32_t queries[D / 16][4];
  FRIT_UNROLL
  for (int x = 0; x < D / 16; ++x) left_fragment<D>(queries[x], qs + mine * kRow, x);
  float sums[D / 8][4];
  clear(sums);
  float top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  for (int first_key = 0; first_key < last_keys; first_key += 32) {
    float s[4][4];
    clear(s);
    FRIT_UNROLL
    for (int x = 0; x < D / 16; ++x) multiply_step<T, D>(s, queries[x], ks + first_key * kRow, x);
    const bool edge = first_key + 32 > sure_keys;
    FRIT_UNROLL
    for (int h = 0; h < 2; ++h) {
      float largest = top[h];
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        FRIT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * h + e];
          x *= scale;
          if (edge && first_key + 8 * j + 2 * c + e >= limits[h]) x = -INFINITY;
          largest = x > largest ? x : largest;
        }
      }
      largest = warp_max<4>(largest);
      const float base = largest == -INFINITY ? 0.0f : largest;  // no visible key yet
      const float shrink = exp2_fast(top[h] - base);
      top[h] = largest;
      total[h] *= shrink;
      FRIT_UNROLL
      for (int n = 0; n < D / 8; ++n) sums[n][2 * h] *= shrink, sums[n][2 * h + 1] *= shrink;
      const uint32_t kept = dropping ? load(mask, 8 * h * kMaskRow + first_key / 32) >> (2 * c) : 0;
      FRIT_UNROLL
      for (int j = 0; j < 4; ++j) {
        FRIT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * h + e];
          x = exp2_fast(x - base);
          total[h] += x;
          if (dropping && !(kept >> (8 * j + e) & 1)) x = 0;
        }
      }
    }
    uint32_t p[2][4];
    round_to_left<T>(p, s);
    multiply_columns<T, D>(sums, p, vs + first_key * kRow);
  }
  float factor[2];
  FRIT_UNROLL
  for (int h = 0; h < 2; ++h) {
    const float sum = warp_sum<4>(total[h]);
    factor[h] = sum == 0 ? 0.0f : (dropping ? dropout.scale() : 1.0f) / sum;
    const int row = mine + g + 8 * h;
    if (c == 0 && row < rows)
      store(lse, (at.q_first + first + row) * heads + head,
            sum == 0 ? -INFINITY : (top[h] + log2_fast(sum)) * 0.6931471805599453f);
  }
  store_rows<T, D>(out.at(at.q_first + first + mine, head, D), out.stride, rows - mine, sums, factor);
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
         geometry, args.dropout, rows_of<T>(out), global<float>(lse));
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
