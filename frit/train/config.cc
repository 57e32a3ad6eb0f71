#include "frit/train/config.h"

#include <fmt/format.h>

#include <toml++/toml.h>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "frit/core/error.h"
#include "frit/core/nearest.h"
#include "frit/train/period.h"

namespace frit {

std::vector<ConfigKey> config_keys(TrainConfig& c) {
  auto& m = c.model;
  auto& d = c.data;
  auto& t = c.training;
  auto& v = c.validation;
  auto& r = c.run;
  return {
      {"model.preset",
       &m.preset,
       "Sizes to start from; the keys below change single ones.",
       {"transformer-tiny", "transformer-small", "transformer-base", "transformer-big"}},
      {"model.encoder_layers", &m.encoder_layers, "Encoder layers; -1 takes the preset's.", {}},
      {"model.decoder_layers", &m.decoder_layers, "Decoder layers; -1 takes the preset's.", {}},
      {"model.d_model", &m.d_model, "Hidden width H; -1 takes the preset's.", {}},
      {"model.heads", &m.heads, "Attention heads; must divide d_model; -1 takes the preset's.", {}},
      {"model.ffn", &m.ffn, "Width of the feed-forward layers; -1 takes the preset's.", {}},
      {"model.max_positions",
       &m.max_positions,
       "Longest sentence the model can read, in tokens; -1 takes the preset's.",
       {}},
      {"model.activation",
       &m.activation,
       "Activation of the feed-forward layers; empty takes the preset's.",
       {"", "relu", "gelu", "gelu_new", "swish"}},
      {"model.norm",
       &m.norm,
       "LayerNorm after each sublayer (post) or before it (pre); empty takes the preset's. transformers has no pre-LN "
       "Marian.",
       {"", "post", "pre"}},
      {"model.positions",
       &m.positions,
       "Position embeddings; empty takes the preset's. transformers has no Marian model with learned ones.",
       {"", "sinusoidal", "learned"}},
      {"model.embeddings",
       &m.embeddings,
       "One embedding for source, target and output, or one for the source and one for target and output; empty takes "
       "the preset's.",
       {"", "shared", "separate"}},
      {"model.scale_embedding",
       &m.scale_embedding,
       "Multiply embeddings by sqrt(d_model); empty takes the preset's.",
       {"", "true", "false"}},
      {"model.dropout",
       &m.dropout,
       "Chance to zero an element of each sublayer's output and of the embedding; -1 takes the preset's.",
       {}},
      {"model.attention_dropout",
       &m.attention_dropout,
       "Chance to zero an attention probability; -1 takes the preset's.",
       {}},
      {"model.activation_dropout",
       &m.activation_dropout,
       "Chance to zero an element after the activation; -1 takes the preset's.",
       {}},
      {"model.init_from",
       &m.init_from,
       "Model directory (Hugging Face layout) whose configuration and weights training starts from.",
       {}},

      {"data.train_source", &d.train_source, "Source side of the training text, one sentence a line, UTF-8.", {}},
      {"data.train_target", &d.train_target, "Target side of the training text, line by line the translation.", {}},
      {"data.valid_source", &d.valid_source, "Source side of the validation text; empty: no validation.", {}},
      {"data.valid_target", &d.valid_target, "Target side of the validation text.", {}},
      {"data.tokenizer",
       &d.tokenizer,
       "Directory with source.spm, target.spm and vocab.json to use; empty: SentencePiece is trained on the training "
       "text.",
       {}},
      {"data.vocabulary",
       &d.vocabulary,
       "Tokens of the vocabulary when SentencePiece is trained, </s>, <unk> and <pad> included; a side if not joint.",
       {}},
      {"data.tokenizer_kind", &d.tokenizer_kind, "Kind of SentencePiece model to train.", {"bpe", "unigram"}},
      {"data.joint_vocabulary", &d.joint_vocabulary, "One SentencePiece model for both languages.", {}},
      {"data.byte_fallback", &d.byte_fallback, "Unknown characters become their bytes instead of <unk>.", {}},
      {"data.max_length",
       &d.max_length,
       "Longest training sentence in tokens; longer pairs are left out, counted and reported.",
       {}},
      {"data.invalid_utf8",
       &d.invalid_utf8,
       "What to do with lines that are not UTF-8: stop with an error, or leave the pair out and count it.",
       {"error", "skip"}},
      {"data.subword_alpha",
       &d.subword_alpha,
       "Subword regularisation: smoothing of sampling (unigram) or chance to drop a merge (bpe); 0 turns it off.",
       {}},
      {"data.subword_nbest",
       &d.subword_nbest,
       "Candidates that subword regularisation samples from; -1: all. Unigram only.",
       {}},
      {"data.window", &d.window, "Batches in a window of sentences that is sorted by length.", {}},
      {"data.prefetch", &d.prefetch, "Batches prepared ahead by the prefetching thread.", {}},

      {"training.precision",
       &t.precision,
       "What parameters, gradients and activations are kept in; fp16 needs a GPU. Empty: fp32 on the CPU, bf16-master "
       "on "
       "a GPU.",
       {"", "fp32", "bf16-master", "bf16-stochastic", "bf16-residual", "fp16-master", "fp16-stochastic"}},
      {"training.batch_tokens",
       &t.batch_tokens,
       "Token budget of a batch: neither its source nor its target tokens exceed it; 0: the largest that fits on the "
       "GPU.",
       {}},
      {"training.accumulate",
       &t.accumulate,
       "Batches an update accumulates, normalised by the target tokens of all of them.",
       {}},
      {"training.optimizer", &t.optimizer, "Update rule.", {"adam", "adamw", "sgd"}},
      {"training.learning_rate", &t.learning_rate, "Highest learning rate, reached at the end of the warm-up.", {}},
      {"training.beta1", &t.beta1, "Adam: decay of the first moment.", {}},
      {"training.beta2", &t.beta2, "Adam: decay of the second moment.", {}},
      {"training.eps", &t.eps, "Adam: added to the root of the second moment.", {}},
      {"training.momentum", &t.momentum, "SGD: momentum.", {}},
      {"training.weight_decay",
       &t.weight_decay,
       "Weight decay of matrices: decoupled for adamw, added to the gradient otherwise.",
       {}},
      {"training.schedule",
       &t.schedule,
       "Learning rate after the warm-up; cosine and linear end at stop_after. The rate depends on the updates done, "
       "never "
       "on time (a resumed run would have other bits): if stop_after_seconds comes first, the rate is cut off above "
       "its "
       "end, and frit train says at what.",
       {"inverse-sqrt", "cosine", "linear", "constant"}},
      {"training.warmup",
       &t.warmup,
       "Period of linear warm-up: 4000u (updates), 2e (epochs) or 10Mt (target tokens).",
       {}},
      {"training.stop_after", &t.stop_after, "Period after which training ends: 100000u, 20e or 500Mt.", {}},
      {"training.stop_after_seconds",
       &t.stop_after_seconds,
       "Training also ends after this many seconds of training time, resumed runs counted together; 0: no limit.",
       {}},
      {"training.clip_norm",
       &t.clip_norm,
       "Largest global gradient norm; larger gradients are scaled down to it; 0: no clipping.",
       {}},
      {"training.label_smoothing",
       &t.label_smoothing,
       "Share of the target probability spread over the vocabulary.",
       {}},
      {"training.seed", &t.seed, "Seed of initialisation, shuffling, dropout, sampling and stochastic rounding.", {}},
      {"training.loss_scale",
       &t.loss_scale,
       "fp16: what the loss is multiplied by at first; it halves when a gradient is not finite.",
       {}},
      {"training.loss_scale_growth",
       &t.loss_scale_growth,
       "fp16: updates without such a gradient after which the loss scale doubles; 0: never.",
       {}},
      {"training.rounding",
       &t.rounding,
       "How the precisions that keep 16 bits alone round an update: nearest is the published form, which loses those "
       "below half a spacing. To compare with.",
       {"stochastic", "nearest"}},
      {"training.trainer",
       &t.trainer,
       "How parameters are updated: all in one pass, or tensor by tensor over fp32 copies, as programs did before; the "
       "same bits. fp32 or an fp32 master alone. To compare with.",
       {"fused", "per_tensor"}},
      {"training.count_swallowed",
       &t.count_swallowed,
       "Count the updates too small to change a parameter as it is stored; each log line gives their share, and "
       "swallowed.jsonl those of every tensor. Costs one more read of the model an update.",
       {}},
      {"training.ema_decay",
       &t.ema_decay,
       "Exponential moving average of weights, used for validation and the saved model: decay an update; 0: off.",
       {}},
      {"training.average_checkpoints",
       &t.average_checkpoints,
       "The final model averages this many newest checkpoints; 0 or 1: off.",
       {}},
      {"training.log_every", &t.log_every, "Period between progress lines and metrics.", {}},
      {"training.valid_every", &t.valid_every, "Period between validations.", {}},
      {"training.save_every", &t.save_every, "Period between checkpoints.", {}},
      {"training.keep_every",
       &t.keep_every,
       "Checkpoints at multiples of this many updates (5000u) are never deleted; empty: none.",
       {}},
      {"training.keep", &t.keep, "Newest checkpoints kept, beside the best and the periodic ones.", {}},
      {"training.early_stopping_metric",
       &t.early_stopping_metric,
       "Validation figure that decides the best checkpoint and early stopping.",
       {"loss", "bleu"}},
      {"training.patience",
       &t.patience,
       "Validations without improvement after which training ends; 0: no early stopping.",
       {}},
      {"training.min_delta", &t.min_delta, "Smallest change that counts as improvement.", {}},
      {"training.recompute",
       &t.recompute,
       "What backward computes again instead of keeping: nothing, norms and activations, or whole layers.",
       {"none", "activations", "layer"}},
      {"training.criterion_rows",
       &t.criterion_rows,
       "Target tokens whose logits are held at a time, rounded up to a multiple of 256; 0: all; -1: 512 on the CPU, "
       "half of batch_tokens on a GPU, but 2048 to 4096.",
       {}},
      {"training.max_not_finite",
       &t.max_not_finite,
       "Updates in a row with a loss or gradient that is not finite (each is skipped and reported) before training "
       "stops with an error.",
       {}},

      {"validation.beam", &v.beam, "Beam size of the validation translations; 1 is greedy.", {}},
      {"validation.max_sentences",
       &v.max_sentences,
       "Sentences of the validation text that are translated for BLEU; 0: all.",
       {}},
      {"validation.samples", &v.samples, "Translations written to the metrics at each validation.", {}},
      {"validation.length_penalty", &v.length_penalty, "Scores are divided by length^this.", {}},
      {"validation.bleu", &v.bleu, "Translate and compute BLEU at each validation.", {}},

      {"run.directory",
       &r.directory,
       "Where checkpoints, metrics, the tokenizer and the model go; training resumes from what is there.",
       {}},
      {"run.threads", &r.threads, "CPU threads; 0: all cores.", {}},
      {"run.device",
       &r.device,
       "Where to train: the CPU, an NVIDIA GPU, or (for tests; thousands of times slower) the GPU's kernels simulated "
       "on "
       "the CPU.",
       {"cpu", "cuda", "simulator"}},
      {"run.attention",
       &r.attention,
       "Forces an implementation of attention; empty: chosen. CPU: flash, or materialised, which takes its memory from "
       "the heap, unplanned. GPU: short, cudnn, materialised.",
       {"", "flash", "short", "cudnn", "materialised"}},
      {"run.gemm",
       &r.gemm,
       "Forces an implementation of matrix products; empty: chosen. onednn takes fp32 alone.",
       {"", "packed", "onednn"}},
      {"run.bias_gradient",
       &r.bias_gradient,
       "On a GPU: with_product lets the library of products sum the gradients of biases; empty: our kernels do, which "
       "is "
       "faster on an H200.",
       {"", "with_product"}},
      {"run.fused_norm",
       &r.fused_norm,
       "On a GPU: a sublayer's end and the LayerNorm behind it in one launch, forward and backward; false: apart, to "
       "compare.",
       {}},
      {"run.graphs", &r.graphs, "On a GPU: record the steps of each batch size as a graph, and replay it.", {}},
      {"run.planned_memory",
       &r.planned_memory,
       "Temporaries lie where a plan made before the first step says; false: they come from a caching allocator (on "
       "the "
       "CPU from the heap) as they are asked for, and there are no graphs. To compare with.",
       {}},
      {"run.packed",
       &r.packed,
       "Batches are packed, without padding; false: every sentence is filled up to its batch's longest, and all of it "
       "is "
       "computed. The same losses but for rounding and dropout's masks. To compare with.",
       {}},
      {"run.dump_steps",
       &r.dump_steps,
       "Write the batches and learning rates of this many first updates to batches.jsonl, and the weights before them "
       "to "
       "start.safetensors, so that another program can train the same.",
       {}},
      {"run.tensorboard", &r.tensorboard, "Write TensorBoard event files beside metrics.jsonl.", {}},
  };
}

namespace {

const char* kind_of(const ConfigKey& key) {
  return std::visit(
      [](auto* field) {
        using T = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<T, std::string>) return "a text in quotes";
        if constexpr (std::is_same_v<T, int64_t>) return "a whole number";
        if constexpr (std::is_same_v<T, double>) return "a number";
        return "true or false";
      },
      key.field);
}

ConfigKey& find_key(std::vector<ConfigKey>& keys, std::string_view name) {
  std::vector<std::string> names;
  for (ConfigKey& key : keys) {
    if (key.name == name) return key;
    names.push_back(key.name);
  }
  // The last part alone is often all that is misplaced: compare that too.
  std::string nearest = nearest_name(name, names);
  const std::string_view last = name.substr(name.rfind('.') + 1);
  for (const std::string& candidate : names)
    if (std::string_view(candidate).substr(candidate.rfind('.') + 1) == last) nearest = candidate;
  fail("[config] unknown key {}{}", name, nearest.empty() ? "" : fmt::format("; did you mean {}?", nearest));
}

void check_choice(const ConfigKey& key, const std::string& value) {
  if (key.choices.empty() || std::find(key.choices.begin(), key.choices.end(), value) != key.choices.end()) return;
  std::string list;
  for (const std::string& choice : key.choices)
    if (!choice.empty()) list += (list.empty() ? "" : ", ") + choice;
  fail("[config] {} is \"{}\", expected one of: {}", key.name, value, list);
}

[[noreturn]] void fail_kind(const ConfigKey& key, std::string_view value) {
  fail("[config] {} is \"{}\", expected {}", key.name, value, kind_of(key));
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char ch : text) {
    if (ch == '"' || ch == '\\') result += '\\';
    if (static_cast<unsigned char>(ch) < 0x20)
      result += fmt::format("\\u{:04X}", static_cast<int>(ch));
    else
      result += ch;
  }
  return result + '"';
}

