#include "frit/ops/case.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <set>

#include "frit/memory/planner.h"
#if !FRIT_CUDA
#include "frit/backend/sim/machine.h"
#endif

namespace frit {

#define FRIT_OP(op, has_gradient, has_gpu) std::vector<OpCase> op##_cases();
#include "frit/ops/OPS.def"
#undef FRIT_OP

const std::vector<OpTable>& op_tables() {
  static const std::vector<OpTable> tables = [] {
    std::vector<OpTable> result;
#define FRIT_OP(op, has_gradient, has_gpu) result.push_back({#op, has_gradient, has_gpu, op##_cases()});
#include "frit/ops/OPS.def"
#undef FRIT_OP
    for (OpTable& table : result)
      for (OpCase& c : table.cases) c.op = table.op;
    return result;
  }();
  return tables;
}

uint64_t CaseRandom::next() {  // SplitMix64
  uint64_t z = (state += 0x9E3779B97F4A7C15ull);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
double CaseRandom::uniform() {
  return static_cast<double>(next() >> 11) * 0x1p-53;
}
double CaseRandom::normal() {
  if (quick) {
    const uint64_t z = next();
    const uint64_t sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
    return (static_cast<double>(sum) - 2 * 65535.0) * (1.7320508075688772 / 65536);  // each has variance 2^32 / 12
  }
  const double u = std::max(uniform(), 1e-300), w = uniform();
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * w);
}

Fill fill_normal(double mean, double deviation) {
  return [=](CaseRandom& r, Array& a) {
    for (double& x : a.v) x = mean + deviation * r.normal();
  };
}
Fill fill_repeated(Fill first) {
  return [=](CaseRandom& r, Array& a) {
    Array some{{65521}, std::vector<double>(65521)};
    first(r, some);
    for (size_t i = 0, from = 0; i < a.v.size(); ++i, from = from == 65520 ? 0 : from + 1) a.v[i] = some.v[from];
  };
}
Fill fill_uniform(double low, double high) {
  return [=](CaseRandom& r, Array& a) {
    for (double& x : a.v) x = low + (high - low) * r.uniform();
  };
}
Fill fill_below(int64_t n) {
  return [=](CaseRandom& r, Array& a) {
    for (double& x : a.v) x = static_cast<double>(r.below(n));
  };
}
Fill fill_values(std::vector<double> values) {
  return [values](CaseRandom&, Array& a) {
    if (values.size() != a.v.size())
      throw std::logic_error(fmt::format("fill_values: {} values for {}", values.size(), a.shape.to_string()));
    a.v = values;
  };
}
Fill fill_offsets(std::vector<int64_t> lengths) {
  std::vector<double> values{0};
  for (int64_t l : lengths) values.push_back(values.back() + static_cast<double>(l));
  return fill_values(values);
}

Tolerance tolerance_for(DType dtype, double factor) {
  const double unit = is_16bit_float(dtype) ? 0x1p-7 : dtype == DType::kF32 ? 1e-5 : 0;
  return {unit * factor, unit * factor};
}

namespace {

constexpr size_t kGuard = 256;
constexpr unsigned char kGuardByte = 0xA5;

double read(const Tensor& t, const void* p) {
  switch (t.dtype()) {
    case DType::kF32:
      return *static_cast<const float*>(p);
    case DType::kF64:
      return *static_cast<const double*>(p);
    case DType::kBF16:
      return static_cast<float>(*static_cast<const bfloat16*>(p));
    case DType::kF16:
      return static_cast<float>(*static_cast<const float16*>(p));
    case DType::kI32:
      return *static_cast<const int32_t*>(p);
    case DType::kI64:
      return static_cast<double>(*static_cast<const int64_t*>(p));
    case DType::kU8:
      return *static_cast<const uint8_t*>(p);
  }
  return 0;
}
void write(const Tensor& t, void* p, double x) {
  switch (t.dtype()) {
    case DType::kF32:
      *static_cast<float*>(p) = static_cast<float>(x);
      break;
    case DType::kF64:
      *static_cast<double*>(p) = x;
      break;
    case DType::kBF16:
      *static_cast<bfloat16*>(p) = bfloat16(static_cast<float>(x));
      break;
    case DType::kF16:
      *static_cast<float16*>(p) = float16(static_cast<float>(x));
      break;
    case DType::kI32:
      *static_cast<int32_t*>(p) = static_cast<int32_t>(x);
      break;
    case DType::kI64:
      *static_cast<int64_t*>(p) = static_cast<int64_t>(x);
      break;
    case DType::kU8:
      *static_cast<uint8_t*>(p) = static_cast<uint8_t>(x);
      break;
  }
}

// Memory of one tensor: guarded on both sides, or a sparse mapping when rows are far apart. On a device, the elements
// are read and written in a mirror on the host.
class Storage {
 public:
  Storage(const Operand& o, DeviceMemory* device) : operand_(o), device_(device) {
    const int64_t inner = o.shape.inner(), rows = o.shape.rank() ? o.shape[0] : 1;
    stride_ = o.row_stride ? o.row_stride : inner;
    const size_t bytes = rows == 0 ? 0 : static_cast<size_t>(((rows - 1) * stride_ + inner) * size_of(o.dtype));
    sparse_ = o.row_stride > 0 && bytes > (size_t{1} << 28);
    bytes_ = bytes;
    total_ = align_up(bytes) + 2 * kGuard;
    if (sparse_) {
      mirror_ = static_cast<char*>(
          mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (mirror_ == MAP_FAILED) throw std::bad_alloc();
    } else {
      mirror_ = static_cast<char*>(std::aligned_alloc(kAlignment, align_up(total_)));
      std::memset(mirror_, kGuardByte, total_);
    }
    base_ = mirror_;
    if (device_) {
      base_ = static_cast<char*>(device_->allocate(total_));
      if (!sparse_) device_->upload(base_, mirror_, total_);
      device_->born(base_ + kGuard, bytes_, o.dtype);
    }
    const Device where = device_ ? device_->device() : Device::kCpu;
    Shape flat{rows, stride_};
    if (o.row_stride) {  // a strided view: build [rows, stride], then cut and split columns
      tensor_ = Tensor(base_ + kGuard, o.dtype, flat, where).columns(0, inner);
      if (o.shape.rank() == 3) tensor_ = tensor_.split_columns({o.shape[1], o.shape[2]});
      if (o.shape.rank() == 4) tensor_ = tensor_.split_columns({o.shape[1], o.shape[2], o.shape[3]});
    } else {
      tensor_ = Tensor(base_ + kGuard, o.dtype, o.shape, where);
    }
  }
  ~Storage() {
    if (device_) {
      device_->died(base_ + kGuard);
      device_->release(base_);
    }
    if (sparse_)
      munmap(mirror_, total_);
    else
      std::free(mirror_);
  }
  Storage(const Storage&) = delete;

  const Tensor& tensor() const { return tensor_; }
  const Operand& operand() const { return operand_; }
  void poison() {
    each_row([&](char* row, size_t bytes) {
      std::memset(row, 0xff, bytes);
      if (device_) device_->poison(base_ + (row - mirror_), bytes);
    });
  }
  // Starts as a store of the same operand that no kernel has written to yet.
  void copy(const Storage& other) {
    each_row([&](char* row, size_t bytes) {
      std::memcpy(row, other.mirror_ + (row - mirror_), bytes);
      if (device_) device_->upload(base_ + (row - mirror_), row, bytes);
    });
  }
  // Takes over the elements of a store of the same operand on a device.
  void download(const Storage& other) {
    other.fetch();
    each_row([&](char* row, size_t bytes) { std::memcpy(row, other.mirror_ + (row - mirror_), bytes); });
  }
  // Writes the values rounded to the dtype, and puts the rounded values back.
  void set(Array& a) {
    for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i) {
      write(tensor_, at(i), a.v[i]);
      a.v[i] = read(tensor_, at(i));
    }
    if (device_) each_row([&](char* row, size_t bytes) { device_->upload(base_ + (row - mirror_), row, bytes); });
  }
  // The values of `piece`, again and again.
  void repeat(const Array& piece) {
    const int64_t size = size_of(operand_.dtype), n = operand_.shape.numel();
    std::vector<char> bytes(piece.v.size() * size);
    for (size_t i = 0; i < piece.v.size(); ++i)
      write(tensor_, bytes.data() + static_cast<int64_t>(i) * size, piece.v[i]);
    const int64_t inner = stride_ == operand_.shape.inner() ? n : operand_.shape.inner(),
                  length = static_cast<int64_t>(bytes.size());
    for (int64_t i = 0; i < n;) {  // pieces of contiguous elements
      const int64_t from = i * size % length / size * size;
      const int64_t count = std::min((length - from) / size, inner - i % inner);
      std::memcpy(at(i), bytes.data() + from, count * size);
      i += count;
    }
    if (device_)
      each_row([&](char* row, size_t row_bytes) { device_->upload(base_ + (row - mirror_), row, row_bytes); });
  }
  Array get() const {
    fetch();
    Array a{operand_.shape, std::vector<double>(operand_.shape.numel())};
    for (int64_t i = 0; i < static_cast<int64_t>(a.v.size()); ++i) a.v[i] = read(tensor_, at(i));
    return a;
  }
  std::vector<char> bits() const {
    fetch();
    const int64_t size = size_of(operand_.dtype), n = operand_.shape.numel();
    std::vector<char> result(n * size);
    for (int64_t i = 0; i < n; ++i) std::memcpy(result.data() + i * size, at(i), size);
    return result;
  }
  bool guards_intact() const {
    if (sparse_) return true;
    if (device_) device_->download(mirror_, base_, total_);
    const auto intact = [&](size_t from, size_t to) {
      for (size_t i = from; i < to; ++i)
        if (static_cast<unsigned char>(mirror_[i]) != kGuardByte) return false;
      return true;
    };
    if (!intact(0, kGuard) || !intact(kGuard + bytes_, total_)) return false;
    const int64_t inner = operand_.shape.inner(), size = size_of(operand_.dtype);
    for (int64_t r = 0; stride_ > inner && r + 1 < operand_.shape[0]; ++r)  // the gaps between rows
      if (!intact(kGuard + (r * stride_ + inner) * size, kGuard + (r + 1) * stride_ * size)) return false;
    return true;
  }

