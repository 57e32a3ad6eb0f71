#include "frit/train/validation.h"

#include <algorithm>
#include <cmath>

#include "frit/core/error.h"
#include "frit/infer/generate.h"
#include "frit/train/bleu.h"

namespace frit {
namespace {

GenerateOptions search_options(const TrainConfig& config, const TransformerConfig& sizes) {
  GenerateOptions options = GenerateOptions::from(GenerationConfig::for_model(sizes));
  options.beam = config.validation.beam;
  options.penalty = LengthPenalty::kLength, options.alpha = config.validation.length_penalty;
  try {
    options.validate(sizes);
  } catch (const std::invalid_argument& e) {
    fail("[config] validation cannot translate like this: {}", e.what());
  }
  return options;
}

}  // namespace

Validation::Validation(const TrainConfig& config, const TransformerConfig& sizes, const Tokenizer& tokenizer,
                       TokenFile file, ThreadPool& pool, Gpu* gpu, const Say& say)
    : sizes_(sizes),
      tokenizer_(tokenizer),
      search_(config.validation.bleu ? search_options(config, sizes) : GenerateOptions{}),
      file_(std::move(file)),
      batcher_(file_, valid_batches(config, sizes, file_)),
      gpu_(gpu),
      memory_(gpu),
      context_(pool, memory_, gpu) {
  if (batcher_.counts().used() != batcher_.counts().sentences)
    say("Validation: " + batcher_.counts().to_string(batcher_.options()));
  if (config.validation.bleu) read_sentences(config, say);
}

Validation::~Validation() = default;

// The validation sentences that are translated, as text and as ids.
void Validation::read_sentences(const TrainConfig& config, const Say& say) {
  const int64_t limit = config.validation.max_sentences;
  TextOptions options;
  options.invalid_utf8 = config.data.invalid_utf8 == "skip" ? InvalidUtf8::kSkip : InvalidUtf8::kError;
  ParallelReader reader(config.data.valid_source, config.data.valid_target, options);
  std::string_view source, target;
  int64_t cut = 0;
  while ((limit == 0 || static_cast<int64_t>(sources_.size()) < limit) && reader.next(&source, &target)) {
    sources_.emplace_back(source), references_.emplace_back(target);
    std::vector<int32_t> ids = tokenizer_.encode(Side::kSource, source);
    const auto room = static_cast<size_t>(sizes_.max_positions - 1);
    if (ids.size() > room) ids.resize(room), ++cut;
    ids.push_back(tokenizer_.eos_id(Side::kSource));
    ids_.push_back(std::move(ids));
  }
  if (cut > 0)
    say(fmt::format("Validation: {} sentences are longer than the model's {} positions and are cut for translation",
                    cut, sizes_.max_positions));
}

void Validation::plan(TrainingStep& step) {
  const std::vector<BatchSize> batches = batcher_.sizes(0);
  batches_ = static_cast<int64_t>(batches.size());
  for (const BatchSize& size : batches) step.plan(TrainingStep::Kind::kEvaluate, size);
}

// Source tokens that are translated at once. On a GPU keys and values must fit beside what training holds: with at most
// a sentence for every 16 tokens, and outputs of at most twice their sources and some positions more, these are no more
// than 10 positions a token and beam.
int64_t Validation::translated_tokens(const Transformer& model) const {
  int64_t tokens = gpu_ ? 4096 : 2048;
  const auto free = gpu_ ? static_cast<int64_t>(gpu_->bytes_free()) : 0;  // 0: not known
  const int64_t position = sizes_.decoder_layers * 2 * sizes_.d_model * size_of(model.workspace().parameters().dtype());
  while (free > 0 && tokens > 64 && 10 * tokens * search_.beam * position > free / 2) tokens /= 2;
  return tokens;
}

// The model's translations of the sentences; nothing if stopping was asked for before they were done.
std::optional<std::vector<std::string>> Validation::translate(Transformer& model,
                                                              const std::function<bool()>& stop_requested) {
  if (generator_)
    generator_->refresh();  // the weights have changed since the last validation
  else
    generator_ = std::make_unique<Generator>(context_, model);
  const int64_t tokens = translated_tokens(model);
  std::vector<int64_t> lengths;
  for (const auto& ids : ids_) lengths.push_back(static_cast<int64_t>(ids.size()));
  std::vector<std::string> texts(ids_.size());
  std::vector<GenerateInput> inputs;
  for (const auto& group : plan_inference_batches(lengths, tokens, gpu_ ? std::max<int64_t>(1, tokens / 16) : 0)) {
    if (stop_requested()) return std::nullopt;
    inputs.clear();
    for (const int64_t i : group) inputs.push_back({.source = ids_[static_cast<size_t>(i)], .prefix = {}});
    // A model that has learnt little yet does not find the end: twice the source is enough to see that.
    search_.max_new_tokens = std::min(sizes_.max_positions - 1, 2 * lengths[static_cast<size_t>(group.front())] + 10);
    const auto found = generator_->generate(inputs, search_);
    for (size_t i = 0; i < group.size(); ++i)
      if (!found[i].empty()) texts[static_cast<size_t>(group[i])] = tokenizer_.decode(found[i].front().tokens);
  }
  return texts;
}

std::optional<ValidationResult> Validation::run(TrainingStep& step, Transformer& model,
                                                const std::function<bool()>& stop_requested) {
  batcher_.seek({0, 0});
  for (int64_t i = 0; i < batches_; ++i) {
    if (stop_requested()) {
      step.evaluated();  // the next validation begins anew
      return std::nullopt;
    }
    batcher_.next(&batch_);
    step.evaluate(batch_);
  }
  const Loss sum = step.evaluated();
  ValidationResult result;
  if (!ids_.empty()) {
    auto texts = translate(model, stop_requested);
    if (gpu_) generator_.reset();  // training has its memory again
    if (!texts) return std::nullopt;
    result.translations = std::move(*texts);
    result.bleu = corpus_bleu(result.translations, references_).score;
  }
  result.loss = sum.nll / static_cast<double>(std::max<int64_t>(1, sum.tokens));
  result.perplexity = std::exp(result.loss);
  return result;
}

}  // namespace frit
