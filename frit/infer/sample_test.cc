#include "frit/infer/sample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "frit/core/philox.h"
#include "frit/infer/processors.h"

namespace frit {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

std::set<int32_t> ids_of(std::span<const std::pair<double, int32_t>> support) {
  std::set<int32_t> ids;
  for (const auto& [weight, id] : support) ids.insert(id);
  return ids;
}

std::vector<float> random_logits(size_t n, uint32_t seed) {
  std::vector<float> logits;
  for (uint32_t i = 0; i < n; ++i)
    logits.push_back(static_cast<float>(philox({seed, 0}, i, 0, 0, 0).v[0] >> 8) * 0x1p-22f);
  return logits;
}

TEST(Sample, TopKKeepsTiesOfTheLast) {
  Sampler sampler;
  const std::vector<float> logits = {1, 3, 2, 2, kNever, 0, 2};
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_k = 1})), (std::set<int32_t>{1}));
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_k = 2})), (std::set<int32_t>{1, 2, 3, 6}));
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_k = 5})), (std::set<int32_t>{0, 1, 2, 3, 6}));
  EXPECT_EQ(ids_of(sampler.support(logits, {})), (std::set<int32_t>{0, 1, 2, 3, 5, 6}));
}

TEST(Sample, TopPIsTheFewestThatReachIt) {
  Sampler sampler;
  const auto logs = [](std::initializer_list<double> p) {
    std::vector<float> v;
    for (double x : p) v.push_back(static_cast<float>(std::log(x)));
    return v;
  };
  const std::vector<float> logits = logs({0.1, 0.5, 0.15, 0.25});
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_p = 0.01})), (std::set<int32_t>{1}));
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_p = 0.6})), (std::set<int32_t>{1, 3}));
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_p = 0.76})), (std::set<int32_t>{1, 2, 3}));
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_p = 0.95})), (std::set<int32_t>{0, 1, 2, 3}));
  // top_k first: of 0.5 and 0.25 the first alone holds two thirds.
  EXPECT_EQ(ids_of(sampler.support(logits, {.top_k = 2, .top_p = 0.6})), (std::set<int32_t>{1}));
  // Temperature before both: at 1/2 probabilities go as squares, the first holds 0.71.
  EXPECT_EQ(ids_of(sampler.support(logits, {.temperature = 0.5, .top_p = 0.7})), (std::set<int32_t>{1}));
}

TEST(Sample, TopPOfManyTokensEqualsSortingAll) {
  Sampler sampler;
  for (uint32_t seed = 0; seed < 5; ++seed) {
    const std::vector<float> logits = random_logits(5000, seed);
    const SampleOptions options{.temperature = 200.0, .top_p = 0.1 + 0.2 * seed};
    std::vector<std::pair<double, int32_t>> all;
    double total = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      all.emplace_back(-std::exp(logits[i] / options.temperature), static_cast<int32_t>(i));
      total -= all.back().first;
    }
    std::sort(all.begin(), all.end());
    std::set<int32_t> expected;
    for (double before = 0; before < options.top_p * total; before -= all[expected.size() - 1].first)
      expected.insert(all[expected.size()].second);
    const auto ours = ids_of(sampler.support(logits, options));
    EXPECT_LE(std::abs(static_cast<int>(ours.size()) - static_cast<int>(expected.size())), 1);
  }
}

TEST(Sample, AllBannedIsAnError) {
  Sampler sampler;
  const std::vector<float> logits(5, kNever);
  EXPECT_THROW(sampler.support(logits, {}), std::runtime_error);
}

TEST(Sample, FrequenciesFitTheDistribution) {
  Sampler sampler;
  const std::vector<float> logits = random_logits(40, 3);
  const SampleOptions options{.temperature = 150.0, .top_k = 30, .top_p = 0.9};
  std::map<int32_t, double> p;
  double total = 0;
  for (const auto& [weight, id] : sampler.support(logits, options)) p[id] = weight, total += weight;
  std::map<int32_t, int> counts;
  constexpr int kDraws = 40000;
  for (uint32_t i = 0; i < kDraws; ++i) ++counts[sampler.draw(logits, options, sampling_uniform(7, i, 0, 1))];
  double chi = 0;
  for (const auto& [id, weight] : p) {
    const double expected = kDraws * weight / total;
    chi += (counts[id] - expected) * (counts[id] - expected) / expected;
    counts.erase(id);
  }
  for (const auto& [id, count] : counts) EXPECT_EQ(count, 0) << "token " << id << " lies outside the support";
  // 99.9 % of chi-square with n degrees lie below n + 3.1 sqrt(2n) + 6.
  const double n = static_cast<double>(p.size()) - 1;
  EXPECT_GT(n, 10);
  EXPECT_LT(chi, n + 3.1 * std::sqrt(2 * n) + 6);
}

TEST(Sample, UniformDependsOnEachCoordinate) {
  const double u = sampling_uniform(1, 2, 3, 4);
  EXPECT_EQ(u, sampling_uniform(1, 2, 3, 4));
  for (const double other : {sampling_uniform(2, 2, 3, 4), sampling_uniform(1, 3, 3, 4), sampling_uniform(1, 2, 4, 4),
                             sampling_uniform(1, 2, 3, 5), sampling_uniform(1 + (1ull << 32), 2, 3, 4),
                             sampling_uniform(1, 2 + (1ull << 32), 3, 4)})
    EXPECT_NE(u, other);
}

TEST(Processors, PenaltiesBansAndForcedTokens) {
  GenerateOptions o;
  o.eos_ids = {0}, o.repetition_penalty = 2, o.no_repeat_ngram = 2, o.bad_words = {{9}, {5, 6}}, o.min_length = 6;
  o.forced_eos_id = 0, o.forced_bos_id = 8;
  Processors p(o, 10);
  const std::vector<int32_t> ids = {1, 4, 5, 4};
  p.look_at({ids, 1, 8});
  EXPECT_EQ(p.forced(), -1);
  EXPECT_EQ(p.apply(3, 4), 1.5f);  // used
  EXPECT_EQ(p.apply(-3, 4), -6.0f);
  EXPECT_EQ(p.apply(3, 5), kNever);  // 4 5 was there
  EXPECT_EQ(p.apply(3, 6), 3.0f);
  EXPECT_EQ(p.apply(3, 9), kNever);
  EXPECT_EQ(p.apply(3, 0), kNever);  // too short for EOS
  std::vector<float> row(10, 2.0f);
  p.apply_to_row(row.data());
  for (int32_t i = 0; i < 10; ++i) EXPECT_EQ(row[static_cast<size_t>(i)], p.apply(2, i)) << i;
  const std::vector<int32_t> after5 = {1, 4, 5};
  p.look_at({after5, 1, 8});
  EXPECT_EQ(p.apply(3, 6), kNever);
  EXPECT_EQ(p.apply(3, 5), 1.5f);
  const std::vector<int32_t> start = {1}, end = {1, 2, 3, 4, 5, 6, 7};
  p.look_at({start, 1, 8});
  EXPECT_EQ(p.forced(), 8);
  p.look_at({end, 1, 8});
  EXPECT_EQ(p.forced(), 0);
}

}  // namespace
}  // namespace frit
