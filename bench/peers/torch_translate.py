#!/usr/bin/env python3
"""Peer: transformers' generate() on one NVIDIA GPU, beside `frit bench decode` and `frit translate --device cuda`.

usage: torch_translate.py [CASE ...] [--dtype fp16|bf16|fp32] [--repeat 3] [--out FILE.json] [--seconds 540] [--row-seconds 150]
       torch_translate.py --model DIR --input FILE [--beam 4] [--batch-tokens 8192] [--latency-lines 100] [--text OUT.txt] [--ids-out OUT.txt] [--dtype ...] [--out FILE.json]

A case is MODEL-SOURCExTARGET-beamK-bN as `frit bench decode --case` takes it: mt-base-32x32-beam4-b8 translates 8 sentences of 32 random tokens to 32 tokens with
beam 4. Without cases: those of Frit's table. Models are MarianMTModel with random weights: 6+6 layers, width 512 (mt-big: 1024), one table of 32768; EOS is
banned until the last token. A record: case, dtype, beam, batch, ms (the median call), all_ms, output_tokens_per_s, sentences_per_s, peak_mib (PyTorch's
allocator), peer, device. Or case and error.

With --model the file is translated: once in batches of --batch-tokens source tokens sorted by length (tokens_per_s counts output tokens with EOS, tokenisation
left out), and its first --latency-lines sentences one by one (latency_ms_p50, latency_ms_p99). --text writes the translations, --ids-out their token ids (as `frit translate --ids`).
"""
import argparse, pathlib, re, statistics, sys, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rows

CASES = [f"{model}-32x32-beam{k}-b{b}" for k in (4, 1) for model, batches in (("mt-base", (1, 8, 32, 128)), ("mt-big", (1, 32))) for b in batches]
CASE = re.compile(r"(mt-base|mt-big|mt-tiny)-([1-9]\d*)x([1-9]\d*)-beam([1-9]\d*)-b([1-9]\d*)")
SIZES = {"mt-base": (512, 8, 2048, 6), "mt-big": (1024, 16, 4096, 6), "mt-tiny": (64, 2, 128, 2)}


def marian_config(transformers, name):
    width, heads, ffn, layers = SIZES[name]
    return transformers.MarianConfig(vocab_size=32768, d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=heads,
                                     decoder_attention_heads=heads, encoder_ffn_dim=ffn, decoder_ffn_dim=ffn, activation_function="relu", pad_token_id=1,
                                     eos_token_id=2, decoder_start_token_id=1, forced_eos_token_id=None, max_position_embeddings=512)


