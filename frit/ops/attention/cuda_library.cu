// Attention by the GPU's library: what it wants to know of the packed sequences is worked out on the device.
#include <algorithm>

#include "frit/ops/attention/short-inl.h"

namespace frit {
namespace {

using namespace attention_short;

constexpr int kThreads = 128;

// A thread takes one sequence, or one past the last: those are empty, and begin where the last one ends.
FRIT_KERNEL(kThreads, 4)
attention_library_tables_kernel(Global<const int32_t> q_offsets, Global<const int32_t> k_offsets, Geometry geometry,
                                AttentionTables tables, int64_t seed, Global<int32_t> lengths, Global<int64_t> begins) {
  wait_for_previous();
  const int s = static_cast<int>(block_index()) * thread_count() + thread_index(), rows = tables.sequences;
  if (s > rows) return;
  Sequence at = {};
  if (s < geometry.sequences) {
    at = sequence_at(q_offsets, k_offsets, geometry, s);
  } else {
    at.q_first = offset_at(q_offsets, geometry.sequences, geometry.q_tokens);
    at.k_first = offset_at(k_offsets, geometry.sequences, geometry.k_tokens);
  }
  FRIT_UNROLL
  for (int i = 0; i < AttentionTables::kMost; ++i)
    if (i < tables.count)
      store(begins, int64_t{i} * (rows + 1) + s, (tables.keys >> i & 1 ? at.k_first : at.q_first) * tables.strides[i]);
  if (s < rows) {
    store(lengths, s, at.lq);
    store(lengths, rows + s, at.lk);
  } else {
    const int64_t random = int64_t{tables.count} * (rows + 1);
    store(begins, random, seed);
    store(begins, random + 1, int64_t{0});
  }
}

// A number for each dropout site, step and seed: cuDNN's generator takes it for a key.
int64_t seed_of(const Dropout& dropout) {
  const PhiloxBlock block = philox(dropout.key, dropout.site, dropout.stream, 0x6375646eu /* "cudn" */, 0);
  return static_cast<int64_t>((uint64_t{block.v[0]} << 32 | block.v[1]) >> 1);
}

// A call's shape. out has rows of N * D without a gap while it is not known.
GpuAttention library_call(const AttentionArgs& args) {
  const int64_t sequences = args.q_offsets.dim(0) - 1, heads = args.q.dim(1), width = args.q.dim(2);
  GpuAttention a;
  a.dtype = args.q.dtype();
  a.sequences = attention_rounded(sequences, kAttentionSequenceStep), a.heads = heads, a.width = width;
  const auto rounded = [](int64_t longest) {
    return attention_rounded(std::max<int64_t>(longest, 1), kAttentionLengthStep);
  };
  a.longest_q = rounded(attention_longest(args.max_q, args.q));
  a.longest_k = rounded(attention_longest(args.max_k, args.k));
  a.causal = args.causal, a.scale = args.scale, a.p_drop = args.dropout.active() ? args.dropout.p_drop : 0.0f;
  a.q.stride = a.dq.stride = args.q.row_stride();
  a.k.stride = a.dk.stride = args.k.row_stride();
  a.v.stride = a.dv.stride = args.v.row_stride();
  a.out.stride = a.dout.stride = heads * width;
  a.lse.stride = heads;
  return a;
}

// Sets an operand, and asks for a table of where its sequences begin.
class Call {
 public:
  Call(Context& context, const AttentionArgs& args) : attention_(library_call(args)), context_(context), args_(args) {
    tables_.sequences = static_cast<int>(attention_.sequences);
  }
  void add(GpuAttention::Packed GpuAttention::*operand, const Tensor& t, bool of_keys) {
    FRIT_CHECK(reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0 && t.row_stride() * size_of(t.dtype()) % 16 == 0,
               "[attention] cudnn: {} with rows {} elements apart at {}, expected whole 16 bytes", t.to_string(),
               t.row_stride(), t.raw());
    add_any(operand, t, of_keys);
  }
  void add_lse(const Tensor& lse) { add_any(&GpuAttention::lse, lse, false); }

