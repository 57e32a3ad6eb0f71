// What tests of training share: a small corpus made on the spot, and a configuration that trains on it in moments.
#pragma once
#include <filesystem>
#include <fstream>
#include <random>
#include <string>

#include "frit/train/config.h"

namespace frit {

// A folder of its own that goes away with it.
class TestFolder {
 public:
  explicit TestFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() / (name + "-" + std::to_string(std::random_device{}()))) {
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Writes NAME.src and NAME.tgt: sentences over 24 made-up words, each translated by turning its letters round.
inline void write_corpus(const std::filesystem::path& folder, const std::string& name, int sentences, unsigned seed) {
  std::mt19937 random(seed);
  std::ofstream source(folder / (name + ".src")), target(folder / (name + ".tgt"));
  for (int i = 0; i < sentences; ++i) {
    const unsigned words = 1 + random() % 12;
    for (unsigned w = 0; w < words; ++w) {
      const unsigned word = random() % 24;
      std::string text;
      for (unsigned letter = 0; letter < 2 + word % 4; ++letter)
        text += static_cast<char>('a' + (word * 5 + letter * 3) % 20);
      source << (w ? " " : "") << text;
      target << (w ? " " : "") << std::string(text.rbegin(), text.rend());
    }
    source << "\n", target << "\n";
  }
}

inline TrainConfig tiny_config(const std::filesystem::path& folder, const std::string& run) {
  TrainConfig c;
  c.model.preset = "transformer-tiny";
  c.model.encoder_layers = c.model.decoder_layers = 1;
  c.model.d_model = 16, c.model.heads = 2, c.model.ffn = 32, c.model.max_positions = 64;
  c.model.dropout = c.model.attention_dropout = c.model.activation_dropout = 0.1;
  c.data.train_source = (folder / "train.src").string(), c.data.train_target = (folder / "train.tgt").string();
  c.data.valid_source = (folder / "valid.src").string(), c.data.valid_target = (folder / "valid.tgt").string();
  c.data.vocabulary = 64, c.data.byte_fallback = false, c.data.max_length = 60, c.data.window = 2;
  c.training.batch_tokens = 128;
  c.training.learning_rate = 3e-3, c.training.warmup = "10u";
  c.training.stop_after = "30u", c.training.log_every = "4u", c.training.valid_every = "7u";
  c.training.save_every = "3u";
  c.validation.bleu = false;
  c.run.directory = (folder / run).string();
  c.run.threads = 2;
  return c;
}

}  // namespace frit
