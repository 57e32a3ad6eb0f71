#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "frit/ops/optimizer/cpu.cc"
#include <hwy/foreach_target.h>
// After foreach_target.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "frit/backend/cpu/simd-inl.h"
#include "frit/ops/optimizer/cpu.h"

HWY_BEFORE_NAMESPACE();
namespace frit::HWY_NAMESPACE {

// 16 random bits for each element of an aligned group of elements (a power of two of them, 8 a Philox block). Each
// 64-bit lane runs one block, so that a 32x32 -> 64 product is one instruction.
class RoundingBits {
 public:
  explicit RoundingBits(PhiloxKey key) {
    for (int round = 0; round < kRounds;
         ++round) {  // as vectors, once: a broadcast a round would cost more than the round
      hn::Store(hn::Set(kDu64, key.k0), kDu64, keys_[2 * round]);
      hn::Store(hn::Set(kDu64, key.k1), kDu64, keys_[2 * round + 1]);
      key.k0 += kPhiloxW0, key.k1 += kPhiloxW1;
    }
  }
  static size_t group() { return 8 * hn::Lanes(kDu64); }
  // Writes group() numbers.
  HWY_INLINE void fill(int64_t group_begin, uint16_t* bits) const {
    const V64 m0 = hn::Set(kDu64, kPhiloxM0), m1 = hn::Set(kDu64, kPhiloxM1), low = hn::Set(kDu64, 0xffffffffull);
    const V64 block = hn::Iota(kDu64, static_cast<uint64_t>(group_begin) / 8);
    // The upper halves of c0..c3 hold rubbish between rounds: products read the lower halves alone.
    V64 c0 = block, c1 = hn::ShiftRight<32>(block), c2 = hn::Zero(kDu64), c3 = hn::Set(kDu64, kRoundingSite);
    for (int round = 0; round < kRounds; ++round) {
      const V64 p0 = product(m0, c0), p1 = product(m1, c2);
      c0 = hn::Xor(hn::ShiftRight<32>(p1), hn::Xor(c1, hn::Load(kDu64, keys_[2 * round])));
      c2 = hn::Xor(hn::ShiftRight<32>(p0), hn::Xor(c3, hn::Load(kDu64, keys_[2 * round + 1])));
      c1 = p1, c3 = p0;
    }
    hn::StoreInterleaved2(hn::Or(hn::And(c0, low), hn::ShiftLeft<32>(c1)),
                          hn::Or(hn::And(c2, low), hn::ShiftLeft<32>(c3)), kDu64, reinterpret_cast<uint64_t*>(bits));
  }

