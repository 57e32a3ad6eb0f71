#include "frit/data/tokenizer.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/data/hash.h"
#include "frit/data/random.h"
#include "frit/data/sentencepiece_training.h"
#include "frit/data/subwords.h"

namespace frit {
namespace {

using Json = nlohmann::ordered_json;
// For vocabularies: an ordered_json looks through all its keys at every new one.
using VocabularyJson = nlohmann::json;
constexpr std::string_view kSpace = "\xe2\x96\x81";        // U+2581, a space inside a piece
constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD
constexpr std::string_view kUnknown = " \xe2\x81\x87 ";    // U+2047, as SentencePiece shows it

// What of a SentencePiece model file its library does not tell.
struct ModelTraits {
  SubwordModel model = SubwordModel::kUnigram;
  bool dummy_prefix = true, remove_extra_spaces = true;
};

// Walks the fields of a serialised protobuf message. Source: the protobuf encoding, sentencepiece_model.proto.
class ProtoFields {
 public:
  explicit ProtoFields(std::string_view bytes) : rest_(bytes) {}
  // The next field; value for numbers, bytes for messages and strings. false at the end or when broken.
  bool next(uint32_t* field, uint64_t* value, std::string_view* bytes) {
    uint64_t tag, length;
    if (rest_.empty() || !varint(&tag)) return false;
    *field = static_cast<uint32_t>(tag >> 3), *value = 0, *bytes = {};
    switch (tag & 7) {
      case 0:
        return varint(value);
      case 1:
        return take(8, bytes);
      case 2:
        return varint(&length) && take(length, bytes);
      case 5:
        return take(4, bytes);
      default:
        return false;
    }
  }

 private:
  bool varint(uint64_t* value) {
    *value = 0;
    for (int shift = 0; shift < 64 && !rest_.empty(); shift += 7) {
      const auto byte = static_cast<unsigned char>(rest_.front());
      rest_.remove_prefix(1);
      *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }
  bool take(uint64_t length, std::string_view* bytes) {
    if (length > rest_.size()) return false;
    *bytes = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return true;
  }
  std::string_view rest_;
};

ModelTraits read_traits(std::string_view model, const std::string& path) {
  ModelTraits traits;
  uint32_t field, inner;
  uint64_t value;
  std::string_view bytes, ignored;
  for (ProtoFields fields(model); fields.next(&field, &value, &bytes);) {
    if (field == 2) {  // trainer_spec
      for (ProtoFields spec(bytes); spec.next(&inner, &value, &ignored);) {
        if (inner != 3) continue;  // model_type
        if (value != 1 && value != 2)
          fail("[tokenizer] {} is a word or character model, expected unigram or BPE", path);
        traits.model = value == 2 ? SubwordModel::kBpe : SubwordModel::kUnigram;
      }
    } else if (field == 3) {  // normalizer_spec
      for (ProtoFields spec(bytes); spec.next(&inner, &value, &ignored);) {
        if (inner == 3) traits.dummy_prefix = value != 0;
        if (inner == 4) traits.remove_extra_spaces = value != 0;
      }
    }
  }
  return traits;
}

struct Model {
  std::string bytes;
  ModelTraits traits;
  sentencepiece::SentencePieceProcessor processor;
};

std::shared_ptr<const Model> make_model(std::string bytes, const std::string& path) {
  auto model = std::make_shared<Model>();
  const auto status = model->processor.LoadFromSerializedProto(bytes);
  if (!status.ok() || model->processor.GetPieceSize() == 0)
    fail("[tokenizer] {} is not a SentencePiece model: {}", path,
         status.ok() ? "it holds no pieces" : status.message());
  model->traits = read_traits(bytes, path);
  model->bytes = std::move(bytes);
  return model;
}

enum class Kind : uint8_t { kText, kByte, kUnknown, kSpecial };

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

struct Vocabulary {
  std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>> ids;
  std::vector<std::string> tokens;  // by id
  std::vector<std::string> texts;   // by id: what it adds to the text
  std::vector<Kind> kinds;          // by id
  int32_t eos = -1, unk = -1, pad = -1;
  bool has_codes = false;  // tokens such as >>de<<

