#!/usr/bin/env python3
"""Makes frit/data/testdata/marian: a tiny directory in the form of an OPUS-MT model's, and what transformers' MarianTokenizer
makes of some lines with it. Two SentencePiece models (unigram, nmt_nfkc and identity) over one vocab.json with language codes.
usage: make_tokenizer_golden.py OUT      needs: pip install transformers sentencepiece"""
import io, json, pathlib, random, sys
import sentencepiece
import transformers

out = pathlib.Path(sys.argv[1])
out.mkdir(parents=True, exist_ok=True)
ENGLISH = """the green house stands near a river and an old tree
where birds sing in May while we walk home slowly
a slower house is not a quicker house, and the birds know it
we walked along the old river; the walk was long and quiet
trees grow slowly, rivers run quickly, birds sing loudly
is the old house near the trees or near the river?""".split("\n")
GERMAN = """das grüne Haus steht nahe an einem Fluss und einem alten Baum
wo im Mai die Vögel singen, während wir langsam heim gehen
ein langsameres Haus ist kein schnelleres Haus, und die Vögel wissen es
wir gingen am alten Fluss entlang; der Weg war lang und still
Bäume wachsen langsam, Flüsse fließen schnell, Vögel singen laut
steht das alte Haus nahe bei den Bäumen oder nahe am Fluss?""".split("\n")
TEXTS = ENGLISH + GERMAN + [
    "", " ", "x", "  two  spaces  and ends ", "tab\there", "Grüße aus München: ½ Liter für 5 €…", "ﬁne ａｂｃ Å Å", "🙂 smile 👩‍👧",
    "日本語 и русский", "¿qué? ñandú", ">>de<< the green house", ">>fr<<the old tree", ">>xx<< unknown code", "no >>de<< code here",
    ">>de<<", "ßßß", "qqq zzz", "a\u00a0b\u200bc", "soft\u00adhyphen", "...", "1,234.56 % of 10^3",
]


def train(lines, size, normalization):
    # A few lines hold too few pieces: mix their words and endings into many.
    choice = random.Random(1).choice
    words = " ".join(lines).split()
    endings = ["", "", "", "er", "en", "est", "ness", "ly", "keit", "ung", "isch"]
    lines = lines + [" ".join(choice(words) + choice(endings) for _ in range(9)) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=size, model_type="unigram",
        normalization_rule_name=normalization, minloglevel=2)
    return model.getvalue()


models = {"source.spm": train(ENGLISH, 110, "nmt_nfkc"), "target.spm": train(GERMAN, 130, "identity")}
pieces = set()
for name, model in models.items():
    (out / name).write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces |= {processor.id_to_piece(i) for i in range(3, processor.get_piece_size())}
tokens = ["</s>", "<unk>", ">>de<<", ">>fr<<"] + sorted(pieces) + ["<pad>"]
(out / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}, ensure_ascii=True) + "\n")
(out / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "de", "model_max_length": 512}\n')

tokenizer = transformers.MarianTokenizer.from_pretrained(out)
golden = {"transformers": transformers.__version__, "sentencepiece": sentencepiece.__version__, "lines": []}
for text in TEXTS:
    source = tokenizer(text)["input_ids"]
    target = tokenizer(text_target=text)["input_ids"]
    golden["lines"].append({"text": text, "source": source, "target": target,
                            "decoded": tokenizer.decode([i for i in target if i != tokenizer.unk_token_id], skip_special_tokens=True,
                                                        clean_up_tokenization_spaces=False)})
(out / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
print(len(tokens), "tokens,", len(TEXTS), "lines")
