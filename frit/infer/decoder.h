// The model as decoding runs it: an encoder pass over whole sentences, then decoder steps of one position with cached
// keys and values.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "frit/backend/context.h"
#include "frit/memory/block.h"
#include "frit/models/transformer/transformer.h"
#include "frit/ops/gemm/gemm.h"

namespace frit {

// fp32 scratch that only grows and keeps its memory; contents are lost when it grows.
class Scratch {
 public:
  float* reserve(int64_t floats);
  float* data() const { return reinterpret_cast<float*>(block_.get()); }

 private:
  Block block_;
  int64_t floats_ = 0;
};

// One hypothesis in a decoder step.
struct DecoderRow {
  int64_t sentence = 0;  // of this batch
  int64_t slot = 0;      // which of the sentence's `width` places in the cache this position's keys and values take
  int32_t token = 0;     // what the decoder reads
  // [position + 1] places: where the keys and values of this hypothesis' positions lie; the step writes the last.
  // Copying these pointers is all it takes to let a hypothesis go on from another one's past.
  const float** history = nullptr;
};

// Every row's bits depend on that row alone: products are row-independent, the rest runs row by row.
class StepDecoder {
 public:
  StepDecoder(ThreadPool& pool, const Transformer& model);
  // Packs the model's parameters as they are now.
  void refresh();

  // Encodes the sentences and forgets the last batch. width: hypotheses of a sentence at most.
  void begin(std::span<const std::span<const int32_t>> sources, int64_t width);
  // One position of all rows; returns the decoder's output [rows, H], valid until the next step.
  Tensor step(std::span<const DecoderRow> rows, int64_t position);
  // Logits of rows of a step's output, bias added. Shapes: hidden [rows, H]; logits [rows, V].
  void logits(const Tensor& hidden, const Tensor& logits);

  Context& context() { return context_; }
  int64_t width() const { return H_; }
  int64_t vocabulary() const { return V_; }

 private:
  struct Product {
    PackedWeight weight;
    Tensor bias;
  };
  struct Norm {
    const float *gamma = nullptr, *beta = nullptr;
  };
  struct EncoderWeights {
    Norm attention_norm, feed_norm;
    Product qkv, out, in, down;
  };
  struct DecoderWeights {
    Norm attention_norm, cross_norm, feed_norm;
    Product qkv, out, q, cross_out, in, down;
  };
  // The residual stream of some rows: x (pre-LN alone) and the norm's output n.
  struct Stream {
    float *x, *n;
    int64_t rows;
  };
  Tensor as_f32(const Tensor& tensor);
  Product pack(const Linear& linear);
  Norm norm(const LayerNorm& norm);
  void embed(const Embedding& embedding, float* out, int64_t row, int32_t token, int64_t position) const;
  void add_norm(const Stream& stream, const float* y, const Norm& norm);
  void feed_forward(const Stream& stream, const Product& in, const Product& down, float* wide, float* y);
  void product(const Product& p, const float* x, int64_t rows, float* y);
  void encode(std::span<const std::span<const int32_t>> sources, int64_t first, int64_t last);
  void store_cross(const float* keys_values, int64_t first, int64_t last);
  float* cache_slot(int64_t sentence, int64_t slot, int64_t position);
  float* worker_scores(int worker, int64_t count);

  const Transformer& model_;
  Memory memory_;  // of operators' scratch
  Context context_;
  int64_t H_ = 0, V_ = 0;
  bool pre_norm_ = false;
  std::vector<EncoderWeights> encoder_;
  std::vector<DecoderWeights> decoder_;
  Norm encoder_norm_, decoder_norm_;
  Product cross_, output_;
  std::vector<std::unique_ptr<float[]>> converted_;  // vectors of a bf16 model

  // This batch.
  int64_t sentences_ = 0, beams_ = 1;
  std::vector<int64_t> offsets_;        // of sentences in the source tokens
  std::vector<int32_t> group_offsets_;  // of the sentences of one encoder group
  Scratch rows_, group_, cross_cache_, scores_;
  int64_t scores_step_ = 0;
  std::vector<Scratch> chunks_;  // of kChunk positions
};

}  // namespace frit