 private:
  using D64 = hn::ScalableTag<uint64_t>;
  using V64 = hn::Vec<D64>;
  static constexpr int kRounds = 10;
  static constexpr D64 kDu64{};
  static HWY_INLINE V64 product(V64 a, V64 b) {
    const hn::Repartition<uint32_t, D64> du32;
    return hn::MulEven(hn::BitCast(du32, a), hn::BitCast(du32, b));
  }
  HWY_ALIGN uint64_t keys_[2 * kRounds][HWY_MAX_BYTES / sizeof(uint64_t)];
};

HWY_INLINE auto load_bits(const bfloat16* p) {
  return hn::PromoteTo(DU32(), hn::LoadU(DU16Half(), reinterpret_cast<const uint16_t*>(p)));
}
// Lanes are below 65536.
template <typename V>
HWY_INLINE void store_bits(V v, bfloat16* p) {
  const hn::RebindToSigned<DU32> di;
  hn::StoreU(hn::DemoteTo(DU16Half(), hn::BitCast(di, v)), DU16Half(), reinterpret_cast<uint16_t*>(p));
}

// Pointers to one vector's elements in each block.
template <typename P, typename G>
struct Slots {
  P* p;
  const G* g;
  float* m;
  float* v;
  float* master;
  bfloat16* residual;
  const uint16_t* random;
};

// The current fp32 value of the parameters.
template <Precision kPrecision, typename P, typename G>
HWY_INLINE VF load_parameters(const Slots<P, G>& s) {
  if constexpr (kPrecision == Precision::kBF16Master) {
    return load(s.master);
  } else if constexpr (kPrecision == Precision::kBF16Residual) {
    const auto low = load_bits(s.residual);
    const auto high = hn::Sub(load_bits(s.p), hn::ShiftRight<15>(low));  // as join_float
    return hn::BitCast(DF(), hn::Or(hn::ShiftLeft<16>(high), low));
  } else {
    return load(s.p);
  }
}

template <Precision kPrecision, typename P, typename G>
HWY_INLINE void store_parameters(VF value, [[maybe_unused]] bool nearest, const Slots<P, G>& s) {
  const DU32 du;
  // One NaN for all: adding to the bits of some would run over into the sign and make a number of them.
  const auto u = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), hn::Set(du, 0x7fc00000u), hn::BitCast(du, value));
  if constexpr (kPrecision == Precision::kBF16Master) {
    store(value, s.master);
    store(value, s.p);
  } else if constexpr (kPrecision == Precision::kBF16Residual) {  // as split_float
    store_bits(hn::ShiftRight<16>(hn::Add(u, hn::Set(du, 0x8000u))), s.p);
    store_bits(hn::And(u, hn::Set(du, 0xffffu)), s.residual);
  } else if constexpr (kPrecision == Precision::kBF16Stochastic) {
    if (nearest) return store(value, s.p);
    const auto random = hn::PromoteTo(du, hn::LoadU(DU16Half(), s.random));
    store_bits(hn::ShiftRight<16>(hn::Add(u, random)), s.p);
  } else {
    store(value, s.p);
  }
}

// One update of a vector of elements; returns the step that p took, without AdamW's decay. m is ignored and not kept
// unless has_m. Mul and Add stay apart on purpose, see "Math" in optimizer.h.
template <bool kAdam>
HWY_INLINE VF update_values(const OptimizerConstants& c, bool has_m, VF g, VF& p, VF& m, VF& v) {
  const DF d;
  g = hn::Mul(hn::Set(d, c.gradient_scale), g);
  g = hn::Add(g, hn::Mul(hn::Set(d, c.weight_decay_l2), p));
  VF step;
  if constexpr (kAdam) {
    p = hn::Mul(p, hn::Set(d, c.weight_keep));
    const VF difference = hn::Sub(g, m);
    m = c.lerp_from_gradient ? hn::Sub(g, hn::Mul(hn::Set(d, c.beta1), difference))
                             : hn::Add(m, hn::Mul(hn::Set(d, c.one_minus_beta1), difference));
    v = hn::Add(hn::Mul(v, hn::Set(d, c.beta2)), hn::Mul(hn::Mul(hn::Set(d, c.one_minus_beta2), g), g));
    const VF denominator = hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, c.bias2_sqrt)), hn::Set(d, c.eps));
    step = hn::Div(hn::Mul(hn::Set(d, c.minus_step_size), m), denominator);
  } else {
    m = has_m ? hn::Add(hn::Mul(m, hn::Set(d, c.momentum)), g) : g;
    step = hn::Mul(hn::Set(d, c.minus_step_size), m);
  }
  p = hn::Add(p, step);
  return step;
}

template <bool kAdam, Precision kPrecision, typename P, typename G>
HWY_INLINE void update_vector(const OptimizerConstants& c, const Slots<P, G>& s) {
  VF p = load_parameters<kPrecision>(s), m = hn::Zero(DF()), v = m;
  if (kAdam || s.m) m = load(s.m);
  if constexpr (kAdam) v = load(s.v);
  update_values<kAdam>(c, s.m != nullptr, load(s.g), p, m, v);
  if (kAdam || s.m) store(m, s.m);
  if constexpr (kAdam) store(v, s.v);
  store_parameters<kPrecision>(p, c.nearest != 0, s);
}

