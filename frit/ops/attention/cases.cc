#include <cmath>
#include <limits>

#include "frit/ops/attention/attention.h"
#include "frit/ops/attention/cpu.h"
#include "frit/ops/attention/gpu.h"
#include "frit/ops/case.h"

namespace frit {
namespace {

struct Problem {
  std::vector<int64_t> q_lengths = {};
  std::vector<int64_t> k_lengths = {};  // empty: the same as q_lengths
  int64_t n = 1, d = 1;
  bool causal = false;
  float p_drop = 0;
  DType dtype = DType::kF32;
  const char* variant = "flash";
  int64_t stride = 0;              // of q, k and v and their gradients; 0: contiguous
  double gain = 1;                 // deviation of q and k: larger makes sharper softmax
  float scale = 0;                 // 0: 1/sqrt(d)
  int64_t q_tail = 0, k_tail = 0;  // rows past the last sequence, which hold NaN (GPU)
  int64_t bound = 0;               // max_q and max_k; 0: the longest sequences
  bool instances = false;          // force every block shape
  bool gpu = false;                // "materialised" there
};

// The short kernels' budgets, by what each block reads. Only 16-bit types for backward.
void set_gpu_budgets(const Problem& p, int64_t max_q, int64_t max_k, OpCase& c) {
  const int64_t sequences = static_cast<int64_t>(p.q_lengths.size()), n = p.n, e = size_of(p.dtype);
  const bool f32 = p.dtype == DType::kF32;
  const int64_t row = p.d * e, offsets = 4 * 4;  // a thread reads four offsets, in blocks of a tail one a tensor
  const int64_t tile = f32 ? 16 : attention_short_tile(sequences, n, max_q), threads = f32 ? 128 : 2 * tile;
  const int64_t warps = attention_short_backward_warps(max_q, max_k, p.d);
  int64_t tq = p.q_tail, tk = p.k_tail, forward = 0, backward = 0, most_keys = 0, longest = 0, any = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t lq = p.q_lengths[s], lk = p.k_lengths[s];
    tq += lq, tk += lk, any += lq + lk;
    for (int64_t first = 0; first < lq; first += tile) {
      const int64_t rows = std::min(tile, lq - first);
      const int64_t keys = p.causal ? std::clamp<int64_t>(first + rows + lk - lq, 0, lk) : lk;
      forward += (rows + 2 * keys) * row, most_keys = std::max(most_keys, keys);
    }
    backward += (3 * lq + 2 * lk) * row + lq * 4, longest = std::max(longest, lk);
  }
  const bool launched = tq * n > 0;
  const int64_t tiles = (max_q + tile - 1) / tile;
  GpuBudget& f = c.forward_gpu;
  f.launches = launched, f.atomics = 0, f.scratch_bytes = 0;
  f.barriers = !launched     ? 0
               : f32         ? std::max<int64_t>(0, (most_keys + 31) / 32 * 2 - 1)
               : forward > 0 ? std::max<int64_t>(1, (most_keys + kAttentionForwardStage - 1) / kAttentionForwardStage)
                             : 0;
  f.read_bytes =
      !launched ? 0 : n * forward + sequences * tiles * n * threads * offsets + kAttentionTailBlocks * threads * 4;
  f.written_bytes = tq * n * (row + 4);
  GpuBudget& b = c.backward_gpu;
  b.launches = (tq + tk) * n > 0, b.atomics = 0, b.scratch_bytes = 0;
  b.written_bytes = (tq + 2 * tk) * n * row;
  if (f32 || (p.d == 128 && (max_q > 128 || max_k > 128))) return;  // rows are read once for each tile of the others
  b.barriers = any * n == 0 ? 0 : p.d == 128 || longest == 0 ? 1 : (longest + 31) / 32 * 2;
  b.read_bytes =
      b.launches == 0 ? 0 : n * backward + sequences * n * warps * 32 * offsets + kAttentionTailBlocks * warps * 32 * 8;
}

// Everything the oracle needs of one query and head.
struct Scores {
  const Arrays& in;
  const Problem& problem;
  Dropout dropout;
  float scale;
  int64_t n, d;

