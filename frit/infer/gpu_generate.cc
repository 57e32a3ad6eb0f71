#include "frit/infer/gpu_generate.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "frit/backend/queue.h"
#include "frit/infer/processors.h"
#include "frit/ops/attention/attention.h"
#include "frit/ops/beam_select/beam_select.h"
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"
#include "frit/ops/bias_dropout_residual/bias_dropout_residual.h"
#include "frit/ops/bias_dropout_residual_norm/bias_dropout_residual_norm.h"
#include "frit/ops/decode_attention/decode_attention.h"
#include "frit/ops/embedding/embedding.h"
#include "frit/ops/gemm/gemm.h"
#include "frit/ops/layer_norm/layer_norm.h"
#include "frit/ops/linear_rows/linear_rows.h"
#include "frit/ops/sample_step/sample_step.h"
#include "frit/simt/copy.h"

namespace frit {
namespace {

using Clock = std::chrono::steady_clock;

// Positions by which keys and values grow.
constexpr int64_t kPositionStep = 64;

// To record a graph takes the host as long as to put the work on the stream a few times. Most sizes of an encoder, and
// many of a step while sentences leave a large batch, do not come that often.
constexpr int64_t kPlainRuns = 3;

int64_t power_of_two(int64_t n, int64_t least) {
  while (least < n) least *= 2;
  return least;
}

// Waits without a call that the GPU's run time would have to serve at once.
void wait_for(GpuEvent& event) {
  while (!event.done()) std::this_thread::yield();
}

// Replays a plan for as long as it lives.
class Replay {
 public:
  Replay(Memory& memory, const Plan& plan) : memory_(memory) { memory_.begin_replay(plan); }
  ~Replay() {
    if (open_) try {
        memory_.end_replay();
      } catch (const std::logic_error&) {  // what unwinds already is the cause
      }
  }
  void finish() {
    open_ = false;
    memory_.end_replay();
  }

