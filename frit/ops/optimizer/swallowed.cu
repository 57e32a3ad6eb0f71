// Counts the updates that get lost. Looked at now and then: few instances, branches on what the run keeps instead.
#include "frit/ops/optimizer/update-inl.h"

namespace frit {
namespace {

using namespace optimizer_kernels;

using Count = unsigned long long;  // what counters can be added to atomically
static_assert(sizeof(Count) == sizeof(int64_t));

// A warp looks at kTile neighbours, so that slices cost few atomic additions.
constexpr int64_t kTile = 8 * kWarpElements;
constexpr int kChunk = kWarpSize * kGroup;

// Blocks that the precision has no use for are false.
template <typename P>
struct Watched {
  Global<const P> p;  // where no master is
  Global<const bfloat16> residual;
  Global<const float> master, g_wide;
  Global<const P> g;  // where g_wide is false
  Global<const float> m, v;
  bool adam, alone;  // alone: what the run keeps is 16 bits
  uint32_t seed;
  int64_t count, decay_end;
  Global<const int64_t> ends;
  int64_t slices;
};

// The slice that `element` lies in: the first that ends behind it; `slices` if none does.
FRIT_DEVICE int64_t slice_of(const Global<const int64_t>& ends, int64_t slices, int64_t element) {
  int64_t first = 0;
  while (slices > 0) {
    const int64_t half = slices / 2;
    const bool before = load(ends, first + half) <= element;
    first = before ? first + half + 1 : first;
    slices = before ? slices - half - 1 : half;
  }
  return first;
}

FRIT_DEVICE uint32_t warp_count_sum(uint32_t x) {
  FRIT_UNROLL
  for (int bits = kWarpSize / 2; bits > 0; bits /= 2) x += shuffle_xor(x, bits);
  return x;
}

// Bit i of each: does element i of the group move, and does it stay where it is all the same?
struct Found {
  uint32_t moves, stays;
};
template <typename P>
FRIT_DEVICE Found look(const OptimizerConstants& c, const Watched<P>& b, int64_t at, bool inside,
                       const uint32_t (&random)[kGroup]) {
  Four p;
  if (b.master) {
    p = load_four(b.master, at, b.count, inside);
  } else {
    const Vec<P, kGroup> narrow = load_four(b.p, at, b.count, inside);
    p = to_float(narrow);
    if constexpr (std::is_same_v<P, bfloat16>) {
      if (b.residual) {
        const Vec<bfloat16, kGroup> low = load_four(b.residual, at, b.count, inside);
        FRIT_UNROLL
        for (int i = 0; i < kGroup; ++i) p[i] = join_float({narrow[i].bits, low[i].bits});
      }
    }
  }
  const Four g = b.g_wide ? load_four(b.g_wide, at, b.count, inside) : to_float(load_four(b.g, at, b.count, inside));
  const bool has_m = static_cast<bool>(b.m);
  Four m = has_m ? load_four(b.m, at, b.count, inside) : Four{},
       v = b.adam ? load_four(b.v, at, b.count, inside) : Four{};
  Found found = {};
  FRIT_UNROLL
  for (int i = 0; i < kGroup; ++i) {
    const bool decays = at + i < b.decay_end;
    float moved = p[i];
    const float step = b.adam ? update<true>(c, decays, has_m, moved, g[i], m[i], v[i])
                              : update<false>(c, decays, has_m, moved, g[i], m[i], v[i]);
    float kept = moved;
    if constexpr (sizeof(P) == 2) {
      if (b.alone) kept = widen(c.nearest ? convert<P>(moved) : round_stochastic(P(), moved, random[i]));
    }
    found.moves |= step != 0 || moved != p[i] ? 1u << i : 0u;
    found.stays |= kept == p[i] ? 1u << i : 0u;
  }
  found.stays &= found.moves;
  return found;
}

template <typename P>
FRIT_KERNEL(kThreads, 2)
optimizer_swallowed_kernel(OptimizerConstants given, Global<const float> prepared, Watched<P> b, Global<Count> counts) {
  wait_for_previous();
  const int64_t tile = (block_index() * kWarps + warp()) * kTile;
  if (tile >= b.count) return;
  const OptimizerConstants c = prepared ? load_constants(prepared) : given;
  if (!c.update) return;
  const int64_t tile_end = tile + kTile < b.count ? tile + kTile : b.count;
  // The slice the warp is in, and this lane's elements of it that are not in counts yet. Behind the last slice nothing
  // counts.
  int64_t slice = slice_of(b.ends, b.slices, tile);
  int64_t end = slice < b.slices ? load(b.ends, slice) : b.count;
  Found pending = {};
  const auto flush = [&] {
    const uint32_t moves = warp_count_sum(pending.moves), stays = warp_count_sum(pending.stays);
    if (lane() == 0 && moves > 0 && slice < b.slices) {
      atomic_add(counts, 2 * slice, static_cast<Count>(moves));
      atomic_add(counts, 2 * slice + 1, static_cast<Count>(stays));
    }
    pending = {};
  };
  for (int64_t warp_first = tile; warp_first < tile_end; warp_first += kWarpElements) {
    const bool inside = warp_first + kWarpElements <= b.count;
    uint32_t random[kGroups][kGroup] = {};
    if (b.alone && !c.nearest) rounding_bits({b.seed, c.step}, warp_first + lane() * kGroup, random);
    FRIT_UNROLL
    for (int k = 0; k < kGroups; ++k) {
      const int64_t chunk = warp_first + k * kChunk, mine = chunk + lane() * kGroup;
      const int64_t chunk_end = chunk + kChunk < tile_end ? chunk + kChunk : tile_end;
      if (chunk >= chunk_end) continue;
      const Found found = look(c, b, mine, inside, random[k]);
      if (end >= chunk_end) {
        pending.moves += static_cast<uint32_t>(count_bits(found.moves));
        pending.stays += static_cast<uint32_t>(count_bits(found.stays));
      } else {  // slices end in it: each element on its own
        int64_t s = slice, s_end = end;
        for (int i = 0; i < kGroup; ++i) {
          while (s < b.slices && s_end <= mine + i) s_end = ++s < b.slices ? load(b.ends, s) : b.count;
          if (s == b.slices || !(found.moves >> i & 1)) continue;
          atomic_add(counts, 2 * s, Count{1});
          if (found.stays >> i & 1) atomic_add(counts, 2 * s + 1, Count{1});
        }
      }
      if (end <= chunk_end) {
        flush();
        while (slice < b.slices && end <= chunk_end) end = ++slice < b.slices ? load(b.ends, slice) : b.count;
      }
    }
  }
  flush();
}

}  // namespace

void optimizer_swallowed_gpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                             const Tensor& prepared, const OptimizerBlocks& t, const Tensor& slice_ends,
                             const Tensor& counts) {
  const int64_t count = t.parameters.numel(), slices = slice_ends.numel();
  const int64_t blocks = slices == 0 ? 0 : (count + kTile * kWarps - 1) / (kTile * kWarps);
  dispatch_float(t.parameters.dtype(), [&]<typename P>(P) {
    Watched<P> b = {};
    b.adam = args.kind != OptimizerKind::kSgd;
    b.alone = t.precision == Precision::kBF16Stochastic || t.precision == Precision::kF16Stochastic;
    if (keeps_master(t.precision))
      b.master = global<const float>(t.master);
    else
      b.p = global<const P>(t.parameters);
    if (t.precision == Precision::kBF16Residual) b.residual = global<const bfloat16>(t.residual);
    if (t.gradients.dtype() == DType::kF32)
      b.g_wide = global<const float>(t.gradients);
    else
      b.g = global<const P>(t.gradients);
    if (b.adam || args.momentum != 0) b.m = global<const float>(t.moment1);
    if (b.adam) b.v = global<const float>(t.moment2);
    b.seed = args.seed, b.count = count, b.decay_end = args.decay_end;
    b.ends = global<const int64_t>(slice_ends), b.slices = slices;
    launch(context, "optimizer_swallowed_kernel", optimizer_swallowed_kernel<P>, {blocks, kThreads}, constants,
           global<const float>(prepared), b, Global<Count>(reinterpret_cast<Count*>(counts.data<int64_t>())));
  });
}

}  // namespace frit