  template <typename Body>
  void each_query(Body&& body) const {
    const Array &qo = in.at("q_offsets"), &ko = in.at("k_offsets");
    for (int64_t s = 0; s + 1 < qo.dim(0); ++s) {
      const int64_t q0 = static_cast<int64_t>(qo[s]), lq = static_cast<int64_t>(qo[s + 1]) - q0;
      const int64_t k0 = static_cast<int64_t>(ko[s]), lk = static_cast<int64_t>(ko[s + 1]) - k0;
      for (int64_t i = 0; i < lq; ++i) {
        const int64_t keys = problem.causal ? std::clamp<int64_t>(i + lk - lq + 1, 0, lk) : lk;
        for (int64_t h = 0; h < n; ++h) body(q0 + i, k0, keys, h);
      }
    }
  }
  int64_t at(int64_t token, int64_t head) const { return (token * n + head) * d; }
  double dot(const Array& a, int64_t i, const Array& b, int64_t j) const {
    double sum = 0;
    for (int64_t x = 0; x < d; ++x) sum += a[i + x] * b[j + x];
    return sum;
  }
  // Probabilities of one query; returns log sum exp.
  double probabilities(int64_t query, int64_t k0, int64_t keys, int64_t h, std::vector<double>& p) const {
    p.resize(keys);
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t j = 0; j < keys; ++j) {
      p[j] = static_cast<double>(scale) * dot(in.at("q"), at(query, h), in.at("k"), at(k0 + j, h));
      top = std::max(top, p[j]);
    }
    for (double& x : p) sum += x = std::exp(x - top);
    for (double& x : p) x /= sum;
    return keys == 0 ? top : top + std::log(sum);
  }
  double factor(int64_t query, int64_t key, int64_t h) const {
    if (!dropout.active()) return 1;
    return dropout.keep(query, key, static_cast<uint32_t>(h)) ? dropout.scale() : 0;
  }
};

int64_t sum_of(const std::vector<int64_t>& v) {
  int64_t sum = 0;
  for (int64_t x : v) sum += x;
  return sum;
}

std::string text_of(const std::vector<int64_t>& v) {
  if (v.size() > 6) return fmt::format("{}sequences,{}tokens", v.size(), sum_of(v));
  std::string s;
  for (int64_t x : v) s += (s.empty() ? "" : ",") + std::to_string(x);
  return s.empty() ? "none" : s;
}

