// Attention over cuDNN's graph interface. The one file that includes its headers, which take a minute to compile.
#include <cuda.h>
#include <cuda_runtime_api.h>

namespace {
// The headers call this function of the driver, which we do not link; the run time has the same one.
inline CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  auto plain = static_cast<cudaStreamCaptureMode>(*mode);
  const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&plain);
  *mode = static_cast<CUstreamCaptureMode>(plain);
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}
}  // namespace
#define cuThreadExchangeStreamCaptureMode exchange_capture_mode
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <array>
#include <bit>
#include <functional>
#include <map>
#include <unordered_map>

#include "frit/backend/cuda/attention.h"

namespace frit::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using TensorPointer = std::shared_ptr<Tensor_attributes>;

// Names of a graph's operands. A packed one's begins have the next number.
enum Operand : int64_t {
  kQ = 1,
  kK = 3,
  kV = 5,
  kOut = 7,
  kLse = 9,
  kDout = 11,
  kDq = 13,
  kDk = 15,
  kDv = 17,
  kQLengths = 19,
  kKLengths,
  kSeed,
  kFirst,
};

// All that makes one plan differ from another.
using Key = std::array<int64_t, 18>;
Key key_of(const GpuAttention& a, bool backward) {
  const auto bits = [](float x) { return static_cast<int64_t>(std::bit_cast<uint32_t>(x)); };
  Key key = {backward,      static_cast<int64_t>(a.dtype),
             a.sequences,   a.heads,
             a.width,       a.longest_q,
             a.longest_k,   a.causal,
             bits(a.scale), bits(a.p_drop),
             a.q.stride,    a.k.stride,
             a.v.stride,    a.out.stride};
  if (backward) key[14] = a.dout.stride, key[15] = a.dq.stride, key[16] = a.dk.stride, key[17] = a.dv.stride;
  return key;
}

std::string shape_of(const GpuAttention& a, bool backward) {
  return fmt::format("{} of {} sequences of up to {} queries and {} keys, {} heads of width {}, {}{}{}",
                     backward ? "backward" : "forward", a.sequences, a.longest_q, a.longest_k, a.heads, a.width,
                     name_of(a.dtype), a.causal ? ", causal" : "", a.p_drop > 0 ? ", dropout" : "");
}

// A graph with its plan, or why there is none.
struct Plan {
  std::string refusal;
  std::unique_ptr<fe::graph::Graph> graph;
  size_t scratch_bytes = 0;
};

// Makes the operands of one graph.
class Builder {
 public:
  Builder(fe::graph::Graph& graph, const GpuAttention& a) : graph_(graph), a_(a) {}