  int32_t find(std::string_view token) const {
    const auto it = ids.find(token);
    return it == ids.end() ? -1 : it->second;
  }
};

struct SpecialTokens {
  std::string eos = "</s>", unk = "<unk>", pad = "<pad>";
  std::string bos;  // shows as no text; empty: there is none
};

// The byte of a piece such as <0xC3>, or -1.
int byte_of(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') return -1;
  int value = 0;
  for (char c : token.substr(3, 2)) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
    if (digit < 0) return -1;
    value = value * 16 + digit;
  }
  return value;
}

bool is_byte_piece(const sentencepiece::SentencePieceProcessor& processor, const std::string& token) {
  const int id = processor.PieceToId(token);
  return processor.IsByte(id) && processor.IdToPiece(id) == token;
}

std::shared_ptr<const Vocabulary> make_vocabulary(const VocabularyJson& json, const std::string& path,
                                                  const SpecialTokens& special,
                                                  const std::vector<const Model*>& models) {
  if (!json.is_object() || json.empty()) fail("[tokenizer] {} does not map tokens to ids", path);
  auto vocabulary = std::make_shared<Vocabulary>();
  int64_t top = -1;
  for (const auto& [token, id] : json.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= (int64_t{1} << 26))
      fail("[tokenizer] {}: the id of {} is {}, expected a number from 0 on", path, token, id.dump());
    top = std::max(top, id.get<int64_t>());
  }
  vocabulary->tokens.resize(static_cast<size_t>(top) + 1);
  std::vector<bool> taken(vocabulary->tokens.size());
  for (const auto& [token, json_id] : json.items()) {
    const auto id = json_id.get<int32_t>();
    if (taken[static_cast<size_t>(id)])
      fail("[tokenizer] {}: {} and {} have the same id {}", path, vocabulary->tokens[static_cast<size_t>(id)], token,
           id);
    taken[static_cast<size_t>(id)] = true;
    vocabulary->tokens[static_cast<size_t>(id)] = token;
    vocabulary->ids.emplace(token, id);
    if (token.size() > 4 && token.starts_with(">>") && token.ends_with("<<")) vocabulary->has_codes = true;
  }
  auto require = [&](const std::string& token) {
    const int32_t id = vocabulary->find(token);
    if (id < 0) fail("[tokenizer] {} holds no {}", path, token);
    return id;
  };
  vocabulary->eos = require(special.eos), vocabulary->unk = require(special.unk),
  vocabulary->pad = require(special.pad);
  const int32_t bos = special.bos.empty() ? -1 : vocabulary->find(special.bos);
  for (size_t i = 0; i < vocabulary->tokens.size(); ++i) {
    const std::string& token = vocabulary->tokens[i];
    const auto id = static_cast<int32_t>(i);
    const int byte = byte_of(token);
    Kind kind = Kind::kText;
    std::string text;
    if (id == vocabulary->eos || id == vocabulary->pad || id == bos) {
      kind = Kind::kSpecial;
    } else if (id == vocabulary->unk) {
      kind = Kind::kUnknown;
    } else if (byte >= 0 && std::any_of(models.begin(), models.end(),
                                        [&](const Model* m) { return is_byte_piece(m->processor, token); })) {
      kind = Kind::kByte;
      text = std::string(1, static_cast<char>(byte));
    } else {
      for (size_t at = 0; at < token.size();) {
        const bool space = std::string_view(token).substr(at, kSpace.size()) == kSpace;
        text += space ? ' ' : token[at];
        at += space ? kSpace.size() : 1;
      }
    }
    vocabulary->kinds.push_back(kind);
    vocabulary->texts.push_back(std::move(text));
  }
  return vocabulary;
}

template <typename J = Json>
J parse_json(const std::string& path) {
  try {
    return J::parse(read_file(path));
  } catch (const nlohmann::json::exception& e) {
    fail("[tokenizer] {} is not JSON: {}", path, e.what());
  }
}

// One side: how its SentencePiece model's pieces map to its vocabulary.
struct SideTables {
  std::shared_ptr<const Model> model;
  std::shared_ptr<const Vocabulary> vocabulary;
  std::vector<int32_t> id_of_piece;
  SubwordTable subwords;

