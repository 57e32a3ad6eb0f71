// Runs the built command as a user would: help, exit codes, messages, training with a stop in between, translating.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "frit/core/philox.h"
#include "frit/train/config.h"

namespace frit {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

std::string command() {
  const char* path = std::getenv("FRIT_COMMAND");
  return path ? path : "build/cpu/frit";
}

std::string read_text(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}
void write_text(const fs::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// What a finished process left.
struct Ended {
  int code = -1;  // as a shell reports it: 128 + signal if one ended it
  std::string out, err;
};

// The command with arguments, running; its output goes to files.
class Process {
 public:
  Process(const fs::path& folder, const std::vector<std::string>& arguments, const std::string& input = "") {
    static int count = 0;
    stem_ = folder / ("process-" + std::to_string(count++));
    write_text(name("in"), input);
    pid_ = fork();
    if (pid_ == 0) {
      dup2(open(name("in").c_str(), O_RDONLY), 0);
      dup2(open(name("out").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 1);
      dup2(open(name("err").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 2);
      std::vector<std::string> texts = {command()};
      texts.insert(texts.end(), arguments.begin(), arguments.end());
      std::vector<char*> pointers;
      for (std::string& text : texts) pointers.push_back(text.data());
      pointers.push_back(nullptr);
      execv(pointers[0], pointers.data());
      _exit(126);
    }
  }
  ~Process() {
    if (pid_ > 0) kill(pid_, SIGKILL), waitpid(pid_, nullptr, 0);
  }

  void signal(int number) const { kill(pid_, number); }
  std::string err() const { return read_text(name("err")); }
  // True once stderr has the text; false if the process does not say it in time.
  bool waits_for(const std::string& text, int seconds) const {
    const auto until = steady_clock::now() + std::chrono::seconds(seconds);
    while (steady_clock::now() < until) {
      if (err().find(text) != std::string::npos) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }
  Ended end() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), read_text(name("out")), err()};
  }

 private:
  fs::path name(const char* extension) const { return stem_.string() + "." + extension; }
  fs::path stem_;
  pid_t pid_ = -1;
};

testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no \"" << part << "\" in:\n" << text;
}
testing::AssertionResult begins(const std::string& text, const std::string& part) {
  if (text.starts_with(part)) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << part << "\" does not begin:\n" << text;
}

testing::AssertionResult matches(const std::string& text, const std::string& regex) {
  if (std::regex_match(text, std::regex(regex))) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "not as " << regex << ":\n" << text;
}

int lines_of(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

// One folder with a little text and a model that one training of the command made.
class CommandTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::string pattern = (fs::temp_directory_path() / "frit-command-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    const char* words[][2] = {{"one", "eins"}, {"two", "zwei"},  {"three", "drei"},   {"four", "vier"},
                              {"red", "rot"},  {"blue", "blau"}, {"house", "Haus"},   {"tree", "Baum"},
                              {"big", "groß"}, {"old", "alt"},   {"flower", "Blume"}, {"green", "grün"}};
    std::string source, target;
    for (uint32_t i = 0; i < 240; ++i) {
      for (uint32_t j = 0, n = 2 + i % 5; j < n; ++j) {
        const auto& pair = words[philox({1, i}, j, 0, 0, 0).v[0] % 12];
        source += (j ? " " : "") + std::string(pair[0]), target += (j ? " " : "") + std::string(pair[1]);
      }
      source += '\n', target += '\n';
      if (i == 39) write_text(folder_ / "valid.en", source), write_text(folder_ / "valid.de", target);
    }
    write_text(folder_ / "train.en", source);
    write_text(folder_ / "train.de", target);
    write_text(folder_ / "small.toml",
               "[model]\nencoder_layers = 1\ndecoder_layers = 1\nd_model = 32\nheads = 2\nffn = 64\n"
               "[data]\ntrain_source = \"" +
                   path("train.en") + "\"\ntrain_target = \"" + path("train.de") + "\"\nvalid_source = \"" +
                   path("valid.en") + "\"\nvalid_target = \"" + path("valid.de") +
                   "\"\nvocabulary = 80\nbyte_fallback = false\n"
                   "[training]\nbatch_tokens = 256\nlearning_rate = 5e-3\nwarmup = \"10u\"\n"
                   "stop_after = \"40u\"\nlog_every = \"10u\"\nvalid_every = \"20u\"\n"
                   "[run]\nthreads = 2\ndirectory = \"" +
                   path("run") + "\"\n");
    trained_ = run({"train", path("small.toml")});
  }
  static void TearDownTestSuite() { fs::remove_all(folder_); }

