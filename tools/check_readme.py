#!/usr/bin/env python3
"""Fails if README.md or a page of docs/ says what is not so:
  - a path in backquotes or a relative link that does not exist in the repository;
  - the README's C++ program is not examples/translate.cc, or its output is not examples/translate.txt.
"""
import glob
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A word in backquotes is a path of ours if it starts with one of these folders; "frit/ops/<op>/" and globs are patterns.
FOLDERS = ("frit/", "apps/", "bench/", "docs/", "examples/", "tests/", "tools/", ".ci/")


def exists(path):
    pattern = re.sub(r"<[^>]*>|\.\.\.", "*", path)
    pattern = re.sub(r"\{([^}]*)\}", "*", pattern)
    return bool(glob.glob(os.path.join(ROOT, pattern)))


def paths_of(page, text):
    for word in re.findall(r"`([^`\n]+)`", text):
        for part in word.split():
            if part.startswith(FOLDERS) and re.fullmatch(r"[\w./*{},<>-]+", part):
                yield part
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"[a-z]+:", link):
            yield os.path.relpath(os.path.join(ROOT, os.path.dirname(page), link), ROOT)


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def main():
    problems = []
    for page in ["README.md"] + sorted(os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, "docs", "*.md"))):
        for path in paths_of(page, read(page)):
            if not exists(path):
                problems.append(f"{page}: {path} does not exist")
    readme = read("README.md")
    program = re.search(r"```cpp\n(.*?)```", readme, re.S)
    source = read("examples/translate.cc")
    if not program or program.group(1) not in source:
        problems.append("README.md: its C++ program is not in examples/translate.cc")
    if "```\n" + read("examples/translate.txt") + "```" not in readme:
        problems.append("README.md: what examples/translate.txt holds is not shown as the program's output")
    sys.exit("\n".join(problems) or 0)


main()
