#include "frit/memory/workspace.h"

#include <cstring>

#include "frit/core/nearest.h"
#include "frit/memory/memory.h"

namespace frit {
namespace {

constexpr int64_t kSliceAlignment = kAlignment / sizeof(float);
constexpr int64_t align_slice(int64_t n) {
  return (n + kSliceAlignment - 1) / kSliceAlignment * kSliceAlignment;
}

constexpr Precision kPrecisions[] = {Precision::kF32,          Precision::kBF16Master, Precision::kBF16Stochastic,
                                     Precision::kBF16Residual, Precision::kF16Master,  Precision::kF16Stochastic};

template <typename Map>
[[noreturn]] void fail_unknown(const char* what, std::string_view name, const Map& known) {
  std::vector<std::string_view> names;
  for (const auto& [key, index] : known) names.push_back(key);
  if (names.empty()) fail_argument("[workspace] no {} {}: there are none", what, name);
  fail_argument("[workspace] no {} {}; the nearest name is {}", what, name, nearest_name(name, names));
}

}  // namespace

const char* name_of(Precision precision) {
  switch (precision) {
    case Precision::kF32:
      return "fp32";
    case Precision::kBF16Master:
      return "bf16-master";
    case Precision::kBF16Stochastic:
      return "bf16-stochastic";
    case Precision::kBF16Residual:
      return "bf16-residual";
    case Precision::kF16Master:
      return "fp16-master";
    case Precision::kF16Stochastic:
      return "fp16-stochastic";
  }
  return "?";
}

Precision parse_precision(std::string_view name) {
  for (Precision p : kPrecisions)
    if (name == name_of(p)) return p;
  fail(
      "[precision] unknown name {}, expected fp32, bf16-master, bf16-stochastic, bf16-residual, fp16-master or "
      "fp16-stochastic",
      name);
}

void ParameterLayout::add(std::string name, Shape shape) {
  add_entry({"", {{std::move(name), shape}}});
}

void ParameterLayout::add_group(std::string group, std::vector<std::pair<std::string, Shape>> members) {
  FRIT_CHECK(!group.empty(), "[workspace] a group needs a name");
  FRIT_CHECK(!members.empty(), "[workspace] group {} has no members", group);
  FRIT_CHECK(group_index_.find(group) == group_index_.end(), "[workspace] group {} is already there", group);
  const Shape& first = members[0].second;
  for (const auto& [name, shape] : members) {
    bool same = shape.rank() >= 1 && shape.rank() == first.rank();
    for (int i = 1; same && i < shape.rank(); ++i) same = shape[i] == first[i];
    FRIT_CHECK(same, "[workspace] group {}: {} is {}, which does not join {} {} along dimension 0", group, name,
               shape.to_string(), members[0].first, first.to_string());
  }
  add_entry({group, std::move(members)});
  group_index_.emplace(std::move(group), -1);
}

void ParameterLayout::add_entry(Entry entry) {
  FRIT_CHECK(!finished_, "[workspace] {} comes too late: the layout is finished", entry.members[0].first);
  for (size_t i = 0; i < entry.members.size(); ++i) {
    const auto& [name, shape] = entry.members[i];
    FRIT_CHECK(!name.empty(), "[workspace] a parameter needs a name");
    FRIT_CHECK(shape.numel() > 0, "[workspace] parameter {} is {}: it has no elements", name, shape.to_string());
    bool fresh = !has(name);
    for (size_t j = 0; fresh && j < i; ++j) fresh = entry.members[j].first != name;
    FRIT_CHECK(fresh, "[workspace] parameter {} is already there", name);
  }
  for (const auto& [name, shape] : entry.members) index_.emplace(name, -1);
  entries_.push_back(std::move(entry));
}

void ParameterLayout::finish() {
  if (finished_) return;
  finished_ = true;
  int64_t at = 0;
  for (const bool matrices : {true, false}) {
    for (const Entry& entry : entries_) {
      if ((entry.members[0].second.rank() >= 2) != matrices) continue;
      Slice group{entry.group, entry.members[0].second, at};
      if (!entry.group.empty()) group.shape[0] = 0;
      for (const auto& [name, shape] : entry.members) {
        index_.find(name)->second = static_cast<int64_t>(slices_.size());
        slices_.push_back({name, shape, at});
        at += shape.numel();
        parameters_ += shape.numel();
        if (!entry.group.empty()) group.shape[0] += shape[0];
      }
      at = align_slice(at);
      if (entry.group.empty()) continue;
      group_index_.find(entry.group)->second = static_cast<int64_t>(groups_.size());
      groups_.push_back(std::move(group));
    }
    if (matrices) decay_end_ = at;
  }
  elements_ = at;
  entries_.clear();
}

const ParameterLayout::Slice& ParameterLayout::slice(std::string_view name) const {
  FRIT_CHECK(finished_, "[workspace] {} has no place yet: finish() the layout first", name);
  const auto it = index_.find(name);
  if (it == index_.end()) fail_unknown("parameter", name, index_);
  return slices_[it->second];
}

const ParameterLayout::Slice& ParameterLayout::group(std::string_view name) const {
  FRIT_CHECK(finished_, "[workspace] {} has no place yet: finish() the layout first", name);
  const auto it = group_index_.find(name);
  if (it == group_index_.end()) fail_unknown("group", name, group_index_);
  return groups_[it->second];
}

Workspace::Workspace(ParameterLayout layout, Precision precision, bool training, int moments, DType gradient_dtype,
                     bool clear, DeviceMemory* device)
    : layout_(std::move(layout)), precision_(precision), training_(training), device_(device) {
  FRIT_CHECK(0 <= moments && moments <= 2, "[workspace] {} moments asked for, expected 0, 1 or 2", moments);
  FRIT_CHECK(gradient_dtype == DType::kF32 || gradient_dtype == compute_dtype(precision),
             "[workspace] gradients in {} asked for, expected f32 or {}", name_of(gradient_dtype),
             name_of(compute_dtype(precision)));
  layout_.finish();
  const Device where = device ? device->device() : Device::kCpu;
  const auto block = [&](DType dtype) {
    const auto bytes = static_cast<size_t>(layout_.elements() * size_of(dtype));
    owned_.push_back(allocate_block(bytes, clear ? device : nullptr));
    char* data = owned_.back().get();
    if (clear && device) {
      device->born(data, bytes, dtype);
      device->fill(data, 0, bytes);
    } else if (clear) {
      std::memset(data, 0, bytes);
    }
    bytes_ += static_cast<int64_t>(bytes);
    return Tensor(data, dtype, Shape{layout_.elements()}, where);
  };
  parameters_ = block(compute_dtype(precision));
  if (!training) return;
  gradients_ = block(gradient_dtype);
  if (moments >= 1) moment1_ = block(DType::kF32);
  if (moments >= 2) moment2_ = block(DType::kF32);
  if (keeps_master(precision)) master_ = block(DType::kF32);
  if (precision == Precision::kBF16Residual) residual_ = block(DType::kBF16);
}

Workspace::~Workspace() {
  if (device_)
    for (const Block& block : owned_) device_->died(block.get());
}

void Workspace::read_slice(const Tensor& block, int64_t offset, int64_t count, void* values) const {
  const int64_t size = size_of(block.dtype());
  const char* from = static_cast<const char*>(block.raw()) + offset * size;
  if (device_)
    device_->download(values, from, static_cast<size_t>(count * size));
  else
    std::memcpy(values, from, static_cast<size_t>(count * size));
}
void Workspace::write_slice(const Tensor& block, int64_t offset, int64_t count, const void* values) const {
  const int64_t size = size_of(block.dtype());
  char* to = static_cast<char*>(block.raw()) + offset * size;
  if (device_)
    device_->upload(to, values, static_cast<size_t>(count * size));
  else
    std::memcpy(to, values, static_cast<size_t>(count * size));
}
void Workspace::read(const Tensor& block, void* bytes) const {
  read_slice(block, 0, block.numel(), bytes);
}
void Workspace::write(const Tensor& block, const void* bytes) const {
  write_slice(block, 0, block.numel(), bytes);
}

Tensor Workspace::view(const Tensor& block, const ParameterLayout::Slice& slice) const {
  FRIT_CHECK(block.defined(), "[workspace] {} has no gradient: the workspace was made without training", slice.name);
  return Tensor(static_cast<char*>(block.raw()) + slice.offset * size_of(block.dtype()), block.dtype(), slice.shape,
                block.device());
}

Tensor Workspace::parameter(std::string_view name) const {
  return view(parameters_, layout_.slice(name));
}
Tensor Workspace::gradient(std::string_view name) const {
  return view(gradients_, layout_.slice(name));
}
Tensor Workspace::group_parameter(std::string_view group) const {
  return view(parameters_, layout_.group(group));
}
Tensor Workspace::group_gradient(std::string_view group) const {
  return view(gradients_, layout_.group(group));
}

void Workspace::set(std::string_view name, const float* values, int64_t count) {
  const ParameterLayout::Slice& slice = layout_.slice(name);
  FRIT_CHECK(count == slice.shape.numel(), "[workspace] {} values given for {} {}", count, name,
             slice.shape.to_string());
  if (precision_ == Precision::kF32) return write_slice(parameters_, slice.offset, count, values);
  if (master_.defined()) write_slice(master_, slice.offset, count, values);
  const auto n = static_cast<size_t>(count);
  std::vector<uint16_t> stored(n);
  if (parameters_.dtype() == DType::kF16) {
    for (size_t i = 0; i < n; ++i) stored[i] = float16(values[i]).bits;
  } else if (precision_ == Precision::kBF16Residual) {
    std::vector<uint16_t> low(n);
    for (size_t i = 0; i < n; ++i) {
      const SplitFloat split = split_float(values[i]);
      stored[i] = split.high, low[i] = split.low;
    }
    if (training_) write_slice(residual_, slice.offset, count, low.data());
  } else {
    for (size_t i = 0; i < n; ++i) stored[i] = bfloat16(values[i]).bits;
  }
  write_slice(parameters_, slice.offset, count, stored.data());
}

void Workspace::get(std::string_view name, float* values, int64_t count) const {
  const ParameterLayout::Slice& slice = layout_.slice(name);
  FRIT_CHECK(count == slice.shape.numel(), "[workspace] room for {} values given for {} {}", count, name,
             slice.shape.to_string());
  const Tensor& exact = precision_ == Precision::kF32 ? parameters_ : master_;
  if (exact.defined()) return read_slice(exact, slice.offset, count, values);
  const auto n = static_cast<size_t>(count);
  std::vector<uint16_t> stored(n);
  read_slice(parameters_, slice.offset, count, stored.data());
  if (parameters_.dtype() == DType::kF16) {
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(float16::from_bits(stored[i]));
  } else if (residual_.defined()) {
    std::vector<uint16_t> low(n);
    read_slice(residual_, slice.offset, count, low.data());
    for (size_t i = 0; i < n; ++i) values[i] = join_float({stored[i], low[i]});
  } else {
    for (size_t i = 0; i < n; ++i) values[i] = static_cast<float>(bfloat16::from_bits(stored[i]));
  }
}

}  // namespace frit