 private:
  void* at(int64_t i) const {
    const int64_t inner = operand_.shape.inner();
    return mirror_ + kGuard + (i / inner * stride_ + i % inner) * size_of(operand_.dtype);
  }
  // f(first byte in the mirror, bytes) for each contiguous piece.
  template <typename F>
  void each_row(F&& f) const {
    const int64_t inner = operand_.shape.inner(), size = size_of(operand_.dtype),
                  rows = operand_.shape.rank() ? operand_.shape[0] : 1;
    if (bytes_ == 0) return;
    if (stride_ == inner) return f(mirror_ + kGuard, bytes_);
    for (int64_t r = 0; r < rows; ++r) f(mirror_ + kGuard + r * stride_ * size, static_cast<size_t>(inner * size));
  }
  void fetch() const {
    if (device_) each_row([&](char* row, size_t bytes) { device_->download(row, base_ + (row - mirror_), bytes); });
  }
  Operand operand_;
  DeviceMemory* device_;
  int64_t stride_;
  size_t bytes_, total_;
  bool sparse_;
  char *mirror_, *base_;  // the same on the CPU
  Tensor tensor_;
};
using Stores = std::map<std::string, std::unique_ptr<Storage>>;

uint64_t seed_of(const OpCase& c) {
  return dropout_site(c.op + c.name) * 0x9E3779B97F4A7C15ull;
}

const Operand& find(const std::vector<Operand>& operands, const std::string& name) {
  for (const Operand& o : operands)
    if (o.name == name) return o;
  throw std::logic_error("no operand " + name);
}
bool in_place(const OpCase& c, const std::string& name) {
  for (const Operand& o : c.inputs)
    if (o.name == name) return true;
  return false;
}
Operand gradient_operand(const OpCase& c, const std::string& input) {
  Operand o = find(c.inputs, input);
  o.name = "d" + input;
  if (auto it = c.gradient_dtype.find(input); it != c.gradient_dtype.end()) o.dtype = it->second;
  return o;
}

// Everything one run needs.
struct Run {
  const OpCase& c;
  DeviceMemory* device;
  Arrays inputs, incoming, started;  // started: what accumulating gradients begin with, of `accumulates` alone
  Stores stores;
  Tensors tensors;