  void build(const std::string& path) {
    const auto& p = model->processor;
    int32_t known = 0, known_texts = 0;
    for (int piece = 0; piece < p.GetPieceSize(); ++piece) {
      const std::string& text = p.IdToPiece(piece);
      const int32_t id = vocabulary->find(text);
      known += id >= 0;
      known_texts += id >= 0 && !p.IsUnknown(piece) && !p.IsControl(piece);
      id_of_piece.push_back(id >= 0 ? id : vocabulary->unk);
      if (id >= 0 && !p.IsUnknown(piece) && !p.IsControl(piece) && !p.IsByte(piece) && !p.IsUnused(piece))
        subwords.add(text, id, p.GetScore(piece));
    }
    // A foreign vocabulary would turn everything into <unk>. One of a single language may lack most of a joint model's.
    if (known_texts * 2 < std::min(p.GetPieceSize(), static_cast<int>(vocabulary->tokens.size())))
      fail("[tokenizer] {}: only {} of its {} pieces are in the vocabulary", path, known, p.GetPieceSize());
  }
};

}  // namespace

struct Tokenizer::Impl {
  SideTables sides[2];
  SpecialTokens special;
  std::string languages[2];
  bool separate = false;
  int64_t model_max_length = 512;
  uint64_t hash = 0;

  const SideTables& side(Side s) const { return sides[static_cast<int>(s)]; }
  const Vocabulary& vocabulary(Side s) const { return *side(s).vocabulary; }

  static std::shared_ptr<const Impl> make(std::shared_ptr<const Model> source, std::shared_ptr<const Model> target,
                                          const VocabularyJson& vocabulary, const VocabularyJson* target_vocabulary,
                                          Impl settings, const std::string& directory) {
    auto impl = std::make_shared<Impl>(std::move(settings));
    impl->separate = target_vocabulary != nullptr;
    std::vector<const Model*> models = {source.get()};
    if (!impl->separate) models.push_back(target.get());
    auto& [s, t] = impl->sides;
    s.vocabulary = t.vocabulary = make_vocabulary(vocabulary, directory + "vocab.json", impl->special, models);
    if (impl->separate)
      t.vocabulary =
          make_vocabulary(*target_vocabulary, directory + "target_vocab.json", impl->special, {target.get()});
    s.model = std::move(source), t.model = std::move(target);
    s.build(directory + "source.spm");
    t.build(directory + "target.spm");
    Hash64 hash;
    for (const SideTables& side : impl->sides) {
      hash.update_number(side.model->bytes.size());
      hash.update(side.model->bytes);
      hash.update_number(side.vocabulary->tokens.size());
      for (const std::string& token : side.vocabulary->tokens) hash.update(token), hash.update_number(token.size());
      hash.update_number(static_cast<uint64_t>(side.vocabulary->eos));
      hash.update_number(static_cast<uint64_t>(side.vocabulary->unk));
      hash.update_number(static_cast<uint64_t>(side.vocabulary->pad));
    }
    impl->hash = hash.value();
    return impl;
  }
};

