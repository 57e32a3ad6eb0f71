// `frit bench ops|step|decode|translate`: how fast this machine is.
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <regex>

#include "apps/cli/cli.h"
#include "apps/cli/generate_flags.h"
#include "apps/cli/lines.h"
#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/core/philox.h"
#include "frit/infer/translator.h"
#include "frit/train/measure.h"

namespace frit::cli {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double peak_mib() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// Becomes bench_ops, which the build puts beside this program: the case tables belong to the benchmarks, not to the
// command.
int bench_ops(const std::vector<std::string>& flags) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) fail("cannot find my own path: {}", error.message());
  const std::string program = (self.parent_path() / "bench_ops").string();
  std::vector<std::string> texts = {program};
  texts.insert(texts.end(), flags.begin(), flags.end());
  std::vector<char*> arguments;
  for (std::string& text : texts) arguments.push_back(text.data());
  arguments.push_back(nullptr);
  execv(program.c_str(), arguments.data());
  fail("cannot run {}: {} (build it: cmake --build --preset cpu --target bench_ops)", program, std::strerror(errno));
}

struct StepBench {
  std::string config, lengths, model_case, tuning;
  int64_t steps = 20, warm = 3;
  bool parts = false;
};

// "mt-base-128x32": the base or big translation model with a shared vocabulary of 32,768 and its dropout everywhere,
// 128 sentences of 32 tokens on either side. Sets what follows from it in `config`; returns the one batch.
BatchLengths case_batches(const std::string& name, TrainConfig* config) {
  std::smatch part;
  if (!std::regex_match(name, part, std::regex("mt-(base|big)(-([0-9]{1,6})x([0-9]{1,3}))?")))
    throw UsageError(fmt::format(
        "--case {}: expected mt-base or mt-big, with -SENTENCESxTOKENS or --lengths, as in mt-base-128x32", name));
  config->model.preset = "transformer-" + part[1].str();
  config->data.vocabulary = 32768;
  config->model.dropout = config->model.attention_dropout = config->model.activation_dropout =
      part[1] == "base" ? 0.1 : 0.3;
  if (part[3].length() == 0) return {};
  const int64_t sentences = std::stoll(part[3]), tokens = std::stoll(part[4]);
  if (sentences < 1 || tokens < 1) throw UsageError(fmt::format("--case {}: a batch without tokens", name));
  config->training.batch_tokens = sentences * tokens;
  return {std::vector<std::pair<int64_t, int64_t>>(static_cast<size_t>(sentences), {tokens, tokens})};
}

// A case is a model and its batch: the configuration must not say something else of them. Sets what the case says.
// Errors: UsageError naming the key.
BatchLengths apply_case(const std::string& name, TrainConfig* config, const Overrides& overrides) {
  TrainConfig given = *config, usual, wanted;
  const BatchLengths batches = case_batches(name, config);
  case_batches(name, &wanted);
  TrainConfig set = *config;
  const auto given_keys = config_keys(given), usual_keys = config_keys(usual), wanted_keys = config_keys(wanted),
             set_keys = config_keys(set);
  const auto same = [](const ConfigKey& a, const ConfigKey& b) {
    return std::visit([&](auto* value) { return *value == *std::get<decltype(value)>(b.field); }, a.field);
  };
  for (size_t i = 0; i < given_keys.size(); ++i) {
    const std::string& key = given_keys[i].name;
    const bool changed = !same(given_keys[i], usual_keys[i]);
    const bool mentioned = changed || std::any_of(overrides.begin(), overrides.end(),
                                                  [&](const auto& override) { return override.first == key; });
    const bool other_model = key.starts_with("model.") && same(wanted_keys[i], usual_keys[i]) && changed;
    if (other_model || (mentioned && !same(given_keys[i], set_keys[i])))
      throw UsageError(
          fmt::format("--case {} says what is measured, and {} says something else: leave one of them out", name, key));
  }
  return batches;
}

