#!/usr/bin/env python3
"""Peer and reference: translates with transformers' generate() on the CPU at float32, from a Marian model directory.

usage: transformers_translate.py DIR (--input FILE | --ids FILE.json) [--beam 4] [--nbest 1] [--threads 2] [--batch-tokens 1024] [--alone]
       [--length-penalty 1.0] [--early-stopping false|true|never] [--max-length 256] [--out OUT.json] [--text OUT.txt]
--ids FILE.json: {"sources": [[ids with EOS], ...]}. --alone runs every sentence by itself, so that padding changes no bit. Settings come from the
options, never from generation_config.json, except bad_words_ids [[pad]] and the forced EOS, which are always on. --max-length counts the start token.
OUT.json is what tools/compare_generate.py reads: tokens after the start token, EOS included; score = sequences_scores, null for one beam (greedy).
"""
import argparse, json, pathlib, resource, sys, time

t0 = time.perf_counter()
import torch
import transformers
from transformers import GenerationConfig, MarianMTModel
IMPORT_S = time.perf_counter() - t0
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import marian_text


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model", type=pathlib.Path)
    p.add_argument("--input")
    p.add_argument("--ids")
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--nbest", type=int, default=1)
    p.add_argument("--length-penalty", type=float, default=1.0)
    p.add_argument("--early-stopping", choices=["false", "true", "never"], default="false")
    p.add_argument("--max-length", type=int, default=256)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--batch-tokens", type=int, default=1024)
    p.add_argument("--alone", action="store_true")
    p.add_argument("--out")
    p.add_argument("--text")
    a = p.parse_args()
    if bool(a.input) == bool(a.ids):
        p.error("give one of --input and --ids")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(a.threads)
    t = time.perf_counter()
    model = MarianMTModel.from_pretrained(a.model).float().eval()
    load_s = time.perf_counter() - t
    c = model.config
    model.generation_config = GenerationConfig()
    early = {"false": False, "true": True, "never": "never"}[a.early_stopping]
    config = GenerationConfig(do_sample=False, num_beams=a.beam, num_return_sequences=a.nbest, length_penalty=a.length_penalty, early_stopping=early,
                              max_length=a.max_length, pad_token_id=c.pad_token_id, eos_token_id=c.eos_token_id, decoder_start_token_id=c.decoder_start_token_id,
                              forced_eos_token_id=c.eos_token_id, bad_words_ids=[[c.pad_token_id]], return_dict_in_generate=True, output_scores=True)
    has_text = (a.model / "vocab.json").exists()
    if not has_text and (a.input or a.text):
        p.error(f"{a.model} has no vocab.json, so it takes and gives ids alone")
    vocabulary = marian_text.Vocabulary(a.model) if has_text else None
    sources = marian_text.read_sources(vocabulary, a)
    batches = [[i] for i in range(len(sources))] if a.alone else marian_text.token_batches(sources, a.batch_tokens)
    outputs = [None] * len(sources)
    t = time.perf_counter()
    for batch in batches:
        n = max(len(sources[i]) for i in batch)
        ids = torch.tensor([sources[i] + [c.pad_token_id] * (n - len(sources[i])) for i in batch])
        mask = torch.tensor([[1] * len(sources[i]) + [0] * (n - len(sources[i])) for i in batch])
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        rows = out.sequences.tolist()
        for j, i in enumerate(batch):
            hyps = []
            for r in range(j * a.nbest, (j + 1) * a.nbest):
                if a.beam > 1:
                    length, score = int((out.beam_indices[r] >= 0).sum()), out.sequences_scores[r].item()
                else:
                    tail = rows[r][1:]
                    length, score = tail.index(c.eos_token_id) + 1 if c.eos_token_id in tail else len(tail), None
                hyps.append((rows[r][1:1 + length], score))
            outputs[i] = hyps
    s = time.perf_counter() - t
    n = sum(len(o[0][0]) for o in outputs)
    about = dict(peer="transformers " + transformers.__version__, beam=a.beam, threads=a.threads, batch_tokens=a.batch_tokens, alone=a.alone, sentences=len(sources),
                 source_tokens=sum(map(len, sources)), target_tokens=n, seconds=round(s, 3), tokens_per_s=round(n / s, 1), import_s=round(IMPORT_S, 3),
                 load_s=round(load_s, 3), peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    marian_text.write_outputs(a.out, a.text, vocabulary, about, sources, outputs)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
