#!/usr/bin/env python3
"""Prints how many sentences of a test text are nearly in the training text: the share of those that have at least 80 %
of their word 3-grams in common with one training sentence. They flatter BLEU, so the figure stands beside it.

usage: leakage.py TRAIN TEST       (one language's side of each)
"""
import collections
import sys


def trigrams(line):
    words = line.split()
    return set(zip(words, words[1:], words[2:])) or {tuple(words)}  # a shorter sentence is one gram


def main():
    train, test = sys.argv[1:]
    tests = [trigrams(line) for line in open(test, encoding="utf-8")]
    wanted = collections.defaultdict(list)
    for i, grams in enumerate(tests):
        for gram in grams:
            wanted[gram].append(i)
    leaked = set()
    for line in open(train, encoding="utf-8"):
        shared = collections.Counter(i for gram in trigrams(line) for i in wanted.get(gram, ()))
        leaked.update(i for i, n in shared.items() if n >= 0.8 * len(tests[i]))
    print(f"{100 * len(leaked) / max(1, len(tests)):.1f} % of the {len(tests)} test sentences share at least 80 % of "
          "their word 3-grams with one training sentence")


main()
