// Matrices are row-major here and column-major there, that is, transposed: the library is asked for
// c^T = op(b)^T op(a)^T. Its A is our b, its B our a, its rows our columns (so that a bias along our columns is its
// bias along rows), and its leading dimensions are our row strides. A bias' gradient, sums over the depth of our op(a),
// is its BGRADB: of its B, one sum a column of its result.
#include "frit/backend/cuda/products.h"

#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace frit::cuda {
namespace {

constexpr size_t kWorkspaceBytes = size_t{32} << 20;  // what NVIDIA advises for Hopper
constexpr const char* kTuningName = "product";

constexpr int kMostProposals = 16;
constexpr double kHopeless = 1.5;  // times the best so far: not timed again
// Timed in the last: what took at most so many times the best of the first round, and microseconds more. Some
// algorithms clear a counter first, which costs more inside of a graph than on a stream.
constexpr double kClose = 1.1, kCloseUs = 3;
constexpr size_t kMostFinalists = 4;
constexpr int kRounds = 7;
// Shapes that differ in what a batch's rows decide by no more than this factor are neighbours: of one of them all
// proposals are timed, of the others the library's first one and what was best there, few of them in fewer rounds.
constexpr double kNear = 1.25;
constexpr int kNearRounds = 3;
constexpr size_t kNearCandidates = 2;
constexpr double kBurstUs = 60;  // work in one timing

// Everything that the library's choice depends on, compared and hashed by its bytes.
struct Key {
  int64_t m, n, k, batch, a_stride, b_stride, c_stride, a_step, b_step, c_step;
  DType dtype, c_dtype;
  uint8_t transpose_a, transpose_b, accumulate, bias, bias_gradient;
  uint8_t a_align, b_align, c_align;  // bytes, at most 16
  uint8_t unused[6];
  bool operator==(const Key& other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
};
static_assert(std::has_unique_object_representations_v<Key>);

struct KeyHash {
  size_t operator()(const Key& key) const {
    std::array<uint64_t, sizeof(Key) / 8> words;
    std::memcpy(words.data(), &key, sizeof(Key));
    uint64_t hash = 0;
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};
static_assert(sizeof(Key) % 8 == 0);

uint8_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return static_cast<uint8_t>(address % 16 == 0 ? 16 : address & -address);
}

Key key_of(const GpuProduct& p) {
  Key key = {};
  key.m = p.m, key.n = p.n, key.k = p.k, key.batch = p.batch;
  key.a_stride = p.a_stride, key.b_stride = p.b_stride, key.c_stride = p.c_stride;
  if (p.batch > 1) key.a_step = p.a_step, key.b_step = p.b_step, key.c_step = p.c_step;
  key.dtype = p.dtype, key.c_dtype = p.c_dtype;
  key.transpose_a = p.transpose_a, key.transpose_b = p.transpose_b, key.accumulate = p.accumulate;
  key.bias = p.bias != nullptr, key.bias_gradient = p.bias_gradient != nullptr;
  key.a_align = alignment_of(p.a), key.b_align = alignment_of(p.b), key.c_align = alignment_of(p.c);
  return key;
}

// What a batch's rows decide of a product: the depth where a is transposed (a weight's gradient), else the rows.
int64_t& extent_of(Key& key) {
  return key.transpose_a ? key.k : key.m;
}

// Rows and columns of a and b as they are stored.
std::pair<int64_t, int64_t> stored_a(const Key& key) {
  return key.transpose_a ? std::pair(key.k, key.m) : std::pair(key.m, key.k);
}
std::pair<int64_t, int64_t> stored_b(const Key& key) {
  return key.transpose_b ? std::pair(key.n, key.k) : std::pair(key.k, key.n);
}

// "4096x512x2048 nt bf16->bf16 bias acc": all of the key, so that it finds a tuned algorithm and explains an error.
// What is dense and well aligned goes without saying.
std::string text_of(const Key& key) {
  std::string text = fmt::format("{}x{}x{} {}{} {}->{}", key.m, key.n, key.k, key.transpose_a ? 't' : 'n',
                                 key.transpose_b ? 't' : 'n', name_of(key.dtype), name_of(key.c_dtype));
  if (key.bias) text += " bias";
  if (key.accumulate) text += " acc";
  if (key.bias_gradient) text += " bias gradient";
  const auto [a_rows, a_cols] = stored_a(key);
  const auto [b_rows, b_cols] = stored_b(key);
  if (key.a_stride != a_cols || key.b_stride != b_cols || key.c_stride != key.n)
    text += fmt::format(" strides {} {} {}", key.a_stride, key.b_stride, key.c_stride);
  if (key.batch > 1) text += fmt::format(" batch {} steps {} {} {}", key.batch, key.a_step, key.b_step, key.c_step);
  if (std::min({key.a_align, key.b_align, key.c_align}) < 16)
    text += fmt::format(" aligned {} {} {}", key.a_align, key.b_align, key.c_align);
  return text;
}

cudaDataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kBF16:
      return CUDA_R_16BF;
    case DType::kF16:
      return CUDA_R_16F;
    default:
      fail("[product] cuBLASLt is not asked for products of {}", name_of(dtype));
  }
}

