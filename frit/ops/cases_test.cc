// Runs every operator's case table through every check, and holds the tables to the project's rules.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>

#include "frit/ops/case.h"

namespace frit {
namespace {

TEST(OpsDef, HasEveryOperatorOfTheMethod) {
  const std::map<std::string, bool> required = {
      // operator, has a gradient
      {"embedding", true},
      {"bias_dropout_residual", true},
      {"bias_activation_dropout", true},
      {"heads", true},
      {"layer_norm", true},
      {"softmax", true},
      {"criterion", true},
      {"cross_keys_values", true},
      {"gemm", true},
      {"attention", true},
      {"optimizer", false},
      {"gradient_norm", false},
      {"column_sum", false},
      {"beam_select", false},
  };
  std::map<std::string, bool> found;
  for (const OpTable& table : op_tables()) found[table.op] = table.has_gradient;
  for (auto& [op, gradient] : required) {
    ASSERT_TRUE(found.count(op)) << op << " is missing from OPS.def";
    EXPECT_EQ(found[op], gradient) << op;
  }
}

// Sums what criterion gives, which is fp32 whatever the logits are.
bool fp32_alone(const OpTable& table) {
  return table.op == "loss_total" || table.op == "search_step" || table.op == "sample_step";
}
// The search of a GPU, which the CPU does in frit/infer. What it reads and writes depends on its data: there is no
// formula of the shape for it.
bool gpu_search(const OpTable& table) {
  return table.op == "search_step" || table.op == "sample_step";
}

TEST(OpsDef, TablesAreFull) {
  for (const OpTable& table : op_tables()) {
    std::set<std::string> names, shapes;
    std::set<DType> dtypes;
    int64_t gradients = 0;
    for (const OpCase& c : table.cases) {
      EXPECT_TRUE(names.insert(c.name).second) << table.op << ": two cases named " << c.name;
      if (!c.test || c.where == Where::kGpu) continue;
      std::string shape;
      for (const Operand& o : c.inputs) shape += o.shape.to_string(), dtypes.insert(o.dtype);
      shapes.insert(shape);
      gradients += c.backward != nullptr;
    }
    if (gpu_search(table)) continue;
    EXPECT_GE(shapes.size(), 30u) << table.op << " has too few shapes";
    EXPECT_TRUE(dtypes.count(DType::kF32)) << table.op;
    EXPECT_TRUE(dtypes.count(DType::kBF16) || fp32_alone(table)) << table.op;
    if (table.has_gradient) {
      EXPECT_GE(gradients, 30) << table.op << " has too few gradient cases";
    }
  }
}

// Every operator with GPU kernels runs them in all three types, at thirty shapes or more, and states budgets.
TEST(OpsDef, GpuTablesAreFull) {
  for (const OpTable& table : op_tables()) {
    if (!table.has_gpu) continue;
    std::set<std::string> shapes, forward, backward;
    std::set<DType> dtypes;
    for (const OpCase& c : table.cases) {
      if (!c.test || c.where == Where::kCpu) continue;
      std::string shape;
      for (const Operand& o : c.inputs) shape += o.shape.to_string(), dtypes.insert(o.dtype);
      shapes.insert(shape);
      const auto whole = [](const GpuBudget& b) {
        return b.launches >= 0 && b.barriers >= 0 && b.read_bytes >= 0 && b.written_bytes >= 0;
      };
      if (whole(c.forward_gpu)) forward.insert(shape);
      if (c.backward && whole(c.backward_gpu)) backward.insert(shape);
    }
    EXPECT_GE(shapes.size(), 30u) << table.op << " has too few shapes on the GPU";
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16})
      EXPECT_TRUE(dtypes.count(dtype) || (dtype != DType::kF32 && fp32_alone(table)))
          << table.op << " " << name_of(dtype);
    EXPECT_GE(forward.size(), gpu_search(table) ? 0u : 3u)
        << table.op << " states its forward budget at too few shapes";
    if (table.has_gradient) {
      EXPECT_GE(backward.size(), 3u) << table.op << " states its backward budget at too few shapes";
    }
  }
}

class OpCases : public testing::TestWithParam<int> {};

TEST_P(OpCases, Pass) {
  const OpTable& table = op_tables()[GetParam()];
  for (const OpCase& c : table.cases) {
    if (!c.test || c.where == Where::kGpu) continue;
    for (const std::string& failure : check_case(c))
      ADD_FAILURE() << table.op << " " << c.name << " " << c.variant << ": " << failure;
  }
}

// On the GPU of this build: NVIDIA's, or the simulator.
class OpCasesGpu : public testing::TestWithParam<int> {};

TEST_P(OpCasesGpu, Pass) {
  const OpTable& table = op_tables()[GetParam()];
  if (!table.has_gpu) return;
  const std::unique_ptr<Gpu> gpu = make_gpu();
  // Under compute-sanitizer, which is slow, every n-th case.
  const char* stride_text = std::getenv("FRIT_CASE_STRIDE");
  const int stride = stride_text ? std::max(1, std::atoi(stride_text)) : 1;
  int number = 0;
  for (const OpCase& c : table.cases) {
    if (!c.test || c.where == Where::kCpu || number++ % stride != 0) continue;
    // Rows so far apart take tens of gigabytes: not where several of these programs run at a time.
    if (stride > 1 && std::any_of(c.inputs.begin(), c.inputs.end(),
                                  [](const Operand& o) { return o.row_stride > int64_t{1} << 24; }))
      continue;
    for (const std::string& failure : check_case(c, *gpu))
      ADD_FAILURE() << table.op << " " << c.name << " " << c.variant << ": " << failure;
  }
}

INSTANTIATE_TEST_SUITE_P(All, OpCasesGpu, testing::Range(0, static_cast<int>(op_tables().size())),
                         [](const auto& info) { return op_tables()[info.param].op; });
INSTANTIATE_TEST_SUITE_P(All, OpCases, testing::Range(0, static_cast<int>(op_tables().size())),
                         [](const auto& info) { return op_tables()[info.param].op; });

}  // namespace
}  // namespace frit
