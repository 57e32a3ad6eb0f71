#!/usr/bin/env python3
"""Writes the tables of figures in README.md and docs/benchmarks.md from the measurements in bench/results/*.json, and
fails if what stands there is not what they hold.

usage: readme_numbers.py [--write]

A results file takes part if its top level is an object with "table": a list of rows
  {"order": 10, "what": "Training, 3+3 layers, H 256, fp32", "unit": "target tokens/s", "better": "higher",
   "frit": VALUE, "peer": VALUE, "peer_name": "PyTorch 2.11", "goal": "1.5x", "readme": true}
where VALUE is a number, or the dotted path of one in the same file ("runs.frit.median"). "peer", "peer_name" and "goal"
may be left out; "readme": false leaves a row to docs/benchmarks.md. "machine" and "date" at the top level are shown there.
"""
import glob
import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BEGIN, END = "<!-- numbers: written by tools/readme_numbers.py from bench/results -->", "<!-- end of numbers -->"


def value(data, given):
    if not isinstance(given, str):
        return given
    for part in given.split("."):
        data = data[int(part)] if isinstance(data, list) else data[part]
    return data


def shown(x):
    if isinstance(x, (int, float)):
        return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
    return str(x)


def rows():
    found = []
    for path in sorted(glob.glob(os.path.join(ROOT, "bench", "results", "*.json"))):
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
        if not isinstance(data, dict):
            continue
        for row in data.get("table", []):
            frit, peer = value(data, row["frit"]), value(data, row.get("peer"))
            ratio = ""
            if peer is not None:
                ratio = f"{frit / peer if row['better'] == 'higher' else peer / frit:.2f}x"
            found.append({**row, "frit": frit, "peer": peer, "ratio": ratio, "file": os.path.basename(path),
                          "machine": data.get("machine", ""), "date": data.get("date", "")})
    return sorted(found, key=lambda r: (r.get("order", 1000), r["what"]))


def table(found, full):
    if not found:
        return "No measurement is committed yet.\n"
    head = ["what", "Frit", "beside", "Frit is better by", "goal"] + (["from", "machine"] if full else [])
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    for r in found:
        beside = "" if r["peer"] is None else f"{shown(r['peer'])} ({r.get('peer_name', '')})"
        cells = [r["what"], f"**{shown(r['frit'])}** {r.get('unit', '')}", beside, r["ratio"], r.get("goal", "")]
        if full:
            cells += [f"`bench/results/{r['file']}`", f"{r['machine']} {r['date']}".strip()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    write = "--write" in sys.argv[1:]
    found = rows()
    for page, full in (("README.md", False), ("docs/benchmarks.md", True)):
        path = os.path.join(ROOT, page)
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if text.count(BEGIN) != 1 or text.count(END) != 1:
            sys.exit(f"{page}: the lines that mark the table are missing")
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        chosen = [r for r in found if full or r.get("readme", True)]
        new = f"{before}{BEGIN}\n{table(chosen, full)}{END}{after}"
        if new == text:
            continue
        if not write:
            sys.exit(f"{page}: its figures are not those of bench/results: run tools/readme_numbers.py --write")
        with open(path + ".part", "w", encoding="utf-8") as file:
            file.write(new)
        os.replace(path + ".part", path)


main()
