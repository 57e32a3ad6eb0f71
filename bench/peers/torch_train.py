#!/usr/bin/env python3
"""Peer: PyTorch's time and memory for one training step of the encoder-decoder Transformer on one NVIDIA GPU, beside `frit bench step`.

usage: torch_train.py [CASE ...] [--tokens 512,1024,...] [--variants eager,sdpa,compile,graphs,compile-bf16] [--out FILE.json] [--seconds 540] [--row-seconds 150]
A case is MODEL-SENTENCESxLENGTH: mt-base-128x32 is 128 sentences of 32 source and 32 target tokens, random. Without cases: mt-base and mt-big with 128x32 and
512x32. --tokens adds cases of --model (mt-base) with so many tokens a side at length 32. The models are those of torch_transformer.py: 6+6 layers, one table of
32768, dropout 0.1 (mt-big 0.3) everywhere, label smoothing 0.1. No padding, no masks. One step is forward, backward and AdamW.

Variants, kept in bf16 autocast with fp32 parameters unless said otherwise:
  eager         attention materialised, AdamW in foreach form: operators as they come
  sdpa          scaled_dot_product_attention, fused AdamW
  compile       the same, forward and loss through torch.compile; then also the whole step (backward and update too) captured as one CUDA graph and replayed
  graphs        torch.compile(mode="reduce-overhead")
  compile-bf16  as compile, with parameters, gradients and moments in bf16 (no fp32 copy: small updates are lost)
Each figure is the median over --repeats loops of --steps steps, timed by device events without waiting in between.

--out is a list of records, rewritten after each: case, variant, precision, parameters, ms_per_step, ms (every step), ms_min, ms_q1, ms_q3, ms_max,
loop_ms (each loop's median), tokens_per_s (source and target), first_step_s (from making the model to the first step's end, compilation included, imports
not; the compiler's cache is as earlier rows left it, empty for each row with --cold), peak_mib and reserved_mib (PyTorch's allocator; not the driver's own
memory), loss, peer, device. Or case, variant and error.
"""
import argparse, os, pathlib, re, statistics, sys, tempfile, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rows

VARIANTS = {  # name: (what the record says, precision)
    "eager": ("eager", "bf16 autocast"), "sdpa": ("SDPA, fused AdamW", "bf16 autocast"), "compile": ("compile", "bf16 autocast"),
    "graphs": ("compile + CUDA graphs", "bf16 autocast"), "compile-bf16": ("compile, pure bf16", "bf16"),
}
CASES = ["mt-base-128x32", "mt-base-512x32", "mt-big-128x32", "mt-big-512x32"]


def spread(ms, loops):
    s, each = sorted(ms), len(ms) // loops
    at = lambda share: round(s[round(share * (len(s) - 1))], 4)
    return dict(ms_per_step=round(statistics.median(ms), 4), ms=[round(t, 4) for t in ms], ms_min=at(0), ms_q1=at(0.25), ms_q3=at(0.75), ms_max=at(1),
                loop_ms=[round(statistics.median(ms[i * each:(i + 1) * each]), 4) for i in range(loops)])