class Bench:
    def __init__(self, a):
        import torch, transformers  # in the worker alone
        transformers.logging.set_verbosity_error()
        self.torch, self.transformers, self.a = torch, transformers, a
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[a.dtype]
        self.models = {}

    def sync(self):
        if self.a.device == "cuda":
            self.torch.cuda.synchronize()

    def about(self):
        t = self.torch
        return dict(dtype=self.a.dtype, peer=f"transformers {self.transformers.__version__}, PyTorch {t.__version__}",
                    device=t.cuda.get_device_name() if self.a.device == "cuda" else "cpu")

    def release(self):
        self.models.clear()
        if self.a.device != "cuda":
            return 0
        self.torch.cuda.empty_cache()
        return self.torch.cuda.memory_allocated() / 2**20

    def peak(self):
        return round(self.torch.cuda.max_memory_allocated() / 2**20, 1) if self.a.device == "cuda" else None

    def timed(self, call):
        self.sync()
        t = time.perf_counter()
        result = call()
        self.sync()
        return result, 1e3 * (time.perf_counter() - t)

    def measure(self, row):
        yield from (self.measure_case(row) if "case" in row else self.measure_file())

    def measure_case(self, row):
        torch, tf = self.torch, self.transformers
        name, source, target, beam, batch = CASE.fullmatch(row["case"]).groups()
        source, target, beam, batch = int(source), int(target), int(beam), int(batch)
        torch.manual_seed(0)
        config = marian_config(tf, name)
        model = tf.MarianMTModel(config).to(self.a.device, self.dtype).eval()
        ids = torch.randint(10, 32000, (batch, source), device=self.a.device)
        mask = torch.ones_like(ids)
        if self.a.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def call():
            with torch.inference_mode():
                return model.generate(input_ids=ids, attention_mask=mask, num_beams=beam, do_sample=False, min_new_tokens=target, max_new_tokens=target)

        out, _ = self.timed(call)
        assert out.shape == (batch, 1 + target), out.shape
        ms = [self.timed(call)[1] for _ in range(self.a.repeat)]
        m = statistics.median(ms)
        yield dict(beam=beam, batch=batch, ms=round(m, 2), all_ms=[round(t, 2) for t in ms], output_tokens_per_s=round(1e3 * batch * target / m, 1),
                   sentences_per_s=round(1e3 * batch / m, 1), peak_mib=self.peak(), **self.about())

    def measure_file(self):
        import marian_text
        torch, tf, a = self.torch, self.transformers, self.a
        model = tf.MarianMTModel.from_pretrained(a.model).to(a.device, self.dtype).eval()
        c = model.config
        model.generation_config = tf.GenerationConfig()
        config = tf.GenerationConfig(do_sample=False, num_beams=a.beam, max_length=c.max_position_embeddings, pad_token_id=c.pad_token_id,
                                     eos_token_id=c.eos_token_id, decoder_start_token_id=c.decoder_start_token_id, forced_eos_token_id=c.eos_token_id,
                                     bad_words_ids=[[c.pad_token_id]])
        vocabulary = marian_text.Vocabulary(a.model)
        sources = [s[:c.max_position_embeddings - 1] + s[-1:] if len(s) > c.max_position_embeddings else s for s in marian_text.read_sources(vocabulary, a)]

        def translate(batch):
            n = max(len(sources[i]) for i in batch)
            ids = torch.tensor([sources[i] + [c.pad_token_id] * (n - len(sources[i])) for i in batch], device=a.device)
            mask = torch.tensor([[1] * len(sources[i]) + [0] * (n - len(sources[i])) for i in batch], device=a.device)
            with torch.inference_mode():
                out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config).tolist()
            tails = [row[1:] for row in out]
            return [t[:t.index(c.eos_token_id) + 1] if c.eos_token_id in t else t for t in tails]

        translate([0])
        alone = [self.timed(lambda: translate([i]))[1] for i in range(min(a.latency_lines, len(sources)))]
        if a.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        outputs, seconds = [None] * len(sources), 0
        for batch in marian_text.token_batches(sources, a.batch_tokens):
            tokens, ms = self.timed(lambda: translate(batch))
            seconds += ms / 1e3
            for i, t in zip(batch, tokens):
                outputs[i] = t
        n = sum(map(len, outputs))
        if a.text:
            pathlib.Path(a.text).write_text("".join(vocabulary.decode(t) + "\n" for t in outputs), encoding="utf-8")
        if a.ids_out:
            pathlib.Path(a.ids_out).write_text("".join(" ".join(map(str, t)) + "\n" for t in outputs))
        at = lambda share: round(sorted(alone)[round(share * (len(alone) - 1))], 2) if alone else None
        yield dict(beam=a.beam, batch_tokens=a.batch_tokens, sentences=len(sources), source_tokens=sum(map(len, sources)), output_tokens=n,
                   seconds=round(seconds, 3), output_tokens_per_s=round(n / seconds, 1), latency_lines=len(alone), latency_ms_p50=at(0.5), latency_ms_p99=at(0.99),
                   peak_mib=self.peak(), **self.about())


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*")
    p.add_argument("--dtype", choices=["fp16", "bf16", "fp32"], default="fp16")
    p.add_argument("--repeat", type=int, default=3)
    p.add_argument("--model", help="a Marian directory: translate --input")
    p.add_argument("--input")
    p.add_argument("--ids", help=argparse.SUPPRESS)
    p.add_argument("--beam", type=int, default=4)
    p.add_argument("--batch-tokens", type=int, default=8192)
    p.add_argument("--latency-lines", type=int, default=100)
    p.add_argument("--text")
    p.add_argument("--ids-out")
    p.add_argument("--seconds", type=float, default=540, help="for all rows")
    p.add_argument("--row-seconds", type=float, default=150, help="for one")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tests this script")
    p.add_argument("--out")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        bench = Bench(a)
        rows.serve(bench.measure, bench.release)
        return
    if bool(a.model) != bool(a.input):
        p.error("--model and --input belong together")
    for bad in [c for c in a.cases if not CASE.fullmatch(c)]:
        p.error(f"{bad} is no case like mt-base-32x32-beam4-b8")
    listed = [dict(model=a.model, input=a.input)] if a.model else [dict(case=c) for c in a.cases or CASES]
    done = rows.run_rows(listed, a.out, worker_arguments=sys.argv[1:], row_s=a.row_seconds if not a.model else a.seconds, total_s=a.seconds,
                         show=lambda r: {k: v for k, v in r.items() if k != "all_ms"})
    sys.exit(all("error" in r for r in done))


if __name__ == "__main__":
    main()