  static std::string path(const std::string& name) { return (folder_ / name).string(); }
  static Ended run(const std::vector<std::string>& arguments, const std::string& input = "") {
    return Process(folder_, arguments, input).end();
  }
  // Bad usage or an error: the code, nothing on stdout, one line on stderr that says why.
  static void expect_error(const std::vector<std::string>& arguments, int code, const std::string& text) {
    const Ended e = run(arguments);
    EXPECT_EQ(e.code, code) << e.err;
    EXPECT_EQ(e.out, "");
    EXPECT_TRUE(begins(e.err, "frit: error: "));
    EXPECT_EQ(lines_of(e.err), 1) << e.err;
    EXPECT_TRUE(has(e.err, text));
  }

  static fs::path folder_;
  static Ended trained_;
};
fs::path CommandTest::folder_;
Ended CommandTest::trained_;

TEST_F(CommandTest, HelpOfAll) {
  const Ended all = run({"--help"});
  EXPECT_EQ(all.code, 0);
  EXPECT_EQ(all.err, "");
  EXPECT_TRUE(has(all.out, "Exit codes"));
  for (const char* name : {"train", "translate", "evaluate", "plan", "report", "bench"}) {
    EXPECT_TRUE(has(all.out, std::string("\n  ") + name));
    const Ended one = run({name, "--help"});
    EXPECT_EQ(one.code, 0);
    EXPECT_EQ(one.err, "");
    EXPECT_TRUE(has(one.out, "Examples:\n  frit " + std::string(name)));
  }
  EXPECT_TRUE(begins(run({"--version"}).out, "frit 0."));
}

TEST_F(CommandTest, BadUsageIsTwoAndNamesTheNearest) {
  expect_error({}, 2, "needs a command: train, translate");
  expect_error({"bench"}, 2, "needs a command: ops, step, decode, translate");
  expect_error({"bench", "stepp"}, 2, "did you mean step?");
  expect_error({"bench", "translate", "a", "b", "--beem", "1"}, 2, "did you mean --beam?");
  expect_error({"trian", "x.toml"}, 2, "unknown command trian; did you mean train?");
  expect_error({"translate"}, 2, "MODEL");
  expect_error({"translate", path("run"), "--beem", "4"}, 2, "unknown flag --beem; did you mean --beam?");
  expect_error({"translate", path("run"), "--beam", "four"}, 2, "four");
  expect_error({"translate", path("run"), "--beam", "0"}, 2, "--beam: Value 0 not in range 1 to 1000000000");
  expect_error({"translate", path("run"), "--top-k", "4"}, 2, "--sample");
  expect_error({"translate", path("run"), "--sample", "--beam", "4"}, 2, "--beam");
  expect_error({"translate", path("run"), "--beam", "2", "--nbest", "3"}, 2, "--nbest 3");
  expect_error({"translate", path("run"), "--length-penalty", "gnnt"}, 2, "gnmt");
  expect_error({"train"}, 2, "configuration");
  expect_error({"train", path("small.toml"), "--training.learning_rat", "1"}, 2,
               "did you mean training.learning_rate?");
  expect_error({"train", path("small.toml"), "--set", "training.sead=1"}, 2, "did you mean training.seed?");
  expect_error({"train", path("small.toml"), "--set", "training.seed"}, 2, "KEY=VALUE");
  expect_error({"train", path("small.toml"), "--training.seed"}, 2, "needs a value");
  expect_error({"train", path("small.toml"), "--training.seed", "many"}, 2, "whole number");
  expect_error({"train", path("small.toml"), "--dump"}, 2, "did you mean --dump-config?");
  expect_error({"train", path("small.toml"), "more"}, 2, "more");
  expect_error({"evaluate", path("run")}, 2, "REFERENCE");
  expect_error({"evaluate", path("run"), "a", "b", "--no-loss", "--no-bleu"}, 2, "nothing left to compute");
  expect_error({"report"}, 2, "RUN");
}