namespace {

// The vocabulary of a model trained here: its pieces in order, then <pad>.
VocabularyJson vocabulary_of(const Model& model) {
  VocabularyJson json = VocabularyJson::object();
  for (int i = 0; i < model.processor.GetPieceSize(); ++i) json[model.processor.IdToPiece(i)] = i;
  json["<pad>"] = model.processor.GetPieceSize();
  return json;
}

// A fairseq dictionary: four special tokens, then a token and its count a line. A token that is there already may come
// again with a mark, and has the later id then.
VocabularyJson read_dictionary(const std::string& path) {
  constexpr std::string_view kOverwrite = "#fairseq:overwrite";
  const std::string text = read_file(path);
  VocabularyJson json = {{"<s>", 0}, {"<pad>", 1}, {"</s>", 2}, {"<unk>", 3}};
  int32_t id = 4, number = 0;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    std::string_view line = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    // The last field, or "" if there is none to part.
    const auto cut = [&]() -> std::string_view {
      const size_t space = line.rfind(' ');
      if (space == std::string_view::npos) return {};
      const std::string_view field = line.substr(space + 1);
      line = line.substr(0, space);
      return field;
    };
    std::string_view count = cut();
    const bool overwrite = count == kOverwrite;
    if (overwrite) count = cut();
    if (line.empty() || count.empty() || count.find_first_not_of("-0123456789") != std::string_view::npos)
      fail("[tokenizer] {}:{}: expected a token, a space and its count", path, number);
    if (first_invalid_utf8(line) >= 0) fail("[tokenizer] {}:{}: invalid UTF-8", path, number);
    const std::string token(line);
    if (json.contains(token) && !overwrite)
      fail("[tokenizer] {}:{}: {} is there already, and the line has no {}", path, number, token, kOverwrite);
    json[token] = id++;
  }
  return json;
}

struct FairseqFiles {
  std::string source_dictionary, target_dictionary;  // empty: the directory has no dictionary
  std::string source_model, target_model;
  std::string source_language, target_language;
};

// The text side of a directory with a fairseq checkpoint: dict.txt, or dict.SOURCE.txt and dict.TARGET.txt with the
// languages of config.json; source.spm and target.spm, or one model for both.
// Errors: frit::Error if the rest of them is missing, and for subword-nmt's BPE.
FairseqFiles find_fairseq_files(const std::string& base) {
  namespace fs = std::filesystem;
  const auto there = [&](const std::string& name) { return fs::exists(base + name); };
  FairseqFiles files;
  if (there("config.json")) {
    const Json config = parse_json(base + "config.json");
    const auto language = [&](const char* key, size_t index) {
      if (!config.is_object()) return std::string();
      if (const auto it = config.find(key); it != config.end() && it->is_string()) return it->get<std::string>();
      if (const auto it = config.find("langs"); it != config.end() && it->is_array() && it->size() == 2)
        if ((*it)[index].is_string()) return (*it)[index].get<std::string>();
      return std::string();
    };
    files.source_language = language("source_lang", 0), files.target_language = language("target_lang", 1);
  }
  const std::string source = "dict." + files.source_language + ".txt",
                    target = "dict." + files.target_language + ".txt";
  if (there("dict.txt")) {
    files.source_dictionary = files.target_dictionary = base + "dict.txt";
  } else if (!files.source_language.empty() && !files.target_language.empty() && there(source) && there(target)) {
    files.source_dictionary = base + source, files.target_dictionary = base + target;
  }
  if (there("source.spm") && there("target.spm")) {
    files.source_model = base + "source.spm", files.target_model = base + "target.spm";
    return files;
  }
  for (const char* name : {"sentencepiece.bpe.model", "sentencepiece.model", "spm.model"})
    if (files.source_model.empty() && there(name)) files.source_model = files.target_model = base + name;
  const bool has_model = !files.source_model.empty(), has_dictionary = !files.source_dictionary.empty();
  if (has_model && !has_dictionary)
    fail(
        "[tokenizer] {} has neither vocab.json nor a dictionary: expected dict.txt, or {} and {} (the languages are "
        "source_lang and target_lang of config.json)",
        base, source, target);
  if (has_model) return files;
  for (const char* name : {"bpecodes", "codes", "merges.txt", "vocab-src.json"})
    if (there(name))
      fail(
          "[tokenizer] {}{} belongs to subword-nmt's BPE, with which Frit cannot read and write text: it takes "
          "SentencePiece models. Token ids work: Transformer and Generator (frit/infer/generate.h)",
          base, name);
  if (has_dictionary)
    fail(
        "[tokenizer] {} has a dictionary, but no SentencePiece model: expected source.spm and target.spm, "
        "sentencepiece.bpe.model, sentencepiece.model or spm.model",
        base);
  return files;
}

struct SampledPair {
  int64_t number;
  std::string source, target;
};

