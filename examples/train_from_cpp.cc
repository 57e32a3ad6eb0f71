// Trains a translator from C++ on text that the program writes itself: sentences of a small grammar, whose German side
// needs gender and case. examples/translate.cc then translates a sentence that was not in the text.
//   example_train_from_cpp [DIRECTORY]      writes DIRECTORY (default: example_run), a run directory
#include <array>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>

#include "frit/core/philox.h"
#include "frit/train/trainer.h"

namespace {

struct Noun {
  const char *english, *german;
  char gender;  // 'm', 'f', 'n'
};
struct Word {
  const char *english, *german;
};
constexpr std::array<Noun, 9> kNouns = {{{"dog", "Hund", 'm'},
                                         {"man", "Mann", 'm'},
                                         {"tree", "Baum", 'm'},
                                         {"cat", "Katze", 'f'},
                                         {"woman", "Frau", 'f'},
                                         {"flower", "Blume", 'f'},
                                         {"house", "Haus", 'n'},
                                         {"child", "Kind", 'n'},
                                         {"horse", "Pferd", 'n'}}};
constexpr std::array<Word, 6> kAdjectives = {
    {{"small", "klein"}, {"big", "groß"}, {"old", "alt"}, {"red", "rot"}, {"new", "neu"}, {"good", "gut"}}};
constexpr std::array<Word, 4> kVerbs = {
    {{"sees", "sieht"}, {"finds", "findet"}, {"loves", "liebt"}, {"paints", "malt"}}};

// "der kleine Hund", or as an object "den kleinen Hund".
std::string german(const Noun& noun, const Word& adjective, bool object) {
  const bool bent = object && noun.gender == 'm';
  const char* article = noun.gender == 'f' ? "die" : noun.gender == 'n' ? "das" : bent ? "den" : "der";
  return std::string(article) + " " + adjective.german + (bent ? "en " : "e ") + noun.german;
}

// Writes `count` sentences, drawn with `seed`, to stem.en and stem.de; the one that examples/translate.cc asks for is
// left out.
void write_text(const std::string& stem, int count, uint32_t seed) {
  std::ofstream source(stem + ".en"), target(stem + ".de");
  for (int i = 0; i < count; ++i) {
    const frit::PhiloxBlock a = frit::philox({seed, 0}, i, 0, 0, 0), b = frit::philox({seed, 0}, i, 1, 0, 0);
    const Noun &subject = kNouns[a.v[0] % kNouns.size()], &object = kNouns[a.v[1] % kNouns.size()];
    const Word &first = kAdjectives[a.v[2] % kAdjectives.size()], &second = kAdjectives[a.v[3] % kAdjectives.size()];
    const Word& verb = kVerbs[b.v[0] % kVerbs.size()];
    const std::string english = std::string("the ") + first.english + " " + subject.english + " " + verb.english +
                                " the " + second.english + " " + object.english;
    if (english == "the small dog sees the red house") continue;
    source << english << '\n';
    target << german(subject, first, false) << ' ' << verb.german << ' ' << german(object, second, true) << '\n';
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : "example_run";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  write_text(directory + "/train", 1500, 1);
  write_text(directory + "/valid", 100, 2);

  frit::TrainConfig config;
  config.data.train_source = directory + "/train.en", config.data.train_target = directory + "/train.de";
  config.data.valid_source = directory + "/valid.en", config.data.valid_target = directory + "/valid.de";
  config.data.vocabulary = 120, config.data.byte_fallback = false;
  config.model.encoder_layers = config.model.decoder_layers = 1;
  config.model.d_model = 64, config.model.heads = 4, config.model.ffn = 128;
  config.training.batch_tokens = 512;
  config.training.learning_rate = 4e-3, config.training.warmup = "100u";
  config.training.stop_after = "6e", config.training.valid_every = "2e", config.training.save_every = "2e";
  config.run.threads = 1;  // the model is too small to be worth sharing out
  config.run.directory = directory;

  frit::TrainerOutput output;
  output.log = &std::cerr;
  const frit::TrainResult result = frit::Trainer(config, output).run();
  std::cout << "model: " << result.model_directory << '\n';
  return result.loss && *result.loss < 0.1 ? 0 : 1;  // nats a token on sentences it has mostly not seen
}