// A flag's value that cannot work is a fault of the command line, however late it shows.
TEST_F(CommandTest, BadValuesOfFlagsAreTwo) {
  const struct {
    std::vector<std::string> flags;
    const char* text;
  } searches[] = {{{"--alpha", "nan"}, "alpha"},
                  {{"--beam", "81"}, "beam is 81, expected 1 to 80"},
                  {{"--early-stopping", "maybe"}, "never"},
                  {{"--repetition-penalty", "0"}, "repetition_penalty"},
                  {{"--no-repeat-ngram", "-1"}, "--no-repeat-ngram"},
                  {{"--prefix", "\xff"}, "--prefix is not valid UTF-8 at byte 1"},
                  {{"--prefix", "eins zwei drei vier", "--max-length", "3"}, "--prefix has"},
                  {{"--max-length", "1"}, "max_length"},
                  {{"--max-length", "100000"}, "positions"},
                  {{"--max-new-tokens", "-1"}, "max_new_tokens"},
                  {{"--max-length", "0"}, "--max-length is 0"},
                  {{"--min-length", "9", "--max-length", "5"}, "min_length"},
                  {{"--min-new-tokens", "-1"}, "min_new_tokens"},
                  {{"--sample", "--top-k", "-1"}, "--top-k"},
                  {{"--sample", "--top-p", "0"}, "top_p"},
                  {{"--sample", "--temperature", "0"}, "temperature"},
                  {{"--sample", "--seed", "-1"}, "--seed"},
                  {{"--batch-tokens", "0"}, "--batch-tokens"},
                  {{"--batch-sentences", "-1"}, "--batch-sentences"},
                  {{"--diversity", "1", "--beam", "1"}, "diversity"},
                  {{"--window-lines", "0"}, "--window-lines"},
                  {{"--threads", "-1"}, "--threads"}};
  for (const auto& [flags, text] : searches) {
    for (std::vector<std::string> arguments : {std::vector<std::string>{"translate", path("run"), path("valid.en")},
                                               {"evaluate", path("run"), path("valid.en"), path("valid.de")},
                                               {"bench", "translate", path("run"), path("valid.en")}}) {
      arguments.insert(arguments.end(), flags.begin(), flags.end());
      expect_error(arguments, 2, text);
    }
  }
  expect_error({"translate", path("run"), "--invalid-utf8", "keep"}, 2, "--invalid-utf8");
  expect_error({"translate", path("run"), "--device", "tpu"}, 2, "--device");
  expect_error({"translate", path("run"), "--dtype", "fp16"}, 2, "--dtype fp16 needs --device cuda");
  expect_error({"translate", path("run"), "--workers", "2"}, 2, "--workers 2 needs --device cuda");
  expect_error({"bench", "decode", "--case", "mt-huge-32x32-beam4-b1"}, 2, "mt-base-32x32-beam4-b8");
  expect_error({"bench", "translate", path("run"), path("valid.en"), "--limit", "-1"}, 2, "--limit");
  expect_error({"bench", "translate", path("run"), path("valid.en"), "--repeat", "0"}, 2, "--repeat");
  expect_error({"bench", "step", "--steps", "0"}, 2, "--steps");
  expect_error({"bench", "step", "--warm", "-1"}, 2, "--warm");
  // A case says what the model and the batch are.
  for (const auto& [key, value] : {std::pair{"model.dropout", "0.2"},
                                   {"model.ffn", "64"},
                                   {"data.vocabulary", "8000"},
                                   {"training.batch_tokens", "2048"},
                                   {"model.preset", "transformer-tiny"}})
    expect_error({"bench", "step", "--case", "mt-base-128x32", std::string("--") + key, value}, 2, key);
  expect_error({"bench", "step", "--case", "mt-base-128x32", path("small.toml")}, 2, "model.");
  expect_error({"plan", path("small.toml"), "--tensors", "-1"}, 2, "--tensors");
  expect_error({"plan", path("small.toml"), "--run.device", "simulator", "--measure"}, 1, "run.device");
  expect_error({"plan", path("small.toml"), "--sentence-tokens", "0"}, 2, "--sentence-tokens");
  expect_error({"evaluate", path("run"), path("valid.en"), path("valid.de"), "--no-bleu", "-o", path("none.out")}, 2,
               "--output");
  // Keys of the configuration: refused by train, plan and bench step alike, before anything is made.
  const std::pair<const char*, const char*> keys[] = {{"--model.dropout", "2"},
                                                      {"--model.d_model", "0"},
                                                      {"--model.d_model", "9000000000000000000"},
                                                      {"--model.heads", "3"},
                                                      {"--model.max_positions", "10"},
                                                      {"--model.activation", "tanh"},
                                                      {"--data.vocabulary", "1"},
                                                      {"--data.subword_nbest", "-2"},
                                                      {"--data.prefetch", "1000000000000"},
                                                      {"--training.batch_tokens", "9000000000000000000"},
                                                      {"--training.learning_rate", "nan"},
                                                      {"--training.weight_decay", "inf"},
                                                      {"--training.min_delta", "-1"},
                                                      {"--training.warmup", "1x"},
                                                      {"--training.keep_every", "2e"},
                                                      {"--training.stop_after", "1e300u"},
                                                      {"--validation.beam", "81"},
                                                      {"--validation.length_penalty", "nan"},
                                                      {"--run.device", "tpu"},
                                                      {"--run.threads", "-1"}};
  for (const auto& [key, value] : keys)
    for (const std::vector<std::string>& command : {std::vector<std::string>{"train"}, {"plan"}, {"bench", "step"}}) {
      std::vector<std::string> arguments = command;
      arguments.insert(arguments.end(), {path("small.toml"), "--run.directory", path("refused"), key, value});
      expect_error(arguments, 2, std::string(key).substr(key == std::string("--model.heads") ? 8 : 2));
    }
  expect_error({"train", path("small.toml"), "--training.precision", "bf16-master", "--run.gemm", "onednn"}, 2,
               "run.gemm");
  expect_error({"train", path("small.toml"), "--training.early_stopping_metric", "bleu", "--validation.bleu", "false"},
               2, "training.early_stopping_metric");
  expect_error({"train", path("small.toml"), "--training.schedule", "cosine", "--training.warmup", "40u"}, 2,
               "training.warmup");
  EXPECT_FALSE(fs::exists(folder_ / "refused"));
  // The same value in the file is a fault of the file, also where a flag changes something else.
  write_text(folder_ / "bad.toml", "[model]\ndropout = 2.0\n");
  expect_error({"train", path("bad.toml")}, 1, "model.dropout");
  expect_error({"train", path("bad.toml"), "--training.seed", "2"}, 1, "model.dropout");
}