std::string value_text(const ConfigKey& key) {
  return std::visit(
      [](auto* field) -> std::string {
        using T = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<T, std::string>) return frit::quoted(*field);
        if constexpr (std::is_same_v<T, bool>) return *field ? "true" : "false";
        if constexpr (std::is_same_v<T, double>) {
          std::string text = fmt::format("{}", *field);  // shortest text that reads back the same
          return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;
        }
        return fmt::format("{}", *field);
      },
      key.field);
}

void set_from_toml(const ConfigKey& key, const toml::node& node) {
  const auto shown = [&] {
    std::ostringstream out;
    out << toml::node_view<const toml::node>(node);
    return out.str();
  };
  std::visit(
      [&](auto* field) {
        using T = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<T, std::string>) {
          if (!node.is_string()) fail_kind(key, shown());
          check_choice(key, node.as_string()->get());
          *field = node.as_string()->get();
        } else if constexpr (std::is_same_v<T, double>) {
          if (!node.is_number()) fail_kind(key, shown());
          *field = *node.value<double>();
        } else if constexpr (std::is_same_v<T, int64_t>) {
          if (!node.is_integer()) fail_kind(key, shown());
          *field = node.as_integer()->get();
        } else {
          if (!node.is_boolean()) fail_kind(key, shown());
          *field = node.as_boolean()->get();
        }
      },
      key.field);
}

}  // namespace

