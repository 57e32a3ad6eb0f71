// Lines to lines: order, empty and bad lines, cut sentences, streams; with a random model and a small tokenizer.
#include "frit/infer/translator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <sstream>

#include "frit/data/test_corpus.h"
#include "frit/models/format/safetensors.h"

namespace frit {
namespace {

// A model directory made once: random weights, a vocabulary of 400, 120 positions.
const std::string& model_directory() {
  static const TemporaryDirectory directory;
  static const bool made = [] {
    std::string en, de;
    for (const std::string& line : made_up_lines(false, 400)) en += line + "\n";
    for (const std::string& line : made_up_lines(true, 400)) de += line + "\n";
    const Tokenizer tokenizer =
        Tokenizer::train(directory.write("en", en), directory.write("de", de), {.vocabulary = 400});
    tokenizer.save(directory / "model");
    TransformerConfig c;
    c.encoder_layers = c.decoder_layers = 1;
    c.d_model = 32, c.encoder_heads = c.decoder_heads = 4, c.encoder_ffn_dim = c.decoder_ffn_dim = 64;
    c.source_vocab = c.target_vocab = tokenizer.vocabulary_size(Side::kSource);
    c.max_positions = 120;
    c.pad_id = c.start_id = tokenizer.pad_id(), c.eos_id = tokenizer.eos_id();
    Transformer model(c, {});
    model.initialise(11);
    model.save(directory / "model");
    return true;
  }();
  (void)made;
  static const std::string path = directory / "model";
  return path;
}

struct Translating : testing::Test {
  Translating() : pool(2), translator(model_directory(), pool), options(translator.default_options()) {
    translator.on_notice = [this](std::string_view text) { notices.emplace_back(text); };
    options.generate.beam = 2, options.generate.max_length = 0, options.generate.max_new_tokens = 12;
  }
  ThreadPool pool;
  Translator translator;
  TranslateOptions options;
  std::vector<std::string> notices;
};

TEST_F(Translating, DirectorysSettingsAreTheDefault) {
  const TranslateOptions defaults = translator.default_options();
  EXPECT_EQ(defaults.generate.eos_ids, std::vector<int32_t>{translator.tokenizer().eos_id()});
  EXPECT_EQ(defaults.generate.start_id, translator.tokenizer().pad_id());
  ASSERT_EQ(defaults.generate.bad_words.size(), 1u);
  EXPECT_EQ(defaults.generate.bad_words[0], std::vector<int32_t>{translator.tokenizer().pad_id()});
  defaults.generate.validate(translator.config());
}

// The same weights and pieces as fairseq has them: its names, its arguments, a dictionary that leads with <s>, <pad>,
// </s> and <unk>, one SentencePiece model.
TEST_F(Translating, AFairseqDirectoryTranslatesText) {
  const TemporaryDirectory directory;
  const Tokenizer& ours = translator.tokenizer();
  std::string dictionary;
  for (int32_t id = 0; id < ours.vocabulary_size(Side::kSource); ++id)
    if (id != ours.eos_id() && id != ours.pad_id() && id != ours.unk_id()) dictionary += ours.token(id) + " 1\n";
  directory.write("dict.txt", dictionary);
  std::filesystem::copy(model_directory() + "/source.spm", directory / "sentencepiece.bpe.model");
  directory.write("config.json",
                  R"({"arch": "transformer", "encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 32,
                      "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_embed_dim": 64,
                      "share_all_embeddings": true, "max_source_positions": 120, "max_target_positions": 120})");
  const SafetensorsFile file(model_directory() + "/model.safetensors");
  std::vector<float> table(static_cast<size_t>(ours.vocabulary_size(Side::kSource) + 1) * 32);
  convert_to_f32(file.at("model.shared.weight"), table.data());  // a row less: any rows do
  SafetensorsWriter out(directory / "model.safetensors");
  out.declare("encoder.embed_tokens.weight", DType::kF32, {static_cast<int64_t>(table.size()) / 32, 32});
  for (const auto& entry : file.entries())
    if (entry.name.find("layers.") != std::string::npos) out.declare(entry.name.substr(6), entry.dtype, entry.shape);
  out.write("encoder.embed_tokens.weight", table.data(), static_cast<int64_t>(table.size() * sizeof(float)));
  for (const auto& entry : file.entries())
    if (entry.name.find("layers.") != std::string::npos) out.write(entry.name.substr(6), entry.data, entry.bytes);
  out.finish();

