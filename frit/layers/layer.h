// What all layers share: weights, options, the norm in front of a sublayer, and the end of one.
//
// A stack of layers is a chain of sublayers (attention, cross attention, feed-forward), each with a norm IN FRONT of
// it:
//   n = norm(x);  y = r + dropout(f(n) + bias),  r = x (pre-LN) or n (post-LN);  and one more norm behind the last.
// Post-LN in the usual writing, h' = norm(h + dropout(f(h) + bias)), is this same chain with every norm counted to the
// sublayer that follows it; its first sublayer has none (its input is the embedding). One code serves both, and what is
// kept for backward is the same: the norm's input, and the norm's output unless it is rebuilt.
//
// A sublayer's end and the norm behind it are one operator (bias_dropout_residual_norm), so a sublayer knows what lies
// above it, whose norm it fills (NormAbove), and, backward, what lies below it, whose end the norm's backward does
// along (EndBelow). A stack begins with norm_forward, and its backward with norm_backward.
//
// Weights and gradients are plain structs of Tensors of one type: `w` and `dw` go into backward side by side. Forward
// finds its input in saved.norm and keeps in `saved` what backward needs; backward releases each piece when it has
// served.
#pragma once
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "frit/backend/context.h"
#include "frit/ops/bias_activation_dropout/bias_activation_dropout.h"

namespace frit {

// y = x * weight^T + bias.
struct Linear {
  Tensor weight;  // [out, in]
  Tensor bias;    // [out]
};

// Undefined gamma: no norm.
struct LayerNorm {
  Tensor gamma, beta;  // [H]
};

// Where a sublayer stands: its path for names in plans, and the dropout sites hashed from it.
struct Place {
  Place() = default;
  explicit Place(std::string path);
  std::string path;  // "encoder.0.self_attention"
  uint32_t output = 0, probabilities = 0, activation = 0;
};

// Which tokens of a packed batch make a sequence.
struct Sequences {
  Sequences() = default;
  Sequences(Tensor offsets, int64_t longest = 0) : offsets(std::move(offsets)), longest(longest) {}
  Tensor offsets;  // i32 [sequences + 1]: sequence s has tokens [offsets[s], offsets[s+1])
  // At least the length of every sequence, for a GPU, where offsets are device data; 0: not known. A plan and the steps
  // that run from it must give values for which attention chooses the same implementation.
  int64_t longest = 0;
};

// How a stack's layers run; the same for all layers of a stack.
struct LayerOptions {
  int64_t heads = 1;
  Activation activation = Activation::kRelu;
  bool pre_norm = false;
  float eps = 1e-5f;
  float p_hidden = 0, p_attention = 0, p_activation = 0;  // chances to zero; all 0 without training
  bool training = false;                                  // false: nothing is kept for backward
  bool recompute = false;  // true: norm outputs and activations are rebuilt in backward instead of kept (the same bits)
};

// Allocates a temporary; while planning it is called path.name.
Buffer allocate(Context& context, const Place& place, Shape shape, DType dtype, std::string_view name);
// Fills a tensor with zeros; does nothing while planning.
void fill_zero(Context& context, const Tensor& tensor);

struct NormSaved {
  Buffer x;           // the norm's input [tokens, H]; without a norm the sublayer's input
  Buffer y;           // its output, if there is a norm
  Buffer mean, rstd;  // f32 [tokens]
  // What the sublayer's function reads.
  const Tensor& output() const { return y.defined() ? y.tensor() : x.tensor(); }
};

// The norm above a sublayer. Without `saved` nobody reads the sublayer's output, and it is not computed.
struct NormAbove {
  const LayerNorm* norm = nullptr;
  const Place* place = nullptr;
  NormSaved* saved = nullptr;
};
// The end of the sublayer below a norm. Without `place` there is none (an embedding lies there).
struct EndBelow {
  const Place* place = nullptr;
  Tensor dbias;  // gradient of the bias of its last linear layer
};
// The gradient of a sublayer's output. ended: the norm above has done the sublayer's end along: dz is dropout's
// backward of dy, undefined if nothing is dropped, and the bias has its gradient.
struct OutputGradient {
  Buffer dy, dz;  // [tokens, H]
  bool ended = false;
};

// Math: y = norm(x), or x itself where w has no gamma. Returns saved.output().
Tensor norm_forward(Context& context, const LayerOptions& options, const LayerNorm& w, const Place& place, Buffer x,
                    NormSaved& saved);
// Lets go of the output where backward rebuilds it.
void norm_drop_output(const LayerOptions& options, NormSaved& saved);
// The output again, rebuilt if it was let go.
Tensor norm_output(Context& context, const LayerOptions& options, const LayerNorm& w, const Place& place,
                   NormSaved& saved);
// Math: dx = norm's backward of dy + dresidual (optional), written over dy, and with `below` the end of the sublayer
// below. Releases all of saved.
OutputGradient norm_backward(Context& context, const LayerOptions& options, const LayerNorm& w, Buffer dy,
                             const Tensor& dresidual, NormSaved& saved, bool accumulate, const LayerNorm& dw,
                             const EndBelow& below);

// The end of a sublayer, and the norm above it. Math: x = residual + dropout(z + bias), over z; residual as
// options.pre_norm says; above.saved holds x and its norm.
void end_sublayer_forward(Context& context, const LayerOptions& options, const Place& place, const Tensor& bias,
                          const NormSaved& saved, Buffer z, const NormAbove& above);

// A sublayer's backward from both ends. Math: dz = dropout's backward of dy, unless the norm above has it; dout (+)=
// the gradients of the last linear layer, whose input was x. dz() is dy itself where nothing is dropped. After the
// function's backward, `finish` adds the residual and goes back through the norm.
class SublayerBackward {
 public:
  SublayerBackward(Context& context, const LayerOptions& options, const Place& place, OutputGradient dy,
                   bool accumulate, const Tensor& x, const Linear& dout);
  const Tensor& dz() const { return dz_.defined() ? dz_.tensor() : dy_.tensor(); }
  // dz is no longer read.
  void release_dz() { dz_.release(); }
  // Math: dn = da * weight (+ dy in post-LN); dx = norm's backward of dn (+ dy in pre-LN). Releases da first of all it
  // can. Shapes: da [tokens, K]; weight [K, H]; returns dx [tokens, H].
  OutputGradient finish(Buffer da, const Tensor& weight, const LayerNorm& norm, NormSaved& saved,
                        const LayerNorm& dnorm, const EndBelow& below);

 private:
  Context& context_;
  const LayerOptions& options_;
  const Place& place_;
  bool accumulate_;
  Buffer dy_, dz_;
};

}  // namespace frit
