#include "frit/models/transformer/config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "frit/core/error.h"

namespace frit {
namespace {

std::string error_of(const std::string& text) {
  try {
    TransformerConfig::from_json(text);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(TransformerConfig, ReturnsFromItsJson) {
  for (const std::string& name : TransformerConfig::preset_names()) {
    TransformerConfig c = TransformerConfig::preset(name);
    c.source_vocab = c.target_vocab = 2000;
    c.pad_id = c.start_id = 1999, c.eos_id = 0;
    c.activation = Activation::kSilu;
    c.attention_dropout = 0.05;
    for (const bool ours : {false, true}) {
      c.pre_norm = ours;
      c.positions = ours ? Positions::kLearned : Positions::kSinusoidal;
      const std::string text = c.to_json();
      EXPECT_EQ(nlohmann::json::parse(text)["model_type"], ours ? "frit-transformer" : "marian");
      const TransformerConfig back = TransformerConfig::from_json(text);
      EXPECT_EQ(back.to_json(), text);
      EXPECT_EQ(back.pre_norm, ours);
      EXPECT_EQ(back.d_model, c.d_model);
      EXPECT_EQ(back.activation, Activation::kSilu);
    }
  }
  EXPECT_THROW(TransformerConfig::preset("transformer-huge"), Error);
}

TEST(TransformerConfig, SaysWhyTransformersCannotLoadIt) {
  TransformerConfig c;
  std::string reason;
  EXPECT_TRUE(c.marian_compatible(&reason));
  EXPECT_EQ(reason, "");
  const auto why = [&](auto change) {
    TransformerConfig other = c;
    change(other);
    EXPECT_FALSE(other.marian_compatible(&reason));
    EXPECT_STREQ(other.model_type(), "frit-transformer");
    return reason;
  };
  EXPECT_NE(why([](auto& o) { o.pre_norm = true; }).find("pre-LN"), std::string::npos);
  EXPECT_NE(why([](auto& o) { o.positions = Positions::kLearned; }).find("positions"), std::string::npos);
  EXPECT_NE(why([](auto& o) { o.tie_output = false; }).find("ties"), std::string::npos);
}

TEST(TransformerConfig, ReadsMarianAsTransformersDoes) {
  // Absent keys have MarianConfig's defaults; null is absent; a target vocabulary without sharing.
  TransformerConfig c = TransformerConfig::from_json(R"({"model_type": "marian", "decoder_vocab_size": null})");
  EXPECT_EQ(c.d_model, 1024);
  EXPECT_EQ(c.source_vocab, 58101);
  EXPECT_EQ(c.target_vocab, 58101);
  EXPECT_EQ(c.activation, Activation::kGelu);
  EXPECT_FALSE(c.scale_embedding);
  c = TransformerConfig::from_json(
      R"({"model_type": "marian", "share_encoder_decoder_embeddings": false, "decoder_vocab_size": 58200})");
  EXPECT_EQ(c.target_vocab, 58200);
  // Not tied: transformers gives source, target and output a matrix each, shared or not.
  c = TransformerConfig::from_json(R"({"model_type": "marian", "tie_word_embeddings": false})");
  EXPECT_FALSE(c.share_embeddings);
  EXPECT_FALSE(c.tie_output);
}

TEST(TransformerConfig, NamesTheKeyThatIsWrong) {
  EXPECT_NE(error_of("{").find("not JSON"), std::string::npos);
  EXPECT_NE(error_of("[]").find("object"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "bert"})").find("bert"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "d_model": "big"})").find("d_model"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "d_model": 1000})").find("heads"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "encoder_layers": 0})").find("encoder_layers"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "pad_token_id": 58101})").find("pad_token_id"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "dropout": 1.0})").find("dropout"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "scale_embedding": 1})").find("scale_embedding"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "marian", "activation_function": "mish"})").find("mish"), std::string::npos);
  EXPECT_NE(error_of(R"({"model_type": "frit-transformer", "position_embedding_type": "rotary"})").find("rotary"),
            std::string::npos);
}

TEST(GenerationConfig, ReturnsFromItsJson) {
  TransformerConfig c;
  c.pad_id = c.start_id = 31999, c.eos_id = 0;
  GenerationConfig g = GenerationConfig::for_model(c);
  g.early_stopping = "never", g.length_penalty = 0.6, g.no_repeat_ngram_size = 3, g.eos_ids = {0, 7};
  const GenerationConfig back = GenerationConfig::from_json(g.to_json());
  EXPECT_EQ(back.to_json(), g.to_json());
  EXPECT_EQ(back.bad_words, (std::vector<std::vector<int64_t>>{{31999}}));
  EXPECT_EQ(back.forced_eos_id, 0);
  EXPECT_EQ(back.early_stopping, "never");
  EXPECT_EQ(back.eos_ids, (std::vector<int64_t>{0, 7}));
  EXPECT_EQ(back.max_length, 512);
  EXPECT_EQ(GenerationConfig::from_json("{}").max_new_tokens, 20);
  EXPECT_EQ(GenerationConfig::from_json(R"({"max_new_tokens": 5})").max_length, 0);
  EXPECT_THROW(GenerationConfig::from_json(R"({"bad_words_ids": [3]})"), Error);
  EXPECT_THROW(GenerationConfig::from_json(R"({"early_stopping": "perhaps"})"), Error);
  EXPECT_THROW(GenerationConfig::from_json(R"({"num_beams": 1.5})"), Error);
}

// Counted by hand for a model small enough to.
TEST(Flops, CountsEveryProductOnce) {
  TransformerConfig c;
  c.encoder_layers = c.decoder_layers = 1;
  c.d_model = 2, c.encoder_heads = c.decoder_heads = 1;
  c.encoder_ffn_dim = 3, c.decoder_ffn_dim = 5;
  c.source_vocab = c.target_vocab = 7;
  // One sentence, 2 source tokens, 3 target tokens.
  const BatchShape s{2, 3, 4, 9, 6};
  const double encoder = 2 * (2 * 6 * 2 + 2 * 2 * 2 + 2 * 2 * 3 + 2 * 3 * 2) + 2 * 2 * 4 * 2;
  const double decoder =
      2 * (3 * 6 * 2 + 3 * 2 * 2 + 3 * 2 * 2 + 3 * 2 * 2 + 3 * 2 * 5 * 2 + 2 * 4 * 2) + 2 * 2 * 6 * 2 + 2 * 2 * 6 * 2;
  EXPECT_EQ(flops_forward(c, s), encoder + decoder + 2 * 3 * 2 * 7);
  EXPECT_EQ(flops_per_step(c, s), 3 * flops_forward(c, s));
}

}  // namespace
}  // namespace frit