TEST_F(CommandTest, ErrorsWhileRunningAreOne) {
  expect_error({"train", path("absent.toml")}, 1, "absent.toml");
  write_text(folder_ / "broken.toml", "[training]\nseed = = 1\n");
  expect_error({"train", path("broken.toml")}, 1, "broken.toml:2");
  write_text(folder_ / "unknown.toml", "[training]\n\nlearning_rates = 1.0\n");
  expect_error({"train", path("unknown.toml")}, 1,
               "did you mean training.learning_rate? (" + path("unknown.toml") + ":3)");
  expect_error({"train", folder_.string()}, 1, "cannot read");
  // What needs no tokenizer to be found is found before one is trained: a single line, nothing said before it.
  const auto early = [](const char* key, const std::string& value, const std::string& text) {
    expect_error({"train", path("small.toml"), "--run.directory", path("early"), key, value}, 1, text);
  };
  early("--data.valid_source", path("absent.en"), "data.valid_source");
  early("--data.train_target", folder_.string(), "folder");
  early("--model.init_from", path("absent"), "model.init_from");
  EXPECT_FALSE(fs::exists(folder_ / "early" / "tokenizer"));
  expect_error({"translate", path("absent")}, 1, "there is no such model directory");
  expect_error({"translate", folder_.string()}, 1, "no config.json");
  expect_error({"translate", path("run"), path("absent.txt")}, 1, "absent.txt");
  expect_error({"evaluate", path("run"), path("valid.en"), path("train.de")}, 1, "40 lines");
  expect_error({"report", path("absent")}, 1, "metrics.jsonl");
}

