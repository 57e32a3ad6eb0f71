#!/usr/bin/env python3
"""Makes a Marian model directory with random weights and a tokenizer trained on a text, for timing alone.

usage: make_random_model.py OUT TEXT [--preset small|base] [--vocabulary 8000] [--seed 1]
Ids as Frit's: </s> 0, <unk> 1, <pad> last with a zero row (what CTranslate2's Marian converter expects). Needs
transformers, sentencepiece.
"""
import argparse, json, pathlib

import sentencepiece
import torch
from transformers import GenerationConfig, MarianConfig, MarianMTModel

SIZES = {"small": (3, 3, 256, 1024, 8), "base": (6, 6, 512, 2048, 8)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=pathlib.Path)
    p.add_argument("text")
    p.add_argument("--preset", choices=SIZES, default="small")
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--seed", type=int, default=1)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    pad = a.vocabulary - 1
    sentencepiece.SentencePieceTrainer.train(
        input=a.text, model_prefix=str(a.out / "source"), vocab_size=pad, model_type="bpe", eos_id=0, unk_id=1, bos_id=-1, pad_id=-1,
        byte_fallback=True, input_sentence_size=200000, minloglevel=2)
    (a.out / "source.model").rename(a.out / "source.spm")
    (a.out / "source.vocab").unlink()
    (a.out / "target.spm").write_bytes((a.out / "source.spm").read_bytes())
    spm = sentencepiece.SentencePieceProcessor(model_file=str(a.out / "source.spm"))
    vocab = {spm.id_to_piece(i): i for i in range(pad)} | {"<pad>": pad}
    (a.out / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    (a.out / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="MarianTokenizer", source_lang="en", target_lang="de", unk_token="<unk>", eos_token="</s>", pad_token="<pad>",
        model_max_length=512, separate_vocabs=False)))
    encoder, decoder, width, ffn, heads = SIZES[a.preset]
    torch.manual_seed(a.seed)
    model = MarianMTModel(MarianConfig(
        vocab_size=a.vocabulary, decoder_vocab_size=a.vocabulary, d_model=width, encoder_layers=encoder, decoder_layers=decoder,
        encoder_ffn_dim=ffn, decoder_ffn_dim=ffn, encoder_attention_heads=heads, decoder_attention_heads=heads, activation_function="relu",
        scale_embedding=True, max_position_embeddings=512, pad_token_id=pad, eos_token_id=0, bos_token_id=None, decoder_start_token_id=pad,
        forced_eos_token_id=None, init_std=width ** -0.5))
    with torch.no_grad():
        model.model.shared.weight[pad] = 0
    model.generation_config = GenerationConfig(num_beams=4, max_length=512, bad_words_ids=[[pad]], decoder_start_token_id=pad, eos_token_id=0,
                                               forced_eos_token_id=0, pad_token_id=pad)
    model.save_pretrained(a.out)


if __name__ == "__main__":
    main()
