// How softmax's kernels share a row among threads, and its dropout.
//
// G threads work on a row; vector i of thread t is the row's (i * G + t)-th vector of 16 bytes, counted from the last
// multiple of 16 bytes at or before the row's beginning, so that all but a row's first and last are whole and aligned
// at any width. The first V vectors of each thread stay in registers.
#pragma once
#include "frit/ops/softmax/gpu.h"
#include "frit/simt/launch.h"

namespace frit {

// What the kernels take beside pointers. Strides in elements.
struct SoftmaxShape {
  int64_t rows = 0, x_stride = 0, y_stride = 0, dy_stride = 0, mask_stride = 0;
  int64_t p_stride = 0, keep_stride = 0;
  int cols = 0;
  uint32_t rows_per_head = 1, first_row = 0;
  float scale = 1;
  Dropout dropout;
};

// The instances, by name; several are instances of one kernel. `any` takes any length, masks and two dtypes.
constexpr const char* kSoftmaxInstances[] = {
    "row_per_8_lanes", "row_per_16_lanes", "row_per_warp", "long_row_per_warp", "long_row_exponentials_twice",
    "row_per_2_warps", "row_per_block",    "any"};
enum SoftmaxInstance {
  kRowPer8Lanes,
  kRowPer16Lanes,
  kRowPerWarp,
  kLongRowPerWarp,
  kLongRowTwice,  // exponentials are made again rather than kept: fewer registers, more warps at a time
  kRowPer2Warps,
  kRowPerBlock,
  kAny
};
constexpr int kSoftmaxThreads = 128, kSoftmaxBlockThreads = 256;

// Threads a row and vectors a thread keeps.
constexpr int softmax_lanes(int instance) {
  constexpr int lanes[] = {8, 16, 32, 32, 32, 64, kSoftmaxBlockThreads, 32};
  return lanes[instance];
}
constexpr int softmax_vectors(int instance) {
  constexpr int vectors[] = {2, 5, 2, 9, 9, 5, 4, 2};
  return vectors[instance];
}
constexpr bool softmax_loops(int instance) {
  return instance == kRowPerBlock || instance == kAny;
}
constexpr int softmax_threads(int instance) {
  return instance == kRowPerBlock ? kSoftmaxBlockThreads : instance == kRowPer2Warps ? 64 : kSoftmaxThreads;
}
// Blocks a multiprocessor should hold at least, which bounds registers.
constexpr int softmax_blocks(int instance, bool backward) {
  constexpr int forward_blocks[] = {10, 6, 9, 4, 6, 12, 3, 6}, backward_blocks[] = {8, 5, 8, 3, 4, 10, 2, 5};
  return backward ? backward_blocks[instance] : forward_blocks[instance];
}

template <int instance>
using softmax_constant = std::integral_constant<int, instance>;
// Calls f with the instance as a constant.
template <typename F>
void for_softmax_instance(int instance, F&& f) {
  switch (instance) {
    case kRowPer8Lanes:
      return f(softmax_constant<kRowPer8Lanes>());
    case kRowPer16Lanes:
      return f(softmax_constant<kRowPer16Lanes>());
    case kRowPerWarp:
      return f(softmax_constant<kRowPerWarp>());
    case kLongRowPerWarp:
      return f(softmax_constant<kLongRowPerWarp>());
    case kLongRowTwice:
      return f(softmax_constant<kLongRowTwice>());
    case kRowPer2Warps:
      return f(softmax_constant<kRowPer2Warps>());
    case kRowPerBlock:
      return f(softmax_constant<kRowPerBlock>());
    default:
      return f(softmax_constant<kAny>());
  }
}

// The published form: y and dx have x's dtype, p and keep are defined.
void softmax_forward_stored_gpu(Context& context, const Tensor& x, const SoftmaxArgs& args, const Tensor& y,
                                const Tensor& lse);
void softmax_backward_stored_gpu(Context& context, const Tensor& dy, const Tensor& lse, const SoftmaxArgs& args,
                                 const Tensor& dx);

// Vectors that cover a row of x, wherever it begins.
inline int64_t softmax_chunks(const Tensor& x) {
  const int64_t n = 16 / size_of(x.dtype());
  const bool aligned = x.row_stride() % n == 0 && reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  return (x.dim(1) + (aligned ? 0 : n - 1) + n - 1) / n;
}
// True if rows of y (dx) and dy begin as far past a multiple of 16 bytes as the same ones of x.
inline bool softmax_rows_alike(const Tensor& x, const Tensor& y, const Tensor& dy) {
  const auto alike = [&](const Tensor& t) {
    return !t.defined() || ((t.row_stride() % 8 == x.row_stride() % 8 || x.dim(0) == 1) &&
                            reinterpret_cast<uintptr_t>(t.raw()) % 16 == reinterpret_cast<uintptr_t>(x.raw()) % 16);
  };
  return alike(y) && alike(dy);
}
inline bool softmax_strides_fit(const Tensor& x, const Tensor& y, const Tensor& dy) {
  const auto fits = [](const Tensor& t) { return !t.defined() || t.row_stride() < (int64_t{1} << 32); };
  return fits(x) && fits(y) && fits(dy);
}
// True of 16-bit rows without lengths or mask, alike in y (dx) and dy, for which the kernels of whole.h and ragged.cu
// stand where they hold a row.
inline bool softmax_plain(const Tensor& x, const SoftmaxArgs& args, const Tensor& y, const Tensor& dy) {
  return size_of(x.dtype()) == 2 && y.dtype() == x.dtype() && softmax_rows_alike(x, y, dy) &&
         softmax_strides_fit(x, y, dy) && !args.lengths.defined() && !args.mask.defined() && !args.p.defined() &&
         x.dim(0) > 0 && x.dim(0) < (int64_t{1} << 31) && x.dim(1) > 0;
}
// The instance that runs. two_dtypes: y (dx) has not x's. plain: softmax_plain.
inline int choose_softmax_instance(Context& context, const char* op, const Tensor& x, const SoftmaxArgs& args,
                                   bool two_dtypes, bool plain) {
  const int64_t chunks = softmax_chunks(x);
  const auto accepts = [&](int i) {
    if (plain && i == kRowPerWarp) return x.dim(1) / 8 <= softmax_lanes(i) * softmax_vectors(i);
    return i == kAny || (!args.mask.defined() && !two_dtypes &&
                         (i == kRowPerBlock || chunks <= softmax_lanes(i) * softmax_vectors(i)));
  };
  int fallback = kAny;
  for (int i : {kRowPer8Lanes, kRowPerWarp, kRowPer16Lanes, kLongRowPerWarp, kRowPerBlock, kAny})
    if (accepts(i)) {
      fallback = i;
      break;
    }
  return choose_instance(context, op, fmt::format("{}x{}/{}", x.dim(0), x.dim(1), name_of(x.dtype())),
                         kSoftmaxInstances, fallback, accepts);
}
inline SoftmaxShape softmax_shape(const Tensor& x, const SoftmaxArgs& args, const Tensor& y) {
  SoftmaxShape s;
  s.rows = x.dim(0), s.cols = static_cast<int>(x.dim(1));
  s.x_stride = x.row_stride(), s.y_stride = y.row_stride();
  if (args.mask.defined()) s.mask_stride = args.mask.row_stride();
  if (args.p.defined()) s.p_stride = args.p.row_stride(), s.keep_stride = args.keep.row_stride();
  s.rows_per_head = static_cast<uint32_t>(args.rows_per_head > 0 ? args.rows_per_head : std::max<int64_t>(s.rows, 1));
  s.first_row = static_cast<uint32_t>(args.first_row);
  s.scale = args.scale, s.dropout = args.dropout;
  return s;
}
// The launch of an instance over all rows.
inline Launch softmax_launch(int instance, int64_t rows) {
  const int threads = softmax_threads(instance), at_a_time = threads / softmax_lanes(instance);
  return {(rows + at_a_time - 1) / at_a_time, threads, softmax_lanes(instance) > 32 ? 64 * 4 : 0};
}

namespace simt {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Where a thread stands in its row. Rows past the last have no columns.
struct SoftmaxPlace {
  bool active = false;
  int64_t row = 0;
  int lane = 0;     // among the row's threads
  int shift = 0;    // elements by which the row begins past a multiple of 16 bytes
  int visible = 0;  // columns that are not masked by the row's length
  int cols = 0;
  int visible_chunks = 0, chunks = 0;  // vectors that hold those
};
template <int G, typename T>
FRIT_DEVICE SoftmaxPlace softmax_place(const SoftmaxShape& s, const Global<T>& x,
                                       const Global<const int32_t>& lengths) {
  constexpr int N = kVecOf<std::remove_const_t<T>>;
  SoftmaxPlace at;
  const int64_t row = block_index() * (thread_count() / G) + thread_index() / G;
  at.lane = thread_index() % G;
  at.active = row < s.rows;
  if (!at.active) return at;
  at.row = row;
  at.cols = at.visible = s.cols;
  if (lengths) {
    const int length = load(lengths, row);
    at.visible = length < 0 ? 0 : length < s.cols ? length : s.cols;
  }
  at.shift = row_shift(x + row * s.x_stride);
  at.chunks = at.cols > 0 ? (at.cols + at.shift + N - 1) / N : 0;
  at.visible_chunks = at.visible > 0 ? (at.visible + at.shift + N - 1) / N : 0;
  return at;
}

// True if vectors of x's row, which begins `shift` elements past one, are whole and aligned in `row`, too.
template <int N, typename T>
FRIT_DEVICE bool softmax_lies_like(const Global<T>& row, int shift) {
  return (row.address() / sizeof(T) - static_cast<uint64_t>(shift)) % N == 0;
}
// The N elements from `column` on, `outside` where they are not in [0, limit): one access if `vectors` and all are.
template <int N, Cache cache = Cache::kDefault, typename T>
FRIT_DEVICE Vec<std::remove_const_t<T>, N> softmax_load(const Global<T>& row, int column, int limit, bool vectors,
                                                        std::remove_const_t<T> outside) {
  const Global<T> at = row + column;
  if (vectors && column >= 0 && column + N <= limit) return load_vec<N, cache>(at, 0);
  Vec<std::remove_const_t<T>, N> v{};
  FRIT_UNROLL
  for (int i = 0; i < N; ++i) v[i] = column + i >= 0 && column + i < limit ? load<cache>(at, i) : outside;
  return v;
}
template <int N, typename T>
FRIT_DEVICE void softmax_store(const Global<T>& row, int column, int limit, bool vectors, const Vec<T, N>& v) {
  const Global<T> at = row + column;
  if (vectors && column >= 0 && column + N <= limit) return store_vec<N, Cache::kStream>(at, 0, v);
  FRIT_UNROLL
  for (int i = 0; i < N; ++i)
    if (column + i >= 0 && column + i < limit) store<Cache::kStream>(at, i, static_cast<T>(v[i]));
}

// The same vector, such that nothing made of it before is kept in registers.
template <typename T, int N>
FRIT_DEVICE Vec<T, N> softmax_forget(Vec<T, N> v) {
  if constexpr (sizeof(T) == 2) {
    FRIT_UNROLL
    for (int i = 0; i < N / 2; ++i) v.pairs[i] = opaque(v.pairs[i]);
  } else {
    FRIT_UNROLL
    for (int i = 0; i < N; ++i) v[i] = std::bit_cast<float>(opaque(std::bit_cast<uint32_t>(v[i])));
  }
  return v;
}

template <int G>
FRIT_DEVICE float softmax_max(float x, int64_t scratch) {
  if constexpr (G > 32)
    return block_max(x, shared_array<float>(scratch));
  else
    return warp_max<G>(x);
}
template <int G>
FRIT_DEVICE float softmax_sum(float x, int64_t scratch) {
  if constexpr (G > 32)
    return block_sum(x, shared_array<float>(scratch));
  else
    return warp_sum<G>(x);
}

// Which elements of a thread's V vectors dropout keeps: N bits a vector, 32 / N vectors a word. A thread makes the bits
// of the columns [N * chunk, N * chunk + N), one Philox block each; where the row is shifted, its vectors take their
// first `shift` bits from the lane before, whose last vector precedes lane 0's next one. All lanes of the warp take
// part.
template <int N, int G, int V>
FRIT_DEVICE void softmax_keep(const Dropout& dropout, uint32_t row, uint32_t head, const SoftmaxPlace& at,
                              uint32_t (&words)[(V * N + 31) / 32]) {
  static_assert(G <= 32 && (N == 4 || N == 8));
  constexpr int kPerWord = 32 / N, kWords = (V * N + 31) / 32;
  const uint32_t threshold = dropout.threshold() << 16, lane_word = head | dropout.stream << 16;
  FRIT_UNROLL
  for (int w = 0; w < kWords; ++w) {
    uint32_t word = 0;
    FRIT_UNROLL_BY(2)
    for (int j = 0; j < kPerWord; ++j) {
      const int i = w * kPerWord + j;
      if (i >= V || i * G >= at.visible_chunks) break;
      const uint32_t chunk = static_cast<uint32_t>(i * G + at.lane);
      const PhiloxBlock block = philox(dropout.key, chunk * N / 8, row, lane_word, dropout.site);
      uint32_t bits = 0;
      FRIT_UNROLL
      for (int k = 0; k < N / 2; ++k) {
        const uint32_t pair = N == 8 ? block.v[k] : chunk % 2 ? block.v[k + 2] : block.v[k];
        if ((pair << 16) >= threshold) bits |= 1u << (2 * k);
        if (pair >= threshold) bits |= 2u << (2 * k);
      }
      word |= bits << (j * N);
    }
    words[w] = word;
  }
  const int from = (lane() & ~(G - 1)) | ((at.lane + G - 1) % G);
  constexpr uint32_t kField = (1u << N) - 1, kFields = 0xffffffffu / kField;
  const uint32_t own = kFields * ((kField << at.shift) & kField);
  uint32_t carry = 0;
  FRIT_UNROLL
  for (int w = 0; w < kWords; ++w) {
    const uint32_t before = shuffle(words[w], from);
    const uint32_t previous = at.lane == 0 ? before << N | carry : before;
    carry = before >> (32 - N);
    words[w] = ((words[w] << at.shift) & own) | ((previous >> (N - at.shift)) & ~own);
  }
}

}  // namespace simt
}  // namespace frit