 private:
  Memory& memory_;
  bool open_ = true;
};

}  // namespace

int64_t sentence_bucket(int64_t sentences) {
  int64_t bucket = 1;
  while (bucket < sentences) {
    if (bucket % 2 == 0 && bucket / 2 * 3 >= sentences) return bucket / 2 * 3;
    bucket *= 2;
  }
  return bucket;
}

Tensor DeviceTensors::make(DType dtype, Shape shape) {
  const auto bytes = static_cast<size_t>(std::max<int64_t>(1, shape.numel()) * size_of(dtype));
  Piece piece{allocate_block(bytes, &gpu_), static_cast<int64_t>(bytes)};
  gpu_.born(piece.block.get(), bytes, dtype);
  const Tensor tensor(piece.block.get(), dtype, shape, gpu_.device());
  pieces_.push_back(std::move(piece));
  bytes_ += static_cast<int64_t>(bytes);
  return tensor;
}

void DeviceTensors::release(const Tensor& tensor) {
  std::erase_if(pieces_, [&](Piece& piece) {
    if (piece.block.get() != tensor.raw()) return false;
    gpu_.died(piece.block.get());
    bytes_ -= piece.bytes;
    return true;
  });
}

void DeviceTensors::clear() {
  for (Piece& piece : pieces_) gpu_.died(piece.block.get());
  pieces_.clear();
  bytes_ = 0;
}

GpuGenerator::GpuGenerator(Context& context, const Transformer& model, const GeneratorOptions& how)
    : model_(model),
      how_(how),
      gpu_(context.gpu()),
      memory_(&gpu_),
      context_(context.pool(), memory_, &gpu_),
      tensors_(gpu_),
      constants_(gpu_) {
  const auto* const at = dynamic_cast<const Gpu*>(model.workspace().device());
  FRIT_CHECK(at && same_device(*at, gpu_), "[generate] the model does not lie on the context's GPU");
  FRIT_CHECK(how.steps_ahead >= 1, "[generate] steps_ahead is {}, expected 1 or more", how.steps_ahead);
  const TransformerConfig& c = model.config();
  H_ = c.d_model, V_ = c.target_vocab, layers_ = c.decoder_layers, places_ = c.max_positions + 1;
  context_.set_tuning(context.tuning());
  for (auto* event : {&began_, &encoded_, &searched_, &downloaded_, &queued_}) *event = gpu_.make_event();
  progress_ = gpu_.allocate_pinned(sizeof(int64_t));
  whole_.progress = Tensor(progress_.get(), DType::kI64, {1}, gpu_.device());
  round_bias();
}

GpuGenerator::~GpuGenerator() {
  try {
    gpu_.synchronize();
  } catch (const std::exception&) {  // whoever waited for the work has heard of it
  }
}

void GpuGenerator::refresh() {
  encoders_.clear(), steps_.clear();  // the logits' bias may lie elsewhere
  round_bias();
}

void GpuGenerator::round_bias() {
  const DType dtype = model_.workspace().parameters().dtype();
  constants_.clear();
  rounded_bias_ = model_.logits_bias();
  if (!rounded_bias_.defined() || dtype == DType::kF32) return;
  std::vector<uint16_t> values;
  for (const float v : model_.logits_bias_values())
    values.push_back(dtype == DType::kF16 ? float16(v).bits : bfloat16(v).bits);
  rounded_bias_ = constants_.make(dtype, {V_});
  gpu_.upload(rounded_bias_.raw(), values.data(), values.size() * sizeof(uint16_t));
}

int64_t GpuGenerator::tune(Tuning& tuning) {
  encoders_.clear(), steps_.clear();
  const int64_t timed = gpu_.tune_products(tuning);
  context_.set_tuning(&tuning);
  return timed;
}

// ---- Buffers ----

void GpuGenerator::Extent::include(const Extent& other) {
  sentences = std::max(sentences, other.sentences), cache_rows = std::max(cache_rows, other.cache_rows);
  source_tokens = std::max(source_tokens, other.source_tokens);
  prompt_tokens = std::max(prompt_tokens, other.prompt_tokens);
  settings = std::max(settings, other.settings);
  token_scores = token_scores || other.token_scores;
}

void GpuGenerator::reserve(const Extent& wanted) {
  Extent e = extent_;
  if (e.width != wanted.width) e.sentences = 0;
  e.width = wanted.width;
  e.include(wanted);
  if (e == extent_) return;
  gpu_.synchronize();
  encoders_.clear(), steps_.clear();
  tensors_.clear();
  extent_ = {};  // should memory run out
  const int64_t n = e.sentences, slots = e.slots(), P = places_;
  SearchState& s = whole_;
  const auto i32 = [&](Shape shape) { return tensors_.make(DType::kI32, shape); };
  const auto f32 = [&](Shape shape) { return tensors_.make(DType::kF32, shape); };
  s.width = e.width;
  s.live = i32({1}), s.live_sentence = i32({n}), s.position = i32({1});
  s.ids = i32({2, slots, P}), s.origin = i32({2, slots, P});
  s.scores = f32({slots}), s.ended = i32({slots}), s.broken = i32({n});
  s.done_scores = f32({slots}), s.done_length = i32({slots}), s.done_column = i32({slots}),
  s.done_ids = i32({P, slots});
  s.token_scores = e.token_scores ? f32({2, slots, P}) : Tensor();
  s.done_token_scores = e.token_scores ? f32({P, slots}) : Tensor();
  s.row_ids = i32({slots}), s.row_positions = i32({slots}), s.scratch = i32({2 * n + 2});
  if (how_.survivors) survivors_ = i32({P, slots});

  // What a call uploads, in one piece: the sources last, so that the copy may end with what there is.
  struct Part {
    Tensor* tensor;
    DType dtype;
    int64_t count;
  };
  const Part parts[] = {{&count_, DType::kI32, 1},
                        {&settings_, DType::kI32, e.settings},
                        {&numbers_, DType::kF32, kSearchNormalisers + P + 1},
                        {&whole_draw_, DType::kI64, kDrawSentences + n},
                        {&s.prompt, DType::kI32, n},
                        {&s.max_length, DType::kI32, n},
                        {&whole_source_offsets_, DType::kI32, n + 1},
                        {&whole_prompt_offsets_, DType::kI32, n + 1},
                        {&prompt_ids_, DType::kI32, e.prompt_tokens},
                        {&source_ids_, DType::kI32, e.source_tokens}};
  int64_t bytes = 0;
  const auto bytes_of = [](const Part& part) {
    return static_cast<int64_t>(align_up(static_cast<size_t>(size_of(part.dtype) * part.count)));
  };
  for (const Part& part : parts) bytes += bytes_of(part);
  inputs_ = i32({bytes / 4});
  int64_t at = 0;
  for (const Part& part : parts) {
    *part.tensor = Tensor(static_cast<char*>(inputs_.raw()) + at, part.dtype, {part.count}, gpu_.device());
    at += bytes_of(part);
  }
  staging_ = gpu_.allocate_pinned(static_cast<size_t>(bytes));
  results_ = gpu_.allocate_pinned(static_cast<size_t>(4 * slots * (4 + P * (e.token_scores ? 2 : 1))));
  const DType dtype = model_.workspace().parameters().dtype();
  report_.state_bytes = tensors_.bytes();
  cross_ = tensors_.make(dtype, {e.source_tokens, std::max<int64_t>(1, layers_) * 2 * H_});
  cache_ = tensors_.make(dtype, {std::max<int64_t>(1, layers_), e.cache_rows * 2 * H_});
  report_.cache_bytes = tensors_.bytes() - report_.state_bytes;
  extent_ = e;
}

// Tables for a call with `sentences` sentences: the first part of each, without gaps.
void GpuGenerator::lay_out(int64_t sentences) {
  sentences_ = sentences, slots_ = sentences * extent_.width;
  positions_ = std::min(places_, extent_.cache_rows / slots_);
  const int64_t P = places_;
  const auto part = [&](const Tensor& whole, Shape shape) {
    return whole.defined() ? Tensor(whole.raw(), whole.dtype(), shape, gpu_.device()) : Tensor();
  };
  state_ = whole_;
  SearchState& s = state_;
  s.live_sentence = part(s.live_sentence, {sentences}), s.prompt = part(s.prompt, {sentences});
  s.broken = part(s.broken, {sentences});
  s.max_length = part(s.max_length, {sentences}), s.scratch = part(s.scratch, {2 * sentences + 2});
  for (Tensor* t : {&s.ids, &s.origin, &s.token_scores}) *t = part(*t, {2, slots_, P});
  for (Tensor* t : {&s.done_ids, &s.done_token_scores}) *t = part(*t, {P, slots_});
  for (Tensor* t : {&s.scores, &s.ended, &s.done_scores, &s.done_length, &s.done_column, &s.row_ids, &s.row_positions})
    *t = part(*t, {slots_});
  source_offsets_ = part(whole_source_offsets_, {sentences + 1});
  prompt_offsets_ = part(whole_prompt_offsets_, {sentences + 1});
  draw_ = part(whole_draw_, {kDrawSentences + sentences});
}

// Keys and values for more positions. The search waits for it: outputs are seldom so much longer than their sources.
void GpuGenerator::grow_positions(int64_t positions) {
  gpu_.synchronize();
  steps_.clear();
  const Tensor before = cache_;
  cache_ = tensors_.make(before.dtype(), {before.dim(0), positions * slots_ * 2 * H_});
  const int64_t bytes = before.dim(1) * size_of(before.dtype());
  const auto bytes_of = [&](const Tensor& t, int64_t layer) {
    return Tensor(static_cast<char*>(t.raw()) + layer * t.row_stride() * size_of(t.dtype()), DType::kU8, {bytes},
                  gpu_.device());
  };
  if (gpu_.device() == Device::kSim) {  // its memory knows elements by their size
    std::vector<char> host(static_cast<size_t>(bytes));
    for (int64_t l = 0; l < before.dim(0); ++l) {
      gpu_.download(host.data(), bytes_of(before, l).raw(), host.size());
      gpu_.upload(bytes_of(cache_, l).raw(), host.data(), host.size());
    }
  } else {
    for (int64_t l = 0; l < before.dim(0); ++l) copy_gpu(context_, bytes_of(before, l), bytes_of(cache_, l));
    gpu_.synchronize();
  }
  tensors_.release(before);
  report_.cache_bytes = cross_.bytes() + cache_.bytes();
  extent_.cache_rows = positions * slots_;
  positions_ = positions;
}

void GpuGenerator::upload(std::span<const GenerateInput> inputs, std::span<const int64_t> longest, const Call& call) {
  const GenerateOptions& o = *call.options;
  const auto part = [&](const Tensor& t) {
    return reinterpret_cast<int32_t*>(staging_.get() +
                                      (static_cast<char*>(t.raw()) - static_cast<char*>(inputs_.raw())));
  };
  part(count_)[0] = static_cast<int32_t>(inputs.size());
  int32_t* settings = part(settings_);
  std::fill_n(settings, settings_.numel(), 0);
  std::vector<std::vector<int32_t>> sequences;
  std::vector<int32_t> singles;
  for (const auto& word : o.bad_words) {
    if (word.size() == 1)
      singles.push_back(word[0]);
    else
      sequences.push_back(word);
  }
  settings[kSearchEarlyStopping] = static_cast<int32_t>(o.early_stopping);
  settings[kSearchLongestBound] =
      o.early_stopping == EarlyStopping::kNever && o.alpha > 0 && o.penalty != LengthPenalty::kNone;
  settings[kSearchMinLength] = static_cast<int32_t>(o.min_length);
  settings[kSearchMinNew] = static_cast<int32_t>(o.min_new_tokens);
  settings[kSearchNgram] = static_cast<int32_t>(o.no_repeat_ngram);
  settings[kSearchForcedBos] = o.forced_bos_id, settings[kSearchForcedEos] = o.forced_eos_id;
  settings[kSearchPad] = o.eos_ids[0];
  settings[kSearchEos] = static_cast<int32_t>(o.eos_ids.size());
  settings[kSearchSingles] = static_cast<int32_t>(singles.size());
  settings[kSearchSequences] = static_cast<int32_t>(sequences.size());
  int32_t* to = std::copy(o.eos_ids.begin(), o.eos_ids.end(), settings + kSearchLists);
  to = std::copy(singles.begin(), singles.end(), to);
  auto begin = static_cast<int32_t>(to - settings + static_cast<int64_t>(sequences.size()) + 1);
  for (const auto& word : sequences) *to++ = begin, begin += static_cast<int32_t>(word.size());
  *to++ = begin;
  for (const auto& word : sequences) to = std::copy(word.begin(), word.end(), to);

  float* numbers = reinterpret_cast<float*>(part(numbers_));
  numbers[kSearchPenalty] = static_cast<float>(o.repetition_penalty);
  numbers[kSearchDiversity] = static_cast<float>(o.diversity);
  for (int64_t n = 0; n <= places_; ++n) numbers[kSearchNormalisers + n] = static_cast<float>(o.normaliser(n));

  const auto S = static_cast<int64_t>(inputs.size());
  auto* draw = reinterpret_cast<int64_t*>(part(draw_));
  draw[kDrawSeed] = static_cast<int64_t>(o.seed), draw[kDrawTopK] = o.top_k;
  draw[kDrawTemperature] = std::bit_cast<int64_t>(o.temperature), draw[kDrawTopP] = std::bit_cast<int64_t>(o.top_p);
  for (int64_t i = 0; i < sentences_; ++i)
    draw[kDrawSentences + i] = i < S ? static_cast<int64_t>(inputs[static_cast<size_t>(i)].index) : 0;
  int32_t source_at = 0, prompt_at = 0;
  for (int64_t i = 0; i < sentences_; ++i) {  // those behind the last are empty
    part(source_offsets_)[i] = source_at, part(prompt_offsets_)[i] = prompt_at;
    part(state_.prompt)[i] = 1, part(state_.max_length)[i] = 2;
    if (i >= S) continue;
    const GenerateInput& input = inputs[static_cast<size_t>(i)];
    part(state_.prompt)[i] = 1 + static_cast<int32_t>(input.prefix.size());
    part(state_.max_length)[i] = static_cast<int32_t>(longest[static_cast<size_t>(i)]);
    std::copy(input.source.begin(), input.source.end(), part(source_ids_) + source_at);
    source_at += static_cast<int32_t>(input.source.size());
    part(prompt_ids_)[prompt_at++] = o.start_id;
    std::copy(input.prefix.begin(), input.prefix.end(), part(prompt_ids_) + prompt_at);
    prompt_at += static_cast<int32_t>(input.prefix.size());
  }
  part(source_offsets_)[sentences_] = source_at, part(prompt_offsets_)[sentences_] = prompt_at;
  std::fill(part(source_ids_) + source_at, part(source_ids_) + call.encoder.tokens, 0);
  const auto bytes = reinterpret_cast<char*>(part(source_ids_) + call.encoder.tokens) - staging_.get();
  gpu_.upload_async(inputs_.raw(), staging_.get(), static_cast<size_t>(bytes));
}

// ---- The model ----

bool GpuGenerator::by_rows(int64_t rows, const Tensor& w) const {
  if (how_.products != GeneratorOptions::Products::kAuto) return how_.products == GeneratorOptions::Products::kRows;
  return rows <= how_.few_rows || (w.dtype() != DType::kF32 && rows * w.numel() <= how_.small_product);
}

void GpuGenerator::project_to(Stream& stream, const LayerNorm& norm, const Linear& linear_weights,
                              std::optional<Activation> activation, const Tensor& y) {
  const bool norms = norm.gamma.defined() && !stream.normed.defined();
  const Tensor& x = stream.any();
  if (norms) stream.normed = context_.allocate(x.shape(), x.dtype(), "normed");
  if (by_rows(x.dim(0), linear_weights.weight)) {
    LinearRowsArgs args;
    args.x = x, args.w = linear_weights.weight, args.bias = linear_weights.bias, args.activation = activation;
    if (norms) args.gamma = norm.gamma, args.beta = norm.beta, args.normed = stream.normed;
    linear_rows(context_, args, y);
    return;
  }
  if (norms) layer_norm_forward(context_, x, norm.gamma, norm.beta, 1e-5f, stream.normed, {}, {});
  const Tensor& in = stream.normed.defined() ? stream.normed.tensor() : x;
  ++products_;
  linear(context_, in, linear_weights.weight, activation ? Tensor() : linear_weights.bias, y);
  if (activation) bias_activation_dropout_forward(context_, y, linear_weights.bias, *activation, {}, y);
}

Buffer GpuGenerator::project(Stream& stream, const LayerNorm& norm, const Linear& linear_weights,
                             std::optional<Activation> activation, DType dtype) {
  Buffer y = context_.allocate({stream.any().dim(0), linear_weights.weight.dim(0)}, dtype, "projected");
  project_to(stream, norm, linear_weights, activation, y);
  return y;
}

void GpuGenerator::close(Stream& stream, const Tensor& in, const Linear& w, const LayerNorm& next) {
  const bool pre_norm = model_.config().pre_norm;
  const Tensor& residual = pre_norm || !stream.normed.defined() ? stream.x.tensor() : stream.normed.tensor();
  Buffer y = context_.allocate({in.dim(0), w.weight.dim(0)}, in.dtype(), "closed"), normed;
  if (by_rows(in.dim(0), w.weight)) {
    LinearRowsArgs args;
    args.x = in, args.w = w.weight, args.bias = w.bias, args.residual = residual;
    linear_rows(context_, args, y);
  } else {
    ++products_;
    linear(context_, in, w.weight, {}, y);
    if (!next.gamma.defined()) {
      bias_dropout_residual_forward(context_, y, w.bias, residual, {}, y);
    } else {  // the norm in the same pass; in post-LN the sum itself is not written
      normed = pre_norm ? context_.allocate(y->shape(), y->dtype(), "normed") : std::move(y);
      const Tensor x = pre_norm ? y.tensor() : normed.tensor();
      bias_dropout_residual_norm_forward(context_, x, w.bias, residual, {}, next.gamma, next.beta, 1e-5f,
                                         pre_norm ? x : Tensor(), normed, {}, {});
    }
  }
  stream.x = std::move(y), stream.normed = std::move(normed);
}

void GpuGenerator::feed_forward(Stream& stream, const FeedForward& w, const LayerNorm& next) {
  const Buffer wide = project(stream, w.norm, w.in, model_.config().activation, stream.any().dtype());
  close(stream, wide, w.out, next);
}

// All sources to cross_: the encoder, then keys and values of all decoder layers in one product.
void GpuGenerator::encode(const EncoderKey& key) {
  const int64_t tokens = key.tokens, longest = key.longest;
  const TransformerWeights& w = model_.weights();
  const TransformerConfig& c = model_.config();
  const DType dtype = w.source.table.dtype();
  const int64_t N = c.encoder_heads, D = H_ / N;
  Stream stream{context_.allocate({tokens, H_}, dtype, "x"), {}};
  EmbeddingArgs embedding;
  embedding.ids = source_ids_.rows(0, tokens), embedding.offsets = source_offsets_;
  embedding.table = w.source.table, embedding.positions = w.source.positions;
  embedding.scale = model_.embedding_scale();
  embedding_forward(context_, embedding, stream.x);
  for (size_t l = 0; l < w.encoder.size(); ++l) {
    const EncoderLayer& layer = w.encoder[l];
    Buffer heads;
    {
      const Buffer qkv = project(stream, layer.attention.norm, layer.attention.qkv, {}, dtype);
      heads = context_.allocate({tokens, H_}, dtype, "heads");
      const Buffer lse = context_.allocate({tokens, N}, DType::kF32, "lse");
      AttentionArgs args;
      args.q = qkv->columns(0, H_).split_columns({N, D});
      args.k = qkv->columns(H_, 2 * H_).split_columns({N, D});
      args.v = qkv->columns(2 * H_, 3 * H_).split_columns({N, D});
      args.q_offsets = args.k_offsets = source_offsets_;
      args.max_q = args.max_k = longest;
      args.scale = 1.0f / std::sqrt(static_cast<float>(D));
      attention_forward(context_, args, heads->split_columns({N, D}), lse);
    }
    close(stream, heads, layer.attention.out, layer.feed_forward.norm);
    heads.release();
    feed_forward(stream, layer.feed_forward,
                 l + 1 < w.encoder.size() ? w.encoder[l + 1].attention.norm : w.encoder_norm);
  }
  project_to(stream, w.encoder_norm, w.cross, {}, cross_.rows(0, tokens));
}

// One position of all rows of `sentences` entries, and what the search makes of it.
void GpuGenerator::step(const StepKey& key) {
  const TransformerWeights& w = model_.weights();
  const TransformerConfig& c = model_.config();
  const int64_t R = key.sentences * extent_.width, N = c.decoder_heads;
  const DType dtype = w.target.table.dtype();
  const float scale = 1.0f / std::sqrt(static_cast<float>(H_ / N));
  const DecodeRows rows{state_.live, state_.live_sentence, extent_.width};
  Stream stream{context_.allocate({R, H_}, dtype, "x"), {}};
  EmbeddingArgs embedding;
  embedding.ids = state_.row_ids.rows(0, R), embedding.position_ids = state_.row_positions.rows(0, R);
  embedding.table = w.target.table, embedding.positions = w.target.positions;
  embedding.scale = model_.embedding_scale();
  embedding_forward(context_, embedding, stream.x);
  for (int64_t l = 0; l < layers_; ++l) {
    const DecoderLayer& layer = w.decoder[static_cast<size_t>(l)];
    {
      const Buffer qkv = project(stream, layer.attention.norm, layer.attention.qkv, {}, dtype);
      const Buffer heads = context_.allocate({R, H_}, dtype, "heads");
      DecodeSelfAttentionArgs args;
      args.qkv = qkv, args.origin = state_.origin, args.position = state_.position;
      args.cache = Tensor(cache_.rows(l, l + 1).raw(), dtype, {positions_, slots_, 2, H_}, gpu_.device());
      args.rows = rows, args.heads = N, args.scale = scale;
      decode_self_attention(context_, args, heads);
      close(stream, heads, layer.attention.out, layer.cross.norm);
    }
    {
      const Buffer q = project(stream, layer.cross.norm, layer.cross.q, {}, dtype);
      const Buffer heads = context_.allocate({R, H_}, dtype, "heads");
      DecodeCrossAttentionArgs args;
      args.q = q, args.source_offsets = source_offsets_, args.rows = rows, args.heads = N, args.scale = scale;
      args.keys = cross_.columns(l * 2 * H_, l * 2 * H_ + H_);
      args.values = cross_.columns(l * 2 * H_ + H_, (l + 1) * 2 * H_);
      decode_cross_attention(context_, args, heads);
      close(stream, heads, layer.cross.out, layer.feed_forward.norm);
    }
    feed_forward(stream, layer.feed_forward,
                 l + 1 < layers_ ? w.decoder[static_cast<size_t>(l) + 1].attention.norm : w.decoder_norm);
  }
  const Tensor& logits_bias = by_rows(R, w.output.weight) ? rounded_bias_ : w.output.bias;
  const Buffer logits = project(stream, w.decoder_norm, {w.output.weight, logits_bias}, {}, DType::kF32);
  stream = {};
  const int64_t count = key.sampling ? 1 : key.count;
  const Buffer values = context_.allocate({R, count}, DType::kF32, "values"),
               columns = context_.allocate({R, count}, DType::kI32, "columns"),
               lse = context_.allocate({R}, DType::kF32, "log_sum_exp");
  const Tensor survivors = survivors_.defined()
                               ? survivors_.rows(step_number_, step_number_ + 1).reshape({extent_.slots()}).rows(0, R)
                               : Tensor();
  beam_select(context_, logits, count, values, columns, lse, survivors);
  SearchStepArgs args;
  args.values = values, args.columns = columns, args.lse = lse;
  if (key.boosts) args.logits = logits;
  Buffer drawn, drawn_scores;
  if (key.sampling) {
    drawn = context_.allocate({R}, DType::kI32, "drawn");
    drawn_scores = context_.allocate({R}, DType::kF32, "drawn_scores");
    sample_step(context_, {.logits = logits,
                           .lse = lse,
                           .draw = draw_,
                           .settings = settings_,
                           .numbers = numbers_,
                           .state = state_,
                           .drawn = drawn,
                           .drawn_scores = drawn_scores});
    args.drawn = drawn, args.drawn_scores = drawn_scores;
  }
  args.settings = settings_, args.numbers = numbers_;
  args.vocabulary = V_, args.beam = key.beam, args.keep = key.keep, args.state = state_;
  if (!key.token_scores) args.state.token_scores = args.state.done_token_scores = {};
  search_step(context_, args);
}

// ---- Plans and graphs ----

GpuGenerator::Recorded& GpuGenerator::ready(Recorded& recorded, const std::function<void()>& work) {
  if (recorded.plan.offsets.empty()) {
    memory_.begin_recording();
    try {
      work();
    } catch (...) {
      memory_.end_recording();
      throw;
    }
    recorded.plan = plan_memory(memory_.end_recording());
  }
  if (recorded.plan.peak > memory_.arena_bytes()) {
    gpu_.synchronize();  // work on the way uses the arena that goes
    for (auto& [key, other] : encoders_) other.graph.reset();
    for (auto& [key, other] : steps_) other.graph.reset();
    memory_.reserve(recorded.plan.peak);
    report_.arena_bytes = static_cast<int64_t>(memory_.arena_bytes());
  }
  return recorded;
}

void GpuGenerator::run(Recorded& recorded, const std::function<void()>& work) {
  const std::function<void()> replayed = [&] {
    Replay replay(memory_, recorded.plan);
    work();
    replay.finish();
  };
  if (!how_.graphs || how_.survivors) return replayed();
  if (!recorded.graph) {
    const int64_t kernels = gpu_.launches();
    products_ = 0;
    if (recorded.plain_runs < kPlainRuns) {
      replayed();
      ++recorded.plain_runs;
    } else {
      recorded.graph = gpu_.record(replayed);
      ++report_.recorded;
    }
    recorded.kernels = gpu_.launches() - kernels, recorded.products = products_;
  }
  if (recorded.graph) recorded.graph->launch();
  report_.kernels = recorded.kernels, report_.products = recorded.products;
}

GpuGenerator::StepKey GpuGenerator::step_key(const Call& call, int64_t sentences, int64_t length) const {
  const GenerateOptions& o = *call.options;
  StepKey key;
  key.capacity = sentences_, key.sentences = sentences, key.keep = call.keep;
  key.beam = o.beam > 1, key.sampling = o.sampling, key.token_scores = o.token_scores;
  key.boosts = !o.sampling && o.repetition_penalty < 1;
  // Where the tokens that settings touch become more with every step, few different numbers of them.
  int64_t count = call.keep + Processors::touched(o, length);
  if (o.repetition_penalty != 1 || o.no_repeat_ngram > 0) count = power_of_two(count, 16);
  key.count = o.sampling ? 1 : std::min(count, V_);
  return key;
}

// ---- A call ----

GpuGenerator::Call GpuGenerator::describe(std::span<const GenerateInput> inputs, std::span<const int64_t> longest,
                                          const GenerateOptions& options) const {
  Call call;
  call.options = &options;
  const int64_t ends = std::max<int64_t>(2, 1 + static_cast<int64_t>(options.eos_ids.size()));
  call.keep = options.beam > 1 ? ends * options.beam : 1;
  call.longest = *std::max_element(longest.begin(), longest.end());
  int64_t tokens = 0, longest_source = 0, prompts = 0, words = 0;
  for (const GenerateInput& input : inputs) {
    tokens += static_cast<int64_t>(input.source.size());
    longest_source = std::max(longest_source, static_cast<int64_t>(input.source.size()));
    prompts += 1 + static_cast<int64_t>(input.prefix.size());
  }
  for (const auto& word : options.bad_words) words += 1 + static_cast<int64_t>(word.size());
  const auto S = static_cast<int64_t>(inputs.size());
  call.sentences = sentence_bucket(S);
  call.encoder = {attention_rounded(tokens, 32), attention_rounded(longest_source, kAttentionLengthStep),
                  call.sentences};
  Extent& wanted = call.wanted;
  wanted.width = options.sampling ? options.nbest : options.beam;
  wanted.sentences = call.sentences;
  const int64_t usual = (2 * longest_source + kPositionStep) / kPositionStep * kPositionStep;
  wanted.cache_rows = std::min(call.longest - 1, std::max(usual, kPositionStep)) * wanted.slots();
  wanted.source_tokens = call.encoder.tokens, wanted.prompt_tokens = power_of_two(prompts, 16);
  wanted.settings = power_of_two(kSearchLists + static_cast<int64_t>(options.eos_ids.size()) + words + 1, 64);
  wanted.token_scores = options.token_scores;
  return call;
}

// All plans of a call at first, so that the arena does not grow while steps are on the way.
void GpuGenerator::plan(const Call& call) {
  lay_out(call.sentences);
  ready(encoders_[call.encoder], [&] { encode(call.encoder); });
  for (const int64_t length : {int64_t{1}, call.longest}) {
    const StepKey key = step_key(call, call.sentences, length);
    ready(steps_[key], [&] { step(key); });
  }
}

void GpuGenerator::prepare(std::span<const Batch> batches, const GenerateOptions& options) {
  std::vector<Call> calls;
  for (const Batch& batch : batches) calls.push_back(describe(batch.inputs, batch.longest, options));
  if (calls.empty()) return;
  Extent all = calls.front().wanted;
  for (const Call& call : calls) all.include(call.wanted);
  reserve(all);
  // Temporaries grow with the tokens of an encoder and with the sentences of a step.
  plan(*std::max_element(calls.begin(), calls.end(),
                         [](const Call& a, const Call& b) { return a.encoder < b.encoder; }));
  plan(*std::max_element(calls.begin(), calls.end(),
                         [](const Call& a, const Call& b) { return a.sentences < b.sentences; }));
}

GpuGenerator::Call GpuGenerator::begin(std::span<const GenerateInput> inputs, std::span<const int64_t> longest,
                                       const GenerateOptions& options) {
  const Call call = describe(inputs, longest, options);
  reserve(call.wanted);
  plan(call);

  if (survivors_.defined()) gpu_.fill(survivors_.raw(), 0, static_cast<size_t>(survivors_.bytes()));
  progress().store(static_cast<int64_t>(inputs.size()));
  began_->record();
  upload(inputs, longest, call);
  run(encoders_[call.encoder], [&] { encode(call.encoder); });
  SearchBeginArgs begin;
  begin.prompt_ids = prompt_ids_, begin.prompt_offsets = prompt_offsets_, begin.count = count_;
  begin.beam = options.beam > 1, begin.state = state_;
  if (!options.token_scores) begin.state.token_scores = begin.state.done_token_scores = {};
  search_begin(context_, begin);
  encoded_->record();
  return call;
}

std::vector<std::vector<Hypothesis>> GpuGenerator::generate(std::span<const GenerateInput> inputs,
                                                            std::span<const int64_t> longest,
                                                            const GenerateOptions& options) {
  const GpuRange range(&gpu_, "generate");
  const Call call = begin(inputs, longest, options);
  const auto seen = progress();
  int64_t queued = 0;
  const int64_t most = call.longest - 1;
  for (Clock::time_point since = Clock::now(); queued < most;) {
    const int64_t now = seen.load(std::memory_order_acquire), done = now >> 32, live = now & 0xffffffff;
    if (live == 0) break;
    if (queued - done >= how_.steps_ahead) {
      // A step takes some milliseconds at most. If it does not, the device may have failed, of which the event tells.
      if (Clock::now() - since > std::chrono::milliseconds(200)) {
        queued_->record();
        wait_for(*queued_);
        since = Clock::now();
      }
      std::this_thread::yield();
      continue;
    }
    queue_step(call, live, queued++);
    since = Clock::now();
  }
  searched_->record();
  report_.steps = queued;
  return collect(call, inputs, queued);
}

// Puts the step at `position` on the stream, for as many sentences as are left or more.
void GpuGenerator::queue_step(const Call& call, int64_t live, int64_t position) {
  if (position == positions_) grow_positions(std::min(call.longest - 1, position + position / 2 + kPositionStep));
  step_number_ = position;
  const StepKey key = step_key(call, std::min(sentence_bucket(live), call.sentences), position + 1);
  run(ready(steps_[key], [&] { step(key); }), [&] { step(key); });
}

std::map<std::string, double> GpuGenerator::time_parts(std::span<const GenerateInput> inputs,
                                                       std::span<const int64_t> longest, const GenerateOptions& options,
                                                       int64_t position, int replays) {
  const Call call = begin(inputs, longest, options);
  const auto live = static_cast<int64_t>(inputs.size());
  FRIT_CHECK(position + replays + 1 < call.longest, "[generate] {} steps from {} on are timed, but outputs end at {}",
             replays, position, call.longest);
  const StepKey key = step_key(call, call.sentences, position + 1);
  Recorded apart;
  memory_.begin_recording();
  step(key);
  // A part that runs alone reads what the whole step left behind: nothing else may lie there by then.
  apart.plan = plan_without_sharing(memory_.end_recording());
  ready(apart, {});
  for (int64_t p = 0; p < position; ++p) queue_step(call, live, p);
  gpu_.synchronize();
  const auto time = [&](std::function<bool(std::string_view)> runs) {
    const auto at = static_cast<int32_t>(position);  // search_step has moved on
    gpu_.upload(state_.position.raw(), &at, sizeof(at));
    gpu_.set_filter(std::move(runs));
    std::vector<double> times = gpu_.time_graph(
        [&] {
          Replay replay(memory_, apart.plan);
          step(key);
          replay.finish();
        },
        replays);
    gpu_.set_filter(nullptr);
    std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
    return times[times.size() / 2];
  };
  std::set<std::string, std::less<>> names;
  std::map<std::string, double> parts;
  parts["all"] = time([&](std::string_view name) {
    names.emplace(name);
    return true;
  });
  for (const std::string& part : names) parts[part] = time([&](std::string_view name) { return name == part; });
  return parts;
}

std::vector<std::vector<Hypothesis>> GpuGenerator::collect(const Call& call, std::span<const GenerateInput> inputs,
                                                           int64_t steps) {
  const GenerateOptions& o = *call.options;
  const int64_t width = extent_.width, slots = slots_;
  char* const base = results_.get();
  int64_t at = 0;
  const auto fetch = [&](const Tensor& t, int64_t count) {
    char* to = base + at;
    gpu_.download_async(to, t.raw(), static_cast<size_t>(4 * count));
    at += 4 * count;
    return to;
  };
  const auto* scores = reinterpret_cast<const float*>(fetch(state_.done_scores, slots));
  const auto* lengths = reinterpret_cast<const int32_t*>(fetch(state_.done_length, slots));
  const auto* columns = reinterpret_cast<const int32_t*>(fetch(state_.done_column, slots));
  const auto* broken = reinterpret_cast<const int32_t*>(fetch(state_.broken, static_cast<int64_t>(inputs.size())));
  const auto* ids = reinterpret_cast<const int32_t*>(fetch(state_.done_ids, steps * slots));
  const float* token_scores =
      o.token_scores ? reinterpret_cast<const float*>(fetch(state_.done_token_scores, steps * slots)) : nullptr;
  downloaded_->record();
  wait_for(*downloaded_);
  report_.encoder_ms = encoded_->milliseconds_since(*began_);
  report_.search_ms = searched_->milliseconds_since(*encoded_);

  std::vector<std::vector<Hypothesis>> results(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (broken[i] != 0) {
      const DType dtype = model_.workspace().parameters().dtype();
      fail("[generate] the logits of sentence {} of the batch hold a NaN{}", i,
           dtype == DType::kF16 ? ": the model's numbers may not fit fp16; bf16 and fp32 have room" : "");
    }
    const int64_t first = static_cast<int64_t>(i) * width;
    const auto prefix = static_cast<int64_t>(inputs[i].prefix.size());
    std::vector<int64_t> order;
    for (int64_t b = 0; b < width; ++b)
      if (lengths[first + b] > 0) order.push_back(first + b);
    if (o.sampling)
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    if (static_cast<int64_t>(order.size()) > o.nbest) order.resize(static_cast<size_t>(o.nbest));
    for (const int64_t slot : order) {
      Hypothesis h;
      h.score = scores[slot];
      if (o.sampling && !std::isfinite(h.score)) fail("[generate] no token may be drawn: all are banned");
      const int64_t column = first + columns[slot];
      for (int64_t j = 0; j < lengths[slot]; ++j) {
        h.tokens.push_back(ids[j * slots + column]);
        if (token_scores && j >= prefix) h.token_scores.push_back(token_scores[j * slots + column]);
      }
      results[i].push_back(std::move(h));
    }
  }
  if (survivors_.defined()) {
    std::vector<int32_t> counts(static_cast<size_t>(steps * extent_.slots()));
    gpu_.download(counts.data(), survivors_.raw(), counts.size() * 4);
    double sum = 0, most = 0, rows = 0;
    for (const int32_t n : counts) sum += n, most = std::max<double>(most, n), rows += n > 0;
    report_.survivors_mean = rows > 0 ? sum / rows : 0, report_.survivors_most = most;
    report_.survivors_rows = static_cast<int64_t>(rows);
  }
  return results;
}

}  // namespace frit
