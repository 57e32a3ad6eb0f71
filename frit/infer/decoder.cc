#include "frit/infer/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "frit/infer/kernels.h"
#include "frit/ops/attention/attention.h"
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {
namespace {

// Positions by which the cache of keys and values grows.
constexpr int64_t kChunk = 16;
// Source tokens that the encoder takes at once (whole sentences): its activations stay in the third-level cache.
constexpr int64_t kEncoderTokens = 1024;
// Row-wise work below this many numbers is not worth waking other threads.
constexpr int64_t kSerialNumbers = 8192;

Tensor view(const float* data, int64_t rows, int64_t cols) {
  return Tensor(const_cast<float*>(data), DType::kF32, {rows, cols});
}

}  // namespace

float* Scratch::reserve(int64_t floats) {
  if (floats > floats_ || !block_) {
    block_.reset();  // before the larger one is asked for
    block_ = allocate_block(static_cast<size_t>(floats) * sizeof(float));
    floats_ = floats;
  }
  return data();
}

StepDecoder::StepDecoder(ThreadPool& pool, const Transformer& model) : model_(model), context_(pool, memory_) {
  H_ = model.config().d_model, V_ = model.config().target_vocab;
  pre_norm_ = model.config().pre_norm;
  encoder_.resize(model.weights().encoder.size());
  decoder_.resize(model.weights().decoder.size());
  refresh();
}

Tensor StepDecoder::as_f32(const Tensor& t) {
  if (!t.defined() || t.dtype() == DType::kF32) return t;
  converted_.push_back(std::make_unique<float[]>(static_cast<size_t>(t.numel())));
  float* to = converted_.back().get();
  for (int64_t i = 0; i < t.numel(); ++i) to[i] = static_cast<float>(t.data<bfloat16>()[i]);
  return Tensor(to, DType::kF32, t.shape());
}

StepDecoder::Product StepDecoder::pack(const Linear& linear) {
  return {PackedWeight(context_, linear.weight), as_f32(linear.bias)};
}

StepDecoder::Norm StepDecoder::norm(const LayerNorm& norm) {
  if (!norm.gamma.defined()) return {};
  return {as_f32(norm.gamma).data<float>(), as_f32(norm.beta).data<float>()};
}

void StepDecoder::refresh() {
  const TransformerWeights& w = model_.weights();
  converted_.clear();
  for (size_t l = 0; l < encoder_.size(); ++l) {
    const EncoderLayer& from = w.encoder[l];
    EncoderWeights& to = encoder_[l];
    to.attention_norm = norm(from.attention.norm), to.feed_norm = norm(from.feed_forward.norm);
    to.qkv = pack(from.attention.qkv), to.out = pack(from.attention.out);
    to.in = pack(from.feed_forward.in), to.down = pack(from.feed_forward.out);
  }
  for (size_t l = 0; l < decoder_.size(); ++l) {
    const DecoderLayer& from = w.decoder[l];
    DecoderWeights& to = decoder_[l];
    to.attention_norm = norm(from.attention.norm), to.cross_norm = norm(from.cross.norm);
    to.feed_norm = norm(from.feed_forward.norm);
    to.qkv = pack(from.attention.qkv), to.out = pack(from.attention.out);
    to.q = pack(from.cross.q), to.cross_out = pack(from.cross.out);
    to.in = pack(from.feed_forward.in), to.down = pack(from.feed_forward.out);
  }
  encoder_norm_ = norm(w.encoder_norm), decoder_norm_ = norm(w.decoder_norm);
  cross_ = pack(w.cross);
  output_ = pack({w.output.weight, w.output.bias});
}

void StepDecoder::embed(const Embedding& embedding, float* out, int64_t row, int32_t token, int64_t position) const {
  const float scale = model_.embedding_scale();
  float* to = out + row * H_;
  const auto add = [&]<typename T>(const T* table, const T* positions) {
    const T *word = table + token * H_, *place = positions + position * H_;
    for (int64_t i = 0; i < H_; ++i) to[i] = scale * static_cast<float>(word[i]) + static_cast<float>(place[i]);
  };
  if (embedding.table.dtype() == DType::kF32)
    add(embedding.table.data<float>(), embedding.positions.data<float>());
  else
    add(embedding.table.data<bfloat16>(), embedding.positions.data<bfloat16>());
}

void StepDecoder::add_norm(const Stream& s, const float* y, const Norm& norm) {
  const auto rows = [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      AddNormRow row;
      // Post-LN adds to the norm's output; without y nothing has been added to the embedding in x yet.
      row.residual = (pre_norm_ || !y ? s.x : s.n) + r * H_;
      row.y = y ? y + r * H_ : nullptr;
      row.gamma = norm.gamma, row.beta = norm.beta;
      row.sum = pre_norm_ && y ? s.x + r * H_ : nullptr;
      row.out = s.n + r * H_;
      row.cols = H_;
      add_norm_row(row);
    }
  };
  if (s.rows * H_ <= kSerialNumbers)
    rows(0, s.rows, 0);
  else
    context_.pool().parallel_for(s.rows, std::max<int64_t>(1, kSerialNumbers / H_), rows);
}

