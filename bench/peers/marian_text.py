"""Text and token ids of a Marian directory, without transformers' slow tokenizer: used by both translation peers."""
import json, pathlib

import sentencepiece


class Vocabulary:
    def __init__(self, directory):
        d = pathlib.Path(directory)
        self.ids = json.loads((d / "vocab.json").read_text(encoding="utf-8"))
        target = d / "target_vocab.json"
        self.target_ids = json.loads(target.read_text(encoding="utf-8")) if target.exists() else self.ids
        self.pieces = {v: k for k, v in self.target_ids.items()}
        self.source = sentencepiece.SentencePieceProcessor(model_file=str(d / "source.spm"))
        self.target = sentencepiece.SentencePieceProcessor(model_file=str(d / "target.spm"))
        self.eos, self.unk, self.pad = self.ids["</s>"], self.ids["<unk>"], self.ids["<pad>"]

    def encode(self, text):
        return [self.ids.get(p, self.unk) for p in self.source.encode(text, out_type=str)] + [self.eos]

    def decode(self, tokens):
        special = {self.eos, self.unk, self.pad}
        return self.target.decode_pieces([self.pieces[t] for t in tokens if t not in special])


def read_sources(vocabulary, args):
    """Sentences as ids: from --ids FILE.json ({"sources": [[...]]}) or from --input, one sentence a line."""
    if args.ids:
        return json.loads(pathlib.Path(args.ids).read_text())["sources"]
    text = pathlib.Path(args.input).read_text(encoding="utf-8")
    return [vocabulary.encode(line) for line in text.removesuffix("\n").split("\n")]


def write_outputs(path, text_path, vocabulary, about, sources, outputs):
    """outputs: a list of hypotheses (tokens, score) a sentence, best first; the file is what tools/compare_generate.py reads."""
    body = [[dict(tokens=t, score=s) for t, s in hyps] for hyps in outputs]
    if path:
        lines = [json.dumps(about)[1:-1], f'"sources": {json.dumps(sources)}', '"outputs": [\n' + ",\n".join(map(json.dumps, body)) + "]"]
        pathlib.Path(path).write_text("{" + ",\n".join(lines) + "}\n")
    if text_path:
        pathlib.Path(text_path).write_text("".join(vocabulary.decode(h[0][0]) + "\n" for h in outputs), encoding="utf-8")


def token_batches(sources, budget):
    """Indices sorted by length, longest first, cut so that sentences * longest stays within the budget."""
    order = sorted(range(len(sources)), key=lambda i: -len(sources[i]))
    batches, current = [], []
    for i in order:
        if current and len(sources[current[0]]) * (len(current) + 1) > budget:
            batches.append(current)
            current = []
        current.append(i)
    return batches + [current] if current else batches