OpCase make(Problem problem) {
  if (problem.k_lengths.empty()) problem.k_lengths = problem.q_lengths;
  const int64_t real_tq = sum_of(problem.q_lengths), real_tk = sum_of(problem.k_lengths);
  const int64_t tq = real_tq + problem.q_tail, tk = real_tk + problem.k_tail, n = problem.n, d = problem.d;
  int64_t max_q = problem.bound, max_k = problem.bound;
  for (int64_t length : problem.q_lengths) max_q = std::max(max_q, length);
  for (int64_t length : problem.k_lengths) max_k = std::max(max_k, length);
  max_q = std::min(max_q, tq), max_k = std::min(max_k, tk);
  const DType dtype = problem.dtype;
  const float scale = problem.scale != 0 ? problem.scale : 1 / std::sqrt(static_cast<float>(d));
  const Dropout dropout{problem.p_drop, dropout_site("attention.cases"), 3, {11, 12}};
  OpCase c;
  c.name = fmt::format(
      "q{}/k{}/N{}D{}{}{}/{}/{}{}{}", text_of(problem.q_lengths), text_of(problem.k_lengths), n, d,
      problem.causal ? "/causal" : "", problem.p_drop > 0 ? fmt::format("/drop{}", problem.p_drop) : "", name_of(dtype),
      *problem.variant ? problem.variant : "free", problem.stride ? fmt::format("/stride{}", problem.stride) : "",
      (problem.gain != 1 ? fmt::format("/gain{}", problem.gain) : "") +
          (problem.q_tail + problem.k_tail ? fmt::format("/tail{},{}", problem.q_tail, problem.k_tail) : "") +
          (problem.bound ? fmt::format("/bound{}", problem.bound) : "") + (problem.gpu ? "/gpu" : ""));
  c.variant = problem.variant;
  // What lies past the last sequence must not be read: NaN would spread.
  const bool cudnn = problem.variant == std::string("cudnn");  // which may read it, and multiply by zero
  const auto fill = [=](double gain, int64_t real) -> Fill {
    const Fill normal = fill_normal(0, gain);
    if (cudnn) return normal;
    return [=](CaseRandom& r, Array& a) {
      normal(r, a);
      // A benchmark makes only a piece of a large tensor, which may end before that.
      const int64_t made = static_cast<int64_t>(a.v.size());
      std::fill(a.v.begin() + std::min(real * n * d, made), a.v.end(), std::numeric_limits<double>::quiet_NaN());
    };
  };
  c.inputs = {
      {"q", dtype, {tq, n, d}, fill(problem.gain, real_tq), problem.stride},
      {"k", dtype, {tk, n, d}, fill(problem.gain, real_tk), problem.stride},
      {"v", dtype, {tk, n, d}, fill(1, real_tk), problem.stride},
      {"q_offsets", DType::kI32, {static_cast<int64_t>(problem.q_lengths.size()) + 1}, fill_offsets(problem.q_lengths)},
      {"k_offsets",
       DType::kI32,
       {static_cast<int64_t>(problem.k_lengths.size()) + 1},
       fill_offsets(problem.k_lengths)}};
  c.outputs = {{"out", dtype, {tq, n, d}}, {"lse", DType::kF32, {tq, n}}};
  const auto args = [=](const Tensors& t) {
    return AttentionArgs{.q = t.at("q"),
                         .k = t.at("k"),
                         .v = t.at("v"),
                         .q_offsets = t.at("q_offsets"),
                         // cuDNN is causal in self-attention alone, which it knows by the offsets.
                         .k_offsets = t.at(cudnn && problem.causal ? "q_offsets" : "k_offsets"),
                         .causal = problem.causal,
                         .scale = scale,
                         .dropout = dropout,
                         .max_q = max_q,
                         .max_k = max_k};
  };
  c.forward = [=](Context& context, const Tensors& t) {
    attention_forward(context, args(t), t.at("out"), t.at("lse"));
  };
  c.oracle = [=](const Arrays& in, Arrays& result) {
    const Scores scores{in, problem, dropout, scale, n, d};
    Array &out = result["out"], &lse = result["lse"];
    const Array& v = in.at("v");
    std::vector<double> p;
    std::fill(lse.v.begin() + real_tq * n, lse.v.end(), -std::numeric_limits<double>::infinity());
    scores.each_query([&](int64_t query, int64_t k0, int64_t keys, int64_t h) {
      lse[query * n + h] = scores.probabilities(query, k0, keys, h, p);
      for (int64_t j = 0; j < keys; ++j) {
        const double w = p[j] * scores.factor(query, j, h);
        for (int64_t x = 0; x < d; ++x) out[scores.at(query, h) + x] += w * v[scores.at(k0 + j, h) + x];
      }
    });
  };
  c.tolerance["lse"] = {1e-5 * problem.gain * problem.gain, 1e-5};
  c.incoming = {"out"};
  c.incoming_fill = fill(1, real_tq);
  c.differentiable = {"q", "k", "v"};
  c.backward = [=](Context& context, const Tensors& t, bool) {
    attention_backward(context, args(t), t.at("out"), t.at("lse"), t.at("dout"), t.at("dq"), t.at("dk"), t.at("dv"));
  };
  c.gradient_oracle = [=](const Arrays& in, Arrays& result) {
    const Scores scores{in, problem, dropout, scale, n, d};
    const Array &q = in.at("q"), &k = in.at("k"), &v = in.at("v"), &dout = in.at("dout");
    Array &dq = result["dq"], &dk = result["dk"], &dv = result["dv"];
    std::vector<double> p, g;
    scores.each_query([&](int64_t query, int64_t k0, int64_t keys, int64_t h) {
      scores.probabilities(query, k0, keys, h, p);
      g.resize(keys);
      double mean = 0;
      for (int64_t j = 0; j < keys; ++j) {
        g[j] = scores.factor(query, j, h) * scores.dot(dout, scores.at(query, h), v, scores.at(k0 + j, h));
        mean += p[j] * g[j];
      }
      for (int64_t j = 0; j < keys; ++j) {
        const double w = p[j] * scores.factor(query, j, h), ds = scale * p[j] * (g[j] - mean);
        const int64_t at_q = scores.at(query, h), at_k = scores.at(k0 + j, h);
        for (int64_t x = 0; x < d; ++x) {
          dv[at_k + x] += w * dout[at_q + x];
          dq[at_q + x] += ds * k[at_k + x];
          dk[at_k + x] += ds * q[at_q + x];
        }
      }
    });
  };
  int64_t pairs = 0, longest = 0;
  for (size_t s = 0; s < problem.q_lengths.size(); ++s) {
    const int64_t lq = problem.q_lengths[s], lk = problem.k_lengths[s];
    longest = std::max({longest, lq, lk});
    pairs += problem.causal ? lq * lk - lq * (lq - 1) / 2 : lq * lk;
  }
  // Sums over many keys or queries: errors grow like a random walk; sharper softmax carries the scores' own rounding
  // on.
  const double grown = std::max(1.0, std::sqrt(longest / 64.0)) * problem.gain * problem.gain;
  for (const char* name : {"q", "k", "v"}) c.gradient_tolerance[name] = tolerance_for(dtype, 4 * grown);
  c.tolerance["out"] = tolerance_for(dtype, std::max(1.0, problem.gain * problem.gain / 4));
  const int64_t e = size_of(dtype);
  c.forward_budget.bytes = (2 * tq + 2 * tk) * n * d * e + tq * n * 4;
  c.forward_budget.flops = 4.0 * static_cast<double>(pairs * n * d);
  c.backward_budget.bytes = (4 * tq + 4 * tk) * n * d * e + tq * n * 4;
  c.backward_budget.flops = 10.0 * static_cast<double>(pairs * n * d);  // with the scores computed again
  if (problem.variant == std::string("flash")) {
    c.forward_budget.scratch_bytes = attention_flash_forward_scratch(3, d);
    c.backward_budget.scratch_bytes = attention_flash_backward_scratch(3, tq, n, d);
    c.forward_budget.regions = tq * n > 0;
    c.backward_budget.regions = problem.q_lengths.empty() || n == 0 ? 0 : 1;
  }
  // A finite difference costs thirteen oracles for each of three inputs.
  if (pairs * n * d > 200000) c.finite_difference_step = 0;
  if (problem.q_tail + problem.k_tail > 0) c.finite_difference_step = 0;  // NaN lies there
  const std::string variant = problem.variant;
  c.where = variant.empty()                              ? Where::kEverywhere
            : variant == "short" || cudnn || problem.gpu ? Where::kGpu
                                                         : Where::kCpu;
  if (problem.gpu) {
    const auto scratch = [&](bool backward) {
      return attention_materialised_scratch(n, d, std::max(tq, tk), max_q, max_k, dtype, backward);
    };
    c.forward_gpu.scratch_bytes = tq * n == 0 ? 0 : scratch(false);
    c.backward_gpu.scratch_bytes = (tq + tk) * n == 0 ? 0 : scratch(true);
  } else if (cudnn) {
    c.forward_gpu.launches = c.backward_gpu.launches = 2;  // of ours
  } else if (c.where != Where::kCpu) {
    set_gpu_budgets(problem, max_q, max_k, c);
  }
  if (problem.instances && dtype != DType::kF32) {  // that has one block shape
    c.forward_instances = {"tile16", "tile32", "tile64", "tile128"};
    for (int64_t warps = 1; warps <= (d == 128 ? 8 : 16); warps *= 2)
      if (d == 128 || warps * 16 >= max_q) c.backward_instances.push_back(fmt::format("warps{}", warps));
  }
  return c;
}

}  // namespace

