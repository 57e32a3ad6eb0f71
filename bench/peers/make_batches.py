#!/usr/bin/env python3
"""Writes the lengths of training batches, so that Frit and its peers run the same ones.

usage: make_batches.py OUT.json [--budget 4096] [--batches 60] [--seed 1] [--window 100]

OUT.json: a list of batches, each a list of [source tokens, target tokens], as the model sees them (no token is added later).
Lengths are lognormal (median 21, sigma 0.6, clipped to 2..250), target = source * N(1.05, 0.15), sorted within windows; a batch holds at most
`budget` tokens a side when padded to its longest sentence.
"""
import argparse, json, math, random


def make(budget, n_batches, seed, window):
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


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("out")
    a.add_argument("--budget", type=int, default=4096)
    a.add_argument("--batches", type=int, default=60)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--window", type=int, default=100)
    a = a.parse_args()
    batches = make(a.budget, a.batches, a.seed, a.window)
    with open(a.out, "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(b, separators=(",", ":")) for b in batches) + "\n]\n")
    real = sum(s + t for b in batches for s, t in b)
    padded = sum(len(b) * (max(p[0] for p in b) + max(p[1] for p in b)) for b in batches)
    print(json.dumps(dict(batches=len(batches), sentences=sum(map(len, batches)), tokens=real, fill=round(real / padded, 3))))
