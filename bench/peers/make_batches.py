#!/usr/bin/env python3
"""Writes the lengths of training batches, so that Frit and its peers run the same ones.

usage: make_batches.py OUT.json [--budget 4096] [--batches 60] [--seed 1] [--window 100] [--fixed SENTENCESxLENGTH]

OUT.json: a list of batches, each a list of [source tokens, target tokens], as the model sees them (no token is added later).
Lengths are lognormal (median 21, sigma 0.6, clipped to 2..250: mean 25), target = source * N(1.05, 0.15), sorted within windows of `window` batches and
shuffled; a batch holds at most `budget` tokens a side when padded to the longest sentence of both sides. The same seed gives the same batches, and fewer of
them are the first of more. --fixed 128x32: every batch is 128 sentences of 32 tokens a side.
"""
import argparse, json, math, os, pathlib, random


def make(budget, n_batches, seed=1, window=100):
    r = random.Random(seed)

    def pair():
        s = min(250, max(2, round(r.lognormvariate(math.log(21), 0.6))))
        return s, min(250, max(2, round(s * r.gauss(1.05, 0.15))))

    out = []
    while len(out) < n_batches:
        pool = sorted((pair() for _ in range(window * budget // 25)), key=lambda p: (p[1], p[0]))
        current, longest, new = [], 0, []
        for p in pool:
            m = max(longest, *p)
            if current and m * (len(current) + 1) > budget:
                new.append(current)
                current, m = [], max(p)
            current.append(p)
            longest = m
        new.append(current)
        r.shuffle(new)
        out += new
    return out[:n_batches]


def write(path, batches):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text("[\n" + ",\n".join(json.dumps(b, separators=(",", ":")) for b in batches) + "\n]\n")
    os.replace(part, path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--budget", type=int, default=4096)
    p.add_argument("--batches", type=int, default=60)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--window", type=int, default=100)
    p.add_argument("--fixed", help="SENTENCESxLENGTH")
    a = p.parse_args()
    if a.fixed:
        sentences, length = map(int, a.fixed.split("x"))
        batches = [[[length, length]] * sentences] * a.batches
    else:
        batches = make(a.budget, a.batches, a.seed, a.window)
    write(a.out, batches)
    real = sum(s + t for b in batches for s, t in b)
    padded = sum(len(b) * (max(p[0] for p in b) + max(p[1] for p in b)) for b in batches)
    print(json.dumps(dict(batches=len(batches), sentences=sum(map(len, batches)), tokens=real, fill=round(real / padded, 3))))


if __name__ == "__main__":
    main()
