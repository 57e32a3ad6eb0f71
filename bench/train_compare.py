#!/usr/bin/env python3
"""Compares Frit's training step on the CPU with PyTorch's: the same model, batches, threads; and one Adam step over Transformer-big / 8.

usage: train_compare.py [--frit build/cpu/frit] [--adam build/cpu/bench_adam] [--threads 2] [--steps 8] [--rounds 3]
       [--out bench/results/train-cpu.json]
Run it with a Python that has torch (CPU), on an idle machine. Runs go ours, theirs, ours, theirs, ... in fresh processes. Model: 3+3 layers, H 256,
8 heads, FFN 1024, one shared vocabulary of 8000, post-LN ReLU, dropout 0.1, label smoothing 0.1, Adam; batches of lognormal lengths (mean 25) under a
budget of 4,096 tokens (bench/peers/make_batches.py). Tokens a second count real source and target tokens. PyTorch's figures: padded batches, SDPA and fused
Adam ("eager"), and the same projecting real rows alone onto the vocabulary ("eager, gathered").
"""
import argparse, datetime, json, os, pathlib, platform, statistics, subprocess, sys, tempfile

HERE = pathlib.Path(__file__).resolve().parent
# Variables that bend numpy's and torch's libraries; a user's machine has none of them.
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("OPENBLAS_", "MKL_", "OMP_"))}


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=ENV)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def processor():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def table(out):
    """The rows of README.md and docs/benchmarks.md (tools/readme_numbers.py)."""
    by = {r["variant"]: r for r in out["training"]}
    best = max((by[v] for v in ("torch fp32, eager", "torch fp32, eager, gathered")), key=lambda r: r["tokens_per_s"])
    peer = best["detail"]["peer"]
    median = lambda name: next(b["real_time"] for b in out["adam_frit"] if b["name"].startswith(name) and b.get("aggregate_name") == "median")
    adam = {r["variant"]: r["ms"] for r in out["adam_torch"]}
    training = "training, 3+3 layers, H 256, real lengths"
    return [
        dict(order=10, what=f"{training}, fp32", unit="tokens/s", better="higher", frit=by["frit fp32"]["tokens_per_s"], peer=best["tokens_per_s"], peer_name=peer, goal="1.5x"),
        dict(order=11, what=f"{training}, bf16 (no bf16 hardware)", unit="tokens/s", better="higher", frit=by["frit bf16-master"]["tokens_per_s"],
             peer=by["torch bf16 autocast"]["tokens_per_s"], peer_name=peer + ", autocast", readme=False),
        dict(order=12, what="its peak memory, fp32 (the process)", unit="MiB", better="lower", frit=by["frit fp32"]["peak_rss_mib"], peer=best["peak_rss_mib"], peer_name=peer),
        dict(order=13, what="Adam, 257 tensors, 26 M parameters, fp32, one call", unit="ms", better="lower", frit=round(median("adamw/fp32"), 2), peer=adam["torch fused"],
             peer_name=peer + ", fused"),
        dict(order=14, what="Adam beside PyTorch's loop over tensors", unit="ms", better="lower", frit=round(median("adamw/fp32"), 2), peer=adam["torch loop"], peer_name=peer, readme=False),
        dict(order=15, what="Adam beside PyTorch's foreach", unit="ms", better="lower", frit=round(median("adamw/fp32"), 2), peer=adam["torch foreach"], peer_name=peer, readme=False),
        dict(order=16, what="Adam beside a plain copy of the same bytes", unit="ms", better="lower", frit=round(median("adamw/fp32"), 2), peer=round(median("copy/fp32"), 2),
             peer_name="memcpy", readme=False),
    ]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--frit", type=pathlib.Path, default=HERE.parent / "build/cpu/frit")
    p.add_argument("--adam", type=pathlib.Path, default=HERE.parent / "build/cpu/bench_adam")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", type=pathlib.Path, default=HERE / "results/train-cpu.json")
    a = p.parse_args()
    python, rows = sys.executable, []
    with tempfile.TemporaryDirectory() as temporary:
        batches = pathlib.Path(temporary) / "batches.json"
        run([python, HERE / "peers/make_batches.py", batches, "--budget", 4096, "--batches", a.steps + 2])
        ours = lambda precision: lambda: run([
            a.frit, "bench", "step", "--lengths", batches, "--steps", a.steps, "--warm", 2, "--model.preset", "transformer-small", "--model.dropout", 0.1,
            "--data.vocabulary", 8000, "--run.threads", a.threads, "--training.precision", precision])[-1]
        # Without bf16 hardware a step of PyTorch's autocast takes minutes: two steps of it have to do.
        theirs = lambda *more, steps=a.steps, warm=2: lambda: run([
            python, HERE / "peers/torch_train_cpu.py", "--batches", batches, "--threads", a.threads, "--steps", steps, "--warm", warm, *more])[-1]
        variants = {
            "frit fp32": ours("fp32"), "torch fp32, eager": theirs(), "torch fp32, eager, gathered": theirs("--gather"),
            "frit bf16-master": ours("bf16-master"), "torch bf16 autocast": theirs("--precision", "bf16", steps=2, warm=1),
        }
        results = {name: [] for name in variants}
        for round_ in range(a.rounds):
            for name, f in variants.items():
                if "bf16" in name and round_ > 0:
                    continue  # once: slow without bf16 hardware
                results[name].append(f())
                print(name, json.dumps(results[name][-1]), flush=True)
        for name, runs in results.items():
            speeds = [r["tokens_per_s"] for r in runs]
            rows.append(dict(variant=name, tokens_per_s=round(statistics.median(speeds)), lowest=round(min(speeds)), highest=round(max(speeds)), rounds=len(runs),
                             peak_rss_mib=round(max(r["peak_rss_mib"] for r in runs)), detail=runs[-1]))
    by = {r["variant"]: r for r in rows}
    best = max(by["torch fp32, eager"]["tokens_per_s"], by["torch fp32, eager, gathered"]["tokens_per_s"])
    adam = [dict(r, variant="torch " + r["variant"]) for r in run([python, HERE / "peers/torch_adam_cpu.py", "--threads", a.threads])]
    done = subprocess.run([a.adam, "--threads", str(a.threads), "--benchmark_filter=(adamw|copy)/", "--benchmark_repetitions=7", "--benchmark_format=json"],
                          capture_output=True, text=True, env=ENV)
    benchmarks = json.loads(done.stdout[done.stdout.index("{"):])["benchmarks"] if done.returncode == 0 and "{" in done.stdout else done.stderr
    out = dict(date=datetime.date.today().isoformat(), cpu=processor(), threads=a.threads, command="bench/train_compare.py " + " ".join(sys.argv[1:]), training=rows,
               ratio_fp32=round(by["frit fp32"]["tokens_per_s"] / best, 3), ratio_fp32_against="the faster of PyTorch's two fp32 variants",
               ratio_bf16=round(by["frit bf16-master"]["tokens_per_s"] / by["torch bf16 autocast"]["tokens_per_s"], 3), adam_torch=adam, adam_frit=benchmarks)
    out["machine"] = f"{out['cpu']}, {a.threads} threads"
    out["table"] = table(out)
    part = a.out.with_suffix(".part")
    part.write_text(json.dumps(out, indent=1) + "\n")
    part.rename(a.out)
    print(json.dumps({k: v for k, v in out.items() if k.startswith("ratio")}))


if __name__ == "__main__":
    main()
