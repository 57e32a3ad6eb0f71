#include "frit/data/tokenizer.h"

#include <gtest/gtest.h>
#include <sentencepiece_processor.h>

#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/data/test_corpus.h"

namespace frit {
namespace {

const TemporaryDirectory& corpus() {
  static TemporaryDirectory dir;
  static const bool written = [] {
    dir.write("en", join_lines(made_up_lines(false, 600)));
    dir.write("de", join_lines(made_up_lines(true, 600)));
    return true;
  }();
  (void)written;
  return dir;
}

Tokenizer train(TokenizerTraining options) {
  return Tokenizer::train(corpus() / "en", corpus() / "de", options);
}

const Tokenizer& bpe() {
  static const Tokenizer t = train({.vocabulary = 400});
  return t;
}
const Tokenizer& unigram() {
  static const Tokenizer t = train({.model = SubwordModel::kUnigram, .vocabulary = 400});
  return t;
}

const std::vector<std::string>& awkward_texts() {
  static const std::vector<std::string> texts = {"",
                                                 "x",
                                                 "the green house",
                                                 "Grüße aus München: Äpfel, Öl, Übermut, Maß.",
                                                 "🙂 emoji 👩‍👩‍👧 and flags 🇩🇪",
                                                 "日本語 русский العربية",
                                                 std::string("a\0b\0", 4),
                                                 "tab\there, bell\a",
                                                 "½ … ﬁ Å (composed) Å (decomposed)",
                                                 "</s> <unk> <pad> <0xC3>",
                                                 ">>de<< hello",
                                                 std::string(3000, 'q'),
                                                 "\xf4\x8f\xbf\xbf end"};
  return texts;
}

TEST(Tokenizer, VocabularyHasMarianOrder) {
  for (const Tokenizer* t : {&bpe(), &unigram()}) {
    EXPECT_EQ(t->eos_id(), 0);
    EXPECT_EQ(t->unk_id(), 1);
    EXPECT_EQ(t->pad_id(), t->vocabulary_size(Side::kTarget) - 1);
    EXPECT_EQ(t->token(0), "</s>");
    EXPECT_EQ(t->token(1), "<unk>");
    EXPECT_EQ(t->token(t->pad_id()), "<pad>");
    for (int32_t id = 0; id < t->vocabulary_size(Side::kTarget); ++id) EXPECT_EQ(t->id_of(t->token(id)), id);
    EXPECT_EQ(t->id_of("no such token"), -1);
    EXPECT_THROW(t->token(t->vocabulary_size(Side::kTarget)), std::invalid_argument);
  }
  EXPECT_EQ(bpe().vocabulary_size(Side::kSource), 400);
  EXPECT_EQ(unigram().vocabulary_size(Side::kSource), 400);
  EXPECT_EQ(bpe().model(), SubwordModel::kBpe);
  EXPECT_EQ(unigram().model(), SubwordModel::kUnigram);
}

TEST(Tokenizer, ReturnsAnyTextByteForByte) {
  for (const Tokenizer* t : {&bpe(), &unigram()}) {
    for (const std::string& text : awkward_texts()) EXPECT_EQ(t->decode(t->encode(Side::kTarget, text)), text) << text;
    for (const std::string& line : made_up_lines(true, 100, 99))
      EXPECT_EQ(t->decode(t->encode(Side::kTarget, line)), line);
  }
  // Spaces at the ends and runs of them are not kept by default, and are kept on request.
  EXPECT_EQ(bpe().decode(bpe().encode(Side::kTarget, "  the   house ")), "the house");
  const Tokenizer keep = train({.vocabulary = 400, .remove_extra_spaces = false});
  for (const char* text : {"  the   house ", " ", "   ", "x  "})
    EXPECT_EQ(keep.decode(keep.encode(Side::kTarget, text)), text);
}

TEST(Tokenizer, TakesALineOf100000Characters) {
  std::string text;
  while (text.size() < 100000) text += "Straße langsam ";
  text.pop_back();
  EXPECT_EQ(bpe().decode(bpe().encode(Side::kTarget, text)), text);
}

TEST(Tokenizer, TrainingTwiceGivesTheSameBytes) {
  for (SubwordModel model : {SubwordModel::kBpe, SubwordModel::kUnigram}) {
    TemporaryDirectory a, b;
    TokenizerTraining options{.model = model, .vocabulary = 400};
    train(options).save(a.path(), "en", "de");
    train(options).save(b.path(), "en", "de");
    ASSERT_EQ(a.files(), (std::vector<std::string>{"source.spm", "special_tokens_map.json", "target.spm",
                                                   "tokenizer_config.json", "vocab.json"}));
    for (const std::string& name : a.files()) EXPECT_EQ(read_file(a / name), read_file(b / name)) << name;
    options.threads = 5;  // is noted in the model file, but BPE does not depend on it
    train(options).save(b.path(), "en", "de");
    if (model == SubwordModel::kBpe) {
      EXPECT_EQ(read_file(a / "vocab.json"), read_file(b / "vocab.json"));
    }
  }
}

TEST(Tokenizer, LearnsFromAnEvenChoiceOfTooManyLines) {
  TextCounts counts;
  TokenizerTraining options{.vocabulary = 330, .max_pairs = 200};
  const Tokenizer a = Tokenizer::train(corpus() / "en", corpus() / "de", options, {}, &counts);
  EXPECT_EQ(counts.kept, 600);
  EXPECT_EQ(a.hash(), train(options).hash());
  options.seed = 2;
  EXPECT_NE(a.hash(), train(options).hash());
}

TEST(Tokenizer, SaveAndLoadKeepsEverything) {
  TemporaryDirectory dir;
  const Tokenizer separate = train({.vocabulary = 330, .joint = false});
  EXPECT_TRUE(separate.separate_vocabularies());
  for (const Tokenizer* t : {&bpe(), &unigram(), &separate}) {
    t->save(dir / "x", "en", "de");
    const Tokenizer loaded = Tokenizer::load(dir / "x");
    EXPECT_EQ(loaded.hash(), t->hash());
    EXPECT_EQ(loaded.separate_vocabularies(), t->separate_vocabularies());
    for (Side side : {Side::kSource, Side::kTarget})
      for (const std::string& text : awkward_texts()) {
        const auto ids = t->encode(side, text);
        EXPECT_EQ(loaded.encode(side, text), ids);
        EXPECT_EQ(loaded.decode(ids, side), text);
      }
    const auto config = nlohmann::json::parse(read_file(dir / "x/tokenizer_config.json"));
    EXPECT_EQ(config["tokenizer_class"], "MarianTokenizer");
    EXPECT_EQ(config["source_lang"], "en");
    loaded.save(dir / "y");  // languages are remembered
    for (const char* name : {"tokenizer_config.json", "vocab.json", "source.spm"})
      EXPECT_EQ(read_file(dir / (std::string("y/") + name)), read_file(dir / (std::string("x/") + name)));
    std::filesystem::remove_all(dir / "x");
    std::filesystem::remove_all(dir / "y");
  }
  EXPECT_NE(separate.id_of("▁langsam", Side::kTarget), -1);
  EXPECT_EQ(separate.id_of("▁langsam", Side::kSource), -1);
}

TEST(Tokenizer, WithoutByteFallbackUnknownShows) {
  const Tokenizer t = train({.vocabulary = 150, .byte_fallback = false});
  const auto ids = t.encode(Side::kTarget, "the 🙂🙂 house");
  EXPECT_EQ(std::count(ids.begin(), ids.end(), t.unk_id()), 1);  // SentencePiece joins neighbours
  EXPECT_EQ(t.decode(ids), "the  \xe2\x81\x87  house");
}

TEST(Tokenizer, DecodesAsSentencePieceDoes) {
  TemporaryDirectory dir;
  for (bool extra : {true, false}) {
    for (SubwordModel model : {SubwordModel::kBpe, SubwordModel::kUnigram}) {
      const Tokenizer t = train({.model = model, .vocabulary = 345, .remove_extra_spaces = extra});
      t.save(dir.path());
      sentencepiece::SentencePieceProcessor reference;
      ASSERT_TRUE(reference.Load(dir / "target.spm").ok());
      for (int round = 0; round < 3000; ++round) {
        RandomStream random(3, RandomUse::kLineSample, 0, round);
        std::vector<int32_t> ids;
        std::vector<std::string> pieces;
        const uint64_t n = random.below(12);
        for (uint64_t i = 0; i < n; ++i) {
          // Half of them bytes, so that all kinds of broken characters come up.
          const uint64_t id = random.below(2) ? 2 + random.below(256) : random.below(344);
          ids.push_back(static_cast<int32_t>(id));
          pieces.push_back(t.token(static_cast<int32_t>(id)));
        }
        std::string expected;
        ASSERT_TRUE(reference.Decode(pieces, &expected).ok());
        ASSERT_EQ(t.decode(ids), expected) << testing::PrintToString(pieces);
        ASSERT_EQ(first_invalid_utf8(t.decode(ids)), -1);
      }
    }
  }
}

TEST(StreamDecoder, GivesWholeCharactersAsTheyCome) {
  const auto& t = bpe();
  StreamDecoder decoder(t);
  for (const std::string& text : awkward_texts()) {
    std::string all;
    for (int32_t id : t.encode(Side::kTarget, text)) {
      const std::string part = decoder.push(id);
      EXPECT_EQ(first_invalid_utf8(part), -1);
      all += part;
    }
    EXPECT_EQ(all + decoder.finish(), text);
  }
  // "🙂" is four byte pieces: nothing, nothing, nothing, the whole.
  std::vector<std::string> parts;
  for (const char* byte : {"<0xF0>", "<0x9F>", "<0x99>", "<0x82>"}) parts.push_back(decoder.push(t.id_of(byte)));
  EXPECT_EQ(parts, (std::vector<std::string>{"", "", "", "🙂"}));
  decoder.push(t.id_of("<0xF0>"));
  EXPECT_EQ(decoder.finish(), "\xef\xbf\xbd");
  EXPECT_THROW(decoder.push(-1), std::invalid_argument);
  EXPECT_THROW(decoder.push(400), std::invalid_argument);
}

TEST(Tokenizer, IdsComeFromVocabJsonAndLanguageCodesFirst) {
  // The form of an OPUS-MT directory: two SentencePiece models over one vocab.json in an order of its own, codes among
  // the tokens, a config that names little.
  TemporaryDirectory dir;
  const Tokenizer trained = train({.vocabulary = 150, .joint = false, .byte_fallback = false});
  trained.save(dir.path(), "en", "de");
  nlohmann::ordered_json vocabulary = {{"</s>", 0}, {"<unk>", 1}, {">>de<<", 2}, {">>fr<<", 3}};
  std::set<std::string> pieces;
  for (Side side : {Side::kSource, Side::kTarget})
    for (int32_t id = 2; id < 149; ++id) pieces.insert(trained.token(id, side));
  for (const std::string& piece : pieces) vocabulary[piece] = vocabulary.size();
  vocabulary["<pad>"] = vocabulary.size();
  dir.write("vocab.json", vocabulary.dump());
  dir.write("tokenizer_config.json", R"({"source_lang": "en", "target_lang": "de", "model_max_length": 512})");
  const Tokenizer t = Tokenizer::load(dir.path());
  EXPECT_EQ(t.vocabulary_size(Side::kSource), static_cast<int32_t>(vocabulary.size()));
  EXPECT_EQ(t.pad_id(), static_cast<int32_t>(vocabulary.size()) - 1);
  const auto plain = t.encode(Side::kSource, "the green house");
  for (int32_t id : plain) EXPECT_EQ(vocabulary[t.token(id)], id);
  auto with = plain;
  with.insert(with.begin(), 2);
  EXPECT_EQ(t.encode(Side::kSource, ">>de<< the green house"), with);
  EXPECT_EQ(t.encode(Side::kSource, ">>de<<the green house"), with);
  with[0] = t.unk_id();
  EXPECT_EQ(t.encode(Side::kSource, ">>xx<< the green house"), with);
  // A character that only the target's model knows has an id in the shared vocabulary all the same.
  EXPECT_EQ(t.encode(Side::kSource, "ß"), (std::vector<int32_t>{vocabulary["▁"], vocabulary["ß"]}));
  EXPECT_EQ(t.decode(t.encode(Side::kTarget, "das grüne Haus")), "das grüne Haus");
}

// A directory with fairseq's dictionaries: <s>, <pad>, </s>, <unk>, then the lines of a file, most frequent first.
TEST(Tokenizer, IdsComeFromFairseqDictionaries) {
  TemporaryDirectory marian, dir;
  const Tokenizer trained = train({.vocabulary = 150, .byte_fallback = false});
  trained.save(marian.path());
  dir.write("sentencepiece.bpe.model", read_file(marian / "source.spm"));
  std::string all, fewer;
  for (int32_t id = 148; id >= 2; --id) {
    const std::string line = trained.token(id) + " " + std::to_string(id) + "\n";
    all += line;
    if (id >= 60) fewer += line;
  }
  dir.write("dict.txt", all + "madeupword0000 0\n");
  const std::string text = "the green house", german = "das grüne Haus";
  {
    const Tokenizer t = Tokenizer::load(dir.path());
    EXPECT_EQ(t.pad_id(), 1);
    EXPECT_EQ(t.eos_id(), 2);
    EXPECT_EQ(t.unk_id(), 3);
    EXPECT_EQ(t.id_of("<s>"), 0);
    EXPECT_EQ(t.vocabulary_size(Side::kSource), 4 + 147 + 1);
    EXPECT_FALSE(t.separate_vocabularies());
    std::vector<int32_t> expected;
    for (const int32_t id : trained.encode(Side::kSource, text)) expected.push_back(4 + 148 - id);
    EXPECT_EQ(t.encode(Side::kSource, text), expected);
    std::vector<int32_t> ids = t.encode(Side::kTarget, german);
    ids.insert(ids.begin(), 0), ids.push_back(2);
    EXPECT_EQ(t.decode(ids), german);
    // What is saved has the layout of a Marian directory and the same ids.
    t.save(dir / "saved");
    const Tokenizer back = Tokenizer::load(dir / "saved");
    EXPECT_EQ(back.hash(), t.hash());
    EXPECT_EQ(back.decode(ids), german);
  }
  // A dictionary of each language, which may lack most pieces of the one model.
  std::filesystem::remove(dir / "dict.txt");
  EXPECT_NE(error_of([&] { Tokenizer::load(dir.path()); }).find("expected dict.txt"), std::string::npos);
  dir.write("dict.en.txt", fewer);
  dir.write("dict.de.txt", all);
  for (const char* config : {R"({"source_lang": "en", "target_lang": "de"})", R"({"langs": ["en", "de"]})"}) {
    dir.write("config.json", config);
    const Tokenizer t = Tokenizer::load(dir.path());
    EXPECT_TRUE(t.separate_vocabularies());
    EXPECT_EQ(t.vocabulary_size(Side::kSource), 4 + 89);
    EXPECT_EQ(t.vocabulary_size(Side::kTarget), 4 + 147);
    EXPECT_EQ(t.decode(t.encode(Side::kTarget, german)), german);
  }
  const auto with = [&](const std::string& dictionary) {
    dir.write("dict.txt", dictionary);
    return error_of([&] { Tokenizer::load(dir.path()); });
  };
  EXPECT_NE(with(all + "lonely\n").find("dict.txt:148: expected a token, a space and its count"), std::string::npos);
  EXPECT_NE(with(all + "<unk> 7\n").find("dict.txt:148: <unk> is there already"), std::string::npos);
  EXPECT_EQ(with(all + "<unk> 7 #fairseq:overwrite\n"), "no error");
  EXPECT_EQ(Tokenizer::load(dir.path()).unk_id(), 4 + 147);
  std::filesystem::remove(dir / "sentencepiece.bpe.model");
  EXPECT_NE(with(all).find("no SentencePiece model"), std::string::npos);
  dir.write("bpecodes", "#version: 0.2\n");
  EXPECT_NE(with(all).find("bpecodes belongs to subword-nmt's BPE"), std::string::npos);
}

TEST(Tokenizer, EqualsTransformersOnAMarianDirectory) {
  // tools/data/make_tokenizer_golden.py made this directory and golden.json.
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  const std::string directory = std::string(root ? root : ".") + "/frit/data/testdata/marian";
  const Tokenizer t = Tokenizer::load(directory);
  const auto golden = nlohmann::json::parse(read_file(directory + "/golden.json"));
  ASSERT_GT(golden["lines"].size(), 30u);
  for (const auto& line : golden["lines"]) {
    const std::string text = line["text"];
    for (Side side : {Side::kSource, Side::kTarget}) {
      auto ids = t.encode(side, text);
      ids.push_back(t.eos_id(side));
      EXPECT_EQ(ids, line[side == Side::kSource ? "source" : "target"].get<std::vector<int32_t>>()) << text;
    }
    auto ids = t.encode(Side::kTarget, text);
    std::erase(ids, t.unk_id());
    std::string decoded = t.decode(ids);
    while (decoded.ends_with(' ')) decoded.pop_back();  // transformers strips both ends
    EXPECT_EQ(decoded, line["decoded"].get<std::string>());
  }
}

TEST(Tokenizer, BrokenDirectoriesAreRefusedInSilence) {
  TemporaryDirectory good;
  bpe().save(good.path());
  auto broken = [&](const std::string& name, const std::string* bytes) {
    TemporaryDirectory dir;
    for (const std::string& file : good.files()) std::filesystem::copy(good / file, dir / file);
    if (bytes)
      dir.write(name, *bytes);
    else
      std::filesystem::remove(dir / name);
    testing::internal::CaptureStderr();
    const std::string error = error_of([&] { Tokenizer::load(dir.path()); });
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << name;
    const size_t at = error.find(dir.path());
    return at == std::string::npos ? error : error.substr(0, at) + error.substr(at + dir.path().size());
  };
  auto with = [&](const std::string& name, const std::string& bytes) { return broken(name, &bytes); };
  EXPECT_EQ(broken("vocab.json", nullptr), "[file] cannot open /vocab.json: No such file or directory");
  EXPECT_EQ(broken("source.spm", nullptr), "[file] cannot open /source.spm: No such file or directory");
  EXPECT_NE(with("source.spm", "").find("source.spm is not a SentencePiece model"), std::string::npos);
  EXPECT_NE(with("source.spm", "rubbish").find("source.spm is not a SentencePiece model"), std::string::npos);
  const std::string model = read_file(good / "source.spm");
  EXPECT_NE(with("source.spm", model.substr(0, model.size() / 2)).find("source.spm"), std::string::npos);
  EXPECT_NE(with("vocab.json", "{").find("vocab.json is not JSON"), std::string::npos);
  EXPECT_NE(with("vocab.json", "[]").find("does not map tokens to ids"), std::string::npos);
  EXPECT_NE(with("vocab.json", R"({"</s>": 0, "<unk>": 1})").find("holds no <pad>"), std::string::npos);
  EXPECT_NE(with("vocab.json", R"({"</s>": 0, "<unk>": 0, "<pad>": 1})").find("have the same id 0"), std::string::npos);
  EXPECT_NE(with("vocab.json", R"({"</s>": 0, "<unk>": -1, "<pad>": 1})").find("the id of <unk> is -1"),
            std::string::npos);
  EXPECT_NE(with("vocab.json", R"({"</s>": 0, "<unk>": 1, "<pad>": 2})")
                .find("only 2 of its 399 pieces are in the vocabulary"),
            std::string::npos);
  EXPECT_NE(with("tokenizer_config.json", R"({"separate_vocabs": true})").find("target_vocab.json"), std::string::npos);
  EXPECT_EQ(broken("special_tokens_map.json", nullptr), "no error");
  EXPECT_EQ(broken("tokenizer_config.json", nullptr), "no error");
}

TEST(Tokenizer, TrainingErrorsAreClearAndSilent) {
  testing::internal::CaptureStderr();
  EXPECT_NE(
      error_of([] { train({.vocabulary = 100}); }).find("vocabulary is 100, expected at least 260 with byte fallback"),
      std::string::npos);
  EXPECT_NE(error_of([] { train({.normalization = "nfd"}); }).find("normalization is nfd"), std::string::npos);
  EXPECT_NE(error_of([] { train({.vocabulary = 20000}); }).find("20000"), std::string::npos);
  EXPECT_NE(error_of([] { train({.model = SubwordModel::kUnigram, .vocabulary = 20000}); }).find("19999 pieces"),
            std::string::npos);
  EXPECT_NE(error_of([] { train({.vocabulary = 260}); }), "no error");  // not even the characters fit
  TemporaryDirectory dir;
  dir.write("a", "\n\n"), dir.write("b", "\n\n");
  EXPECT_NE(error_of([&] { Tokenizer::train(dir / "a", dir / "b", {}); }).find("hold no text to learn from"),
            std::string::npos);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Tokenizer, TrainingOnAwkwardTextWorks) {
  TemporaryDirectory dir;
  std::string text = join_lines(made_up_lines(true, 100));
  for (const std::string& line : awkward_texts()) text += line + "\n";
  text += std::string(100000, 'w') + "\n";
  dir.write("a", text);
  for (SubwordModel model : {SubwordModel::kBpe, SubwordModel::kUnigram}) {
    const Tokenizer t = Tokenizer::train(dir / "a", dir / "a", {.model = model, .vocabulary = 400});
    for (const std::string& line : awkward_texts()) EXPECT_EQ(t.decode(t.encode(Side::kTarget, line)), line);
  }
}

TEST(SubwordSampling, WithoutChanceItIsTheStoredSegmentation) {
  // Our own merges with dropout 0 equal SentencePiece's; alpha must be above 0 to be active, so take one that never
  // drops.
  const auto& t = bpe();
  int64_t same = 0;
  for (const std::string& line : made_up_lines(true, 300, 5)) {
    const auto ids = t.encode(Side::kTarget, line);
    std::vector<int32_t> out;
    t.resample(Side::kTarget, ids, {.alpha = 1e-9f}, 0, 0, &out);
    same += out == ids;
  }
  EXPECT_EQ(same, 300);
  // Unigram with a large exponent takes the best one, too.
  const auto& u = unigram();
  for (const std::string& line : made_up_lines(true, 100, 5)) {
    const auto ids = u.encode(Side::kTarget, line);
    for (int nbest : {-1, 4}) {
      std::vector<int32_t> out;
      u.resample(Side::kTarget, ids, {.alpha = 1e6f, .nbest = nbest}, 0, 0, &out);
      EXPECT_EQ(u.decode(out), line);
      EXPECT_EQ(out.size(), ids.size());
    }
  }
}

TEST(SubwordSampling, KeepsTextAndFollowsSeedEpochAndSentence) {
  for (const Tokenizer* t : {&bpe(), &unigram()}) {
    const float alpha = t == &bpe() ? 0.3f : 0.05f;
    const SubwordSampling sampling{.alpha = alpha, .seed = 11};
    int64_t changed = 0, other_epoch = 0, other_sentence = 0, other_seed = 0, other_side = 0;
    const auto lines = made_up_lines(true, 200, 6);
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string line = lines[i] + " 🙂</s>";
      auto ids = t->encode(Side::kTarget, line);
      ids.push_back(t->eos_id());
      auto sample = [&](Side side, SubwordSampling s, int64_t epoch, int64_t sentence) {
        std::vector<int32_t> out;
        t->resample(side, ids, s, epoch, sentence, &out);
        EXPECT_EQ(t->decode(out), line);
        EXPECT_EQ(out.back(), t->eos_id());
        return out;
      };
      const auto a = sample(Side::kTarget, sampling, 3, static_cast<int64_t>(i));
      EXPECT_EQ(a, sample(Side::kTarget, sampling, 3, static_cast<int64_t>(i)));
      changed += a != ids;
      other_epoch += a != sample(Side::kTarget, sampling, 4, static_cast<int64_t>(i));
      other_sentence += a != sample(Side::kTarget, sampling, 3, static_cast<int64_t>(i) + (int64_t{1} << 33));
      other_seed += a != sample(Side::kTarget, {.alpha = alpha, .seed = 12}, 3, static_cast<int64_t>(i));
      other_side += a != sample(Side::kSource, sampling, 3, static_cast<int64_t>(i));
    }
    for (int64_t n : {changed, other_epoch, other_sentence, other_seed, other_side}) EXPECT_GT(n, 150);
  }
}

TEST(SubwordSampling, UnigramDrawsWithTheRightProbability) {
  // Every segmentation of one word, by brute force over the pieces, against how often it is drawn.
  TemporaryDirectory dir;
  unigram().save(dir.path());
  sentencepiece::SentencePieceProcessor reference;
  ASSERT_TRUE(reference.Load(dir / "target.spm").ok());
  const auto ids = unigram().encode(Side::kTarget, "langsamer");
  std::string text;
  for (int32_t id : ids) text += unigram().token(id);
  std::map<std::vector<int32_t>, double> weight;
  const float alpha = 0.4f;
  std::vector<int32_t> prefix;
  std::function<void(size_t, double)> walk = [&](size_t at, double score) {
    if (at == text.size()) weight[prefix] = std::exp(alpha * score);
    for (size_t n = 1; at + n <= text.size(); ++n) {
      const int32_t id = unigram().id_of(text.substr(at, n));
      if (id < 0 || id >= unigram().pad_id()) continue;
      prefix.push_back(id);
      walk(at + n, score + reference.GetScore(id));
      prefix.pop_back();
    }
  };
  walk(0, 0);
  ASSERT_GT(weight.size(), 3u);
  std::vector<double> sorted;
  for (const auto& [way, w] : weight) sorted.push_back(w);
  std::sort(sorted.rbegin(), sorted.rend());
  const int draws = 20000, nbest = 3;
  for (int n : {-1, nbest}) {
    const double least = n < 0 ? 0 : sorted[nbest - 1];
    double sum = 0;
    for (double w : sorted) sum += w >= least ? w : 0;
    std::map<std::vector<int32_t>, int> drawn;
    for (int i = 0; i < draws; ++i) {
      std::vector<int32_t> out;
      unigram().resample(Side::kTarget, ids, {.alpha = alpha, .nbest = n}, 0, i, &out);
      ++drawn[out];
    }
    double chi2 = 0, rare = 0, rare_drawn = 0;
    int cells = 0;
    for (const auto& [way, w] : weight) {
      const double expected = w >= least ? draws * w / sum : 0;
      if (expected < 5) {
        rare += expected, rare_drawn += drawn[way];
        continue;
      }
      chi2 += (drawn[way] - expected) * (drawn[way] - expected) / expected;
      ++cells;
    }
    EXPECT_LT(chi2, cells + 5 * std::sqrt(2.0 * cells) + 5) << cells << " segmentations";
    EXPECT_LE(std::abs(rare_drawn - rare), 6 * std::sqrt(rare) + 1e-9);
  }
}

TEST(SubwordSampling, BpeDropsTheShareOfMergesAskedFor) {
  // "ab" with the single merge a+b: kept as one piece with chance 1 - alpha.
  SubwordSampling sampling{.alpha = 0.25f};
  const auto& t = bpe();
  // With alpha 1 no merge happens at all: characters alone.
  const auto ids = t.encode(Side::kTarget, "langsam");
  std::vector<int32_t> out;
  t.resample(Side::kTarget, ids, {.alpha = 1.0f}, 0, 0, &out);
  EXPECT_EQ(out.size(), 8u);  // ▁ and seven letters
  // Longer on average with more dropout.
  size_t lengths[3] = {};
  for (int i = 0; i < 2000; ++i)
    for (int k = 0; k < 3; ++k) {
      out.clear();
      sampling.alpha = 0.05f + 0.3f * static_cast<float>(k);
      t.resample(Side::kTarget, ids, sampling, 0, i, &out);
      lengths[k] += out.size();
    }
  EXPECT_LT(lengths[0], lengths[1]);
  EXPECT_LT(lengths[1], lengths[2]);
}

}  // namespace
}  // namespace frit
