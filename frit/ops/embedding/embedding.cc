#include "frit/ops/embedding/embedding.h"

#include "frit/ops/embedding/cpu.h"
#include "frit/ops/embedding/gpu.h"

namespace frit {
namespace {

// `table` and `positions` may be null tensors in backward; V and P then come from the gradients.
void check(Context& context, const EmbeddingArgs& args, int64_t vocabulary, int64_t places) {
  FRIT_CHECK(args.ids.rank() == 1 && args.ids.dtype() == DType::kI32 && args.ids.contiguous(),
             "[embedding] ids are {}, expected i32[tokens]", args.ids.to_string());
  const int64_t tokens = args.ids.dim(0);
  const bool given = args.position_ids.defined();
  if (given) {
    FRIT_CHECK(args.position_ids.shape() == args.ids.shape() && args.position_ids.dtype() == DType::kI32 &&
                   args.position_ids.contiguous(),
               "[embedding] position_ids are {}, expected i32[{}]", args.position_ids.to_string(), tokens);
  } else if (places >= 0) {
    FRIT_CHECK(args.offsets.rank() == 1 && args.offsets.dim(0) >= 1 && args.offsets.dtype() == DType::kI32 &&
                   args.offsets.contiguous(),
               "[embedding] offsets are {}, expected i32[sequences + 1]", args.offsets.to_string());
    FRIT_CHECK(args.position_offset >= 0, "[embedding] position_offset is {}, expected 0 or more",
               args.position_offset);
  }
  if (context.planning() || context.on_gpu()) return;  // the kernels take what is out of range for nothing
  const int32_t* ids = args.ids.data<int32_t>();
  for (int64_t t = 0; t < tokens; ++t)
    FRIT_CHECK(ids[t] >= 0 && ids[t] < vocabulary, "[embedding] id {} of token {} is not in 0..{}", ids[t], t,
               vocabulary - 1);
  if (places < 0) return;
  if (given) {
    const int32_t* positions = args.position_ids.data<int32_t>();
    for (int64_t t = 0; t < tokens; ++t)
      FRIT_CHECK(positions[t] >= 0 && positions[t] < places, "[embedding] position {} of token {} is not in 0..{}",
                 positions[t], t, places - 1);
    return;
  }
  const int32_t* offsets = args.offsets.data<int32_t>();
  const int64_t sequences = args.offsets.dim(0) - 1;
  FRIT_CHECK(offsets[0] == 0 && offsets[sequences] == tokens, "[embedding] offsets go from {} to {}, expected 0 to {}",
             offsets[0], offsets[sequences], tokens);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = static_cast<int64_t>(offsets[s + 1]) - offsets[s];
    FRIT_CHECK(length >= 0, "[embedding] offset {} is {}, below the one before it, {}", s + 1, offsets[s + 1],
               offsets[s]);
    FRIT_CHECK(length == 0 || args.position_offset + length <= places,
               "[embedding] sequence {} has positions up to {}, there are {}", s, args.position_offset + length - 1,
               places);
  }
}

void check_matrix(Context& context, const char* name, const Tensor& t, const char* shape) {
  FRIT_CHECK(t.rank() == 2 && (t.dtype() == DType::kF32 || is_16bit_float(t.dtype())),
             "[embedding] {} is {}, expected {}, f32, bf16 or f16", name, t.to_string(), shape);
  FRIT_CHECK(context.on_gpu() || t.dtype() != DType::kF16, "[embedding] f16 needs a GPU");
}

}  // namespace

void embedding_forward(Context& context, const EmbeddingArgs& args, const Tensor& y) {
  check_matrix(context, "table", args.table, "[V, H]");
  const int64_t width = args.table.dim(1);
  if (args.positions.defined()) {
    FRIT_CHECK(
        args.positions.rank() == 2 && args.positions.dim(1) == width && args.positions.dtype() == args.table.dtype(),
        "[embedding] positions are {}, table is {}", args.positions.to_string(), args.table.to_string());
  }
  check(context, args, args.table.dim(0), args.positions.defined() ? args.positions.dim(0) : -1);
  FRIT_CHECK(y.shape() == (Shape{args.ids.dim(0), width}) && y.dtype() == args.table.dtype(),
             "[embedding] y is {}, expected {}[{}, {}]", y.to_string(), name_of(args.table.dtype()), args.ids.dim(0),
             width);
  if (context.on_gpu()) return embedding_forward_gpu(context, args, y);
  embedding_forward_cpu(context, args, y);
}

void embedding_backward(Context& context, const EmbeddingArgs& args, const Tensor& dy, int64_t pad_id, bool accumulate,
                        const Tensor& dtable, const Tensor& dpositions) {
  check_matrix(context, "dy", dy, "[tokens, H]");
  const int64_t width = dy.dim(1);
  FRIT_CHECK(
      dtable.rank() == 2 && dtable.dim(1) == width && (dtable.dtype() == DType::kF32 || dtable.dtype() == dy.dtype()),
      "[embedding] dtable is {}, expected [V, {}], f32 or {}", dtable.to_string(), width, name_of(dy.dtype()));
  if (dpositions.defined()) {
    FRIT_CHECK(dpositions.rank() == 2 && dpositions.dim(1) == width &&
                   (dpositions.dtype() == DType::kF32 || dpositions.dtype() == dy.dtype()),
               "[embedding] dpositions are {}, expected [P, {}], f32 or {}", dpositions.to_string(), width,
               name_of(dy.dtype()));
  }
  check(context, args, dtable.dim(0), dpositions.defined() ? dpositions.dim(0) : -1);
  FRIT_CHECK(args.ids.dim(0) == dy.dim(0), "[embedding] ids are {}, dy is {}", args.ids.to_string(), dy.to_string());
  if (context.on_gpu()) return embedding_backward_gpu(context, args, dy, pad_id, accumulate, dtable, dpositions);
  embedding_backward_cpu(context, args, dy, pad_id, accumulate, dtable, dpositions);
}

}  // namespace frit
