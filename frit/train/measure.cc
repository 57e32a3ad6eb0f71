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

std::string TrainingMeasurement::to_json(std::string_view model_case) const {
  nlohmann::ordered_json j;
  if (!model_case.empty()) j["case"] = model_case;
  j["device"] = device, j["precision"] = precision, j["threads"] = threads, j["parameters"] = parameters;
  j["steps"] = steps;
  j["tokens_per_s"] = tokens_per_s, j["total_tokens_per_s"] = total_tokens_per_s;
  j["ms_per_step"] = step_ms, j["forward_ms"] = forward_ms, j["backward_ms"] = backward_ms;
  j["update_ms"] = update_ms, j["first_step_s"] = first_step_s, j["warm_s"] = warm_s;
  j["loss"] = loss;
  j["workspace_mib"] = static_cast<double>(workspace_bytes) / (1 << 20);
  j["arena_mib"] = static_cast<double>(arena_bytes) / (1 << 20);
  j["library_mib"] = static_cast<double>(library_bytes) / (1 << 20);
  j["peak_mib"] = static_cast<double>(workspace_bytes + arena_bytes + library_bytes) / (1 << 20);
  if (free_first_bytes > 0) {
    j["free_first_mib"] = static_cast<double>(free_first_bytes) / (1 << 20);
    j["free_last_mib"] = static_cast<double>(free_last_bytes) / (1 << 20);
  }
  j["products_tuned"] = products_tuned;
  if (!attention.empty()) j["attention"] = attention, j["attention_us"] = attention_us;
  j["ms"] = ms;
  if (!parts_us.empty()) j["parts_us"] = parts_us;
  if (floor) {
    // Of the first batch alone, as the parts are: all batches have its floor only where they are of one size.
    j["floor_ms"] = floor->ms(), j["floor_update_ms"] = floor->update_ms;
    j["of_floor"] = floor->ms() / (parts_us.at("all") / 1e3), j["copy_gb_per_s"] = copy_bytes_per_s / 1e9;
  }
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
                                     int64_t warm, bool parts, const std::string& tuning_file) {
  using Clock = std::chrono::steady_clock;
  validate_config(config);
  if (lengths.empty() || steps < 1 || warm < 0)
    fail("[bench] {} batches, {} steps and {} before them, expected at least 1, 1 and 0", lengths.size(), steps, warm);
  const TransformerConfig sizes = model_config(config);
  ThreadPool pool(static_cast<int>(config.run.threads));
  const std::unique_ptr<Gpu> gpu = training_gpu(config);
  const Clock::time_point begin = Clock::now();
  Transformer model(sizes, training_options(config, gpu.get()));
  model.initialise(static_cast<uint32_t>(config.training.seed), {}, &pool);
  const Clock::time_point made = Clock::now();
  std::mt19937 random(static_cast<uint32_t>(config.training.seed));
  std::vector<Batch> batches;
  const auto used = std::min<size_t>(lengths.size(), static_cast<size_t>(steps + warm));
  for (size_t i = 0; i < used; ++i) batches.push_back(random_batch(lengths[i], sizes, random));

  const auto seconds = [](Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double>(to - from).count();
  };
  TrainingMeasurement m;
  m.steps = steps, m.parameters = model.workspace().layout().parameters();
  m.threads = pool.threads(), m.precision = precision_of(config), m.device = gpu ? gpu->name() : "cpu";
  const Clock::duration batches_took = Clock::now() - made;  // random tokens: no part of training
  Tuning tuning;
  if (gpu && !tuning_file.empty()) tuning = Tuning::load(tuning_file, gpu->name(), true);
  TrainingStep step(model, pool, step_settings(config, model.workspace()), gpu.get());
  std::vector<BatchSize> batch_sizes;
  for (const Batch& b : batches) batch_sizes.push_back(TrainingStep::batch_size(b));
  if (gpu)
    for (const AttentionChoice& c : step.tune_attention(batch_sizes, tuning, kAttentionSeconds, true))
      m.attention[c.key] = c.chosen, m.attention_us[c.key] = c.us;
  for (const BatchSize& size : batch_sizes) step.plan(TrainingStep::Kind::kTrain, size);
  if (gpu) m.products_tuned = gpu->tune_products(tuning);  // before the arena: it takes memory meanwhile
  step.reserve();
  if (gpu && !tuning_file.empty()) tuning.save(tuning_file, gpu->name());
  const auto since_begin = [&] { return seconds(begin + batches_took, Clock::now()); };
  const auto first_step_done = [&] {
    m.first_step_s = since_begin();
    if (gpu) m.free_first_bytes = static_cast<int64_t>(gpu->bytes_free());
  };
  const double rates[] = {1e-4};
  int64_t attempt = 0;
  const auto put = [&] {
    const Batch& batch = batches[static_cast<size_t>(attempt) % batches.size()];
    step.begin(attempt++, batch.target_tokens(), rates, 1);
    step.forward_backward(batch, 0);
    step.update();
  };
  const auto take = [&](bool wait) {
    auto r = step.result(wait);
    if (r && !r->finite) fail("[bench] the gradient of step {} is not finite", r->attempt + 1);
    return r;
  };
  step.set_timing(!gpu);  // on a GPU phases are measured apart, without graphs
  for (int64_t i = 0; i < warm; ++i) {
    put();
    take(true);
    if (i == 0) first_step_done();
  }
  m.warm_s = since_begin();
  std::vector<double> rates_seen, forward, backward, update;
  const auto phases = [&](const StepResult& r) {
    forward.push_back(r.forward_ms), backward.push_back(r.backward_ms), update.push_back(r.update_ms);
  };
  double all_tokens = 0;
  const Clock::time_point start = Clock::now();
  const auto note = [&](const StepResult& r) {
    const Batch& batch = batches[static_cast<size_t>(r.attempt) % batches.size()];
    const auto tokens = static_cast<double>(batch.source_tokens() + batch.target_tokens());
    all_tokens += tokens;
    m.loss = r.loss.loss / static_cast<double>(r.loss.tokens);
    if (!gpu) phases(r);
    if (m.first_step_s == 0) first_step_done();
    if (r.step_ms <= 0) return;  // the very first
    m.ms.push_back(r.step_ms), rates_seen.push_back(1e3 * tokens / r.step_ms);
  };
  for (int64_t i = 0; i < steps; ++i) {
    put();
    while (auto r = take(step.on_the_way() == TrainingStep::kAhead)) note(*r);
  }
  while (auto r = take(true)) note(*r);
  const double total_s = seconds(start, Clock::now());
  m.total_tokens_per_s = all_tokens / total_s;
  // The device's clock runs from the end of one step to that of the next: a first step that is the only one has none.
  if (m.ms.empty()) m.ms = {1e3 * total_s / static_cast<double>(steps)}, rates_seen = {m.total_tokens_per_s};
  if (gpu) {
    m.free_last_bytes = static_cast<int64_t>(gpu->bytes_free());
    step.set_timing(true);
    for (int64_t i = 0; i < std::min<int64_t>(steps, 10); ++i) {
      put();
      if (const auto r = take(true)) phases(*r);
    }
  }
  if (gpu && parts) {
    m.parts_us = step.time_parts(batches[0], 10);
    m.copy_bytes_per_s = step.time_copy(10);
    m.floor = step_floor(m.parts_us, m.parameters, m.copy_bytes_per_s);
  }
  m.tokens_per_s = median(rates_seen), m.step_ms = median(m.ms);
  m.forward_ms = median(forward), m.backward_ms = median(backward), m.update_ms = median(update);
  m.workspace_bytes = model.workspace().bytes() + static_cast<int64_t>(step.extra_bytes());
  m.arena_bytes = static_cast<int64_t>(step.arena_bytes());
  if (gpu) m.library_bytes = static_cast<int64_t>(gpu->library_bytes() + step.input_bytes());
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  m.peak_rss_bytes = int64_t{1024} * usage.ru_maxrss;
  return m;
}

}  // namespace frit
