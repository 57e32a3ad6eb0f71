// The parts below the trainer: batches made by hand, a training loop of one's own, and decoding. The model learns to
// write numbers backwards.
#include <fmt/core.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "frit/core/philox.h"
#include "frit/infer/generate.h"
#include "frit/models/transformer/transformer.h"
#include "frit/ops/optimizer/optimizer.h"

namespace {

constexpr int32_t kPad = 0, kEos = 1, kZero = 2;  // ids: pad (also the decoder's start), end, digits 0 to 9

// Packed: all sentences one behind the other, no padding. BatchView takes any struct with these five vectors.
struct Numbers {
  std::vector<int32_t> source_ids, source_offsets = {0}, target_ids, labels, target_offsets = {0};

  void add(const std::vector<int32_t>& digits) {
    source_ids.insert(source_ids.end(), digits.begin(), digits.end());
    source_ids.push_back(kEos);
    // The decoder reads the answer moved by one place and must say the next token each time.
    target_ids.push_back(kPad);
    target_ids.insert(target_ids.end(), digits.rbegin(), digits.rend());
    labels.insert(labels.end(), digits.rbegin(), digits.rend());
    labels.push_back(kEos);
    source_offsets.push_back(static_cast<int32_t>(source_ids.size()));
    target_offsets.push_back(static_cast<int32_t>(labels.size()));
  }
};

// 3 to 6 digits that depend on (update, sentence) alone.
std::vector<int32_t> random_digits(uint32_t update, uint32_t sentence) {
  const frit::PhiloxBlock a = frit::philox({7, update}, sentence, 0, 0, 0),
                          b = frit::philox({7, update}, sentence, 1, 0, 0);
  std::vector<int32_t> digits;
  for (uint32_t i = 0, n = 3 + a.v[3] % 4; i < n; ++i)
    digits.push_back(kZero + static_cast<int32_t>((i < 3 ? a.v[i] : b.v[i - 3]) % 10));
  return digits;
}

}  // namespace

int main() {
  frit::ThreadPool pool(1);  // the model is too small to be worth sharing out
  frit::Memory memory;
  frit::Context context(pool, memory);

  frit::TransformerConfig config;
  config.encoder_layers = config.decoder_layers = 1;
  config.d_model = 64, config.encoder_heads = config.decoder_heads = 4;
  config.encoder_ffn_dim = config.decoder_ffn_dim = 128;
  config.source_vocab = config.target_vocab = kZero + 10;
  config.max_positions = 16, config.dropout = 0;
  frit::Transformer model(config, {.training = true});
  model.initialise(1);

  frit::OptimizerArgs adam;
  adam.beta2 = 0.98;
  float scale = 0;  // the loss is a mean over the step's target tokens
  for (int64_t update = 1; update <= 900; ++update) {
    Numbers batch;
    for (uint32_t i = 0; i < 64; ++i) batch.add(random_digits(static_cast<uint32_t>(update), i));
    scale = 1 / static_cast<float>(batch.labels.size());
    frit::LossTotals totals;
    model.train_step(context, frit::BatchView::of(batch), frit::Tensor(&scale, frit::DType::kF32, frit::Shape{1}),
                     totals.tensor());
    const frit::Loss loss = totals.loss();
    const double warm = std::min(1.0, static_cast<double>(update) / 100);
    frit::optimizer_step(context, adam, {.learning_rate = 2e-3 * warm, .step = update}, model.workspace());
    if (update % 300 == 0)
      std::cerr << fmt::format("update {}: loss {:.4f}\n", update, loss.loss / static_cast<double>(loss.tokens));
  }

  frit::Generator generator(context, model);
  const std::vector<int32_t> digits = {kZero + 3, kZero + 1, kZero + 4, kZero + 1, kZero + 5, kEos};
  const auto results = generator.generate(std::vector<frit::GenerateInput>{{.source = digits, .prefix = {}}}, {});
  std::cout << "31415 -> ";
  for (const int32_t token : results[0][0].tokens)
    if (token >= kZero) std::cout << token - kZero;
  std::cout << '\n';
}
