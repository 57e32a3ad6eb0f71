#!/usr/bin/env python3
"""Peer: PyTorch's time and memory for training steps over batches of real, unequal lengths on one NVIDIA GPU, beside `frit bench step --lengths`.

usage: torch_train_real.py [FILE.json ...] [--models mt-base,mt-big] [--variants sdpa,compile,cudnn] [--steps 80] [--warm 50] [--out OUT.json]
       torch_train_real.py FILE.json --memory --steps 500 [--models ...] [--variants sdpa,sdpa-expandable] [--out OUT.json]
FILE.json are batches as make_batches.py writes them; Frit runs the same files. Without files: make_batches.py's own with budgets of 4096 and 16384 and as many
batches as steps need. A case is called MODEL-FILE (mt-base-real-4096). Step i runs batch i; the first --warm ones are not timed.
A user's usual way: padded to the longest sentence of a side, a key-padding mask made from the pad id, bf16 autocast, fused AdamW, and each batch copied from
pinned memory while the step before it runs. Variants:
  sdpa             scaled_dot_product_attention without cuDNN's, which plans anew for each shape
  sdpa-expandable  the same with the allocator's expandable segments, which keep fragmentation low
  compile          torch.compile(dynamic=True) on top of sdpa; its compilation counts as warm_s
  cudnn            PyTorch as it comes: cuDNN's attention allowed. So slow that --few steps (25 of the timed batches, after 5) have to do

A row that will not end in its time (--row-seconds) stops before that with the steps it has, at least 10 timed ones, and says how many; with --memory, too.

--out is a list of records, rewritten after each: case, variant, parameters, steps, warm_steps, ms_per_step (time of all timed steps / steps, as batches
differ), ms (each step), tokens (real source and target tokens of the timed steps), tokens_per_s, fill (real / padded), first_step_s, warm_s (from making the
model to the first timed step), peak_mib, reserved_mib, loss, peer, device. With --memory also memory: allocated_mib, peak_mib and reserved_mib of each step, from the first on.
"""
import argparse, json, pathlib, statistics, sys, time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import make_batches, rows

VARIANTS = {"sdpa": "SDPA, fused AdamW", "sdpa-expandable": "SDPA, fused AdamW, expandable segments", "compile": "compile, dynamic shapes", "cudnn": "default SDPA (cuDNN plans per shape)"}


RESERVE_S = 8  # of a row's time, for what follows its last step


def batch_tensors(torch, batch, vocabulary, ignored):
    """Random ids in padded tensors: source [B, S], target and labels [B, T]. 0 is the pad id and the decoder's first token."""
    S, T = max(s for s, _ in batch), max(t for _, t in batch)
    source, labels = torch.randint(1, vocabulary, (len(batch), S)), torch.randint(1, vocabulary, (len(batch), T))
    target = torch.cat([torch.zeros(len(batch), 1, dtype=torch.long), labels[:, :-1]], 1)
    source_lengths, target_lengths = (torch.tensor(n)[:, None] for n in zip(*batch))
    source[torch.arange(S) >= source_lengths] = 0
    target[torch.arange(T) >= target_lengths] = 0
    labels[torch.arange(T) >= target_lengths] = ignored
    return source, target, labels


