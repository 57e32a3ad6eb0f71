// GFLOP/s of matrix products by shape: ours ("packed" and linear_packed), oneDNN's and OpenBLAS's, and the rate of bare
// fused multiply-adds in the same run. Each iteration runs all of them in turn, and the best time of each counts: on a
// machine that others use, only undisturbed runs say what the code can do. OpenBLAS is loaded if its library is there;
// unset OPENBLAS_* before measuring. Counters: NAME_gflops; peak_gflops (of all threads); NAME_allocs, calls of malloc
// and its kin in one product.
#include <benchmark/benchmark.h>
#include <dlfcn.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "frit/ops/gemm/gemm.h"
#include "tests/count_allocations.h"

namespace frit {
namespace {

// Seconds that count: with one thread, processor time of this thread, which others' load does not stretch; with more,
// time that passes.
double now(int threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// --- the rate of fused multiply-adds
// -------------------------------------------------------------------------------------

constexpr int64_t kPeakRounds = 20000;
constexpr int kPeakSums = 12;
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) float fma_avx2() {
  __m256 sums[kPeakSums], x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(0.001f);
  for (auto& s : sums) s = y;
  for (int64_t i = 0; i < kPeakRounds; ++i) {
    asm volatile("" : "+x"(x));
#pragma GCC unroll 12
    for (int j = 0; j < kPeakSums; ++j) sums[j] = _mm256_fmadd_ps(sums[j], x, y);
  }
  for (int j = 1; j < kPeakSums; ++j) sums[0] = _mm256_add_ps(sums[0], sums[j]);
  return _mm256_cvtss_f32(sums[0]);
}
__attribute__((target("avx512f"))) float fma_avx512() {
  __m512 sums[kPeakSums], x = _mm512_set1_ps(0.999f), y = _mm512_set1_ps(0.001f);
  for (auto& s : sums) s = y;
  for (int64_t i = 0; i < kPeakRounds; ++i) {
    asm volatile("" : "+v"(x));
#pragma GCC unroll 12
    for (int j = 0; j < kPeakSums; ++j) sums[j] = _mm512_fmadd_ps(sums[j], x, y);
  }
  for (int j = 1; j < kPeakSums; ++j) sums[0] = _mm512_add_ps(sums[0], sums[j]);
  return _mm512_cvtss_f32(sums[0]);
}
#endif
// Floating-point operations done, 0 if this machine's vectors are not known here.
double run_fma() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    benchmark::DoNotOptimize(fma_avx512());
    return 2.0 * 16 * kPeakSums * kPeakRounds;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    benchmark::DoNotOptimize(fma_avx2());
    return 2.0 * 8 * kPeakSums * kPeakRounds;
  }
#endif
  return 0;
}

// --- OpenBLAS
// ----------------------------------------------------------------------------------------------------------

struct OpenBlas {
  using Sgemm = void (*)(int order, int ta, int tb, int m, int n, int k, float alpha, const float* a, int lda,
                         const float* b, int ldb, float beta, float* c, int ldc);
  Sgemm sgemm = nullptr;
  OpenBlas() {
    void* library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(library, "openblas_set_num_threads"));
    if (!set_threads) return;
    set_threads(1);
    sgemm = reinterpret_cast<Sgemm>(dlsym(library, "cblas_sgemm"));
  }
};
const OpenBlas& openblas() {
  static const OpenBlas library;
  return library;
}

// --- shapes
// ------------------------------------------------------------------------------------------------------------

struct Shapes {
  std::string name;
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  int64_t batch = 1;
};

// The products of one training step: [tokens, k] by a weight [n, k], its input's and its weight's gradient.
void add_layer(std::vector<Shapes>& all, const std::string& name, int64_t tokens, int64_t n, int64_t k) {
  all.push_back({name + "/forward", tokens, n, k, false, true});
  all.push_back({name + "/dx", tokens, k, n, false, false});
  all.push_back({name + "/dw", n, k, tokens, true, false});
}
std::vector<Shapes> all_shapes() {
  std::vector<Shapes> all;
  all.push_back({"square512", 512, 512, 512, false, true});
  all.push_back({"square512nn", 512, 512, 512, false, false});
  for (const auto& [name, width, inner, vocabulary] :
       {std::tuple{"h256", 256, 1024, 8000}, std::tuple{"base", 512, 2048, 0}, std::tuple{"demo", 128, 512, 2000}}) {
    const std::string prefix = name;
    add_layer(all, prefix + "/qkv", 4096, 3 * width, width);
    add_layer(all, prefix + "/out", 4096, width, width);
    add_layer(all, prefix + "/up", 4096, inner, width);
    add_layer(all, prefix + "/down", 4096, width, inner);
    if (vocabulary) add_layer(all, prefix + "/vocabulary", 4096, vocabulary, width);
  }
  all.push_back({"attention/scores 32", 32, 32, 32, false, true, 1024});
  all.push_back({"attention/values 32", 32, 32, 32, false, false, 1024});
  all.push_back({"attention/dkeys 32", 32, 32, 32, true, false, 1024});
  all.push_back({"attention/scores 128", 128, 128, 64, false, true, 64});
  all.push_back({"attention/values 128", 128, 64, 128, false, false, 64});
  all.push_back({"attention/dkeys 128", 128, 64, 128, true, false, 64});
  for (int64_t m : {1, 4, 16, 64, 128, 200}) {
    const std::string rows = "decode" + std::to_string(m);
    all.push_back({rows + "/out", m, 512, 512, false, true});
    all.push_back({rows + "/up", m, 2048, 512, false, true});
    all.push_back({rows + "/down", m, 512, 2048, false, true});
    all.push_back({rows + "/vocabulary", m, 32000, 512, false, true});
  }
  return all;
}