// Batches as training makes them from text: lengths are lognormal (median 21 tokens, sigma 0.6, 2 to 250), sorted, and
// neither side of a batch exceeds the budget. The distribution is that of bench/peers/make_batches.py.
BatchLengths usual_batches(int64_t batch_tokens, int64_t count) {
  const auto uniform = [](uint32_t bits) { return (static_cast<double>(bits) + 0.5) / 4294967296.0; };
  const auto length = [](double x) { return std::clamp<int64_t>(std::llround(x), 2, 250); };
  std::vector<std::pair<int64_t, int64_t>> pairs;
  int64_t tokens = 0;
  for (uint32_t i = 0; tokens < batch_tokens * count; ++i) {
    const PhiloxBlock b = philox({1, 0}, i, 0, 0, 0);
    const double radius = std::sqrt(-2 * std::log(uniform(b.v[0]))), angle = 2 * M_PI * uniform(b.v[1]);
    const int64_t source = length(21 * std::exp(0.6 * radius * std::cos(angle)));
    const int64_t target = length(static_cast<double>(source) * (1.05 + 0.15 * radius * std::sin(angle)));
    pairs.emplace_back(source, target);
    tokens += std::max(source, target);
  }
  std::sort(pairs.begin(), pairs.end());
  BatchLengths batches(1);
  int64_t from = 0, to = 0;
  for (const auto& [source, target] : pairs) {
    if (!batches.back().empty() && std::max(from + source, to + target) > batch_tokens) {
      batches.emplace_back();
      from = to = 0;
    }
    batches.back().emplace_back(source, target);
    from += source, to += target;
  }
  return batches;
}

int bench_step(const StepBench& o, const Overrides& overrides) {
  TrainConfig config = load_config(o.config, overrides);
  BatchLengths batches;
  if (!o.model_case.empty()) batches = apply_case(o.model_case, &config, overrides);
  if (!batches.empty() && !o.lengths.empty())
    throw UsageError(
        fmt::format("--case {} says what a batch is, and so does --lengths: give mt-base or mt-big", o.model_case));
  if (!o.lengths.empty()) {
    batches = parse_batch_lengths(read_file(o.lengths));
    if (batches.empty()) fail("{} has no batches", o.lengths);
    // What a batch may hold, as training would have been told.
    int64_t most = 16;
    for (const auto& batch : batches) {
      int64_t source = 0, target = 0;
      for (const auto& [s, t] : batch) source += s, target += t;
      most = std::max({most, source, target});
    }
    config.training.batch_tokens = most;
  }
  if (batches.empty()) batches = usual_batches(config.training.batch_tokens, 16);
  std::cout << measure_training(config, batches, o.steps, o.warm, o.parts, o.tuning).to_json(o.model_case) << '\n';
  return kGood;
}

struct DecodeBench {
  std::vector<std::string> cases;
  std::string dtype, products = "auto";
  int64_t repeat = 9, warm = 2, few_rows = GeneratorOptions().few_rows, ahead = GeneratorOptions().steps_ahead;
  bool tune = false, parts = false, survivors = false, no_graphs = false;
};

// "mt-base-32x32-beam4-b1": model, source and output tokens of each sentence, beam, sentences.
struct DecodeCase {
  std::string model;
  int64_t source = 0, target = 0, beam = 0, batch = 0;
};
DecodeCase decode_case(const std::string& name) {
  std::smatch part;
  if (!std::regex_match(
          name, part, std::regex("(mt-tiny|mt-base|mt-big)-([0-9]{1,3})x([0-9]{1,3})-beam([0-9]{1,3})-b([0-9]{1,5})")))
    throw UsageError(fmt::format(
        "--case {}: expected a name as mt-base-32x32-beam4-b8: source tokens, output tokens, beam, sentences", name));
  const DecodeCase c{part[1], std::stoll(part[2]), std::stoll(part[3]), std::stoll(part[4]), std::stoll(part[5])};
  if (c.source < 1 || c.target < 1 || c.beam < 1 || c.batch < 1 || std::max(c.source, c.target) > 512)
    throw UsageError(fmt::format("--case {}: numbers must be 1 or more, and at most 512 tokens", name));
  return c;
}

