#include "frit/data/batcher.h"

#include <gtest/gtest.h>

#include <set>

#include "frit/core/error.h"
#include "frit/core/thread_pool.h"
#include "frit/data/prefetch.h"
#include "frit/data/test_corpus.h"

namespace frit {
namespace {

constexpr int kLines = 1500;

struct Corpus {
  TemporaryDirectory dir;
  std::vector<std::string> english = made_up_lines(false, kLines), german = made_up_lines(true, kLines);
  Tokenizer tokenizer = [this] {
    return Tokenizer::train(dir.write("en", join_lines(english)), dir.write("de", join_lines(german)),
                            {.vocabulary = 400});
  }();
  TokenFile file = [this] {
    ThreadPool pool(2);
    return TokenFile::build(dir / "tokens", dir / "en", dir / "de", tokenizer, pool);
  }();
};

const Corpus& corpus() {
  static const Corpus c;
  return c;
}

bool same(const Batch& a, const Batch& b) {
  return a.source_ids == b.source_ids && a.source_offsets == b.source_offsets && a.target_ids == b.target_ids &&
         a.labels == b.labels && a.target_offsets == b.target_offsets && a.sentence_index == b.sentence_index;
}

std::vector<Batch> epoch_of(Batcher& batcher, int64_t epoch) {
  batcher.seek({epoch, 0});
  std::vector<Batch> batches;
  while (batcher.position().epoch == epoch) {
    EXPECT_EQ(batcher.position().index, static_cast<int64_t>(batches.size()));
    batcher.next(&batches.emplace_back());
  }
  EXPECT_EQ(batcher.position(), (BatchPosition{epoch + 1, 0}));
  return batches;
}

TEST(Batcher, EverySentenceOnceAnEpochUnderTheBudget) {
  const Corpus& c = corpus();
  for (int64_t max_tokens : {40, 100, 1000000})
    for (int64_t window : {1, 100, 100000})
      for (int64_t max_sentences : {0, 1, 5})
        for (int64_t max_length : {0, 10, 30}) {
          BatcherOptions options{.max_tokens = max_tokens,
                                 .max_sentences = max_sentences,
                                 .max_length = max_length,
                                 .window = window,
                                 .decoder_start_id = c.tokenizer.pad_id()};
          Batcher batcher(c.file, options);
          std::multiset<int64_t> seen;
          for (const Batch& b : epoch_of(batcher, 1)) {
            ASSERT_GE(b.sentences(), 1);
            ASSERT_LE(b.source_tokens(), max_tokens);
            ASSERT_LE(b.target_tokens(), max_tokens);
            ASSERT_LE(b.sentences(), max_sentences > 0 ? max_sentences : kLines);
            seen.insert(b.sentence_index.begin(), b.sentence_index.end());
          }
          std::multiset<int64_t> expected;
          int64_t over_length = 0, over_budget = 0;
          for (int64_t i = 0; i < kLines; ++i) {
            const int64_t longest = std::max(c.file.source_length(i), c.file.target_length(i));
            if (max_length > 0 && longest > max_length)
              ++over_length;
            else if (longest > max_tokens)
              ++(max_length > 0 ? over_budget : over_length);
            else
              expected.insert(i);
          }
          ASSERT_EQ(seen, expected);
          EXPECT_EQ(batcher.counts().over_length, over_length);
          EXPECT_EQ(batcher.counts().over_budget, over_budget);
          EXPECT_EQ(batcher.counts().used(), static_cast<int64_t>(expected.size()));
        }
}

TEST(Batcher, BatchesHoldTheSentencesTheyName) {
  const Corpus& c = corpus();
  Batcher batcher(c.file, {.max_tokens = 300, .decoder_start_id = c.tokenizer.pad_id()});
  for (const Batch& b : epoch_of(batcher, 0)) {
    ASSERT_EQ(b.source_offsets.front(), 0);
    ASSERT_EQ(b.source_offsets.back(), b.source_tokens());
    ASSERT_EQ(b.target_offsets.back(), b.target_tokens());
    ASSERT_EQ(b.target_ids.size(), b.labels.size());
    for (int64_t s = 0; s < b.sentences(); ++s) {
      const auto i = static_cast<size_t>(b.sentence_index[static_cast<size_t>(s)]);
      const auto k = static_cast<size_t>(s);
      const std::vector<int32_t> source(b.source_ids.begin() + b.source_offsets[k],
                                        b.source_ids.begin() + b.source_offsets[k + 1]);
      const std::vector<int32_t> inputs(b.target_ids.begin() + b.target_offsets[k],
                                        b.target_ids.begin() + b.target_offsets[k + 1]);
      const std::vector<int32_t> labels(b.labels.begin() + b.target_offsets[k],
                                        b.labels.begin() + b.target_offsets[k + 1]);
      ASSERT_EQ(c.tokenizer.decode(source, Side::kSource), c.english[i]);
      ASSERT_EQ(c.tokenizer.decode(labels), c.german[i]);
      ASSERT_EQ(source.back(), c.tokenizer.eos_id());
      ASSERT_EQ(labels.back(), c.tokenizer.eos_id());
      ASSERT_EQ(inputs.front(), c.tokenizer.pad_id());
      ASSERT_TRUE(std::equal(labels.begin(), labels.end() - 1, inputs.begin() + 1));
    }
  }
}

TEST(Batcher, SeedAndEpochDecideTheOrder) {
  const Corpus& c = corpus();
  auto order = [&](uint64_t seed, int64_t epoch, bool shuffle = true) {
    Batcher batcher(c.file, {.max_tokens = 200, .window = 500, .shuffle = shuffle, .seed = seed});
    std::vector<int64_t> all;
    for (const Batch& b : epoch_of(batcher, epoch))
      all.insert(all.end(), b.sentence_index.begin(), b.sentence_index.end());
    return all;
  };
  EXPECT_EQ(order(1, 0), order(1, 0));
  EXPECT_NE(order(1, 0), order(2, 0));
  EXPECT_NE(order(1, 0), order(1, 1));
  EXPECT_NE(order(1, 1), order(uint64_t{1} << 40, 1));
  EXPECT_EQ(order(1, 0, false), order(2, 3, false));
}

TEST(Batcher, LengthsInABatchAreAlikeAndBatchesAreFull) {
  const Corpus& c = corpus();
  Batcher batcher(c.file, {.max_tokens = 400});
  double spread = 0, fill = 0;
  const auto sizes = batcher.sizes(0);
  const auto batches = epoch_of(batcher, 0);
  for (const Batch& b : batches) {
    int32_t shortest = INT32_MAX, longest = 0;
    for (size_t s = 0; s + 1 < b.source_offsets.size(); ++s) {
      shortest = std::min(shortest, b.source_offsets[s + 1] - b.source_offsets[s]);
      longest = std::max(longest, b.source_offsets[s + 1] - b.source_offsets[s]);
    }
    spread += longest - shortest;
    fill += static_cast<double>(std::max(b.source_tokens(), b.target_tokens())) / 400;
  }
  const auto n = static_cast<double>(batches.size());
  EXPECT_GT(fill / n, 0.93);
  EXPECT_LT(spread / n, 20);
  // Batches are not in the order of their lengths.
  int64_t rises = 0;
  for (size_t i = 1; i < sizes.size(); ++i) rises += sizes[i].sentences > sizes[i - 1].sentences;
  EXPECT_GT(rises, static_cast<int64_t>(sizes.size()) / 4);
  EXPECT_LT(rises, static_cast<int64_t>(sizes.size()) * 3 / 4);
}

TEST(Batcher, SizesAreThoseOfTheBatches) {
  const Corpus& c = corpus();
  for (float alpha : {0.0f, 0.2f}) {
    Batcher batcher(c.file, {.max_tokens = 150, .window = 400, .sampling = {.alpha = alpha}}, &c.tokenizer);
    for (int64_t epoch : {0, 5}) {
      const auto sizes = batcher.sizes(epoch);
      const auto batches = epoch_of(batcher, epoch);
      ASSERT_EQ(sizes.size(), batches.size());
      EXPECT_EQ(batcher.batches(epoch), static_cast<int64_t>(batches.size()));
      for (size_t i = 0; i < sizes.size(); ++i) {
        ASSERT_EQ(sizes[i].source_tokens, batches[i].source_tokens());
        ASSERT_EQ(sizes[i].target_tokens, batches[i].target_tokens());
        ASSERT_EQ(sizes[i].sentences, batches[i].sentences());
        int64_t longest = 0;
        for (size_t s = 0; s + 1 < batches[i].target_offsets.size(); ++s)
          longest = std::max<int64_t>(longest, batches[i].target_offsets[s + 1] - batches[i].target_offsets[s]);
        ASSERT_EQ(sizes[i].longest_target, longest);
      }
    }
  }
}

TEST(Batcher, ResumesAtEveryIndex) {
  const Corpus& c = corpus();
  for (float alpha : {0.0f, 0.1f}) {
    const BatcherOptions options{.max_tokens = 600, .window = 300, .sampling = {.alpha = alpha}};
    Batcher straight(c.file, options, &c.tokenizer), resumed(c.file, options, &c.tokenizer);
    std::vector<Batch> all;
    std::vector<BatchPosition> positions;
    const int64_t two_epochs = straight.batches(0) + straight.batches(1);
    for (int64_t i = 0; i < two_epochs + 3; ++i) {
      positions.push_back(straight.position());
      straight.next(&all.emplace_back());
    }
    EXPECT_EQ(straight.position(), (BatchPosition{2, 3}));
    Batch batch;
    // Sampling makes planning slow here: every seventh place is enough for it.
    for (size_t start = 0; start<all.size(); start += alpha> 0 ? 7 : 1) {
      resumed.seek(positions[start]);
      ASSERT_EQ(resumed.position(), positions[start]);
      for (size_t i = start; i < std::min(all.size(), start + 4); ++i) {
        resumed.next(&batch);
        ASSERT_TRUE(same(batch, all[i])) << start << " " << i;
      }
    }
    // The place behind an epoch's last batch is the beginning of the next one.
    resumed.seek({0, resumed.batches(0)});
    EXPECT_EQ(resumed.position(), (BatchPosition{1, 0}));
    EXPECT_THROW(resumed.seek({0, resumed.batches(0) + 1}), std::invalid_argument);
    EXPECT_THROW(resumed.seek({-1, 0}), std::invalid_argument);
  }
}

TEST(Batcher, ReusesItsBuffers) {
  const Corpus& c = corpus();
  Batcher batcher(c.file, {.max_tokens = 500, .window = 200});
  Batch batch;
  batcher.next(&batch);
  const void* before[] = {batch.source_ids.data(), batch.labels.data(), batch.target_ids.data(),
                          batch.source_offsets.data(), batch.sentence_index.data()};
  while (batcher.position().epoch < 3) {
    batcher.next(&batch);
    const void* after[] = {batch.source_ids.data(), batch.labels.data(), batch.target_ids.data(),
                           batch.source_offsets.data(), batch.sentence_index.data()};
    ASSERT_TRUE(std::equal(before, before + 5, after));
  }
}

TEST(Batcher, SamplingChangesSegmentationNotText) {
  const Corpus& c = corpus();
  Batcher batcher(
      c.file,
      {.max_tokens = 300, .max_length = 80, .decoder_start_id = c.tokenizer.pad_id(), .sampling = {.alpha = 0.2f}},
      &c.tokenizer);
  int64_t changed = 0, sentences = 0;
  for (const Batch& b : epoch_of(batcher, 2)) {
    ASSERT_LE(b.source_tokens(), 300);
    ASSERT_LE(b.target_tokens(), 300);
    for (size_t k = 0; k + 1 < b.target_offsets.size(); ++k, ++sentences) {
      const auto i = static_cast<size_t>(b.sentence_index[k]);
      ASSERT_LE(b.target_offsets[k + 1] - b.target_offsets[k], 80);
      const std::vector<int32_t> labels(b.labels.begin() + b.target_offsets[k],
                                        b.labels.begin() + b.target_offsets[k + 1]);
      ASSERT_EQ(c.tokenizer.decode(labels), c.german[i]);
      changed += static_cast<int64_t>(labels.size()) != c.file.target_length(static_cast<int64_t>(i));
    }
  }
  EXPECT_EQ(sentences, batcher.counts().used());
  EXPECT_GT(changed, sentences / 2);
}

TEST(Batcher, RefusesWhatCannotWork) {
  const Corpus& c = corpus();
  EXPECT_THROW(Batcher(c.file, {.max_tokens = 1}), std::invalid_argument);
  EXPECT_THROW(Batcher(c.file, {.window = 0}), std::invalid_argument);
  EXPECT_THROW(Batcher(c.file, {.decoder_start_id = 400}), std::invalid_argument);
  EXPECT_THROW(Batcher(c.file, {.sampling = {.alpha = 0.1f}}), std::invalid_argument);
  EXPECT_NE(error_of([&] { Batcher(c.file, {.max_length = 1}); }).find("0 used; left out: 1,500 longer than 1 tokens"),
            std::string::npos);
  const Tokenizer other = Tokenizer::train(c.dir / "en", c.dir / "de", {.vocabulary = 380});
  EXPECT_NE(error_of([&] { Batcher(c.file, {}, &other); }).find("another tokenizer"), std::string::npos);
}

TEST(InferenceBatches, GroupEachSentenceOnce) {
  std::vector<int64_t> lengths;
  RandomStream random(5, RandomUse::kLineSample, 0, 0);
  for (int i = 0; i < 500; ++i) lengths.push_back(static_cast<int64_t>(1 + random.below(60)));
  lengths[77] = 1000;
  for (int64_t max_sentences : {0, 1, 7}) {
    std::vector<int> seen(lengths.size());
    for (const auto& group : plan_inference_batches(lengths, 200, max_sentences)) {
      int64_t tokens = 0;
      for (int64_t i : group) tokens += lengths[static_cast<size_t>(i)], ++seen[static_cast<size_t>(i)];
      EXPECT_TRUE(tokens <= 200 || group.size() == 1);
      EXPECT_LE(static_cast<int64_t>(group.size()), max_sentences > 0 ? max_sentences : 500);
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<int64_t>(seen.size()));
  }
  EXPECT_TRUE(plan_inference_batches({}, 10).empty());
  const std::vector<std::vector<int32_t>> sentences = {{5, 0}, {6, 7, 8, 0}, {0}};
  Batch batch;
  const std::vector<int64_t> group = {1, 0, 2};
  fill_source_batch(sentences, group, &batch);
  EXPECT_EQ(batch.source_ids, (std::vector<int32_t>{6, 7, 8, 0, 5, 0, 0}));
  EXPECT_EQ(batch.source_offsets, (std::vector<int32_t>{0, 4, 6, 7}));
  EXPECT_EQ(batch.sentence_index, group);
  EXPECT_EQ(batch.sentences(), 3);
  EXPECT_EQ(batch.target_tokens(), 0);
}

TEST(Prefetcher, GivesTheBatchersBatchesAndPositions) {
  const Corpus& c = corpus();
  for (int ahead : {1, 2, 8}) {
    const BatcherOptions options{.max_tokens = 400, .window = 300};
    Batcher straight(c.file, options), source(c.file, options);
    Batch expected;
    straight.next(&expected);
    source.next(&expected);
    Prefetcher prefetcher(source, ahead);
    EXPECT_EQ(prefetcher.position(), straight.position());
    while (straight.position().epoch < 2) {
      straight.next(&expected);
      const Batch* batch = prefetcher.next();
      ASSERT_NE(batch, nullptr);
      ASSERT_TRUE(same(*batch, expected));
      ASSERT_EQ(prefetcher.position(), straight.position());
    }
  }
}

// Counts batches in source_ids[0].
Prefetcher::Produce counting(std::atomic<int>& made, int stop_at, bool by_exception) {
  return [&made, stop_at, by_exception](Batch* batch, BatchPosition* after) {
    if (made == stop_at) {
      if (by_exception) throw Error("the disk is gone");
      return false;
    }
    batch->source_ids.assign(1, made++);
    *after = {0, made};
    return true;
  };
}

TEST(Prefetcher, ErrorsComeOutAtTheConsumerAfterTheGoodBatches) {
  for (int good : {0, 1, 5, 20}) {
    std::atomic<int> made{0};
    Prefetcher prefetcher(counting(made, good, true), 3);
    for (int i = 0; i < good; ++i) ASSERT_EQ(prefetcher.next()->source_ids[0], i);
    for (int again = 0; again < 3; ++again) EXPECT_EQ(error_of([&] { prefetcher.next(); }), "the disk is gone");
    EXPECT_EQ(prefetcher.position().index, good);
  }
}

TEST(Prefetcher, EndsAndStopsCleanly) {
  for (int batches : {0, 1, 2, 9}) {
    std::atomic<int> made{0};
    Prefetcher prefetcher(counting(made, batches, false), 2);
    for (int i = 0; i < batches; ++i) ASSERT_EQ(prefetcher.next()->source_ids[0], i);
    EXPECT_EQ(prefetcher.next(), nullptr);
    EXPECT_EQ(prefetcher.next(), nullptr);
  }
  // Destroyed at any time, with the ring empty, filling or full.
  for (int taken = 0; taken < 200; ++taken) {
    std::atomic<int> made{0};
    Prefetcher prefetcher(counting(made, INT32_MAX, false), 1 + taken % 4);
    for (int i = 0; i < taken % 7; ++i) prefetcher.next();
  }
  std::atomic<int> made{0};
  EXPECT_THROW(Prefetcher(counting(made, 1, false), 0), std::invalid_argument);
}

TEST(Prefetcher, StaysWithinItsRing) {
  std::atomic<int> made{0};
  Prefetcher prefetcher(counting(made, INT32_MAX, false), 3);
  const Batch* batch = prefetcher.next();
  std::set<const Batch*> slots = {batch};
  for (int i = 1; i < 100; ++i) {
    const int value = batch->source_ids[0];
    std::this_thread::yield();
    EXPECT_EQ(batch->source_ids[0], value);  // the batch in hand is not written to
    EXPECT_LE(made, i - 1 + 4);
    batch = prefetcher.next();
    slots.insert(batch);
  }
  EXPECT_EQ(slots.size(), 4u);
}

}  // namespace
}  // namespace frit