TEST_F(CommandTest, DumpedConfigurationReadsBackTheSame) {
  const Ended first = run({"train", path("small.toml"), "--training.label_smoothing", "0.25", "--set",
                           "data.vocabulary=77", "--run.tensorboard=false", "--dump-config"});
  EXPECT_EQ(first.code, 0) << first.err;
  EXPECT_TRUE(has(first.out, "label_smoothing = 0.25"));
  EXPECT_TRUE(has(first.out, "vocabulary = 77"));
  EXPECT_TRUE(has(first.out, "tensorboard = false"));
  write_text(folder_ / "dumped.toml", first.out);
  EXPECT_EQ(run({"train", path("dumped.toml"), "--dump-config"}).out, first.out);
  // Later settings win, whichever way they are given.
  EXPECT_TRUE(
      has(run({"train", "--training.seed", "5", "--set", "training.seed=6", "--dump-config"}).out, "seed = 6\n"));
  EXPECT_TRUE(
      has(run({"train", "--set", "training.seed=6", "--training.seed", "5", "--dump-config"}).out, "seed = 5\n"));
  EXPECT_EQ(run({"train", "--config-reference"}).out, config_reference());
}

TEST_F(CommandTest, TrainsAndKeepsResultsApartFromTheLog) {
  ASSERT_EQ(trained_.code, 0) << trained_.err;
  EXPECT_TRUE(begins(trained_.out, "model " + path("run/model") + "\n"));
  EXPECT_TRUE(has(trained_.out, "\nloss "));
  EXPECT_TRUE(has(trained_.err, "valid | step 40"));
  for (const char* name : {"config.json", "generation_config.json", "model.safetensors", "source.spm", "target.spm",
                           "vocab.json", "tokenizer_config.json"})
    EXPECT_TRUE(fs::exists(folder_ / "run/model" / name)) << name;
  // Finished: there is nothing to do but to say so.
  const Ended again = run({"train", path("small.toml"), "--quiet"});
  EXPECT_EQ(again.code, 0);
  EXPECT_EQ(again.err, "");
}

TEST_F(CommandTest, TranslatesEveryLineInItsPlace) {
  const std::string text = read_text(folder_ / "valid.en");
  const Ended all = run({"translate", path("run/model"), path("valid.en")});
  ASSERT_EQ(all.code, 0) << all.err;
  EXPECT_EQ(lines_of(all.out), 40);
  EXPECT_EQ(all.err, "");
  // From standard input, a run directory for a model, other batches and threads: the same.
  EXPECT_EQ(run({"translate", path("run")}, text).out, all.out);
  EXPECT_EQ(
      run({"translate", path("run"), "-", "--batch-tokens", "16", "--threads", "1", "--window-lines", "3"}, text).out,
      all.out);
  // Alone: the same, for the first lines.
  std::istringstream sources(text), results(all.out);
  std::string source, result;
  for (int i = 0; i < 3 && std::getline(sources, source) && std::getline(results, result); ++i)
    EXPECT_EQ(run({"translate", path("run")}, source + "\n").out, result + "\n");
}