// While a stream is captured, calls are forbidden that others' captures could trip over, such as allocating and loading
// a kernel's code, which the library does at a kernel's first use. Nobody else captures here: this allows them.
class AllowAll {
 public:
  explicit AllowAll(bool capturing) : capturing_(capturing) {
    if (capturing_) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~AllowAll() {
    if (capturing_) cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  AllowAll(const AllowAll&) = delete;

 private:
  bool capturing_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class TimingEvent {
 public:
  explicit TimingEvent(const std::string& gpu) { check(cudaEventCreate(&event_), "creating an event", gpu); }
  ~TimingEvent() { cudaEventDestroy(event_); }
  TimingEvent(const TimingEvent&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// "130100 0123456789abcdef ..." (the library's version, then the algorithm's eight words), and back; false if the text
// is anything else or of another version.
std::string text_of(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text = std::to_string(cublasLtGetVersion());
  for (uint64_t word : algorithm.data) text += fmt::format(" {:016x}", word);
  return text;
}
bool parse(std::string_view text, cublasLtMatmulAlgo_t& algorithm) {
  const std::string version = std::to_string(cublasLtGetVersion());
  if (text.substr(0, version.size()) != version) return false;
  text.remove_prefix(version.size());
  for (uint64_t& word : algorithm.data) {
    if (text.size() < 17 || text[0] != ' ') return false;
    word = 0;
    for (char digit : text.substr(1, 16)) {
      const std::string_view digits = "0123456789abcdef";
      const size_t value = digits.find(digit);
      if (value == std::string_view::npos) return false;
      word = word << 4 | value;
    }
    text.remove_prefix(17);
  }
  return text.empty();
}

}  // namespace

struct Products::Shape {
  cublasLtMatmulDescOpaque_t operation = {};
  cublasLtMatrixLayoutOpaque_t a = {}, b = {}, c = {};  // of our a, b and c
  const void* bias = nullptr;                           // or its gradient, as `operation` says
  cublasLtMatmulAlgo_t algorithm = {};
  bool chosen = false;
  bool asked = false, offered = false;  // does the library sum this bias' gradient?
};

struct Products::State {
  CudaGpu& gpu;
  cublasLtHandle_t handle = nullptr;
  char* workspace = nullptr;
  const Tuning* tuning = nullptr;
  std::unordered_map<Key, Shape, KeyHash> shapes;
  std::vector<Key> noted;  // in their order, without repeats
  std::unordered_set<Key, KeyHash> known;

  void checked(cublasStatus_t status, const char* what, const Key& key) const {
    if (status != CUBLAS_STATUS_SUCCESS)
      fail("[product] cuBLASLt {} failed at {} of {} on {}: {}", cublasLtGetVersion(), what, text_of(key), gpu.name(),
           cublasLtGetStatusString(status));
  }

  void open() {
    if (workspace) return;
    if (!handle) {
      const cublasStatus_t status = cublasLtCreate(&handle);
      if (status != CUBLAS_STATUS_SUCCESS)
        fail("[product] cuBLASLt cannot be opened on {}: {}", gpu.name(), cublasLtGetStatusString(status));
    }
    workspace = static_cast<char*>(gpu.allocate(kWorkspaceBytes));
  }

  Shape& find(const Key& key) {
    if (const auto it = shapes.find(key); it != shapes.end()) return it->second;
    open();
    Shape shape;
    describe(key, shape);
    return shapes.emplace(key, shape).first->second;
  }

  void describe(const Key& key, Shape& shape) const {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    if (std::max({key.m, key.n, key.k, key.batch}) > kMost)
      fail("[product] {} is too large, expected at most {} rows, columns, depth and matrices", text_of(key), kMost);
    checked(cublasLtMatmulDescInit(&shape.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "describing", key);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
      checked(cublasLtMatmulDescSetAttribute(&shape.operation, attribute, &value, sizeof(value)), "describing", key);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(key.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(key.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (key.bias || key.bias_gradient) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE,
          static_cast<uint32_t>(key.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_BGRADB));
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(type_of(key.c_dtype)));
    }
    const auto lay_out = [&](cublasLtMatrixLayoutOpaque_t& layout, DType dtype, std::pair<int64_t, int64_t> stored,
                             int64_t stride, int64_t step) {
      const auto [rows, cols] = stored;
      checked(cublasLtMatrixLayoutInit(&layout, type_of(dtype), static_cast<uint64_t>(cols),
                                       static_cast<uint64_t>(rows), std::max(stride, cols)),
              "describing a matrix", key);
      if (key.batch == 1) return;
      const auto count = static_cast<int32_t>(key.batch);
      checked(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)),
              "describing a batch", key);
      checked(
          cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof(step)),
          "describing a batch", key);
    };
    lay_out(shape.a, key.dtype, stored_a(key), key.a_stride, key.a_step);
    lay_out(shape.b, key.dtype, stored_b(key), key.b_stride, key.b_step);
    lay_out(shape.c, key.c_dtype, {key.m, key.n}, key.c_stride, key.c_step);
  }

  // The library takes the bias' alignment from its address, and that before it is asked for an algorithm.
  void set_bias(const Key& key, Shape& shape, const void* bias) const {
    if (!(key.bias || key.bias_gradient) || shape.bias == bias) return;
    checked(cublasLtMatmulDescSetAttribute(&shape.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof(bias)),
            "giving the bias", key);
    shape.bias = bias;
  }

  // The library's proposals, the one that it thinks fastest first. At least one.
  std::vector<cublasLtMatmulHeuristicResult_t> proposals(const Key& key, const Shape& shape, int most) const {
    cublasStatus_t status;
    std::vector<cublasLtMatmulHeuristicResult_t> results = ask(key, shape, most, status);
    checked(status, "choosing an algorithm", key);
    if (results.empty()) checked(CUBLAS_STATUS_NOT_SUPPORTED, "choosing an algorithm", key);
    return results;
  }
  std::vector<cublasLtMatmulHeuristicResult_t> ask(const Key& key, const Shape& shape, int most,
                                                   cublasStatus_t& status) const {
    cublasLtMatmulPreferenceOpaque_t preference;
    checked(cublasLtMatmulPreferenceInit(&preference), "describing what is wanted", key);
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      checked(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)),
              "describing what is wanted", key);
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspaceBytes});
    // Not in place, where the order of additions is left to chance; not in c's type, whose 16 bits would round partial
    // sums.
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t{key.b_align});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t{key.a_align});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{key.c_align});
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{key.c_align});
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
    int count = 0;
    Shape copy = shape;  // the library asks for descriptors that it may change
    status = cublasLtMatmulAlgoGetHeuristic(handle, &copy.operation, &copy.b, &copy.a, &copy.c, &copy.c, &preference,
                                            most, results.data(), &count);
    if (status != CUBLAS_STATUS_SUCCESS) return {};
    results.resize(static_cast<size_t>(count));
    std::erase_if(results,
                  [](const auto& r) { return r.state != CUBLAS_STATUS_SUCCESS || r.workspaceSize > kWorkspaceBytes; });
    return results;
  }

  // Takes the algorithm that `from` knows; false if it knows none that this library runs.
  bool restore(const Tuning& from, const Key& key, Shape& shape) const {
    cublasLtMatmulAlgo_t algorithm;
    if (!parse(from.find(kTuningName, text_of(key)), algorithm)) return false;
    if (!runs(shape, algorithm)) return false;
    shape.algorithm = algorithm;
    shape.chosen = true;
    return true;
  }
  // Does the library run this shape so?
  bool runs(const Shape& shape, const cublasLtMatmulAlgo_t& algorithm) const {
    Shape copy = shape;  // as in ask()
    cublasLtMatmulHeuristicResult_t result = {};
    return cublasLtMatmulAlgoCheck(handle, &copy.operation, &copy.b, &copy.a, &copy.c, &copy.c, &algorithm, &result) ==
               CUBLAS_STATUS_SUCCESS &&
           result.workspaceSize <= kWorkspaceBytes;
  }

  cublasStatus_t multiply(const Key& key, Shape& shape, const cublasLtMatmulAlgo_t& algorithm, const void* a,
                          const void* b, void* c) const {
    const float alpha = 1, beta = key.accumulate ? 1 : 0;
    return cublasLtMatmul(handle, &shape.operation, &alpha, b, &shape.b, a, &shape.a, &beta, c, &shape.c, c, &shape.c,
                          &algorithm, workspace, kWorkspaceBytes, gpu.cuda_stream());
  }

  void clear(const GpuProduct& product);
  class Timing;
};

