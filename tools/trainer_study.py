#!/usr/bin/env python3
"""What the precisions of training keep and lose: trains one configuration in each of them, at several seeds, and writes losses, speed,
memory and the share of swallowed updates as one JSON file.

usage: tools/trainer_study.py CONFIG.toml --frit build/cuda/frit [--out FILE] [--runs FOLDER] [--seeds 3] [--modes LIST] [--jobs 1] [--flags "..."]
The configuration names text, model and schedule; each run gets training.count_swallowed and a directory of its own under --runs. A mode is
a precision, with ":nearest" for 16 bits alone rounded to nearest, the published form. Runs that are there already are read, not repeated.
With --jobs above 1 runs share the GPU: what they learn is the same, their tokens/s are then not given.
"""
import argparse
import concurrent.futures
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

MODES = "fp32,bf16-master,bf16-residual,bf16-stochastic,bf16-stochastic:nearest,fp16-master,fp16-stochastic,fp16-stochastic:nearest"


def kind_of(name):
    """Which group of tensors a parameter belongs to."""
    if "layer_norm" in name:
        return "gamma" if name.endswith("weight") else "beta"
    if name.endswith("bias"):
        return "biases"
    return "embeddings" if "shared" in name or "embed" in name else "matrices"


def read_run(folder):
    losses, valid, speed = [], [], []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "train":
            losses.append([entry["step"], entry["loss"]])
            if entry.get("tokens_per_s"):
                speed.append(entry["tokens_per_s"])
        elif entry["kind"] == "valid":
            valid.append([entry["step"], entry["loss"]])
    counts, tensors = {}, {}
    swallowed = folder / "swallowed.jsonl"
    curve = []
    for line in swallowed.read_text().splitlines() if swallowed.exists() else []:
        entry = json.loads(line)
        moved = lost = 0
        for name, (updates, gone) in entry["tensors"].items():
            moved, lost = moved + updates, lost + gone
            for table, key in ((counts, kind_of(name)), (tensors, name)):
                total = table.setdefault(key, [0, 0])
                total[0], total[1] = total[0] + updates, total[1] + gone
        curve.append([entry["step"], round(lost / max(moved, 1), 5)])
    share = {k: round(v[1] / max(v[0], 1), 5) for k, v in counts.items()}
    worst = sorted(((v[1] / max(v[0], 1), k) for k, v in tensors.items()), reverse=True)[:5]
    return {"train": losses, "valid": valid, "tokens_per_s": sorted(speed)[len(speed) // 2] if speed else None,
            "swallowed": share, "swallowed_curve": curve, "swallowed_most": [[k, round(s, 5)] for s, k in worst]}


def train(args, mode, seed):
    """One run, read: the entry of the results."""
    precision, _, rounding = mode.partition(":")
    folder = pathlib.Path(args.runs) / f"{mode.replace(':', '-')}-{seed}"
    if not (folder / "model" / "config.json").exists():
        command = [args.frit, "train", args.config, "--quiet", "--training.precision", precision, "--training.seed", str(seed),
                   "--training.count_swallowed", "true", "--run.directory", str(folder)] + shlex.split(args.flags)
        if rounding:
            command += ["--training.rounding", rounding]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            return {"mode": mode, "seed": seed, "error": done.stderr.strip()[-300:]}
    run = {"mode": mode, "seed": seed, **read_run(folder)}
    if args.jobs > 1:
        run["tokens_per_s"] = None
    return run


def write(path, result):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(result, file, indent=1)
    os.replace(file.name, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--frit", default="build/cuda/frit")
    parser.add_argument("--out", default="bench/results/trainer-study.json")
    parser.add_argument("--runs", default="run/study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--flags", default="", help="more flags of frit train")
    args = parser.parse_args()
    result = {"what": "training precisions on one text", "date": datetime.date.today().isoformat(),
              "config": pathlib.Path(args.config).read_text(), "flags": args.flags, "runs": []}
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(train, args, mode, seed) for seed in range(1, args.seeds + 1) for mode in args.modes.split(",")]
        for done in concurrent.futures.as_completed(runs):
            run = done.result()
            result["runs"].append(run)
            if "error" in run:
                print(f"{run['mode']} seed {run['seed']} failed: {run['error']}", file=sys.stderr)
                continue
            last = run["valid"][-1][1] if run["valid"] else float("nan")
            print(f"{run['mode']:28} seed {run['seed']}  valid {last:.4f}  swallowed {run['swallowed']}  (at {time.monotonic() - begin:.0f} s)", flush=True)
            result["runs"].sort(key=lambda r: (r["seed"], args.modes.split(",").index(r["mode"])))
            write(pathlib.Path(args.out), result)
    sys.exit(1 if any("error" in run for run in result["runs"]) else 0)


if __name__ == "__main__":
    main()