  // [sequences, heads, longest, width] whose sequences lie where its begins say.
  Tensor_attributes packed(Operand operand, const char* name, int64_t longest, int64_t stride) {
    return Tensor_attributes()
        .set_name(name)
        .set_uid(operand)
        .set_dim({a_.sequences, a_.heads, longest, a_.width})
        .set_stride({longest * stride, a_.width, stride, 1})
        .set_data_type(a_.dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_ragged_offset(begins(operand));
  }
  // [sequences, heads, longest, 1], token by token: head by head, with a bound on the tokens, gives a wrong dq in
  // silence.
  Tensor_attributes lse() {
    return Tensor_attributes()
        .set_name("lse")
        .set_uid(kLse)
        .set_dim({a_.sequences, a_.heads, a_.longest_q, 1})
        .set_stride({a_.longest_q * a_.lse.stride, 1, a_.lse.stride, 1})
        .set_data_type(fe::DataType_t::FLOAT)
        .set_ragged_offset(begins(kLse));
  }
  TensorPointer begins(Operand operand) {
    return vector(operand + 1, "begins", a_.sequences + 1, fe::DataType_t::INT64);
  }
  TensorPointer lengths(Operand operand) { return vector(operand, "lengths", a_.sequences, fe::DataType_t::INT32); }
  TensorPointer scalar(Operand operand) { return vector(operand, "random", 1, fe::DataType_t::INT64); }
  TensorPointer input(const Tensor_attributes& t) { return graph_.tensor(t); }

  // What both directions say of masks and dropout.
  template <typename Options>
  void set(Options& options) {
    options.set_attn_scale(a_.scale)
        .set_padding_mask(true)
        .set_seq_len_q(lengths(kQLengths))
        .set_seq_len_kv(lengths(kKLengths));
    if (a_.causal) options.set_causal_mask(true);
    if (a_.p_drop > 0) options.set_dropout(a_.p_drop, scalar(kSeed), scalar(kFirst));
  }

 private:
  TensorPointer vector(int64_t uid, const char* name, int64_t count, fe::DataType_t type) {
    return graph_.tensor(Tensor_attributes()
                             .set_name(name)
                             .set_uid(uid)
                             .set_dim({count, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(type));
  }
  fe::graph::Graph& graph_;
  const GpuAttention& a_;
};

// An operation's result is this tensor.
void become(const TensorPointer& result, const Tensor_attributes& as) {
  result->set_output(true)
      .set_name(as.get_name())
      .set_uid(as.get_uid())
      .set_dim(as.get_dim())
      .set_stride(as.get_stride())
      .set_data_type(as.get_data_type());
}

}  // namespace

struct Attention::State {
  explicit State(CudaGpu& owner) : gpu(owner) {}
  ~State() {
    plans.clear();
    if (handle) cudnnDestroy(handle);
  }

  // Why there is no handle; "" if there is one now.
  const std::string& open() {
    if (opened) return unusable;
    opened = true;
    cudnnStatus_t status = cudnnCreate(&handle);
    if (status == CUDNN_STATUS_SUCCESS) status = cudnnSetStream(handle, gpu.cuda_stream());
    if (status != CUDNN_STATUS_SUCCESS) unusable = fmt::format("cuDNN cannot start: {}", cudnnGetErrorString(status));
    return unusable;
  }

  const Plan& plan(const GpuAttention& a, bool backward) {
    const Key key = key_of(a, backward);
    if (auto it = plans.find(key); it != plans.end()) return it->second;
    if (gpu.mode() != Mode::kRun)
      fail("[attention] {}: cuDNN's plan is to be built while a graph is recorded", shape_of(a, backward));
    Plan made;
    try {
      made.refusal = build(a, backward, made);
    } catch (const std::exception& error) {
      made.refusal = error.what();
    }
    if (!made.refusal.empty()) made.graph.reset();
    return plans.emplace(key, std::move(made)).first->second;
  }

  // The reason, if it fails.
  std::string build(const GpuAttention& a, bool backward, Plan& made) {
    if (!open().empty()) return unusable;
    made.graph = std::make_unique<fe::graph::Graph>();
    fe::graph::Graph& graph = *made.graph;
    graph.set_io_data_type(a.dtype == DType::kBF16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    Builder builder(graph, a);
    const Tensor_attributes out = builder.packed(kOut, "out", a.longest_q, a.out.stride), lse = builder.lse();
    const TensorPointer q = builder.input(builder.packed(kQ, "q", a.longest_q, a.q.stride)),
                        k = builder.input(builder.packed(kK, "k", a.longest_k, a.k.stride)),
                        v = builder.input(builder.packed(kV, "v", a.longest_k, a.v.stride));
    const auto result = [](const TensorPointer& tensor, Tensor_attributes as) {
      become(tensor, as);
      tensor->set_ragged_offset(as.get_ragged_offset());
    };
    if (!backward) {
      auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
      builder.set(options);
      const auto [o, stats] = graph.sdpa(q, k, v, options);
      result(o, out), result(stats, lse);
    } else {
      auto options = fe::graph::SDPA_backward_attributes().set_name("attention").set_deterministic_algorithm(true);
      builder.set(options);
      const auto [dq, dk, dv] = graph.sdpa_backward(
          q, k, v, builder.input(out), builder.input(builder.packed(kDout, "dout", a.longest_q, a.dout.stride)),
          builder.input(lse), options);
      result(dq, builder.packed(kDq, "dq", a.longest_q, a.dq.stride));
      result(dk, builder.packed(kDk, "dk", a.longest_k, a.dk.stride));
      result(dv, builder.packed(kDv, "dv", a.longest_k, a.dv.stride));
    }
    for (const auto& step : std::initializer_list<std::function<fe::error_t()>>{
             [&] { return graph.validate(); }, [&] { return graph.build_operation_graph(handle); },
             [&] { return graph.create_execution_plans({fe::HeurMode_t::A}); },
             [&] { return graph.check_support(handle); }, [&] { return graph.build_plans(handle); }})
      if (fe::error_t error = step(); error.is_bad()) return error.get_message();
    int64_t bytes = 0;
    if (fe::error_t error = graph.get_workspace_size(bytes); error.is_bad()) return error.get_message();
    made.scratch_bytes = static_cast<size_t>(bytes);
    return "";
  }

  CudaGpu& gpu;
  cudnnHandle_t handle = nullptr;
  bool opened = false;
  std::string unusable;
  std::map<Key, Plan> plans;
};

Attention::Attention(CudaGpu& gpu) : state_(std::make_unique<State>(gpu)) {}
Attention::~Attention() = default;

std::string Attention::refuses(const GpuAttention& a) {
  const std::string& forward = state_->plan(a, false).refusal;
  return forward.empty() ? state_->plan(a, true).refusal : forward;
}

size_t Attention::scratch_bytes(const GpuAttention& a, bool backward) {
  const Plan& plan = state_->plan(a, backward);
  if (!plan.refusal.empty()) fail("[attention] cuDNN refuses {}: {}", shape_of(a, backward), plan.refusal);
  return plan.scratch_bytes;
}

void Attention::run(const GpuAttention& a, bool backward, void* scratch) {
  const Plan& plan = state_->plan(a, backward);
  if (!plan.refusal.empty()) fail("[attention] cuDNN refuses {}: {}", shape_of(a, backward), plan.refusal);
  std::unordered_map<int64_t, void*> operands;
  std::vector<uint64_t> identity;
  for (int64_t part : key_of(a, backward)) identity.push_back(static_cast<uint64_t>(part));
  const auto add = [&](int64_t operand, const void* address) {
    operands[operand] = const_cast<void*>(address);
    identity.push_back(reinterpret_cast<uint64_t>(address));
  };
  const auto add_packed = [&](Operand operand, const GpuAttention::Packed& packed) {
    add(operand, packed.data), add(operand + 1, packed.begins);
  };
  add_packed(kQ, a.q), add_packed(kK, a.k), add_packed(kV, a.v), add_packed(kOut, a.out), add_packed(kLse, a.lse);
  if (backward) add_packed(kDout, a.dout), add_packed(kDq, a.dq), add_packed(kDk, a.dk), add_packed(kDv, a.dv);
  add(kQLengths, a.q_lengths), add(kKLengths, a.k_lengths);
  if (a.p_drop > 0) add(kSeed, a.random), add(kFirst, a.random + 1);
  identity.push_back(reinterpret_cast<uint64_t>(scratch));
  if (!state_->gpu.begin_call(identity_of(identity.data(), identity.size() * sizeof(uint64_t)))) return;
  if (fe::error_t error = plan.graph->execute(state_->handle, operands, scratch); error.is_bad())
    fail("[attention] cuDNN failed at {} on {}: {}", shape_of(a, backward), state_->gpu.name(), error.get_message());
}

}  // namespace frit::cuda

namespace frit {

bool built_with_cudnn() {
  return true;
}

}  // namespace frit
