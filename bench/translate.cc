// Translates a file with a model directory and says how fast: our side of the comparison with the peers in
// bench/peers (ctranslate2_translate.py, transformers_translate.py), with the same options and the same output file.
//
// usage: bench_translate DIR (--input FILE | --ids FILE.json) [--beam 4] [--nbest 1] [--length-penalty 1.0]
//   [--early-stopping false|true|never] [--max-length 256] [--threads 2] [--batch-tokens 2048] [--repeat 3]
//   [--out OUT.json] [--text OUT.txt]
// --input: one sentence a line. --ids: {"sources": [[ids with EOS], ...]}; the directory then needs no tokenizer.
// --max-length counts generated tokens, EOS included. Prints one JSON object; OUT.json is what
// tools/compare_generate.py reads. startup_s: from the start of main to the first sentence's translation.
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "frit/infer/translator.h"

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_utime.tv_sec) + static_cast<double>(usage.ru_utime.tv_usec) * 1e-6;
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

int run(int argc, char** argv) {
  const Clock::time_point begin = Clock::now();
  std::map<std::string, std::string> flags = {{"beam", "4"},
                                              {"nbest", "1"},
                                              {"length-penalty", "1"},
                                              {"early-stopping", "false"},
                                              {"max-length", "256"},
                                              {"threads", "2"},
                                              {"batch-tokens", "2048"},
                                              {"repeat", "3"},
                                              {"input", ""},
                                              {"ids", ""},
                                              {"out", ""},
                                              {"text", ""}};
  std::string directory;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const std::string name = word.starts_with("--") ? word.substr(2) : "";
    if (!name.empty() && flags.count(name) && i + 1 < argc) {
      flags[name] = argv[++i];
    } else if (name.empty() && directory.empty()) {
      directory = word;
    } else {
      std::fprintf(stderr, "bench_translate: cannot use %s; see the first lines of bench/translate.cc\n", word.c_str());
      return 2;
    }
  }
  if (directory.empty() || flags["input"].empty() == flags["ids"].empty()) {
    std::fprintf(stderr, "usage: bench_translate DIR (--input FILE | --ids FILE.json) [options]\n");
    return 2;
  }
  using namespace frit;
  const bool text = flags["ids"].empty();
  ThreadPool pool(std::stoi(flags["threads"]));
  Memory memory;
  Context context(pool, memory);
  std::optional<Translator> translator;
  std::unique_ptr<Transformer> model;
  std::optional<Generator> own;
  if (text) {
    translator.emplace(directory, pool);
  } else {
    model = Transformer::load(directory, {});
    own.emplace(context, *model);
  }
  Generator& generator = text ? translator->generator() : *own;
  const double load_s = seconds_since(begin);

  std::vector<std::vector<int32_t>> sources;
  if (text) {
    std::ifstream in(flags["input"]);
    if (!in) fail("cannot read {}", flags["input"]);
    for (std::string line; std::getline(in, line);) {
      sources.push_back(translator->tokenizer().encode(Side::kSource, line));
      sources.back().push_back(translator->tokenizer().eos_id(Side::kSource));
    }
  } else {
    std::ifstream in(flags["ids"]);
    if (!in) fail("cannot read {}", flags["ids"]);
    sources = Json::parse(in)["sources"].get<std::vector<std::vector<int32_t>>>();
  }
  const TransformerConfig& c = generator.config();
  GenerateOptions options;
  options.beam = std::stoll(flags["beam"]), options.nbest = std::stoll(flags["nbest"]);
  options.alpha = std::stod(flags["length-penalty"]);
  options.early_stopping = parse_early_stopping(flags["early-stopping"]);
  options.max_length = c.max_positions + 1, options.max_new_tokens = std::stoll(flags["max-length"]);
  options.start_id = static_cast<int32_t>(c.start_id), options.eos_ids = {static_cast<int32_t>(c.eos_id)};
  options.forced_eos_id = static_cast<int32_t>(c.eos_id), options.bad_words = {{static_cast<int32_t>(c.pad_id)}};
  std::vector<GenerateInput> inputs;
  for (size_t i = 0; i < sources.size(); ++i) inputs.push_back({sources[i], {}, i});
  const int64_t batch_tokens = std::stoll(flags["batch-tokens"]);

  const Clock::time_point first = Clock::now();
  if (!inputs.empty()) generator.generate(std::span(inputs).first(1), options);
  const double first_s = seconds_since(first);
  std::vector<double> seconds, cpu;
  HypothesisLists lists;
  for (int i = 0; i < std::stoi(flags["repeat"]); ++i) {
    const Clock::time_point start = Clock::now();
    const double cpu_start = cpu_seconds();
    lists = generate_all(generator, inputs, options, batch_tokens);
    seconds.push_back(seconds_since(start)), cpu.push_back(cpu_seconds() - cpu_start);
  }
  int64_t source_tokens = 0, target_tokens = 0;
  for (const auto& s : sources) source_tokens += static_cast<int64_t>(s.size());
  Json outputs = Json::array();
  for (const auto& list : lists) {
    if (!list.empty()) target_tokens += static_cast<int64_t>(list[0].tokens.size());
    Json hypotheses = Json::array();
    for (const Hypothesis& h : list) {
      const Json score = options.beam > 1 ? Json(h.score) : Json();  // transformers gives none for greedy
      hypotheses.push_back({{"tokens", h.tokens}, {"score", score}});
    }
    outputs.push_back(std::move(hypotheses));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const double s = seconds.empty() ? 0 : median(seconds);
  Json about = {{"program", "frit"},
                {"beam", options.beam},
                {"threads", pool.threads()},
                {"batch_tokens", batch_tokens},
                {"sentences", sources.size()},
                {"source_tokens", source_tokens},
                {"target_tokens", target_tokens},
                {"seconds", s},
                {"cpu_s", cpu.empty() ? 0 : median(cpu)},
                {"tokens_per_s", s > 0 ? static_cast<double>(target_tokens) / s : 0},
                {"sentences_per_s", s > 0 ? static_cast<double>(sources.size()) / s : 0},
                {"load_s", load_s},
                {"startup_s", load_s + first_s},
                {"peak_rss_mib", usage.ru_maxrss / 1024}};
  std::printf("%s\n", about.dump().c_str());
  if (!flags["out"].empty()) {
    about["sources"] = sources, about["outputs"] = std::move(outputs);
    std::ofstream(flags["out"]) << about.dump() << "\n";
  }
  if (!flags["text"].empty()) {
    if (!text) fail("--text needs --input");
    std::ofstream out(flags["text"]);
    for (const auto& list : lists) out << (list.empty() ? "" : translator->tokenizer().decode(list[0].tokens)) << "\n";
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "bench_translate: error: %s\n", e.what());
    return 1;
  }
}