// The rows of the table of inference (docs/benchmarks.md), and greedy search beside them.
std::vector<std::string> usual_decode_cases() {
  std::vector<std::string> cases;
  for (const char* beam : {"4", "1"}) {
    for (const char* batch : {"1", "8", "32", "128"})
      cases.push_back(fmt::format("mt-base-32x32-beam{}-b{}", beam, batch));
    for (const char* batch : {"1", "32"}) cases.push_back(fmt::format("mt-big-32x32-beam{}-b{}", beam, batch));
  }
  return cases;
}

// Random weights; EOS is banned until the last token, so that every output has the same length.
int bench_decode(const DecodeBench& o, const Overrides& overrides) {
  const TrainConfig config = load_config("", overrides);
  const std::vector<std::string> names = o.cases.empty() ? usual_decode_cases() : o.cases;
  std::vector<DecodeCase> cases;
  for (const std::string& name : names) cases.push_back(decode_case(name));
  ThreadPool pool(static_cast<int>(config.run.threads));
  const std::unique_ptr<Gpu> gpu = open_gpu(config.run.device);
  const std::string dtype = !o.dtype.empty() ? o.dtype : config.run.device == "cuda" ? "fp16" : "fp32";
  const Precision precision = decoding_precision(dtype, gpu != nullptr);
  GeneratorOptions how;
  how.products = parse_products(o.products), how.survivors = o.survivors, how.graphs = !o.no_graphs;
  how.few_rows = o.few_rows, how.steps_ahead = o.ahead;
  Memory memory(gpu.get());
  Context context(pool, memory, gpu.get());
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Generator> generator;
  std::string loaded;
  Tuning tuning;
  for (size_t i = 0; i < cases.size(); ++i) {
    const DecodeCase& c = cases[i];
    if (loaded != c.model) {
      generator.reset(), model.reset();
      TransformerConfig sizes = TransformerConfig::preset("transformer-" + c.model.substr(3));
      sizes.source_vocab = sizes.target_vocab = 32768, sizes.max_positions = 512;
      sizes.pad_id = sizes.start_id = 1, sizes.eos_id = 2;
      model = std::make_unique<Transformer>(sizes, Transformer::Options{.precision = precision, .device = gpu.get()});
      model->initialise(1);
      loaded = c.model;
    }
    generator = std::make_unique<Generator>(context, *model, how);
    std::vector<std::vector<int32_t>> sources;
    for (uint32_t s = 0; s < c.batch; ++s) {
      sources.emplace_back();
      for (uint32_t t = 0; t < c.source; ++t)
        sources.back().push_back(static_cast<int32_t>(10 + philox({1, 0}, s, t, 0, 0).v[0] % 32000));
    }
    std::vector<GenerateInput> inputs;
    for (size_t s = 0; s < sources.size(); ++s) inputs.push_back({sources[s], {}, s});
    GenerateOptions options;
    options.beam = c.beam, options.start_id = 1, options.eos_ids = {2};
    options.min_new_tokens = options.max_new_tokens = c.target;
    const auto begin = Clock::now();
    generator->generate(inputs, options);
    const double first = seconds_since(begin);
    int64_t tuned = 0;
    if (o.tune) tuned = generator->tune(tuning);
    for (int64_t r = 0; r < o.warm; ++r) generator->generate(inputs, options);
    std::vector<double> ms, encoder, search;
    size_t tokens = 0;
    for (int64_t r = 0; r < o.repeat; ++r) {
      const auto start = Clock::now();
      const auto lists = generator->generate(inputs, options);
      ms.push_back(1e3 * seconds_since(start));
      tokens = 0;
      for (const auto& list : lists) tokens += list.at(0).tokens.size();
      encoder.push_back(generator->report().encoder_ms), search.push_back(generator->report().search_ms);
    }
    if (tokens != static_cast<size_t>(c.batch * c.target))
      fail("[bench] {} output tokens, expected {}", tokens, c.batch * c.target);
    const GenerateReport& report = generator->report();
    const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    nlohmann::ordered_json out = {
        {"benchmark", "decode"}, {"case", names[i]},       {"device", gpu ? gpu->name() : "cpu"},
        {"dtype", dtype},        {"products", o.products}, {"ms", median(ms)}};
    out["encoder_ms"] = median(encoder), out["search_ms"] = median(search);
    out["us_per_step"] = report.steps > 0 ? 1e3 * median(search) / static_cast<double>(report.steps) : 0.0;
    out["steps"] = report.steps, out["kernels_per_step"] = report.kernels, out["products_per_step"] = report.products;
    out["output_tokens_per_s"] = 1e3 * static_cast<double>(tokens) / median(ms);
    out["sentences_per_s"] = 1e3 * static_cast<double>(c.batch) / median(ms);
    out["first_call_ms"] = 1e3 * first, out["products_tuned"] = tuned;
    out["weights_mib"] = mib(model->workspace().bytes()), out["cache_mib"] = mib(report.cache_bytes);
    out["state_mib"] = mib(report.state_bytes), out["arena_mib"] = mib(report.arena_bytes);
    out["library_mib"] = gpu ? mib(static_cast<int64_t>(gpu->library_bytes())) : 0.0;
    if (o.survivors) out["survivors_mean"] = report.survivors_mean, out["survivors_most"] = report.survivors_most;
    out["all_ms"] = ms;
    if (o.parts)
      out["parts_us"] = generator->time_parts(inputs, options, c.target / 2,
                                              static_cast<int>(std::min<int64_t>(10, c.target / 2 - 2)));
    std::cout << out.dump() << std::endl;
  }
  return kGood;
}