  Translator theirs(directory.path(), pool);
  TranslateOptions settings = theirs.default_options();
  EXPECT_EQ(settings.generate.beam, 5);
  EXPECT_EQ(settings.generate.start_id, 2);
  EXPECT_EQ(settings.generate.max_length, 121);
  settings.generate.max_length = 0, settings.generate.max_new_tokens = 6;
  const std::string text = made_up_lines(false, 1, 4)[0];
  const auto lists = theirs.translate(std::span(&text, 1), settings);
  ASSERT_EQ(lists[0].size(), 1u);
  EXPECT_EQ(lists[0][0].text, theirs.tokenizer().decode(lists[0][0].tokens));
  std::vector<int32_t> ids = theirs.tokenizer().encode(Side::kSource, text);
  ids.push_back(2);
  const std::vector<GenerateInput> inputs = {{ids, {}, 0}};
  EXPECT_EQ(theirs.generator().generate(inputs, settings.generate)[0][0].tokens, lists[0][0].tokens);
}

// On a GPU, or in the simulator where there is none.
TEST_F(Translating, AGpuTranslatesAsTheCpu) {
  TranslatorDevice where;
  where.device = built_with_cuda() ? "cuda" : "simulator";
  Translator other(model_directory(), pool, where);
  EXPECT_GT(other.default_options().batch_tokens, translator.default_options().batch_tokens);
  options.generate.max_new_tokens = 5;
  const auto lines = made_up_lines(false, 6, 4);
  const auto expected = translator.translate(lines, options), got = other.translate(lines, options);
  for (size_t i = 0; i < lines.size(); ++i) {
    ASSERT_EQ(got[i].size(), 1u);
    EXPECT_EQ(got[i][0].text, expected[i][0].text) << i;
    EXPECT_NEAR(got[i][0].score, expected[i][0].score, 1e-4);
  }
  where.dtype = "fp16";
  Translator half(model_directory(), pool, where);
  EXPECT_EQ(half.translate(std::span(lines.data(), 2), options).size(), 2u);
}

struct GpuWorkers : Translating {
  static TranslatorDevice place(int workers) {
    TranslatorDevice where;
    where.device = built_with_cuda() ? "cuda" : "simulator", where.workers = workers;
    if (!built_with_cuda()) where.generator.products = GeneratorOptions::Products::kLibrary;  // faster there
    return where;
  }
};

// However many batches are translated side by side, and however the lines are cut into them: the same tokens, in order.
TEST_F(GpuWorkers, TranslateAlike) {
  const int64_t count = built_with_cuda() ? 400 : 20;
  const auto lines = made_up_lines(false, static_cast<int>(count), 4);
  options.generate.max_new_tokens = built_with_cuda() ? 20 : 3;
  const auto expected = translator.translate(lines, options);
  for (const int workers : {1, 2, 3}) {
    SCOPED_TRACE(workers);
    Translator other(model_directory(), pool, place(workers));
    EXPECT_EQ(other.workers(), workers);
    EXPECT_THROW(other.generator(workers), std::invalid_argument);
    struct Cut {
      int64_t window, tokens;
    };
    for (const auto& [window, tokens] : {Cut{1000, 40}, Cut{3, 100}}) {
      SCOPED_TRACE(window);
      options.window_lines = window, options.batch_tokens = tokens;
      int64_t at = 0, handed_on = 0;
      other.translate(
          [&]() -> std::optional<std::string> {
            return at < count ? std::optional(lines[static_cast<size_t>(at++)]) : std::nullopt;
          },
          [&](int64_t line, const std::vector<Translation>& list) {
            ASSERT_EQ(line, handed_on++);
            ASSERT_EQ(list.size(), 1u);
            EXPECT_EQ(list[0].tokens, expected[static_cast<size_t>(line)][0].tokens) << line;
            EXPECT_NEAR(list[0].score, expected[static_cast<size_t>(line)][0].score, 1e-4);
          },
          options);
      EXPECT_EQ(handed_on, count);
    }
    // Every worker had work, in memory of its own.
    for (int w = 0; w < workers; ++w) EXPECT_GT(other.generator(w).report().cache_bytes, 0) << w;
  }
}

// Lines enough for all workers are cut into batches for all; few lines stay together.
TEST_F(GpuWorkers, ShareALargeBatch) {
  options.generate.beam = 1, options.generate.max_new_tokens = 1;
  Translator alone(model_directory(), pool, place(1)), two(model_directory(), pool, place(2));
  const auto lines = made_up_lines(false, 66, 4);
  two.translate(std::span(lines).first(40), options);
  EXPECT_GT(two.generator(0).report().cache_bytes, 0);
  EXPECT_EQ(two.generator(1).report().cache_bytes, 0);
  const auto expected = alone.translate(lines, options), got = two.translate(lines, options);
  for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(got[i][0].tokens, expected[i][0].tokens) << i;
  for (int w = 0; w < 2; ++w)
    EXPECT_LT(two.generator(w).report().cache_bytes, alone.generator().report().cache_bytes) << w;
  EXPECT_GT(alone.default_options().batch_tokens, two.default_options().batch_tokens);
}

// Input that comes in pieces gives what it gives at once: draws, notices and numbers of lines.
TEST_F(Translating, PiecesCountFromTheirFirstLine) {
  auto lines = made_up_lines(false, 6, 3);
  for (int i = 0; i < 6; ++i) lines[4] += " " + lines[0];  // too long: a notice
  options.generate.beam = 1, options.generate.sampling = true, options.generate.seed = 5;
  using Seen = std::vector<std::pair<int64_t, std::string>>;
  const auto translate = [&](size_t piece) {
    Seen seen;
    notices.clear();
    for (size_t from = 0; from < lines.size(); from += piece) {
      size_t at = from;
      options.first_line = static_cast<int64_t>(from);
      translator.translate(
          [&]() -> std::optional<std::string> {
            return at < from + piece && at < lines.size() ? std::optional(lines[at++]) : std::nullopt;
          },
          [&](int64_t line, const std::vector<Translation>& list) { seen.emplace_back(line, list.at(0).text); },
          options);
    }
    for (const std::string& notice : notices) seen.emplace_back(-1, notice);
    return seen;
  };
  const Seen whole = translate(6);
  ASSERT_EQ(whole.size(), 7u);
  EXPECT_EQ(whole[5].first, 5);
  EXPECT_NE(whole[6].second.find("line 5:"), std::string::npos) << whole[6].second;
  for (const size_t piece : {1, 2, 5}) EXPECT_EQ(translate(piece), whole) << piece;
  options.first_line = 3;
  EXPECT_EQ(translator.translate(std::span(lines).first(2), options).size(), 2u);
}

// What lies in windows before an error is handed on, whoever it comes from; nothing hangs. bad: lines that cannot be
// read.
void check_errors(Translator& translator, TranslateOptions options, const std::vector<size_t>& bad_lines) {
  const auto lines = made_up_lines(false, 30, 3);
  options.window_lines = 4, options.batch_tokens = 20;
  for (const size_t bad : bad_lines) {
    SCOPED_TRACE(bad);
    size_t at = 0;
    std::vector<int64_t> seen;
    const auto next = [&]() -> std::optional<std::string> {
      if (at == bad) throw std::runtime_error("no more of this");
      return lines[at++];
    };
    const auto result = [&](int64_t line, const std::vector<Translation>&) { seen.push_back(line); };
    try {
      translator.translate(next, result, options);
      ADD_FAILURE() << "no error";
    } catch (const std::runtime_error& e) {
      EXPECT_STREQ(e.what(), "no more of this");
    }
    ASSERT_EQ(seen.size(), bad / 4 * 4);
    for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], static_cast<int64_t>(i));
  }
  // The one who takes the results stops.
  size_t at = 0, taken = 0;
  EXPECT_THROW(
      translator.translate([&]() -> std::optional<std::string> { return lines[at++ % lines.size()]; },  // has no end
                           [&](int64_t, const std::vector<Translation>&) {
                             if (++taken == 9) throw std::logic_error("enough");
                           },
                           options),
      std::logic_error);
  EXPECT_EQ(taken, 9u);
}

