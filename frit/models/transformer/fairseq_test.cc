// fairseq's checkpoints: logits of transformers' port, configurations, what is saved from them, errors.
#include "frit/models/transformer/fairseq.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/models/transformer/transformer.h"

namespace frit {
namespace {

namespace fs = std::filesystem;

std::string golden(const std::string& name) {
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  return std::string(root ? root : ".") + "/tests/goldens/" + name;
}

std::vector<int32_t> ints(const SafetensorsFile& file, const char* name) {
  const auto& entry = file.at(name);
  std::vector<int32_t> values(static_cast<size_t>(entry.shape.numel()));
  std::memcpy(values.data(), entry.data, values.size() * sizeof(int32_t));
  return values;
}

struct TestBatch {
  std::vector<int32_t> source_ids, source_offsets, target_ids, labels, target_offsets;
};

std::vector<float> logits_of(Transformer& model, const SafetensorsFile& file) {
  const TestBatch batch = {ints(file, "src_ids"), ints(file, "src_offsets"), ints(file, "tgt_ids"),
                           ints(file, "labels"), ints(file, "tgt_offsets")};
  ThreadPool pool(1);
  Memory memory;
  Context context(pool, memory);
  const Buffer y = model.logits(context, BatchView::of(batch));
  return std::vector<float>(y->data<float>(), y->data<float>() + y->numel());
}

struct Folder {
  Folder() {
    std::string pattern = (fs::temp_directory_path() / "frit-fairseq-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) fail("cannot make {}", pattern);
    path = pattern;
  }
  ~Folder() { fs::remove_all(path); }
  std::string path;
};

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

class Checkpoints : public ::testing::TestWithParam<const char*> {};

// Made by tools/goldens/make_fairseq.py: transformers' FSMT, and for the pre-LN model a reference in float64.
TEST_P(Checkpoints, GiveTheReferencesLogits) {
  const std::string directory = golden(GetParam());
  auto model = Transformer::load(directory, {});
  const SafetensorsFile file(directory + "/goldens.safetensors");
  const std::vector<float> got = logits_of(*model, file);
  const auto& entry = file.at("logits");
  std::vector<float> expected(static_cast<size_t>(entry.shape.numel()));
  convert_to_f32(entry, expected.data());
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4) << i;
}

TEST_P(Checkpoints, WhatIsSavedFromThemLoads) {
  const std::string directory = golden(GetParam());
  auto model = Transformer::load(directory, {});
  const Folder folder;
  model->save(folder.path);
  EXPECT_STREQ(model->config().model_type(), "frit-transformer");
  auto back = Transformer::load(folder.path, {});
  EXPECT_EQ(back->config().to_json(), model->config().to_json());
  const SafetensorsFile file(directory + "/goldens.safetensors");
  EXPECT_EQ(logits_of(*back, file), logits_of(*model, file));
}

// The places of positions matter: the goldens' logits would not bear the ones of Marian.
TEST_P(Checkpoints, OtherPositionsGiveOtherLogits) {
  const std::string directory = golden(GetParam());
  auto model = Transformer::load(directory, {});
  TransformerConfig other = model->config();
  const SafetensorsFile file(directory + "/goldens.safetensors");
  const std::vector<float> right = logits_of(*model, file);
  const auto changes = [&] {
    Transformer changed(other, {});
    changed.load_weights(directory);
    const std::vector<float> wrong = logits_of(changed, file);
    float most = 0;
    for (size_t i = 0; i < wrong.size(); ++i) most = std::max(most, std::abs(wrong[i] - right[i]));
    return most > 1e-2f;
  };
  if (other.positions == Positions::kLearned) {
    EXPECT_FALSE(changes());
    return;
  }
  EXPECT_EQ(other.first_position, 2);
  other.first_position = 0;
  EXPECT_TRUE(changes());
  other.first_position = 2, other.positions = Positions::kSinusoidal;
  EXPECT_TRUE(changes());
}
INSTANTIATE_TEST_SUITE_P(Fairseq, Checkpoints, ::testing::Values("fairseq_fsmt", "fairseq_args", "fairseq_learned"),
                         [](const auto& info) { return std::string(info.param); });

TEST(FairseqConfig, ReadsFsmtAsTransformersDoes) {
  TransformerConfig c = TransformerConfig::from_json(R"({"model_type": "fsmt"})");
  EXPECT_EQ(c.source_vocab, 42024);
  EXPECT_EQ(c.target_vocab, 42024);
  EXPECT_EQ(c.activation, Activation::kRelu);
  EXPECT_TRUE(c.scale_embedding);
  EXPECT_FALSE(c.share_embeddings);
  EXPECT_FALSE(c.tie_output);
  EXPECT_EQ(c.positions, Positions::kFairseq);
  EXPECT_EQ(c.first_position, 2);
  EXPECT_EQ(c.start_id, 2);
  EXPECT_EQ(TransformerConfig::from_json(c.to_json()).to_json(), c.to_json());
  std::string reason;
  EXPECT_FALSE(c.marian_compatible(&reason));
  EXPECT_NE(reason.find("fairseq"), std::string::npos);
  c = TransformerConfig::from_json(
      R"({"model_type": "fsmt", "tie_word_embeddings": true, "src_vocab_size": 10, "tgt_vocab_size": 10})");
  EXPECT_TRUE(c.share_embeddings);
  EXPECT_TRUE(c.tie_output);
}

TEST(FairseqConfig, ReadsATrainingsArguments) {
  TransformerConfig c = TransformerConfig::read(golden("fairseq_args"));
  EXPECT_EQ(c.source_vocab, 35);
  EXPECT_EQ(c.d_model, 16);
  EXPECT_EQ(c.decoder_ffn_dim, 20);
  EXPECT_EQ(c.activation, Activation::kGelu);
  EXPECT_EQ(c.activation_dropout, 0.1);  // relu_dropout, its old name
  EXPECT_TRUE(c.share_embeddings && c.tie_output && c.scale_embedding);
  EXPECT_EQ(c.pad_id, 1);
  EXPECT_EQ(c.eos_id, 2);
  c = TransformerConfig::read(golden("fairseq_learned"));
  EXPECT_TRUE(c.pre_norm && c.tie_output);
  EXPECT_FALSE(c.share_embeddings || c.scale_embedding);
  EXPECT_EQ(c.positions, Positions::kLearned);
  EXPECT_EQ(c.source_vocab, 37);
  EXPECT_EQ(c.target_vocab, 33);
  EXPECT_EQ(c.max_positions, 32);  // the lesser of 40 and 32
  const GenerationConfig g = GenerationConfig::read(golden("fairseq_learned"));
  EXPECT_EQ(g.num_beams, 5);
  EXPECT_EQ(g.max_length, 33);
  EXPECT_EQ(g.start_id, 2);
  EXPECT_EQ(g.eos_ids, std::vector<int64_t>{2});
  EXPECT_EQ(g.bad_words, (std::vector<std::vector<int64_t>>{{1}}));
}

TEST(FairseqConfig, NamesWhatItCannotTake) {
  const Folder folder;
  const auto arguments = nlohmann::json::parse(read_file(golden("fairseq_args/config.json")));
  fs::copy_file(golden("fairseq_args/model.safetensors"), folder.path + "/model.safetensors");
  const auto refused = [&](const char* key, const nlohmann::json& value) {
    nlohmann::json changed = arguments;
    changed[key] = value;
    write_file_atomically(folder.path + "/config.json", changed.dump());
    const std::string error = error_of([&] { Transformer::load(folder.path, {}); });
    EXPECT_NE(error.find(key), std::string::npos) << error;
    EXPECT_NE(error.find(folder.path), std::string::npos) << error;
  };
  refused("arch", "lightconv_iwslt_de_en");
  refused("activation_fn", "tanh");
  refused("layernorm_embedding", true);
  refused("adaptive_softmax_cutoff", "10000,20000");
  refused("decoder_output_dim", 8);
  refused("encoder_learned_pos", true);
  refused("decoder_normalize_before", true);
  refused("encoder_layers", "6");
  EXPECT_NE(error_of([&] { TransformerConfig::from_json(arguments.dump()); }).find("read the directory"),
            std::string::npos);
}

TEST(FairseqCheckpoint, NamesTheFilesTensors) {
  const Folder folder;
  auto arguments = nlohmann::json::parse(read_file(golden("fairseq_args/config.json")));
  arguments["decoder_layers"] = 3, arguments["encoder_ffn_embed_dim"] = 28;
  write_file_atomically(folder.path + "/config.json", arguments.dump());
  fs::copy_file(golden("fairseq_args/model.safetensors"), folder.path + "/model.safetensors");
  std::string error = error_of([&] { Transformer::load(folder.path, {}); });
  EXPECT_NE(error.find(folder.path), std::string::npos) << error;
  EXPECT_NE(error.find("\n  decoder.layers.2.fc1.weight [20, 16] is missing"), std::string::npos) << error;
  EXPECT_NE(error.find("\n  encoder.layers.0.fc1.bias is [24] in the file, the configuration says [28]"),
            std::string::npos)
      << error;
  arguments["decoder_layers"] = 1, arguments["encoder_ffn_embed_dim"] = 24;
  write_file_atomically(folder.path + "/config.json", arguments.dump());
  error = error_of([&] { Transformer::load(folder.path, {}); });
  EXPECT_NE(error.find("\n  decoder.layers.1.fc1.bias [20] is not part of the model"), std::string::npos) << error;
  EXPECT_EQ(error.find("version"), std::string::npos) << error;
}

}  // namespace
}  // namespace frit
