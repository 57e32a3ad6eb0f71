#!/usr/bin/env python3
"""Compares two files of generated sentences (Frit's and transformers') token for token.

usage: compare_generate.py OURS.json THEIRS.json [--max-share 0.01] [--max-gap 1e-4] [--max-score 1e-4]
Each file: {"outputs": [[{"tokens": [...], "score": x}, ...] for every sentence]}, hypotheses best first; tokens after the start token, EOS included.
For every sentence whose best hypothesis differs it prints the gap between the two best scores: theirs[0] - theirs[1] when THEIRS has an n-best
list, else |ours[0] - theirs[0]|. Where tokens agree, scores must agree within --max-score (null scores are not compared).
Exit status: 0 when at most --max-share of the sentences differ, each with a gap of at most --max-gap, and scores agree; 1 otherwise.
"""
import argparse, json, sys


def read(path):
    with open(path) as f:
        data = json.load(f)
    return [[(h["tokens"], h.get("score")) for h in hyps] for hyps in data["outputs"]]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("ours")
    p.add_argument("theirs")
    p.add_argument("--max-share", type=float, default=0.01)
    p.add_argument("--max-gap", type=float, default=1e-4)
    p.add_argument("--max-score", type=float, default=1e-4)
    a = p.parse_args()
    ours, theirs = read(a.ours), read(a.theirs)
    if len(ours) != len(theirs):
        print(f"{a.ours} has {len(ours)} sentences, {a.theirs} {len(theirs)}", file=sys.stderr)
        return 1
    differ, wide, score_worst = 0, 0, 0.0
    for i, (x, y) in enumerate(zip(ours, theirs)):
        (tokens, score), (ref, ref_score) = x[0], y[0]
        if tokens == ref:
            if score is not None and ref_score is not None:
                score_worst = max(score_worst, abs(score - ref_score))
            continue
        differ += 1
        if len(y) > 1 and y[1][1] is not None:
            gap = ref_score - y[1][1]
        else:
            gap = None if score is None or ref_score is None else abs(score - ref_score)
        wide += gap is None or gap > a.max_gap
        print(json.dumps(dict(sentence=i, gap=gap, ours=dict(tokens=tokens, score=score), theirs=dict(tokens=ref, score=ref_score))))
    share = differ / max(1, len(ours))
    ok = share <= a.max_share and wide == 0 and score_worst <= a.max_score
    print(json.dumps(dict(sentences=len(ours), differ=differ, share=round(share, 5), differ_beyond_gap=wide, largest_score_difference=score_worst, ok=ok)))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