  // quick: for timing alone. Then large tensors repeat a piece of random values, and the arrays that checks go back to
  // are not kept.
  Run(const OpCase& c, DeviceMemory* device, bool quick = false) : c(c), device(device) {
    CaseRandom random{seed_of(c), quick};
    const auto make = [&](const Operand& o, const Fill& fill, Arrays& kept) {
      const int64_t n = o.shape.numel();
      if (quick && n > kRepeated) {
        Array piece{{kRepeated}, std::vector<double>(kRepeated)};
        fill(random, piece);
        add(o).repeat(piece);
        return;
      }
      Array a{o.shape, std::vector<double>(n)};
      fill(random, a);
      add(o).set(a);
      if (!quick) kept[o.name] = std::move(a);
    };
    for (const Operand& o : c.inputs) make(o, o.fill, inputs);
    for (const Operand& o : c.outputs)
      if (!in_place(c, o.name)) add(o).poison();
    if (!c.backward) return;
    for (const std::string& name : c.incoming) {
      Operand o = find(c.outputs, name);
      o.name = "d" + name;
      make(o, c.incoming_fill, incoming);
    }
    for (const std::string& name : c.differentiable) {
      const Operand o = gradient_operand(c, name);
      if (!quick && accumulates(name))
        make(o, fill_normal(), started);
      else
        add(o);
      stores[o.name]->poison();
    }
  }
  // A prime, so that rows of any width differ.
  static constexpr int64_t kRepeated = 4194301;
  // The same tensors once more, for calls alone: without the arrays that checks go back to. nullptr: on the CPU.
  Run(const Run& other, DeviceMemory* device) : c(other.c), device(device) {
    for (const auto& [name, store] : other.stores) add(store->operand()).copy(*store);
  }
  Storage& add(const Operand& o) {
    auto& s = stores[o.name];
    s = std::make_unique<Storage>(o, device);
    tensors[o.name] = s->tensor();
    return *s;
  }
  void restart(bool accumulate) {
    for (auto& [name, a] : inputs) stores[name]->set(a);
    for (const Operand& o : c.outputs)
      if (!in_place(c, o.name)) stores[o.name]->poison();
    if (!c.backward) return;
    for (const std::string& input : c.differentiable)
      if (accumulate && accumulates(input))
        stores["d" + input]->set(started.at("d" + input));
      else
        stores["d" + input]->poison();
  }
  bool accumulates(const std::string& input) const {
    return std::find(c.accumulates.begin(), c.accumulates.end(), input) != c.accumulates.end();
  }
  void forward(Context& context) { c.forward(context, tensors); }
  void backward(Context& context, bool accumulate) { c.backward(context, tensors, accumulate); }
  std::map<std::string, std::vector<char>> result_bits() const {
    std::map<std::string, std::vector<char>> result;
    for (const Operand& o : c.outputs) result[o.name] = stores.at(o.name)->bits();
    if (c.backward)
      for (const std::string& input : c.differentiable) result["d" + input] = stores.at("d" + input)->bits();
    return result;
  }
};

void compare(const std::string& what, const Array& got, const Array& want, Tolerance t,
             std::vector<std::string>& failures) {
  int64_t bad = 0, first = -1;
  double worst = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(want.v.size()); ++i) {
    const double g = got.v[i], w = want.v[i];
    const bool same_infinity = std::isinf(w) && g == w;
    const double error = same_infinity ? 0 : std::abs(g - w);
    if (!(error <= t.absolute + t.relative * std::abs(w)) && !same_infinity) {
      if (first < 0) first = i;
      ++bad;
      if (!(error <= worst)) worst = error;
    }
  }
  if (bad)
    failures.push_back(
        fmt::format("{}: {} of {} elements are off, first [{}] = {:.9g}, expected {:.9g}; worst error {:.3g}", what,
                    bad, want.v.size(), first, got.v[first], want.v[first], worst));
}

int64_t scratch_peak(const std::vector<Lifetime>& lifetimes) {
  int64_t peak = 0;
  for (const Lifetime& at : lifetimes) {
    int64_t sum = 0;
    for (const Lifetime& t : lifetimes)
      if (t.birth <= at.birth && at.birth < t.death) sum += static_cast<int64_t>(align_up(t.bytes));
    peak = std::max(peak, sum);
  }
  return peak;
}

Arrays run_oracle(const OpCase& c, const Arrays& inputs) {
  Arrays out;
  for (const Operand& o : c.outputs) out[o.name] = {o.shape, std::vector<double>(o.shape.numel())};
  c.oracle(inputs, out);
  return out;
}

// The loss sum(dy * y) over all incoming outputs, by the oracle.
double oracle_loss(const OpCase& c, const Arrays& inputs, const Arrays& incoming) {
  const Arrays out = run_oracle(c, inputs);
  double sum = 0;
  for (const std::string& name : c.incoming) {
    const Array &y = out.at(name), &dy = incoming.at("d" + name);
    for (size_t i = 0; i < y.v.size(); ++i) sum += y.v[i] * dy.v[i];
  }
  return sum;
}

void check_finite_differences(const OpCase& c, Run& run, std::vector<std::string>& failures) {
  CaseRandom random{seed_of(c) + 1};
  for (const std::string& name : c.differentiable) {
    const Array got = run.stores.at("d" + name)->get();
    const DType dtype = gradient_operand(c, name).dtype;
    Tolerance t = tolerance_for(dtype, 4);
    if (auto it = c.gradient_tolerance.find(name); it != c.gradient_tolerance.end()) t = it->second;
    for (int direction = 0; direction < 3; ++direction) {
      // The first direction is random over all elements; the others move one element each.
      std::vector<double> v(got.v.size());
      if (direction == 0)
        for (double& x : v) x = random.uniform() < 0.5 ? -1 : 1;
      else if (!v.empty())
        v[random.below(static_cast<int64_t>(v.size()))] = 1;
      Arrays moved = run.inputs;
      auto loss_at = [&](double h) {
        for (size_t i = 0; i < v.size(); ++i) moved[name].v[i] = run.inputs[name].v[i] + h * v[i];
        return oracle_loss(c, moved, run.incoming);
      };
      const double h = c.finite_difference_step;
      const double want = (8 * (loss_at(h) - loss_at(-h)) - (loss_at(2 * h) - loss_at(-2 * h))) / (12 * h);
      double found = 0, allowed = 0;
      for (size_t i = 0; i < v.size(); ++i) {
        if (v[i] == 0) continue;
        found += got.v[i] * v[i];
        allowed += std::pow(t.absolute + t.relative * std::abs(got.v[i]), 2);
      }
      // Rounding errors of many elements add up like a random walk; the oracle's own loss carries about 1e-16 of its
      // size.
      allowed = 6 * std::sqrt(allowed) + 1e-6 * std::abs(want) +
                1e-15 / h * (1 + std::abs(oracle_loss(c, run.inputs, run.incoming)));
      if (!(std::abs(found - want) <= allowed))
        failures.push_back(fmt::format(
            "d{}: finite differences along {} direction give {:.9g}, backward gives {:.9g} (allowed {:.3g})", name,
            direction == 0 ? "a random" : "an element's", want, found, allowed));
    }
  }
}

}  // namespace

