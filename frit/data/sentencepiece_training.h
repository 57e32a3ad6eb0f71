// Trains one SentencePiece model in this process, in silence.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "frit/data/tokenizer.h"

namespace frit {

// The serialised model of `pieces` pieces, </s> = 0 and <unk> = 1 among them. The same lines and options give the same
// bytes. Errors: frit::Error if the lines cannot fill the vocabulary, with SentencePiece's own reason.
std::string train_sentencepiece(const std::vector<std::string_view>& lines, const TokenizerTraining& options,
                                int32_t pieces);

}  // namespace frit