void StepDecoder::product(const Product& p, const float* x, int64_t rows, float* y) {
  linear_packed(context_, view(x, rows, p.weight.cols()), p.weight, p.bias, view(y, rows, p.weight.rows()));
}

void StepDecoder::feed_forward(const Stream& s, const Product& in, const Product& down, float* wide, float* y) {
  product(in, s.n, s.rows, wide);
  const Tensor a = view(wide, s.rows, in.weight.rows());
  bias_activation_dropout_forward(context_, a, {}, model_.config().activation, {}, a);
  product(down, wide, s.rows, y);
}

float* StepDecoder::worker_scores(int worker, int64_t) {
  return scores_.data() + worker * scores_step_;
}

void StepDecoder::begin(std::span<const std::span<const int32_t>> sources, int64_t width) {
  sentences_ = static_cast<int64_t>(sources.size()), beams_ = width;
  offsets_.assign(1, 0);
  int64_t longest = 0;
  for (const auto& source : sources) {
    offsets_.push_back(offsets_.back() + static_cast<int64_t>(source.size()));
    longest = std::max(longest, static_cast<int64_t>(source.size()));
  }
  scores_step_ = (attend_scratch(std::max(longest, model_.config().max_positions)) + 63) / 64 * 64;
  scores_.reserve(scores_step_ * context_.pool().threads());
  cross_cache_.reserve(static_cast<int64_t>(decoder_.size()) * offsets_.back() * 2 * H_);
  for (int64_t first = 0; first < sentences_;) {
    int64_t last = first + 1;
    while (last < sentences_ && offsets_[last + 1] - offsets_[first] <= kEncoderTokens) ++last;
    encode(sources, first, last);
    first = last;
  }
}

// Sentences [first, last): encoder, then keys and values of all decoder layers in one product.
void StepDecoder::encode(std::span<const std::span<const int32_t>> sources, int64_t first, int64_t last) {
  const int64_t tokens = offsets_[last] - offsets_[first], F = model_.config().encoder_ffn_dim,
                N = model_.config().encoder_heads, D = H_ / N, cross_cols = cross_.weight.rows();
  group_offsets_.clear();
  for (int64_t s = first; s <= last; ++s) group_offsets_.push_back(static_cast<int32_t>(offsets_[s] - offsets_[first]));
  const int64_t wide_cols = std::max({F, 3 * H_, cross_cols});
  float* x = group_.reserve(tokens * (4 * H_ + wide_cols + N));
  float *n = x + tokens * H_, *y = n + tokens * H_, *heads = y + tokens * H_, *wide = heads + tokens * H_,
        *lse = wide + tokens * wide_cols;
  const Embedding& embedding = model_.weights().source;
  context_.pool().parallel_for(last - first, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t s = first + begin; s < first + end; ++s)
      for (int64_t i = 0; i < static_cast<int64_t>(sources[s].size()); ++i)
        embed(embedding, x, offsets_[s] - offsets_[first] + i, sources[s][i], i);
  });
  const Stream stream{x, n, tokens};
  add_norm(stream, nullptr, encoder_.empty() ? encoder_norm_ : encoder_[0].attention_norm);
  const Tensor offsets(group_offsets_.data(), DType::kI32, {last - first + 1});
  for (size_t l = 0; l < encoder_.size(); ++l) {
    const EncoderWeights& w = encoder_[l];
    product(w.qkv, n, tokens, wide);
    const Tensor qkv = view(wide, tokens, 3 * H_);
    AttentionArgs args;
    args.q = qkv.columns(0, H_).split_columns({N, D});
    args.k = qkv.columns(H_, 2 * H_).split_columns({N, D});
    args.v = qkv.columns(2 * H_, 3 * H_).split_columns({N, D});
    args.q_offsets = args.k_offsets = offsets;
    args.scale = 1.0f / std::sqrt(static_cast<float>(D));
    attention_forward(context_, args, view(heads, tokens, H_).split_columns({N, D}), view(lse, tokens, N));
    product(w.out, heads, tokens, y);
    add_norm(stream, y, w.feed_norm);
    feed_forward(stream, w.in, w.down, wide, y);
    add_norm(stream, y, l + 1 < encoder_.size() ? encoder_[l + 1].attention_norm : encoder_norm_);
  }
  product(cross_, n, tokens, wide);
  store_cross(wide, first, last);
}