void set_config_key(TrainConfig& config, std::string_view name, std::string_view value) {
  auto keys = config_keys(config);
  const ConfigKey& key = find_key(keys, name);
  const std::string text(value);
  std::visit(
      [&](auto* field) {
        using T = std::remove_pointer_t<decltype(field)>;
        if constexpr (std::is_same_v<T, std::string>) {
          check_choice(key, text);
          *field = text;
        } else if constexpr (std::is_same_v<T, bool>) {
          if (text != "true" && text != "false") fail_kind(key, text);
          *field = text == "true";
        } else {
          T parsed{};
          const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
          if (error == std::errc::result_out_of_range) fail("[config] {} is {}, which is out of range", key.name, text);
          if (error != std::errc() || end != text.data() + text.size() || text.empty()) fail_kind(key, text);
          *field = parsed;
        }
      },
      key.field);
}

void parse_config(TrainConfig& config, std::string_view text, const std::string& where) {
  toml::table table;
  try {
    table = toml::parse(text, where);
  } catch (const toml::parse_error& e) {
    fail("[config] {}:{}: {}", where, e.source().begin.line, e.description());
  }
  auto keys = config_keys(config);
  for (auto&& [section, node] : table) {
    const toml::table* inner = node.as_table();
    if (!inner)
      fail("[config] {}:{}: key {} stands outside of a section; write it as [section] {} = ...", where,
           node.source().begin.line, section.str(), section.str());
    for (auto&& [name, value] : *inner) {
      try {
        set_from_toml(find_key(keys, fmt::format("{}.{}", section.str(), name.str())), value);
      } catch (const Error& e) {
        fail("{} ({}:{})", e.what(), where, value.source().begin.line);
      }
    }
  }
}