Products::Products(CudaGpu& gpu) : state_(new State{.gpu = gpu, .shapes = {}, .noted = {}, .known = {}}) {}
Products::~Products() {
  if (state_->workspace) state_->gpu.release(state_->workspace);
  if (state_->handle) cublasLtDestroy(state_->handle);
}
size_t Products::scratch_bytes() const {
  return state_->workspace ? kWorkspaceBytes : 0;
}

namespace {

bool empty(const GpuProduct& p) {
  return p.m == 0 || p.n == 0 || p.batch == 0;
}

void check_types(const GpuProduct& p) {
  // The library can be told how a, b and c are aligned; of a bias it may choose algorithms that take 16 bytes for
  // granted.
  if (alignment_of(p.bias) < 16 || alignment_of(p.bias_gradient) < 16)
    fail("[product] {}x{}x{} with a bias or its gradient at {} and {}, expected multiples of 16 bytes", p.m, p.n, p.k,
         p.bias, p.bias_gradient);
  if (p.bias && p.bias_dtype != p.c_dtype)
    fail("[product] a bias in {} of {}x{}x{} in {} to {}: cuBLASLt takes it in {} alone", name_of(p.bias_dtype), p.m,
         p.n, p.k, name_of(p.dtype), name_of(p.c_dtype), name_of(p.c_dtype));
  if (p.bias_gradient && (p.bias || p.accumulate || p.k == 0))
    fail("[product] {}x{}x{} with a bias' gradient, but also a bias, an old c or no depth", p.m, p.n, p.k);
  // With larger steps cuBLASLt 13.1 gives wrong numbers.
  for (const auto& [name, stride, dtype] :
       {std::tuple{"a", p.a_stride, p.dtype}, {"b", p.b_stride, p.dtype}, {"c", p.c_stride, p.c_dtype}})
    if (stride * size_of(dtype) > std::numeric_limits<int32_t>::max())
      fail("[product] rows of {} lie {} elements apart in {}x{}x{} of {}: cuBLASLt takes less than 2^31 bytes", name,
           stride, p.m, p.n, p.k, name_of(dtype));
  if (p.bias && p.k == 0) fail("[product] {}x{}x0 with a bias: there is nothing for the library to do", p.m, p.n);
}

}  // namespace