namespace {

// What one run of forward or backward cost.
struct Cost {
  int64_t regions = 0;  // CPU
  GpuBudget gpu;        // launches on every GPU; the rest in the simulator
};

// Measures what f() costs on the context's device.
template <typename F>
Cost cost_of(Context& context, F&& f) {
  Cost cost;
  if (!context.on_gpu()) {
    const int64_t before = context.pool().regions();
    f();
    cost.regions = context.pool().regions() - before;
    return cost;
  }
  const int64_t before = context.gpu().launches();
#if !FRIT_CUDA
  auto& simulator = static_cast<sim::SimGpu&>(context.gpu());
  simulator.reset_counts();
#endif
  f();
  context.gpu().synchronize();
#if !FRIT_CUDA
  const sim::Counts& counts = simulator.counts();
  cost.gpu.barriers = counts.barriers, cost.gpu.read_bytes = counts.read_bytes,
  cost.gpu.written_bytes = counts.written_bytes;
  cost.gpu.atomics = counts.atomics;
#endif
  cost.gpu.launches = context.gpu().launches() - before;
  return cost;
}

// Gradients by the oracle.
Arrays run_gradient_oracle(const Run& run, const Arrays& outputs) {
  Arrays in = run.inputs, gradients;
  for (auto& [name, a] : outputs)
    if (!in_place(run.c, name)) in[name] = a;
  for (auto& [name, a] : run.incoming) in[name] = a;
  for (const std::string& input : run.c.differentiable) {
    const Operand o = gradient_operand(run.c, input);
    gradients[o.name] = {o.shape, std::vector<double>(o.shape.numel())};
  }
  run.c.gradient_oracle(in, gradients);
  return gradients;
}

// Instances of the GPU's kernels that a run forces; empty: the operator chooses, and budgets hold.
struct Forced {
  std::string forward, backward;
  bool any() const { return !forward.empty() || !backward.empty(); }
};

std::vector<std::string> check(const OpCase& c, Gpu* gpu, const Forced& forced = {}) {
  std::vector<std::string> failures;
  try {
    Run run(c, gpu);
    const auto make_context = [&](ThreadPool& pool, Memory& memory) {
      auto context = std::make_unique<Context>(pool, memory, gpu);
      if (!c.variant.empty()) context->force(c.op, c.variant);
      if (!forced.forward.empty()) context->force(c.op + "_forward", forced.forward);
      if (!forced.backward.empty()) context->force(c.op + "_backward", forced.backward);
      return context;
    };
    const auto both = [&](Context& context) {
      run.forward(context);
      if (c.backward) run.backward(context, false);
      if (gpu) gpu->synchronize();
    };
#if !FRIT_CUDA
    if (gpu) static_cast<sim::SimGpu*>(gpu)->set_detailed_counts(false);  // sectors and banks: tests of their own
#endif
    ThreadPool three(gpu ? 1 : 3), one(1);
    Memory memory(gpu);
    auto context = make_context(three, memory);

    // Forward.
    const Cost forward_cost = cost_of(*context, [&] { run.forward(*context); });
    if (!c.variant.empty() && context->used(c.op) != c.variant)
      failures.push_back(fmt::format("forced {}, but {} ran", c.variant, context->used(c.op)));
    if (!forced.forward.empty() && context->used(c.op + "_forward") != forced.forward)
      failures.push_back(fmt::format("forced {}, but {} ran", forced.forward, context->used(c.op + "_forward")));
    const Arrays want = run_oracle(c, run.inputs);
    for (const Operand& o : c.outputs) {
      auto it = c.tolerance.find(o.name);
      compare(o.name, run.stores[o.name]->get(), want.at(o.name),
              it == c.tolerance.end() ? tolerance_for(o.dtype) : it->second, failures);
    }
    for (const Operand& o : c.inputs) {
      const Array now = run.stores[o.name]->get();
      bool output = false;
      for (const Operand& p : c.outputs) output |= p.name == o.name;
      if (!output && std::memcmp(now.v.data(), run.inputs[o.name].v.data(), now.v.size() * sizeof(double)) != 0)
        failures.push_back(fmt::format("input {} was changed", o.name));
    }

    // Backward.
    Cost backward_cost;
    if (c.backward) {
      backward_cost = cost_of(*context, [&] { run.backward(*context, false); });
      if (!c.variant.empty() && context->used(c.op) != c.variant)
        failures.push_back(fmt::format("forced {}, but backward ran {}", c.variant, context->used(c.op)));
      if (!forced.backward.empty() && context->used(c.op + "_backward") != forced.backward)
        failures.push_back(fmt::format("forced {}, but {} ran", forced.backward, context->used(c.op + "_backward")));
      if (c.gradient_oracle) {
        for (auto& [name, a] : run_gradient_oracle(run, want)) {
          auto it = c.gradient_tolerance.find(name.substr(1));
          compare(name, run.stores[name]->get(), a,
                  it == c.gradient_tolerance.end() ? tolerance_for(run.tensors[name].dtype(), 4) : it->second,
                  failures);
        }
      }
      if (c.finite_difference_step > 0 && (!gpu || c.where == Where::kGpu)) check_finite_differences(c, run, failures);
    }
    for (auto& [name, s] : run.stores)
      if (!s->guards_intact()) failures.push_back(fmt::format("{}: written outside of its elements", name));
    const auto bits = run.result_bits();
    const auto same_bits = [&](const char* when) {
      for (auto& [name, b] : run.result_bits())
        if (b != bits.at(name)) failures.push_back(fmt::format("{}: other bits {}", name, when));
    };

    // One thread, or once more on the GPU: the same bits.
    {
      run.restart(false);
      Memory other_memory(gpu);
      auto other = make_context(one, other_memory);
#if !FRIT_CUDA
      if (gpu) static_cast<sim::SimGpu*>(gpu)->set_order(sim::Order::kReversed);
#endif
      both(*other);
#if !FRIT_CUDA
      if (gpu) static_cast<sim::SimGpu*>(gpu)->set_order(sim::Order::kForward);
#endif
      same_bits(gpu ? "when it runs again (in the simulator: with blocks in reverse order)"
                    : "with 1 thread than with 3");
    }

    // Planning, then replay in a poisoned arena: the same bits, and scratch as budgeted.
    {
      run.restart(false);
      const auto before = run.result_bits();
      const auto record = [&](auto&& f) {
        memory.begin_recording();
        try {
          f();
        } catch (...) {
          memory.end_recording();
          throw;
        }
        return memory.end_recording();
      };
      const auto forward_lifetimes = record([&] { run.forward(*context); });
      std::vector<Lifetime> backward_lifetimes;
      if (c.backward) backward_lifetimes = record([&] { run.backward(*context, false); });
      if (run.result_bits() != before) failures.push_back("planning mode wrote to a tensor");
      memory.set_poison(true);
      const auto replay = [&](const std::vector<Lifetime>& lifetimes, auto&& f) {
        const Plan plan = plan_memory(lifetimes);
        memory.begin_replay(plan);
        try {
          f();
        } catch (...) {
          memory.end_replay();
          throw;
        }
        if (gpu) gpu->synchronize();
        memory.end_replay();
      };
      replay(forward_lifetimes, [&] { run.forward(*context); });
      if (c.backward) replay(backward_lifetimes, [&] { run.backward(*context, false); });
      same_bits("from planned memory");
      const auto equal = [&](const char* which, const char* what, int64_t used, int64_t budget) {
        if (budget >= 0 && used >= 0 && used != budget)
          failures.push_back(fmt::format("{}: {} {}, budget {}", which, used, what, budget));
      };
      const auto budget = [&](const char* which, const Budget& b, const GpuBudget& g, const Cost& cost,
                              const std::vector<Lifetime>& lifetimes) {
        const int64_t scratch = scratch_peak(lifetimes);
        if (!gpu) {
          equal(which, "parallel regions", cost.regions, b.regions);
          equal(which, "bytes of scratch", scratch, b.scratch_bytes);
          return;
        }
        if (forced.any()) return;
        equal(which, "launches", cost.gpu.launches, g.launches);
        equal(which, "barriers", cost.gpu.barriers, g.barriers);
        equal(which, "bytes read", cost.gpu.read_bytes, g.read_bytes);
        equal(which, "bytes written", cost.gpu.written_bytes, g.written_bytes);
        equal(which, "atomics", cost.gpu.atomics, g.atomics);
        equal(which, "bytes of scratch", scratch, g.scratch_bytes);
      };
      budget("forward", c.forward_budget, c.forward_gpu, forward_cost, forward_lifetimes);
      if (c.backward) budget("backward", c.backward_budget, c.backward_gpu, backward_cost, backward_lifetimes);
    }

    // Accumulation adds to what was there.
    if (c.backward && !c.accumulates.empty()) {
      Arrays plain;
      for (const std::string& name : c.accumulates) plain["d" + name] = run.stores["d" + name]->get();
      run.restart(true);
      run.forward(*context);
      run.backward(*context, true);
      for (const std::string& name : c.accumulates) {
        Array sum = plain["d" + name];
        for (size_t i = 0; i < sum.v.size(); ++i) sum.v[i] += run.started["d" + name].v[i];
        auto it = c.gradient_tolerance.find(name);
        compare("d" + name + " (accumulated)", run.stores["d" + name]->get(), sum,
                it == c.gradient_tolerance.end() ? tolerance_for(run.tensors["d" + name].dtype(), 4) : it->second,
                failures);
      }
    }
  } catch (const std::exception& e) {
    failures.push_back(fmt::format("threw: {}", e.what()));
  }
  return failures;
}

}  // namespace

