#include "frit/simt/held_folded.h"
#include "frit/simt/test_kernels.h"

namespace frit {
namespace {

using namespace simt;

// The tensor's last vector, if it is no whole one.
FRIT_DEVICE void drop_cut(const ColumnWalk& walk, const ColumnPlace& at, const Global<const bfloat16>& x,
                          const DropoutTable& dropout, const Global<bfloat16>& y) {
  const int64_t row = (walk.rows - 1) * walk.row_stride;
  Vec<bfloat16, 8> out = load_span<8>(x + row, at.column, at.limit, bfloat16());
  kept_cut(walk, at, dropout).drop(out);
  store_span<8>(y + row, at.column, at.limit, out);
}

// y = x without what is dropped, U rows on their way.
template <int U>
FRIT_KERNEL(256, 1)
drop_folded_kernel(ColumnWalk walk, Global<const bfloat16> x, DropoutTable dropout, Global<bfloat16> y) {
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const FoldedRows rows = folded_rows(walk, at);
  const int64_t step = rows.step * walk.row_stride, begin = rows.first * walk.row_stride + at.column;
  Global<const bfloat16> from = x + begin;
  Global<bfloat16> to = y + begin;
  Vec<bfloat16, 8> v[U] = {};
  const auto fetch = [&](int u, bool there) {
    if (there) v[u] = load_vec<8>(from, 0);
    from = from + step;
  };
  for_folded_rows<U>(walk, at, rows, dropout, fetch, [&](int u, const KeptRows& kept, bool here, bool more) {
    Vec<bfloat16, 8> out = v[u];
    fetch(u, more);
    for (int i = 0; i < 8; ++i)
      if (!kept.kept(i) && static_cast<float>(out[i]) != 0) out[i] = bfloat16(2.0f);
    kept.drop(out);
    if (here) store_vec<8>(to, 0, out);
    to = to + step;
  });
  if (rows.cut) drop_cut(walk, at, x, dropout, y);
}

// The same, S rows on their way to shared memory.
template <int S>
FRIT_KERNEL(256, 1)
drop_held_folded_kernel(ColumnWalk walk, Global<const bfloat16> x, DropoutTable dropout, Global<bfloat16> y) {
  constexpr int kStage = 256 * 8;
  wait_for_previous();
  const ColumnPlace at = column_place(walk, x);
  const FoldedRows rows = folded_rows(walk, at);
  const int64_t step = rows.step * walk.row_stride, begin = rows.first * walk.row_stride + at.column;
  Global<const bfloat16> from = x + begin;
  Global<bfloat16> to = y + begin;
  const Shared<bfloat16> ring = shared_array<bfloat16>(thread_index() * 16);
  const auto start = [&](int row, int stage) {
    if (row < rows.whole_end) copy_async16(ring, stage * kStage, from, 0);
    copy_async_commit();
    from = from + step;
  };
  for_held_folded_rows<S>(walk, at, rows, dropout, start, [&](int row, int stage, const KeptRows& kept) {
    copy_async_wait<S - 1>();
    Vec<bfloat16, 8> out = load_vec<8>(ring, stage * kStage);
    start(row + S * rows.step, stage);
    kept.drop(out);
    store_vec<8>(to, 0, out);
    to = to + step;
  });
  if (rows.cut) drop_cut(walk, at, x, dropout, y);
}

struct FoldedCase {
  int64_t rows, columns;
  int rows_a_thread;
  float p_drop;
};

class FoldedWalk : public testing::TestWithParam<FoldedCase> {};

// Several batches of 8 rows, pairs of them, which share a draw, and what is left over.
TEST_P(FoldedWalk, KeepsWhatDropoutKeeps) {
  const auto [rows, columns, rows_a_thread, p_drop] = GetParam();
  SimTest t;
  auto x = t.tensor<bfloat16>(rows * columns), y = t.tensor<bfloat16>(rows * columns);
  t.fill_with(x, [](int64_t) { return 1.0f; });
  const Dropout dropout{p_drop, 77, 3, {5, 9}};
  const Tensor tensor(x.p, DType::kBF16, {rows, columns});
  const ColumnWalk walk = make_column_walk(tensor, 256, rows_a_thread, 0, true, true);
  ASSERT_TRUE(walks_folded(walk, tensor));
  ASSERT_GE(walk.rows, rows_a_thread);
  const auto run = [&](auto kernel, int64_t shared_bytes = 0) {
    t.fill_with(y, [](int64_t) { return 7.0f; });  // what the kernel before this one wrote is not taken for its own
    t.launch("drop_folded", kernel, {walk.blocks(), walk.threads(), shared_bytes}, walk, x.constant(),
             DropoutTable(dropout), y.global());
    int64_t wrong = 0;
    for (int64_t i = 0; i < rows * columns; ++i)
      wrong +=
          static_cast<float>(y.p[i]) != (!dropout.active() || dropout.keep(i / columns, i % columns) ? 1.0f : 0.0f);
    EXPECT_EQ(wrong, 0);
  };
  run(drop_folded_kernel<2>);
  run(drop_folded_kernel<4>);
  run(drop_folded_kernel<8>);
  run(drop_held_folded_kernel<2>, 2 * 256 * 16);
  run(drop_held_folded_kernel<8>, 8 * 256 * 16);
}
INSTANTIATE_TEST_SUITE_P(Shapes, FoldedWalk,
                         testing::Values(FoldedCase{8 * 41 + 3, 257, 40, 0.4f}, FoldedCase{8 * 24, 1023, 24, 0.1f},
                                         FoldedCase{8 * 33 + 5, 1025, 16, 0.6f}, FoldedCase{2 * 45, 260, 12, 0.3f},
                                         FoldedCase{4 * 41 - 1, 1030, 20, 0.999f}, FoldedCase{8 * 9 - 1, 263, 4, 0.5f},
                                         FoldedCase{8 * 18, 259, 18, 0.0f}));

TEST(FoldedColumns, PermutesBytes) {
  EXPECT_EQ(permute_bytes<0x7531>(0x33221100u, 0x77665544u), 0x77553311u);
  EXPECT_EQ(permute_bytes<0x0123>(0x33221100u, 0u), 0x00112233u);
  EXPECT_EQ(permute_bytes<0x9988>(0x00007f80u, 0u), 0x0000ffffu);
  EXPECT_EQ(permute_bytes<0xfbea>(0x80000000u, 0x80ff0000u), 0xffffff00u);
}

// The threshold's own neighbours, in both halves of a word.
TEST(FoldedColumns, AddsARowOfElementsAtTheThreshold) {
  for (const float p : {1.0f / 65536, 0.1f, 0.5f, 65535.0f / 65536}) {
    const Dropout d{p, 0, 0, {}};
    const DropoutTable table(d);
    const uint32_t t = d.threshold(), least = t - 1,
                   words[4] = {t | least << 16, least | t << 16, 0xffffu, 0xffffu << 16};
    KeptRows rows;
    rows.low = rows.high = 0;
    add_row(rows, words, dropout_carry(table));
    for (int i = 0; i < 8; ++i) EXPECT_EQ(rows.kept(i), i == 0 || i == 3 || i == 4 || i == 7) << p << " " << i;
  }
}

}  // namespace
}  // namespace frit
