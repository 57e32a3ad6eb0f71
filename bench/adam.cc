// One optimizer step over the 257 tensors of Transformer-big with each tensor's size divided by 8, beside a plain copy
// of the same bytes. Two threads by default; --threads N before or after Google Benchmark's own flags.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "frit/memory/block.h"
#include "frit/ops/gradient_norm/gradient_norm.h"
#include "frit/ops/optimizer/optimizer.h"

namespace frit {
namespace {

// Encoder and decoder of 6 layers, H 1024, FFN 4096, one shared embedding of 32768 words, a LayerNorm behind each side:
// 16 tensors an encoder layer, 26 a decoder layer, 257 together. Matrices lose a factor of 8 in their rows, vectors in
// length.
ParameterLayout transformer_big_over_8() {
  constexpr int64_t kH = 1024, kF = 4096;
  ParameterLayout layout;
  const auto linear = [&](const std::string& name, int64_t out, int64_t in) {
    layout.add(name + ".weight", {out / 8, in});
    layout.add(name + ".bias", {out / 8});
  };
  const auto norm = [&](const std::string& name) {
    layout.add(name + ".weight", {kH / 8});
    layout.add(name + ".bias", {kH / 8});
  };
  layout.add("embedding", {32768 / 8, kH});
  for (const char* side : {"encoder", "decoder"}) {
    const bool decoder = side[0] == 'd';
    for (int i = 0; i < 6; ++i) {
      const std::string layer = std::string(side) + "." + std::to_string(i) + ".";
      for (const char* attention : {"self", "cross"}) {
        if (attention[0] == 'c' && !decoder) continue;
        for (const char* product : {"q", "k", "v", "out"}) linear(layer + attention + "." + product, kH, kH);
        norm(layer + attention + ".norm");
      }
      linear(layer + "ffn.1", kF, kH);
      linear(layer + "ffn.2", kH, kF);
      norm(layer + "ffn.norm");
    }
    norm(std::string(side) + ".norm");
  }
  layout.finish();
  return layout;
}

int threads = 2;

// Bytes that a step moves: each block read once, and all but the gradients written once.
int64_t step_bytes(const Workspace& w) {
  int64_t bytes = w.gradients().bytes() + 2 * (w.moment1().bytes() + w.moment2().bytes() + w.parameters().bytes());
  if (w.precision() == Precision::kBF16Master) bytes += 2 * w.master().bytes() - w.parameters().bytes();
  if (w.precision() == Precision::kBF16Residual) bytes += 2 * w.residual().bytes();
  return bytes;
}

struct Setup {
  explicit Setup(Precision precision)
      : pool(threads),
        context(pool, memory),
        workspace(transformer_big_over_8(), precision, true, 2, compute_dtype(precision)) {
    const Tensor g = workspace.gradients();
    for (int64_t i = 0; i < g.numel(); ++i) {
      const float value = static_cast<float>(i % 2003) * 1e-5f - 0.01f;
      if (g.dtype() == DType::kF32)
        g.data<float>()[i] = value;
      else
        g.data<bfloat16>()[i] = bfloat16(value);
    }
  }
  ThreadPool pool;
  Memory memory;
  Context context;
  Workspace workspace;
};

void report(benchmark::State& state, int64_t bytes, int64_t parameters) {
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["bytes/parameter"] = static_cast<double>(bytes) / static_cast<double>(parameters);
}

// Adam, then a copy of half as many bytes from one block to another (each byte is read and written).
void adam(benchmark::State& state, Precision precision) {
  Setup setup(precision);
  OptimizerStep step{.learning_rate = 1e-3, .step = 1};
  for (auto _ : state) {
    optimizer_step(
        setup.context,
        {.kind = OptimizerKind::kAdamW, .weight_decay = 0.01, .decay_end = setup.workspace.layout().decay_end()}, step,
        setup.workspace);
    ++step.step;
  }
  state.counters["tensors"] = static_cast<double>(setup.workspace.layout().slices().size());
  report(state, step_bytes(setup.workspace), setup.workspace.layout().elements());
}

void copy(benchmark::State& state, Precision precision) {
  Setup setup(precision);
  const int64_t bytes = step_bytes(setup.workspace) / 2;
  const Block from = allocate_block(static_cast<size_t>(bytes)), to = allocate_block(static_cast<size_t>(bytes));
  std::memset(from.get(), 1, bytes);
  std::memset(to.get(), 2, bytes);
  for (auto _ : state) {
    setup.pool.parallel_for(bytes / 4096, 16, [&](int64_t begin, int64_t end, int) {
      std::memcpy(to.get() + begin * 4096, from.get() + begin * 4096, (end - begin) * 4096);
    });
    benchmark::ClobberMemory();
  }
  report(state, 2 * (bytes / 4096 * 4096), setup.workspace.layout().elements());
}

void norm(benchmark::State& state, Precision precision) {
  Setup setup(precision);
  double sum;
  int32_t not_finite;
  for (auto _ : state)
    gradient_norm(setup.context, setup.workspace.gradients(), Tensor(&sum, DType::kF64, {1}),
                  Tensor(&not_finite, DType::kI32, {1}));
  report(state, setup.workspace.gradients().bytes(), setup.workspace.layout().elements());
}

}  // namespace
}  // namespace frit

int main(int argc, char** argv) {
  using frit::Precision;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string(argv[i]) != "--threads") continue;
    frit::threads = std::max(1, std::atoi(argv[i + 1]));
    std::rotate(argv + i, argv + i + 2, argv + argc);
    argc -= 2;
    break;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  for (const Precision p :
       {Precision::kF32, Precision::kBF16Stochastic, Precision::kBF16Residual, Precision::kBF16Master}) {
    const std::string name = frit::name_of(p);
    benchmark::RegisterBenchmark(("adamw/" + name).c_str(), frit::adam, p)
        ->UseRealTime()
        ->Unit(benchmark::kMillisecond);
    benchmark::RegisterBenchmark(("copy/" + name).c_str(), frit::copy, p)->UseRealTime()->Unit(benchmark::kMillisecond);
    benchmark::RegisterBenchmark(("norm/" + name).c_str(), frit::norm, p)->UseRealTime()->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
}