struct TranslateBench {
  std::string model, file;
  int64_t repeat = 3, limit = 0, latency_lines = 0;
  bool survivors = false;
  GenerateFlags generate;
};

// How many logits of a row HARS collects, over all batches of the lines.
void count_survivors(Translator& translator, const std::vector<std::string>& lines, const TranslateOptions& options,
                     nlohmann::ordered_json* out) {
  double sum = 0, most = 0;
  int64_t rows = 0;
  for (size_t begin = 0; begin < lines.size(); begin += 100) {
    const std::span<const std::string> some(lines.data() + begin, std::min<size_t>(100, lines.size() - begin));
    TranslateOptions one = options;  // in a single batch: a report is the last batch's
    one.batch_tokens = 100 * translator.config().max_positions, one.batch_sentences = 0;
    translator.translate(some, one);
    const GenerateReport& report = translator.generator().report();
    sum += report.survivors_mean * static_cast<double>(report.survivors_rows), rows += report.survivors_rows;
    most = std::max(most, report.survivors_most);
  }
  (*out)["survivors_mean"] = rows > 0 ? sum / static_cast<double>(rows) : 0.0;
  (*out)["survivors_most"] = most, (*out)["survivors_rows"] = rows;
}

int bench_translate(const TranslateBench& o) {
  std::vector<std::string> lines = read_lines(o.file);
  if (o.limit > 0 && o.limit < static_cast<int64_t>(lines.size())) lines.resize(o.limit);
  if (lines.empty()) fail("{} has no lines", o.file);
  const std::string directory = model_directory(o.model);
  ThreadPool pool(o.generate.threads);
  const auto begin = Clock::now();
  TranslatorDevice place = o.generate.place();
  if (o.survivors && place.device == "cpu") throw UsageError("--survivors counts on a GPU: add --device cuda");
  place.generator.survivors = o.survivors;
  if (o.survivors && place.device != "cpu") place.workers = 1;  // they are in the report of one
  Translator translator(directory, pool, place);
  const TranslateOptions options = o.generate.apply(translator);
  // Start-up ends when the first word is translated: laying out the weights may wait until then.
  const std::string first = lines.front().substr(0, lines.front().find(' '));
  translator.translate(std::span(&first, 1), options);
  const double startup = seconds_since(begin);
  int64_t source_tokens = 0, tokens = 0;
  for (const std::string& line : lines)
    source_tokens += static_cast<int64_t>(translator.tokenizer().encode(Side::kSource, line).size()) + 1;
  std::vector<double> times;
  for (int64_t r = 0; r < o.repeat; ++r) {
    const auto start = Clock::now();
    const auto results = translator.translate(lines, options);
    times.push_back(seconds_since(start));
    tokens = 0;
    for (const auto& list : results)
      if (!list.empty()) tokens += static_cast<int64_t>(list.front().tokens.size());
  }
  const double seconds = median(times);
  std::vector<double> alone;
  const auto few = std::min(static_cast<size_t>(o.latency_lines), lines.size());
  for (size_t i = 0; i < few; ++i) {
    const auto start = Clock::now();
    translator.translate(std::span(&lines[i], 1), options);
    alone.push_back(1e3 * seconds_since(start));
  }
  std::sort(alone.begin(), alone.end());
  const auto share = [&](double p) {
    return alone[static_cast<size_t>(std::llround(p * static_cast<double>(alone.size() - 1)))];
  };
  nlohmann::ordered_json out = {{"benchmark", "translate"},
                                {"device", place.device},
                                {"dtype", place.dtype},
                                {"sentences", lines.size()},
                                {"source_tokens", source_tokens},
                                {"output_tokens", tokens},
                                {"beam", options.generate.beam},
                                {"batch_tokens", options.batch_tokens},
                                {"batch_sentences", options.batch_sentences},
                                {"threads", pool.threads()},
                                {"workers", translator.workers()},
                                {"startup_s", startup},
                                {"seconds", times},
                                {"output_tokens_per_s", static_cast<double>(tokens) / seconds},
                                {"sentences_per_s", static_cast<double>(lines.size()) / seconds},
                                {"peak_mib", peak_mib()}};
  if (!alone.empty())
    out["latency_lines"] = alone.size(), out["latency_ms_p50"] = share(0.5), out["latency_ms_p99"] = share(0.99);
  if (place.device != "cpu") {
    // Of all workers, whose buffers are those of their largest calls.
    int64_t caches = 0, states = 0, arenas = 0, recorded = 0;
    for (int w = 0; w < translator.workers(); ++w) {
      const GenerateReport& report = translator.generator(w).report();
      caches += report.cache_bytes, states += report.state_bytes, arenas += report.arena_bytes;
      recorded += report.recorded;
    }
    const int64_t weights = translator.weight_bytes(), library = translator.library_bytes();
    const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
    out["graphs_recorded"] = recorded;
    out["cache_mib"] = mib(caches), out["state_mib"] = mib(states), out["arena_mib"] = mib(arenas);
    out["library_mib"] = mib(library), out["weights_mib"] = mib(weights);
    out["gpu_mib"] = mib(caches + states + arenas + library + weights);
  }
  if (o.survivors) count_survivors(translator, lines, options, &out);
  std::cout << out.dump(2) << '\n';
  return kGood;
}

}  // namespace