// From [tokens, layer, k or v, head, D] to blocks [layer][sentence][head][k or v][token, D] that one head reads in a
// row.
void StepDecoder::store_cross(const float* keys_values, int64_t first, int64_t last) {
  const int64_t layers = static_cast<int64_t>(decoder_.size()), N = model_.config().decoder_heads, D = H_ / N;
  const int64_t all = offsets_.back();
  context_.pool().run((last - first) * layers, [&](int64_t task, int) {
    const int64_t s = first + task / layers, l = task % layers, begin = offsets_[s], length = offsets_[s + 1] - begin;
    float* block = cross_cache_.data() + (l * all + begin) * 2 * H_;
    for (int64_t t = 0; t < length; ++t) {
      const float* from = keys_values + (begin - offsets_[first] + t) * layers * 2 * H_ + l * 2 * H_;
      for (int64_t part = 0; part < 2; ++part)
        for (int64_t h = 0; h < N; ++h)
          std::memcpy(block + ((2 * h + part) * length + t) * D, from + part * H_ + h * D,
                      static_cast<size_t>(D) * sizeof(float));
    }
  });
}

// Layer 0's place; layer l lies l * sentences * kChunk * beams * 2H further.
float* StepDecoder::cache_slot(int64_t sentence, int64_t slot, int64_t position) {
  float* chunk = chunks_[static_cast<size_t>(position / kChunk)].data();
  return chunk + ((sentence * kChunk + position % kChunk) * beams_ + slot) * 2 * H_;
}

Tensor StepDecoder::step(std::span<const DecoderRow> rows, int64_t position) {
  const int64_t R = static_cast<int64_t>(rows.size()), F = model_.config().decoder_ffn_dim,
                N = model_.config().decoder_heads, D = H_ / N, layers = static_cast<int64_t>(decoder_.size());
  const int64_t wide_cols = std::max(F, 3 * H_), layer_step = sentences_ * kChunk * beams_ * 2 * H_;
  const size_t chunk = static_cast<size_t>(position / kChunk);
  if (chunks_.size() <= chunk) chunks_.resize(chunk + 1);
  if (position % kChunk == 0) chunks_[chunk].reserve(layers * layer_step);
  float* x = rows_.reserve(sentences_ * beams_ * (4 * H_ + wide_cols));
  float *n = x + R * H_, *y = n + R * H_, *heads = y + R * H_, *wide = heads + R * H_;
  for (int64_t r = 0; r < R; ++r) {
    embed(model_.weights().target, x, r, rows[r].token, position);
    rows[r].history[position] = cache_slot(rows[r].sentence, rows[r].slot, position);
  }
  const Stream stream{x, n, R};
  const float scale = 1.0f / std::sqrt(static_cast<float>(D));
  add_norm(stream, nullptr, decoder_.empty() ? decoder_norm_ : decoder_[0].attention_norm);
  for (int64_t l = 0; l < layers; ++l) {
    const DecoderWeights& w = decoder_[static_cast<size_t>(l)];
    product(w.qkv, n, R, wide);
    context_.pool().parallel_for(R * N, 1, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = i / N, h = i % N;
        const float* qkv = wide + r * 3 * H_ + h * D;
        float* place = const_cast<float*>(rows[r].history[position]) + l * layer_step + h * D;
        std::memcpy(place, qkv + H_, static_cast<size_t>(D) * sizeof(float));
        std::memcpy(place + H_, qkv + 2 * H_, static_cast<size_t>(D) * sizeof(float));
        const AttendOne one{qkv, D, position + 1, scale, worker_scores(worker, position + 1), heads + r * H_ + h * D};
        attend_history(one, rows[r].history, l * layer_step + h * D, l * layer_step + H_ + h * D);
      }
    });
    product(w.out, heads, R, y);
    add_norm(stream, y, w.cross_norm);
    product(w.q, n, R, wide);
    context_.pool().parallel_for(R * N, 1, [&](int64_t begin, int64_t end, int worker) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t r = i / N, h = i % N, s = rows[r].sentence, length = offsets_[s + 1] - offsets_[s];
        const float* k = cross_cache_.data() + (l * offsets_.back() + offsets_[s]) * 2 * H_ + 2 * h * length * D;
        const AttendOne one{wide + r * H_ + h * D, D, length, scale, worker_scores(worker, length),
                            heads + r * H_ + h * D};
        attend_rows(one, k, k + length * D, D);
      }
    });
    product(w.cross_out, heads, R, y);
    add_norm(stream, y, w.feed_norm);
    feed_forward(stream, w.in, w.down, wide, y);
    add_norm(stream, y, l + 1 < layers ? decoder_[static_cast<size_t>(l + 1)].attention_norm : decoder_norm_);
  }
  return view(n, R, H_);
}

void StepDecoder::logits(const Tensor& hidden, const Tensor& logits) {
  linear_packed(context_, hidden, output_.weight, output_.bias, logits);
}

}  // namespace frit
