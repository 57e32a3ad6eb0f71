#include "frit/train/run_state.h"

#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"
#include "frit/train/trainer.h"

namespace frit {

using nlohmann::json;

std::string RunState::to_json() const {
  json j = {{"updates", updates},
            {"attempts", attempts},
            {"skipped", skipped},
            {"skipped_in_a_row", skipped_in_a_row},
            {"finite_updates", finite_updates},
            {"loss_scale", loss_scale},
            {"target_tokens", target_tokens},
            {"source_tokens", source_tokens},
            {"epoch", position.epoch},
            {"batch", position.index},
            {"epoch_sentences", epoch_sentences},
            {"seconds", seconds},
            {"validated", validated},
            {"validation_pending", validation_pending},
            {"window_loss", window_loss},
            {"window_seconds", window_seconds},
            {"window_tokens", window_tokens},
            {"metrics_lines", metrics_lines},
            {"early_stopping", early_stopping},
            {"tokenizer_hash", tokenizer_hash},
            {"train_hash", train_hash},
            {"valid_hash", valid_hash}};
  if (valid_loss) j["valid_loss"] = *valid_loss;
  if (valid_bleu) j["valid_bleu"] = *valid_bleu;
  return j.dump(1) + "\n";
}

RunState RunState::from_json(std::string_view text) {
  RunState s;
  try {
    const json j = json::parse(text);
    j.at("updates").get_to(s.updates);
    j.at("attempts").get_to(s.attempts);
    j.at("skipped").get_to(s.skipped);
    j.at("skipped_in_a_row").get_to(s.skipped_in_a_row);
    s.finite_updates = j.value("finite_updates", s.updates);  // earlier checkpoints do not say
    s.loss_scale = j.value("loss_scale", 1.0);
    j.at("target_tokens").get_to(s.target_tokens);
    j.at("source_tokens").get_to(s.source_tokens);
    j.at("epoch").get_to(s.position.epoch);
    j.at("batch").get_to(s.position.index);
    j.at("epoch_sentences").get_to(s.epoch_sentences);
    j.at("seconds").get_to(s.seconds);
    j.at("validated").get_to(s.validated);
    j.at("validation_pending").get_to(s.validation_pending);
    j.at("window_loss").get_to(s.window_loss);
    j.at("window_seconds").get_to(s.window_seconds);
    j.at("window_tokens").get_to(s.window_tokens);
    s.metrics_lines = j.value("metrics_lines", int64_t{-1});  // earlier checkpoints do not say
    j.at("early_stopping").get_to(s.early_stopping);
    j.at("tokenizer_hash").get_to(s.tokenizer_hash);
    j.at("train_hash").get_to(s.train_hash);
    j.at("valid_hash").get_to(s.valid_hash);
    if (j.contains("valid_loss")) s.valid_loss = j["valid_loss"].get<double>();
    if (j.contains("valid_bleu")) s.valid_bleu = j["valid_bleu"].get<double>();
  } catch (const json::exception& e) {
    fail("[train] the state of a checkpoint cannot be read: {}", e.what());
  }
  return s;
}

namespace {

// Keys that may differ when a run goes on: they decide what is logged, validated, saved and when training ends, or
// where things lie, but no bit of the weights. Texts may have moved: what they hold is compared instead.
bool may_change(std::string_view key, bool schedule_ends) {
  // cosine and linear schedules end where training ends.
  if (key == "training.stop_after") return !schedule_ends;
  if (key.starts_with("run."))
    return key != "run.attention" && key != "run.gemm" && key != "run.device" && key != "run.bias_gradient" &&
           key != "run.packed" && key != "run.fused_norm";
  if (key.starts_with("validation.")) return true;
  constexpr std::string_view kFree[] = {"training.trainer",  // the same bits
                                        "training.count_swallowed",
                                        "training.stop_after_seconds",
                                        "training.log_every",
                                        "training.valid_every",
                                        "training.save_every",
                                        "training.keep",
                                        "training.keep_every",
                                        "training.average_checkpoints",
                                        "training.patience",
                                        "training.min_delta",
                                        "training.max_not_finite",
                                        "data.train_source",
                                        "data.train_target",
                                        "data.valid_source",
                                        "data.valid_target",
                                        "data.tokenizer",
                                        "data.prefetch",
                                        "model.init_from"};
  return std::find(std::begin(kFree), std::end(kFree), key) != std::end(kFree);
}

std::string text_of(const ConfigKey& key) {
  return std::visit([](auto* field) { return fmt::format("{}", *field); }, key.field);
}

}  // namespace

std::string changed_keys(const TrainConfig& before, const TrainConfig& now) {
  TrainConfig a = before, b = now;
  for (TrainConfig* c : {&a, &b}) c->training.precision = precision_of(*c);  // left open or said: the same
  const auto old_keys = config_keys(a), new_keys = config_keys(b);
  const bool schedule_ends = now.training.schedule == "cosine" || now.training.schedule == "linear";
  std::string list;
  for (size_t i = 0; i < old_keys.size(); ++i) {
    const std::string was = text_of(old_keys[i]), is = text_of(new_keys[i]);
    if (was != is && !may_change(old_keys[i].name, schedule_ends))
      list += fmt::format("\n  {} was {}, now {}", old_keys[i].name, was, is);
  }
  return list;
}

}  // namespace frit
