#include "frit/train/early_stopping.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "frit/core/error.h"

namespace frit {

EarlyStopper::EarlyStopper(const EarlyStopperOptions& options) : options_(options) {
  FRIT_CHECK(options.patience >= 0, "[early_stopping] patience is {}, expected 0 or more", options.patience);
  FRIT_CHECK(std::isfinite(options.min_delta) && options.min_delta >= 0,
             "[early_stopping] min_delta is {}, expected a finite number of 0 or more", options.min_delta);
}

bool EarlyStopper::update(double metric) {
  bool improved = std::isfinite(metric);
  if (improved && best_)
    improved = (options_.higher_is_better ? metric - *best_ : *best_ - metric) > options_.min_delta;
  if (improved) {
    best_ = metric;
    stalled_ = 0;
  } else {
    ++stalled_;
  }
  return improved;
}

std::string EarlyStopper::save() const {
  nlohmann::json json = {{"stalled", stalled_}, {"best", nullptr}};
  if (best_) json["best"] = *best_;
  return json.dump();
}

void EarlyStopper::restore(std::string_view text) {
  const auto json = nlohmann::json::parse(text, nullptr, false);
  const bool good = json.is_object() && json.contains("stalled") && json["stalled"].is_number_integer() &&
                    json["stalled"].get<int64_t>() >= 0 && json.contains("best") &&
                    (json["best"].is_null() || json["best"].is_number());
  if (!good) fail("[early_stopping] state is not {{\"best\": number or null, \"stalled\": count}}, got '{}'", text);
  stalled_ = json["stalled"].get<int64_t>();
  best_ = json["best"].is_null() ? std::nullopt : std::optional<double>(json["best"].get<double>());
}

}  // namespace frit
