#include "apps/cli/generate_flags.h"

#include <CLI/CLI.hpp>

#include "apps/cli/cli.h"
#include "frit/core/error.h"

namespace frit::cli {
namespace {

// Why the model cannot be searched like this; "" if it can.
std::string refusal(const GenerateOptions& options, const TransformerConfig& model) {
  try {
    options.validate(model);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

}  // namespace

void GenerateFlags::add_to(CLI::App& app) {
  const std::string search = "Search", lengths = "Lengths", sampling = "Sampling", machine = "Machine";
  app.add_option("--beam", beam, "Beam size; 1 is greedy")->check(CLI::Range(1, kMostCount))->group(search);
  app.add_option("--nbest", nbest, "Translations of each line, best first")
      ->check(CLI::Range(1, kMostCount))
      ->group(search);
  app.add_option("--length-penalty", length_penalty,
                 "What scores are divided by: none, length (n^alpha) or gnmt (((5+n)/6)^alpha)")
      ->group(search);
  app.add_option("--alpha", alpha, "Exponent of the length penalty")->group(search);
  app.add_option("--early-stopping", early_stopping, "When a beam ends: false, true or never, as in transformers")
      ->group(search);
  app.add_option("--repetition-penalty", repetition_penalty, "Above 1: tokens that are there already get less likely")
      ->group(search);
  app.add_option("--no-repeat-ngram", no_repeat_ngram, "No N tokens in a row occur twice; 0: off")
      ->type_name("N")
      ->check(CLI::Range(0, kMostCount))
      ->group(search);
  app.add_option("--diversity", diversity, "The j-th best continuation of a beam, j from 0, loses D * j; 0: off")
      ->type_name("D")
      ->group(search);
  app.add_option("--prefix", prefix, "Text that every translation begins with")->type_name("TEXT")->group(search);
  app.add_option("--max-length", max_length, "Longest output in tokens, start and end tokens counted")->group(lengths);
  app.add_option("--max-new-tokens", max_new_tokens, "Longest output in tokens, end token counted")->group(lengths);
  app.add_option("--min-length", min_length, "Shortest output, counted like --max-length")->group(lengths);
  app.add_option("--min-new-tokens", min_new_tokens, "Shortest output, counted like --max-new-tokens")->group(lengths);
  CLI::Option* sampled =
      app.add_flag("--sample", sample, "Draw tokens at random instead of taking the best")->group(sampling);
  app.add_option("--top-k", top_k, "Draw among the K likeliest tokens; 0: all")
      ->type_name("K")
      ->check(CLI::Range(0, kMostCount))
      ->needs(sampled)
      ->group(sampling);
  app.add_option("--top-p", top_p, "Draw among the likeliest tokens that together reach probability P")
      ->type_name("P")
      ->needs(sampled)
      ->group(sampling);
  app.add_option("--temperature", temperature, "Above 1: flatter, below 1: sharper")->needs(sampled)->group(sampling);
  app.add_option("--seed", seed, "The same seed draws the same tokens")
      ->check(CLI::NonNegativeNumber)
      ->needs(sampled)
      ->group(sampling);
  app.add_option("--batch-tokens", batch_tokens, "Source tokens translated at once")
      ->check(CLI::Range(1, kMostCount))
      ->group(machine);
  app.add_option("--batch-sentences", batch_sentences, "Sentences translated at once at most; 0: any number")
      ->check(CLI::Range(0, kMostCount))
      ->group(machine);
  app.add_option("--window-lines", window_lines, "Lines read at most before they are sorted into batches")
      ->check(CLI::Range(1, kMostCount))
      ->group(machine);
  app.add_option("--threads", threads, "CPU threads; 0: all cores")->check(CLI::Range(0, 4096))->group(machine);
  app.add_option("--device", device, "cpu, or cuda in a build that has it (else simulator, for tests)")
      ->check(CLI::IsMember({"cpu", "cuda", "simulator"}))
      ->group(machine);
  app.add_option(
         "--workers", workers,
         fmt::format("On a GPU: batches translated side by side, each in memory of its own; 0: {}", kUsualWorkers))
      ->type_name("N")
      ->check(CLI::Range(0, 64))
      ->group(machine);
  app.add_option("--dtype", dtype, "Weights and activations: fp32, on a GPU also fp16 and bf16")
      ->check(CLI::IsMember({"fp32", "fp16", "bf16"}))
      ->group(machine);
  app.add_option(
         "--products", products,
         "On a GPU: rows gives a sentence the same bits in every batch, library is the GPU's; auto picks by size")
      ->check(CLI::IsMember({"auto", "rows", "library"}))
      ->group(machine);
}

TranslatorDevice GenerateFlags::place() const {
  if (device != "cpu" && (device == "cuda") != built_with_cuda())
    throw UsageError(fmt::format("--device {}: this build of frit has {}", device,
                                 built_with_cuda() ? "CUDA, not the simulator" : "no CUDA"));
  if (device == "cpu" && dtype != "fp32")
    throw UsageError(fmt::format("--dtype {} needs --device cuda: on the CPU decoding computes in fp32", dtype));
  if (device == "cpu" && workers > 1)
    throw UsageError(
        fmt::format("--workers {} needs --device cuda: on the CPU all --threads work at one batch", workers));
  TranslatorDevice where;
  where.device = device, where.dtype = dtype, where.workers = workers;
  where.generator.products = parse_products(products);
  return where;
}

TranslateOptions GenerateFlags::apply(const Translator& translator) const {
  TranslateOptions options = translator.default_options();
  GenerateOptions& g = options.generate;
  // Settings of the directory that its own model cannot follow are no fault of the flags: translating refuses them.
  const bool sound = refusal(g, translator.config()).empty();
  const auto set = [](const auto& flag, auto& field) {
    if (flag) field = *flag;
  };
  set(beam, g.beam);
  set(nbest, g.nbest);
  // A flag takes the place of the model's own limit, in whichever of the two ways that one is written.
  if (max_length == 0 || max_new_tokens == 0)
    throw UsageError(fmt::format("--{} is 0, expected 1 or more", max_length == 0 ? "max-length" : "max-new-tokens"));
  if (max_length || max_new_tokens)
    g.max_length = max_length.value_or(0), g.max_new_tokens = max_new_tokens.value_or(0);
  if (min_length || min_new_tokens)
    g.min_length = min_length.value_or(0), g.min_new_tokens = min_new_tokens.value_or(0);
  try {
    if (length_penalty) g.penalty = parse_length_penalty(*length_penalty);
    if (early_stopping) g.early_stopping = parse_early_stopping(*early_stopping);
  } catch (const Error& e) {
    throw UsageError(e.what());
  }
  set(alpha, g.alpha);
  set(diversity, g.diversity);
  set(repetition_penalty, g.repetition_penalty);
  set(no_repeat_ngram, g.no_repeat_ngram);
  g.sampling = sample;
  if (sample) {
    if (beam && *beam != 1) throw UsageError("--sample draws single translations: leave --beam out");
    g.beam = 1;
  } else if (g.nbest > g.beam) {
    if (beam) throw UsageError(fmt::format("--nbest {} needs --beam {} or more", g.nbest, g.nbest));
    g.beam = g.nbest;
  }
  set(top_k, g.top_k);
  set(top_p, g.top_p);
  set(temperature, g.temperature);
  set(seed, g.seed);
  set(batch_tokens, options.batch_tokens);
  set(batch_sentences, options.batch_sentences);
  set(window_lines, options.window_lines);
  options.prefix = prefix;
  if (!sound) return options;
  if (const std::string why = refusal(g, translator.config()); !why.empty()) throw UsageError(why);
  if (const int64_t bad = first_invalid_utf8(prefix); bad >= 0)
    throw UsageError(fmt::format("--prefix is not valid UTF-8 at byte {}", bad + 1));
  const auto tokens = static_cast<int64_t>(translator.tokenizer().encode(Side::kTarget, prefix).size());
  const int64_t most = g.max_length > 0 ? g.max_length : translator.config().max_positions + 1;
  if (1 + tokens >= most)
    throw UsageError(
        fmt::format("--prefix has {} tokens, which leaves no room below the maximum length {}", tokens, most));
  return options;
}

}  // namespace frit::cli