void Products::State::clear(const GpuProduct& p) {
  const int64_t size = size_of(p.c_dtype);
  for (int64_t i = 0; i < p.batch; ++i) {
    char* c = static_cast<char*>(p.c) + i * p.c_step * size;
    const int64_t what[] = {0, reinterpret_cast<int64_t>(c), p.m, p.n, p.c_stride, size};
    if (!gpu.begin_call(identity_of(what, sizeof(what)))) continue;
    check(cudaMemset2DAsync(c, static_cast<size_t>(p.c_stride * size), 0, static_cast<size_t>(p.n * size),
                            static_cast<size_t>(p.m), gpu.cuda_stream()),
          "clearing a product without depth", gpu.name());
  }
}

void Products::run(const GpuProduct& p) {
  State& s = *state_;
  if (empty(p)) return;
  check_types(p);
  if (p.k == 0) {
    if (!p.accumulate) s.clear(p);
    return;
  }
  const Mode mode = s.gpu.mode();
  const AllowAll allow(mode == Mode::kRecord);
  const Key key = key_of(p);
  Shape& shape = s.find(key);
  s.set_bias(key, shape, p.bias ? p.bias : p.bias_gradient);
  if (!shape.chosen && !(s.tuning && s.restore(*s.tuning, key, shape))) {
    shape.algorithm = s.proposals(key, shape, 1).front().algo;
    shape.chosen = true;
  }
  uint64_t identity = 1;
  if (mode != Mode::kRun) {
    const void* addresses[] = {p.a, p.b, p.c, p.bias, p.bias_gradient};
    identity = identity_of(&key, sizeof(key));
    identity = identity_of(addresses, sizeof(addresses), identity);
    identity = identity_of(shape.algorithm.data, sizeof(shape.algorithm.data), identity);
  }
  if (!s.gpu.begin_call(identity)) return;
  s.checked(s.multiply(key, shape, shape.algorithm, p.a, p.b, p.c), "multiplying", key);
}

