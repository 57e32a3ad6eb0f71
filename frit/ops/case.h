// The case table: an operator lists its cases once, and they serve as the test against a double-precision oracle, the
// finite-difference gradient check, the budget check, the benchmark and the support matrix.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "frit/backend/context.h"

namespace frit {

// An array of doubles: what oracles compute with. Values of an input are already rounded to the operand's dtype.
struct Array {
  Shape shape;
  std::vector<double> v;
  double& operator[](int64_t i) { return v[i]; }
  double operator[](int64_t i) const { return v[i]; }
  int64_t dim(int i) const { return shape[i]; }
};
using Arrays = std::map<std::string, Array>;
using Tensors = std::map<std::string, Tensor>;

// Makes an input's values; index runs over all elements in row-major order, uniform() is a number in [0, 1).
struct CaseRandom {
  uint64_t state;
  bool quick = false;  // normal() sums four uniform numbers (no logarithm, no cosine), within 3.5 deviations
  uint64_t next();
  double uniform();
  double normal();
  int64_t below(int64_t n) { return static_cast<int64_t>(uniform() * static_cast<double>(n)); }
};
using Fill = std::function<void(CaseRandom&, Array&)>;
Fill fill_normal(double mean = 0, double deviation = 1);
Fill fill_repeated(Fill first);  // 65521 of these over and over: quick, for large benchmarks
Fill fill_uniform(double low, double high);
Fill fill_below(int64_t n);                       // whole numbers in [0, n)
Fill fill_values(std::vector<double> values);     // exactly these
Fill fill_offsets(std::vector<int64_t> lengths);  // 0, l0, l0+l1, ...

struct Operand {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  Fill fill = fill_normal();
  int64_t row_stride =
      0;  // 0: contiguous. Larger: rows this far apart, in sparse memory (offsets past 2^31 cost nothing)
};

// Error allowed for an element: absolute + relative * |expected|. A NaN where the oracle has none always fails.
struct Tolerance {
  double absolute = 1e-5, relative = 1e-5;
};
// 1e-5 for f32 and 2^-7 (two roundings to bf16) for bf16, scaled by `factor`.
Tolerance tolerance_for(DType dtype, double factor = 1);

// What one call costs on the CPU, as a formula of the shape, written by hand from the definition. -1: not asserted.
struct Budget {
  int64_t regions = -1;        // parallel regions begun (launches)
  int64_t scratch_bytes = -1;  // peak bytes taken from the context, each rounded up to kAlignment
  int64_t bytes = 0;           // each input read once, each output written once: what GB/s is counted from
  double flops = 0;            // for products: what GFLOP/s is counted from; 0: count bytes
};

// The same on the GPU. The simulator counts and asserts all of it; launches and scratch are asserted on the GPU too.
// -1: not asserted; every operator asserts at least three shapes a direction.
struct GpuBudget {
  int64_t launches = -1;
  int64_t barriers = -1;    // of one block, the block with the most; summed over the launches
  int64_t read_bytes = -1;  // global memory, as the kernels request it: what is read twice counts twice
  int64_t written_bytes = -1;
  int64_t atomics = -1;        // by thread
  int64_t scratch_bytes = -1;  // as Budget
};

enum class Where : uint8_t { kEverywhere, kCpu, kGpu };

// One case. The harness makes the inputs, poisons the outputs with NaN, surrounds all tensors with guard words, runs,
// and compares. Names key all maps.
struct OpCase {
  std::string op;       // folder name
  std::string name;     // "33x1025/bf16"; unique within the operator
  std::string variant;  // forced implementation (Context::force(op, variant)); "" leaves the choice free

  std::vector<Operand> inputs;  // x, gamma, ...
  std::vector<Operand>
      outputs;  // y, mean, ...; an output with the name of an input is written in place: it starts as the input
  std::function<void(Context&, const Tensors&)> forward;      // sees inputs and outputs
  std::function<void(const Arrays& in, Arrays& out)> oracle;  // out has zeroed arrays of the outputs' shapes
  std::map<std::string, Tolerance> tolerance;                 // by output; default tolerance_for(dtype of the output)

  // Backward, if `backward` is set. It sees inputs, outputs (as forward left them), "d"+name for each of `incoming`
  // (random gradients of those outputs) and "d"+name for each of `differentiable`, which it writes (poisoned first, or
  // random values that it adds to when accumulate is true).
  std::vector<std::string> incoming;  // outputs with a gradient: {"y"}
  Fill incoming_fill = fill_normal();
  std::vector<std::string> differentiable;      // inputs whose gradient is computed: {"x", "gamma", "beta"}
  std::map<std::string, DType> gradient_dtype;  // of a differentiable input; default the input's dtype
  std::function<void(Context&, const Tensors&, bool accumulate)> backward;
  std::vector<std::string> accumulates;  // differentiable inputs that honour `accumulate`
  std::function<void(const Arrays& in, Arrays& out)>
      gradient_oracle;                                  // in: inputs, outputs of the oracle, incoming; out: gradients
  std::map<std::string, Tolerance> gradient_tolerance;  // by input ("x"); default 4 times tolerance_for
  double finite_difference_step = 1e-5;                 // in the double oracle; 0: no such check (say why in the table)

  Budget forward_budget, backward_budget;
  GpuBudget forward_gpu, backward_gpu;
  // Kernel instances that can run this case on the GPU (Context::force(op + "_forward", name)). Each is forced and goes
  // through every check but the budgets, beside the one that is chosen freely.
  std::vector<std::string> forward_instances, backward_instances;
  Where where =
      Where::kEverywhere;  // f16 is the GPU's alone; an implementation that only one device has is forced there
  bool benchmark = false;  // also timed
  bool test = true;        // false: benchmark only (large shapes)
};

struct OpTable {
  std::string op;
  bool has_gradient;
  bool has_gpu;  // kernels for the GPU
  std::vector<OpCase> cases;
};
// All operators of OPS.def with their cases.
const std::vector<OpTable>& op_tables();

// Runs every check of the table's use on the CPU and returns what failed, one line a failure (empty: passed):
// forward against the oracle; inputs and guards untouched; the same bits with 1 and 3 threads; backward against the
// gradient oracle; the oracle's finite differences against backward; accumulation; planning then replay in a poisoned
// arena with the same bits; budgets; the forced variant was the one that ran.
std::vector<std::string> check_case(const OpCase& c);
// The same on a GPU or in the simulator. Instead of threads: a second run, and one with the blocks in reverse order
// (simulator), give the same bits. Finite differences only where the CPU does not run the case.
std::vector<std::string> check_case(const OpCase& c, Gpu& gpu);

// How far a result is from the oracle: root mean square of the error over that of the oracle, and the largest error.
struct CaseError {
  std::string output;  // "y", "dx"
  DType dtype;
  double rms, max;
};
// Runs `work` on the thread that owns the GPU and returns when it is done.
using OnGpu = std::function<void(const std::function<void(Gpu&)>& work)>;
// Many threads may call this at once: inputs, oracles and comparison, which take most of the time, are the caller's.
std::vector<CaseError> case_errors(const OpCase& c, const OnGpu& on_gpu);

// Inputs made (quickly, see CaseRandom) and kept for repeated runs: what benchmarks time. `sets` copies rotate so that
// caches stay cold.
class CaseRun {
 public:
  CaseRun(const OpCase& c, Context& context, int sets = 1);
  ~CaseRun();
  void forward();  // on the next set
  void backward();
  int sets() const;

 private:
  struct State;
  State* state_;
};

}  // namespace frit