// Every pair if there are at most max_pairs, else that many, chosen evenly; in file order.
std::vector<SampledPair> sample_pairs(ParallelReader& reader, int64_t max_pairs, uint64_t seed) {
  std::vector<SampledPair> pairs;
  std::string_view source, target;
  for (int64_t number = 0; reader.next(&source, &target); ++number) {
    if (number < max_pairs) {
      pairs.push_back({number, std::string(source), std::string(target)});
      continue;
    }
    const uint64_t place =
        RandomStream(seed, RandomUse::kLineSample, 0, number).below(static_cast<uint64_t>(number) + 1);
    if (place < pairs.size()) pairs[place] = {number, std::string(source), std::string(target)};
  }
  std::sort(pairs.begin(), pairs.end(), [](const SampledPair& a, const SampledPair& b) { return a.number < b.number; });
  return pairs;
}

}  // namespace

Tokenizer Tokenizer::train(const std::string& source_path, const std::string& target_path,
                           const TokenizerTraining& options, const TextOptions& text, TextCounts* counts) {
  static const char* const kNormalizations[] = {"identity", "nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"};
  FRIT_CHECK(std::find(std::begin(kNormalizations), std::end(kNormalizations), options.normalization) !=
                 std::end(kNormalizations),
             "[tokenizer] normalization is {}, expected identity, nmt_nfkc, nfkc, nmt_nfkc_cf or nfkc_cf",
             options.normalization);
  const int32_t least = options.byte_fallback ? 3 + 256 + 1 : 3 + 1;
  FRIT_CHECK(options.vocabulary >= least, "[tokenizer] vocabulary is {}, expected at least {}{}", options.vocabulary,
             least, options.byte_fallback ? " with byte fallback (256 of them are bytes)" : "");
  FRIT_CHECK(options.character_coverage >= 0 && options.character_coverage <= 1,
             "[tokenizer] character_coverage is {}, expected 0 to 1", options.character_coverage);
  FRIT_CHECK(options.threads >= 1 && options.max_pairs >= 1,
             "[tokenizer] threads is {} and max_pairs {}, expected at least 1", options.threads, options.max_pairs);
  ParallelReader reader(source_path, target_path, text);
  const std::vector<SampledPair> pairs = sample_pairs(reader, options.max_pairs, options.seed);
  if (counts != nullptr) *counts = reader.counts();
  if (pairs.empty()) fail("[tokenizer] {} and {} hold no text to learn from", source_path, target_path);

  auto train_on = [&](bool source, bool target, const char* name) {
    std::vector<std::string_view> lines;
    for (const SampledPair& pair : pairs) {
      if (source) lines.emplace_back(pair.source);
      if (target) lines.emplace_back(pair.target);
    }
    auto model = make_model(train_sentencepiece(lines, options, options.vocabulary - 1), name);
    // BPE stops without an error when no merge is left.
    if (model->processor.GetPieceSize() != options.vocabulary - 1)
      fail("[tokenizer] the text fills a vocabulary of {}, {} was asked for", model->processor.GetPieceSize() + 1,
           options.vocabulary);
    return model;
  };
  if (options.joint) {
    auto model = train_on(true, true, "the trained model");
    const VocabularyJson vocabulary = vocabulary_of(*model);
    return Tokenizer(Impl::make(model, model, vocabulary, nullptr, Impl(), ""));
  }
  auto source = train_on(true, false, "the trained source model"),
       target = train_on(false, true, "the trained target model");
  const VocabularyJson source_vocabulary = vocabulary_of(*source), target_vocabulary = vocabulary_of(*target);
  return Tokenizer(Impl::make(source, target, source_vocabulary, &target_vocabulary, Impl(), ""));
}