bool Products::sums_bias_gradient(const GpuProduct& p) {
  State& s = *state_;
  if (empty(p) || p.k == 0 || p.accumulate || p.bias || p.batch != 1 || alignment_of(p.bias_gradient) < 16)
    return false;
  const AllowAll allow(s.gpu.mode() == Mode::kRecord);
  const Key key = key_of(p);
  Shape& shape = s.find(key);
  if (!shape.asked) {
    s.set_bias(key, shape, p.bias_gradient);
    cublasStatus_t status;
    shape.offered = !s.ask(key, shape, 1, status).empty() && status == CUBLAS_STATUS_SUCCESS;
    shape.asked = true;
  }
  return shape.offered;
}

void Products::note(const GpuProduct& p) {
  if (empty(p)) return;
  check_types(p);
  if (p.k == 0) return;
  const Key key = key_of(p);
  if (state_->known.insert(key).second) state_->noted.push_back(key);
}

// Times proposals on operands of its own.
class Products::State::Timing {
 public:
  Timing(State& state, const std::vector<Key>& keys) : state_(state), begin_(state.gpu.name()), end_(state.gpu.name()) {
    for (const Key& key : keys) {
      const auto extend = [&](size_t& bytes, int64_t rows, int64_t cols, int64_t stride, int64_t step, DType dtype) {
        const int64_t elements = (key.batch - 1) * step + (rows - 1) * stride + cols;
        // 16 more: a poorly aligned operand begins a little later.
        bytes = std::max(bytes, (static_cast<size_t>(elements * size_of(dtype)) + 16 + 255) / 256 * 256);
      };
      extend(a_bytes_, stored_a(key).first, stored_a(key).second, key.a_stride, key.a_step, key.dtype);
      extend(b_bytes_, stored_b(key).first, stored_b(key).second, key.b_stride, key.b_step, key.dtype);
      extend(c_bytes_, key.m, key.n, key.c_stride, key.c_step, key.c_dtype);
      extend(bias_bytes_, 1, std::max(key.m, key.n), 0, 0, key.c_dtype);
    }
    const size_t total = a_bytes_ + b_bytes_ + c_bytes_ + bias_bytes_;
    memory_ = static_cast<char*>(state.gpu.allocate(total));
    try {
      fill(total);
    } catch (...) {
      state.gpu.release(memory_);
      throw;
    }
  }
  ~Timing() { state_.gpu.release(memory_); }
  Timing(const Timing&) = delete;

  // Runs an algorithm that is known already: at its first run the library loads the kernel's code, which takes
  // milliseconds that a training step does not have.
  void load(const Key& key, Shape& shape) {
    begin(key, shape);
    state_.checked(state_.multiply(key, shape, shape.algorithm, a_, b_, c_), "multiplying", key);
  }

