#!/usr/bin/env python3
"""Runs an example and fails unless it ends with 0 and prints exactly what the text beside its source says.

usage: check_example.py PROGRAM [EXPECTED.txt]
"""
import subprocess
import sys


def main():
    program, *expected = sys.argv[1:]
    run = subprocess.run([program], stdout=subprocess.PIPE)
    if run.returncode != 0:
        sys.exit(f"{program} ended with {run.returncode}")
    if expected:
        with open(expected[0], "rb") as file:
            wanted = file.read()
        if run.stdout != wanted:
            sys.exit(f"{program} printed {run.stdout!r}, expected {wanted!r} ({expected[0]})")


main()
