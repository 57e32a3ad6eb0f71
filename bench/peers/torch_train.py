#!/usr/bin/env python3
"""Peer: PyTorch's time and memory for one training step of the encoder-decoder Transformer on one NVIDIA GPU, beside `frit bench step`.

usage: torch_train.py [CASE ...] [--tokens 512,1024,...] [--variants LIST] [--out FILE.json] [--seconds 540] [--row-seconds 150]
A case is MODEL-SENTENCESxLENGTH: mt-base-128x32 is 128 sentences of 32 source and 32 target tokens, random. Without cases: mt-base and mt-big with 128x32 and
512x32. --tokens adds cases of --model (mt-base) with so many tokens a side at length 32. The models are those of torch_transformer.py: 6+6 layers, one table of
32768, dropout 0.1 (mt-big 0.3) everywhere, label smoothing 0.1. No padding, no masks. One step is forward, backward and AdamW.

Variants, in bf16 autocast with fp32 parameters and fused AdamW unless said otherwise:
  eager          attention materialised, AdamW in foreach form: operators as they come
  sdpa           scaled_dot_product_attention
  sdpa-captured  the same, the whole step (forward, backward, update) captured as one CUDA graph and replayed: nothing to compile
  compile        sdpa with forward and loss through torch.compile
  captured       compile, the whole step captured
  autotune       torch.compile(mode="max-autotune-no-cudagraphs"), the whole step captured; takes minutes to compile, so only where it is asked for
  graphs         torch.compile(mode="reduce-overhead"): graphs of forward and backward, the update apart
  compile-bf16   as compile, with parameters, gradients and moments in bf16 (no fp32 copy: small updates are lost)
  captured-bf16  as captured, the same
Each figure is the median over --repeats loops of --steps steps, timed by device events without waiting in between.

--out is a list of records, rewritten after each: case, variant, precision, parameters, ms_per_step, ms (every step), ms_min, ms_q1, ms_q3, ms_max,
loop_ms (each loop's median), tokens_per_s (source and target), first_step_s (from making the model to the first step's end, compilation included, imports
not; the compiler's cache is as earlier rows left it, empty for each row with --cold), peak_mib and reserved_mib (PyTorch's allocator; not the driver's own
memory), loss, peer, device. Or case, variant and error.

--compile-only compiles all rows that are to be compiled at the same time, each in a process of its own, and times nothing else: run it once, and then without
the flag and with the same TORCHINDUCTOR_CACHE_DIR, so that what is timed finds its code there. Its records: case, variant, compile_s (to the end of the first
step, while the others compiled), at_once (processes). torch_train_real.py has it too.
"""
import argparse, contextlib, dataclasses, os, pathlib, re, statistics, sys, tempfile, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import rows


@dataclasses.dataclass
class Variant:
    label: str  # what the record says
    compiled: bool = False
    mode: str | None = None  # of torch.compile
    captured: bool = False
    materialised: bool = False
    pure: bool = False  # bf16 alone
    usual: bool = True  # measured when no variants are named