Tokenizer Tokenizer::load(const std::string& directory) {
  const std::string base = directory.empty() || directory.back() == '/' ? directory : directory + "/";
  Impl settings;
  if (!std::filesystem::exists(base + "vocab.json")) {
    if (const FairseqFiles files = find_fairseq_files(base); !files.source_dictionary.empty()) {
      settings.special.bos = "<s>";
      settings.languages[0] = files.source_language, settings.languages[1] = files.target_language;
      const VocabularyJson source_vocabulary = read_dictionary(files.source_dictionary);
      VocabularyJson target_vocabulary = read_dictionary(files.target_dictionary);
      const bool joined = source_vocabulary == target_vocabulary;
      auto source = make_model(read_file(files.source_model), files.source_model);
      auto target = files.source_model == files.target_model
                        ? source
                        : make_model(read_file(files.target_model), files.target_model);
      return Tokenizer(Impl::make(source, target, source_vocabulary, joined ? nullptr : &target_vocabulary,
                                  std::move(settings), base));
    }
  }
  bool separate = false;
  if (std::filesystem::exists(base + "tokenizer_config.json")) {
    const Json config = parse_json(base + "tokenizer_config.json");
    if (!config.is_object()) fail("[tokenizer] {}tokenizer_config.json is not an object", base);
    auto text_of = [&](const char* key, std::string* value) {
      const auto it = config.find(key);
      if (it == config.end()) return;
      if (it->is_string()) *value = it->get<std::string>();
      if (it->is_object() && it->contains("content") && (*it)["content"].is_string())
        *value = (*it)["content"].get<std::string>();
    };
    text_of("eos_token", &settings.special.eos);
    text_of("unk_token", &settings.special.unk);
    text_of("pad_token", &settings.special.pad);
    text_of("bos_token", &settings.special.bos);
    text_of("source_lang", &settings.languages[0]);
    text_of("target_lang", &settings.languages[1]);
    if (const auto it = config.find("separate_vocabs"); it != config.end() && it->is_boolean())
      separate = it->get<bool>();
    // transformers writes 1e30 for "no limit", which no integer holds.
    if (const auto it = config.find("model_max_length");
        it != config.end() && it->is_number_integer() && it->get<double>() < 1e9)
      settings.model_max_length = it->get<int64_t>();
  }
  std::string source_bytes = read_file(base + "source.spm"), target_bytes = read_file(base + "target.spm");
  const bool same = source_bytes == target_bytes;
  auto source = make_model(std::move(source_bytes), base + "source.spm");
  auto target = same ? source : make_model(std::move(target_bytes), base + "target.spm");
  const auto vocabulary = parse_json<VocabularyJson>(base + "vocab.json");
  const auto target_vocabulary = separate ? parse_json<VocabularyJson>(base + "target_vocab.json") : VocabularyJson();
  return Tokenizer(
      Impl::make(source, target, vocabulary, separate ? &target_vocabulary : nullptr, std::move(settings), base));
}

void Tokenizer::save(const std::string& directory, const std::string& source_language,
                     const std::string& target_language) const {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) fail("[tokenizer] cannot make the directory {}: {}", directory, error.message());
  const std::string base = directory.empty() || directory.back() == '/' ? directory : directory + "/";
  auto write_vocabulary = [&](const Vocabulary& vocabulary, const char* name) {
    Json json = Json::object();  // in the order of ids; the tokens differ, so that none needs looking up
    Json::object_t::Container& entries = json.get_ref<Json::object_t&>();
    for (size_t i = 0; i < vocabulary.tokens.size(); ++i)
      if (vocabulary.find(vocabulary.tokens[i]) == static_cast<int32_t>(i))
        entries.emplace_back(vocabulary.tokens[i], i);
    write_file_atomically(base + name, json.dump(2) + "\n");
  };
  const std::string source_name = source_language.empty() ? impl_->languages[0] : source_language;
  const std::string target_name = target_language.empty() ? impl_->languages[1] : target_language;
  Json special = {
      {"eos_token", impl_->special.eos}, {"unk_token", impl_->special.unk}, {"pad_token", impl_->special.pad}};
  if (!impl_->special.bos.empty()) special["bos_token"] = impl_->special.bos;
  Json config = special;
  config["tokenizer_class"] = "MarianTokenizer";
  config["source_lang"] = source_name.empty() ? Json() : Json(source_name);
  config["target_lang"] = target_name.empty() ? Json() : Json(target_name);
  config["separate_vocabs"] = impl_->separate;
  config["model_max_length"] = impl_->model_max_length;
  config["clean_up_tokenization_spaces"] = false;  // or decoding would move spaces before punctuation
  config["sp_model_kwargs"] = Json::object();
  write_file_atomically(base + "source.spm", impl_->side(Side::kSource).model->bytes);
  write_file_atomically(base + "target.spm", impl_->side(Side::kTarget).model->bytes);
  write_vocabulary(impl_->vocabulary(Side::kSource), "vocab.json");
  if (impl_->separate) write_vocabulary(impl_->vocabulary(Side::kTarget), "target_vocab.json");
  write_file_atomically(base + "special_tokens_map.json", special.dump(2) + "\n");
  write_file_atomically(base + "tokenizer_config.json", config.dump(2) + "\n");
}