class Bench:
    def __init__(self, a):
        import torch  # in the worker alone
        self.torch, self.a, self.cuda = torch, a, a.device == "cuda"
        torch.set_float32_matmul_precision("high")

    def sync(self):
        if self.cuda:
            self.torch.cuda.synchronize()

    def release(self):
        self.torch._dynamo.reset()
        if not self.cuda:
            return 0
        self.torch.cuda.empty_cache()
        return self.torch.cuda.memory_allocated() / 2**20

    def times(self, step):
        """Milliseconds of each step of all loops."""
        torch, a, ms = self.torch, self.a, []
        for _ in range(a.repeats):
            if self.cuda:
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(a.steps + 1)]
                marks[0].record()
                for i in range(a.steps):
                    step(i)
                    marks[i + 1].record()
                torch.cuda.synchronize()
                ms += [x.elapsed_time(y) for x, y in zip(marks, marks[1:])]
            else:
                for i in range(a.steps):
                    begin = time.perf_counter()
                    step(i)
                    ms.append((time.perf_counter() - begin) * 1e3)
        return ms

    def memory(self):
        if not self.cuda:
            return {}
        return dict(peak_mib=round(self.torch.cuda.max_memory_allocated() / 2**20, 1), reserved_mib=round(self.torch.cuda.max_memory_reserved() / 2**20, 1))

    def measure(self, row):
        from torch_transformer import Transformer, mt_sizes
        torch, a, variant = self.torch, self.a, row["variant_key"]
        model_name, sentences, length = re.fullmatch(r"(mt-\w+)-(\d+)x(\d+)", row["case"]).groups()
        sentences, length = int(sentences), int(length)
        if a.cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_train_")
            os.environ.pop("TRITON_CACHE_DIR", None)
        torch.manual_seed(0)
        if self.cuda:
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        pure, compiled = variant == "compile-bf16", variant in ("compile", "compile-bf16", "graphs")
        sizes = mt_sizes(model_name, learned_positions=a.learned_positions)
        model = Transformer(sizes, materialised=variant == "eager", padded=False).to(a.device).train()
        if pure:
            model = model.to(torch.bfloat16)
        parameters = sum(p.numel() for p in model.parameters())
        form = dict(foreach=True) if variant == "eager" else dict(fused=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0, **form)
        forward = torch.compile(model, mode="reduce-overhead" if variant == "graphs" else None) if compiled else model
        batches = [[torch.randint(1, sizes.vocabulary, (sentences, length), device=a.device) for _ in range(3)] for _ in range(4)]

        def train(batch):
            if variant == "graphs":
                torch.compiler.cudagraph_mark_step_begin()
            # The cache of casts would be part of what a captured step replays; every weight is cast once a step anyway.
            with torch.autocast(a.device, torch.bfloat16, enabled=not pure, cache_enabled=not compiled):
                loss = forward(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        loss = None

        def step(i):
            nonlocal loss
            loss = train(batches[i % len(batches)])

        def record(what, ms, extra):
            s = spread(ms, a.repeats)
            device = torch.cuda.get_device_name() if self.cuda else "CPU"
            return dict(variant=what, precision=VARIANTS[variant][1], parameters=parameters, **s, tokens_per_s=round(2 * sentences * length / s["ms_per_step"] * 1e3),
                        **extra, **self.memory(), loss=round(loss.item(), 4), peer="torch " + torch.__version__, device=device)

        step(0)
        self.sync()
        first_step_s = time.perf_counter() - begin
        for i in range(a.warm):
            step(i)
        self.sync()
        yield record(VARIANTS[variant][0], self.times(step), dict(first_step_s=round(first_step_s, 2)))
        if variant not in ("compile", "compile-bf16") or not self.cuda or a.no_capture:
            return

        # The whole step as one graph: forward, backward and update of this very compiled model.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["capturable"] = True
        still = [t.clone() for t in batches[0]]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                train(still)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = train(still)

        def replay(i):
            for to, value in zip(still, batches[i % len(batches)]):
                to.copy_(value)
            graph.replay()

        for i in range(a.warm):
            replay(i)
        self.sync()
        yield record(VARIANTS[variant][0] + ", step captured", self.times(replay), dict(first_step_s=round(first_step_s + time.perf_counter() - begin, 2)))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*")
    p.add_argument("--tokens", default="", help="add cases with so many tokens a side, at length 32")
    p.add_argument("--model", default="mt-base", help="of --tokens")
    p.add_argument("--variants", default=",".join(VARIANTS))
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warm", type=int, default=5)
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--seconds", type=float, default=540, help="for all rows")
    p.add_argument("--row-seconds", type=float, default=150, help="for one")
    p.add_argument("--cold", action="store_true", help="an empty compiler cache for each row")
    p.add_argument("--no-capture", action="store_true")
    p.add_argument("--learned-positions", action="store_true")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tests this script")
    p.add_argument("--out")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        bench = Bench(a)
        rows.serve(bench.measure, bench.release)
        return
    cases = a.cases + [f"{a.model}-{int(n) // 32}x32" for n in a.tokens.split(",") if n] or CASES
    wanted = a.variants.split(",")
    for bad in [v for v in wanted if v not in VARIANTS] + [c for c in cases if not re.fullmatch(r"mt-(base|big|tiny)-[1-9]\d*x[1-9]\d*", c)]:
        sys.exit(f"torch_train: {bad} is neither a variant ({', '.join(VARIANTS)}) nor a case like mt-base-128x32")
    listed = [dict(case=c, variant=VARIANTS[v][0], variant_key=v) for v in wanted for c in cases]
    done = rows.run_rows(listed, a.out, worker_arguments=sys.argv[1:], row_s=a.row_seconds, total_s=a.seconds, show=lambda r: {k: v for k, v in r.items() if k != "ms"})
    sys.exit(all("error" in r for r in done))


if __name__ == "__main__":
    main()
