#!/usr/bin/env python3
"""Peer: translates with CTranslate2 on the CPU at float32, from a Marian model directory.

usage: ctranslate2_translate.py DIR (--input FILE | --ids FILE.json) [--converted CT2DIR] [--beam 4] [--threads 2] [--workers 1] [--batch-tokens 1024]
       [--out OUT.json] [--text OUT.txt] [--repeat 3]
DIR is converted once with CTranslate2's own converter (needs transformers) into CT2DIR (default DIR/ct2) and reused. That converter drops the last row of
the vocabulary, taking it for a pad whose embedding is zero; where that is not so the decoder would start from another vector than the model's, so then
the pad is kept, starts the decoder and is never generated ("converter": "pad kept" in the output). --threads are all CPU threads: each of --workers
has threads / workers. Prints one JSON object: tokens_per_s counts output tokens with EOS (median over repeats, tokenisation left out),
startup_s is loading the converted model and translating one short sentence, import_s importing the package.
"""
import argparse, json, os, pathlib, resource, statistics, sys, time

t0 = time.perf_counter()
import ctranslate2
IMPORT_S = time.perf_counter() - t0
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import marian_text


def convert(model, out):
    """Converts a Marian directory; returns which way, "stock" or "pad kept"."""
    from ctranslate2.converters import transformers as loaders
    from transformers import MarianMTModel
    weights = MarianMTModel.from_pretrained(model)
    pad = weights.config.pad_token_id
    row = weights.model.decoder.embed_tokens.weight[pad]
    stock = pad == weights.model.decoder.embed_tokens.weight.shape[0] - 1 and not row.any()
    if not stock:
        @loaders.register_loader("MarianConfig")
        class KeepsPad(loaders.MarianMTLoader):
            def get_vocabulary(self, model, tokenizer):
                return loaders.BartLoader.get_vocabulary(self, model, tokenizer)

            def set_config(self, config, model, tokenizer):
                super().set_config(config, model, tokenizer)
                config.decoder_start_token = tokenizer.convert_ids_to_tokens(pad)

            def set_decoder(self, spec, decoder):
                super().set_decoder(spec, decoder)
                spec.start_from_zero_embedding = False

            def get_model_spec(self, model):
                model.final_logits_bias[0, pad] = -1e9
                return super().get_model_spec(model)

            def _remove_pad_weights(self, spec):
                pass
    loaders.TransformersConverter(str(model)).convert(str(out), force=True)
    how = "stock" if stock else "pad kept"
    (out / "converted.txt").write_text(how)
    return how


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model", type=pathlib.Path)
    p.add_argument("--input")
    p.add_argument("--ids")
    p.add_argument("--converted", type=pathlib.Path)
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--length-penalty", type=float, default=1.0)
    p.add_argument("--max-length", type=int, default=256, help="tokens generated at most, EOS included")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--batch-tokens", type=int, default=1024)
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--out")
    p.add_argument("--text")
    a = p.parse_args()
    if bool(a.input) == bool(a.ids):
        p.error("give one of --input and --ids")
    converted = a.converted or a.model / "ct2"
    if not (converted / "model.bin").exists():
        convert(a.model, converted)
    how = (converted / "converted.txt").read_text() if (converted / "converted.txt").exists() else "unknown"
    vocabulary = marian_text.Vocabulary(a.model)
    t = time.perf_counter()
    translator = ctranslate2.Translator(str(converted), device="cpu", compute_type="float32", inter_threads=a.workers, intra_threads=max(1, a.threads // a.workers))
    loaded_s = time.perf_counter() - t
    pieces = {v: k for k, v in vocabulary.ids.items()}
    sources = marian_text.read_sources(vocabulary, a)
    tokens = [[pieces[i] for i in s] for s in sources]
    options = dict(beam_size=a.beam, num_hypotheses=1, length_penalty=a.length_penalty, return_scores=True, return_end_token=True, max_input_length=0,
                   max_decoding_length=a.max_length, max_batch_size=a.batch_tokens, batch_type="tokens")
    t = time.perf_counter()
    translator.translate_batch(tokens[:1], **options)
    first_s = time.perf_counter() - t
    seconds = []
    for _ in range(a.repeat):
        t = time.perf_counter()
        results = translator.translate_batch(tokens, **options)
        seconds.append(time.perf_counter() - t)
    outputs = [[([vocabulary.target_ids[x] for x in r.hypotheses[0]], r.scores[0])] for r in results]
    n = sum(len(o[0][0]) for o in outputs)
    s = statistics.median(seconds)
    about = dict(peer="ctranslate2 " + ctranslate2.__version__, converter=how, beam=a.beam, threads=a.threads, workers=a.workers, batch_tokens=a.batch_tokens, sentences=len(sources),
                 source_tokens=sum(map(len, sources)), target_tokens=n, seconds=round(s, 3), tokens_per_s=round(n / s, 1), sentences_per_s=round(len(sources) / s, 2),
                 import_s=round(IMPORT_S, 3), load_s=round(loaded_s, 3), startup_s=round(loaded_s + first_s, 3),
                 peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    marian_text.write_outputs(a.out, a.text, vocabulary, about, sources, outputs)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