void Tokenizer::encode(Side side, std::string_view text, std::vector<int32_t>* ids) const {
  const SideTables& tables = impl_->side(side);
  const Vocabulary& vocabulary = *tables.vocabulary;
  if (vocabulary.has_codes && text.starts_with(">>")) {
    if (const size_t end = text.find("<<"); end != std::string_view::npos) {
      const int32_t code = vocabulary.find(text.substr(0, end + 2));
      ids->push_back(code >= 0 ? code : vocabulary.unk);
      text.remove_prefix(end + 2);
    }
  }
  const auto& processor = tables.model->processor;
  std::vector<int> pieces;
  auto check = [&](const sentencepiece::util::Status& status) {
    if (!status.ok()) fail("[tokenizer] cannot encode a line of {} bytes: {}", text.size(), status.message());
  };
  check(processor.Encode(text, &pieces));
  const bool unknown = std::any_of(pieces.begin(), pieces.end(),
                                   [&](int p) { return tables.id_of_piece[static_cast<size_t>(p)] == vocabulary.unk; });
  if (!unknown) {
    for (int p : pieces) ids->push_back(tables.id_of_piece[static_cast<size_t>(p)]);
    return;
  }
  // What this model does not know, a vocabulary shared with the other side's model may.
  std::vector<std::string> texts;
  check(processor.Encode(text, &texts));
  for (const std::string& piece : texts) {
    const int32_t id = vocabulary.find(piece);
    ids->push_back(id >= 0 ? id : vocabulary.unk);
  }
}