template <typename T>
HWY_INLINE T* shift(T* p, int64_t i) {
  return p ? p + i : nullptr;
}

// c by value: a local copy cannot alias what the loop stores.
// Elements [begin, end), which lie in one rounding group if random is given (random[0] belongs to `begin`).
template <bool kAdam, Precision kPrecision, typename P, typename G>
HWY_INLINE void update_run(OptimizerConstants c, const Slots<P, G>& base, int64_t begin, int64_t end,
                           const uint16_t* random) {
  const int64_t step = static_cast<int64_t>(lanes());
  const auto slots = [&](int64_t i) {
    return Slots<P, G>{base.p + i,
                       base.g + i,
                       shift(base.m, i),
                       shift(base.v, i),
                       shift(base.master, i),
                       shift(base.residual, i),
                       shift(random, i - begin)};
  };
  int64_t i = begin;
  for (; i + step <= end; i += step) update_vector<kAdam, kPrecision>(c, slots(i));
  if (i == end) return;
  // The tail runs as a whole vector on copies, so that its bits are those of any other place.
  constexpr size_t kMost = HWY_MAX_BYTES / sizeof(float);
  P p[kMost] = {};
  G g[kMost] = {};
  float m[kMost] = {}, v[kMost] = {}, master[kMost] = {};
  bfloat16 residual[kMost] = {};
  uint16_t bits[kMost] = {};
  const Slots<P, G> from = slots(i);
  const size_t n = static_cast<size_t>(end - i);
  const auto copy = [n](auto* to, const auto* source) {
    if (source) std::memcpy(to, source, n * sizeof(*to));
  };
  copy(p, from.p), copy(g, from.g), copy(m, from.m), copy(v, from.v), copy(master, from.master);
  copy(residual, from.residual), copy(bits, from.random);
  update_vector<kAdam, kPrecision>(
      c, Slots<P, G>{p, g, from.m ? m : nullptr, from.v ? v : nullptr, master, residual, bits});
  const auto copy_back = [n](auto* to, const auto* source) {
    if (to) std::memcpy(to, source, n * sizeof(*to));
  };
  copy_back(from.p, p), copy_back(from.m, m), copy_back(from.v, v), copy_back(from.master, master);
  copy_back(from.residual, residual);
}

template <bool kAdam, Precision kPrecision, typename P, typename G>
void update(const OptimizerConstants& c, const OptimizerBlocks& b, PhiloxKey key, int64_t begin, int64_t end) {
  const auto floats = [](const Tensor& t) { return t.defined() ? t.data<float>() : nullptr; };
  Slots<P, G> base{b.parameters.data<P>(), b.gradients.data<G>(), nullptr, nullptr, nullptr, nullptr, nullptr};
  if (kAdam || c.momentum != 0) base.m = floats(b.moment1);
  if (kAdam) base.v = floats(b.moment2);
  if (kPrecision == Precision::kBF16Master) base.master = floats(b.master);
  if (kPrecision == Precision::kBF16Residual) base.residual = b.residual.data<bfloat16>();
  if constexpr (kPrecision == Precision::kBF16Stochastic) {
    HWY_ALIGN uint16_t bits[8 * HWY_MAX_BYTES / sizeof(uint64_t)];
    const int64_t group = static_cast<int64_t>(RoundingBits::group());
    const RoundingBits rounding(key);
    while (begin < end) {
      const int64_t group_begin = begin / group * group, stop = std::min(end, group_begin + group);
      rounding.fill(group_begin, bits);
      update_run<kAdam, kPrecision>(c, base, begin, stop, bits + (begin - group_begin));
      begin = stop;
    }
  } else {
    update_run<kAdam, kPrecision>(c, base, begin, end, nullptr);
  }
}

