#include "frit/layers/embedding.h"

#include "frit/ops/embedding/embedding.h"

namespace frit {
namespace {

EmbeddingArgs embedding_args(Context& context, const LayerOptions& o, const Embedding& w, float scale,
                             const Tensor& ids, const Tensor& offsets) {
  EmbeddingArgs args;
  args.ids = ids, args.offsets = offsets;
  args.table = w.table, args.positions = w.positions;
  args.scale = scale;
  args.dropout = context.dropout(o.p_hidden, w.place.output);
  return args;
}

}  // namespace

Buffer embed_forward(Context& context, const LayerOptions& o, const Embedding& w, float scale, const Tensor& ids,
                     const Tensor& offsets) {
  Buffer y = allocate(context, w.place, {ids.dim(0), w.table.dim(1)}, w.table.dtype(), "y");
  embedding_forward(context, embedding_args(context, o, w, scale, ids, offsets), y);
  return y;
}

void embed_backward(Context& context, const LayerOptions& o, const Embedding& w, float scale, const Tensor& ids,
                    const Tensor& offsets, Buffer dy, int64_t pad_id, bool accumulate_table, bool accumulate_positions,
                    const Embedding& dw) {
  // The operator has one `accumulate` for both: whichever is to be overwritten while the other is added to starts at
  // zero.
  const bool accumulate = accumulate_table || (dw.positions.defined() && accumulate_positions);
  if (accumulate && !accumulate_table) fill_zero(context, dw.table);
  if (accumulate && !accumulate_positions && dw.positions.defined()) fill_zero(context, dw.positions);
  embedding_backward(context, embedding_args(context, o, w, scale, ids, offsets), dy, pad_id, accumulate, dw.table,
                     dw.positions);
}

}  // namespace frit