TEST_F(GpuWorkers, ErrorsComeInTheOrderOfTheLines) {
  Translator other(model_directory(), pool, place(3));
  options.generate.beam = 1, options.generate.max_new_tokens = 1;
  check_errors(other, options, {3, 13});
  // Every batch fails: the first one's error is told, and nothing is handed on.
  const auto lines = made_up_lines(false, 30, 3);
  TranslateOptions impossible = options;
  impossible.prefix = "das alter Haus", impossible.generate.max_length = 2, impossible.generate.max_new_tokens = 0;
  EXPECT_THROW(other.translate(lines, impossible), std::invalid_argument);
  EXPECT_EQ(other.translate(lines[0], options), translator.translate(lines[0], options));  // still works
}

TEST(TranslatorDevices, UnknownOnesAreErrors) {
  ThreadPool pool(1);
  const auto expect = [&](const TranslatorDevice& where, const char* word) {
    try {
      Translator translator(model_directory(), pool, where);
      ADD_FAILURE() << "no error for " << word;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
    }
  };
  expect({.device = "tpu"}, "tpu");
  expect({.device = built_with_cuda() ? "simulator" : "cuda"}, "CUDA");
  expect({.dtype = "fp16"}, "needs a GPU");
  expect({.workers = 2}, "need a GPU");
  expect({.workers = -1}, "workers");
  expect({.device = built_with_cuda() ? "cuda" : "simulator", .dtype = "int8"}, "int8");
}