class Bench:
    def __init__(self, a):
        import torch
        self.torch, self.a, self.cuda, self.used_up = torch, a, a.device == "cuda", False
        torch.set_float32_matmul_precision("high")

    def release(self):
        self.torch._dynamo.reset()
        if not self.cuda:
            return 0
        self.torch.cuda.empty_cache()
        return 1e9 if self.used_up else self.torch.cuda.memory_allocated() / 2**20

    def measure(self, row):
        from torch_transformer import IGNORED, Transformer, mt_sizes
        over = row["until"] - RESERVE_S
        torch, a, variant, cuda = self.torch, self.a, row["variant_key"], self.cuda
        batches = json.loads(pathlib.Path(row["file"]).read_text())
        warm, steps = (min(5, a.warm), min(a.few, a.steps)) if variant == "cudnn" else (0 if a.memory else a.warm, a.steps)
        first = a.warm - warm if variant == "cudnn" else 0  # so that the timed batches are the first of those the others time
        batches = batches[first:first + warm + steps]
        if len(batches) < warm + steps:
            raise ValueError(f"{row['file']} has {len(batches)} batches, {warm + steps} are needed")
        if cuda:
            torch.cuda.init()
            if variant == "sdpa-expandable":
                torch.cuda.memory._set_allocator_settings("expandable_segments:True")
                self.used_up = True  # the setting stays: the next row gets another process
            torch.backends.cuda.enable_cudnn_sdp(variant == "cudnn")
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        sizes = mt_sizes(row["model"])
        data = [batch_tensors(torch, b, sizes.vocabulary, IGNORED) for b in batches]
        if cuda:
            data = [[t.pin_memory() for t in b] for b in data]
        begin = time.perf_counter()
        model = Transformer(sizes).to(a.device).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0, fused=True)
        forward = torch.compile(model, dynamic=True) if variant == "compile" else model
        sync = torch.cuda.synchronize if cuda else lambda: None
        memory = dict(allocated_mib=[], peak_mib=[], reserved_mib=[])
        marks, start, first_step_s, worst = [], 0, 0, 0

        def mark():
            if cuda:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            else:
                marks.append(time.perf_counter())

        for i, batch in enumerate(data):
            if len(marks) > 10 and time.time() > over:
                break
            if i < warm and time.time() > over - 0.2 * row["limit_s"]:
                warm = i  # what was to warm up took nearly all of the time
            if i == warm:
                sync()
                start = time.perf_counter()
                mark()
            source, target, labels = (t.to(a.device, non_blocking=True) for t in batch)
            with torch.autocast(a.device, torch.bfloat16):
                loss = forward(source, target, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if i >= warm:
                mark()
            if i == 0:
                sync()
                first_step_s = time.perf_counter() - begin
            if a.memory and cuda:  # counters of the allocator on the host: nothing waits for the GPU
                mib = lambda n: round(n / 2**20, 1)
                memory["allocated_mib"].append(mib(torch.cuda.memory_allocated()))
                memory["peak_mib"].append(mib(torch.cuda.max_memory_allocated()))
                memory["reserved_mib"].append(mib(torch.cuda.memory_reserved()))
                worst = max(worst, torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()
        sync()
        seconds, steps = time.perf_counter() - start, len(marks) - 1
        timed = batches[warm:warm + steps]
        real = sum(s + t for b in timed for s, t in b)
        padded = sum(len(b) * (max(s for s, _ in b) + max(t for _, t in b)) for b in timed)
        ms = [round(x.elapsed_time(y) if cuda else (y - x) * 1e3, 4) for x, y in zip(marks, marks[1:])]
        record = dict(parameters=sum(p.numel() for p in model.parameters()), precision="bf16 autocast", steps=steps, warm_steps=warm,
                      ms_per_step=round(seconds / steps * 1e3, 4), ms=ms, ms_median=round(statistics.median(ms), 4), tokens=real, tokens_per_s=round(real / seconds), fill=round(real / padded, 3),
                      first_step_s=round(first_step_s, 2), warm_s=round(start - begin, 2), loss=round(loss.item(), 4), peer="torch " + torch.__version__,
                      device=torch.cuda.get_device_name() if cuda else "CPU")
        if cuda:
            record |= dict(peak_mib=round(max(worst, torch.cuda.max_memory_allocated()) / 2**20, 1), reserved_mib=round(torch.cuda.max_memory_reserved() / 2**20, 1))
        if a.memory:
            record["memory"] = memory
            if cuda:
                record["reserved_mib"] = max(memory["reserved_mib"])
        yield record


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="*", type=pathlib.Path)
    p.add_argument("--models", default="mt-base,mt-big")
    p.add_argument("--variants", default="sdpa,compile,cudnn")
    p.add_argument("--steps", type=int, default=80)
    p.add_argument("--warm", type=int, default=50)
    p.add_argument("--few", type=int, default=25)
    p.add_argument("--memory", action="store_true", help="memory of each step, from the first on")
    p.add_argument("--seconds", type=float, default=540, help="for all rows")
    p.add_argument("--row-seconds", type=float, default=200, help="for one")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only tests this script")
    p.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("build/lengths"), help="where batches are written when no files are given")
    p.add_argument("--compile-only", action="store_true", help="fill the compiler's cache, all rows at once: see torch_train.py")
    p.add_argument("--out")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.worker:
        bench = Bench(a)
        rows.serve(bench.measure, bench.release)
        return
    if a.memory:
        a.warm = 0
    for v in a.variants.split(","):
        if v not in VARIANTS:
            sys.exit(f"torch_train_real: {v} is no variant ({', '.join(VARIANTS)})")
    files = a.files
    if not files:
        for budget in (4096, 16384):
            files.append(a.folder / f"real-{budget}.json")
            make_batches.write(files[-1], make_batches.make(budget, a.warm + a.steps))
    listed = [dict(case=f"{m}-{f.stem}", variant=VARIANTS[v], variant_key=v, model=m, file=str(f)) for v in a.variants.split(",") for m in a.models.split(",") for f in files]
    if a.compile_only:  # as many batches as the compiler takes to see that sizes change
        done = rows.compile_apart([r for r in listed if r["variant_key"] == "compile"], a.out, seconds=a.seconds,
                                  arguments=lambda r: [r["file"], "--models", r["model"], "--variants", "compile", "--warm", "0", "--steps", "6", "--device", a.device])
        sys.exit(bool(done) and all("error" in r for r in done))
    shown = lambda r: {k: v for k, v in r.items() if k not in ("ms", "memory")}
    done = rows.run_rows(listed, a.out, worker_arguments=sys.argv[1:], row_s=a.row_seconds, total_s=a.seconds, show=shown)
    sys.exit(all("error" in r for r in done))


if __name__ == "__main__":
    main()