void measure(benchmark::State& state, const Shapes& s, int threads) {
  ThreadPool pool(threads);
  Memory memory;
  Context context(pool, memory);
  const auto filled = [](int64_t n) {
    std::vector<float> v(n);
    for (int64_t i = 0; i < n; ++i) v[i] = static_cast<float>((i * 7919) % 1013) / 1013 - 0.5f;
    return v;
  };
  std::vector<float> a = filled(s.batch * s.m * s.k), b = filled(s.batch * s.k * s.n), c(s.batch * s.m * s.n);
  const int64_t lda = s.transpose_a ? s.m : s.k, ldb = s.transpose_b ? s.k : s.n;
  const auto shape = [&](bool transposed, int64_t rows, int64_t cols) {
    if (transposed) std::swap(rows, cols);
    return s.batch > 1 ? Shape{s.batch, rows, cols} : Shape{rows, cols};
  };
  const Tensor ta(a.data(), DType::kF32, shape(s.transpose_a, s.m, s.k)),
      tb(b.data(), DType::kF32, shape(s.transpose_b, s.k, s.n)), tc(c.data(), DType::kF32, shape(false, s.m, s.n));
  const auto product = [&] {
    gemm(context, {.a = ta,
                   .b = tb,
                   .c = tc,
                   .transpose_a = s.transpose_a,
                   .transpose_b = s.transpose_b,
                   .accumulate = false,
                   .bias = {}});
  };

  struct Contender {
    std::string name;
    std::function<void()> run;
    double best = 1e30;
    int64_t allocations = 0;
  };
  std::vector<Contender> contenders;
  // Planned memory, as in training: the product itself is what may allocate.
  Plan plan;
  memory.begin_recording();
  product();
  for (const Lifetime& t : memory.end_recording()) {
    plan.offsets.push_back(plan.peak);
    plan.bytes.push_back(t.bytes);
    plan.peak += align_up(t.bytes);
  }
  memory.reserve(plan.peak);
  contenders.push_back({"packed", [&] {
                          memory.begin_replay(plan);
                          product();
                          memory.end_replay();
                        }});
  PackedWeight packed;
  if (s.name.rfind("decode", 0) == 0) {
    packed = PackedWeight(context, tb);
    contenders.push_back({"linear_packed", [&] { linear_packed(context, ta, packed, {}, tc); }});
  }
  if (gemm_implementations().size() > 1)
    contenders.push_back({"onednn", [&] {
                            context.force("gemm", "onednn");
                            product();
                            context.force("gemm", "");
                          }});
  if (openblas().sgemm)
    contenders.push_back(
        {"openblas", [&] {
           // One-threaded calls on blocks of rows, or on the items of a batch, as our workers would make them.
           const int64_t pieces = s.batch > 1 ? s.batch : std::min<int64_t>(s.m, threads);
           pool.run(pieces, [&](int64_t i, int) {
             const int64_t i0 = s.batch > 1 ? 0 : s.m * i / pieces, i1 = s.batch > 1 ? s.m : s.m * (i + 1) / pieces;
             const int64_t item = s.batch > 1 ? i : 0;
             openblas().sgemm(101, s.transpose_a ? 112 : 111, s.transpose_b ? 112 : 111, i1 - i0, s.n, s.k, 1.0f,
                              a.data() + item * s.m * s.k + (s.transpose_a ? i0 : i0 * lda), lda,
                              b.data() + item * s.k * s.n, ldb, 0.0f, c.data() + item * s.m * s.n + i0 * s.n, s.n);
           });
         }});
  const double flops = 2.0 * s.batch * s.m * s.n * s.k;
  for (auto& contender : contenders) {
    contender.run();
    const int64_t before = g_allocations;
    contender.run();
    contender.allocations = g_allocations - before;
  }
  double peak_best = 1e30, peak_flops = 0;
  for (auto _ : state) {
    double start = now(threads);
    pool.run(threads, [&](int64_t, int) { peak_flops = run_fma(); });
    peak_best = std::min(peak_best, now(threads) - start);
    for (auto& contender : contenders) {
      // Small products run several times back to back: the clock itself costs tens of nanoseconds.
      const int repeats = flops < 4e6 ? 8 : 1;
      start = now(threads);
      for (int i = 0; i < repeats; ++i) contender.run();
      contender.best = std::min(contender.best, (now(threads) - start) / repeats);
    }
  }
  if (peak_flops > 0) state.counters["peak_gflops"] = threads * peak_flops / peak_best * 1e-9;
  for (auto& contender : contenders) {
    state.counters[contender.name + "_gflops"] = flops / contender.best * 1e-9;
    state.counters[contender.name + "_allocs"] = static_cast<double>(contender.allocations);
    if (s.m <= 16) state.counters[contender.name + "_weight_GB/s"] = 4.0 * s.n * s.k / contender.best * 1e-9;
  }
}

}  // namespace
}  // namespace frit

int main(int argc, char** argv) {
  for (const frit::Shapes& s : frit::all_shapes())
    for (int threads : {1, 2}) {
      const double flops = 2.0 * s.batch * s.m * s.n * s.k;
      const auto rounds = static_cast<int64_t>(std::clamp(2e9 / flops, 3.0, 50.0));
      const std::string name = s.name + "/" + (s.batch > 1 ? std::to_string(s.batch) + "*" : "") + std::to_string(s.m) +
                               "x" + std::to_string(s.n) + "x" + std::to_string(s.k) + "/threads" +
                               std::to_string(threads);
      benchmark::RegisterBenchmark(name.c_str(),
                                   [s, threads](benchmark::State& state) { frit::measure(state, s, threads); })
          ->Iterations(rounds)
          ->UseRealTime();
    }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