void add_bench(CLI::App& app, const Overrides& overrides, Action* action) {
  CLI::App* sub = app.add_subcommand("bench", "Measures operators, training steps or translation");
  sub->require_subcommand(1);

  CLI::App* ops = sub->add_subcommand("ops", "Operators, each beside a plain copy of the same bytes");
  auto flags = std::make_shared<std::vector<std::string>>();
  ops->add_option("flags", *flags, "Flags of Google Benchmark, behind --: -- --benchmark_filter=layer_norm");
  ops->callback([flags, action] { *action = [flags] { return bench_ops(*flags); }; });

  CLI::App* step = sub->add_subcommand("step", "Training steps on random tokens: tokens a second, phases, memory");
  auto s = std::make_shared<StepBench>();
  step->add_option("CONFIG.toml", s->config, "Configuration: model, precision, threads (default: all defaults)")
      ->type_name("");
  step->add_option("--lengths", s->lengths, "Batches as bench/peers/make_batches.py writes them (default: alike)")
      ->type_name("FILE");
  step->add_option("--case", s->model_case, "mt-base-128x32, mt-big-512x32, ...: model, vocabulary, dropout and batch")
      ->type_name("NAME");
  step->add_option("--steps", s->steps, "Steps that are timed")->check(CLI::Range(1, kMostCount));
  step->add_option("--warm", s->warm, "Steps before that")->check(CLI::Range(0, kMostCount));
  step->add_option("--tuning", s->tuning, "On a GPU: keep what timing found in this file, and read it if it is there")
      ->type_name("FILE");
  step->add_flag("--parts", s->parts, "On a GPU: also time each kernel's share of the step apart");
  describe_overrides(*step);
  step->footer(
      "Prints JSON.\n\nExamples:\n  frit bench step --model.preset transformer-small --run.threads 2\n"
      "  frit bench step --case mt-base-128x32 --run.device cuda --training.precision bf16-stochastic");
  step->callback([s, action, &overrides] { *action = [s, &overrides] { return bench_step(*s, overrides); }; });

  CLI::App* decode = sub->add_subcommand("decode", "Translation of random tokens to outputs of a fixed length");
  auto d = std::make_shared<DecodeBench>();
  decode
      ->add_option(
          "--case", d->cases,
          "mt-base-32x32-beam4-b8, mt-big-...: source tokens, output tokens, beam, sentences (default: all usual ones)")
      ->type_name("NAME");
  decode->add_option("--dtype", d->dtype, "fp32, fp16 or bf16 (default: fp16 with --run.device cuda, else fp32)")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16"}));
  decode->add_option("--products", d->products, "On a GPU: auto, rows (the same bits in every batch) or library")
      ->check(CLI::IsMember({"auto", "rows", "library"}));
  decode->add_option("--few-rows", d->few_rows, "On a GPU, with --products auto: products of up to N rows go by rows")
      ->type_name("N")
      ->check(CLI::Range(0, kMostCount));
  decode->add_option("--ahead", d->ahead, "On a GPU: steps that are queued ahead")
      ->type_name("N")
      ->check(CLI::Range(1, kMostCount));
  decode->add_option("--repeat", d->repeat, "Calls that are timed; the median counts")
      ->check(CLI::Range(1, kMostCount));
  decode->add_option("--warm", d->warm, "Calls before that, beside the first")->check(CLI::Range(0, kMostCount));
  decode->add_flag("--tune", d->tune, "On a GPU: time the library's products first");
  decode->add_flag("--parts", d->parts, "On a GPU: also time each kernel's share of a step apart");
  decode->add_flag("--survivors", d->survivors, "On a GPU: count the logits that HARS collects (without graphs)");
  decode->add_flag("--no-graphs", d->no_graphs, "On a GPU: steps are not recorded");
  describe_overrides(*decode);
  decode->footer(
      "Prints a line of JSON a case.\n\nExample:\n"
      "  frit bench decode --case mt-base-32x32-beam4-b1 --run.device cuda");
  decode->callback([d, action, &overrides] { *action = [d, &overrides] { return bench_decode(*d, overrides); }; });

  CLI::App* translate = sub->add_subcommand("translate", "Start-up time and output tokens a second of a model");
  auto t = std::make_shared<TranslateBench>();
  translate->add_option("MODEL", t->model, "Model directory")->type_name("")->required();
  translate->add_option("FILE", t->file, "Sentences, one a line")->type_name("")->required();
  translate->add_option("--repeat", t->repeat, "Times the file is translated; the median counts")
      ->check(CLI::Range(1, kMostCount));
  translate->add_option("--limit", t->limit, "Translate the first N lines alone; 0: all")
      ->type_name("N")
      ->check(CLI::Range(0, kMostCount));
  translate->add_option("--latency-lines", t->latency_lines, "Also translate the first N lines one by one: p50, p99")
      ->type_name("N")
      ->check(CLI::Range(0, kMostCount));
  translate->add_flag("--survivors", t->survivors,
                      "On a GPU: count the logits that HARS collects (without graphs; times are of no use then)");
  t->generate.add_to(*translate);
  translate->footer("Prints JSON.\n\nExample:\n  frit bench translate run/model test.en --beam 4 --threads 2");
  translate->callback([t, action] { *action = [t] { return bench_translate(*t); }; });

  sub->footer(
      "Examples:\n"
      "  frit bench ops -- --benchmark_filter=layer_norm\n"
      "  frit bench step --model.preset transformer-small\n"
      "  frit bench decode --case mt-base-32x32-beam4-b1\n"
      "  frit bench translate run/model test.en");
}

}  // namespace frit::cli
