// `frit evaluate MODEL SOURCE REFERENCE`: BLEU, loss and perplexity of a model on a test set.
#include <CLI/CLI.hpp>
#include <cmath>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/cli/cli.h"
#include "apps/cli/generate_flags.h"
#include "apps/cli/lines.h"
#include "frit/core/error.h"
#include "frit/core/file.h"
#include "frit/data/batcher.h"
#include "frit/models/transformer/transformer.h"
#include "frit/train/bleu.h"

namespace frit::cli {
namespace {

struct Options {
  std::string model, source, reference, hypotheses, output;
  bool json = false, no_loss = false, no_bleu = false;
  GenerateFlags generate;
};

// Cross entropy of the references, without label smoothing.
struct Likelihood {
  double nll = 0;
  int64_t tokens = 0, left_out = 0;
};

// The references' likelihood, in batches of sentences of like length.
Likelihood likelihood(const std::string& directory, const Tokenizer& tokenizer, ThreadPool& pool,
                      const std::vector<std::string>& sources, const std::vector<std::string>& references,
                      int64_t batch_tokens) {
  const auto model = Transformer::load(directory, {});
  const int64_t most = model->config().max_positions;
  Likelihood result;
  std::vector<std::vector<int32_t>> from, to;
  std::vector<int64_t> lengths;
  for (size_t i = 0; i < sources.size(); ++i) {
    auto s = tokenizer.encode(Side::kSource, sources[i]), t = tokenizer.encode(Side::kTarget, references[i]);
    s.push_back(tokenizer.eos_id(Side::kSource));
    t.push_back(tokenizer.eos_id(Side::kTarget));
    const int64_t longest = static_cast<int64_t>(std::max(s.size(), t.size()));
    if (longest > most) {
      ++result.left_out;
      continue;
    }
    from.push_back(std::move(s));
    to.push_back(std::move(t));
    lengths.push_back(longest);
  }
  Memory memory;
  Context context(pool, memory);
  for (const auto& group : plan_inference_batches(lengths, batch_tokens)) {
    Batch batch;
    fill_source_batch(from, group, &batch);
    batch.target_offsets = {0};
    for (const int64_t i : group) {
      batch.target_ids.push_back(static_cast<int32_t>(model->config().start_id));
      batch.target_ids.insert(batch.target_ids.end(), to[i].begin(), to[i].end() - 1);
      batch.labels.insert(batch.labels.end(), to[i].begin(), to[i].end());
      batch.target_offsets.push_back(static_cast<int32_t>(batch.labels.size()));
    }
    LossTotals totals;
    model->evaluate(context, BatchView::of(batch), totals.tensor());
    const Loss loss = totals.loss();
    result.nll += loss.nll;
    result.tokens += loss.tokens;
  }
  return result;
}

int evaluate(const Options& o) {
  if (o.reference.empty() || (o.hypotheses.empty() && (o.model.empty() || o.source.empty())))
    throw UsageError("frit evaluate needs MODEL SOURCE REFERENCE, or --hypotheses FILE --reference FILE");
  if (o.no_bleu && (o.no_loss || !o.hypotheses.empty()))
    throw UsageError("with these flags there is nothing left to compute: leave out --no-bleu or --no-loss");
  if (!o.output.empty() && (o.no_bleu || !o.hypotheses.empty()))
    throw UsageError("--output takes the translations, and with these flags nothing is translated");
  if (!o.hypotheses.empty() && !o.model.empty()) throw UsageError("--hypotheses takes the place of MODEL and SOURCE");
  const std::vector<std::string> references = read_lines(o.reference);
  std::vector<std::string> sources, hypotheses;
  Likelihood likely;  // no tokens: not computed
  const auto same_length = [&](const std::string& path, size_t lines) {
    if (lines != references.size())
      fail("{} has {} lines, {} has {}: line i of one must belong to line i of the other", path, lines, o.reference,
           references.size());
    if (lines == 0) fail("{} has no lines", path);
  };
  if (!o.hypotheses.empty()) {
    hypotheses = read_lines(o.hypotheses);
    same_length(o.hypotheses, hypotheses.size());
  } else {
    sources = read_lines(o.source);
    same_length(o.source, sources.size());
    const std::string directory = model_directory(o.model);
    ThreadPool pool(o.generate.threads);
    Translator translator(directory, pool, o.generate.place());
    translator.on_notice = notice;
    TranslateOptions options = o.generate.apply(translator);
    options.generate.nbest = 1;
    if (!o.no_bleu)
      for (auto& list : translator.translate(sources, options))
        hypotheses.push_back(list.empty() ? "" : std::move(list.front().text));
    if (!o.no_loss) {
      // On the CPU, whose batches are smaller than a GPU's.
      likely = likelihood(directory, translator.tokenizer(), pool, sources, references,
                          std::min(options.batch_tokens, TranslateOptions().batch_tokens));
      if (likely.left_out > 0)
        notice(fmt::format("{} of {} pairs are longer than the model's {} positions and left out of the loss",
                           likely.left_out, sources.size(), translator.config().max_positions));
    }
  }
  if (!o.output.empty()) {
    std::string text;
    for (const std::string& line : hypotheses) text += line + '\n';
    write_file_atomically(o.output, text);
  }

  std::optional<BleuScore> bleu;
  if (!o.no_bleu) bleu = corpus_bleu(hypotheses, references);
  if (o.json) {
    nlohmann::ordered_json out;
    if (bleu) {
      out["bleu"] = bleu->score;
      out["precisions"] = bleu->precisions;
      out["brevity_penalty"] = bleu->brevity_penalty;
      out["signature"] = kBleuSignature;
    }
    if (likely.tokens > 0) {
      out["loss"] = likely.nll / static_cast<double>(likely.tokens);
      out["perplexity"] = std::exp(likely.nll / static_cast<double>(likely.tokens));
      out["target_tokens"] = likely.tokens;
      out["left_out"] = likely.left_out;
    }
    out["sentences"] = references.size();
    std::cout << out.dump(2) << '\n';
    return kGood;
  }
  if (bleu) std::cout << fmt::format("BLEU {:.1f}\n", bleu->score);
  if (likely.tokens > 0) {
    const double loss = likely.nll / static_cast<double>(likely.tokens);
    std::cout << fmt::format("loss {:.4f}\nperplexity {:.2f}\n", loss, std::exp(loss));
  }
  if (bleu) std::cout << bleu->format() << "\n" << kBleuSignature << '\n';
  return kGood;
}

}  // namespace

void add_evaluate(CLI::App& app, Action* action) {
  CLI::App* sub = app.add_subcommand("evaluate", "BLEU, loss and perplexity on a source and its reference");
  auto o = std::make_shared<Options>();
  sub->add_option("MODEL", o->model, "Model directory, or a run directory with a finished model")->type_name("");
  sub->add_option("SOURCE", o->source, "Text to translate, a sentence a line")->type_name("");
  sub->add_option("REFERENCE,--reference", o->reference, "Its translation, line by line")->type_name("REFERENCE");
  sub->add_option("--hypotheses", o->hypotheses, "Score these translations instead of a model's")->type_name("FILE");
  sub->add_option("-o,--output", o->output, "Write the translations to this file")->type_name("FILE");
  sub->add_flag("--json", o->json, "Print everything as JSON");
  sub->add_flag("--no-loss", o->no_loss, "BLEU alone");
  sub->add_flag("--no-bleu", o->no_bleu, "Loss and perplexity alone: nothing is translated");
  o->generate.add_to(*sub);
  sub->footer(
      "Prints `BLEU 12.3` (as sacreBLEU computes it: 13a tokens, case kept), `loss` in nats a target token (no label\n"
      "smoothing), `perplexity`, and sacreBLEU's own line with its signature.\n\n"
      "Examples:\n"
      "  frit evaluate run/model test.en test.de --beam 4\n"
      "  frit evaluate --hypotheses out.de --reference test.de");
  sub->callback([o, action] { *action = [o] { return evaluate(*o); }; });
}

}  // namespace frit::cli