  // The fastest of the library's proposals, or, where a neighbour's best are given, of its first one and of these: a
  // burst of each, then several in turns of those that came close to the best, these recorded as graphs as training
  // runs them, and the least median wins. What was timed last, the best first.
  std::vector<cublasLtMatmulAlgo_t> fastest(const Key& key, Shape& shape,
                                            const std::vector<cublasLtMatmulAlgo_t>& near) {
    begin(key, shape);
    std::vector<Candidate> candidates;
    double best = std::numeric_limits<double>::infinity();
    const size_t rounds = near.empty() ? kRounds : kNearRounds;
    for (const cublasLtMatmulAlgo_t& proposal : proposed(key, shape, near)) {
      Candidate candidate{proposal, 0, {}, nullptr};
      // The first run loads the kernel. An algorithm that cannot run after all is no candidate.
      if (state_.multiply(key, shape, candidate.algorithm, a_, b_, c_) != CUBLAS_STATUS_SUCCESS) continue;
      if (candidates.empty()) burst_ = 1, burst_ = length_for(burst(candidate.algorithm));
      candidate.first = burst(candidate.algorithm);
      best = std::min(best, candidate.first);
      if (candidate.first <= kHopeless * best) candidates.push_back(std::move(candidate));
    }
    if (candidates.empty()) state_.checked(CUBLAS_STATUS_NOT_SUPPORTED, "timing all proposals", key);
    std::erase_if(candidates, [&](const Candidate& c) { return c.first > kClose * best + kCloseUs; });
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& x, const Candidate& y) { return x.first < y.first; });
    const size_t most = near.empty() ? kMostFinalists : kNearCandidates;
    if (candidates.size() > most) candidates.resize(most);
    if (candidates.size() > 1) {
      for (Candidate& c : candidates)
        c.graph = state_.gpu.record([&] {
          const AllowAll allow(true);
          put(c.algorithm);
        });
      for (size_t round = 0; round < rounds; ++round)
        for (Candidate& c : candidates) c.times[round] = burst([&] { c.graph->launch(); });
    }
    for (Candidate& c : candidates) std::sort(c.times.begin(), c.times.begin() + static_cast<ptrdiff_t>(rounds));
    std::stable_sort(candidates.begin(), candidates.end(),
                     [&](const Candidate& x, const Candidate& y) { return x.times[rounds / 2] < y.times[rounds / 2]; });
    std::vector<cublasLtMatmulAlgo_t> found;
    for (const Candidate& c : candidates) found.push_back(c.algorithm);
    return found;
  }

 private:
  struct Candidate {
    cublasLtMatmulAlgo_t algorithm;
    double first;
    std::array<double, kRounds> times;
    std::unique_ptr<GpuGraph> graph;
  };

  std::vector<cublasLtMatmulAlgo_t> proposed(const Key& key, const Shape& shape,
                                             const std::vector<cublasLtMatmulAlgo_t>& near) const {
    std::vector<cublasLtMatmulAlgo_t> all;
    for (const auto& proposal : state_.proposals(key, shape, near.empty() ? kMostProposals : 1))
      all.push_back(proposal.algo);
    for (const cublasLtMatmulAlgo_t& algorithm : near) {
      if (all.size() > kNearCandidates) break;
      const bool again = std::memcmp(&algorithm, &all.front(), sizeof(algorithm)) == 0;
      if (!again && state_.runs(shape, algorithm)) all.push_back(algorithm);
    }
    return all;
  }

  void begin(const Key& key, Shape& shape) {
    const auto place = [](char* p, uint8_t align) { return align < 16 ? p + align : p; };
    key_ = &key, shape_ = &shape;
    a_ = place(memory_, key.a_align);
    b_ = place(memory_ + a_bytes_, key.b_align);
    c_ = place(memory_ + a_bytes_ + b_bytes_, key.c_align);
    state_.set_bias(key, shape, memory_ + a_bytes_ + b_bytes_ + c_bytes_);
  }

  static int length_for(double us) { return std::clamp(static_cast<int>(kBurstUs / std::max(us, 0.1)), 2, 10); }

  void put(const cublasLtMatmulAlgo_t& algorithm) {
    for (int i = 0; i < burst_; ++i)
      state_.checked(state_.multiply(*key_, *shape_, algorithm, a_, b_, c_), "timing", *key_);
  }

  // Microseconds of one of burst_ products put on the stream one behind the other. A launch takes the host longer than
  // a small product takes the GPU, which is therefore kept busy until all of them wait for it.
  double burst(const cublasLtMatmulAlgo_t& algorithm) {
    return burst([&] { put(algorithm); });
  }
  template <typename Work>
  double burst(const Work& work) {
    const std::string& gpu = gpu_name();
    const cudaStream_t stream = state_.gpu.cuda_stream();
    for (int i = 0; i < burst_ + 1; ++i)
      check(cudaMemsetAsync(state_.workspace, 0, kWorkspaceBytes, stream), "filling", gpu);
    check(cudaEventRecord(begin_, stream), "recording an event", gpu);
    work();
    check(cudaEventRecord(end_, stream), "recording an event", gpu);
    check(cudaEventSynchronize(end_), "timing a product", gpu);
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "reading an event", gpu);
    return 1e3 * ms / burst_;
  }

  // Random bits that are numbers between 0.5 and 2 in size whether read as f32, bf16 or f16: a GPU is faster on zeros.
  void fill(size_t total) {
    std::vector<uint16_t> bits(std::min(total, size_t{1} << 20) / 2);
    uint64_t state = 1;
    for (uint16_t& b : bits) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      b = static_cast<uint16_t>((state >> 40 & 0x80ff) | 0x3f00);
    }
    size_t done = bits.size() * 2;
    state_.gpu.upload(memory_, bits.data(), done);
    for (; done < total; done += std::min(done, total - done))
      check(cudaMemcpyAsync(memory_ + done, memory_, std::min(done, total - done), cudaMemcpyDeviceToDevice,
                            state_.gpu.cuda_stream()),
            "filling", gpu_name());
  }
  const std::string& gpu_name() {
    if (name_.empty()) name_ = state_.gpu.name();
    return name_;
  }

  State& state_;
  std::string name_;
  TimingEvent begin_, end_;
  size_t a_bytes_ = 0, b_bytes_ = 0, c_bytes_ = 0, bias_bytes_ = 0;
  char* memory_ = nullptr;
  const Key* key_ = nullptr;
  Shape* shape_ = nullptr;
  char *a_ = nullptr, *b_ = nullptr, *c_ = nullptr;
  int burst_ = 1;
};

