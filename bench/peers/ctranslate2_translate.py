#!/usr/bin/env python3
"""Peer: CTranslate2, on the CPU at float32 or on one NVIDIA GPU at float16.

usage: ctranslate2_translate.py DIR (--input FILE | --ids FILE.json) [--converted CT2DIR] [--beam 4] [--batch-tokens 1024] [--latency-lines 0]
       [--device cpu|cuda] [--compute-type float32|float16|bfloat16] [--threads 2] [--workers 1] [--out OUT.json] [--text OUT.txt] [--repeat 3]
       ctranslate2_translate.py --case [MODEL-SOURCExTARGET-beamK-bN ...] [--device cuda] [--compute-type float16] [--repeat 3] [--seconds 60] [--out FILE.json]

DIR is a Marian model directory. It is converted with CTranslate2's own converter (needs transformers) into CT2DIR (default DIR/ct2), which is used again for the same weights. That
converter drops the last row of the vocabulary, taking it for a pad whose embedding is zero; where that is not so the decoder would start from another vector
than the model's, so then the pad is kept, starts the decoder and is never generated ("converter": "pad kept" in the output). --threads are all CPU threads:
each of --workers has threads / workers. Prints one JSON object: tokens_per_s counts output tokens with EOS (median over repeats, tokenisation left out),
startup_s is loading the converted model and translating one short sentence, import_s importing the package; with --latency-lines the first sentences are
translated one by one too (latency_ms_p50, latency_ms_p99).

--case takes what torch_translate.py and `frit bench decode` take (nothing: the same rows): random weights, outputs of exactly TARGET tokens, one JSON object a case (ms: the median
call). A wheel built for CUDA 12 finds cuBLAS 13 where a link of the name libcublas.so.12 leads to it.
"""
import argparse, hashlib, json, os, pathlib, resource, statistics, sys, tempfile, time

t0 = time.perf_counter()
import ctranslate2
IMPORT_S = time.perf_counter() - t0
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import marian_text


def pad_keeping_loader(pad):
    """A converter that keeps the last row of the vocabulary, starts with it and never generates it."""
    from ctranslate2.converters import transformers as loaders

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

    return KeepsPad


def convert(model, out):
    """Converts a Marian directory; converted.txt in `out` says which way, "stock" or "pad kept", and of which files."""
    from ctranslate2.converters import transformers as loaders
    from transformers import MarianMTModel
    weights = MarianMTModel.from_pretrained(model)
    pad = weights.config.pad_token_id
    row = weights.model.decoder.embed_tokens.weight[pad]
    stock = pad == weights.model.decoder.embed_tokens.weight.shape[0] - 1 and not row.any()
    if not stock:
        loaders.register_loader("MarianConfig")(pad_keeping_loader(pad))
    loaders.TransformersConverter(str(model)).convert(str(out), force=True)
    how = "stock" if stock else "pad kept"
    (out / "converted.txt").write_text(how + "\n" + fingerprint(model) + "\n")


def fingerprint(model):
    """Of the files that a converted model is made of."""
    digest = hashlib.sha256()
    for name in ("config.json", "model.safetensors", "pytorch_model.bin", "vocab.json"):
        if (model / name).exists():
            digest.update(name.encode() + (model / name).read_bytes())
    return digest.hexdigest()


class NumberedPieces:
    """A tokenizer as the converter asks for it, of a model that has none."""
    eos_token, unk_token, bos_token = "t2", "t3", None

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self):
        return {f"t{i}": i for i in range(self.vocabulary)}

    def convert_ids_to_tokens(self, token):
        return f"t{token}"