  void run(bool backward) {
    const int64_t rows = tables_.sequences, table = rows + 1;
    Buffer lengths = context_.allocate({2 * rows}, DType::kI32, "attention.lengths"),
           begins = context_.allocate({tables_.count * table + 2}, DType::kI64, "attention.begins");
    const auto bytes = static_cast<int64_t>(context_.gpu().attention_scratch(attention_, backward));
    Buffer scratch = context_.allocate({bytes}, DType::kU8, "attention.cudnn");
    attention_tables_gpu(context_, args_, tables_, seed_of(args_.dropout), lengths, begins);
    if (context_.planning()) return;
    const auto* first = begins->data<int64_t>();
    for (int i = 0; i < tables_.count; ++i) (attention_.*(operands_[i])).begins = first + i * table;
    attention_.random = first + tables_.count * table;
    attention_.q_lengths = lengths->data<int32_t>(), attention_.k_lengths = attention_.q_lengths + rows;
    context_.gpu().attention(attention_, backward, scratch->raw());
  }

 private:
  void add_any(GpuAttention::Packed GpuAttention::*operand, const Tensor& t, bool of_keys) {
    operands_[tables_.count] = operand;
    tables_.strides[tables_.count] = t.row_stride();
    if (of_keys) tables_.keys |= 1u << tables_.count;
    ++tables_.count;
    attention_.*operand = {t.raw(), t.row_stride(), nullptr};
  }
  GpuAttention attention_;
  AttentionTables tables_;
  GpuAttention::Packed GpuAttention::*operands_[AttentionTables::kMost] = {};
  Context& context_;
  const AttentionArgs& args_;
};

}  // namespace

void attention_tables_gpu(Context& context, const AttentionArgs& args, const AttentionTables& tables, int64_t seed,
                          const Tensor& lengths, const Tensor& begins) {
  launch(context, "attention_library_tables_kernel", attention_library_tables_kernel,
         {tables.sequences / kThreads + 1, kThreads, 0}, global<const int32_t>(args.q_offsets),
         global<const int32_t>(args.k_offsets), geometry_of(args), tables, seed, global<int32_t>(lengths),
         global<int64_t>(begins));
}

std::string attention_library_refuses(const Context& context, const AttentionArgs& args) {
  return context.gpu().attention_refuses(library_call(args));
}

void attention_library_forward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse) {
  if (out.numel() == 0) return;
  if (args.q_offsets.dim(0) > 1) {
    Call call(context, args);
    call.add(&GpuAttention::q, args.q, false);
    call.add(&GpuAttention::k, args.k, true);
    call.add(&GpuAttention::v, args.v, true);
    call.add(&GpuAttention::out, out, false);
    call.add_lse(lse);
    call.run(false);
  }
  attention_zero_tail_gpu(context, args, out, {}, {}, lse);
}

void attention_library_backward_gpu(Context& context, const AttentionArgs& args, const Tensor& out, const Tensor& lse,
                                    const Tensor& dout, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  if (dq.numel() == 0 && dk.numel() == 0) return;
  if (args.q_offsets.dim(0) > 1) {
    Call call(context, args);
    call.add(&GpuAttention::q, args.q, false);
    call.add(&GpuAttention::k, args.k, true);
    call.add(&GpuAttention::v, args.v, true);
    call.add(&GpuAttention::out, out, false);
    call.add_lse(lse);
    call.add(&GpuAttention::dout, dout, false);
    call.add(&GpuAttention::dq, dq, false);
    call.add(&GpuAttention::dk, dk, true);
    call.add(&GpuAttention::dv, dv, true);
    call.run(true);
  }
  attention_zero_tail_gpu(context, args, dq, dk, dv, {});
}

}  // namespace frit
