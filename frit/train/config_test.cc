#include "frit/train/config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "frit/core/error.h"

namespace frit {
namespace {

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

TEST(TrainConfig, DumpReadsBackTheSame) {
  TrainConfig a;
  a.training.learning_rate = 0.00037;
  a.data.train_source = "a \"quoted\" \\ path";
  a.data.joint_vocabulary = false;
  a.training.accumulate = 3;
  for (bool comments : {false, true}) {
    TrainConfig b;
    parse_config(b, dump_config(a, comments), "dump");
    EXPECT_EQ(dump_config(b, false), dump_config(a, false));
  }
}

TEST(TrainConfig, UnknownKeysNameTheNearest) {
  TrainConfig c;
  EXPECT_EQ(error_of([&] { set_config_key(c, "training.lerning_rate", "1"); }),
            "[config] unknown key training.lerning_rate; did you mean training.learning_rate?");
  EXPECT_EQ(error_of([&] { set_config_key(c, "model.vocabulary", "1"); }),
            "[config] unknown key model.vocabulary; did you mean data.vocabulary?");
  EXPECT_NE(error_of([&] {
              parse_config(c, "[training]\nbatch_token = 5\n", "f.toml");
            }).find("did you mean training.batch_tokens? (f.toml:2)"),
            std::string::npos);
  EXPECT_NE(error_of([&] { parse_config(c, "seed = 5\n", "f.toml"); }).find("f.toml:1"), std::string::npos);
}

TEST(TrainConfig, WrongKindsAndChoicesAreErrors) {
  TrainConfig c;
  EXPECT_EQ(error_of([&] { set_config_key(c, "training.batch_tokens", "many"); }),
            "[config] training.batch_tokens is \"many\", expected a whole number");
  EXPECT_EQ(error_of([&] { set_config_key(c, "training.batch_tokens", "99999999999999999999"); }),
            "[config] training.batch_tokens is 99999999999999999999, which is out of range");
  EXPECT_EQ(error_of([&] { set_config_key(c, "training.learning_rate", "1e999"); }),
            "[config] training.learning_rate is 1e999, which is out of range");
  EXPECT_NE(error_of([&] { set_config_key(c, "training.batch_tokens", "12x"); }), "no error");
  EXPECT_NE(error_of([&] { set_config_key(c, "data.joint_vocabulary", "yes"); }), "no error");
  EXPECT_EQ(error_of([&] { set_config_key(c, "training.optimizer", "adm"); }),
            "[config] training.optimizer is \"adm\", expected one of: adam, adamw, sgd");
  EXPECT_NE(error_of([&] { parse_config(c, "[training]\nseed = \"1\"\n", "f"); }).find("whole number"),
            std::string::npos);
  EXPECT_NE(error_of([&] { parse_config(c, "[training\n", "f"); }).find("f:1"), std::string::npos);
  set_config_key(c, "training.learning_rate", "3e-4");
  EXPECT_DOUBLE_EQ(c.training.learning_rate, 3e-4);
  parse_config(c, "[training]\nlearning_rate = 1\n", "f");  // a whole number serves as a number
  EXPECT_DOUBLE_EQ(c.training.learning_rate, 1);
}

TEST(TrainConfig, ValidationNamesTheKey) {
  const auto with = [](const char* key, const char* value) {
    TrainConfig c;
    set_config_key(c, key, value);
    return error_of([&] { validate_config(c); });
  };
  EXPECT_EQ(with("training.seed", "1"), "no error");
  EXPECT_NE(with("model.dropout", "1").find("model.dropout is 1"), std::string::npos);
  EXPECT_NE(with("training.accumulate", "0").find("training.accumulate"), std::string::npos);
  EXPECT_NE(with("training.learning_rate", "nan").find("training.learning_rate"), std::string::npos);
  EXPECT_NE(with("training.save_every", "5x").find("training.save_every: [period] unknown unit"), std::string::npos);
  EXPECT_EQ(with("training.keep_every", ""), "no error");
  EXPECT_NE(with("training.keep_every", "2e").find("period of updates"), std::string::npos);
  EXPECT_NE(with("training.stop_after", "9000000Gu").find("training.stop_after is 9000000Gu"), std::string::npos);
  EXPECT_NE(with("validation.length_penalty", "nan").find("validation.length_penalty"), std::string::npos);
  EXPECT_NE(with("model.d_model", "9000000000000000000").find("model.d_model"), std::string::npos);
  EXPECT_NE(with("run.directory", "").find("run.directory is empty"), std::string::npos);
  EXPECT_NE(with("data.train_source", "x").find("data.train_target"), std::string::npos);
}

TEST(TrainConfig, ReferenceInDocsIsCurrent) {
  const char* root = std::getenv("FRIT_SOURCE_DIR");
  ASSERT_NE(root, nullptr) << "set FRIT_SOURCE_DIR to the source tree";
  std::ifstream in(std::string(root) + "/docs/configuration.md");
  std::ostringstream text;
  text << in.rdbuf();
  EXPECT_EQ(text.str(), config_reference()) << "write it again: frit train --config-reference > docs/configuration.md";
}

}  // namespace
}  // namespace frit