TEST_F(Translating, StreamKeepsOrderWhateverTheBatches) {
  const auto lines = made_up_lines(false, 30, 3);
  std::vector<std::string> alone;
  for (const std::string& line : lines) alone.push_back(translator.translate(line, options));
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  for (const int64_t window : {1, 7, 1000})
    for (const int64_t batch : {1, 50, 100000}) {
      options.window_lines = window, options.batch_tokens = batch;
      std::istringstream in(text);
      std::ostringstream out;
      EXPECT_EQ(translator.translate(in, out, options), 30);
      std::istringstream result(out.str());
      std::string line;
      for (size_t i = 0; i < alone.size(); ++i) {
        ASSERT_TRUE(std::getline(result, line));
        EXPECT_EQ(line, alone[i]) << "line " << i << ", window " << window << ", batch " << batch;
      }
      EXPECT_FALSE(std::getline(result, line));
    }
  EXPECT_TRUE(notices.empty());
}

TEST_F(Translating, ErrorsComeInTheOrderOfTheLines) {
  check_errors(translator, options, {0, 3, 13, 29});
  const std::string line = made_up_lines(false, 30, 3)[0];
  EXPECT_EQ(translator.translate(line, options), translator.translate(line, options));  // still works
}

// Reading is never more than a few windows ahead of what is handed on.
TEST_F(Translating, ReadsAheadWithinBounds) {
  const auto lines = made_up_lines(false, 10, 3);
  options.window_lines = 3, options.batch_tokens = 12;
  std::atomic<int64_t> read = 0;
  int64_t most = 0;
  translator.translate(
      [&]() -> std::optional<std::string> {
        return read < 120 ? std::optional(lines[static_cast<size_t>(read++ % 10)]) : std::nullopt;
      },
      [&](int64_t line, const std::vector<Translation>&) { most = std::max(most, read - line); }, options);
  EXPECT_EQ(read, 120);
  // One window is handed on; up to four batches wait to be, and one is translated: of five more windows at most; one
  // waits and one is read.
  EXPECT_LE(most, 8 * 3);
}

