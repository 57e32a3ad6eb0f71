// The GPU forms of layer_norm. Arguments are checked already.
#pragma once
#include "frit/backend/context.h"

namespace frit {

// Instances (Context::force("layer_norm_forward", name)): a thread holds 1, 2, 4 or 8 vectors of 16 bytes of a row,
// which as many warps as it takes share: one_sync_1, one_sync_2, one_sync_4, one_sync_wide (4, up to 16 warps).
// spans_2, spans_4, spans_5: blocks that stay take rows one after the other, while the next is on its way; what many
// rows of f32 take. held, of 16-bit rows alone: a row stays in registers as fp32, of one warp up to 1031 columns, else
// of several that share it evenly, at most 8; the same bits wherever rows, gamma and beta lie; what wider rows than 256
// take if it can hold them. in_place, the same rows where more than 16 MiB of them are no whole vectors: elements stay
// where they lie in memory, gamma and beta are shifted, and the sums' order depends on where a row lies; where rows of
// x and y do not lie alike, or gamma or beta does not begin at a multiple of 16 bytes, it is held's kernel. looped
// takes any width, and reads x twice. Kept to be measured, one vector a thread, and never chosen freely: two_sync
// (mean, then variance: two dependent reductions) and moments (E[x^2] - E[x]^2: relative error of the variance eps *
// (mean / std)^2).
// Cost: 1 launch; reads x once (looped: twice), gamma and beta once for each row (one_sync_1: two
// rows; spans: once a block; in_place: up to twice); 1 barrier a block, 0 when a warp owns a row; two_sync 2; spans 1,
// and 1 for each row unless a warp owns it; held and in_place 1 a row unless a warp owns it.
void layer_norm_forward_gpu(Context& context, const Tensor& x, const Tensor& gamma, const Tensor& beta, float eps,
                            const Tensor& y, const Tensor& mean, const Tensor& rstd);

// Instances (Context::force("layer_norm_backward", name)): xhat_1, xhat_2, xhat_4, spans_2, spans_4, spans_5 (vectors a
// thread holds of a row): a fixed number of blocks walks the rows, each keeps its columns' sums for dgamma and dbeta
// and writes them once, a second launch adds these. held, of 16-bit rows alone: rows go through shared memory, one or
// two ahead of the one that is computed, and are shared out as forward's held does; what wider rows than 256 take if it
// can hold them. looped takes any width. Kept to be measured, and never chosen freely:
//   dependence, slides       other forms of dx, one vector a thread: layer_norm differentiated operation by operation
//                            (two dependent reductions), and dx from the sums of g and g * x
//   column_serial, atomic, tiled_32x32, tiled_32x33, two_stage_apart      dgamma and dbeta in launches of their own,
//                            which read x and dy again. atomic adds in no fixed order.
// Cost: 2 launches; reads dy, x (and dresidual) once, writes dx once; 1 barrier for each batch of rows a block takes, 0
// when a warp owns a row (dependence 2), and 2 more.
void layer_norm_backward_gpu(Context& context, const Tensor& dy, const Tensor& x, const Tensor& gamma,
                             const Tensor& mean, const Tensor& rstd, const Tensor& dresidual, bool accumulate,
                             const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta);

}  // namespace frit
