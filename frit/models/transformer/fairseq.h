// Checkpoints of fairseq's Transformer: its training arguments as a configuration, its tensors under Frit's names.
// What a directory looks like: docs/translating.md. Source: the files that fairseq 0.6 to 0.12 and its port in
// transformers (model_type fsmt) write.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "frit/models/format/safetensors.h"
#include "frit/models/transformer/config.h"

namespace frit {

// True if the text of a config.json holds the arguments of a fairseq training, json.dump(vars(args)), and no
// configuration of transformers or Frit. Errors: frit::Error if it is not a JSON object.
bool holds_fairseq_arguments(std::string_view text, std::string_view file);

// The configuration those arguments describe; vocabularies have the embeddings' sizes.
// Errors: frit::Error naming the argument, for what Frit's Transformer cannot compute, too; or the missing tensor.
TransformerConfig fairseq_config(std::string_view text, std::string_view file, const ModelTensors& tensors);

// How fairseq-generate decodes unless told otherwise: 5 beams, at most 200 tokens and EOS, a beam ends once it has as
// many hypotheses as beams, the pad token is never produced. Errors: as fairseq_config.
GenerationConfig fairseq_generation(std::string_view text, std::string_view file);

// The tensors of a model directory under Frit's names, whether the file has Frit's and transformers' names or fairseq's
// (with "model." in front, as transformers' port has them, or without). Joined projections (in_proj_weight) are cut
// into theirs, tables of learned positions lose the rows before the first position, what holds no weights is left out.
// Errors: frit::Error as ModelTensors, or if two tensors mean the same.
class CheckpointTensors {
 public:
  CheckpointTensors(const std::string& directory, const TransformerConfig& config);
  // A view whose `name` is the one in the file; null if there is none.
  const SafetensorsFile::Entry* find(std::string_view name) const;
  const std::map<std::string, SafetensorsFile::Entry, std::less<>>& entries() const { return entries_; }
  // What the file would call a tensor of ours.
  std::string file_name(const std::string& name) const;

 private:
  void add(const std::string& name, const SafetensorsFile::Entry& entry);
  void add_fairseq(std::string_view name, const SafetensorsFile::Entry& entry, const TransformerConfig& config);
  std::string directory_;
  ModelTensors tensors_;
  bool bare_names_ = false;  // fairseq's, without "model."
  std::map<std::string, SafetensorsFile::Entry, std::less<>> entries_;
};

}  // namespace frit