std::vector<int32_t> Tokenizer::encode(Side side, std::string_view text) const {
  std::vector<int32_t> ids;
  encode(side, text, &ids);
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, Side side) const {
  StreamDecoder decoder(*this, side);
  std::string text;
  for (int32_t id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

void Tokenizer::resample(Side side, std::span<const int32_t> ids, const SubwordSampling& sampling, int64_t epoch,
                         int64_t sentence, std::vector<int32_t>* out) const {
  const SideTables& tables = impl_->side(side);
  const Vocabulary& vocabulary = *tables.vocabulary;
  const SubwordModel model = tables.model->traits.model;
  if (!sampling.active(model)) {
    out->insert(out->end(), ids.begin(), ids.end());
    return;
  }
  RandomStream random(sampling.seed, side == Side::kSource ? RandomUse::kSourceSubwords : RandomUse::kTargetSubwords,
                      epoch, sentence);
  std::string run;
  for (size_t i = 0; i < ids.size();) {
    const size_t begin = i;
    run.clear();
    auto is_text = [&](int32_t id) {
      return id >= 0 && static_cast<size_t>(id) < vocabulary.kinds.size() &&
             vocabulary.kinds[static_cast<size_t>(id)] == Kind::kText;
    };
    auto is_code = [&](int32_t id) {
      return vocabulary.has_codes && vocabulary.tokens[static_cast<size_t>(id)].starts_with(">>");
    };
    while (i < ids.size() && is_text(ids[i]) && !is_code(ids[i]))
      run += vocabulary.tokens[static_cast<size_t>(ids[i++])];
    if (i == begin) {
      out->push_back(ids[i++]);
      continue;
    }
    const bool done = model == SubwordModel::kBpe
                          ? tables.subwords.sample_bpe(run, sampling.alpha, random, out)
                          : tables.subwords.sample_unigram(run, sampling.alpha, sampling.nbest, random, out);
    if (!done)
      out->insert(out->end(), ids.begin() + static_cast<int64_t>(begin), ids.begin() + static_cast<int64_t>(i));
  }
}

int32_t Tokenizer::vocabulary_size(Side side) const {
  return static_cast<int32_t>(impl_->vocabulary(side).tokens.size());
}
int32_t Tokenizer::eos_id(Side side) const {
  return impl_->vocabulary(side).eos;
}
int32_t Tokenizer::unk_id(Side side) const {
  return impl_->vocabulary(side).unk;
}
int32_t Tokenizer::pad_id(Side side) const {
  return impl_->vocabulary(side).pad;
}
bool Tokenizer::separate_vocabularies() const {
  return impl_->separate;
}
SubwordModel Tokenizer::model(Side side) const {
  return impl_->side(side).model->traits.model;
}
int32_t Tokenizer::id_of(std::string_view token, Side side) const {
  return impl_->vocabulary(side).find(token);
}
uint64_t Tokenizer::hash() const {
  return impl_->hash;
}

const std::string& Tokenizer::token(int32_t id, Side side) const {
  const Vocabulary& vocabulary = impl_->vocabulary(side);
  FRIT_CHECK(id >= 0 && static_cast<size_t>(id) < vocabulary.tokens.size(), "[tokenizer] id is {}, expected 0 to {}",
             id, vocabulary.tokens.size() - 1);
  return vocabulary.tokens[static_cast<size_t>(id)];
}

void StreamDecoder::append(std::string_view text, std::string* out) {
  const ModelTraits& traits = tokenizer_.impl_->side(side_).model->traits;
  if (start_ && !text.empty()) {
    if (traits.remove_extra_spaces)
      text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
    else if (traits.dummy_prefix && text.front() == ' ')
      text.remove_prefix(1);
    start_ = traits.remove_extra_spaces && text.empty();
  }
  *out += text;
}

std::string StreamDecoder::push(int32_t id) {
  const Vocabulary& vocabulary = tokenizer_.impl_->vocabulary(side_);
  FRIT_CHECK(id >= 0 && static_cast<size_t>(id) < vocabulary.kinds.size(), "[tokenizer] id is {}, expected 0 to {}", id,
             vocabulary.kinds.size() - 1);
  std::string out;
  const Kind kind = vocabulary.kinds[static_cast<size_t>(id)];
  const std::string& text = vocabulary.texts[static_cast<size_t>(id)];
  if (kind == Kind::kSpecial) return out;
  if (kind != Kind::kByte) {
    out = flush();
    if (kind == Kind::kUnknown)
      out += kUnknown, start_ = false;  // these spaces are not the model's, so none is taken off
    else
      append(text, &out);
    return out;
  }
  start_ = false;
  bytes_ += text;
  while (!bytes_.empty()) {
    const auto lead = static_cast<unsigned char>(bytes_[0]);
    const size_t need = lead < 0x80 ? 1 : lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    // Valid so far if some ending makes it a character: the ranges of the second byte are the only narrow ones.
    std::string whole = bytes_.substr(0, need);
    while (whole.size() < need) {
      const bool second = whole.size() == 1;
      whole += static_cast<char>(second && lead == 0xe0 ? 0xa0 : second && lead == 0xf0 ? 0x90 : 0x80);
    }
    if (first_invalid_utf8(whole) >= 0) {
      out += kReplacement;
      bytes_.erase(0, 1);
    } else if (bytes_.size() >= need) {
      out.append(bytes_, 0, need);
      bytes_.erase(0, need);
    } else {
      break;
    }
  }
  return out;
}

// One replacement character for each byte of a character that stays unfinished.
std::string StreamDecoder::flush() {
  std::string out;
  for (size_t i = 0; i < bytes_.size(); ++i) out += kReplacement;
  bytes_.clear();
  return out;
}

std::string StreamDecoder::finish() {
  start_ = true;
  return flush();
}

}  // namespace frit
