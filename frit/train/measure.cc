#include "frit/train/measure.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>

#include "frit/core/error.h"
#include "frit/train/prepare.h"
#include "frit/train/schedule.h"
#include "frit/train/trainer.h"

namespace frit {

BatchLengths parse_batch_lengths(std::string_view text) {
  try {
    return nlohmann::json::parse(text).get<BatchLengths>();
  } catch (const nlohmann::json::exception& e) {
    fail("[bench] batch lengths are not a list of lists of [source, target]: {}", e.what());
  }
}

std::string TrainingMeasurement::to_json() const {
  nlohmann::ordered_json j;
  j["precision"] = precision, j["threads"] = threads, j["parameters"] = parameters, j["steps"] = steps;
  j["tokens_per_s"] = tokens_per_s, j["total_tokens_per_s"] = total_tokens_per_s;
  j["ms_per_step"] = step_ms, j["forward_ms"] = forward_ms, j["backward_ms"] = backward_ms;
  j["update_ms"] = update_ms, j["warm_s"] = first_step_s, j["loss"] = loss;
  j["workspace_mib"] = static_cast<double>(workspace_bytes) / (1 << 20);
  j["arena_mib"] = static_cast<double>(arena_bytes) / (1 << 20);
  j["peak_rss_mib"] = static_cast<double>(peak_rss_bytes) / (1 << 20);
  return j.dump();
}

namespace {

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

Batch random_batch(const std::vector<std::pair<int64_t, int64_t>>& lengths, const TransformerConfig& sizes,
                   std::mt19937& random) {
  Batch batch;
  batch.source_offsets = batch.target_offsets = {0};
  const auto token = [&](int64_t vocabulary) {
    return static_cast<int32_t>(1 + random() % static_cast<uint32_t>(vocabulary - 1));
  };
  for (const auto& [source, target] : lengths) {
    if (source < 1 || target < 1 || std::max(source, target) > sizes.max_positions)
      fail("[bench] a sentence of {} source and {} target tokens, expected 1 to {}", source, target,
           sizes.max_positions);
    for (int64_t i = 0; i < source; ++i) batch.source_ids.push_back(token(sizes.source_vocab));
    batch.target_ids.push_back(static_cast<int32_t>(sizes.start_id));
    for (int64_t i = 0; i < target; ++i) {
      batch.labels.push_back(token(sizes.target_vocab));
      if (i + 1 < target) batch.target_ids.push_back(batch.labels.back());
    }
    batch.source_offsets.push_back(static_cast<int32_t>(batch.source_ids.size()));
    batch.target_offsets.push_back(static_cast<int32_t>(batch.labels.size()));
    batch.sentence_index.push_back(static_cast<int64_t>(batch.sentence_index.size()));
  }
  if (batch.labels.empty()) fail("[bench] a batch without sentences");
  return batch;
}

}  // namespace

TrainingMeasurement measure_training(const TrainConfig& config, const BatchLengths& lengths, int64_t steps,
                                     int64_t warm) {
  using Clock = std::chrono::steady_clock;
  validate_config(config);
  if (lengths.empty() || steps < 1 || warm < 0)
    fail("[bench] {} batches, {} steps and {} before them, expected at least 1, 1 and 0", lengths.size(), steps, warm);
  const TransformerConfig sizes = model_config(config);
  ThreadPool pool(static_cast<int>(config.run.threads));
  Transformer model(sizes, training_options(config));
  model.initialise(static_cast<uint32_t>(config.training.seed));
  std::mt19937 random(static_cast<uint32_t>(config.training.seed));
  std::vector<Batch> batches;
  const auto used = std::min<size_t>(lengths.size(), static_cast<size_t>(steps + warm));
  for (size_t i = 0; i < used; ++i) batches.push_back(random_batch(lengths[i], sizes, random));

  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  };
  TrainingMeasurement m;
  m.steps = steps, m.parameters = model.workspace().layout().parameters();
  m.threads = pool.threads(), m.precision = config.training.precision;
  const Clock::time_point begin = Clock::now();
  TrainingStep step(model, pool, step_settings(config, model.workspace()));
  for (const Batch& b : batches)
    if (step.planned()) step.plan(TrainingStep::Kind::kTrain, b.source_tokens(), b.target_tokens());
  step.reserve();
  std::vector<double> rates, times, forward, backward, update;
  double all_seconds = 0, all_tokens = 0;
  for (int64_t i = 0; i < warm + steps; ++i) {
    const Batch& batch = batches[static_cast<size_t>(i) % batches.size()];
    const Clock::time_point start = Clock::now();
    const Loss loss = step.forward_backward(batch, batch.target_tokens(), i, 0);
    const Clock::time_point done = Clock::now();
    const UpdateResult updated = step.update(1e-4, i + 1);
    const Clock::time_point end = Clock::now();
    if (!updated.finite) fail("[bench] the gradient of step {} is not finite", i + 1);
    if (i + 1 == std::max<int64_t>(1, warm)) m.first_step_s = seconds(begin, end);
    if (i < warm) continue;
    const double s = seconds(start, end);
    const auto tokens = static_cast<double>(batch.source_tokens() + batch.target_tokens());
    all_seconds += s, all_tokens += tokens;
    rates.push_back(tokens / s), times.push_back(1e3 * s);
    forward.push_back(1e3 * seconds(start, step.backward_begun()));
    backward.push_back(1e3 * seconds(step.backward_begun(), done));
    update.push_back(1e3 * seconds(done, end));
    m.loss = loss.loss / static_cast<double>(loss.tokens);
  }
  m.tokens_per_s = median(rates), m.total_tokens_per_s = all_tokens / all_seconds;
  m.step_ms = median(times), m.forward_ms = median(forward), m.backward_ms = median(backward);
  m.update_ms = median(update);
  m.workspace_bytes = model.workspace().bytes(), m.arena_bytes = static_cast<int64_t>(step.arena_bytes());
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  m.peak_rss_bytes = int64_t{1024} * usage.ru_maxrss;
  return m;
}

}  // namespace frit