TEST_F(CommandTest, TranslatesOddInput) {
  const auto translate = [](const std::string& text, std::vector<std::string> flags = {}) {
    flags.insert(flags.begin(), {"translate", path("run")});
    return run(flags, text);
  };
  EXPECT_EQ(translate("").code, 0);
  EXPECT_EQ(translate("").out, "");
  EXPECT_EQ(translate("\n\n").out, "\n\n");
  const std::string one = translate("red house\n").out;
  EXPECT_EQ(lines_of(one), 1);
  EXPECT_EQ(translate("red house").out, one);                  // no newline at the end
  EXPECT_EQ(translate("\xEF\xBB\xBFred house\r\n").out, one);  // byte order mark, CRLF
  EXPECT_EQ(translate("\nred house\n\n").out, "\n" + one + "\n");
  const Ended bad = translate("red house\nred \xff house\n");
  EXPECT_EQ(bad.code, 1);
  EXPECT_TRUE(has(bad.err, "frit: error: standard input:2: invalid UTF-8 at byte 5"));
  const Ended skipped = translate("red \xff\nred house\n", {"--invalid-utf8", "skip"});
  EXPECT_EQ(skipped.code, 0);
  EXPECT_EQ(skipped.out, "\n" + one);
  EXPECT_TRUE(has(skipped.err, "standard input:1"));
}

TEST_F(CommandTest, SearchFlagsChangeTheSearch) {
  const auto translate = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"translate", path("run")});
    const Ended e = run(flags, "big red tree\n");
    EXPECT_EQ(e.code, 0) << e.err;
    return e.out;
  };
  const std::string list = translate({"--nbest", "3"});
  EXPECT_EQ(lines_of(list), 3);
  EXPECT_NE(translate({"--nbest", "3", "--diversity", "3"}), list);
  const std::string ids = translate({"--ids"});
  EXPECT_EQ(ids.find_first_not_of("0123456789 \n"), std::string::npos) << ids;
  double last = 1e30;
  std::istringstream in(list);
  for (std::string line; std::getline(in, line);) {
    EXPECT_TRUE(begins(line, "0 ||| "));
    const double score = std::stod(line.substr(line.rfind(' ')));
    EXPECT_LE(score, last);
    last = score;
  }
  EXPECT_EQ(lines_of(translate({"--scores"})), 1);
  EXPECT_TRUE(begins(translate({"--prefix", "eins zwei"}), "eins zwei"));
  EXPECT_EQ(translate({"--sample", "--seed", "3"}), translate({"--sample", "--seed", "3"}));
  EXPECT_EQ(translate({"--sample", "--top-k", "1"}), translate({"--beam", "1"}));
}

TEST_F(CommandTest, Evaluates) {
  const Ended e = run({"evaluate", path("run"), path("valid.en"), path("valid.de"), "-o", path("valid.out")});
  ASSERT_EQ(e.code, 0) << e.err;
  EXPECT_TRUE(matches(e.out, "BLEU [0-9]+\\.[0-9]\nloss [0-9.]+\nperplexity [0-9.]+\nBLEU = .*\n.*tok:13a.*\n"));
  // The written translations, scored apart, give the same BLEU; a text scored against itself gives 100.
  const Ended apart = run({"evaluate", "--hypotheses", path("valid.out"), "--reference", path("valid.de")});
  EXPECT_EQ(apart.out.substr(0, apart.out.find('\n')), e.out.substr(0, e.out.find('\n')));
  EXPECT_TRUE(
      begins(run({"evaluate", "--hypotheses", path("valid.de"), "--reference", path("valid.de")}).out, "BLEU 100.0\n"));
  EXPECT_EQ(run({"translate", path("run"), path("valid.en")}).out, read_text(folder_ / "valid.out"));
  // The loss is that of the last validation, but for rounding: the same text, the same weights.
  const Ended alone = run({"evaluate", path("run"), path("valid.en"), path("valid.de"), "--no-bleu"});
  EXPECT_TRUE(begins(alone.out, "loss "));
  const double validated = std::stod(trained_.out.substr(trained_.out.find("loss ") + 5));
  EXPECT_NEAR(std::stod(alone.out.substr(5)), validated, 1e-3);
  EXPECT_TRUE(
      has(run({"evaluate", path("run"), path("valid.en"), path("valid.de"), "--json"}).out, "\"perplexity\": "));
}

