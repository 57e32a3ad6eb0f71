#include "frit/data/batcher.h"

#include <algorithm>
#include <numeric>

#include "frit/core/error.h"
#include "frit/data/random.h"

namespace frit {

std::string BatcherCounts::to_string(const BatcherOptions& options) const {
  return fmt::format("{} sentence pairs: {} used; left out: {} longer than {} tokens, {} larger than a batch of {}",
                     with_commas(sentences), with_commas(used()), with_commas(over_length),
                     with_commas(options.max_length), with_commas(over_budget), with_commas(options.max_tokens));
}

Batcher::Batcher(const TokenFile& file, BatcherOptions options, const Tokenizer* tokenizer)
    : file_(file), tokenizer_(tokenizer), options_(options) {
  FRIT_CHECK(options_.max_tokens >= 2, "[batcher] max_tokens is {}, expected at least 2", options_.max_tokens);
  FRIT_CHECK(options_.max_tokens <= INT32_MAX, "[batcher] max_tokens is {}, expected at most {}", options_.max_tokens,
             INT32_MAX);
  FRIT_CHECK(options_.max_sentences >= 0 && options_.max_length >= 0,
             "[batcher] max_sentences is {}, max_length {}, expected 0 or more", options_.max_sentences,
             options_.max_length);
  FRIT_CHECK(options_.window >= 1, "[batcher] window is {}, expected at least 1", options_.window);
  FRIT_CHECK(options_.decoder_start_id >= 0 && options_.decoder_start_id < file.vocabulary_size(Side::kTarget),
             "[batcher] decoder_start_id is {}, expected 0 to {}", options_.decoder_start_id,
             file.vocabulary_size(Side::kTarget) - 1);
  if (options_.max_length == 0) options_.max_length = options_.max_tokens;
  if (tokenizer_ != nullptr) {
    file_.require_tokenizer(*tokenizer_);
    sampling_ = options_.sampling.active(tokenizer_->model(Side::kSource)) ||
                options_.sampling.active(tokenizer_->model(Side::kTarget));
  }
  FRIT_CHECK(tokenizer_ != nullptr || options_.sampling.alpha <= 0, "[batcher] subword sampling needs the tokenizer");
  counts_.sentences = file_.sentences();
  for (int64_t i = 0; i < counts_.sentences; ++i) {
    const int64_t longest = std::max(file_.source_length(i), file_.target_length(i));
    if (longest > options_.max_length)
      ++counts_.over_length;
    else if (longest > options_.max_tokens)
      ++counts_.over_budget;
  }
  if (counts_.used() == 0)
    fail("[batcher] no sentence pair of {} can be used: {}", file_.path(), counts_.to_string(options_));
  constexpr int64_t kMaxBlocks = int64_t{1} << 24;
  block_ = (counts_.sentences + kMaxBlocks - 1) / kMaxBlocks;
  plan_.items.reserve(static_cast<size_t>(std::min(options_.window, counts_.sentences)));
  plan_.begins.reserve(plan_.items.capacity() + 1);
  plan_.order.reserve(plan_.items.capacity());
  order_sentences(0, &blocks_);
  plan_window(0, 0, blocks_, &plan_);
  settle();
}

bool Batcher::fits(int64_t source_length, int64_t target_length) const {
  return std::max(source_length, target_length) <= std::min(options_.max_length, options_.max_tokens);
}

int64_t Batcher::windows() const {
  const int64_t places = static_cast<int64_t>(blocks_.size()) * block_;
  return (places + options_.window - 1) / options_.window;
}

void Batcher::order_sentences(int64_t epoch, std::vector<uint32_t>* blocks) const {
  blocks->resize(static_cast<size_t>((counts_.sentences + block_ - 1) / block_));
  std::iota(blocks->begin(), blocks->end(), 0u);
  if (options_.shuffle) shuffle(*blocks, RandomStream(options_.seed, RandomUse::kSentenceOrder, epoch, 0));
}

void Batcher::plan_window(int64_t epoch, int64_t window, const std::vector<uint32_t>& blocks, Plan* plan) const {
  plan->items.clear(), plan->begins.clear(), plan->order.clear(), plan->sampled_ids.clear();
  const int64_t end = std::min((window + 1) * options_.window, static_cast<int64_t>(blocks.size()) * block_);
  for (int64_t place = window * options_.window; place < end; ++place) {
    const int64_t sentence =
        static_cast<int64_t>(blocks[static_cast<size_t>(place / block_)]) * block_ + place % block_;
    if (sentence >= counts_.sentences) continue;  // the last block may be shorter
    int64_t source_length = file_.source_length(sentence), target_length = file_.target_length(sentence);
    if (!fits(source_length, target_length)) continue;
    int64_t sampled = -1;
    if (sampling_) {
      auto& ids = plan->sampled_ids;
      const size_t begin = ids.size();
      plan->scratch.resize(static_cast<size_t>(std::max(source_length, target_length)));
      file_.read_source(sentence, plan->scratch.data());
      tokenizer_->resample(Side::kSource, {plan->scratch.data(), static_cast<size_t>(source_length)}, options_.sampling,
                           epoch, sentence, &ids);
      const auto sampled_source = static_cast<int64_t>(ids.size() - begin);
      file_.read_target(sentence, plan->scratch.data());
      tokenizer_->resample(Side::kTarget, {plan->scratch.data(), static_cast<size_t>(target_length)}, options_.sampling,
                           epoch, sentence, &ids);
      const auto sampled_target = static_cast<int64_t>(ids.size() - begin) - sampled_source;
      if (fits(sampled_source, sampled_target)) {
        source_length = sampled_source, target_length = sampled_target;
        sampled = static_cast<int64_t>(begin);
      } else {
        ids.resize(begin);
      }
    }
    const auto longer = static_cast<uint64_t>(std::max(source_length, target_length));
    plan->items.push_back({longer << 32 | static_cast<uint64_t>(target_length), sentence,
                           static_cast<int32_t>(source_length), static_cast<int32_t>(target_length), sampled});
  }
  std::sort(plan->items.begin(), plan->items.end(),
            [](const Item& a, const Item& b) { return a.key != b.key ? a.key < b.key : a.sentence < b.sentence; });
  int64_t source_tokens = 0, target_tokens = 0;
  for (size_t i = 0; i < plan->items.size(); ++i) {
    const Item& item = plan->items[i];
    const bool full = source_tokens + item.source_length > options_.max_tokens ||
                      target_tokens + item.target_length > options_.max_tokens ||
                      (options_.max_sentences > 0 && !plan->begins.empty() &&
                       static_cast<int64_t>(i) - plan->begins.back() >= options_.max_sentences);
    if (plan->begins.empty() || full) {
      plan->order.push_back(static_cast<int64_t>(plan->begins.size()));
      plan->begins.push_back(static_cast<int64_t>(i));
      source_tokens = target_tokens = 0;
    }
    source_tokens += item.source_length, target_tokens += item.target_length;
  }
  plan->begins.push_back(static_cast<int64_t>(plan->items.size()));
  if (options_.shuffle) shuffle(plan->order, RandomStream(options_.seed, RandomUse::kBatchOrder, epoch, window));
}

// Moves on to the next window (or epoch) that has a batch left.
void Batcher::settle() {
  while (in_window_ == static_cast<int64_t>(plan_.order.size())) {
    in_window_ = 0;
    if (++window_ == windows()) {
      window_ = 0;
      position_ = {position_.epoch + 1, 0};
      order_sentences(position_.epoch, &blocks_);
    }
    plan_window(position_.epoch, window_, blocks_, &plan_);
  }
}

void Batcher::seek(BatchPosition position) {
  FRIT_CHECK(position.epoch >= 0 && position.index >= 0, "[batcher] position is epoch {}, batch {}, expected 0 or more",
             position.epoch, position.index);
  position_ = {position.epoch, 0};
  window_ = in_window_ = 0;
  order_sentences(position.epoch, &blocks_);
  plan_window(position.epoch, 0, blocks_, &plan_);
  int64_t left = position.index;
  while (left > 0) {
    settle();
    if (position_.epoch != position.epoch)
      fail_argument("[batcher] epoch {} has {} batches, batch {} was sought", position.epoch, position.index - left,
                    position.index);
    const int64_t step = std::min(left, static_cast<int64_t>(plan_.order.size()) - in_window_);
    in_window_ += step, left -= step;
  }
  position_.index = position.index;
  settle();
}

void Batcher::reserve(Batch* batch) const {
  const auto tokens = static_cast<size_t>(options_.max_tokens);
  auto sentences = static_cast<size_t>(std::min({options_.max_tokens, counts_.used(), options_.window}));
  if (options_.max_sentences > 0) sentences = std::min(sentences, static_cast<size_t>(options_.max_sentences));
  for (auto* ids : {&batch->source_ids, &batch->target_ids, &batch->labels}) ids->reserve(tokens);
  for (auto* offsets : {&batch->source_offsets, &batch->target_offsets}) offsets->reserve(sentences + 1);
  batch->sentence_index.reserve(sentences);
}

void Batcher::next(Batch* batch) {
  reserve(batch);
  const auto which = static_cast<size_t>(plan_.order[static_cast<size_t>(in_window_)]);
  const int64_t begin = plan_.begins[which], end = plan_.begins[which + 1];
  int64_t source_tokens = 0, target_tokens = 0;
  batch->source_offsets.assign(1, 0), batch->target_offsets.assign(1, 0);
  batch->sentence_index.clear();
  for (int64_t i = begin; i < end; ++i) {
    const Item& item = plan_.items[static_cast<size_t>(i)];
    batch->source_offsets.push_back(static_cast<int32_t>(source_tokens += item.source_length));
    batch->target_offsets.push_back(static_cast<int32_t>(target_tokens += item.target_length));
    batch->sentence_index.push_back(item.sentence);
  }
  batch->source_ids.resize(static_cast<size_t>(source_tokens));
  batch->labels.resize(static_cast<size_t>(target_tokens));
  batch->target_ids.resize(static_cast<size_t>(target_tokens));
  for (int64_t i = begin; i < end; ++i) {
    const Item& item = plan_.items[static_cast<size_t>(i)];
    int32_t* source = batch->source_ids.data() + batch->source_offsets[static_cast<size_t>(i - begin)];
    const int32_t at = batch->target_offsets[static_cast<size_t>(i - begin)];
    int32_t *labels = batch->labels.data() + at, *inputs = batch->target_ids.data() + at;
    if (item.sampled >= 0) {
      const int32_t* ids = plan_.sampled_ids.data() + item.sampled;
      std::copy_n(ids, item.source_length, source);
      std::copy_n(ids + item.source_length, item.target_length, labels);
    } else {
      file_.read_source(item.sentence, source);
      file_.read_target(item.sentence, labels);
    }
    inputs[0] = options_.decoder_start_id;
    std::copy_n(labels, item.target_length - 1, inputs + 1);
  }
  ++in_window_, ++position_.index;
  settle();
}

std::vector<BatchSize> Batcher::sizes(int64_t epoch) const {
  std::vector<uint32_t> blocks;
  order_sentences(epoch, &blocks);
  Plan plan;
  std::vector<BatchSize> result;
  for (int64_t window = 0; window < windows(); ++window) {
    plan_window(epoch, window, blocks, &plan);
    for (int64_t which : plan.order) {
      BatchSize size;
      for (int64_t i = plan.begins[static_cast<size_t>(which)]; i < plan.begins[static_cast<size_t>(which) + 1]; ++i) {
        const Item& item = plan.items[static_cast<size_t>(i)];
        size.source_tokens += item.source_length, size.target_tokens += item.target_length, ++size.sentences;
        size.longest_source = std::max<int64_t>(size.longest_source, item.source_length);
        size.longest_target = std::max<int64_t>(size.longest_target, item.target_length);
      }
      result.push_back(size);
    }
  }
  return result;
}

std::vector<std::vector<int64_t>> plan_inference_batches(std::span<const int64_t> lengths, int64_t max_tokens,
                                                         int64_t max_sentences) {
  FRIT_CHECK(max_tokens >= 1 && max_sentences >= 0, "[batcher] max_tokens is {}, max_sentences {}", max_tokens,
             max_sentences);
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return lengths[static_cast<size_t>(a)] > lengths[static_cast<size_t>(b)];
  });
  std::vector<std::vector<int64_t>> groups;
  int64_t tokens = 0;
  for (int64_t i : order) {
    const int64_t length = lengths[static_cast<size_t>(i)];
    const bool full = groups.empty() || tokens + length > max_tokens ||
                      (max_sentences > 0 && static_cast<int64_t>(groups.back().size()) >= max_sentences);
    if (full) groups.emplace_back(), tokens = 0;
    groups.back().push_back(i);
    tokens += length;
  }
  return groups;
}

void fill_source_batch(std::span<const std::vector<int32_t>> sentences, std::span<const int64_t> group, Batch* batch) {
  batch->source_ids.clear(), batch->target_ids.clear(), batch->labels.clear(), batch->target_offsets.clear();
  batch->source_offsets.assign(1, 0);
  batch->sentence_index.assign(group.begin(), group.end());
  for (int64_t i : group) {
    const auto& ids = sentences[static_cast<size_t>(i)];
    batch->source_ids.insert(batch->source_ids.end(), ids.begin(), ids.end());
    batch->source_offsets.push_back(static_cast<int32_t>(batch->source_ids.size()));
  }
}

}  // namespace frit
