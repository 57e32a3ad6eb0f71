// The configuration of a training run: one struct, one list of keys. The TOML reader, the command-line flags,
// --dump-config and docs/configuration.md all come from that list.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace frit {

struct TrainConfig {
  struct Model {
    std::string preset = "transformer-tiny";
    // -1 or "" takes the preset's value.
    int64_t encoder_layers = -1, decoder_layers = -1, d_model = -1, heads = -1, ffn = -1, max_positions = -1;
    std::string activation, norm, positions, embeddings;
    std::string scale_embedding;  // "true", "false" or "" for the preset's
    double dropout = -1, attention_dropout = -1, activation_dropout = -1;
    std::string init_from;  // a model directory whose weights training starts from
  } model;
  struct Data {
    std::string train_source, train_target, valid_source, valid_target;
    std::string
        tokenizer;  // a directory with source.spm, target.spm, vocab.json; empty: trained into the run directory
    int64_t vocabulary = 8000;
    std::string tokenizer_kind = "bpe";
    bool joint_vocabulary = true, byte_fallback = true;
    int64_t max_length = 256;
    std::string invalid_utf8 = "error";
    double subword_alpha = 0;
    int64_t subword_nbest = -1;
    int64_t window = 100;
    int64_t prefetch = 4;
  } data;
  struct Training {
    std::string precision;  // empty: precision_of() chooses
    int64_t batch_tokens = 4096, accumulate = 1;
    std::string optimizer = "adam";
    double learning_rate = 1e-3, beta1 = 0.9, beta2 = 0.98, eps = 1e-9, momentum = 0.9, weight_decay = 0;
    std::string schedule = "inverse-sqrt";
    std::string warmup = "4000u";
    std::string stop_after = "20e";
    double stop_after_seconds = 0;
    double clip_norm = 1;
    double label_smoothing = 0.1;
    int64_t seed = 1;
    double loss_scale = 32768;
    int64_t loss_scale_growth = 2000;
    std::string rounding = "stochastic";
    std::string trainer = "fused";
    bool count_swallowed = false;
    double ema_decay = 0;
    int64_t average_checkpoints = 0;
    std::string log_every = "50u", valid_every = "1e", save_every = "1e", keep_every;
    int64_t keep = 3;
    std::string early_stopping_metric = "loss";
    int64_t patience = 0;
    double min_delta = 0;
    std::string recompute = "none";
    int64_t criterion_rows = -1;
    int64_t max_not_finite = 20;
  } training;
  struct Validation {
    int64_t beam = 1, max_sentences = 500, samples = 5;
    double length_penalty = 1;
    bool bleu = true;
  } validation;
  struct Run {
    std::string directory = "run";
    int64_t threads = 0;
    std::string device = "cpu", attention, gemm, bias_gradient;
    bool graphs = true, planned_memory = true, packed = true, fused_norm = true;
    int64_t dump_steps = 0;
    bool tensorboard = true;
  } run;
};

// One key of the configuration: where it lies, what it means, what is allowed.
struct ConfigKey {
  std::string name;  // "training.learning_rate"; its flag is --training.learning_rate
  std::variant<std::string*, int64_t*, double*, bool*> field;
  std::string help;                  // one sentence, units included
  std::vector<std::string> choices;  // allowed texts; empty: any
};
// All keys of `config`, in the order of the reference. The pointers point into `config`.
std::vector<ConfigKey> config_keys(TrainConfig& config);

// Sets one key from text as a flag or --set gives it. Errors: frit::Error for an unknown key (names the nearest), a
// value of the wrong kind, or one that is not among the choices.
void set_config_key(TrainConfig& config, std::string_view name, std::string_view value);

// Reads TOML ([section] key = value). Relative paths stay as they are (relative to the working directory). Errors:
// frit::Error with file and line.
void read_config(TrainConfig& config, const std::string& path);
void parse_config(TrainConfig& config, std::string_view toml, const std::string& where);

// The whole configuration as TOML that read_config takes, each key with its help as a comment if `comments`.
std::string dump_config(const TrainConfig& config, bool comments);
// docs/configuration.md.
std::string config_reference();

// training.precision; where it is empty, fp32 on the CPU and bf16-master on a GPU, whose losses are fp32's
// (docs/numerics.md).
std::string precision_of(const TrainConfig& config);

// Errors: frit::Error naming the key whose value cannot work (negative sizes, dropout of 1, ...).
void validate_config(const TrainConfig& config);

}  // namespace frit