TEST_F(CommandTest, Measures) {
  const Ended step = run({"bench", "step", "--steps", "2", "--warm", "1", "--model.d_model", "32", "--model.heads", "2",
                          "--model.ffn=64", "--data.vocabulary=100", "--training.batch_tokens=512"});
  EXPECT_EQ(step.code, 0) << step.err;
  EXPECT_GT(nlohmann::json::parse(step.out).at("tokens_per_s").get<double>(), 0);
  const Ended translate = run({"bench", "translate", path("run"), path("valid.en"), "--limit", "5", "--repeat", "2"});
  EXPECT_EQ(translate.code, 0) << translate.err;
  const auto measured = nlohmann::json::parse(translate.out);
  EXPECT_EQ(measured.at("sentences"), 5);
  EXPECT_EQ(measured.at("seconds").size(), 2u);
  EXPECT_GT(measured.at("output_tokens_per_s").get<double>(), 0);
}

TEST_F(CommandTest, WritesTheReport) {
  const Ended e = run({"report", path("run")});
  ASSERT_EQ(e.code, 0) << e.err;
  EXPECT_EQ(e.out, path("run/report.html") + "\n");
  EXPECT_TRUE(has(read_text(folder_ / "run/report.html"), "</html>"));
  EXPECT_EQ(run({"report", path("run"), "--output", path("page.html")}).out, path("page.html") + "\n");
}

TEST_F(CommandTest, PlansWithoutTraining) {
  const Ended e = run({"plan", path("small.toml"), "--run.directory", path("planned")});
  ASSERT_EQ(e.code, 0) << e.err;
  EXPECT_TRUE(has(e.out, "parameters"));
  EXPECT_TRUE(has(e.out, "arena"));
  EXPECT_FALSE(fs::exists(folder_ / "planned/metrics.jsonl"));
}

TEST_F(CommandTest, StopsOnASignalAndGoesOn) {
  for (const int number : {SIGINT, SIGTERM}) {
    const std::string directory = path("stopped-" + std::to_string(number));
    const std::vector<std::string> endless = {"train",    path("small.toml"), "--training.stop_after",
                                              "1000000u", "--run.directory",  directory};
    Process process(folder_, endless);
    ASSERT_TRUE(process.waits_for("valid | step 20", 20)) << process.err();
    process.signal(number);
    const Ended e = process.end();
    EXPECT_EQ(e.code, 128 + number) << e.err;
    EXPECT_EQ(e.out, "");
    EXPECT_TRUE(has(e.err, "run again to go on"));
    expect_error({"translate", directory}, 1, "no model yet");
    const Ended rest = run({"train", path("small.toml"), "--run.directory", directory});
    EXPECT_EQ(rest.code, 0) << rest.err;
    EXPECT_TRUE(has(rest.err, "Going on from"));
    EXPECT_TRUE(begins(rest.out, "model "));
  }
}

TEST_F(CommandTest, AReaderThatLeavesEndsTranslatingQuietly) {
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "red house\n";
  write_text(folder_ / "many.en", text);
  const std::string shell = "\"" + command() + "\" translate \"" + path("run") + "\" \"" + path("many.en") + "\" 2>\"" +
                            path("many.err") + "\" | head -n 1 >\"" + path("many.out") + "\"";
  EXPECT_EQ(std::system(shell.c_str()), 0);
  EXPECT_EQ(lines_of(read_text(folder_ / "many.out")), 1);
  EXPECT_EQ(read_text(folder_ / "many.err"), "");
}

}  // namespace
}  // namespace frit