std::vector<OpCase> attention_cases() {
  std::vector<OpCase> cases;
  const auto add = [&](Problem p) { cases.push_back(make(std::move(p))); };
  for (const char* variant : {"flash", "materialised"}) {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (float p_drop : {0.0f, 0.1f}) {
        const auto with = [&](Problem p) {
          p.dtype = dtype, p.variant = variant, p.p_drop = p_drop;
          add(p);
        };
        with({.q_lengths = {}, .n = 3, .d = 8});
        with({.q_lengths = {0}, .n = 3, .d = 8});
        with({.q_lengths = {1}, .n = 1, .d = 1});
        with({.q_lengths = {1, 0, 2}, .n = 3, .d = 7});
        with({.q_lengths = {31, 32, 33}, .n = 3, .d = 16});
        with({.q_lengths = {5, 9, 1, 17}, .n = 4, .d = 32, .causal = true});
        with({.q_lengths = {23, 60, 8}, .n = 2, .d = 64});
        with({.q_lengths = {65}, .n = 1, .d = 33, .causal = true});
        with({.q_lengths = {4, 0, 7}, .k_lengths = {6, 3, 0}, .n = 2, .d = 12});
        with({.q_lengths = {4, 3, 1}, .k_lengths = {9, 3, 30}, .n = 2, .d = 5, .causal = true});
        with({.q_lengths = {9, 40}, .k_lengths = {4, 33}, .n = 3, .d = 6, .causal = true});  // some queries see nothing
        with({.q_lengths = {130},
              .k_lengths = {3},
              .n = 1,
              .d = 4,
              .causal = true});  // whole blocks of queries see nothing
        with({.q_lengths = {3, 63}, .k_lengths = {129, 64}, .n = 2, .d = 20});
        with({.q_lengths = {15, 16, 17}, .n = 5, .d = 13, .stride = 3 * 5 * 13});
      }
    }
    for (float p_drop : {0.0f, 0.3f}) {
      add({.q_lengths = {257}, .n = 2, .d = 8, .causal = true, .p_drop = p_drop, .variant = variant});
      add({.q_lengths = {1}, .k_lengths = {1023}, .n = 1, .d = 31, .p_drop = p_drop, .variant = variant});
      add({.q_lengths = {1025}, .k_lengths = {1}, .n = 1, .d = 1, .p_drop = p_drop, .variant = variant});
      add({.q_lengths = {1023}, .n = 1, .d = 3, .causal = true, .p_drop = p_drop, .variant = variant});
      add({.q_lengths = {2, 1024}, .n = 1, .d = 4, .p_drop = p_drop, .dtype = DType::kBF16, .variant = variant});
      add({.q_lengths = {33},
           .k_lengths = {1025},
           .n = 1,
           .d = 32,
           .causal = true,
           .p_drop = p_drop,
           .variant = variant});
      add({.q_lengths = {70, 5}, .n = 2, .d = 24, .p_drop = p_drop, .variant = variant, .gain = 4});
    }
    add({.q_lengths = {2, 3}, .n = 2, .d = 8, .p_drop = 0.1f, .variant = variant, .stride = int64_t{1} << 30});
    add({.q_lengths = {2, 3},
         .n = 2,
         .d = 8,
         .causal = true,
         .dtype = DType::kBF16,
         .variant = variant,
         .stride = int64_t{1} << 30});
    for (int64_t length : {31, 32, 33, 64})
      add({.q_lengths = {length}, .n = 3, .d = 9, .causal = length % 2 == 0, .variant = variant});
    add({.q_lengths = {0, 0, 3}, .k_lengths = {2, 0, 5}, .n = 7, .d = 15, .p_drop = 0.2f, .variant = variant});
    add({.q_lengths = {1, 1, 1, 1}, .n = 16, .d = 2, .causal = true, .p_drop = 0.2f, .variant = variant});
    add({.q_lengths = {7, 2}, .n = 0, .d = 8, .variant = variant});
    add({.q_lengths = {12}, .n = 1, .d = 8, .variant = variant, .scale = 1.5f});
    add({.q_lengths = {3, 2}, .n = 1, .d = 1023, .variant = variant});
    add({.q_lengths = {2, 1}, .n = 31, .d = 1025, .variant = variant});
  }
  // On a GPU: widths 32, 64, 128 and up to 256 queries and keys.
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (float p_drop : {0.0f, 0.1f}) {
      const auto with = [&](Problem p) {
        p.dtype = dtype, p.variant = "short", p.p_drop = p_drop;
        add(p);
      };
      with({.q_lengths = {}, .n = 3, .d = 32});
      with({.q_lengths = {0}, .n = 3, .d = 32});
      with({.q_lengths = {1}, .n = 1, .d = 32});
      with({.q_lengths = {1, 0, 2}, .n = 3, .d = 64, .causal = true});
      with({.q_lengths = {15, 16, 17}, .n = 2, .d = 32, .stride = 3 * 2 * 32, .instances = true});
      with({.q_lengths = {31, 32, 33},
            .n = dtype == DType::kF32 ? 1 : 2,
            .d = 64,
            .causal = true,
            .stride = 3 * 2 * 64});
      with({.q_lengths = {17, 5}, .n = 3, .d = 32, .causal = true, .stride = 3 * 32 + 1});  // rows at odd addresses
      with({.q_lengths = {63}, .k_lengths = {65}, .n = 1, .d = 32, .causal = true, .instances = true});
      with({.q_lengths = {4, 0, 7}, .k_lengths = {6, 3, 0}, .n = 2, .d = 32});
      with({.q_lengths = {9, 40}, .k_lengths = {4, 33}, .n = 1, .d = 64, .causal = true});  // some see nothing
      with({.q_lengths = {60}, .k_lengths = {3}, .n = 1, .d = 32, .causal = true});         // whole tiles see nothing
      if (dtype != DType::kF32) with({.q_lengths = {3, 33}, .k_lengths = {129, 64}, .n = 1, .d = 128});
      with({.q_lengths = {33, 7}, .n = 1, .d = 128, .causal = true});
      with({.q_lengths = {20, 3}, .n = 2, .d = 32, .q_tail = 41, .k_tail = 41, .bound = 64});
      with({.q_lengths = {5, 30}, .k_lengths = {18, 2}, .n = 1, .d = 64, .stride = 71, .q_tail = 1, .k_tail = 9});
    }
  }
  for (const auto& [lq, lk] : {std::pair{64, 127}, {127, 1}, {1, 255}, {128, 16}, {129, 31}, {255, 32}, {15, 256}})
    add({.q_lengths = {lq},
         .k_lengths = {lk},
         .n = 1,
         .d = 32,
         .causal = lk % 2 == 1,
         .p_drop = 0.2f,
         .dtype = lk % 3 == 1 ? DType::kF16 : DType::kBF16,
         .variant = "short"});
  add({.q_lengths = {256}, .n = 1, .d = 32, .causal = true, .p_drop = 0.1f, .dtype = DType::kBF16, .variant = "short"});
  // Several stages of keys, of which later ones hold scores far above the first's.
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    add({.q_lengths = {17, 33},
         .k_lengths = {250, 129},
         .n = 1,
         .d = 64,
         .p_drop = 0.1f,
         .dtype = dtype,
         .variant = "short",
         .gain = 3});
    add({.q_lengths = {40}, .k_lengths = {193}, .n = 1, .d = 32, .causal = true, .dtype = dtype, .variant = "short"});
    add({.q_lengths = {5}, .k_lengths = {70}, .n = 1, .d = 64, .dtype = dtype, .variant = "short", .scale = -0.5f});
  }
  add({.q_lengths = {20}, .k_lengths = {150}, .n = 1, .d = 32, .variant = "short"});
  add({.q_lengths = {150}, .k_lengths = {20}, .n = 1, .d = 32, .p_drop = 0.1f, .variant = "short"});
  // Too much for shared memory at once.
  add({.q_lengths = {100, 3, 90},
       .k_lengths = {200, 90, 31},
       .n = 1,
       .d = 128,
       .causal = true,
       .p_drop = 0.1f,
       .dtype = DType::kBF16,
       .variant = "short",
       .bound = 256,
       .instances = true});
  add({.q_lengths = {150},
       .k_lengths = {20},
       .n = 1,
       .d = 128,
       .dtype = DType::kF16,
       .variant = "short",
       .bound = 256});
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    add({.q_lengths = {30, 5}, .n = 2, .d = 64, .p_drop = 0.3f, .dtype = dtype, .variant = "short", .gain = 2});
    add({.q_lengths = {12}, .n = 1, .d = 32, .dtype = dtype, .variant = "short", .scale = -0.3f});
    add({.q_lengths = {1, 2}, .n = 1, .d = 32, .dtype = dtype, .variant = "short", .stride = (int64_t{1} << 30) + 8});
    add({.q_lengths = {0, 0, 3},
         .k_lengths = {2, 0, 5},
         .n = 2,
         .d = 32,
         .dtype = dtype,
         .variant = "short",
         .k_tail = 3});
    add({.q_lengths = {7, 2}, .n = 0, .d = 64, .dtype = dtype, .variant = "short"});
    add({.q_lengths = {1, 1, 1, 1},
         .n = 16,
         .d = 32,
         .causal = true,
         .p_drop = 0.2f,
         .dtype = dtype,
         .variant = "short"});
  }
  // On a GPU: any width, any length.
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (float p_drop : {0.0f, 0.1f}) {
      const auto with = [&](Problem p) {
        p.dtype = dtype, p.variant = "materialised", p.p_drop = p_drop, p.gpu = true;
        add(p);
      };
      with({.q_lengths = {}, .n = 3, .d = 8});
      with({.q_lengths = {0}, .n = 3, .d = 8});
      with({.q_lengths = {1}, .n = 1, .d = 1});
      with({.q_lengths = {1, 0, 2}, .n = 3, .d = 7, .causal = true});
      with({.q_lengths = {15, 16, 17}, .n = 2, .d = 32, .stride = 3 * 2 * 32});
      with({.q_lengths = {31, 33}, .n = 1, .d = 13, .causal = true, .stride = 3 * 13});
      with({.q_lengths = {4, 0, 7}, .k_lengths = {6, 3, 0}, .n = 2, .d = 12});
      with({.q_lengths = {9, 40}, .k_lengths = {4, 33}, .n = 2, .d = 20, .causal = true});  // some see nothing
      with({.q_lengths = {20, 3}, .n = 2, .d = 48, .q_tail = 41, .k_tail = 41, .bound = 64});
      with({.q_lengths = {5, 30}, .k_lengths = {18, 2}, .n = 1, .d = 5, .stride = 9, .q_tail = 1, .k_tail = 9});
    }
    add({.q_lengths = {12},
         .n = 1,
         .d = 24,
         .causal = true,
         .dtype = dtype,
         .variant = "materialised",
         .scale = -0.3f,
         .gpu = true});
    add({.q_lengths = {1, 2},
         .n = 1,
         .d = 8,
         .dtype = dtype,
         .variant = "materialised",
         .stride = (int64_t{1} << 30) + 8,
         .gpu = true});
    add({.q_lengths = {7, 2}, .n = 0, .d = 8, .dtype = dtype, .variant = "materialised", .gpu = true});
    add({.q_lengths = {3, 257},
         .n = 1,
         .d = 8,
         .causal = true,
         .p_drop = 0.3f,
         .dtype = dtype,
         .variant = "materialised",
         .gpu = true});
    add({.q_lengths = {1},
         .k_lengths = {1023},
         .n = 1,
         .d = 31,
         .p_drop = 0.3f,
         .dtype = dtype,
         .variant = "materialised",
         .gpu = true});
    add({.q_lengths = {1025},
         .k_lengths = {1},
         .n = 1,
         .d = 3,
         .dtype = dtype,
         .variant = "materialised",
         .gpu = true});
    add({.q_lengths = {30, 5},
         .n = 2,
         .d = 72,
         .p_drop = 0.3f,
         .dtype = dtype,
         .variant = "materialised",
         .gain = 2,
         .gpu = true});
  }
  if (built_with_cudnn())
    for (DType dtype : {DType::kBF16, DType::kF16}) {
      const auto with = [&](Problem p) {
        p.dtype = dtype, p.variant = "cudnn";
        add(p);
      };
      with({.q_lengths = {1}, .n = 1, .d = 64});
      with({.q_lengths = {15, 16, 17}, .n = 2, .d = 32, .stride = 3 * 2 * 32});
      with({.q_lengths = {31, 70, 33}, .n = 3, .d = 64, .causal = true, .stride = 3 * 3 * 64});
      with({.q_lengths = {4, 9, 7}, .k_lengths = {6, 3, 40}, .n = 2, .d = 64});
      with({.q_lengths = {20, 3}, .n = 2, .d = 128, .q_tail = 41, .k_tail = 41, .bound = 64});
      with({.q_lengths = {300, 5, 129}, .n = 2, .d = 64, .causal = true, .q_tail = 14, .k_tail = 14});
      with({.q_lengths = {30, 257}, .k_lengths = {513, 8}, .n = 1, .d = 40});
      with({.q_lengths = std::vector<int64_t>(37, 11), .n = 2, .d = 64, .causal = true});  // fewer than the bucket
      with({.q_lengths = {30, 5}, .n = 2, .d = 64, .gain = 2});
    }
  // On both, the implementation left free.
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    add({.q_lengths = {5, 9, 1, 17}, .n = 4, .d = 32, .causal = true, .dtype = dtype, .variant = ""});
    add({.q_lengths = {23, 40, 8}, .n = 1, .d = 64, .p_drop = 0.1f, .dtype = dtype, .variant = ""});
    add({.q_lengths = {3, 20}, .k_lengths = {35, 4}, .n = 1, .d = 128, .p_drop = 0.1f, .dtype = dtype, .variant = ""});
  }
  // Timed only.
  const std::vector<int64_t> real = {7,  31, 12, 24, 18, 43, 9, 27, 15, 60, 21, 5,  33, 19, 26, 11,
                                     38, 16, 22, 29, 13, 51, 8, 35, 17, 25, 6,  41, 14, 20, 28, 10};
  std::vector<int64_t> batch;
  for (int i = 0; i < 5; ++i) batch.insert(batch.end(), real.begin(), real.end());
  const size_t tested = cases.size();
  for (const char* variant : {"flash", "materialised"}) {
    add({.q_lengths = std::vector<int64_t>(128, 32), .n = 8, .d = 32, .variant = variant});
    add({.q_lengths = std::vector<int64_t>(128, 32), .n = 8, .d = 64, .variant = variant});
    add({.q_lengths = std::vector<int64_t>(8, 512), .n = 8, .d = 64, .variant = variant});
    add({.q_lengths = batch, .n = 8, .d = 32, .variant = variant});
    add({.q_lengths = batch, .n = 8, .d = 32, .causal = true, .p_drop = 0.1f, .variant = variant});
    add({.q_lengths = batch, .n = 8, .d = 32, .dtype = DType::kBF16, .variant = variant});
  }
  for (float p_drop : {0.0f, 0.1f}) {
    const auto with = [&](Problem p) {
      p.dtype = DType::kBF16, p.variant = "short", p.p_drop = p_drop;
      add(p);
    };
    for (int64_t length : {128, 127})
      with({.q_lengths = std::vector<int64_t>(32, length), .n = 8, .d = 64, .stride = 3 * 8 * 64});
    for (int64_t length : {32, 31})
      with({.q_lengths = std::vector<int64_t>(128, length), .n = 8, .d = 64, .stride = 3 * 8 * 64});
    with({.q_lengths = std::vector<int64_t>(32, 128), .n = 8, .d = 64, .causal = true});
    with({.q_lengths = std::vector<int64_t>(128, 32), .n = 8, .d = 64, .causal = true});
    with({.q_lengths = std::vector<int64_t>(16, 256), .n = 16, .d = 64});
    with({.q_lengths = std::vector<int64_t>(128, 32), .k_lengths = std::vector<int64_t>(128, 36), .n = 8, .d = 64});
    with({.q_lengths = std::vector<int64_t>(32, 128), .n = 8, .d = 32});
    with({.q_lengths = std::vector<int64_t>(32, 128), .n = 8, .d = 128});
    with({.q_lengths = batch, .n = 8, .d = 64, .causal = true});
  }
  for (const char* variant : {"cudnn", "materialised"}) {
    if (variant == std::string("cudnn") && !built_with_cudnn()) continue;
    for (const auto& [sequences, length] : {std::pair<int64_t, int64_t>{128, 32}, {32, 128}, {8, 512}, {16, 1024}})
      for (bool causal : {false, true})
        add({.q_lengths = std::vector<int64_t>(static_cast<size_t>(sequences), length),
             .n = length == 1024 ? 12 : 8,
             .d = 64,
             .causal = causal,
             .p_drop = 0.1f,
             .dtype = DType::kBF16,
             .variant = variant,
             .gpu = variant == std::string("materialised")});
  }
  for (size_t i = tested; i < cases.size(); ++i) cases[i].benchmark = true, cases[i].test = false;
  return cases;
}

}  // namespace frit