def measure_case(case, a):
    """Random weights as torch_translate.py's, outputs of a fixed length."""
    import torch, transformers
    import torch_translate
    name, source, target, beam, batch = torch_translate.CASE.fullmatch(case).groups()
    source, target, beam, batch = int(source), int(target), int(beam), int(batch)
    torch.manual_seed(0)
    config = torch_translate.marian_config(transformers, name)
    model = transformers.MarianMTModel(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        spec = pad_keeping_loader(config.pad_token_id)()(model, NumberedPieces(config.vocab_size))
        spec.validate()
        spec.optimize(quantization=None)
        spec.save(folder)
        translator = ctranslate2.Translator(folder, device=a.device, compute_type=a.compute_type, intra_threads=a.threads)
    ids = torch.randint(10, 32000, (batch, source)).tolist()
    tokens = [[f"t{i}" for i in row] for row in ids]

    def call():
        t = time.perf_counter()
        results = translator.translate_batch(tokens, beam_size=beam, min_decoding_length=target, max_decoding_length=target, max_batch_size=0, return_end_token=True)
        ms = 1e3 * (time.perf_counter() - t)
        lengths = {len(r.hypotheses[0]) for r in results}
        assert lengths <= {target, target + 1}, lengths
        return ms

    call()
    ms = [call() for _ in range(a.repeat)]
    m = statistics.median(ms)
    return dict(case=case, beam=beam, batch=batch, dtype=a.compute_type, ms=round(m, 2), all_ms=[round(t, 2) for t in ms],
                output_tokens_per_s=round(1e3 * batch * target / m, 1), peer="ctranslate2 " + ctranslate2.__version__, device=a.device)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", type=pathlib.Path, nargs="?")
    p.add_argument("--case", nargs="*")
    p.add_argument("--input")
    p.add_argument("--ids")
    p.add_argument("--converted", type=pathlib.Path)
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--length-penalty", type=float, default=1.0)
    p.add_argument("--max-length", type=int, default=256, help="tokens generated at most, EOS included")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--workers", type=int, default=1)
    p.add_argument("--batch-tokens", type=int, default=1024)
    p.add_argument("--latency-lines", type=int, default=0)
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    p.add_argument("--compute-type", choices=["float32", "float16", "bfloat16"])
    p.add_argument("--seconds", type=float, default=300, help="for all cases: none is begun after them")
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--out")
    p.add_argument("--text")
    a = p.parse_args()
    if min(a.workers, a.threads, a.repeat, a.batch_tokens, a.beam) < 1:
        p.error("--workers, --threads, --repeat, --batch-tokens and --beam are at least 1")
    if a.device == "cuda" and ctranslate2.get_cuda_device_count() == 0:
        p.error("CTranslate2 finds no GPU")
    a.compute_type = a.compute_type or ("float32" if a.device == "cpu" else "float16")
    if a.case is not None:
        import torch_translate
        for bad in [c for c in a.case if not torch_translate.CASE.fullmatch(c)]:
            p.error(f"{bad} is no case like mt-base-32x32-beam4-b8")
        begin, rows, broken = time.monotonic(), [], False
        for case in a.case or torch_translate.CASES:
            try:
                row = measure_case(case, a) if time.monotonic() - begin < a.seconds else dict(case=case, error="not reached: the time given was over")
            except Exception as error:  # any: the next case goes on
                row, broken = dict(case=case, error=f"{type(error).__name__}: {error}"[:500]), True
            rows.append(row)
            print(json.dumps(row), flush=True)
            if a.out:
                pathlib.Path(a.out).write_text(json.dumps(rows, indent=1) + "\n")
        sys.exit(broken)
    if not a.model or bool(a.input) == bool(a.ids):
        p.error("give --case, or DIR and one of --input and --ids")
    converted = a.converted or a.model / "ct2"
    if not (a.model / "config.json").exists():
        p.error(f"{a.model} is no model directory: there is no config.json")
    if a.input and not pathlib.Path(a.input).exists():
        p.error(f"there is no {a.input}")
    about_conversion = converted / "converted.txt"
    if not about_conversion.exists() or about_conversion.read_text().splitlines()[1:] != [fingerprint(a.model)]:
        convert(a.model, converted)
    how = about_conversion.read_text().splitlines()[0]
    vocabulary = marian_text.Vocabulary(a.model)
    t = time.perf_counter()
    translator = ctranslate2.Translator(str(converted), device=a.device, compute_type=a.compute_type, inter_threads=a.workers, intra_threads=max(1, a.threads // a.workers))
    loaded_s = time.perf_counter() - t
    pieces = {v: k for k, v in vocabulary.ids.items()}
    sources = marian_text.read_sources(vocabulary, a)
    tokens = [[pieces[i] for i in s] for s in sources]
    options = dict(beam_size=a.beam, num_hypotheses=1, length_penalty=a.length_penalty, return_scores=True, return_end_token=True, max_input_length=0,
                   max_decoding_length=a.max_length, max_batch_size=a.batch_tokens, batch_type="tokens")
    t = time.perf_counter()
    translator.translate_batch(tokens[:1], **options)
    first_s = time.perf_counter() - t

    def timed(part):
        t = time.perf_counter()
        return translator.translate_batch(part, **options), time.perf_counter() - t

    alone = sorted(1e3 * timed([s])[1] for s in tokens[:a.latency_lines])
    at = lambda share: round(alone[round(share * (len(alone) - 1))], 2) if alone else None
    if a.device == "cuda":
        timed(tokens)  # the allocator's first requests
    seconds = []
    for _ in range(a.repeat):
        results, s = timed(tokens)
        seconds.append(s)
    outputs = [[([vocabulary.target_ids[x] for x in r.hypotheses[0]], r.scores[0])] for r in results]
    n = sum(len(o[0][0]) for o in outputs)
    s = statistics.median(seconds)
    about = dict(peer="ctranslate2 " + ctranslate2.__version__, device=a.device, compute_type=a.compute_type, converter=how, beam=a.beam, threads=a.threads,
                 workers=a.workers, batch_tokens=a.batch_tokens, sentences=len(sources), source_tokens=sum(map(len, sources)), target_tokens=n, seconds=round(s, 3),
                 tokens_per_s=round(n / s, 1), sentences_per_s=round(len(sources) / s, 2), latency_lines=len(alone), latency_ms_p50=at(0.5), latency_ms_p99=at(0.99),
                 import_s=round(IMPORT_S, 3), load_s=round(loaded_s, 3), startup_s=round(loaded_s + first_s, 3),
                 peak_rss_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
    marian_text.write_outputs(a.out, a.text, vocabulary, about, sources, outputs)
    print(json.dumps(about))


if __name__ == "__main__":
    main()