template <bool kAdam>
void update_kind(const OptimizerConstants& c, const OptimizerBlocks& b, PhiloxKey key, int64_t begin, int64_t end) {
  const auto bf16 = [&]<Precision kPrecision>() {
    if (b.gradients.dtype() == DType::kF32)
      update<kAdam, kPrecision, bfloat16, float>(c, b, key, begin, end);
    else
      update<kAdam, kPrecision, bfloat16, bfloat16>(c, b, key, begin, end);
  };
  switch (b.precision) {
    case Precision::kF32:
      return update<kAdam, Precision::kF32, float, float>(c, b, key, begin, end);
    case Precision::kBF16Master:
      return bf16.template operator()<Precision::kBF16Master>();
    case Precision::kBF16Stochastic:
      return bf16.template operator()<Precision::kBF16Stochastic>();
    case Precision::kBF16Residual:
      return bf16.template operator()<Precision::kBF16Residual>();
    case Precision::kF16Master:
    case Precision::kF16Stochastic:
      break;  // the GPU's alone: refused before
  }
}
void update_adam(const OptimizerConstants& c, const OptimizerBlocks& b, PhiloxKey key, int64_t begin, int64_t end) {
  update_kind<true>(c, b, key, begin, end);
}
void update_sgd(const OptimizerConstants& c, const OptimizerBlocks& b, PhiloxKey key, int64_t begin, int64_t end) {
  update_kind<false>(c, b, key, begin, end);
}

// Adds to counts what optimizer_swallowed counts in elements [begin, end), group by group on copies.
template <bool kAdam>
void count_swallowed_of(const OptimizerConstants& c, const OptimizerBlocks& b, PhiloxKey key, int64_t begin,
                        int64_t end, int64_t* counts) {
  const bool alone = b.precision == Precision::kBF16Stochastic, has_m = kAdam || c.momentum != 0;
  const bool joined = b.precision == Precision::kBF16Residual;
  const Tensor& wide_block = b.precision == Precision::kBF16Master ? b.master : b.parameters;
  const float* wide = wide_block.dtype() == DType::kF32 ? wide_block.data<float>() : nullptr;
  const bfloat16 *narrow = wide ? nullptr : b.parameters.data<bfloat16>(),
                 *low = joined ? b.residual.data<bfloat16>() : nullptr;
  const float* g_wide = b.gradients.dtype() == DType::kF32 ? b.gradients.data<float>() : nullptr;
  const bfloat16* g_narrow = g_wide ? nullptr : b.gradients.data<bfloat16>();
  const float *m_block = has_m ? b.moment1.data<float>() : nullptr,
              *v_block = kAdam ? b.moment2.data<float>() : nullptr;
  constexpr size_t kMost = 8 * HWY_MAX_BYTES / sizeof(uint64_t);  // whole vectors, as a group is
  HWY_ALIGN float p[kMost] = {}, g[kMost] = {}, m[kMost] = {}, v[kMost] = {}, moved[kMost], steps[kMost];
  HWY_ALIGN uint16_t random[2 * kMost] = {};  // the group's, and room to read from its middle on
  bfloat16 rounded[kMost] = {};
  const int64_t group = static_cast<int64_t>(RoundingBits::group());
  const RoundingBits rounding(key);
  while (begin < end) {
    const int64_t group_begin = begin / group * group, stop = std::min(end, group_begin + group);
    const size_t n = static_cast<size_t>(stop - begin);
    for (size_t j = 0; j < n; ++j) {
      const int64_t i = begin + static_cast<int64_t>(j);
      p[j] = wide ? wide[i] : low ? join_float({narrow[i].bits, low[i].bits}) : static_cast<float>(narrow[i]);
      g[j] = g_wide ? g_wide[i] : static_cast<float>(g_narrow[i]);
      if (m_block) m[j] = m_block[i];
      if (v_block) v[j] = v_block[i];
    }
    if (alone && !c.nearest) rounding.fill(group_begin, random);
    for (size_t j = 0; j < n; j += lanes()) {
      VF new_p = load(p + j), new_m = load(m + j), new_v = load(v + j);
      store(update_values<kAdam>(c, has_m, load(g + j), new_p, new_m, new_v), steps + j);
      store(new_p, moved + j);
      if (alone)
        store_parameters<Precision::kBF16Stochastic>(
            new_p, c.nearest != 0,
            Slots<bfloat16, float>{rounded + j, nullptr, nullptr, nullptr, nullptr, nullptr,
                                   random + (begin - group_begin) + static_cast<int64_t>(j)});
    }
    for (size_t j = 0; j < n; ++j) {
      const bool moves = steps[j] != 0 || moved[j] != p[j];
      const float kept = alone ? static_cast<float>(rounded[j]) : moved[j];
      counts[0] += moves, counts[1] += moves && kept == p[j];
    }
    begin = stop;
  }
}
void count_swallowed(bool adam, const OptimizerConstants& c, const OptimizerBlocks& b, PhiloxKey key, int64_t begin,
                     int64_t end, int64_t* counts) {
  if (adam)
    count_swallowed_of<true>(c, b, key, begin, end, counts);
  else
    count_swallowed_of<false>(c, b, key, begin, end, counts);
}

}  // namespace frit::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace frit {
HWY_EXPORT(update_adam);
HWY_EXPORT(update_sgd);
HWY_EXPORT(count_swallowed);