VARIANTS = {
    "eager": Variant("eager", materialised=True),
    "sdpa": Variant("SDPA, fused AdamW"),
    "sdpa-captured": Variant("SDPA, step captured", captured=True),
    "compile": Variant("compile", compiled=True),
    "captured": Variant("compile, step captured", compiled=True, captured=True),
    "autotune": Variant("compile max-autotune, step captured", compiled=True, mode="max-autotune-no-cudagraphs", captured=True, usual=False),
    "graphs": Variant("compile + CUDA graphs", compiled=True, mode="reduce-overhead"),
    "compile-bf16": Variant("compile, pure bf16", compiled=True, pure=True),
    "captured-bf16": Variant("compile, pure bf16, step captured", compiled=True, captured=True, pure=True, usual=False),
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
        torch, a, v = self.torch, self.a, VARIANTS[row["variant_key"]]
        model_name, sentences, length = re.fullmatch(r"(mt-\w+)-(\d+)x(\d+)", row["case"]).groups()
        sentences, length = int(sentences), int(length)
        if a.cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="torch_train_")
            os.environ.pop("TRITON_CACHE_DIR", None)
        torch.manual_seed(0)
        if self.cuda:
            torch.cuda.init()
            torch.backends.cuda.enable_cudnn_sdp(not a.no_cudnn)
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        sizes = mt_sizes(model_name, learned_positions=a.learned_positions)
        model = Transformer(sizes, materialised=v.materialised, padded=False).to(a.device).train()
        if v.pure:
            model = model.to(torch.bfloat16)
        form = dict(foreach=True) if v.materialised else dict(fused=True)
        # capturable: the count of updates, too, stays on the GPU.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0, capturable=v.captured and self.cuda, **form)
        forward = torch.compile(model, mode=v.mode, dynamic=False) if v.compiled else model
        batches = [[torch.randint(1, sizes.vocabulary, (sentences, length), device=a.device) for _ in range(3)] for _ in range(4)]

        def train(batch):
            if v.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            # The cache of casts would be part of what a captured step replays; every weight is cast once a step anyway.
            with torch.autocast(a.device, torch.bfloat16, enabled=not v.pure, cache_enabled=not v.compiled and not v.captured):
                loss = forward(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            # Not the loss itself: it would keep the nodes of its autograd graph alive, and with them the stream on which they were made.
            return loss.detach()

        loss = None

        def step(i):
            nonlocal loss
            loss = train(batches[i % len(batches)])

        def capture():
            """The whole step as one graph over tensors that stay where they are; returns what replays it."""
            nonlocal loss
            still = [t.clone() for t in batches[0]]
            for _ in range(3):  # allocates, compiles, plans: nothing of it may happen while the graph is captured
                loss = train(still)
            replay = lambda: train(still)
            if self.cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                graph = torch.cuda.CUDAGraph()
                # Backward runs in a thread of its own; what other threads call must not spoil the graph.
                with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                    loss = train(still)
                replay = graph.replay

            def captured_step(i):
                for to, value in zip(still, batches[i % len(batches)]):
                    to.copy_(value)
                replay()

            return captured_step

        # A captured step does all of its work, the first included, on the stream of the graph: the legacy default stream cannot be captured, and a gradient's
        # accumulation runs on the stream on which its node was made.
        stream = torch.cuda.Stream() if v.captured and self.cuda else None
        self.sync()
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            if v.captured:
                step = capture()
            step(0)
            self.sync()
            first_step_s = time.perf_counter() - begin
            for i in range(a.warm):
                step(i)
            self.sync()
            s = spread(self.times(step), a.repeats)
        device = torch.cuda.get_device_name() if self.cuda else "CPU"
        yield dict(precision="bf16" if v.pure else "bf16 autocast", parameters=sum(p.numel() for p in model.parameters()), **s,
                   tokens_per_s=round(2 * sentences * length / s["ms_per_step"] * 1e3), first_step_s=round(first_step_s, 2), **self.memory(),
                   loss=round(loss.item(), 4), peer="torch " + torch.__version__, device=device)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*")
    p.add_argument("--tokens", default="", help="add cases with so many tokens a side, at length 32")
    p.add_argument("--model", default="mt-base", help="of --tokens")
    p.add_argument("--variants", default=",".join(k for k, v in VARIANTS.items() if v.usual))
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--warm", type=int, default=5)
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--seconds", type=float, default=540, help="for all rows")
    p.add_argument("--row-seconds", type=float, default=150, help="for one")
    p.add_argument("--cold", action="store_true", help="an empty compiler cache for each row")
    p.add_argument("--no-cudnn", action="store_true", help="scaled_dot_product_attention without cuDNN's")
    p.add_argument("--learned-positions", action="store_true")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tests this script")
    p.add_argument("--compile-only", action="store_true", help="fill the compiler's cache, all rows at once")
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
    listed = [dict(case=c, variant=VARIANTS[v].label, variant_key=v) for v in wanted for c in cases]
    if a.compile_only:
        flags = ["--steps", "1", "--warm", "0", "--repeats", "1", "--device", a.device] + ["--no-cudnn"] * a.no_cudnn + ["--learned-positions"] * a.learned_positions
        done = rows.compile_apart([r for r in listed if VARIANTS[r["variant_key"]].compiled], a.out, seconds=a.seconds,
                                  arguments=lambda r: [r["case"], "--variants", r["variant_key"], *flags])
        sys.exit(bool(done) and all("error" in r for r in done))
    done = rows.run_rows(listed, a.out, worker_arguments=sys.argv[1:], row_s=a.row_seconds, total_s=a.seconds, show=lambda r: {k: v for k, v in r.items() if k != "ms"})
    sys.exit(all("error" in r for r in done))


if __name__ == "__main__":
    main()