int Products::tune(Tuning& tuning) {
  State& s = *state_;
  if (s.gpu.mode() != Mode::kRun) fail("[product] products cannot be timed while a graph is recorded");
  s.tuning = &tuning;
  for (auto& [key, shape] : s.shapes) shape.chosen = false;
  if (s.noted.empty()) return 0;
  State::Timing timing(s, s.noted);
  std::vector<Key> unknown;
  for (const Key& key : s.noted) {
    Shape& shape = s.find(key);
    // Nobody reads this bias: what counts is that it is aligned.
    s.set_bias(key, shape, s.workspace);
    if (s.restore(tuning, key, shape))
      timing.load(key, shape);
    else
      unknown.push_back(key);
  }
  // In the order of their extents, so that each one's neighbour is there before it.
  std::stable_sort(unknown.begin(), unknown.end(), [](Key x, Key y) { return extent_of(x) < extent_of(y); });
  struct Neighbour {
    int64_t extent = 0;
    std::vector<cublasLtMatmulAlgo_t> best;
  };
  std::unordered_map<Key, Neighbour, KeyHash> neighbours;  // by what they have in common: the last whose all were timed
  for (const Key& key : unknown) {
    Key common = key;
    const int64_t extent = std::exchange(extent_of(common), 0);
    Neighbour& neighbour = neighbours[common];
    const bool near = static_cast<double>(extent) <= kNear * static_cast<double>(neighbour.extent);
    Shape& shape = s.find(key);
    std::vector<cublasLtMatmulAlgo_t> best =
        timing.fastest(key, shape, near ? neighbour.best : std::vector<cublasLtMatmulAlgo_t>());
    shape.algorithm = best.front();
    shape.chosen = true;
    tuning.set(kTuningName, text_of(key), text_of(shape.algorithm));
    if (!near) neighbour = {extent, std::move(best)};
  }
  return static_cast<int>(unknown.size());
}

}  // namespace frit::cuda
