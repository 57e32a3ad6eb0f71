#!/usr/bin/env python3
"""What the precisions of training keep and lose: trains one configuration in each of them, at several seeds, and writes losses, speed,
memory and the share of swallowed updates as one JSON file.

usage: tools/trainer_study.py CONFIG.toml --frit build/cuda/frit [--out FILE] [--runs FOLDER] [--seeds 3] [--modes LIST] [--flags "..."]
The configuration names text, model and schedule; each run gets training.count_swallowed and a directory of its own under --runs. A mode is
a precision, with ":nearest" for 16 bits alone rounded to nearest, the published form. Runs that are there already are read, not repeated.
"""
import argparse
import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time

MODES = "bf16-master,bf16-residual,bf16-stochastic,bf16-stochastic:nearest,fp16-master,fp16-stochastic,fp16-stochastic:nearest"


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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--frit", default="build/cuda/frit")
    parser.add_argument("--out", default="bench/results/trainer-study.json")
    parser.add_argument("--runs", default="run/study")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", default=MODES)
    parser.add_argument("--flags", default="", help="more flags of frit train")
    args = parser.parse_args()
    result = {"what": "training precisions on one text", "date": datetime.date.today().isoformat(),
              "config": pathlib.Path(args.config).read_text(), "flags": args.flags, "runs": []}
    failed = False
    for seed in range(1, args.seeds + 1):
        for mode in args.modes.split(","):
            precision, _, rounding = mode.partition(":")
            folder = pathlib.Path(args.runs) / f"{mode.replace(':', '-')}-{seed}"
            begin = time.monotonic()
            if not (folder / "model" / "config.json").exists():
                command = [args.frit, "train", args.config, "--quiet", "--training.precision", precision, "--training.seed", str(seed),
                           "--training.count_swallowed", "true", "--run.directory", str(folder)] + shlex.split(args.flags)
                if rounding:
                    command += ["--training.rounding", rounding]
                done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                if done.returncode:
                    failed = True
                    print(f"{mode} seed {seed} failed: {done.stderr.strip()[-300:]}", file=sys.stderr)
                    result["runs"].append({"mode": mode, "seed": seed, "error": done.stderr.strip()[-300:]})
                    continue
            run = {"mode": mode, "seed": seed, **read_run(folder)}
            result["runs"].append(run)
            last = run["valid"][-1][1] if run["valid"] else float("nan")
            print(f"{mode:28} seed {seed}  valid {last:.4f}  swallowed {run['swallowed']}  ({time.monotonic() - begin:.0f} s)", flush=True)
            out = pathlib.Path(args.out)
            out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=out.parent, delete=False) as file:
                json.dump(result, file, indent=1)
            os.replace(file.name, out)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