std::vector<std::string> check_case(const OpCase& c) {
  return check(c, nullptr);
}
std::vector<std::string> check_case(const OpCase& c, Gpu& gpu) {
  std::vector<std::string> failures = check(c, &gpu);
  const auto force = [&](const char* direction, const std::string& name, const Forced& forced) {
    for (const std::string& failure : check(c, &gpu, forced))
      failures.push_back(fmt::format("{} instance {}: {}", direction, name, failure));
  };
  for (const std::string& name : c.forward_instances) force("forward", name, {name, ""});
  for (const std::string& name : c.backward_instances) force("backward", name, {"", name});
  return failures;
}

std::vector<CaseError> case_errors(const OpCase& c, const OnGpu& on_gpu) {
  Run run(c, nullptr);
  on_gpu([&](Gpu& gpu) {
    Run there(run, &gpu);
    ThreadPool pool(1);
    Memory memory(&gpu);
    Context context(pool, memory, &gpu);
    context.force(c.op, c.variant);
    there.forward(context);
    if (c.backward) there.backward(context, false);
    gpu.synchronize();
    for (const Operand& o : c.outputs) run.stores.at(o.name)->download(*there.stores.at(o.name));
    if (c.backward)
      for (const std::string& input : c.differentiable)
        run.stores.at("d" + input)->download(*there.stores.at("d" + input));
  });
  std::vector<CaseError> errors;
  const auto measure = [&](const std::string& name, const Array& want) {
    const Array got = run.stores.at(name)->get();
    double square = 0, size = 0, worst = 0;
    for (size_t i = 0; i < want.v.size(); ++i) {
      const double error = std::abs(got.v[i] - want.v[i]);
      square += error * error, size += want.v[i] * want.v[i], worst = std::max(worst, error);
    }
    errors.push_back(
        {name, run.tensors.at(name).dtype(), size > 0 ? std::sqrt(square / size) : std::sqrt(square), worst});
  };
  const Arrays want = run_oracle(c, run.inputs);
  for (const Operand& o : c.outputs) measure(o.name, want.at(o.name));
  if (c.backward && c.gradient_oracle)
    for (auto& [name, a] : run_gradient_oracle(run, want)) measure(name, a);
  return errors;
}

struct CaseRun::State {
  Context& context;
  std::vector<std::unique_ptr<Run>> runs;
  size_t next_forward = 0, next_backward = 0;
};
CaseRun::CaseRun(const OpCase& c, Context& context, int sets) : state_(new State{context, {}, 0, 0}) {
  context.force(c.op, c.variant);
  state_->runs.push_back(std::make_unique<Run>(c, context.on_gpu() ? &context.gpu() : nullptr, true));
  while (static_cast<int>(state_->runs.size()) < sets)
    state_->runs.push_back(std::make_unique<Run>(*state_->runs.front(), state_->runs.front()->device));
  for (auto& run : state_->runs) run->forward(context);
}
CaseRun::~CaseRun() {
  delete state_;
}
int CaseRun::sets() const {
  return static_cast<int>(state_->runs.size());
}
void CaseRun::forward() {
  state_->runs[state_->next_forward++ % state_->runs.size()]->forward(state_->context);
}
void CaseRun::backward() {
  state_->runs[state_->next_backward++ % state_->runs.size()]->backward(state_->context, false);
}

}  // namespace frit