void read_config(TrainConfig& config, const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in || std::filesystem::is_directory(path)) fail("[config] cannot read {}", path);
  std::ostringstream text;
  text << in.rdbuf();
  if (in.bad()) fail("[config] cannot read {}", path);
  parse_config(config, text.str(), path);
}

std::string dump_config(const TrainConfig& config, bool comments) {
  TrainConfig copy = config;
  std::string text, section;
  for (const ConfigKey& key : config_keys(copy)) {
    const size_t dot = key.name.find('.');
    if (key.name.substr(0, dot) != section) {
      section = key.name.substr(0, dot);
      text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", section);
    }
    if (comments) text += fmt::format("# {}\n", key.help);
    text += fmt::format("{} = {}\n", key.name.substr(dot + 1), value_text(key));
  }
  return text;
}

std::string config_reference() {
  TrainConfig defaults;
  std::string text =
      "# Configuration reference\n\n"
      "Every key of `frit train CONFIG.toml`, generated from the code (`frit train --config-reference`). In the file a "
      "key stands in its section\n"
      "(`[training]`, then `learning_rate = 1e-3`); on the command line every key is a flag (`--training.learning_rate "
      "1e-3`) and\n"
      "`--set training.learning_rate=1e-3` does the same. Later settings win: file, then flags in their order. "
      "`--dump-config` prints the whole.\n";
  std::string section;
  for (const ConfigKey& key : config_keys(defaults)) {
    const size_t dot = key.name.find('.');
    if (key.name.substr(0, dot) != section) {
      section = key.name.substr(0, dot);
      text += fmt::format("\n## [{}]\n\n| key | default | meaning |\n| --- | --- | --- |\n", section);
    }
    std::string choices;
    for (const std::string& choice : key.choices)
      if (!choice.empty()) choices += fmt::format("{}`{}`", choices.empty() ? " One of " : ", ", choice);
    text += fmt::format("| `{}` | `{}` | {}{} |\n", key.name.substr(dot + 1), value_text(key), key.help,
                        choices.empty() ? "" : choices + ".");
  }
  return text;
}