TEST_F(Translating, EmptyLinesStayEmpty) {
  std::istringstream in("\n  \nthe house\r\n\n");
  std::ostringstream out;
  EXPECT_EQ(translator.translate(in, out, options), 4);
  EXPECT_EQ(out.str(), "\n\n" + translator.translate("the house", options) + "\n\n");
  std::istringstream nothing("");
  std::ostringstream none;
  EXPECT_EQ(translator.translate(nothing, none, options), 0);
  EXPECT_EQ(none.str(), "");
}

TEST_F(Translating, LongLinesAreCutWithANotice) {
  std::string line;
  for (int i = 0; i < 150; ++i) line += "birds ";
  std::istringstream in("the house\n" + line + "\n");
  std::ostringstream out;
  EXPECT_EQ(translator.translate(in, out, options), 2);
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_NE(notices[0].find("line 2"), std::string::npos) << notices[0];
  EXPECT_NE(notices[0].find("120 positions"), std::string::npos) << notices[0];
}

TEST_F(Translating, InvalidUtf8IsAnErrorOrANotice) {
  const std::string text = "the house\nthe \xff house\nnear\n";
  std::istringstream in(text);
  std::ostringstream out;
  try {
    translator.translate(in, out, options);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("line 2: invalid UTF-8 at byte 5 (0xff)"), std::string::npos) << e.what();
  }
  options.invalid_utf8 = InvalidUtf8::kSkip;
  std::istringstream again(text);
  std::ostringstream skipped;
  EXPECT_EQ(translator.translate(again, skipped, options), 3);
  EXPECT_EQ(notices.size(), 1u);
  EXPECT_EQ(skipped.str(),
            translator.translate("the house", options) + "\n\n" + translator.translate("near", options) + "\n");
}

TEST_F(Translating, NBestHasFallingScores) {
  options.generate.beam = 4, options.generate.nbest = 4;
  const std::vector<std::string> texts = {"the green house", "", "birds sing in May"};
  const auto lists = translator.translate(texts, options);
  ASSERT_EQ(lists.size(), 3u);
  EXPECT_EQ(lists[0].size(), 4u);
  ASSERT_EQ(lists[1].size(), 1u);
  EXPECT_EQ(lists[1][0].text, "");
  for (size_t i = 1; i < lists[0].size(); ++i) EXPECT_GE(lists[0][i - 1].score, lists[0][i].score);
}

TEST_F(Translating, PrefixBeginsEveryTranslation) {
  options.prefix = "das alter Haus";
  const std::string text = translator.translate("the old house", options);
  EXPECT_TRUE(text.starts_with("das alter Haus")) << text;
}

TEST_F(Translating, TokenFilesGiveTheSameTranslations) {
  const TemporaryDirectory directory;
  const std::string en = directory.write("en", "the house\nbirds sing\nnear a river\n"),
                    de = directory.write("de", "das Haus\nVögel singen\nnahe einem Fluß\n");
  const TokenFile file = TokenFile::build(directory / "tokens", en, de, translator.tokenizer(), pool);
  const auto sources = read_sources(file, 2);
  ASSERT_EQ(sources.size(), 2u);
  const auto texts = translate_ids(translator.generator(), translator.tokenizer(), sources, options.generate);
  EXPECT_EQ(texts, (std::vector<std::string>{translator.translate("the house", options),
                                             translator.translate("birds sing", options)}));
  EXPECT_EQ(read_references(file, translator.tokenizer()),
            (std::vector<std::string>{"das Haus", "Vögel singen", "nahe einem Fluß"}));
  // Too long for the positions: cut, as Translator does.
  const std::vector<std::vector<int32_t>> longer = {std::vector<int32_t>(200, sources[0][0])};
  EXPECT_EQ(translate_ids(translator.generator(), translator.tokenizer(), longer, options.generate).size(), 1u);
}

TEST(Translator, MissingDirectoryIsAnError) {
  ThreadPool pool(1);
  EXPECT_THROW(Translator("/no/such/model", pool), Error);
}

}  // namespace
}  // namespace frit
