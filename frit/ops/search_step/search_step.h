// The bookkeeping of a decoding step on the device: what GenerateOptions ask of candidates, which hypotheses go on,
// which have finished, which sentences leave the batch.
#pragma once
#include <cstdint>

#include "frit/backend/context.h"

namespace frit {

// Where a batch's search stands. All of it is device data: a recorded step is replayed unchanged.
//
// Hypothesis `beam` of sentence s has slot s * width + beam. Entry i of the batch is sentence live_sentence[i]; the
// first live[0] entries are still searched, row i * width + beam is hypothesis `beam` of entry i. Entries behind those
// are sentences that have ended: they keep their tables readable, and nothing else of them is touched.
//
// Tables have two sides: a step at position p reads side p & 1 and writes the other one, so that a hypothesis may go on
// from any other one's past.
struct SearchState {
  int64_t width = 1;     // hypotheses of a sentence
  Tensor live;           // i32 [1]
  Tensor live_sentence;  // i32 [sentences], a permutation
  Tensor position;       // i32 [1]: of the tokens that the step reads
  Tensor prompt;         // i32 [sentences]: start token and prefix
  Tensor max_length;     // i32 [sentences]: ids of a hypothesis at most
  Tensor ids;            // i32 [2, slots, places], slots = sentences * width: start token, prefix, generated
  Tensor origin;         // i32 [2, slots, places]: in whose slot the keys and values of each position lie
  Tensor token_scores;   // f32 [2, slots, places], optional
  Tensor scores;         // f32 [slots]: running sums
  Tensor ended;          // i32 [slots], greedy and sampling: this hypothesis has ended
  Tensor broken;         // i32 [sentences], optional: 1 once a log-sum-exp of the sentence was a NaN
  // Hypotheses that have finished, `width` a sentence, best first while beams are searched.
  Tensor done_scores;        // f32 [slots]
  Tensor done_length;        // i32 [slots]: ids behind the start token; 0: none has finished here
  Tensor done_column;        // i32 [slots]: in which of the sentence's columns of done_ids it lies
  Tensor done_ids;           // i32 [places, slots]: ids behind the start token
  Tensor done_token_scores;  // f32 [places, slots], optional: of the same ids (the generated ones alone)
  // What the next step reads.
  Tensor row_ids;        // i32 [rows]
  Tensor row_positions;  // i32 [rows]
  Tensor scratch;        // i32 [2 * sentences + 2], the last two zero before the first step
  Tensor progress;  // i64 [1]: steps done * 2^32 + live sentences. May lie in pinned memory, where the host sees it
};

// How the search goes, as numbers of a tensor: i32 [kSearchLists + lists].
enum SearchSetting : int {
  kSearchEarlyStopping,  // 0 false, 1 true, 2 never
  kSearchLongestBound,   // 1: "never" compares with the longest output's normaliser
  kSearchMinLength,      // ids, prompt included
  kSearchMinNew,         // generated ids
  kSearchNgram,          // 0: off
  kSearchForcedBos,      // -1: none
  kSearchForcedEos,      // -1: none
  kSearchPad,            // what an ended sample goes on with
  kSearchEos,            // how many of each there are
  kSearchSingles,
  kSearchSequences,
  kSearchLists = 16,
  // Behind those: EOS ids; banned tokens; where each banned sequence begins in this tensor, and where the last ends;
  // the sequences.
};
// And f32 [kSearchNormalisers + longest + 1].
enum SearchNumber : int {
  kSearchPenalty,      // of tokens that are there already; 1: none
  kSearchDiversity,    // what the j-th best candidate of a row loses j times before the rows of a sentence are compared
  kSearchNormalisers,  // what a score of n generated tokens is divided by, n from 0
};

struct SearchStepArgs {
  // The best of each row's logits, `count` of them, best first, and their log-sum-exp, as beam_select gives them.
  Tensor values;   // f32 [rows, count]
  Tensor columns;  // i32 [rows, count]
  Tensor lse;      // f32 [rows]
  Tensor logits;   // [rows, V], optional: read for tokens that a penalty below 1 makes likelier
  // Instead of those, what sampling drew.
  Tensor drawn;         // i32 [rows]
  Tensor drawn_scores;  // f32 [rows]: log-probabilities
  Tensor settings, numbers;
  int64_t vocabulary = 0;
  bool beam = false;  // false: every hypothesis goes its own way, by the best candidate (one a sentence) or as drawn
  int64_t keep = 1;   // candidates of a row that are looked at
  SearchState state;
};

// One step of the search for rows / width entries. Equal to what Generator does on the CPU, ties and rounding included,
// as long as `count` is at least keep + the number of tokens that settings can make less likely.
// A NaN among a row's candidates counts as -inf, as does the whole row if its log-sum-exp is NaN.
// Cost: 1 launch, a block an entry.
// Errors: std::invalid_argument if shapes or dtypes do not fit, without a GPU, or if width * keep and count need more
// shared memory than a block has.
void search_step(Context& context, const SearchStepArgs& args);
// Bytes of shared memory that such a step needs; `lists`: elements of settings.
int64_t search_step_shared_bytes(int64_t width, int64_t keep, int64_t count, int64_t places, int64_t lists);

// The state before the first step, of `sentences` sentences; those up to live_sentence's length have ended.
struct SearchBeginArgs {
  Tensor prompt_ids;      // i32 [all]: start token and prefix of every sentence, one behind the other
  Tensor prompt_offsets;  // i32 [sentences + 1], device data as the rest
  Tensor count;           // i32 [1]: sentences
  bool beam = false;
  SearchState state;  // prompt and max_length are given, the rest is written
};
// Cost: 1 launch.
void search_begin(Context& context, const SearchBeginArgs& args);

}  // namespace frit
