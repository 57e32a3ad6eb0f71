#include "frit/infer/processors.h"

#include <algorithm>
#include <limits>

namespace frit {

Processors::Processors(const GenerateOptions& options, int64_t vocabulary)
    : options_(options), vocabulary_(vocabulary), penalty_(static_cast<float>(options.repetition_penalty)) {
  for (const std::vector<int32_t>& word : options.bad_words) {
    if (word.size() == 1)
      single_.push_back(word[0]);
    else
      sequences_.push_back(word);
  }
  used_mark_.assign(static_cast<size_t>(vocabulary), 0), ban_mark_.assign(static_cast<size_t>(vocabulary), 0);
}

int64_t Processors::touched(const GenerateOptions& options, int64_t length) {
  auto n = static_cast<int64_t>(options.bad_words.size());
  if (options.min_length > 0 || options.min_new_tokens > 0) n += static_cast<int64_t>(options.eos_ids.size());
  if (static_cast<float>(options.repetition_penalty) != 1) n += length;
  if (options.no_repeat_ngram > 0) n += length;
  return n;
}

void Processors::ban(int32_t token) {
  uint32_t& mark = ban_mark_[static_cast<size_t>(token)];
  if (mark == look_) return;
  mark = look_;
  banned_.push_back(token);
}

void Processors::look_at(const HypothesisState& state) {
  if (++look_ == 0) {  // after 2^32 looks old marks would seem new
    std::fill(used_mark_.begin(), used_mark_.end(), 0), std::fill(ban_mark_.begin(), ban_mark_.end(), 0);
    look_ = 1;
  }
  used_.clear(), banned_.clear();
  forced_ = -1;
  const std::span<const int32_t> ids = state.ids;
  const int64_t length = static_cast<int64_t>(ids.size());
  if (length == 1 && options_.forced_bos_id >= 0) forced_ = options_.forced_bos_id;
  if (length == state.max_length - 1 && options_.forced_eos_id >= 0) forced_ = options_.forced_eos_id;
  if (forced_ >= 0) return;
  if (penalty_ != 1)
    for (const int32_t id : ids) {
      uint32_t& mark = used_mark_[static_cast<size_t>(id)];
      if (mark != look_) mark = look_, used_.push_back(id);
    }
  const int64_t n = options_.no_repeat_ngram;
  if (n > 0 && length >= n) {
    const auto suffix = ids.last(static_cast<size_t>(n - 1));
    for (int64_t i = 0; i + n <= length; ++i)
      if (std::equal(suffix.begin(), suffix.end(), ids.begin() + i)) ban(ids[static_cast<size_t>(i + n - 1)]);
  }
  for (const int32_t token : single_) ban(token);
  for (const std::vector<int32_t>& word : sequences_) {
    const size_t before = word.size() - 1;
    if (before <= ids.size() && std::equal(word.begin(), word.end() - 1, ids.end() - static_cast<int64_t>(before)))
      ban(word.back());
  }
  if (length < options_.min_length || length - state.prompt < options_.min_new_tokens)
    for (const int32_t eos : options_.eos_ids) ban(eos);
}

float Processors::apply(float value, int32_t token) const {
  const size_t i = static_cast<size_t>(token);
  if (ban_mark_[i] == look_) return -std::numeric_limits<float>::infinity();
  if (penalty_ != 1 && used_mark_[i] == look_) return value < 0 ? value * penalty_ : value / penalty_;
  return value;
}

void Processors::apply_to_row(float* row) const {
  if (forced_ >= 0) {
    std::fill(row, row + vocabulary_, -std::numeric_limits<float>::infinity());
    row[forced_] = 0;
    return;
  }
  for (const int32_t token : used_) row[token] = apply(row[token], token);
  for (const int32_t token : banned_) row[token] = -std::numeric_limits<float>::infinity();
}

}  // namespace frit