void optimizer_step_cpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                        const OptimizerBlocks& blocks, int64_t begin, int64_t end) {
  OptimizerConstants plain = constants;
  plain.weight_decay_l2 = 0, plain.weight_keep = 1;
  const PhiloxKey key{args.seed, constants.step};
  const auto run = [&](const OptimizerConstants& c, int64_t from, int64_t to) {
    if (from >= to) return;
    if (args.kind == OptimizerKind::kSgd)
      HWY_DYNAMIC_DISPATCH(update_sgd)(c, blocks, key, from, to);
    else
      HWY_DYNAMIC_DISPATCH(update_adam)(c, blocks, key, from, to);
  };
  // Pieces of whole cache lines of every block.
  constexpr int64_t kUnit = 64;
  const int64_t first = begin / kUnit, units = (end + kUnit - 1) / kUnit - first;
  context.pool().parallel_for(begin < end ? units : 0, 256, [&](int64_t from, int64_t to, int) {
    from = std::max(begin, (first + from) * kUnit), to = std::min(end, (first + to) * kUnit);
    run(constants, from, std::min(to, args.decay_end));
    run(plain, std::max(from, args.decay_end), to);
  });
}

void optimizer_swallowed_cpu(Context& context, const OptimizerArgs& args, const OptimizerConstants& constants,
                             const OptimizerBlocks& blocks, const Tensor& slice_ends, const Tensor& counts) {
  OptimizerConstants plain = constants;
  plain.weight_decay_l2 = 0, plain.weight_keep = 1;
  const bool adam = args.kind != OptimizerKind::kSgd;
  const PhiloxKey key{args.seed, constants.step};
  const int64_t* ends = slice_ends.data<int64_t>();
  context.pool().run(slice_ends.numel(), [&](int64_t s, int) {
    const int64_t from = s == 0 ? 0 : ends[s - 1], to = ends[s], cut = std::clamp(args.decay_end, from, to);
    int64_t found[2] = {};
    HWY_DYNAMIC_DISPATCH(count_swallowed)(adam, constants, blocks, key, from, cut, found);
    HWY_DYNAMIC_DISPATCH(count_swallowed)(adam, plain, blocks, key, cut, to, found);
    counts.data<int64_t>()[2 * s] += found[0], counts.data<int64_t>()[2 * s + 1] += found[1];
  });
}

}  // namespace frit
#endif