std::string precision_of(const TrainConfig& config) {
  if (!config.training.precision.empty()) return config.training.precision;
  return config.run.device == "cpu" ? "fp32" : "bf16-master";
}

void validate_config(const TrainConfig& config) {
  const auto need = [](bool good, std::string_view key, const auto& value, std::string_view expected) {
    if (!good) fail("[config] {} is {}, expected {}", key, value, expected);
  };
  // Bounds that no machine reaches, and within which nothing that is computed from the sizes overflows.
  constexpr int64_t kMostSize = 1 << 20, kMostCount = 1'000'000'000;
  const std::string count = fmt::format("1 to {}", kMostCount);
  const auto& m = config.model;
  const auto& d = config.data;
  const auto& t = config.training;
  for (auto [name, p] : {std::pair{"model.dropout", m.dropout},
                         {"model.attention_dropout", m.attention_dropout},
                         {"model.activation_dropout", m.activation_dropout}})
    need(p == -1 || (p >= 0 && p < 1), name, p, "0 to below 1 (or -1 for the preset's)");
  for (auto [name, n] : {std::pair{"model.encoder_layers", m.encoder_layers},
                         {"model.decoder_layers", m.decoder_layers},
                         {"model.d_model", m.d_model},
                         {"model.heads", m.heads},
                         {"model.ffn", m.ffn},
                         {"model.max_positions", m.max_positions}})
    need(n == -1 || (n >= 1 && n <= kMostSize), name, n, fmt::format("1 to {} (or -1 for the preset's)", kMostSize));
  if (m.d_model > 0 && m.heads > 0)
    need(m.d_model % m.heads == 0, "model.heads", m.heads, fmt::format("a divisor of model.d_model {}", m.d_model));
  need(d.vocabulary >= 32 && d.vocabulary <= 1000000, "data.vocabulary", d.vocabulary, "32 to 1000000");
  need(d.max_length >= 2, "data.max_length", d.max_length, "2 or more");
  need(d.window >= 1 && d.window <= kMostCount, "data.window", d.window, count);
  need(d.prefetch >= 1 && d.prefetch <= 4096, "data.prefetch", d.prefetch, "1 to 4096");
  need(d.subword_nbest >= -1 && d.subword_nbest <= kMostCount, "data.subword_nbest", d.subword_nbest,
       fmt::format("-1 (all) to {}", kMostCount));
  need(d.subword_alpha >= 0 && d.subword_alpha <= 1, "data.subword_alpha", d.subword_alpha, "0 to 1");
  need((t.batch_tokens >= 16 && t.batch_tokens <= kMostCount) || t.batch_tokens == 0, "training.batch_tokens",
       t.batch_tokens, fmt::format("16 to {}, or 0 for the largest that fits on the GPU", kMostCount));
  need(t.accumulate >= 1 && t.accumulate < 65536, "training.accumulate", t.accumulate, "1 to 65535");
  need(t.learning_rate > 0 && std::isfinite(t.learning_rate), "training.learning_rate", t.learning_rate, "more than 0");
  need(t.beta1 >= 0 && t.beta1 < 1, "training.beta1", t.beta1, "0 to below 1");
  need(t.beta2 >= 0 && t.beta2 < 1, "training.beta2", t.beta2, "0 to below 1");
  need(t.eps > 0 && std::isfinite(t.eps), "training.eps", t.eps, "more than 0");
  need(t.momentum >= 0 && t.momentum < 1, "training.momentum", t.momentum, "0 to below 1");
  need(t.weight_decay >= 0 && std::isfinite(t.weight_decay), "training.weight_decay", t.weight_decay, "0 or more");
  need(t.clip_norm >= 0, "training.clip_norm", t.clip_norm, "0 or more");
  need(t.label_smoothing >= 0 && t.label_smoothing < 1, "training.label_smoothing", t.label_smoothing, "0 to below 1");
  need(t.seed >= 0 && t.seed <= 0xffffffffll, "training.seed", t.seed, "0 to 4294967295");
  need(t.ema_decay >= 0 && t.ema_decay < 1, "training.ema_decay", t.ema_decay, "0 to below 1");
  need(t.average_checkpoints >= 0, "training.average_checkpoints", t.average_checkpoints, "0 or more");
  need(t.average_checkpoints <= t.keep, "training.average_checkpoints", t.average_checkpoints,
       fmt::format("at most training.keep {}", t.keep));
  need(t.keep >= 1, "training.keep", t.keep, "1 or more");
  need(t.patience >= 0, "training.patience", t.patience, "0 or more");
  need(t.min_delta >= 0 && std::isfinite(t.min_delta), "training.min_delta", t.min_delta, "0 or more");
  need(t.early_stopping_metric != "bleu" || d.train_source.empty() ||
           (!d.valid_source.empty() && config.validation.bleu),
       "training.early_stopping_metric", t.early_stopping_metric,
       "loss, or data.valid_source and validation.bleu = true");
  need(t.criterion_rows >= -1 && t.criterion_rows <= kMostCount, "training.criterion_rows", t.criterion_rows,
       fmt::format("-1 to {}", kMostCount));
  need(t.max_not_finite >= 1, "training.max_not_finite", t.max_not_finite, "1 or more");
  need(t.stop_after_seconds >= 0, "training.stop_after_seconds", t.stop_after_seconds, "0 or more");
  need(config.validation.max_sentences >= 0, "validation.max_sentences", config.validation.max_sentences, "0 or more");
  need(config.validation.samples >= 0, "validation.samples", config.validation.samples, "0 or more");
  need(t.ema_decay == 0 || t.average_checkpoints <= 1, "training.average_checkpoints", t.average_checkpoints,
       "0 with training.ema_decay: one average of weights, not two");
  need(config.validation.beam >= 1 && config.validation.beam <= kMostSize, "validation.beam", config.validation.beam,
       fmt::format("1 to {}", kMostSize));
  // With a tokenizer that is there already the vocabulary is known later, and checked then.
  need(
      !config.validation.bleu || !d.tokenizer.empty() || !m.init_from.empty() || config.validation.beam <= d.vocabulary,
      "validation.beam", config.validation.beam, fmt::format("at most data.vocabulary {}", d.vocabulary));
  need(std::isfinite(config.validation.length_penalty), "validation.length_penalty", config.validation.length_penalty,
       "a number");
  need(config.run.dump_steps >= 0 && config.run.dump_steps <= kMostCount, "run.dump_steps", config.run.dump_steps,
       fmt::format("0 to {}", kMostCount));
  const std::string precision = precision_of(config);
  need(config.run.device != "cpu" || !precision.starts_with("fp16"), "training.precision", t.precision,
       "another with run.device cpu");
  need(t.trainer != "per_tensor" || precision == "fp32" || precision.ends_with("-master"), "training.trainer",
       t.trainer, fmt::format("fused with training.precision {}, which has no fp32 parameters", precision));
  need(t.loss_scale >= 0x1p-14 && t.loss_scale <= 0x1p24, "training.loss_scale", t.loss_scale, "2^-14 to 2^24");
  need(t.loss_scale_growth >= 0, "training.loss_scale_growth", t.loss_scale_growth, "0 or more");
  need(config.run.device == "cpu" || config.run.gemm.empty(), "run.gemm", config.run.gemm,
       "none (leave it out) with run.device " + config.run.device);
  need(config.run.device == "cpu" || config.run.attention != "flash", "run.attention", config.run.attention,
       "short, cudnn or materialised with run.device " + config.run.device);
  need(config.run.device != "cpu" || (config.run.attention != "short" && config.run.attention != "cudnn"),
       "run.attention", config.run.attention, "flash or materialised with run.device cpu");
  need(config.run.gemm != "onednn" || precision == "fp32", "run.gemm", config.run.gemm,
       fmt::format("packed with training.precision {}", precision));
  need(!config.run.directory.empty(), "run.directory", "empty", "a folder");
  for (auto [name, text] : {std::pair{"training.warmup", &t.warmup},
                            {"training.stop_after", &t.stop_after},
                            {"training.log_every", &t.log_every},
                            {"training.valid_every", &t.valid_every},
                            {"training.save_every", &t.save_every},
                            {"training.keep_every", &t.keep_every}}) {
    if (text->empty() && text == &t.keep_every) continue;
    try {
      const Period period = parse_period(*text);
      need(period.count <= 1e15, name, *text, "at most 1e15");
      if (text == &t.keep_every && period.unit != PeriodUnit::kUpdates)
        fail("[config] {} is {}, expected a period of updates such as 5000u", name, *text);
    } catch (const std::invalid_argument& e) {
      fail("[config] {}: {}", name, e.what());
    }
  }
  need(config.run.threads >= 0 && config.run.threads <= 4096, "run.threads", config.run.threads, "0 to 4096");
  need(d.train_source.empty() == d.train_target.empty(), "data.train_target", quoted(d.train_target),
       "a file if data.train_source is one");
  need(d.valid_source.empty() == d.valid_target.empty(), "data.valid_target", quoted(d.valid_target),
       "a file if data.valid_source is one");
}

}  // namespace frit
