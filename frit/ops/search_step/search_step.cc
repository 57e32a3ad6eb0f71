#include "frit/ops/search_step/search_step.h"

#include "frit/ops/search_step/gpu.h"

namespace frit {
namespace {

void expect(const char* name, const Tensor& t, DType dtype, const Shape& shape) {
  FRIT_CHECK(t.defined() && t.dtype() == dtype && t.shape() == shape && t.contiguous(),
             "[search_step] {} is {}, expected {}{}", name, t.to_string(), name_of(dtype), shape.to_string());
}

void check_state(Context& context, const SearchState& s) {
  FRIT_CHECK(context.on_gpu(), "[search_step] needs a GPU: on the CPU a Generator searches by itself");
  FRIT_CHECK(s.width >= 1, "[search_step] width is {}, expected 1 or more", s.width);
  FRIT_CHECK(s.live_sentence.rank() == 1 && s.ids.rank() == 3,
             "[search_step] live_sentence is {} and ids {}, expected i32[sentences] and i32[2, slots, places]",
             s.live_sentence.to_string(), s.ids.to_string());
  const int64_t sentences = s.live_sentence.dim(0), slots = s.ids.dim(1), places = s.ids.dim(2);
  FRIT_CHECK(slots >= sentences * s.width, "[search_step] {} slots for {} sentences of width {}", slots, sentences,
             s.width);
  const auto i32 = [](const char* name, const Tensor& t, const Shape& shape) { expect(name, t, DType::kI32, shape); };
  const auto f32 = [](const char* name, const Tensor& t, const Shape& shape) { expect(name, t, DType::kF32, shape); };
  i32("live", s.live, {1}), i32("live_sentence", s.live_sentence, {sentences}), i32("position", s.position, {1});
  i32("prompt", s.prompt, {sentences}), i32("max_length", s.max_length, {sentences});
  i32("ids", s.ids, {2, slots, places}), i32("origin", s.origin, {2, slots, places});
  f32("scores", s.scores, {slots}), i32("ended", s.ended, {slots});
  f32("done_scores", s.done_scores, {slots}), i32("done_length", s.done_length, {slots});
  i32("done_column", s.done_column, {slots}), i32("done_ids", s.done_ids, {places, slots});
  if (s.token_scores.defined()) {
    f32("token_scores", s.token_scores, {2, slots, places});
    f32("done_token_scores", s.done_token_scores, {places, slots});
  }
  if (s.broken.defined()) i32("broken", s.broken, {sentences});
  i32("scratch", s.scratch, {2 * sentences + 2});
  expect("progress", s.progress, DType::kI64, {1});
  FRIT_CHECK(s.row_ids.rank() == 1, "[search_step] row_ids are {}, expected i32[rows]", s.row_ids.to_string());
  i32("row_ids", s.row_ids, {s.row_ids.dim(0)}), i32("row_positions", s.row_positions, {s.row_ids.dim(0)});
}

}  // namespace

void search_step(Context& context, const SearchStepArgs& a) {
  check_state(context, a.state);
  const SearchState& s = a.state;
  const bool drawn = a.drawn.defined();
  FRIT_CHECK(a.lse.defined() || drawn, "[search_step] neither candidates nor drawn tokens are given");
  const int64_t rows = drawn ? a.drawn.dim(0) : a.lse.dim(0), places = s.ids.dim(2);
  FRIT_CHECK(rows % s.width == 0 && rows / s.width <= s.live_sentence.dim(0) && rows <= s.row_ids.dim(0),
             "[search_step] {} rows, expected whole sentences of {} rows and at most {} of them", rows, s.width,
             s.live_sentence.dim(0));
  FRIT_CHECK(a.beam ? !drawn : drawn || s.width == 1, "[search_step] {} hypotheses a sentence, but none was drawn",
             s.width);
  FRIT_CHECK(a.vocabulary >= 1 && a.keep >= 1 && (!a.beam || a.keep >= 2 * s.width || a.keep >= a.vocabulary),
             "[search_step] keep is {} of {}, expected at least twice the width {}", a.keep, a.vocabulary, s.width);
  if (drawn) {
    expect("drawn", a.drawn, DType::kI32, {rows});
    expect("drawn_scores", a.drawn_scores, DType::kF32, {rows});
  } else {
    FRIT_CHECK(a.values.rank() == 2 && a.values.dim(1) >= std::min(a.keep, a.vocabulary),
               "[search_step] values are {}, expected f32[rows, {} or more]", a.values.to_string(),
               std::min(a.keep, a.vocabulary));
    const int64_t count = a.values.dim(1);
    expect("values", a.values, DType::kF32, {rows, count});
    expect("columns", a.columns, DType::kI32, {rows, count});
    expect("lse", a.lse, DType::kF32, {rows});
    const int64_t bytes = search_step_shared_bytes(s.width, a.keep, count, places, a.settings.numel());
    FRIT_CHECK(
        bytes <= context.gpu().shared_bytes_limit(),
        "[search_step] {} hypotheses a sentence with {} candidates each need {} bytes of shared memory, a block has "
        "{}: search a smaller beam",
        s.width, count, bytes, context.gpu().shared_bytes_limit());
  }
  FRIT_CHECK(a.settings.rank() == 1 && a.settings.dtype() == DType::kI32 && a.settings.numel() >= kSearchLists,
             "[search_step] settings are {}, expected i32[{} or more]", a.settings.to_string(),
             static_cast<int>(kSearchLists));
  FRIT_CHECK(a.numbers.rank() == 1 && a.numbers.dtype() == DType::kF32, "[search_step] numbers are {}, expected f32",
             a.numbers.to_string());
  if (rows == 0) return;
  search_step_gpu(context, a);
}

void search_begin(Context& context, const SearchBeginArgs& a) {
  check_state(context, a.state);
  FRIT_CHECK(a.prompt_ids.rank() == 1 && a.prompt_ids.dtype() == DType::kI32 && a.prompt_offsets.rank() == 1 &&
                 a.prompt_offsets.dtype() == DType::kI32,
             "[search_begin] prompt_ids are {} and prompt_offsets {}, expected i32[all] and i32[sentences + 1]",
             a.prompt_ids.to_string(), a.prompt_offsets.to_string());
  expect("count", a.count, DType::kI32, {1});
  search_begin_gpu(context, a);
}

}  // namespace frit
